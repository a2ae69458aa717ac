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
static pool_state *add_pool(process *own, CUmemoryPool handle, int device) {
  pthread_mutex_lock(&own->pool_table_lock);
  pool_state *added = pool_find(own, handle);
  for (uint32_t i = 0; i < MAX_POOLS && added == NULL; i++) {
    if (is_taken(&own->pools[i])) continue;
    added = &own->pools[i];
    *added = (pool_state){.handle = handle, .device = (int16_t)device};
    __atomic_store_n(&added->taken, 1, __ATOMIC_RELEASE);
    if (i >= own->pool_count) __atomic_store_n(&own->pool_count, i + 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&own->pool_table_lock);
  return added;
}

uint64_t pool_id(const process *own, const pool_state *pool) {
  return (uint64_t)(pool - own->pools) + 1;
}

// ---- which memory a pool hands out ----

int pool_device(process *own, const CUmemLocation *location, CUmemAllocationType type) {
  CUdevice current;
  bool managed = type == CU_MEM_ALLOCATION_TYPE_MANAGED;
  int unknown = POOL_UNCHARGED - 1, device = -1;
  if (!managed && type != CU_MEM_ALLOCATION_TYPE_PINNED) return unknown;
  switch (location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      device = process_device(own, location->id);
      break;
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN:
      device = process_device(own, location->localized.deviceId);
      break;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      if (!managed) return POOL_UNCHARGED;
      __attribute__((fallthrough));
    case CU_MEM_LOCATION_TYPE_NONE:
      // Managed memory may all come to the program's device, wherever it is preferred.
      if (managed && DRIVER(USED(cuCtxGetDevice)(&current)) == CUDA_SUCCESS) {
        device = process_device(own, current);
      }
      break;
    default:
      break;
  }
  return device < 0 ? unknown : device;
}

#define MAX_NUMA_NODES 64 /* whose pools are looked for */

static pool_state *learn(process *own, CUmemoryPool handle, const CUmemLocation *location,
                         CUmemAllocationType type) {
  int device = pool_device(own, location, type);
  return device < POOL_UNCHARGED ? NULL : add_pool(own, handle, device);
}

// Drivers since CUDA 13.2 say of every pool what it is.
static bool learn_by_attributes(process *own, CUmemoryPool handle, pool_state **learned) {
  int type = 0, at = 0, id = 0;
  if (DRIVER(USED(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &type)) != 0 ||
      DRIVER(USED(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_LOCATION_TYPE, &at)) != 0 ||
      DRIVER(USED(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_LOCATION_ID, &id)) != 0) {
    return false;
  }
  CUmemLocation location = {.type = (CUmemLocationType)at, .id = id};
  *learned = learn(own, handle, &location, (CUmemAllocationType)type);
  return true;
}

static bool is_default(CUmemoryPool handle, CUmemLocation *location, CUmemAllocationType type) {
  CUmemoryPool pool;
  CUresult result = DRIVER(USED(cuMemGetDefaultMemPool)(&pool, location, type));
  // Before CUDA 13 devices alone had pools that the program did not make.
  bool is_plain =
      location->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED;
  if (result != CUDA_SUCCESS && is_plain) {
    result = DRIVER(USED(cuDeviceGetDefaultMemPool)(&pool, location->id));
  }
  return result == CUDA_SUCCESS && pool == handle;
}

// Is it one of the pools that each place has?
static pool_state *learn_by_place(process *own, CUmemoryPool handle) {
  static const CUmemLocationType places[] = {CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_NONE,
                                             CU_MEM_LOCATION_TYPE_HOST,
                                             CU_MEM_LOCATION_TYPE_HOST_NUMA};
  int devices = 0;
  DRIVER(USED(cuDeviceGetCount)(&devices));
  const int ids[] = {devices, 1, 1, MAX_NUMA_NODES};
  for (int i = 0; i < 4; i++) {
    for (int id = 0; id < ids[i]; id++) {
      CUmemLocation location = {.type = places[i], .id = id};
      for (int type = CU_MEM_ALLOCATION_TYPE_PINNED; type <= CU_MEM_ALLOCATION_TYPE_MANAGED;
           type++) {
        if (!is_default(handle, &location, (CUmemAllocationType)type)) continue;
        return learn(own, handle, &location, (CUmemAllocationType)type);
      }
    }
  }
  return NULL;
}

pool_state *pool_known(process *own, CUmemoryPool handle) {
  pool_state *pool = pool_find(own, handle);
  if (pool != NULL || learn_by_attributes(own, handle, &pool)) return pool;
  return learn_by_place(own, handle);
}

// ---- what a pool reserves ----

CUresult pool_read(const pool_state *pool, CUmemPool_attribute attribute, uint64_t *bytes) {
  return DRIVER(USED(cuMemPoolGetAttribute)(pool->handle, attribute, bytes));
}

bool pool_settle(process *own, pool_state *pool, uint64_t ended) {
  uint64_t reserved = pool->reserve.charged + ended;
  CUresult result = pool_read(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
  bool is_gone = result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_HANDLE;
  if (is_gone) reserved = 0;
  // Whatever the driver counts as reserved, what the program holds is taken.
  if (!is_gone && reserved < pool->held) reserved = pool->held;
  growing_settle(own, pool->device, &pool->reserve, reserved, ended);
  return !is_gone;
}

// Calls for every pool of the device, with its lock.
void pools_each(process *own, int device, void (*visit)(process *, pool_state *)) {
  uint32_t count = __atomic_load_n(&own->pool_count, __ATOMIC_ACQUIRE);
  if (count == 0) return;
  process_lock(&own->devices[device].pool_lock);
  for (uint32_t i = 0; i < count; i++) {
    pool_state *pool = &own->pools[i];
    bool is_there = is_taken(pool) && pool->handle != NULL && pool->is_destroyed == 0;
    if (is_there && pool->device == device) visit(own, pool);
  }
  process_unlock(&own->devices[device].pool_lock);
}

static void settle_charged(process *own, pool_state *pool) {
  if (pool->is_ending != 0) {
    pool_end(own, pool);
  } else if (pool->reserve.charged != 0) {
    pool_settle(own, pool, 0);
  }
}

void pools_settle(process *own, int device) {
  pools_each(own, device, settle_charged);
}

// Does the program use all that the pool reserves?
static bool is_full(const pool_state *pool) {
  uint64_t reserved = pool->reserve.charged, used;
  return reserved == 0 ||
         (pool_read(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) == CUDA_SUCCESS &&
          used == reserved);
}

static void settle_shrinking(process *own, pool_state *pool) {
  if (pool->may_shrink == 0) return;
  settle_charged(own, pool);
  if (pool->handle != NULL && pool->is_ending == 0 && is_full(pool)) pool->may_shrink = 0;
  if (pool->may_shrink != 0) __atomic_store_n(&own->pools_may_shrink, 1, __ATOMIC_RELAXED);
}

void pool_forget_streams(process *own, pool_state *pool) {
  pool->freed_in = 0;
  pool->freed_in_many = 0;
}

void pools_waited(process *own, uint64_t stream) {
  __atomic_store_n(&own->pools_may_shrink, 0, __ATOMIC_RELAXED);
  for (int device = 0; device < (int)own->device_count; device++) {
    pools_each(own, device, settle_shrinking);
  }
  uint32_t count = __atomic_load_n(&own->pool_count, __ATOMIC_ACQUIRE);
  for (uint32_t i = 0; i < count && stream != NO_STREAM && stream != EVERY_STREAM; i++) {
    pool_state *pool = &own->pools[i];
    int device = pool->device;
    if (device == POOL_UNCHARGED) continue;
    process_lock(&own->devices[device].pool_lock);
    if (pool->freed_in == stream && pool->freed_in_many == 0) pool->freed_in = 0;
    process_unlock(&own->devices[device].pool_lock);
  }
}

// ---- calls of the driver ----

void pool_call(process *own, int device) {
  uncancelled_begin();
  process_unlock(&own->devices[device].pool_lock);
}

void pool_called(process *own, int device) {
  process_lock(&own->devices[device].pool_lock);
  uncancelled_end();
}

bool pool_is(const pool_state *pool, CUmemoryPool handle) {
  return pool->handle == handle;
}

// Frees the place of a pool that is gone.
static void free_place(pool_state *pool) {
  __atomic_store_n(&pool->handle, NULL, __ATOMIC_RELAXED);
  if (pool->reserve.calls == 0) __atomic_store_n(&pool->taken, 0, __ATOMIC_RELEASE);
}

bool pool_outlives(pool_state *pool, CUmemoryPool handle) {
  if (pool->handle == NULL) free_place(pool);
  return pool_is(pool, handle);
}

// False: meanwhile the pool has gone.
static bool trim(process *own, pool_state *pool) {
  CUmemoryPool handle = pool->handle;
  int device = pool->device;
  if (!growing_begin(own, device, &pool->reserve, 0)) return true;
  pool_call(own, device);
  DRIVER(REAL(cuMemPoolTrimTo)(handle, 0));
  pool_called(own, device);
  growing_end(&pool->reserve, 0, false);
  return pool_outlives(pool, handle);
}

void pool_trim(process *own, pool_state *pool) {
  if (trim(own, pool)) pool_settle(own, pool, 0);
}

void pools_trim(process *own, int device) {
  bool has_turn = turn_take(&own->devices[device].pool_turn);
  pools_each(own, device, pool_trim);
  turn_give(&own->devices[device].pool_turn, has_turn);
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
  pool->held = 0;
  pool_forget_streams(own, pool);
}

static void pool_bury(process *own, pool_state *pool) {
  charge_release(own, pool->device, pool->reserve.charged);
  pool->reserve.charged = 0;
  forget_contents(own, pool);
  free_place(pool);
}

// The driver keeps what was not freed of a destroyed pool, and what is freed in a stream until the
// stream has come so far, but tells nothing of it any more. So the pool is destroyed once it is
// empty.
void pool_end(process *own, pool_state *pool) {
  CUmemoryPool handle = pool->handle;
  if (pool->is_destroyed != 0 || !trim(own, pool) || pool->is_destroyed != 0) return;
  bool is_known = pool_settle(own, pool, 0);
  if (is_known && (pool->reserve.charged != 0 || pool->reserve.calls != 0)) {
    pool->may_shrink = 1;
    __atomic_store_n(&own->pools_may_shrink, 1, __ATOMIC_RELAXED);
    return;
  }
  if (!is_known) {
    pool_bury(own, pool);
    return;
  }
  // Until the driver has destroyed it, the pool is known to have ended: nothing is allocated of it.
  int device = pool->device;
  pool->is_destroyed = 1;
  pool->reserve.calls++;
  pool_call(own, device);
  DRIVER(REAL(cuMemPoolDestroy)(handle));
  pool_called(own, device);
  pool->reserve.calls--;
  if (pool_outlives(pool, handle)) pool_bury(own, pool);
}

static void reset_pool(process *own, pool_state *pool) {
  pool->held = 0;  // of what a reset left, the driver knows
  if (!pool_settle(own, pool, 0)) {
    pool_bury(own, pool);
  } else if (pool->reserve.charged == 0) {
    forget_contents(own, pool);
  }
}

void pools_reset(process *own, int device) {
  pools_each(own, device, reset_pool);
}

// ---- pools themselves ----

// The handle is another pool's. A place that calls are using is freed by the last of them.
static void forget_uncharged(process *own, pool_state *gone, CUmemoryPool handle) {
  pthread_mutex_lock(&own->pool_table_lock);
  if (is_taken(gone) && pool_is(gone, handle)) free_place(gone);
  pthread_mutex_unlock(&own->pool_table_lock);
}

// The driver gives a new pool the handle of one that went with its context, of whatever place.
static pool_state *add_new_pool(process *own, CUmemoryPool handle, int device) {
  pool_state *gone = pool_find(own, handle);
  int device_of_gone = gone == NULL ? POOL_UNCHARGED : gone->device;
  if (gone != NULL && device_of_gone == POOL_UNCHARGED) {
    forget_uncharged(own, gone, handle);
  } else if (gone != NULL) {
    pthread_mutex_t *lock = &own->devices[device_of_gone].pool_lock;
    process_lock(lock);
    // Its place may have been freed meanwhile, and taken by another pool.
    bool is_there = is_taken(gone) && pool_is(gone, handle) && gone->device == device_of_gone;
    if (is_there) pool_bury(own, gone);
    process_unlock(lock);
  }
  pool_state *added = add_pool(own, handle, device);
  if (added != NULL) return added;
  pools_waited(own, EVERY_STREAM);  // some that are ending may be empty by now
  return add_pool(own, handle, device);
}

// A pool of memory that is not understood can be made: nothing is allocated from it.
CUDA_WRAPPER(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *properties)) {
  if (!governed()) return UNGOVERNED(cuMemPoolCreate)(pool, properties);
  process *own = process_attach();
  if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  if (properties == NULL) return DRIVER(REAL(cuMemPoolCreate)(pool, properties));
  UNCANCELLED;
  // Another thread may write them meanwhile.
  const CUmemPoolProps read = *properties;
  CUmemoryPool made = NULL;
  CUresult result = DRIVER(REAL(cuMemPoolCreate)(RESULT(pool, made), &read));
  if (result != CUDA_SUCCESS) return result;
  int device = pool_device(own, &read.location, read.allocType);
  pool_state *added = device < POOL_UNCHARGED ? NULL : add_new_pool(own, made, device);
  if (added != NULL) added->made_as = read;
  if (added == NULL && device >= POOL_UNCHARGED) {
    DRIVER(REAL(cuMemPoolDestroy)(made));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *pool = made;
  return result;
}

// Its memory is charged to the process that made it, and nothing can be allocated from it here.
CUDA_WRAPPER(cuMemPoolImportFromShareableHandle,
             (CUmemoryPool * pool, void *handle, CUmemAllocationHandleType type,
              unsigned long long flags)) {
  UNCANCELLED;
  CUmemoryPool made = NULL;
  CUresult result =
      DRIVER(REAL(cuMemPoolImportFromShareableHandle)(RESULT(pool, made), handle, type, flags));
  process *own = result == CUDA_SUCCESS && governed() ? process_state() : NULL;
  if (own != NULL && add_new_pool(own, made, POOL_UNCHARGED) == NULL) {
    DRIVER(REAL(cuMemPoolDestroy)(made));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  GIVE_RESULT(pool, made, result);
  return result;
}

// As the driver does with a pool that is destroyed.
static void leave_current(pool_state *pool) {
  CUmemLocation at = pool->made_as.location;
  CUmemAllocationType type = pool->made_as.allocType;
  CUmemoryPool current, usual;
  if (DRIVER(USED(cuMemGetMemPool)(&current, &at, type)) == CUDA_SUCCESS) {
    if (current != pool->handle) return;
    CUresult result = DRIVER(USED(cuMemGetDefaultMemPool)(&usual, &at, type));
    if (result == CUDA_SUCCESS) DRIVER(USED(cuMemSetMemPool)(&at, type, usual));
  } else if (DRIVER(USED(cuDeviceGetMemPool)(&current, at.id)) == CUDA_SUCCESS &&
             current == pool->handle &&
             DRIVER(USED(cuDeviceGetDefaultMemPool)(&usual, at.id)) == CUDA_SUCCESS) {
    DRIVER(USED(cuDeviceSetMemPool)(at.id, usual));
  }
}

// With the device's pool lock held.
static CUresult destroy_charged(process *own, pool_state *pool, CUmemoryPool given) {
  if (!pool_is(pool, given) || pool->is_ending != 0) return CUDA_ERROR_INVALID_VALUE;
  bool is_made = pool->made_as.allocType != CU_MEM_ALLOCATION_TYPE_INVALID;
  if (!is_made) {
    int device = pool->device;
    CUmemoryPool handle = pool->handle;
    pool_call(own, device);
    CUresult result = DRIVER(REAL(cuMemPoolDestroy)(handle));
    pool_called(own, device);
    if (result == CUDA_SUCCESS && pool_is(pool, handle)) pool_bury(own, pool);
    return result;
  }
  pool->is_ending = 1;
  leave_current(pool);
  pool_end(own, pool);
  return CUDA_SUCCESS;
}

// ---- pools that are not charged; their places are under the table's lock ----
//
// A pool is destroyed once no allocation is under way in it: the next pool of its handle may have a
// device's memory.

static bool is_uncharged(const pool_state *pool, CUmemoryPool handle) {
  return is_taken(pool) && pool_is(pool, handle) && pool->device == POOL_UNCHARGED &&
         pool->is_ending == 0;
}

bool pool_enter_uncharged(process *own, pool_state *pool, CUmemoryPool handle) {
  process_lock(&own->pool_table_lock);
  bool is_there = is_uncharged(pool, handle);
  if (is_there) pool->reserve.calls++;
  process_unlock(&own->pool_table_lock);
  return is_there;
}

// The last to use a pool that has ended destroys it. The place stays taken meanwhile.
static CUresult leave_uncharged(process *own, pool_state *pool) {
  process_lock(&own->pool_table_lock);
  CUmemoryPool handle = pool->handle;
  bool is_last = pool->reserve.calls == 1 && pool->is_ending != 0 && handle != NULL;
  if (!is_last && --pool->reserve.calls == 0 && handle == NULL) free_place(pool);
  process_unlock(&own->pool_table_lock);
  if (!is_last) return CUDA_SUCCESS;
  CUresult result = DRIVER(REAL(cuMemPoolDestroy)(handle));
  process_lock(&own->pool_table_lock);
  pool->reserve.calls--;
  if (result == CUDA_SUCCESS) {
    free_place(pool);
  } else {
    pool->is_ending = 0;
  }
  process_unlock(&own->pool_table_lock);
  return result;
}

void pool_leave_uncharged(process *own, pool_state *pool) {
  leave_uncharged(own, pool);
}

static CUresult destroy_uncharged(process *own, pool_state *pool, CUmemoryPool handle) {
  process_lock(&own->pool_table_lock);
  bool is_there = is_uncharged(pool, handle);
  if (is_there) {
    pool->reserve.calls++;
    pool->is_ending = 1;
  }
  process_unlock(&own->pool_table_lock);
  if (!is_there) return CUDA_ERROR_INVALID_VALUE;
  if (pool->made_as.allocType != CU_MEM_ALLOCATION_TYPE_INVALID) leave_current(pool);
  return leave_uncharged(own, pool);
}

CUDA_WRAPPER(cuMemPoolDestroy, (CUmemoryPool handle)) {
  if (!governed()) return UNGOVERNED(cuMemPoolDestroy)(handle);
  UNCANCELLED;
  process *own = process_state();
  pool_state *pool = own == NULL ? NULL : pool_find(own, handle);
  if (pool == NULL) return DRIVER(REAL(cuMemPoolDestroy)(handle));
  int device = pool->device;
  if (device == POOL_UNCHARGED) return destroy_uncharged(own, pool, handle);
  process_lock(&own->devices[device].pool_lock);
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (pool->device == device) result = destroy_charged(own, pool, handle);
  process_unlock(&own->devices[device].pool_lock);
  return result;
}

static CUresult changed(CUmemoryPool handle, CUresult result) {
  process *own = governed() ? process_state() : NULL;
  pool_state *pool = own == NULL ? NULL : pool_find(own, handle);
  int device = pool == NULL ? POOL_UNCHARGED : pool->device;
  if (device == POOL_UNCHARGED) return result;
  process_lock(&own->devices[device].pool_lock);
  if (pool_is(pool, handle) && pool->device == device) settle_charged(own, pool);
  process_unlock(&own->devices[device].pool_lock);
  return result;
}

CUDA_WRAPPER(cuMemPoolTrimTo, (CUmemoryPool pool, size_t bytes)) {
  UNCANCELLED;
  return changed(pool, DRIVER(REAL(cuMemPoolTrimTo)(pool, bytes)));
}

CUDA_WRAPPER(cuMemPoolSetAttribute,
             (CUmemoryPool pool, CUmemPool_attribute attribute, void *value)) {
  UNCANCELLED;
  return changed(pool, DRIVER(REAL(cuMemPoolSetAttribute)(pool, attribute, value)));
}
