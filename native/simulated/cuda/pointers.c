// SPDX-License-Identifier: Apache-2.0
// What an address is: attributes of pointers and of stretches of managed memory.
#include <string.h>

#include "simulated/cuda/pool.h"

static bool is_device(const range *asked) {
  return asked->gpu >= 0;
}

// A context to name for memory that belongs to none.
static context *context_for(const range *asked) {
  if (asked->owner != NULL) return asked->owner;
  if (!is_device(asked)) return NULL;
  context *primary = driver.devices[asked->gpu].primary;
  return primary != NULL && primary->active ? primary : NULL;
}

static void put(void *data, const void *value, size_t size) {
  memcpy(data, value, size);
}

static void put_int(void *data, int value) {
  put(data, &value, sizeof value);
}

static void put_address(void *data, CUdeviceptr value) {
  put(data, &value, sizeof value);
}

static int memory_type(const range *asked) {
  return is_device(asked) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
}

static unsigned handle_types(const range *asked) {
  if (asked->kind == RANGE_POOL) return (unsigned)((const pool *)asked->origin)->handle_types;
  return asked->kind == RANGE_MAPPED ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
}

static CUresult answer(void *data, CUpointer_attribute attribute, const range *asked,
                       CUdeviceptr address) {
  context *owner = context_for(asked);
  bool legacy_ipc = asked->kind == RANGE_PLAIN || asked->kind == RANGE_SMALL;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      put(data, &owner, sizeof owner);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      put_int(data, memory_type(asked));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      put_address(data, address);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (is_device(asked) && !range_is_managed(asked)) return CUDA_ERROR_INVALID_VALUE;
      put_address(data, address);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      put_int(data, asked->sync_memops);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      put(data, &asked->id, sizeof asked->id);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      put_int(data, range_is_managed(asked));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      put_int(data,
              is_device(asked) ? driver_ordinal(asked->gpu) : (owner != NULL ? owner->ordinal : 0));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      put_int(data, legacy_ipc);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      put_address(data, asked->base);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      put(data, &asked->size, sizeof asked->size);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      put_int(data, asked->accessible);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      put_int(data, (int)handle_types(asked));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      put_int(data, asked->accessible ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                      : CU_MEM_ACCESS_FLAGS_PROT_NONE);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: {
      void *from = asked->kind == RANGE_POOL ? asked->origin : NULL;
      put(data, &from, sizeof from);
      return CUDA_SUCCESS;
    }
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      put_int(data, 0);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
  ENTER();
  if (data == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  const range *asked = range_find(address);
  CUresult result =
      asked != NULL ? answer(data, attribute, asked, address) : CUDA_ERROR_INVALID_VALUE;
  UNLOCK();
  return result;
}

// Of memory that the driver does not know every answer is a zero of its kind.
static void answer_unknown(void *data, CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      put_address(data, 0);
      return;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      put_int(data, CU_DEVICE_INVALID);
      return;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
      return;
    default:
      put_int(data, 0);
  }
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                CUdeviceptr address) {
  ENTER();
  if (count == 0 || attributes == NULL || data == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  const range *asked = range_find(address);
  for (unsigned i = 0; i < count; i++) {
    if (data[i] == NULL) continue;
    if (asked == NULL || answer(data[i], attributes[i], asked, address) != CUDA_SUCCESS) {
      answer_unknown(data[i], attributes[i]);
    }
  }
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                               CUdeviceptr address) {
  ENTER();
  if (value == NULL || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  unsigned wanted;
  memcpy(&wanted, value, sizeof wanted);
  LOCK();
  range *changed = range_find(address);
  if (changed != NULL) changed->sync_memops = wanted != 0;
  UNLOCK();
  return changed != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
