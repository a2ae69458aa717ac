// SPDX-License-Identifier: Apache-2.0
// Attributes of pools, who may use them, and which pool is a device's current one.
#include <string.h>

#include "simulated/cuda/pool.h"

static uint64_t *number(pool *asked, CUmemPool_attribute attribute) {
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      return &asked->threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      return &asked->reserved;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      return &asked->reserved_high;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      return &asked->used;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      return &asked->used_high;
    case CU_MEMPOOL_ATTR_MAX_POOL_SIZE:
      return &asked->most;
    default:
      return NULL;
  }
}

static int property(const pool *asked, CUmemPool_attribute attribute, int *value) {
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      *value = (int)asked->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
      return 1;
    case CU_MEMPOOL_ATTR_ALLOCATION_TYPE:
      *value = (int)asked->place.type;
      return 1;
    case CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES:
      *value = (int)asked->handle_types;
      return 1;
    case CU_MEMPOOL_ATTR_LOCATION_ID:
      *value = asked->place.gpu >= 0 ? driver_ordinal(asked->place.gpu) : asked->place.node;
      return 1;
    case CU_MEMPOOL_ATTR_LOCATION_TYPE:
      *value = (int)asked->place.at;
      return 1;
    case CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED:
      *value = 0;
      return 1;
    case CU_MEMPOOL_ATTR_LOCALITY_DOMAIN_ID:
      *value = -1;
      return 1;
    default:
      return 0;
  }
}

// Since which CUDA a driver has the attribute (nvidia-cuda-runtime's driver_types.h, 13.0 to 13.5).
static uint32_t since(CUmemPool_attribute attribute) {
  if (attribute < CU_MEMPOOL_ATTR_ALLOCATION_TYPE) return 0;
  return attribute < CU_MEMPOOL_ATTR_LOCALITY_DOMAIN_ID ? 13020 : 13050;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
  pool *asked;
  TRY(pool_of(handle, &asked));
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (driver.machine.machine->description.cuda_version < since(attribute)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  const uint64_t *bytes = number(asked, attribute);
  int small = 0;
  bool known = bytes != NULL || property(asked, attribute, &small) != 0;
  if (bytes != NULL) {
    memcpy(value, bytes, sizeof *bytes);
  } else if (known) {
    memcpy(value, &small, sizeof small);
  }
  UNLOCK();
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
  pool *changed;
  TRY(pool_of(handle, &changed));
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  uint64_t bytes = 0;
  int small = 0;
  CUresult result = CUDA_SUCCESS;
  LOCK();
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      memcpy(&small, value, sizeof small);
      changed->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = small != 0;
      break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      memcpy(&changed->threshold, value, sizeof changed->threshold);
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      // High-water marks can only be set back.
      memcpy(&bytes, value, sizeof bytes);
      if (bytes != 0) {
        result = CUDA_ERROR_INVALID_VALUE;
      } else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) {
        changed->used_high = changed->used;
      } else {
        changed->reserved_high = changed->reserved;
      }
      break;
    default:
      result = CUDA_ERROR_INVALID_VALUE;
  }
  UNLOCK();
  return result;
}

CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *list, size_t count) {
  pool *changed;
  TRY(pool_of(handle, &changed));
  if (list == NULL && count > 0) return CUDA_ERROR_INVALID_VALUE;
  uint32_t access = changed->access;
  for (size_t i = 0; i < count; i++) {
    if (list[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    int gpu, ordinal = list[i].location.id;
    TRY(driver_gpu(ordinal, &gpu));
    if (list[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      access |= 1u << ordinal;
    } else if (gpu == changed->place.gpu) {
      return CUDA_ERROR_INVALID_VALUE;  // a device cannot lose its own pool
    } else {
      access &= ~(1u << ordinal);
    }
  }
  changed->access = access;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool handle,
                            CUmemLocation *location) {
  pool *asked;
  TRY(pool_of(handle, &asked));
  if (flags == NULL || location == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  int gpu;
  TRY(driver_gpu(location->id, &gpu));
  bool is_everywhere = asked->place.type == CU_MEM_ALLOCATION_TYPE_MANAGED;
  bool may = is_everywhere || gpu == asked->place.gpu || (asked->access & 1u << location->id) != 0;
  *flags = may ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

// ---- the pools of a place ----------------------------------------------------------------------

CUresult cuMemGetDefaultMemPool(CUmemoryPool *handle, CUmemLocation *location,
                                CUmemAllocationType type) {
  pool_place place;
  ENTER();
  TRY(pool_place_of(location, type, &place));
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  *handle = (CUmemoryPool)pool_default(&place);
  UNLOCK();
  return *handle != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemGetMemPool(CUmemoryPool *handle, CUmemLocation *location, CUmemAllocationType type) {
  pool_place place;
  ENTER();
  TRY(pool_place_of(location, type, &place));
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  *handle = (CUmemoryPool)pool_current(&place);
  UNLOCK();
  return *handle != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool handle) {
  pool_place place;
  pool *chosen;
  ENTER();
  TRY(pool_place_of(location, type, &place));
  TRY(pool_of(handle, &chosen));
  if (chosen->imported || !pool_same_place(&chosen->place, &place)) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  pool_make_current(chosen);
  UNLOCK();
  return CUDA_SUCCESS;
}

static CUmemLocation location_of(CUdevice device) {
  return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *handle, CUdevice device) {
  CUmemLocation location = location_of(device);
  return cuMemGetDefaultMemPool(handle, &location, CU_MEM_ALLOCATION_TYPE_PINNED);
}

CUresult cuDeviceGetMemPool(CUmemoryPool *handle, CUdevice device) {
  CUmemLocation location = location_of(device);
  return cuMemGetMemPool(handle, &location, CU_MEM_ALLOCATION_TYPE_PINNED);
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
  int gpu;
  pool *chosen;
  TRY(driver_gpu(device, &gpu));
  TRY(pool_of(handle, &chosen));
  if (chosen->place.gpu != gpu) return CUDA_ERROR_INVALID_DEVICE;
  CUmemLocation location = location_of(device);
  return cuMemSetMemPool(&location, CU_MEM_ALLOCATION_TYPE_PINNED, handle);
}
