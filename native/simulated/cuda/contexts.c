// SPDX-License-Identifier: Apache-2.0
// The life of contexts: primary ones, which all users of a device share, and explicit ones.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

// In a context's first version, as drivers since CUDA 4 report it.
#define API_VERSION 3020

static void count_contexts(int gpu, int change) {
  allot_machine *machine = driver.machine.machine;
  uint32_t *contexts = &machine->processes[driver.machine.slot].gpus[gpu].contexts;
  __atomic_add_fetch(contexts, (uint32_t)change, __ATOMIC_SEQ_CST);
}

static void set_default_limits(context *made) {
  made->limits[CU_LIMIT_STACK_SIZE] = DEFAULT_STACK_BYTES;
  made->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = MIB;
  made->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 * MIB;
  made->limits[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2;
  made->limits[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
  made->limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
}

// In a compute mode other than the default a GPU is for one process, or for nobody. What has a
// context and is dead is nobody. MPS clients are let in by their server, which has its own.
static bool is_taken(int gpu) {
  allot_handle *own = &driver.machine;
  int place = driver_place(gpu);
  uint32_t mode = allot_load(&own->machine->engines[place].compute_mode);
  if (mode == CU_COMPUTEMODE_DEFAULT || allot_mps_is_client(own, own->slot)) return false;
  if (mode == CU_COMPUTEMODE_PROHIBITED) return true;
  allot_machine_reap(own);
  for (int slot = 0; slot < allot_machine_high(own); slot++) {
    if (slot == own->slot || !allot_machine_taken(own, slot)) continue;
    if (allot_compute_place(own, slot, gpu) != place) continue;
    if (allot_load(&own->machine->processes[slot].gpus[gpu].contexts) != 0) return true;
  }
  return false;
}

// Takes what a context costs and makes its default stream.
static CUresult begin(context *made) {
  if (is_taken(made->gpu)) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  if (!allot_ring_prepare(&driver.machine, made->gpu)) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!allot_gpu_take(&driver.machine, made->gpu, driver_description(made->gpu)->context_bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  made->legacy = object_new(OBJECT_STREAM, sizeof(stream), NULL);
  if (made->legacy == NULL) {
    allot_gpu_give_back(&driver.machine, made->gpu, driver_description(made->gpu)->context_bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  made->legacy->owner = made;
  made->legacy->legacy = true;
  made->active = true;
  set_default_limits(made);
  count_contexts(made->gpu, 1);
  return CUDA_SUCCESS;
}

// Brings a context to life. What it is on is neither cut nor given back meanwhile.
static CUresult start(context *made) {
  int lock;
  TRY(mig_hold(made->gpu, &lock));
  CUresult result = begin(made);
  mig_release(made->gpu, lock);
  return result;
}

static void destroy_child(object *child) {
  switch (child->kind) {
    case OBJECT_STREAM:
      stream_destroy_locked((stream *)child);
      return;
    case OBJECT_EVENT:
      event_destroy_locked((event *)child);
      return;
    case OBJECT_MODULE:
      module_destroy_locked((module *)child);
      return;
    case OBJECT_ARRAY:
      array_destroy_locked((array *)child);
      return;
    case OBJECT_MIPMAP:
      mipmap_destroy_locked((struct mipmap *)child);
      return;
    default:
      object_free(child);
  }
}

void context_destroy_children(context *dying) {
  while (dying->head.children != NULL) destroy_child(dying->head.children);
}

// Ends all that the context has. Its works are over before; with driver.lock held.
static void stop(context *dying) {
  context_destroy_children(dying);
  for (range *at = range_first(0), *next; at != NULL; at = next) {
    next = range_first(at->base + 1);
    if (at->owner == dying) memory_free_locked(at);
  }
  small_drop_all(dying);
  while (dying->per_thread != NULL) {
    stream *own = dying->per_thread;
    dying->per_thread = own->sibling;
    object_free(own);
  }
  object_free(dying->legacy);
  dying->legacy = NULL;
  dying->legacy_last = 0;
  dying->blocking = 0;
  dying->peers = 0;
  dying->active = false;
  allot_gpu_give_back(&driver.machine, dying->gpu,
                      driver_description(dying->gpu)->context_bytes + dying->stack_bytes);
  dying->stack_bytes = 0;
  count_contexts(dying->gpu, -1);
}

allot_point context_pending(int gpu, const context *only, unsigned flags, uint64_t head) {
  allot_ring *ring = allot_ring_of(&driver.machine, driver.machine.slot, gpu);
  for (uint64_t number = head; number > allot_load(&ring->tail); number--) {
    const allot_work *work = allot_ring_work(ring, number);
    uint32_t owner = __atomic_load_n(&work->context, __ATOMIC_RELAXED);
    if (only != NULL && owner != (uint32_t)only->head.id) continue;
    if (flags != 0 && !(__atomic_load_n(&work->flags, __ATOMIC_RELAXED) & flags)) continue;
    allot_point point = ALLOT_POINT(driver.machine.slot, gpu, number);
    if (!allot_work_done(&driver.machine, point)) return point;
  }
  return 0;
}

void context_drain_some(int gpu, const context *only, unsigned flags) {
  allot_ring *ring = allot_ring_of(&driver.machine, driver.machine.slot, gpu);
  uint64_t head = allot_load(&ring->head);
  for (;;) {
    allot_point pending = context_pending(gpu, only, flags, head);
    if (pending == 0) return;
    allot_engine_wait(&driver.machine, pending);
  }
}

void context_drain(int gpu, const context *only) {
  context_drain_some(gpu, only, 0);
}

CUresult context_synchronize(context *waited) {
  context_drain(waited->gpu, waited);
  return driver_gpu_usable(waited->gpu);
}

// ---- primary -----------------------------------------------------------------------------------

static bool bad_flags(unsigned flags) {
  unsigned schedule = flags & CU_CTX_SCHED_MASK;
  return (flags & ~(unsigned)CU_CTX_FLAGS_MASK) != 0 ||
         (schedule != 0 && (schedule & (schedule - 1)) != 0);
}

static CUresult retain(int gpu, CUdevice ordinal, context **primary) {
  device *own = &driver.devices[gpu];
  if (own->primary == NULL) {
    own->primary = object_new(OBJECT_CONTEXT, sizeof(context), NULL);
    if (own->primary == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    own->primary->ordinal = ordinal;
    own->primary->gpu = gpu;
    own->primary->primary = true;
    own->primary->api_version = API_VERSION;
  }
  if (!own->primary->active) {
    own->primary->flags = own->primary_flags;
    TRY(start(own->primary));
  }
  own->primary->references++;
  *primary = own->primary;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *handle, CUdevice ordinal) {
  int gpu;
  TRY(driver_gpu(ordinal, &gpu));
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  context *primary;
  CUresult result = retain(gpu, ordinal, &primary);
  UNLOCK();
  if (result == CUDA_SUCCESS) *handle = (CUcontext)primary;
  return result;
}

static CUresult release(CUdevice ordinal, bool all) {
  int gpu;
  TRY(driver_gpu(ordinal, &gpu));
  context *primary = driver.devices[gpu].primary;
  if (primary == NULL || !primary->active) {
    return all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
  }
  LOCK();
  if (primary->references > 0) primary->references--;
  bool last = all || primary->references == 0;
  UNLOCK();
  if (!last) return CUDA_SUCCESS;
  context_drain(gpu, primary);
  LOCK();
  if (primary->active && (all || primary->references == 0)) {
    primary->references = 0;
    stop(primary);
    pools_reset(gpu);
  }
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  return release(ordinal, false);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal) {
  return release(ordinal, false);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
  return release(ordinal, true);
}

CUresult cuDevicePrimaryCtxReset(CUdevice ordinal) {
  return release(ordinal, true);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned int flags) {
  int gpu;
  TRY(driver_gpu(ordinal, &gpu));
  if (bad_flags(flags)) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  device *own = &driver.devices[gpu];
  own->primary_flags = flags;
  if (own->primary != NULL) own->primary->flags = flags;
  UNLOCK();
  return CUDA_SUCCESS;
}

// Before CUDA 11 the flags of an active context could not change.
CUresult cuDevicePrimaryCtxSetFlags(CUdevice ordinal, unsigned int flags) {
  int gpu;
  TRY(driver_gpu(ordinal, &gpu));
  const context *primary = driver.devices[gpu].primary;
  if (primary != NULL && primary->active) return CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE;
  return cuDevicePrimaryCtxSetFlags_v2(ordinal, flags);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int *flags, int *active) {
  int gpu;
  TRY(driver_gpu(ordinal, &gpu));
  if (flags == NULL || active == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  const device *own = &driver.devices[gpu];
  *flags = own->primary_flags;
  *active = own->primary != NULL && own->primary->active;
  UNLOCK();
  return CUDA_SUCCESS;
}

// ---- explicit ----------------------------------------------------------------------------------

static CUresult create(CUcontext *handle, unsigned flags, CUdevice ordinal, bool current) {
  int gpu;
  TRY(driver_gpu(ordinal, &gpu));
  if (handle == NULL || bad_flags(flags)) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  context *made = object_new(OBJECT_CONTEXT, sizeof(context), NULL);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (made != NULL) {
    made->ordinal = ordinal;
    made->gpu = gpu;
    made->flags = flags;
    made->api_version = API_VERSION;
    result = start(made);
    if (result != CUDA_SUCCESS) object_free(made);
  }
  UNLOCK();
  if (result != CUDA_SUCCESS) return result;
  if (current) context_make_current(made);
  *handle = (CUcontext)made;
  return CUDA_SUCCESS;
}

CUresult cuCtxCreate(CUcontext *handle, unsigned int flags, CUdevice device) {
  return create(handle, flags, device, true);
}

CUresult cuCtxCreate_v2(CUcontext *handle, unsigned int flags, CUdevice device) {
  return create(handle, flags, device, true);
}

// A context has been the same with and without graphics since CUDA 5.
CUresult cuGLCtxCreate(CUcontext *handle, unsigned int flags, CUdevice device) {
  return create(handle, flags, device, true);
}

CUresult cuGLCtxCreate_v2(CUcontext *handle, unsigned int flags, CUdevice device) {
  return create(handle, flags, device, true);
}

CUresult cuVDPAUCtxCreate(CUcontext *handle, unsigned int flags, CUdevice device,
                          uint32_t vdp_device, void *vdp_get_proc_address) {
  return create(handle, flags, device, true);
}

CUresult cuVDPAUCtxCreate_v2(CUcontext *handle, unsigned int flags, CUdevice device,
                             uint32_t vdp_device, void *vdp_get_proc_address) {
  return create(handle, flags, device, true);
}

// Without MPS there is no execution affinity to be had.
CUresult cuCtxCreate_v3(CUcontext *handle, CUexecAffinityParam *affinity, int count,
                        unsigned int flags, CUdevice device) {
  if (count > 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return create(handle, flags, device, true);
}

CUresult cuCtxCreate_v4(CUcontext *handle, CUctxCreateParams *parameters, unsigned int flags,
                        CUdevice device) {
  if (parameters != NULL && parameters->cigParams != NULL) return CUDA_ERROR_NOT_SUPPORTED;
  if (parameters != NULL && parameters->numExecAffinityParams > 0) {
    return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  }
  return create(handle, flags, device, true);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
  ENTER();
  context *dying = (context *)handle;
  if (!object_valid(handle, OBJECT_CONTEXT) || !dying->active || dying->primary) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  context_drain(dying->gpu, dying);
  LOCK();
  stop(dying);
  object_free(dying);
  UNLOCK();
  context_forget(dying);
  return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext handle) {
  return cuCtxDestroy_v2(handle);
}
