// SPDX-License-Identifier: Apache-2.0
// Stream-ordered allocation: pieces of pools.
//
// The allocations of a device's pools come through here one at a time, as long as none waits in the
// driver. The most that a pool can grow by is reserved before, and what it did not need is given
// back after.
#include "dead.h"
#include "driver.h"
#include "memory.h"
#include "pools.h"
#include "room.h"
#include "streams.h"

// A pool grows by no less than this.
#define POOL_GROWTH (32 * MIB)

// ---- allocating ----

typedef struct pool_request {
  process *own;
  pool_state *pool;
  int device;  // of the pool; its place may become another pool's until the lock is taken
  CUstream stream;
  uint64_t bytes;
  uint64_t growth;   // what the pool may grow by
  bool is_reserved;  // the growth is
  bool has_turn;
  bool is_short;  // the driver had no memory for it
} pool_request;

// Around all that changes a pool.
static void enter(pool_request *request) {
  device_state *state = &request->own->devices[request->device];
  request->has_turn = turn_take(&state->pool_turn);
  process_lock(&state->pool_lock);
}

static void leave(pool_request *request) {
  device_state *state = &request->own->devices[request->device];
  process_unlock(&state->pool_lock);
  turn_give(&state->pool_turn, request->has_turn);
}

// Does the pool certainly have a gap? What was freed in this stream can be had in it without
// waiting, what was freed in others cannot.
static bool has_room(const pool_request *request) {
  const pool_state *pool = request->pool;
  uint64_t reserved;
  if (pool->freed_in_many != 0) return false;
  if (pool->freed_in != 0 && pool->freed_in != stream_identity(request->stream)) return false;
  if (pool_read(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS) {
    return false;
  }
  room_question question = {.holders = SPACE_CHUNK,
                            .pieces = KIND_POOLED,
                            .owner = pool_id(request->own, pool),
                            .bytes = request->bytes,
                            .total = reserved};
  return room_exists(request->own, &question);
}

static void wait_for_all(process *own, int device) {
  if (context_is_capturing() || DRIVER(REAL(cuCtxSynchronize)()) != CUDA_SUCCESS) return;
  pools_each(own, device, pool_forget_streams);
}

// Beside another call no gap is certain.
static bool begin_in_place(const pool_request *request) {
  growing *reserve = &request->pool->reserve;
  return reserve->calls == 0 && has_room(request) &&
         growing_begin_in_place(reserve, request->growth);
}

static bool begin_reserved(pool_request *request) {
  request->is_reserved = true;
  if (growing_begin(request->own, request->device, &request->pool->reserve, request->growth))
    return true;
  charge_release(request->own, request->device, request->growth);
  return false;
}

// Without turn and lock: others' allocations may be what the stream waits for.
static bool make_room(process *own, int device, CUstream stream, uint64_t growth) {
  pools_settle(own, device);
  if (charge_try(own, device, growth)) return true;
  DRIVER(REAL(cuStreamSynchronize)(stream));
  pools_trim(own, device);
  if (charge_try(own, device, growth)) return true;
  wait_for_all(own, device);
  pools_trim(own, device);
  return charge_try(own, device, growth);
}

// Is the place still of the pool that was asked for? With the lock.
static bool is_asked(const pool_request *request, CUmemoryPool handle) {
  return pool_is(request->pool, handle) && request->pool->device == request->device;
}

// Begins a call: reserves for the growth, or sees that there will be none, making room in the pools
// of this process if need be: what was freed is waited for and trimmed.
static bool begin(pool_request *request, CUmemoryPool handle) {
  process *own = request->own;
  int device = request->device;
  request->is_reserved = false;
  if (LIKELY(charge_try(own, device, request->growth))) return begin_reserved(request);
  if (begin_in_place(request)) return true;
  leave(request);
  bool fits = make_room(own, device, request->stream, request->growth);
  enter(request);
  if (!fits && is_asked(request, handle) && begin_in_place(request)) return true;
  if (!fits) {
    leave(request);
    fits = charge_last_try(own, device, request->growth);
    enter(request);
  }
  if (fits && is_asked(request, handle)) return begin_reserved(request);
  if (fits) charge_release(own, device, request->growth);
  return false;
}

static void let_go(pool_state *pool, uint64_t bytes) {
  pool->held -= bytes < pool->held ? bytes : pool->held;
}

static bool keep_pooled(const pool_request *request, CUdeviceptr pointer) {
  process *own = request->own;
  record added = {.space = SPACE_POINTER,
                  .kind = KIND_POOLED,
                  .key = pointer,
                  .bytes = request->bytes,
                  .owner = pool_id(own, request->pool),
                  .count = piece_number(own),
                  .device = request->pool->device};
  record displaced;
  bool was_displaced;
  if (!records_put(&own->records, &added, &displaced, &was_displaced)) return false;
  if (was_displaced && displaced.kind == KIND_POOLED) {
    let_go(&own->pools[displaced.owner - 1], displaced.bytes);
    return true;
  }
  if (was_displaced) record_displaced(own, &displaced);
  return true;
}

// A pool that has grown begins its new chunk with the allocation that made it grow.
static void note_chunk(const pool_request *request, CUdeviceptr pointer, uint64_t bytes) {
  record chunk = {.space = SPACE_CHUNK,
                  .key = pointer,
                  .owner = pool_id(request->own, request->pool),
                  .bytes = bytes,
                  .device = request->pool->device};
  records_keep(&request->own->records, &chunk);
}

typedef CUresult allocate_call(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                               CUstream stream);

// The pool grew where it had room by the records: that must not stand.
static CUresult take_back(pool_request *request, CUdeviceptr pointer) {
  pool_state *pool = request->pool;
  CUmemoryPool handle = pool->handle;
  let_go(pool, request->bytes);
  pool_call(request->own, request->device);
  DRIVER(REAL(cuMemFree_v2)(pointer));
  pool_called(request->own, request->device);
  if (pool_is(pool, handle)) pool_trim(request->own, pool);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate_locked(pool_request *request, CUmemoryPool handle, CUdeviceptr *pointer,
                                allocate_call *call) {
  process *own = request->own;
  pool_state *pool = request->pool;
  uint64_t whole = round_up(request->bytes, CHARGE_GRANULE);
  request->growth = whole < POOL_GROWTH ? POOL_GROWTH : whole;
  request->is_short = false;
  if (!is_asked(request, handle) || pool->is_ending != 0) return CUDA_ERROR_INVALID_VALUE;
  if (pool->may_shrink != 0) pool_settle(own, pool, 0);
  if (!begin(request, handle)) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t before = pool->reserve.charged;
  CUdeviceptr made = 0;
  pool_call(own, request->device);
  CUresult result = DRIVER(call(&made, request->bytes, handle, request->stream));
  pool_called(own, request->device);
  uint64_t reserved = growing_end(&pool->reserve, request->growth, !request->is_reserved);
  if (!pool_outlives(pool, handle)) {
    pool->reserve.ahead -= reserved;
    charge_release(own, request->device, reserved);
    return result;
  }
  request->is_short = result == CUDA_ERROR_OUT_OF_MEMORY;
  if (result == CUDA_SUCCESS) pool->held += request->bytes;
  pool_settle(own, pool, reserved);
  if (result != CUDA_SUCCESS) return result;
  uint64_t grown = pool->reserve.charged > before ? pool->reserve.charged - before : 0;
  if (reserved == 0 && grown != 0) return take_back(request, made);
  // Which of several calls made it grow is not known: near the limit no gap is certain then.
  if (grown != 0 && pool->reserve.is_mixed == 0) note_chunk(request, made, grown);
  if (!keep_pooled(request, made)) return take_back(request, made);
  *pointer = made;
  return CUDA_SUCCESS;
}

// What is no pool at all is an error of the driver's.
static CUresult refuse_unknown(CUmemoryPool handle) {
  uint64_t bytes;
  CUresult result =
      DRIVER(USED(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes));
  return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

static CUresult allocate(pool_request *request, CUmemoryPool handle, CUdeviceptr *pointer,
                         allocate_call *call) {
  if (request->pool == NULL) return refuse_unknown(handle);
  UNCANCELLED;
  int device = request->device = request->pool->device;
  if (device == POOL_UNCHARGED) {
    if (!pool_enter_uncharged(request->own, request->pool, handle)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = DRIVER(call(pointer, request->bytes, handle, request->stream));
    pool_leave_uncharged(request->own, request->pool);
    return result;
  }
  patience left = {0};
  CUresult result;
  do {
    enter(request);
    result = allocate_locked(request, handle, pointer, call);
    leave(request);
  } while (request->is_short && dead_may_be_freed(request->own, device, &left));
  return result;
}

typedef CUresult current_call(CUdeviceptr *pointer, size_t bytes, CUstream stream);

// The driver allocates from the pool that is current for the stream's device. That is looked up and
// then named, so that what is charged is where it comes from.
static CUresult allocate_from_current(CUdeviceptr *pointer, size_t bytes, CUstream stream,
                                      current_call *record, allocate_call *call) {
  if (bytes == 0 || pointer == NULL) return DRIVER(record(pointer, bytes, stream));
  target at;
  CUresult refusal = target_stream(&at, stream);
  if (refusal != CUDA_SUCCESS) return refusal;
  // Without a context the driver has its own error.
  if (at.context == NULL) return DRIVER(record(pointer, bytes, stream));
  if (capture_hold(at.own, stream)) {
    CUresult result = DRIVER(record(pointer, bytes, stream));
    capture_let_go(at.own);
    return result;
  }
  CUmemoryPool handle;
  refusal = DRIVER(USED(cuDeviceGetMemPool)(&handle, at.ordinal));
  if (refusal != CUDA_SUCCESS) return refusal;
  pool_request request = {
      .own = at.own, .pool = pool_known(at.own, handle), .stream = stream, .bytes = bytes};
  return allocate(&request, handle, pointer, call);
}

static CUresult allocate_from(CUdeviceptr *pointer, size_t bytes, CUmemoryPool handle,
                              CUstream stream, allocate_call *call) {
  process *own = process_attach();
  if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  if (bytes == 0 || pointer == NULL || handle == NULL) {
    return DRIVER(call(pointer, bytes, handle, stream));
  }
  if (capture_hold(own, stream)) {
    CUresult result = DRIVER(call(pointer, bytes, handle, stream));
    capture_let_go(own);
    return result;
  }
  pool_request request = {
      .own = own, .pool = pool_known(own, handle), .stream = stream, .bytes = bytes};
  return allocate(&request, handle, pointer, call);
}

CUDA_WRAPPER(cuMemAllocAsync, (CUdeviceptr * pointer, size_t bytes, CUstream stream)) {
  if (!governed()) return UNGOVERNED(cuMemAllocAsync)(pointer, bytes, stream);
  return allocate_from_current(pointer, bytes, stream, REAL(cuMemAllocAsync),
                               REAL(cuMemAllocFromPoolAsync));
}

CUDA_WRAPPER(cuMemAllocAsync_ptsz, (CUdeviceptr * pointer, size_t bytes, CUstream stream)) {
  if (!governed()) return UNGOVERNED(cuMemAllocAsync_ptsz)(pointer, bytes, stream);
  return allocate_from_current(pointer, bytes, per_thread(stream), REAL(cuMemAllocAsync_ptsz),
                               REAL(cuMemAllocFromPoolAsync_ptsz));
}

CUDA_WRAPPER(cuMemAllocFromPoolAsync,
             (CUdeviceptr * pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) {
  if (!governed()) return UNGOVERNED(cuMemAllocFromPoolAsync)(pointer, bytes, pool, stream);
  return allocate_from(pointer, bytes, pool, stream, REAL(cuMemAllocFromPoolAsync));
}

CUDA_WRAPPER(cuMemAllocFromPoolAsync_ptsz,
             (CUdeviceptr * pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) {
  if (!governed()) return UNGOVERNED(cuMemAllocFromPoolAsync_ptsz)(pointer, bytes, pool, stream);
  return allocate_from(pointer, bytes, pool, per_thread(stream),
                       REAL(cuMemAllocFromPoolAsync_ptsz));
}

// ---- freeing ----

// One piece less; `stream` 0: at once. With the device's pool lock held.
static void piece_gone(process *own, const record *gone, uint64_t stream) {
  pool_state *pool = &own->pools[gone->owner - 1];
  pool->may_shrink = 1;
  if (stream != 0 && pool->freed_in != 0 && pool->freed_in != stream) pool->freed_in_many = 1;
  if (stream != 0) pool->freed_in = stream;
  __atomic_store_n(&own->pools_may_shrink, 1, __ATOMIC_RELAXED);
  if (pool->is_ending != 0) {
    pool_end(own, pool);
  } else if (stream == 0) {
    pool_settle(own, pool, 0);
  }
}

void pools_lost(process *own, const record *lost) {
  pool_state *pool = &own->pools[lost->owner - 1];
  pthread_mutex_t *lock = &own->devices[lost->device].pool_lock;
  process_lock(lock);
  if (pool->device == lost->device) {
    let_go(pool, lost->bytes);
    piece_gone(own, lost, 0);
  }
  process_unlock(lock);
}

typedef CUresult free_call(CUdeviceptr pointer, CUstream stream);

static CUresult free_now(CUdeviceptr pointer, CUstream unused) {
  return REAL(cuMemFree_v2)(pointer);
}

// Its place is no gap before the driver has freed it. Another thread may have been given the
// address by then, and has let the piece go.
static CUresult free_piece(process *own, const record *known, CUstream stream, free_call *call) {
  pool_state *pool = &own->pools[known->owner - 1];
  pthread_mutex_t *lock = &own->devices[known->device].pool_lock;
  CUmemoryPool handle = __atomic_load_n(&pool->handle, __ATOMIC_RELAXED);
  CUresult result = DRIVER(call(known->key, stream));
  if (result != CUDA_SUCCESS) return result;
  process_lock(lock);
  if (records_take_same(&own->records, known)) let_go(pool, known->bytes);
  if (pool_is(pool, handle) && pool->device == known->device) {
    piece_gone(own, known, call == free_now ? 0 : stream_identity(stream));
  }
  process_unlock(lock);
  return result;
}

CUresult pools_free(process *own, const record *known) {
  return free_piece(own, known, NULL, free_now);
}

static CUresult free_in_stream(CUdeviceptr pointer, CUstream stream, free_call *call) {
  UNCANCELLED;
  process *own = process_state();
  record known;
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
    records_keep(&own->records, &known);
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
