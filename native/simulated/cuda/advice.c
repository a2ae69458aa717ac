// SPDX-License-Identifier: Apache-2.0
// Advice about managed memory, which is resident on its device in full and always: checked, noted
// nowhere, and without effect.
#include <string.h>

#include "simulated/cuda/driver.h"

static CUresult check_managed(CUdeviceptr address, size_t size) {
  LOCK();
  range *found;
  CUresult result = size > 0 ? memory_check(address, size, &found) : CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS && found->kind != RANGE_MANAGED) result = CUDA_ERROR_INVALID_VALUE;
  UNLOCK();
  return result;
}

static CUresult check_place(CUmemLocationType type, int id) {
  bool device = type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (!device)
    return type > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  if (id == CU_DEVICE_CPU) return CUDA_SUCCESS;
  return id >= 0 && id < driver.device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult advise(CUdeviceptr address, size_t size, CUmem_advise advice,
                       CUmemLocationType type, int id) {
  ENTER();
  if (advice < CU_MEM_ADVISE_SET_READ_MOSTLY || advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The first two are about no place.
  if (advice > CU_MEM_ADVISE_UNSET_READ_MOSTLY) TRY(check_place(type, id));
  return check_managed(address, size);
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t size, CUmem_advise advice,
                        CUmemLocation place) {
  return advise(address, size, advice, place.type, place.id);
}

CUresult cuMemAdvise(CUdeviceptr address, size_t size, CUmem_advise advice, CUdevice device) {
  return advise(address, size, advice, CU_MEM_LOCATION_TYPE_DEVICE, device);
}

static CUresult prefetch(CUdeviceptr address, size_t size, CUmemLocationType type, int id,
                         CUstream handle) {
  stream *target;
  TRY(stream_of(handle, &target));
  TRY(check_place(type, id));
  TRY(check_managed(address, size));
  if (target->capture != NULL) return CUDA_SUCCESS;
  submit(target, &(submission){.kind = ALLOT_WORK_MARK});
  return CUDA_SUCCESS;
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t size, CUmemLocation place,
                               unsigned int flags, CUstream stream) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return prefetch(address, size, place.type, place.id, stream);
}

CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t size, CUdevice device, CUstream stream) {
  return prefetch(address, size, CU_MEM_LOCATION_TYPE_DEVICE, device, stream);
}

CUresult cuMemPrefetchBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count,
                                 CUmemLocation *places, size_t *indices, size_t place_count,
                                 unsigned long long flags, CUstream stream) {
  ENTER();
  if (addresses == NULL || sizes == NULL || places == NULL || count == 0 || place_count == 0 ||
      flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  size_t place = 0;
  for (size_t i = 0; i < count; i++) {
    while (indices != NULL && place + 1 < place_count && indices[place + 1] <= i) place++;
    TRY(prefetch(addresses[i], sizes[i], places[place].type, places[place].id, stream));
  }
  return CUDA_SUCCESS;
}

CUresult cuMemDiscardBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count,
                                unsigned long long flags, CUstream stream) {
  ENTER();
  if (addresses == NULL || sizes == NULL || count == 0 || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) TRY(check_managed(addresses[i], sizes[i]));
  return CUDA_SUCCESS;
}

CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count,
                                           CUmemLocation *places, size_t *indices,
                                           size_t place_count, unsigned long long flags,
                                           CUstream stream) {
  return cuMemPrefetchBatchAsync(addresses, sizes, count, places, indices, place_count, flags,
                                 stream);
}

CUresult cuMemRangeGetAttribute(void *data, size_t size, CUmem_range_attribute attribute,
                                CUdeviceptr address, size_t count) {
  ENTER();
  if (data == NULL || size < sizeof(int)) return CUDA_ERROR_INVALID_VALUE;
  TRY(check_managed(address, count));
  int none = attribute == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY ? 0 : CU_DEVICE_INVALID;
  if (attribute > CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION) none = 0;
  // Of "accessed by" there may be several answers.
  for (size_t at = 0; at + sizeof none <= size; at += sizeof none) {
    memcpy((char *)data + at, &none, sizeof none);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemRangeGetAttributes(void **data, size_t *sizes, CUmem_range_attribute *attributes,
                                 size_t attribute_count, CUdeviceptr address, size_t count) {
  ENTER();
  if (data == NULL || sizes == NULL || attributes == NULL || attribute_count == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < attribute_count; i++) {
    TRY(cuMemRangeGetAttribute(data[i], sizes[i], attributes[i], address, count));
  }
  return CUDA_SUCCESS;
}
