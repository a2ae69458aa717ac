// SPDX-License-Identifier: Apache-2.0
// Advice about managed memory, and moving it ahead of its use. Where it is, the engine knows
// (engine/managed.c); advice is noted, and nothing follows from it.
#include <string.h>

#include "simulated/cuda/driver.h"

#define BLOCK (2 * MIB) /* what moves at least */

static CUresult find_managed(CUdeviceptr address, size_t size, range **found) {
  TRY(size > 0 ? memory_check(address, size, found) : CUDA_ERROR_INVALID_VALUE);
  return range_is_managed(*found) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult check_managed(CUdeviceptr address, size_t size) {
  range *found;
  LOCK();
  CUresult result = find_managed(address, size, &found);
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

static int ordinal_of(CUmemLocationType type, int id) {
  return type == CU_MEM_LOCATION_TYPE_DEVICE ? id : CU_DEVICE_CPU;
}

static void note_advice(range *advised, CUmem_advise advice, int ordinal) {
  uint32_t bit = ordinal >= 0 ? 1u << ordinal : 0;
  switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
      advised->read_mostly = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
      break;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
      advised->preferred = ordinal;
      break;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
      advised->preferred = CU_DEVICE_INVALID;
      break;
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
      advised->accessed_by |= bit;
      break;
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
      advised->accessed_by &= ~bit;
      break;
  }
}

static CUresult advise(CUdeviceptr address, size_t size, CUmem_advise advice,
                       CUmemLocationType type, int id) {
  ENTER();
  if (advice < CU_MEM_ADVISE_SET_READ_MOSTLY || advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The first two are about no place.
  if (advice > CU_MEM_ADVISE_UNSET_READ_MOSTLY) TRY(check_place(type, id));
  range *advised;
  LOCK();
  CUresult result = find_managed(address, size, &advised);
  if (result == CUDA_SUCCESS) note_advice(advised, advice, ordinal_of(type, id));
  UNLOCK();
  return result;
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t size, CUmem_advise advice,
                        CUmemLocation place) {
  return advise(address, size, advice, place.type, place.id);
}

CUresult cuMemAdvise(CUdeviceptr address, size_t size, CUmem_advise advice, CUdevice device) {
  return advise(address, size, advice, CU_MEM_LOCATION_TYPE_DEVICE, device);
}

void managed_submit(stream *target, bool to_gpu, uint64_t bytes) {
  submit(target, &(submission){.kind = ALLOT_WORK_COPY,
                               .engine = to_gpu ? ALLOT_COPY_H2D : ALLOT_COPY_D2H,
                               .flags = ALLOT_WORK_MANAGED,
                               .bytes = (bytes + BLOCK - 1) & ~(BLOCK - 1)});
}

// To the GPU it was allocated for, or to the host. To another GPU it does not move.
static CUresult prefetch(CUdeviceptr address, size_t size, CUmemLocationType type, int id,
                         CUstream handle) {
  stream *target;
  TRY(stream_of(handle, &target));
  TRY(check_place(type, id));
  range *moved;
  int ordinal = ordinal_of(type, id), home = -1;
  LOCK();
  CUresult result = find_managed(address, size, &moved);
  if (result == CUDA_SUCCESS) {
    home = moved->gpu;
    moved->prefetched = ordinal;
  }
  UNLOCK();
  TRY(result);
  if (target->capture != NULL) return CUDA_SUCCESS;
  bool here = ordinal >= 0 && driver.gpus[ordinal] == home;
  if (target->owner->gpu != home || (ordinal >= 0 && !here)) {
    submit(target, &(submission){.kind = ALLOT_WORK_MARK});
    return CUDA_SUCCESS;
  }
  managed_submit(target, here, size);
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
  range found, *at;
  LOCK();
  CUresult result = find_managed(address, count, &at);
  if (result == CUDA_SUCCESS) found = *at;
  UNLOCK();
  TRY(result);
  int next = 0, answer = 0;
  // Of "accessed by" there may be several answers.
  for (size_t place = 0; place + sizeof answer <= size; place += sizeof answer) {
    switch ((int)attribute) {
      case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        answer = found.read_mostly;
        break;
      case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
        answer = found.preferred;
        break;
      case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
        answer = found.prefetched;
        break;
      case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
        while (next < 32 && !(found.accessed_by >> next & 1)) next++;
        answer = next < 32 ? next++ : CU_DEVICE_INVALID;
        break;
      default:
        break;
    }
    memcpy((char *)data + place, &answer, sizeof answer);
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
