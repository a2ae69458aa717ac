// SPDX-License-Identifier: Apache-2.0
// Stream-ordered allocation: pools are charged for what they reserve, whatever the program has of
// it.
#include <pthread.h>

#include "compute_host.h"
#include "queue.h"

#define CONTEXT context_cost()
#define POOL_GROWTH (32 * MIB)

static uint64_t reserved_by(CUmemoryPool pool) {
  uint64_t bytes;
  OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes));
  return bytes;
}

static CUmemoryPool default_pool(void) {
  CUmemoryPool pool;
  OK(cuDeviceGetDefaultMemPool(&pool, 0));
  return pool;
}

static CUmemoryPool new_pool(void) {
  CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
  CUmemoryPool pool;
  OK(cuMemPoolCreate(&pool, &properties));
  return pool;
}

static void keep_all(CUmemoryPool pool) {
  uint64_t threshold = UINT64_MAX;
  OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
}

static void growth_is_charged(void) {
  start_on(0);
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUdeviceptr small, large;
  OK(cuMemAllocAsync(&small, 1000, stream));
  EXPECT_EQUAL(charged(0), CONTEXT + POOL_GROWTH);
  OK(cuMemAllocAsync(&large, 100 * MIB, stream));
  EXPECT_EQUAL(charged(0), CONTEXT + POOL_GROWTH + 100 * MIB);
  AGREE();
  OK(cuMemFreeAsync(small, stream));
  OK(cuMemFreeAsync(large, stream));
  OK(cuStreamSynchronize(stream));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  OK(cuMemAllocAsync_ptsz(&small, 1000, NULL));
  AGREE();
  OK(cuMemFree_v2(small));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void each_way_of_waiting_gives_back(void) {
  CUcontext context = start_on(0);
  CUdeviceptr pointer;
  CUevent event;
  OK(cuEventCreate(&event, 0));
  for (int way = 3; way >= 0; way--) {
    OK(cuMemAllocAsync(&pointer, 50 * MIB, NULL));
    OK(cuMemFreeAsync(pointer, NULL));
    OK(cuEventRecord(event, NULL));
    if (way == 0) OK(cuCtxSynchronize());
    if (way == 1) OK(cuCtxSynchronize_v2(context));
    if (way == 2) OK(cuEventSynchronize(event));
    if (way == 3) OK(cuStreamSynchronize_ptsz((CUstream)1));
    AGREE();
  }
}

static void a_threshold_keeps_the_charge(void) {
  start_on(0);
  CUdeviceptr pointer;
  keep_all(default_pool());
  OK(cuMemAllocAsync(&pointer, 200 * MIB, NULL));
  OK(cuMemFreeAsync(pointer, NULL));
  OK(cuCtxSynchronize());
  EXPECT_EQUAL(charged(0), CONTEXT + 200 * MIB);
  AGREE();
  OK(cuMemPoolTrimTo(default_pool(), 0));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void own_pools(void) {
  start_on(0);
  CUmemoryPool pool = new_pool(), other = new_pool();
  CUdeviceptr first, second;
  OK(cuMemAllocFromPoolAsync(&first, 10 * MIB, pool, NULL));
  OK(cuDeviceSetMemPool(0, other));
  OK(cuMemAllocAsync(&second, 40 * MIB, NULL));
  EXPECT_EQUAL(reserved_by(other), 40 * MIB);
  EXPECT_EQUAL(charged(0), CONTEXT + POOL_GROWTH + 40 * MIB);
  AGREE();
  OK(cuMemFreeAsync(second, NULL));
  OK(cuMemPoolDestroy(other));
  EXPECT_EQUAL(charged(0), CONTEXT + POOL_GROWTH);
  AGREE();
  // Destroyed with memory in use, it lives until that is freed.
  OK(cuMemPoolDestroy(pool));
  EXPECT_EQUAL(charged(0), CONTEXT + POOL_GROWTH);
  OK(cuMemFreeAsync(first, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  for (int i = 0; i < 3000; i++) OK(cuMemPoolDestroy(new_pool()));
  EXPECT_EQUAL(charged(0), CONTEXT);
}

// What is freed in a stream stays reserved until the stream has come so far: the stream of another
// context, too, and also where nothing may be waited for.
static void a_destroyed_pool_stays_charged_while_frees_are_pending(void) {
  CUcontext first = start_on(0), second;
  CUstream stream, recorded;
  CUgraph graph;
  OK(cuStreamCreate(&recorded, CU_STREAM_NON_BLOCKING));
  OK(cuCtxCreate_v2(&second, 0, 0));
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUfunction function = spin_function();
  CUcontext currents[] = {second, first, NULL, first};
  for (int way = 3; way >= 0; way--) {
    CUmemoryPool pool = new_pool(), current;
    CUdeviceptr piece, kept;
    OK(cuDeviceSetMemPool(0, pool));
    OK(cuMemAllocAsync(&piece, 50 * MIB, stream));
    OK(cuMemAllocAsync(&kept, 50 * MIB, stream));
    spin(function, 200 * MS, stream);
    OK(cuMemFreeAsync(piece, stream));
    if (way == 3) OK(cuMemFreeAsync(kept, stream));
    OK(cuCtxSetCurrent(currents[way]));
    if (way == 3) OK(cuStreamBeginCapture_v2(recorded, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemPoolDestroy(pool));
    AGREE();
    if (way == 3) {
      OK(cuStreamEndCapture(recorded, &graph));
      OK(cuGraphDestroy(graph));
    }
    OK(cuDeviceGetMemPool(&current, 0));
    EXPECT(current == default_pool());
    GIVES(cuMemPoolDestroy(pool), CUDA_ERROR_INVALID_VALUE);
    OK(cuCtxSetCurrent(second));
    if (way != 3) OK(cuMemFreeAsync(kept, stream));
    AGREE();
    OK(cuStreamSynchronize(stream));
    EXPECT_EQUAL(charged(0), 2 * CONTEXT);
    AGREE();
  }
  for (int i = 0; i < 3000; i++) OK(cuMemPoolDestroy(new_pool()));
}

static void plain_memory_freed_in_stream_order(void) {
  start_on(0);
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 10 * MIB));
  OK(cuMemFreeAsync(pointer, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuMemAlloc_v2(&pointer, 1000));
  OK(cuMemFreeAsync(pointer, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  GIVES(cuMemFreeAsync(12345, NULL), CUDA_ERROR_INVALID_VALUE);
}

// ---- pools that the program did not create -----------------------------------------------------

static void what_is_no_pool_is_the_drivers_error(void) {
  start_on(0);
  CUdeviceptr pointer;
  static uint64_t nothing[64];
  GIVES(cuMemAllocFromPoolAsync(&pointer, MIB, (CUmemoryPool)nothing, NULL),
        CUDA_ERROR_INVALID_VALUE);
  GIVES(cuMemAllocFromPoolAsync(&pointer, MIB, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
}

static CUmemoryPool pool_of(CUmemAllocationType type, CUmemLocationType at, int id) {
  CUmemLocation location = {.type = at, .id = id};
  CUmemoryPool pool;
  OK(cuMemGetDefaultMemPool(&pool, &location, type));
  CUmemoryPool current;
  OK(cuMemGetMemPool(&current, &location, type));
  EXPECT(current == pool);
  return pool;
}

// Managed memory may all come to the device, wherever its pool prefers it.
static void managed_pools_are_charged(void) {
  static const CUmemLocationType places[] = {CU_MEM_LOCATION_TYPE_NONE, CU_MEM_LOCATION_TYPE_DEVICE,
                                             CU_MEM_LOCATION_TYPE_HOST,
                                             CU_MEM_LOCATION_TYPE_HOST_NUMA};
  start_on(0);
  for (int i = 0; i < 4; i++) {
    CUmemoryPool pool = pool_of(CU_MEM_ALLOCATION_TYPE_MANAGED, places[i], 0);
    CUdeviceptr pointer, more;
    OK(cuMemAllocFromPoolAsync(&pointer, 100 * MIB, pool, NULL));
    EXPECT_EQUAL(charged(0), CONTEXT + 100 * MIB);
    OK(cuMemPrefetchAsync(pointer, 100 * MIB, 0, NULL));
    OK(cuCtxSynchronize());
    AGREE();
    GIVES(cuMemAllocFromPoolAsync(&more, limit_of(0), pool, NULL), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemFreeAsync(pointer, NULL));
    OK(cuCtxSynchronize());
    EXPECT_EQUAL(charged(0), CONTEXT);
    AGREE();
  }
}

static void a_made_pool_of_managed_memory_is_charged(void) {
  start_on(0);
  CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_MANAGED,
                               .location = {.type = CU_MEM_LOCATION_TYPE_NONE}};
  CUmemLocation nowhere = properties.location;
  CUmemoryPool pool, current;
  CUdeviceptr pointer;
  OK(cuMemPoolCreate(&pool, &properties));
  OK(cuMemSetMemPool(&nowhere, CU_MEM_ALLOCATION_TYPE_MANAGED, pool));
  OK(cuMemGetMemPool(&current, &nowhere, CU_MEM_ALLOCATION_TYPE_MANAGED));
  EXPECT(current == pool);
  OK(cuMemAllocFromPoolAsync(&pointer, 100 * MIB, pool, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT + 100 * MIB);
  OK(cuMemFreeAsync(pointer, NULL));
  OK(cuMemPoolDestroy(pool));
  EXPECT_EQUAL(charged(0), CONTEXT);
}

static void the_hosts_pools_are_free(void) {
  start_on(0);
  CUmemLocationType places[] = {CU_MEM_LOCATION_TYPE_HOST, CU_MEM_LOCATION_TYPE_HOST_NUMA};
  for (int i = 0; i < 2; i++) {
    CUmemoryPool pool = pool_of(CU_MEM_ALLOCATION_TYPE_PINNED, places[i], 0);
    CUdeviceptr pointer;
    OK(cuMemAllocFromPoolAsync(&pointer, 100 * MIB, pool, NULL));
    memset((void *)(uintptr_t)pointer, 1, MIB);
    EXPECT_EQUAL(charged(0), CONTEXT);
    AGREE();
    OK(cuMemFreeAsync(pointer, NULL));
    OK(cuCtxSynchronize());
  }
  CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .location = {.type = CU_MEM_LOCATION_TYPE_HOST}};
  for (int i = 0; i < 3000; i++) {
    CUmemoryPool pool;
    OK(cuMemPoolCreate(&pool, &properties));
    OK(cuMemPoolDestroy(pool));
  }
}

// An imported pool that cannot be kept track of would be taken for one that grows here.
static void no_pool_is_imported_beyond_the_most(void) {
  start_on(0);
  CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                               .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
  CUmemoryPool pool, imported, last = NULL;
  CUresult result = CUDA_SUCCESS;
  int descriptor;
  OK(cuMemPoolCreate(&pool, &properties));
  OK(cuMemPoolExportToShareableHandle(&descriptor, pool, properties.handleTypes, 0));
  void *handle = (void *)(intptr_t)descriptor;
  OK(cuMemPoolImportFromShareableHandle(&imported, handle, properties.handleTypes, 0));
  OK(cuMemPoolDestroy(imported));
  while (result == CUDA_SUCCESS) {
    result = cuMemPoolCreate(&pool, &properties);
    if (result == CUDA_SUCCESS) last = pool;
  }
  EXPECT_EQUAL(result, CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(cuMemPoolImportFromShareableHandle(&imported, handle, properties.handleTypes, 0),
        CUDA_ERROR_OUT_OF_MEMORY);
  // Nor is one used that the driver has made.
  CUdeviceptr pointer;
  CUmemoryPool nobodys = pool_of(CU_MEM_ALLOCATION_TYPE_MANAGED, CU_MEM_LOCATION_TYPE_NONE, 0);
  GIVES(cuMemAllocFromPoolAsync(&pointer, MIB, nobodys, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemPoolDestroy(last));
  OK(cuMemPoolImportFromShareableHandle(&imported, handle, properties.handleTypes, 0));
}

// Handles are addresses, which are given again.
static void a_new_pool_is_not_taken_for_one_that_a_reset_took(void) {
  start_on(0);
  CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                               .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
  CUmemoryPool pool, imported;
  int descriptor;
  OK(cuMemPoolCreate(&pool, &properties));
  OK(cuMemPoolExportToShareableHandle(&descriptor, pool, properties.handleTypes, 0));
  OK(cuMemPoolImportFromShareableHandle(&imported, (void *)(intptr_t)descriptor,
                                        properties.handleTypes, 0));
  OK(cuDevicePrimaryCtxReset_v2(0));
  start_on(0);
  for (int i = 0; i < 4; i++) {
    CUdeviceptr pointer;
    OK(cuMemPoolCreate(&pool, &properties));
    OK(cuMemAllocFromPoolAsync(&pointer, 100 * MIB, pool, NULL));
    AGREE();
  }
}

static void a_locality_domain_is_of_its_device(void) {
  start_on(0);
  CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN};
  CUmemoryPool pool;
  CUdeviceptr pointer;
  OK(cuMemGetDefaultMemPool(&pool, &location, CU_MEM_ALLOCATION_TYPE_PINNED));
  OK(cuMemAllocFromPoolAsync(&pointer, 100 * MIB, pool, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT + 100 * MIB);
  AGREE();
  OK(cuMemFreeAsync(pointer, NULL));
  OK(cuCtxSynchronize());
  AGREE();
}

// ---- at the limit ----

static void fill_to(uint64_t left) {
  CUdeviceptr pointer;
  while (limit_of(0) - charged(0) >= left + GRANULE) OK(cuMemAlloc_v2(&pointer, GRANULE));
}

static void refused_at_the_limit(void) {
  start_on(0);
  CUdeviceptr pointer;
  fill_to(POOL_GROWTH - GRANULE);
  GIVES(cuMemAllocAsync(&pointer, 100, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(cuMemAllocAsync(&pointer, 1000 * GIB, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(cuMemAllocAsync(&pointer, UINT64_MAX, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
}

// What a pool has already can be used to the last, with nothing left under the limit.
static void a_pools_own_room_can_be_used(void) {
  start_on(0);
  CUdeviceptr pieces[32], more;
  fill_to(POOL_GROWTH + MIB);
  for (int i = 0; i < 32; i++) OK(cuMemAllocAsync(&pieces[i], MIB, NULL));
  EXPECT(limit_of(0) - charged(0) < 2 * GRANULE);
  GIVES(cuMemAllocAsync(&more, 1, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
  for (int round = 0; round < 20; round++) {
    OK(cuMemFreeAsync(pieces[round], NULL));
    OK(cuMemAllocAsync(&pieces[round], MIB - 100 * (uint64_t)round, NULL));
    AGREE();
  }
  OK(cuMemFreeAsync(pieces[3], NULL));
  OK(cuMemFreeAsync(pieces[5], NULL));
  GIVES(cuMemAllocAsync(&more, 2 * MIB, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemAllocAsync(&more, MIB, NULL));
  AGREE();
}

// Memory that a pool only keeps makes room: for itself, for other pools, for plain memory.
static void kept_memory_makes_room(void) {
  start_on(0);
  CUdeviceptr pointer, other;
  CUmemoryPool pool = new_pool();
  keep_all(default_pool());
  keep_all(pool);
  uint64_t most = (limit_of(0) - CONTEXT) & ~(GRANULE - 1);
  OK(cuMemAllocAsync(&pointer, most, NULL));
  OK(cuMemFreeAsync(pointer, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT + most);
  OK(cuMemAllocAsync(&pointer, most - 64 * MIB, NULL));
  AGREE();
  OK(cuMemFreeAsync(pointer, NULL));
  OK(cuMemAllocFromPoolAsync(&other, most - 100 * MIB, pool, NULL));
  AGREE();
  OK(cuMemFreeAsync(other, NULL));
  OK(cuCtxSynchronize());
  OK(cuMemAllocAsync(&pointer, most, NULL));
  AGREE();
  OK(cuMemFreeAsync(pointer, NULL));
  OK(cuCtxSynchronize());
  EXPECT(charged(0) <= limit_of(0));
}

static CUcontext shared_context;

static void *allocate_in_streams(void *argument) {
  unsigned seed = (unsigned)(uintptr_t)argument;
  CUstream streams[2];
  CUdeviceptr pieces[24] = {0};
  OK(cuCtxSetCurrent(shared_context));
  for (int i = 0; i < 2; i++) OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 1500; i++) {
    CUdeviceptr *one = &pieces[rand_r(&seed) % 24];
    CUstream stream = streams[rand_r(&seed) % 2];
    if (*one != 0) {
      OK(cuMemFreeAsync(*one, stream));
      *one = 0;
    } else {
      uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % (i % 4 == 0 ? 90 * MIB : MIB);
      int result = (int)cuMemAllocAsync(one, bytes, stream);
      EXPECT(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
      if (result != CUDA_SUCCESS) *one = 0;
    }
    if (i % 50 == 0) OK(cuStreamSynchronize(stream));
    EXPECT(allot_gpu_used(&simulation, 0) <= limit_of(0));
    EXPECT(allot_ledger_used(&share, 0) <= limit_of(0));
  }
  for (int i = 0; i < 24; i++) {
    if (pieces[i] != 0) OK(cuMemFreeAsync(pieces[i], streams[0]));
  }
  for (int i = 0; i < 2; i++) OK(cuStreamSynchronize(streams[i]));
  return NULL;
}

static void threads_and_streams_at_the_limit(void) {
  shared_context = start_on(0);
  fill_to(700 * MIB);
  uint64_t before = charged(0);
  pthread_t threads[4];
  for (uintptr_t i = 0; i < 4; i++) {
    OK(pthread_create(&threads[i], NULL, allocate_in_streams, (void *)(i + 1)));
  }
  for (int i = 0; i < 4; i++) OK(pthread_join(threads[i], NULL));
  OK(cuCtxSynchronize());
  EXPECT_EQUAL(charged(0), before);
  AGREE();
}

// ---- beside a thread that waits in the driver ----

static CUmemoryPool stuck_pool;
static CUdeviceptr stuck_piece;

static void allocate_stuck(CUstream in) {
  OK(cuMemAllocFromPoolAsync(&stuck_piece, MIB, stuck_pool, in));
}

static void free_stuck(CUstream in) {
  OK(cuMemFreeAsync(stuck_piece, in));
}

// What may be what the other thread's stream waits for.
static void use_pools(CUstream stream) {
  CUmemoryPool pool = new_pool();
  CUdeviceptr piece, other;
  OK(cuMemAllocFromPoolAsync(&piece, 50 * MIB, stuck_pool, stream));
  OK(cuMemAllocFromPoolAsync(&other, 50 * MIB, pool, stream));
  OK(cuMemFreeAsync(piece, stream));
  OK(cuMemFreeAsync(other, stream));
  OK(cuStreamSynchronize(stream));
  OK(cuMemPoolTrimTo(stuck_pool, 0));
  OK(cuMemPoolDestroy(pool));
  EXPECT(charged(0) >= physical(0));
}

static void no_call_waits_for_another_threads_piece(void) {
  CUcontext context = start_on(0);
  CUstream stream;
  stuck_call stuck;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  stuck_pool = new_pool();
  begin_stuck_call(&stuck, context, allocate_stuck);
  use_pools(stream);
  end_stuck_call(&stuck);
  AGREE();
  begin_stuck_call(&stuck, context, free_stuck);
  use_pools(stream);
  end_stuck_call(&stuck);
  OK(cuCtxSynchronize());
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

// With nothing left under the limit, the one gap is that of the call that waits.
static void a_gap_is_for_one_call(void) {
  CUcontext context = start_on(0);
  CUstream stream, recorded;
  CUgraph graph;
  CUdeviceptr pieces[32], more;
  stuck_call stuck;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  OK(cuStreamCreate(&recorded, CU_STREAM_DEFAULT));
  stuck_pool = new_pool();
  fill_to(POOL_GROWTH + MIB);
  for (int i = 0; i < 32; i++) OK(cuMemAllocFromPoolAsync(&pieces[i], MIB, stuck_pool, stream));
  OK(cuMemFreeAsync(pieces[3], stream));
  OK(cuStreamSynchronize(stream));
  begin_stuck_call(&stuck, context, allocate_stuck);
  // While something is recorded the context is not waited for.
  OK(cuStreamBeginCapture_v2(recorded, CU_STREAM_CAPTURE_MODE_RELAXED));
  GIVES(cuMemAllocFromPoolAsync(&more, MIB, stuck_pool, stream), CUDA_ERROR_OUT_OF_MEMORY);
  if (cuStreamEndCapture(recorded, &graph) == CUDA_SUCCESS) OK(cuGraphDestroy(graph));
  end_stuck_call(&stuck);
  AGREE();
  EXPECT(charged(0) <= limit_of(0));
}

static const test_case cases[] = {
    {"a_gap_is_for_one_call", a_gap_is_for_one_call},
    {"no_call_waits_for_another_threads_piece", no_call_waits_for_another_threads_piece},
    {"growth_is_charged", growth_is_charged},
    {"each_way_of_waiting_gives_back", each_way_of_waiting_gives_back},
    {"a_threshold_keeps_the_charge", a_threshold_keeps_the_charge},
    {"own_pools", own_pools},
    {"a_destroyed_pool_stays_charged_while_frees_are_pending",
     a_destroyed_pool_stays_charged_while_frees_are_pending},
    {"plain_memory_freed_in_stream_order", plain_memory_freed_in_stream_order},
    {"managed_pools_are_charged", managed_pools_are_charged},
    {"a_made_pool_of_managed_memory_is_charged", a_made_pool_of_managed_memory_is_charged},
    {"the_hosts_pools_are_free", the_hosts_pools_are_free},
    {"no_pool_is_imported_beyond_the_most", no_pool_is_imported_beyond_the_most},
    {"a_new_pool_is_not_taken_for_one_that_a_reset_took",
     a_new_pool_is_not_taken_for_one_that_a_reset_took},
    {"a_locality_domain_is_of_its_device", a_locality_domain_is_of_its_device},
    {"what_is_no_pool_is_the_drivers_error", what_is_no_pool_is_the_drivers_error},
    {"refused_at_the_limit", refused_at_the_limit},
    {"a_pools_own_room_can_be_used", a_pools_own_room_can_be_used},
    {"kept_memory_makes_room", kept_memory_makes_room},
    {"threads_and_streams_at_the_limit", threads_and_streams_at_the_limit},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
