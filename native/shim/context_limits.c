// SPDX-License-Identifier: Apache-2.0
// Limits of a context that are device memory: the heap of the kernels' malloc, the buffer of their
// printf. What a context has of each without being asked is part of what it costs.
#include "charge.h"
#include "driver.h"

#define DEFAULT_HEAP_BYTES (8 * MIB)
#define DEFAULT_FIFO_BYTES (1 * MIB)

static CUresult set_memory_limit(process *own, const target *at, CUlimit limit, size_t value) {
  record_space space = limit == CU_LIMIT_MALLOC_HEAP_SIZE ? SPACE_HEAP : SPACE_FIFO;
  uint64_t included = space == SPACE_HEAP ? DEFAULT_HEAP_BYTES : DEFAULT_FIFO_BYTES;
  uint64_t rounded = round_up(value, CHARGE_GRANULE);
  record before = {.bytes = 0};
  bool existed = records_find(&own->records, space, (uint64_t)(uintptr_t)at->context, &before);
  record after = {.space = (uint8_t)space,
                  .key = (uint64_t)(uintptr_t)at->context,
                  .owner = (uint64_t)(uintptr_t)at->context,
                  .device = (int16_t)at->device,
                  .bytes = value > included ? rounded - included : 0};
  uint64_t old = existed ? before.bytes : 0;
  if (after.bytes > old && !charge_acquire(own, at->device, after.bytes - old)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  CUresult result = DRIVER(REAL(cuCtxSetLimit)(limit, value));
  if (result != CUDA_SUCCESS || !records_keep(&own->records, &after)) {
    if (after.bytes > old) charge_release(own, at->device, after.bytes - old);
    return result;
  }
  if (after.bytes < old) charge_release(own, at->device, old - after.bytes);
  charge_note_context(own, at->device, (int64_t)(after.bytes - old));
  return result;
}

CUDA_WRAPPER(cuCtxSetLimit, (CUlimit limit, size_t value)) {
  bool is_memory = limit == CU_LIMIT_MALLOC_HEAP_SIZE || limit == CU_LIMIT_PRINTF_FIFO_SIZE;
  if (!is_memory || !governed()) return REAL(cuCtxSetLimit)(limit, value);
  target at;
  CUresult refusal = target_current(&at);
  if (refusal != CUDA_SUCCESS) return refusal;
  if (at.context == NULL) return DRIVER(REAL(cuCtxSetLimit)(limit, value));
  pthread_mutex_lock(&at.own->context_lock);
  CUresult result = set_memory_limit(at.own, &at, limit, value);
  pthread_mutex_unlock(&at.own->context_lock);
  return result;
}
