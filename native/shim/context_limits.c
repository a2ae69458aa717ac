// SPDX-License-Identifier: Apache-2.0
// Limits of a context that are device memory: stacks, the heap of the kernels' malloc, the buffer
// of their printf, what the device runtime sets aside. What a context has of each without being
// asked is part of what it costs.
#include "charge.h"
#include "dead.h"
#include "driver.h"

typedef struct limit_cost {
  uint64_t included;  // the driver's default
  uint64_t unit;      // bytes for each unit of the limit
} limit_cost;

// For each level of the device runtime's synchronisation, at most (CUDA's programming guide).
#define SYNC_LEVEL_BYTES (150 * MIB)
// For each pending launch of the device runtime: an estimate, above the 4 KiB of its parameters.
#define PENDING_LAUNCH_BYTES (16 * KIB)

static uint64_t attribute(const target *at, CUdevice_attribute wanted) {
  int value = 0;
  CUresult result = DRIVER(USED(cuDeviceGetAttribute)(&value, wanted, at->ordinal));
  return result == CUDA_SUCCESS && value > 0 ? (uint64_t)value : UINT64_MAX;
}

// The driver reserves for as many threads (or blocks) as the device can hold at once.
static uint64_t all_of(const target *at, CUdevice_attribute in_one) {
  return multiply(attribute(at, in_one), attribute(at, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
}

static bool is_hint(CUlimit limit) {
  return limit == CU_LIMIT_MAX_L2_FETCH_GRANULARITY || limit == CU_LIMIT_PERSISTING_L2_CACHE_SIZE ||
         limit == CU_LIMIT_SHMEM_SIZE || limit == CU_LIMIT_CIG_ENABLED ||
         limit == CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED;
}

// False: it is not known what the limit costs.
static bool find_cost(const target *at, CUlimit limit, limit_cost *cost) {
  switch (limit) {
    case CU_LIMIT_STACK_SIZE:
      *cost = (limit_cost){1 * KIB, all_of(at, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)};
      return true;
    case CU_LIMIT_PRINTF_FIFO_SIZE:
      *cost = (limit_cost){1 * MIB, 1};
      return true;
    case CU_LIMIT_MALLOC_HEAP_SIZE:
      *cost = (limit_cost){8 * MIB, 1};
      return true;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH:
      *cost = (limit_cost){2, SYNC_LEVEL_BYTES};
      return true;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT:
      *cost = (limit_cost){2048, PENDING_LAUNCH_BYTES};
      return true;
    case CU_LIMIT_PER_BLOCK_MEMORY_SIZE:
      *cost = (limit_cost){0, all_of(at, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)};
      return true;
    default:
      return false;
  }
}

// Contexts are addresses: the topmost byte is free for the limit.
static uint64_t key_of(const target *at, CUlimit limit) {
  return (uint64_t)(uintptr_t)at->context ^ (uint64_t)(limit + 1) << 56;
}

static CUresult set_memory_limit(const target *at, CUlimit limit, size_t value,
                                 reservation *needed) {
  limit_cost cost;
  process *own = at->own;
  if (!find_cost(at, limit, &cost)) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  record before = {.bytes = 0};
  bool existed = records_find(&own->records, SPACE_LIMIT, key_of(at, limit), &before);
  record after = {.space = SPACE_LIMIT,
                  .key = key_of(at, limit),
                  .owner = (uint64_t)(uintptr_t)at->context,
                  .device = (int16_t)at->device};
  if (value > cost.included) {
    uint64_t whole = round_up(multiply(value, cost.unit), CHARGE_GRANULE);
    after.bytes = whole == UINT64_MAX ? whole : whole - cost.included * cost.unit;
  }
  uint64_t old = existed ? before.bytes : 0, more = after.bytes > old ? after.bytes - old : 0;
  if (!reservation_try(needed, more)) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = reservation_called(needed, DRIVER(REAL(cuCtxSetLimit)(limit, value)));
  if (result != CUDA_SUCCESS) return result;
  charge_release(own, at->device, needed->bytes - more);
  reservation_keep(needed);
  // Without memory for the record the larger charge stays until the process ends.
  bool kept = records_keep(&own->records, &after);
  if (after.bytes < old && !kept) return result;
  if (after.bytes < old) charge_release(own, at->device, old - after.bytes);
  charge_note_context(own, at->device, (int64_t)(after.bytes - old));
  return result;
}

CUDA_WRAPPER(cuCtxSetLimit, (CUlimit limit, size_t value)) {
  if (is_hint(limit) || !governed()) return UNGOVERNED(cuCtxSetLimit)(limit, value);
  UNCANCELLED;
  target at;
  CUresult refusal = target_current(&at);
  if (refusal != CUDA_SUCCESS) return refusal;
  if (at.context == NULL) return DRIVER(REAL(cuCtxSetLimit)(limit, value));
  reservation needed = {.own = at.own, .device = at.device};
  CUresult result;
  do {
    process_lock(&at.own->limit_lock);
    result = set_memory_limit(&at, limit, value, &needed);
    process_unlock(&at.own->limit_lock);
  } while (reservation_goes_on(&needed));
  reservation_end(&needed);
  return result;
}
