// SPDX-License-Identifier: Apache-2.0
// Memory pools: which there are, and what they reserve.
//
// A pool takes memory from the GPU in large pieces and keeps it, so what is charged is what the
// pool reserves (CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), not what the program has of it. It grows
// only within an allocation (pool_pieces.c). It shrinks at its own time: that is read again
// wherever it may have happened, and until then too much is charged, never too little.
#include "pools.h"

#include "charge.h"
#include "driver.h"
#include "streams.h"

// ---- the table ----

static bool is_taken(const pool_state *pool) {
  return __atomic_load_n(&pool->taken, __ATOMIC_ACQUIRE) != 0;
}

pool_state *pool_find(process *own, CUmemoryPool handle) {
  uint32_t count = __atomic_load_n(&own->pool_count, __ATOMIC_ACQUIRE);
  for (uint32_t i = 0; i < count && handle != NULL; i++) {
    pool_state *pool = &own->pools[i];
    if (is_taken(pool) && __atomic_load_n(&pool->handle, __ATOMIC_RELAXED) == handle) return pool;
  }
  return NULL;
}

// NULL: there are too many pools. Two threads that add the same pool get the same place.
static pool_state *add_pool(process *own, CUmemoryPool handle, CUdevice ordinal, int device) {
  pthread_mutex_lock(&own->pool_table_lock);
  pool_state *added = pool_find(own, handle);
  for (uint32_t i = 0; i < MAX_POOLS && added == NULL; i++) {
    if (is_taken(&own->pools[i])) continue;
    added = &own->pools[i];
    *added = (pool_state){.handle = handle, .ordinal = ordinal, .device = (int16_t)device};
    __atomic_store_n(&added->taken, 1, __ATOMIC_RELEASE);
    if (i >= own->pool_count) __atomic_store_n(&own->pool_count, i + 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&own->pool_table_lock);
  return added;
}

uint64_t pool_id(const process *own, const pool_state *pool) {
  return (uint64_t)(pool - own->pools) + 1;
}

// A device's default pool is met without having been made. What is neither known nor a default pool
// is another process's or not of a device.
pool_state *pool_known(process *own, CUmemoryPool handle) {
  pool_state *pool = pool_find(own, handle);
  if (pool != NULL) return pool;
  int count = 0;
  DRIVER(USED(cuDeviceGetCount)(&count));
  for (CUdevice ordinal = 0; ordinal < count; ordinal++) {
    CUmemoryPool its_pool;
    if (DRIVER(USED(cuDeviceGetDefaultMemPool)(&its_pool, ordinal)) != CUDA_SUCCESS) continue;
    if (its_pool != handle) continue;
    int device = process_device(own, ordinal);
    return device < 0 ? NULL : add_pool(own, handle, ordinal, device);
  }
  return NULL;
}

// ---- what a pool reserves ----

CUresult pool_read(const pool_state *pool, CUmemPool_attribute attribute, uint64_t *bytes) {
  return DRIVER(USED(cuMemPoolGetAttribute)(pool->handle, attribute, bytes));
}

// Brings the charge to what is reserved; `ahead` was charged beyond the pool's charge. With the
// device's pool lock held. False: the driver knows the pool no more, because its context was reset.
bool pool_settle(process *own, pool_state *pool, uint64_t ahead) {
  uint64_t reserved = pool->charged + ahead, used;
  if (pool->handle == NULL) return true;
  CUresult result = pool_read(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
  bool is_gone = result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_HANDLE;
  if (is_gone) reserved = 0;
  charge_correct(own, pool->device, pool->charged + ahead, reserved);
  pool->charged = reserved;
  if (pool->may_shrink == 0) return !is_gone;
  bool is_full =
      reserved == 0 || (pool_read(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) == CUDA_SUCCESS &&
                        used == reserved);
  if (is_full) pool->may_shrink = 0;
  return !is_gone;
}

// Calls for every pool of the device, with its lock.
void pools_each(process *own, int device, void (*visit)(process *, pool_state *)) {
  uint32_t count = __atomic_load_n(&own->pool_count, __ATOMIC_ACQUIRE);
  if (count == 0) return;
  pthread_mutex_lock(&own->devices[device].pool_lock);
  for (uint32_t i = 0; i < count; i++) {
    pool_state *pool = &own->pools[i];
    if (is_taken(pool) && pool->device == device) visit(own, pool);
  }
  pthread_mutex_unlock(&own->devices[device].pool_lock);
}

static void settle_charged(process *own, pool_state *pool) {
  if (pool->charged != 0) pool_settle(own, pool, 0);
}

void pools_settle(process *own, int device) {
  pools_each(own, device, settle_charged);
}

static void settle_shrinking(process *own, pool_state *pool) {
  if (pool->may_shrink == 0) return;
  pool_settle(own, pool, 0);
  if (pool->may_shrink != 0) __atomic_store_n(&own->pools_may_shrink, 1, __ATOMIC_RELAXED);
}

void pool_forget_streams(process *own, pool_state *pool) {
  pool->freed_in = 0;
  pool->freed_in_many = 0;
}

void pools_waited(process *own, uint64_t stream) {
  __atomic_store_n(&own->pools_may_shrink, 0, __ATOMIC_RELAXED);
  for (int device = 0; device < (int)own->ledger.policy->device_count; device++) {
    pools_each(own, device, settle_shrinking);
  }
  uint32_t count = __atomic_load_n(&own->pool_count, __ATOMIC_ACQUIRE);
  for (uint32_t i = 0; i < count && stream != NO_STREAM && stream != EVERY_STREAM; i++) {
    pool_state *pool = &own->pools[i];
    pthread_mutex_lock(&own->devices[pool->device].pool_lock);
    if (pool->freed_in == stream && pool->freed_in_many == 0) pool->freed_in = 0;
    pthread_mutex_unlock(&own->devices[pool->device].pool_lock);
  }
}

void pool_trim(process *own, pool_state *pool) {
  if (pool->handle == NULL) return;
  DRIVER(REAL(cuMemPoolTrimTo)(pool->handle, 0));
  pool_settle(own, pool, 0);
}

// ---- the end of a pool ----

static bool is_of_pool(const record *seen, void *context) {
  const uint64_t *id = context;
  return seen->owner == *id && (seen->space == SPACE_CHUNK ||
                                (seen->space == SPACE_POINTER && seen->kind == KIND_POOLED));
}

static void forget_contents(process *own, pool_state *pool) {
  uint64_t id = pool_id(own, pool);
  records_sweep(&own->records, is_of_pool, &id);
  __atomic_store_n(&pool->allocations, 0, __ATOMIC_RELAXED);
  pool_forget_streams(own, pool);
}

// A destroyed pool keeps what was not freed, and nothing of it can be read any more: its charge
// stays until the last of it is gone for certain.
void pool_bury(process *own, pool_state *pool) {
  charge_release(own, pool->device, pool->charged);
  pool->charged = 0;
  forget_contents(own, pool);
  __atomic_store_n(&pool->taken, 0, __ATOMIC_RELEASE);
}

static void reset_pool(process *own, pool_state *pool) {
  if (pool->handle == NULL || !pool_settle(own, pool, 0)) {
    pool_bury(own, pool);
  } else if (pool->charged == 0) {
    forget_contents(own, pool);
  }
}

void pools_reset(process *own, int device) {
  pools_each(own, device, reset_pool);
}

// ---- pools themselves ----

// The device that a pool's memory comes from, or -1: none.
static CUdevice ordinal_of(const CUmemPoolProps *properties) {
  switch (properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return properties->location.id;
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN:
      return properties->location.localized.deviceId;
    case CU_MEM_LOCATION_TYPE_NONE: {
      // Managed memory without a preference may all come to the program's device.
      CUdevice current = 0;
      if (properties->allocType != CU_MEM_ALLOCATION_TYPE_MANAGED) return -1;
      DRIVER(USED(cuCtxGetDevice)(&current));
      return current;
    }
    default:
      return -1;
  }
}

CUDA_WRAPPER(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *properties)) {
  CUresult result = DRIVER(REAL(cuMemPoolCreate)(pool, properties));
  if (result != CUDA_SUCCESS || !governed()) return result;
  CUdevice ordinal = ordinal_of(properties);
  if (ordinal < 0) return result;
  target at;
  result = target_device(&at, ordinal);
  if (result == CUDA_SUCCESS && add_pool(at.own, *pool, ordinal, at.device) == NULL) {
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (result != CUDA_SUCCESS) DRIVER(REAL(cuMemPoolDestroy)(*pool));
  return result;
}

CUDA_WRAPPER(cuMemPoolDestroy, (CUmemoryPool handle)) {
  if (!governed()) return REAL(cuMemPoolDestroy)(handle);
  process *own = process_state();
  pool_state *pool = own == NULL ? NULL : pool_find(own, handle);
  if (pool == NULL) return DRIVER(REAL(cuMemPoolDestroy)(handle));
  // What is freed in a stream but not done yet has to be gone before nothing can be read any more.
  bool is_pending = __atomic_load_n(&own->pools_may_shrink, __ATOMIC_RELAXED) != 0;
  if (is_pending && !context_is_capturing()) DRIVER(REAL(cuCtxSynchronize)());
  pthread_mutex_lock(&own->devices[pool->device].pool_lock);
  CUresult result = DRIVER(REAL(cuMemPoolDestroy)(handle));
  if (result == CUDA_SUCCESS) {
    __atomic_store_n(&pool->handle, NULL, __ATOMIC_RELAXED);
    if (__atomic_load_n(&pool->allocations, __ATOMIC_RELAXED) == 0) pool_bury(own, pool);
  }
  pthread_mutex_unlock(&own->devices[pool->device].pool_lock);
  return result;
}

static CUresult changed(CUmemoryPool handle, CUresult result) {
  process *own = governed() ? process_state() : NULL;
  pool_state *pool = own == NULL ? NULL : pool_find(own, handle);
  if (pool == NULL) return result;
  pthread_mutex_lock(&own->devices[pool->device].pool_lock);
  settle_charged(own, pool);
  pthread_mutex_unlock(&own->devices[pool->device].pool_lock);
  return result;
}

CUDA_WRAPPER(cuMemPoolTrimTo, (CUmemoryPool pool, size_t bytes)) {
  return changed(pool, DRIVER(REAL(cuMemPoolTrimTo)(pool, bytes)));
}

CUDA_WRAPPER(cuMemPoolSetAttribute,
             (CUmemoryPool pool, CUmemPool_attribute attribute, void *value)) {
  return changed(pool, DRIVER(REAL(cuMemPoolSetAttribute)(pool, attribute, value)));
}
