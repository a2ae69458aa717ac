// SPDX-License-Identifier: Apache-2.0
// Multicast objects, as far as they hold memory: physical memory that is bound to one stays until
// it is unbound or the object ends. They cannot be mapped, so no device says that it supports them.
#include <stdlib.h>

#include "simulated/cuda/virtual.h"

typedef struct binding {
  physical *memory;
  uint64_t offset, size;
  struct binding *next;
} binding;

typedef struct multicast {
  object head;
  uint64_t size;
  unsigned devices, added;
  binding *bindings;
} multicast;

static multicast *multicast_of(CUmemGenericAllocationHandle handle) {
  void *object = (void *)(uintptr_t)handle;
  return object_valid(object, OBJECT_MULTICAST) ? object : NULL;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle,
                           const CUmulticastObjectProp *wanted) {
  ENTER();
  if (handle == NULL || wanted == NULL || wanted->numDevices == 0 || wanted->flags != 0 ||
      wanted->size == 0 || wanted->size % PHYSICAL_GRANULE != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (wanted->handleTypes != 0) return CUDA_ERROR_NOT_SUPPORTED;
  LOCK();
  multicast *made = object_new(OBJECT_MULTICAST, sizeof *made, NULL);
  if (made != NULL) {
    made->size = wanted->size;
    made->devices = wanted->numDevices;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
  }
  UNLOCK();
  return made != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  LOCK();
  multicast *team = multicast_of(handle);
  bool fits = team != NULL && team->added < team->devices;
  if (fits) team->added++;
  UNLOCK();
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult bind_locked(multicast *team, uint64_t offset, physical *memory, uint64_t from,
                            uint64_t size) {
  if (team == NULL || memory == NULL || size == 0 || team->added < team->devices ||
      (offset | from | size) % PHYSICAL_GRANULE != 0 || offset > team->size ||
      size > team->size - offset || from > memory->size || size > memory->size - from) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  binding *made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (binding){memory, offset, size, team->bindings};
  team->bindings = made;
  memory->references++;
  memory->mappings++;
  return CUDA_SUCCESS;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                            CUmemGenericAllocationHandle memory, size_t from, size_t size,
                            unsigned long long flags) {
  ENTER();
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  CUresult result = bind_locked(multicast_of(handle), offset, physical_of(memory), from, size);
  UNLOCK();
  return result;
}

CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
                               CUmemGenericAllocationHandle memory, size_t from, size_t size,
                               unsigned long long flags) {
  return cuMulticastBindMem(handle, offset, memory, from, size, flags);
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset,
                             CUdeviceptr address, size_t size, unsigned long long flags) {
  ENTER();
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  range *mapped = range_find(address);
  bool is_known = mapped != NULL && mapped->kind == RANGE_MAPPED;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (is_known) {
    result = bind_locked(multicast_of(handle), offset, mapped->origin,
                         mapped->offset + (address - mapped->base), size);
  }
  UNLOCK();
  return result;
}

CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
                                CUdeviceptr address, size_t size, unsigned long long flags) {
  return cuMulticastBindAddr(handle, offset, address, size, flags);
}

static void unbind_locked(multicast *team, int gpu, uint64_t offset, uint64_t size) {
  for (binding **place = &team->bindings, *gone; (gone = *place) != NULL;) {
    // Of what is unbound in part, the memory stays.
    bool is_within = gone->offset >= offset && gone->size <= size - (gone->offset - offset);
    if ((gpu >= 0 && gone->memory->gpu != gpu) || gone->offset - offset >= size || !is_within) {
      place = &gone->next;
      continue;
    }
    *place = gone->next;
    gone->memory->mappings--;
    physical_drop_locked(gone->memory);
    free(gone);
  }
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
                           size_t size) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  LOCK();
  multicast *team = multicast_of(handle);
  if (team != NULL) unbind_locked(team, gpu, offset, size);
  UNLOCK();
  return team != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool multicast_release_locked(CUmemGenericAllocationHandle handle) {
  multicast *released = multicast_of(handle);
  if (released == NULL) return false;
  unbind_locked(released, -1, 0, UINT64_MAX);
  object_free(released);
  return true;
}
