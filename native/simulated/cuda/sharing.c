// SPDX-License-Identifier: Apache-2.0
// Inter-process memory and events. A handle says whose memory file the bytes are in, and where; the
// process that opens it maps the same bytes. They are charged to the one that allocated them.
#include <string.h>
#include <unistd.h>

#include "simulated/cuda/pool.h"
#include "simulated/cuda/virtual.h"

#define MEMORY_MAGIC 0x4d454d49u
#define EVENT_MAGIC 0x45564e49u

typedef struct memory_handle {
  uint32_t magic;
  int32_t pid, descriptor, gpu;
  uint64_t offset, size, id;
  uint64_t start_time;  // of the process: its pid may be another's by now
} memory_handle;

typedef struct event_handle {
  uint32_t magic, index, serial;
} event_handle;

_Static_assert(sizeof(memory_handle) <= sizeof(CUipcMemHandle), "fits the handle");
_Static_assert(sizeof(memory_handle) <= sizeof(CUmemPoolPtrExportData), "fits the pointer's data");
_Static_assert(sizeof(event_handle) <= sizeof(CUipcEventHandle), "fits the handle");

static const allot_process *own_process(void) {
  return &driver.machine.machine->processes[driver.machine.slot];
}

static bool describe(const range *shared, memory_handle *handle) {
  *handle = (memory_handle){.magic = MEMORY_MAGIC,
                            .pid = own_process()->pid,
                            .gpu = shared->gpu,
                            .size = shared->size,
                            .id = shared->id,
                            .start_time = own_process()->start_time};
  int descriptor;
  if (!address_file(shared->base, &descriptor, &handle->offset)) return false;
  handle->descriptor = descriptor;
  return true;
}

static bool is_owner_alive(const memory_handle *handle) {
  for (int slot = 0; slot < allot_machine_high(&driver.machine); slot++) {
    const allot_process *owner = &driver.machine.machine->processes[slot];
    if (allot_machine_taken(&driver.machine, slot) && owner->pid == handle->pid &&
        owner->start_time == handle->start_time) {
      return true;
    }
  }
  return false;
}

static CUresult open_memory(const memory_handle *handle, enum range_kind kind, range **opened) {
  if (handle->magic != MEMORY_MAGIC || handle->gpu < 0 || handle->gpu >= ALLOT_MACHINE_GPUS) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (driver_ordinal(handle->gpu) < 0) return CUDA_ERROR_INVALID_DEVICE;
  if (!is_owner_alive(handle)) return CUDA_ERROR_INVALID_VALUE;
  int descriptor = handoff_open(handle->pid, handle->descriptor);
  if (descriptor < 0) return CUDA_ERROR_MAP_FAILED;
  *opened = handoff_map_locked(descriptor, handle->offset, handle->size, handle->gpu, kind);
  close(descriptor);
  if (*opened == NULL) return CUDA_ERROR_MAP_FAILED;
  (*opened)->imported_id = handle->id;
  (*opened)->imported_pid = handle->pid;
  return CUDA_SUCCESS;
}

// ---- memory ------------------------------------------------------------------------------------

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
  ENTER_CONTEXT(current);
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  memset(handle, 0, sizeof *handle);
  memory_handle described;
  LOCK();
  range *shared = range_find(address);
  bool plain = shared != NULL && (shared->kind == RANGE_PLAIN || shared->kind == RANGE_SMALL);
  bool right = plain && describe(shared, &described);
  if (right) shared->touched = true;  // others write it unseen
  UNLOCK();
  if (!right) return CUDA_ERROR_INVALID_VALUE;
  memcpy(handle, &described, sizeof described);
  return CUDA_SUCCESS;
}

static range *opened_before(const memory_handle *handle) {
  for (range *one = range_first(0); one != NULL; one = range_first(one->base + 1)) {
    if (one->kind == RANGE_IMPORTED && one->imported_id == handle->id &&
        one->imported_pid == handle->pid) {
      return one;
    }
  }
  return NULL;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
  ENTER_CONTEXT(current);
  if (address == NULL || flags > CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return CUDA_ERROR_INVALID_VALUE;
  memory_handle described;
  memcpy(&described, &handle, sizeof described);
  // A process cannot open what it shares itself.
  if (described.magic == MEMORY_MAGIC && described.pid == own_process()->pid &&
      described.start_time == own_process()->start_time) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  LOCK();
  range *opened = opened_before(&described);
  CUresult result = CUDA_SUCCESS;
  if (opened != NULL) {
    opened->references++;
  } else {
    result = open_memory(&described, RANGE_IMPORTED, &opened);
    if (result == CUDA_SUCCESS) opened->owner = current;
  }
  if (result == CUDA_SUCCESS) *address = opened->base;
  UNLOCK();
  return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
  return cuIpcOpenMemHandle_v2(address, handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  ENTER_CONTEXT(current);
  context_drain(current->gpu, current);
  LOCK();
  range *closed = range_find(address);
  bool right = closed != NULL && closed->kind == RANGE_IMPORTED && closed->base == address;
  if (right && --closed->references == 0) memory_free_locked(closed);
  UNLOCK();
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- pools -------------------------------------------------------------------------------------

void pool_close(pool *dying) {
  if (dying->descriptor >= 0) close(dying->descriptor);
  dying->descriptor = -1;
}

// The file only names the pool; its memory comes pointer by pointer.
CUresult cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool handle,
                                          CUmemAllocationHandleType type,
                                          unsigned long long flags) {
  pool *exported;
  TRY(pool_of(handle, &exported));
  if (shareable == NULL || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((exported->handle_types & type) == 0 || type == CU_MEM_HANDLE_TYPE_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  if (exported->descriptor < 0) {
    char name[120];
    handoff_name(name, sizeof name, "pool", exported->place.gpu, exported->head.id);
    exported->descriptor = memfd_file(name);
  }
  int given = exported->descriptor >= 0 ? dup(exported->descriptor) : -1;
  UNLOCK();
  if (given < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  memcpy(shareable, &given, sizeof given);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *handle, void *shareable,
                                            CUmemAllocationHandleType type,
                                            unsigned long long flags) {
  ENTER();
  if (handle == NULL || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  int gpu;
  uint64_t id;
  if (!handoff_read_name((int)(intptr_t)shareable, "pool", &gpu, &id)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (driver_ordinal(gpu) < 0) return CUDA_ERROR_INVALID_DEVICE;
  pool_place place = pool_place_on(gpu);
  LOCK();
  pool *made = pool_new(&place);
  if (made != NULL) made->imported = true;
  UNLOCK();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemoryPool)made;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr address) {
  ENTER();
  if (data == NULL) return CUDA_ERROR_INVALID_VALUE;
  memory_handle described;
  LOCK();
  range *shared = range_find(address);
  bool right = shared != NULL && shared->kind == RANGE_POOL && shared->base == address &&
               ((pool *)shared->origin)->descriptor >= 0 && describe(shared, &described);
  if (right) shared->touched = true;
  UNLOCK();
  if (!right) return CUDA_ERROR_INVALID_VALUE;
  memset(data, 0, sizeof *data);
  memcpy(data, &described, sizeof described);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *address, CUmemoryPool handle,
                                CUmemPoolPtrExportData *data) {
  pool *into;
  TRY(pool_of(handle, &into));
  if (address == NULL || data == NULL || !into->imported) return CUDA_ERROR_INVALID_VALUE;
  memory_handle described;
  memcpy(&described, data, sizeof described);
  LOCK();
  range *opened = NULL;
  // EXTERNAL, because it is given up by cuMemFree and cuMemFreeAsync, not by closing a handle.
  CUresult result = open_memory(&described, RANGE_EXTERNAL, &opened);
  if (result == CUDA_SUCCESS) {
    opened->origin = into;
    *address = opened->base;
  }
  UNLOCK();
  return result;
}

// ---- events ------------------------------------------------------------------------------------

static uint64_t event_state(uint32_t references, uint32_t serial) {
  return (uint64_t)references << 32 | serial;
}

bool shared_event_make(event *made) {
  allot_machine *machine = driver.machine.machine;
  uint32_t serial = __atomic_add_fetch(&machine->event_serial, 1, __ATOMIC_SEQ_CST);
  for (int index = 0; index < ALLOT_SHARED_EVENTS; index++) {
    allot_shared_event *shared = &machine->events[index];
    uint64_t seen = allot_load(&shared->state);
    if (seen >> 32 != 0) continue;
    if (!__atomic_compare_exchange_n(&shared->state, &seen, event_state(1, serial), false,
                                     __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      continue;
    }
    allot_store(&shared->owner, (uint32_t)driver.machine.slot + 1);
    allot_store(&shared->recorded, (allot_point)0);
    made->shared = index;
    made->serial = serial;
    return true;
  }
  return false;
}

static bool change_references(allot_shared_event *shared, uint32_t serial, int change) {
  uint64_t seen = allot_load(&shared->state);
  for (;;) {
    if ((uint32_t)seen != serial || seen >> 32 == 0) return false;
    uint64_t wanted = event_state((uint32_t)((int64_t)(seen >> 32) + change), serial);
    if (__atomic_compare_exchange_n(&shared->state, &seen, wanted, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST)) {
      return true;
    }
  }
}

static allot_shared_event *shared_of(const event *asked) {
  return &driver.machine.machine->events[asked->shared];
}

void shared_event_release(event *dying) {
  if (dying->shared < 0) return;
  change_references(shared_of(dying), dying->serial, -1);
  dying->shared = -1;
}

void shared_event_record(event *recorded, allot_point point) {
  if (recorded->shared >= 0) allot_store(&shared_of(recorded)->recorded, point);
}

allot_point shared_event_point(const event *asked) {
  return allot_load(&shared_of(asked)->recorded);
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event_handle_) {
  ENTER();
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (!object_valid(event_handle_, OBJECT_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  const event *shared = (event *)event_handle_;
  if (shared->shared < 0 || shared->imported) return CUDA_ERROR_INVALID_HANDLE;
  event_handle described = {
      .magic = EVENT_MAGIC, .index = (uint32_t)shared->shared, .serial = shared->serial};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &described, sizeof described);
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenEventHandle(CUevent *opened, CUipcEventHandle handle) {
  ENTER_CONTEXT(current);
  event_handle described;
  memcpy(&described, &handle, sizeof described);
  if (opened == NULL || described.magic != EVENT_MAGIC || described.index >= ALLOT_SHARED_EVENTS) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  allot_shared_event *shared = &driver.machine.machine->events[described.index];
  if (!change_references(shared, described.serial, 1)) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  event *made = object_new(OBJECT_EVENT, sizeof(event), current);
  if (made != NULL) {
    made->owner = current;
    made->flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    made->shared = (int)described.index;
    made->serial = described.serial;
    made->imported = true;
  }
  UNLOCK();
  if (made == NULL) {
    change_references(shared, described.serial, -1);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *opened = (CUevent)made;
  return CUDA_SUCCESS;
}
