// SPDX-License-Identifier: Apache-2.0
// Writing and awaiting values in memory in stream order.
//
// Both go the way of functions on the host: a write happens when its turn comes, and a wait keeps
// its stream back until the value is as wanted.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

typedef struct operation {
  CUdeviceptr address;
  uint64_t value;
  bool wide;  // 64 bits
  unsigned how;
} operation;

static void write_value(void *data) {
  operation *wanted = data;
  if (wanted->wide) {
    __atomic_store_n((uint64_t *)(uintptr_t)wanted->address, wanted->value, __ATOMIC_SEQ_CST);
  } else {
    __atomic_store_n((uint32_t *)(uintptr_t)wanted->address, (uint32_t)wanted->value,
                     __ATOMIC_SEQ_CST);
  }
  free(wanted);
}

static bool is_as_wanted(const void *data) {
  const operation *wanted = data;
  uint64_t seen, value = wanted->value;
  int64_t ahead;
  if (wanted->wide) {
    seen = __atomic_load_n((uint64_t *)(uintptr_t)wanted->address, __ATOMIC_SEQ_CST);
    ahead = (int64_t)(seen - value);
  } else {
    value = (uint32_t)value;
    seen = __atomic_load_n((uint32_t *)(uintptr_t)wanted->address, __ATOMIC_SEQ_CST);
    ahead = (int32_t)(uint32_t)(seen - value);
  }
  switch (wanted->how & 3u) {
    case CU_STREAM_WAIT_VALUE_EQ:
      return seen == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (seen & value) != 0;
    case CU_STREAM_WAIT_VALUE_NOR:
      return ~(seen | value) != 0 && (wanted->wide || (uint32_t)~(seen | value) != 0);
    default:
      return ahead >= 0;  // cyclic, so that counters may wrap
  }
}

static void forget(void *data) {
  free(data);
}

static CUresult check(CUdeviceptr address, bool wide) {
  size_t size = wide ? 8 : 4;
  if (address == 0 || address % size != 0) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  range *found;
  CUresult result = memory_check(address, size, &found);
  if (result == CUDA_SUCCESS) found->touched = true;
  UNLOCK();
  return result;
}

static CUresult perform(CUstream handle, bool waits, const operation *wanted) {
  stream *target;
  TRY(stream_of(handle, &target));
  if (target->capture != NULL) return capture_unsupported(target);
  TRY(check(wanted->address, wanted->wide));
  operation *kept = malloc(sizeof *kept);
  if (kept == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *kept = *wanted;
  CUresult result = waits ? callback_submit_when(target, is_as_wanted, forget, kept)
                          : callback_submit(target, write_value, kept);
  if (result != CUDA_SUCCESS) free(kept);
  return result;
}

#define VALUE(bits, type)                                                                  \
  CUresult cuStreamWriteValue##bits##_v2(CUstream stream, CUdeviceptr address, type value, \
                                         unsigned int flags) {                             \
    return perform(stream, false, &(operation){address, value, bits == 64, flags});        \
  }                                                                                        \
  CUresult cuStreamWaitValue##bits##_v2(CUstream stream, CUdeviceptr address, type value,  \
                                        unsigned int flags) {                              \
    return perform(stream, true, &(operation){address, value, bits == 64, flags});         \
  }                                                                                        \
  CUresult cuStreamWriteValue##bits(CUstream stream, CUdeviceptr address, type value,      \
                                    unsigned int flags) {                                  \
    return cuStreamWriteValue##bits##_v2(stream, address, value, flags);                   \
  }                                                                                        \
  CUresult cuStreamWaitValue##bits(CUstream stream, CUdeviceptr address, type value,       \
                                   unsigned int flags) {                                   \
    return cuStreamWaitValue##bits##_v2(stream, address, value, flags);                    \
  }

VALUE(32, uint32_t)
VALUE(64, uint64_t)

static CUresult one_of(CUstream stream, const CUstreamBatchMemOpParams *wanted) {
  switch (wanted->operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      return cuStreamWaitValue32_v2(stream, wanted->waitValue.address, wanted->waitValue.value,
                                    wanted->waitValue.flags);
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
      return cuStreamWaitValue64_v2(stream, wanted->waitValue.address, wanted->waitValue.value64,
                                    wanted->waitValue.flags);
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      return cuStreamWriteValue32_v2(stream, wanted->writeValue.address, wanted->writeValue.value,
                                     wanted->writeValue.flags);
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      return cuStreamWriteValue64_v2(stream, wanted->writeValue.address, wanted->writeValue.value64,
                                     wanted->writeValue.flags);
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
    case CU_STREAM_MEM_OP_BARRIER:
      return CUDA_SUCCESS;  // writes are seen at once here
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *list,
                               unsigned int flags) {
  ENTER();
  if (list == NULL || count > 256 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; i++) TRY(one_of(stream, &list[i]));
  return CUDA_SUCCESS;
}

CUresult cuStreamBatchMemOp(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *list,
                            unsigned int flags) {
  return cuStreamBatchMemOp_v2(stream, count, list, flags);
}
