// SPDX-License-Identifier: Apache-2.0
// Stream-ordered allocation. A pool takes memory from the GPU in large pieces and keeps it, so what
// is charged is what the pool reserves (CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), not what the program
// has of it.
//
// A pool grows only within an allocation, and all allocations of a device's pools come through here
// one at a time: the most that one can grow by is reserved before, and what it did not need is given
// back after. A pool shrinks at its own time: that is read again wherever it may have happened, and
// until then too much is charged, never too little.
#include "pools.h"

#include "driver.h"
#include "memory.h"
#include "room.h"
#include "streams.h"

// A pool grows by no less than this.
#define POOL_GROWTH (32 * MIB)

// ---- the table ----

static pool_state *find_pool(process *own, CUmemoryPool handle) {
  uint32_t count = __atomic_load_n(&own->pool_count, __ATOMIC_ACQUIRE);
  for (uint32_t i = 0; i < count; i++) {
    pool_state *pool = &own->pools[i];
    if (__atomic_load_n(&pool->taken, __ATOMIC_ACQUIRE) != 0 && pool->handle == handle) return pool;
  }
  return NULL;
}

// NULL: there are too many pools. Two threads that add the same pool get the same place.
static pool_state *add_pool(process *own, CUmemoryPool handle, CUdevice ordinal, int device) {
  pthread_mutex_lock(&own->pool_table_lock);
  pool_state *added = find_pool(own, handle);
  for (uint32_t i = 0; i < MAX_POOLS && added == NULL; i++) {
    if (own->pools[i].taken != 0) continue;
    added = &own->pools[i];
    *added = (pool_state){.handle = handle, .ordinal = ordinal, .device = (int16_t)device};
    __atomic_store_n(&added->taken, 1, __ATOMIC_RELEASE);
    if (i >= own->pool_count) __atomic_store_n(&own->pool_count, i + 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&own->pool_table_lock);
  return added;
}

static uint64_t id_of(const process *own, const pool_state *pool) {
  return (uint64_t)(pool - own->pools) + 1;
}

// A device's default pool is met without having been made. What is neither known nor a default pool
// is another process's or not of a device.
static pool_state *known_pool(process *own, CUmemoryPool handle) {
  pool_state *pool = find_pool(own, handle);
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

static CUresult read_attribute(const pool_state *pool, CUmemPool_attribute attribute,
                               uint64_t *bytes) {
  return DRIVER(USED(cuMemPoolGetAttribute)(pool->handle, attribute, bytes));
}

// Brings the charge to what is reserved; `ahead` was charged beyond the pool's charge. With the
// device's pool lock held. False: the driver knows the pool no more, because its context was reset.
static bool settle_pool(process *own, pool_state *pool, uint64_t ahead) {
  uint64_t reserved = pool->charged + ahead, used;
  if (pool->handle == NULL) return true;
  CUresult result = read_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
  bool is_gone = result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_HANDLE;
  if (is_gone) reserved = 0;
  charge_correct(own, pool->device, pool->charged + ahead, reserved);
  pool->charged = reserved;
  if (pool->may_shrink == 0) return !is_gone;
  bool is_full = reserved == 0 || (read_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) ==
                                       CUDA_SUCCESS &&
                                   used == reserved);
  if (is_full) pool->may_shrink = 0;
  return !is_gone;
}

// Calls for every pool of the device, with its lock.
static void each_pool(process *own, int device, void (*visit)(process *, pool_state *)) {
  uint32_t count = __atomic_load_n(&own->pool_count, __ATOMIC_ACQUIRE);
  if (count == 0) return;
  pthread_mutex_lock(&own->devices[device].pool_lock);
  for (uint32_t i = 0; i < count; i++) {
    pool_state *pool = &own->pools[i];
    if (pool->taken != 0 && pool->device == device) visit(own, pool);
  }
  pthread_mutex_unlock(&own->devices[device].pool_lock);
}

static void settle_charged(process *own, pool_state *pool) {
  if (pool->charged != 0) settle_pool(own, pool, 0);
}

void pools_settle(process *own, int device) { each_pool(own, device, settle_charged); }

static void settle_shrinking(process *own, pool_state *pool) {
  if (pool->may_shrink == 0) return;
  settle_pool(own, pool, 0);
  if (pool->may_shrink != 0) __atomic_store_n(&own->pools_may_shrink, 1, __ATOMIC_RELAXED);
}

static void forget_streams(process *own, pool_state *pool) {
  pool->freed_in = 0;
  pool->freed_in_many = 0;
}

void pools_waited(process *own, uint64_t stream) {
  __atomic_store_n(&own->pools_may_shrink, 0, __ATOMIC_RELAXED);
  for (int device = 0; device < (int)own->ledger.policy->device_count; device++) {
    each_pool(own, device, settle_shrinking);
  }
  uint32_t count = __atomic_load_n(&own->pool_count, __ATOMIC_ACQUIRE);
  for (uint32_t i = 0; i < count && stream != NO_STREAM && stream != EVERY_STREAM; i++) {
    pool_state *pool = &own->pools[i];
    pthread_mutex_lock(&own->devices[pool->device].pool_lock);
    if (pool->freed_in == stream && pool->freed_in_many == 0) pool->freed_in = 0;
    pthread_mutex_unlock(&own->devices[pool->device].pool_lock);
  }
}

static void trim(process *own, pool_state *pool) {
  if (pool->handle == NULL) return;
  DRIVER(REAL(cuMemPoolTrimTo)(pool->handle, 0));
  settle_pool(own, pool, 0);
}

// ---- allocating ----

typedef struct pool_request {
  process *own;
  pool_state *pool;
  CUstream stream;
  uint64_t bytes;
  uint64_t growth;  // what is reserved for the pool to grow by
} pool_request;

// Does the pool certainly have a gap? What was freed in this stream can be had in it without waiting,
// what was freed in others cannot.
static bool has_room(const pool_request *request) {
  const pool_state *pool = request->pool;
  uint64_t reserved;
  if (pool->freed_in_many != 0) return false;
  if (pool->freed_in != 0 && pool->freed_in != stream_identity(request->stream)) return false;
  if (read_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS) {
    return false;
  }
  room_question question = {.holders = SPACE_CHUNK,
                            .pieces = KIND_POOLED,
                            .owner = id_of(request->own, pool),
                            .bytes = request->bytes,
                            .total = reserved};
  return room_exists(request->own, &question);
}

static void wait_for_all(process *own, int device) {
  if (context_is_capturing() || DRIVER(REAL(cuCtxSynchronize)()) != CUDA_SUCCESS) return;
  each_pool(own, device, forget_streams);
}

// Reserves for the growth, or sees that there will be none, making room in the pools of this process
// if need be: what was freed is waited for and trimmed. Called and returns with the pool lock held.
static bool reserve_growth(pool_request *request) {
  process *own = request->own;
  int device = request->pool->device;
  pthread_mutex_t *lock = &own->devices[device].pool_lock;
  if (LIKELY(charge_try(own, device, request->growth))) return true;
  uint64_t growth = request->growth;
  request->growth = 0;
  if (has_room(request)) return true;
  request->growth = growth;

  // Other threads' allocations may be what the stream waits for.
  pthread_mutex_unlock(lock);
  pools_settle(own, device);
  bool fits = charge_try(own, device, growth);
  if (!fits) {
    DRIVER(REAL(cuStreamSynchronize)(request->stream));
    each_pool(own, device, trim);
    fits = charge_try(own, device, growth);
  }
  if (!fits) {
    wait_for_all(own, device);
    each_pool(own, device, trim);
    fits = charge_try(own, device, growth);
  }
  pthread_mutex_lock(lock);
  if (fits) return true;
  if (has_room(request)) {
    request->growth = 0;
    return true;
  }
  pthread_mutex_unlock(lock);
  fits = charge_last_try(own, device, growth);
  pthread_mutex_lock(lock);
  return fits;
}

static bool keep_pooled(const pool_request *request, CUdeviceptr pointer) {
  process *own = request->own;
  record added = {.space = SPACE_POINTER,
                  .kind = KIND_POOLED,
                  .key = pointer,
                  .bytes = request->bytes,
                  .owner = id_of(own, request->pool),
                  .device = request->pool->device};
  record displaced;
  bool was_displaced;
  if (!records_put(&own->records, &added, &displaced, &was_displaced)) return false;
  if (was_displaced && displaced.kind != KIND_POOLED) record_displaced(own, &displaced);
  if (!was_displaced || displaced.kind != KIND_POOLED) {
    __atomic_add_fetch(&request->pool->allocations, 1, __ATOMIC_RELAXED);
  }
  return true;
}

// A pool that has grown begins its new chunk with the allocation that made it grow.
static void note_chunk(const pool_request *request, CUdeviceptr pointer, uint64_t bytes) {
  record chunk = {.space = SPACE_CHUNK,
                  .key = pointer,
                  .owner = id_of(request->own, request->pool),
                  .bytes = bytes,
                  .device = request->pool->device};
  record displaced;
  bool was_displaced;
  records_put(&request->own->records, &chunk, &displaced, &was_displaced);
}

typedef CUresult pool_call(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream);

// The pool grew where it had room by the records: that must not stand.
static CUresult take_back(pool_request *request, CUdeviceptr pointer) {
  DRIVER(REAL(cuMemFree_v2)(pointer));
  trim(request->own, request->pool);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate_locked(pool_request *request, CUdeviceptr *pointer, pool_call *call) {
  pool_state *pool = request->pool;
  if (pool->may_shrink != 0) settle_pool(request->own, pool, 0);
  if (!reserve_growth(request)) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t before = pool->charged;
  CUdeviceptr made = 0;
  CUresult result = DRIVER(call(&made, request->bytes, pool->handle, request->stream));
  settle_pool(request->own, pool, request->growth);
  if (result != CUDA_SUCCESS) return result;
  if (request->growth == 0 && pool->charged > before) return take_back(request, made);
  if (pool->charged > before) note_chunk(request, made, pool->charged - before);
  if (!keep_pooled(request, made)) return take_back(request, made);
  *pointer = made;
  return CUDA_SUCCESS;
}

static CUresult allocate(pool_request *request, CUdeviceptr *pointer, pool_call *call) {
  uint64_t whole = round_up(request->bytes, CHARGE_GRANULE);
  request->growth = whole < POOL_GROWTH ? POOL_GROWTH : whole;
  pthread_mutex_t *lock = &request->own->devices[request->pool->device].pool_lock;
  pthread_mutex_lock(lock);
  CUresult result = allocate_locked(request, pointer, call);
  pthread_mutex_unlock(lock);
  return result;
}

// The driver allocates from the pool that is current for the stream's device. That is looked up and
// then named, so that what is charged is where it comes from.
static CUresult allocate_from_current(CUdeviceptr *pointer, size_t bytes, CUstream stream,
                                      pool_call *call, bool *handled) {
  target at;
  *handled = false;
  if (bytes == 0 || pointer == NULL) return CUDA_SUCCESS;
  CUresult refusal = target_stream(&at, stream);
  *handled = refusal != CUDA_SUCCESS;
  if (refusal != CUDA_SUCCESS || at.context == NULL) return refusal;
  CUmemoryPool handle;
  if (stream_is_capturing(stream)) return CUDA_SUCCESS;
  if (DRIVER(USED(cuDeviceGetMemPool)(&handle, at.ordinal)) != CUDA_SUCCESS) return CUDA_SUCCESS;
  pool_state *pool = known_pool(at.own, handle);
  if (pool == NULL) return CUDA_SUCCESS;
  *handled = true;
  pool_request request = {at.own, pool, stream, bytes, 0};
  return allocate(&request, pointer, call);
}

static CUresult allocate_from(CUdeviceptr *pointer, size_t bytes, CUmemoryPool handle,
                              CUstream stream, pool_call *call) {
  process *own = process_attach();
  if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  pool_state *pool = bytes == 0 || pointer == NULL ? NULL : known_pool(own, handle);
  if (pool == NULL || stream_is_capturing(stream)) {
    return DRIVER(call(pointer, bytes, handle, stream));
  }
  pool_request request = {own, pool, stream, bytes, 0};
  return allocate(&request, pointer, call);
}

CUDA_WRAPPER(cuMemAllocAsync, (CUdeviceptr * pointer, size_t bytes, CUstream stream)) {
  if (!governed()) return REAL(cuMemAllocAsync)(pointer, bytes, stream);
  bool handled;
  CUresult result = allocate_from_current(pointer, bytes, stream, REAL(cuMemAllocFromPoolAsync),
                                          &handled);
  return handled ? result : DRIVER(REAL(cuMemAllocAsync)(pointer, bytes, stream));
}

CUDA_WRAPPER(cuMemAllocAsync_ptsz, (CUdeviceptr * pointer, size_t bytes, CUstream stream)) {
  if (!governed()) return REAL(cuMemAllocAsync_ptsz)(pointer, bytes, stream);
  bool handled;
  CUresult result = allocate_from_current(pointer, bytes, per_thread(stream),
                                          REAL(cuMemAllocFromPoolAsync_ptsz), &handled);
  return handled ? result : DRIVER(REAL(cuMemAllocAsync_ptsz)(pointer, bytes, stream));
}

CUDA_WRAPPER(cuMemAllocFromPoolAsync,
             (CUdeviceptr * pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) {
  if (!governed()) return REAL(cuMemAllocFromPoolAsync)(pointer, bytes, pool, stream);
  return allocate_from(pointer, bytes, pool, stream, REAL(cuMemAllocFromPoolAsync));
}

CUDA_WRAPPER(cuMemAllocFromPoolAsync_ptsz,
             (CUdeviceptr * pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) {
  if (!governed()) return REAL(cuMemAllocFromPoolAsync_ptsz)(pointer, bytes, pool, stream);
  return allocate_from(pointer, bytes, pool, per_thread(stream),
                       REAL(cuMemAllocFromPoolAsync_ptsz));
}

// ---- freeing ----

static bool is_of_pool(const record *seen, void *context) {
  const uint64_t *id = context;
  return seen->owner == *id && (seen->space == SPACE_CHUNK ||
                                (seen->space == SPACE_POINTER && seen->kind == KIND_POOLED));
}

static void forget_contents(process *own, pool_state *pool) {
  uint64_t id = id_of(own, pool);
  records_sweep(&own->records, is_of_pool, &id);
  __atomic_store_n(&pool->allocations, 0, __ATOMIC_RELAXED);
  forget_streams(own, pool);
}

// A destroyed pool keeps what was not freed, and nothing of it can be read any more: its charge
// stays until the last of it is gone for certain.
static void bury_pool(process *own, pool_state *pool) {
  charge_release(own, pool->device, pool->charged);
  pool->charged = 0;
  forget_contents(own, pool);
  __atomic_store_n(&pool->taken, 0, __ATOMIC_RELEASE);
}

static void reset_pool(process *own, pool_state *pool) {
  if (pool->handle == NULL || !settle_pool(own, pool, 0)) {
    bury_pool(own, pool);
  } else if (pool->charged == 0) {
    forget_contents(own, pool);
  }
}

void pools_reset(process *own, int device) { each_pool(own, device, reset_pool); }

// One piece less; `stream` 0: at once. With the device's pool lock held.
static void piece_gone(process *own, pool_state *pool, uint64_t stream) {
  uint32_t left = __atomic_sub_fetch(&pool->allocations, 1, __ATOMIC_RELAXED);
  if (pool->handle == NULL) {
    if (left == 0) bury_pool(own, pool);
    return;
  }
  pool->may_shrink = 1;
  if (stream != 0 && pool->freed_in != 0 && pool->freed_in != stream) pool->freed_in_many = 1;
  if (stream != 0) pool->freed_in = stream;
  __atomic_store_n(&own->pools_may_shrink, 1, __ATOMIC_RELAXED);
  if (stream == 0) settle_pool(own, pool, 0);
}

void pools_lost(process *own, const record *lost) {
  pool_state *pool = &own->pools[lost->owner - 1];
  pthread_mutex_lock(&own->devices[pool->device].pool_lock);
  piece_gone(own, pool, 0);
  pthread_mutex_unlock(&own->devices[pool->device].pool_lock);
}

typedef CUresult free_call(CUdeviceptr pointer, CUstream stream);

// Record, driver and pool change together: whether a pool has room is judged by all three.
static CUresult free_piece(process *own, const record *known, CUstream stream, free_call *call) {
  pool_state *pool = &own->pools[known->owner - 1];
  record gone, displaced;
  bool was_displaced;
  pthread_mutex_lock(&own->devices[pool->device].pool_lock);
  bool taken = records_take(&own->records, SPACE_POINTER, known->key, &gone);
  CUresult result = DRIVER(call(known->key, stream));
  // Of a destroyed pool nothing can be read later: what is freed has to be gone now.
  if (taken && result == CUDA_SUCCESS && pool->handle == NULL) {
    result = DRIVER(REAL(cuStreamSynchronize)(stream));
  }
  if (taken && result == CUDA_SUCCESS) piece_gone(own, pool, stream_identity(stream));
  if (taken && result != CUDA_SUCCESS) {
    records_put(&own->records, &gone, &displaced, &was_displaced);
  }
  pthread_mutex_unlock(&own->devices[pool->device].pool_lock);
  return result;
}

// cuMemFree waits for the device, so no lock is held meanwhile.
CUresult pools_free(process *own, CUdeviceptr pointer) {
  record gone, displaced;
  bool was_displaced;
  if (!records_take(&own->records, SPACE_POINTER, pointer, &gone)) {
    return DRIVER(REAL(cuMemFree_v2)(pointer));
  }
  leaving_begin(own, &gone);
  CUresult result = DRIVER(REAL(cuMemFree_v2)(pointer));
  if (result != CUDA_SUCCESS) records_put(&own->records, &gone, &displaced, &was_displaced);
  leaving_end(own, &gone);
  if (result == CUDA_SUCCESS) pools_lost(own, &gone);
  return result;
}

static CUresult free_in_stream(CUdeviceptr pointer, CUstream stream, free_call *call) {
  process *own = process_state();
  record known, displaced;
  bool was_displaced;
  if (own == NULL || !records_find(&own->records, SPACE_POINTER, pointer, &known) ||
      stream_is_capturing(stream)) {
    return DRIVER(call(pointer, stream));
  }
  if (known.kind == KIND_POOLED) {
    return free_piece(own, &known, stream, call);
  }
  // Memory of no pool, freed in stream order: when it is gone only the stream can tell.
  if (!records_take(&own->records, SPACE_POINTER, pointer, &known)) {
    return DRIVER(call(pointer, stream));
  }
  CUresult result = DRIVER(call(pointer, stream));
  if (result == CUDA_SUCCESS) {
    DRIVER(REAL(cuStreamSynchronize)(stream));
    record_displaced(own, &known);
  } else {
    records_put(&own->records, &known, &displaced, &was_displaced);
  }
  return result;
}

CUDA_WRAPPER(cuMemFreeAsync, (CUdeviceptr pointer, CUstream stream)) {
  if (!governed()) return REAL(cuMemFreeAsync)(pointer, stream);
  return free_in_stream(pointer, stream, REAL(cuMemFreeAsync));
}

CUDA_WRAPPER(cuMemFreeAsync_ptsz, (CUdeviceptr pointer, CUstream stream)) {
  if (!governed()) return REAL(cuMemFreeAsync_ptsz)(pointer, stream);
  return free_in_stream(pointer, per_thread(stream), REAL(cuMemFreeAsync_ptsz));
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
  pool_state *pool = own == NULL ? NULL : find_pool(own, handle);
  if (pool == NULL) return DRIVER(REAL(cuMemPoolDestroy)(handle));
  if (pool->may_shrink != 0) DRIVER(REAL(cuCtxSynchronize)());
  pthread_mutex_lock(&own->devices[pool->device].pool_lock);
  CUresult result = DRIVER(REAL(cuMemPoolDestroy)(handle));
  if (result == CUDA_SUCCESS) {
    pool->handle = NULL;
    if (__atomic_load_n(&pool->allocations, __ATOMIC_RELAXED) == 0) bury_pool(own, pool);
  }
  pthread_mutex_unlock(&own->devices[pool->device].pool_lock);
  return result;
}

static CUresult changed(CUmemoryPool handle, CUresult result) {
  process *own = governed() ? process_state() : NULL;
  pool_state *pool = own == NULL ? NULL : find_pool(own, handle);
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
