// SPDX-License-Identifier: Apache-2.0
// Plain, pitched and managed device memory.
#include <string.h>

#include "simulated/cuda/driver.h"

#define GRANULE (2 * MIB)
#define SMALL MIB

bool memory_take(int gpu, uint64_t bytes, bool managed) {
  if (!managed) return allot_gpu_take(&driver.machine, gpu, bytes);
  allot_managed_add(&driver.machine, gpu, bytes);
  return true;
}

void memory_give_back(int gpu, uint64_t bytes, bool managed) {
  if (managed) {
    allot_managed_remove(&driver.machine, gpu, bytes);
  } else {
    allot_gpu_give_back(&driver.machine, gpu, bytes);
  }
}

CUresult memory_new(context *owner, uint64_t size, enum range_kind kind, CUdeviceptr *address) {
  bool managed = kind == RANGE_MANAGED, small = (managed || kind == RANGE_PLAIN) && size < SMALL;
  if (size > UINT64_MAX / 4) return CUDA_ERROR_OUT_OF_MEMORY;
  small_block *block = NULL;
  CUdeviceptr taken;
  uint64_t whole = (size + GRANULE - 1) & ~(GRANULE - 1);
  if (small) {
    taken = small_take(owner, size, managed, &block);
    if (taken == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  } else {
    if (!memory_take(owner->gpu, whole, managed)) return CUDA_ERROR_OUT_OF_MEMORY;
    taken = address_take(whole, GRANULE);
    if (taken == 0) {
      memory_give_back(owner->gpu, whole, managed);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  range *added = range_add(taken, size, small && !managed ? RANGE_SMALL : kind, owner->gpu);
  if (added == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  added->charged = small ? 0 : whole;
  added->origin = block;
  added->owner = owner;
  added->accessible = true;
  // The program writes managed memory without asking.
  added->touched = managed;
  added->preferred = added->prefetched = CU_DEVICE_INVALID;
  *address = taken;
  return CUDA_SUCCESS;
}

static void free_whole(range *freed) {
  if (freed->origin != NULL) {
    small_give_back(freed->owner, freed->origin, freed->base, freed->size, freed->touched);
  } else {
    address_give_back(freed->base, freed->charged, freed->touched);
    memory_give_back(freed->gpu, freed->charged, freed->kind == RANGE_MANAGED);
  }
}

CUresult memory_free_locked(range *freed) {
  switch (freed->kind) {
    case RANGE_SMALL:
    case RANGE_PLAIN:
    case RANGE_MANAGED:
      free_whole(freed);
      break;
    case RANGE_POOL:
      return pool_free_locked(freed, NULL);
    case RANGE_GRAPH:
      return graph_memory_free_locked(freed);
    case RANGE_HOST:
    case RANGE_REGISTERED:
      host_free_locked(freed);
      break;
    case RANGE_IMPORTED:
    case RANGE_EXTERNAL:
      imported_free_locked(freed);
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  range_remove(freed);
  return CUDA_SUCCESS;
}

CUresult memory_check(CUdeviceptr address, uint64_t size, range **found) {
  range *at = range_find(address);
  if (at == NULL) return CUDA_ERROR_INVALID_VALUE;
  *found = at;
  // Mappings that lie side by side are one piece to a copy.
  while (address - at->base > at->size || size > at->size - (address - at->base)) {
    if (!at->accessible) return CUDA_ERROR_INVALID_VALUE;
    uint64_t here = at->size - (address - at->base);
    CUdeviceptr end = at->base + at->size;
    range *next = at->kind == RANGE_MAPPED ? range_find(end) : NULL;
    if (next == NULL || next->kind != RANGE_MAPPED) return CUDA_ERROR_INVALID_VALUE;
    address = end;
    size -= here;
    at = next;
  }
  return at->accessible ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult memory_info(int gpu, size_t *free, size_t *total) {
  uint64_t capacity = allot_gpu_capacity(&driver.machine, gpu);
  uint64_t used = allot_gpu_used(&driver.machine, gpu);
  if (free != NULL) *free = used < capacity ? capacity - used : 0;
  if (total != NULL) *total = capacity;
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  ENTER_CONTEXT(current);
  // What a killed process had is free; nobody else would notice before it is needed.
  allot_machine_reap(&driver.machine);
  return memory_info(current->gpu, free, total);
}

static unsigned clamp(size_t bytes) {
  return bytes > UINT32_MAX ? UINT32_MAX : (unsigned)bytes;
}

CUresult cuMemGetInfo(unsigned int *free, unsigned int *total) {
  size_t all_free, all;
  TRY(cuMemGetInfo_v2(&all_free, &all));
  if (free != NULL) *free = clamp(all_free);
  if (total != NULL) *total = clamp(all);
  return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *address, size_t size, enum range_kind kind, unsigned flags) {
  ENTER_CONTEXT(current);
  TRY(capture_forbids(current));
  if (address == NULL || size == 0) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  // Another thread may have destroyed it meanwhile.
  CUresult result = context_current(&current);
  if (result == CUDA_SUCCESS) result = memory_new(current, size, kind, address);
  if (result == CUDA_SUCCESS) range_find(*address)->flags = flags;
  UNLOCK();
  return result;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
  return allocate(address, size, RANGE_PLAIN, 0);
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned int flags) {
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  return allocate(address, size, RANGE_MANAGED, flags);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                            unsigned int element) {
  ENTER();
  if (pitch == NULL || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
  if (element != 4 && element != 8 && element != 16) return CUDA_ERROR_INVALID_VALUE;
  size_t aligned = (width + 511) & ~(size_t)511;
  size_t size;
  if (aligned < width || __builtin_mul_overflow(aligned, height, &size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TRY(allocate(address, size, RANGE_PLAIN, 0));
  *pitch = aligned;
  return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER();
  if (address == 0) return CUDA_SUCCESS;
  TRY(capture_forbids(NULL));
  LOCK();
  range *freed = range_find(address);
  bool known = freed != NULL && freed->base == address && freed->gpu >= 0 &&
               freed->kind != RANGE_MAPPED && freed->kind != RANGE_IMPORTED;
  int gpu = known ? freed->gpu : 0;
  UNLOCK();
  if (!known) return CUDA_ERROR_INVALID_VALUE;
  // Kernels may use the memory until they end.
  context_drain(gpu, NULL);
  LOCK();
  freed = range_find(address);
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (freed != NULL && freed->base == address) result = memory_free_locked(freed);
  UNLOCK();
  return result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
  ENTER();
  LOCK();
  const range *found = range_find(address);
  bool device = found != NULL && found->gpu >= 0;
  if (device && base != NULL) *base = found->base;
  if (device && size != NULL) *size = found->size;
  UNLOCK();
  return device ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
