// SPDX-License-Identifier: Apache-2.0
// One thread allocates more than the limit, again and again, while another one changes what the
// call is about: never does the driver see something else than the shim has charged.
//
// Each case ends early where it succeeds, which is before a second has passed.
#include <pthread.h>
#include <time.h>

#include "host.h"

#define TOO_MUCH (8 * GIB)
#define LASTS_S 2
#define TRIES 2000 /* with a handle, while it is another thing's */

static uint32_t is_over;
static CUcontext primary;
static CUstream stream;

static bool goes_on(void) {
  return __atomic_load_n(&is_over, __ATOMIC_RELAXED) == 0;
}

static uint64_t unpaid_bytes;

static bool is_unpaid(void) {
  if (unpaid_bytes == 0 && physical(0) > limit_of(0)) unpaid_bytes = physical(0);
  return unpaid_bytes != 0;
}

// `step` says whether it has got something. `other` runs beside it.
static void race(bool (*step)(void), void *(*other)(void *)) {
  struct timespec now;
  pthread_t thread;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const time_t end = now.tv_sec + LASTS_S;
  OK(pthread_create(&thread, NULL, other, NULL));
  while (now.tv_sec <= end && unpaid_bytes == 0) {
    for (int i = 0; i < 20 && !(step() && is_unpaid()); i++) continue;
    clock_gettime(CLOCK_MONOTONIC, &now);
  }
  __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
  OK(pthread_join(thread, NULL));
  if (unpaid_bytes != 0) FAIL("%u MiB", (unsigned)(unpaid_bytes / MIB));
}

static void begin(void) {
  primary = start_on(0);
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
}

static void pause_briefly(int steps) {
  for (volatile int i = 0; i < steps; i++) continue;
}

// ---- captures ----

static void *capture(void *unused) {
  OK(cuCtxSetCurrent(primary));
  while (goes_on()) {
    CUgraph graph;
    pause_briefly(20);
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    pause_briefly(2000);
    // It fails where the other thread has waited for the stream, as there was no memory.
    if (cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS) OK(cuGraphDestroy(graph));
  }
  return unused;
}

static bool allocate_in_stream(void) {
  CUdeviceptr pointer;
  return cuMemAllocAsync(&pointer, TOO_MUCH, stream) == CUDA_SUCCESS;
}

static void a_capture_ends(void) {
  begin();
  race(allocate_in_stream, capture);
}

// ---- contexts ----

static CUcontext last_made;

static void *make_contexts(void *unused) {
  while (goes_on()) {
    CUcontext made;
    if (cuCtxCreate_v2(&made, 0, 0) != CUDA_SUCCESS) continue;
    __atomic_store_n(&last_made, made, __ATOMIC_RELAXED);
    usleep(1);
    OK(cuCtxDestroy_v2(made));
  }
  return unused;
}

static bool allocate_in_last(void) {
  CUcontext last = __atomic_load_n(&last_made, __ATOMIC_RELAXED);
  CUdeviceptr pointer;
  if (last == NULL || cuCtxSetCurrent(last) != CUDA_SUCCESS) return false;
  for (int i = 0; i < TRIES; i++) {
    if (cuMemAlloc_v2(&pointer, TOO_MUCH) == CUDA_SUCCESS) return true;
  }
  return false;
}

static void a_dead_context_is_there_again(void) {
  OK(cuInit(0));
  race(allocate_in_last, make_contexts);
}

static void *allocate_in_new(void *unused) {
  while (goes_on()) {
    CUcontext last = __atomic_load_n(&last_made, __ATOMIC_RELAXED);
    CUdeviceptr pointer;
    if (last == NULL || cuCtxSetCurrent(last) != CUDA_SUCCESS) continue;
    for (int i = 0; i < 200; i++) cuMemAlloc_v2(&pointer, 512 * MIB);
  }
  return unused;
}

static bool make_context(void) {
  CUcontext made;
  if (cuCtxCreate_v2(&made, 0, 0) != CUDA_SUCCESS) return false;
  __atomic_store_n(&last_made, made, __ATOMIC_RELAXED);
  usleep(200);
  bool is_over_limit = is_unpaid();
  OK(cuCtxDestroy_v2(made));
  return is_over_limit;
}

// The other thread has its number from the one before.
static void a_context_is_used_while_it_is_made(void) {
  OK(cuInit(0));
  race(make_context, allocate_in_new);
}

// ---- graphs ----

static CUgraph growing_graph;

static const CUmemPoolProps OF_DEVICE = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                         .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};

static void *add_memory(void *unused) {
  OK(cuCtxSetCurrent(primary));
  while (goes_on()) {
    CUgraph graph = __atomic_load_n(&growing_graph, __ATOMIC_ACQUIRE);
    if (graph == NULL) continue;
    pause_briefly(rand() % 400);
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = OF_DEVICE, .bytesize = TOO_MUCH};
    OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory));
    __atomic_store_n(&growing_graph, NULL, __ATOMIC_RELEASE);
  }
  return unused;
}

static bool launch_growing(void) {
  CUgraph graph;
  CUgraphNode node;
  CUgraphExec made;
  OK(cuGraphCreate(&graph, 0));
  for (int i = 0; i < 20; i++) OK(cuGraphAddEmptyNode(&node, graph, NULL, 0));
  __atomic_store_n(&growing_graph, graph, __ATOMIC_RELEASE);
  bool is_made = cuGraphInstantiateWithFlags(&made, graph, 0) == CUDA_SUCCESS;
  while (__atomic_load_n(&growing_graph, __ATOMIC_ACQUIRE) != NULL) continue;
  if (is_made) {
    cuGraphLaunch(made, stream);
    OK(cuStreamSynchronize(stream));
    if (is_unpaid()) return true;
    OK(cuGraphExecDestroy(made));
  }
  OK(cuGraphDestroy(graph));
  return false;
}

static void a_graph_is_added_to(void) {
  begin();
  race(launch_growing, add_memory);
}

static CUgraphExec last_executable;

static CUgraph graph_with(bool has_memory) {
  CUgraph graph;
  CUgraphNode node, end;
  CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = OF_DEVICE, .bytesize = 3 * GIB};
  OK(cuGraphCreate(&graph, 0));
  if (has_memory) {
    OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory));
    OK(cuGraphAddMemFreeNode(&end, graph, &node, 1, memory.dptr));
  } else {
    OK(cuGraphAddEmptyNode(&node, graph, NULL, 0));
  }
  return graph;
}

static uint32_t is_launching;

// A graph with memory gets the handle of one that was destroyed.
static void *make_executables(void *unused) {
  OK(cuCtxSetCurrent(primary));
  CUgraph plain = graph_with(false), with_memory = graph_with(true);
  while (goes_on()) {
    CUgraphExec gone, made;
    CUdeviceptr pointer;
    OK(cuGraphInstantiateWithFlags(&gone, plain, 0));
    OK(cuGraphExecDestroy(gone));
    __atomic_store_n(&last_executable, gone, __ATOMIC_SEQ_CST);
    pause_briefly(2000);
    bool is_made = cuGraphInstantiateWithFlags(&made, with_memory, 0) == CUDA_SUCCESS;
    __atomic_store_n(&last_executable, NULL, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&is_launching, __ATOMIC_SEQ_CST) != 0) continue;
    OK(cuStreamSynchronize(stream));
    if (!is_made) continue;
    if (cuMemAlloc_v2(&pointer, 3 * GIB) == CUDA_SUCCESS) {
      is_unpaid();
      OK(cuMemFree_v2(pointer));
    }
    OK(cuGraphExecDestroy(made));
    OK(cuDeviceGraphMemTrim(0));
  }
  return unused;
}

static bool launch_gone(void) {
  __atomic_store_n(&is_launching, 1, __ATOMIC_SEQ_CST);
  CUgraphExec last = __atomic_load_n(&last_executable, __ATOMIC_SEQ_CST);
  for (int i = 0; i < TRIES && last != NULL; i++) {
    if (cuGraphLaunch(last, stream) == CUDA_SUCCESS) break;
  }
  __atomic_store_n(&is_launching, 0, __ATOMIC_SEQ_CST);
  return false;
}

static void a_graph_has_another_ones_handle(void) {
  begin();
  race(launch_gone, make_executables);
}

// ---- pools ----

static CUmemoryPool last_host_pool;

static void *make_pools(void *unused) {
  OK(cuCtxSetCurrent(primary));
  CUmemPoolProps of_host = OF_DEVICE;
  of_host.location.type = CU_MEM_LOCATION_TYPE_HOST;
  while (goes_on()) {
    CUmemoryPool pool;
    OK(cuMemPoolCreate(&pool, &of_host));
    __atomic_store_n(&last_host_pool, pool, __ATOMIC_RELAXED);
    OK(cuMemPoolDestroy(pool));
    OK(cuMemPoolCreate(&pool, &OF_DEVICE));
    usleep(1);
    OK(cuMemPoolDestroy(pool));
  }
  return unused;
}

static bool allocate_from_last(void) {
  CUmemoryPool last = __atomic_load_n(&last_host_pool, __ATOMIC_RELAXED);
  for (int i = 0; i < TRIES && last != NULL; i++) {
    CUdeviceptr pointer;
    CUresult result = cuMemAllocFromPoolAsync(&pointer, TOO_MUCH, last, stream);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) return false;  // it is another pool's already
    if (result != CUDA_SUCCESS) continue;
    if (is_unpaid()) return true;
    cuMemFree_v2(pointer);
  }
  return false;
}

// Nor do both threads wait for ever.
static void a_pool_has_another_ones_handle(void) {
  begin();
  race(allocate_from_last, make_pools);
}

// ---- arguments ----

static volatile CUmemAllocationProp wanted_memory;
static volatile CUmemPoolProps wanted_pool;
static volatile CUDA_ARRAY3D_DESCRIPTOR wanted_array;

static void *change_arguments(void *unused) {
  while (goes_on()) {
    wanted_memory.location.type = wanted_pool.location.type = CU_MEM_LOCATION_TYPE_HOST;
    wanted_array.Flags = CUDA_ARRAY3D_SPARSE;
    pause_briefly(20);
    wanted_memory.location.type = wanted_pool.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted_array.Flags = 0;
    pause_briefly(20);
  }
  return unused;
}

static bool create_as_wanted(void) {
  CUmemGenericAllocationHandle handle;
  return cuMemCreate(&handle, TOO_MUCH, (const CUmemAllocationProp *)&wanted_memory, 0) == 0;
}

static void memory_is_asked_for_elsewhere(void) {
  begin();
  wanted_memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  race(create_as_wanted, change_arguments);
}

static bool allocate_from_wanted(void) {
  CUmemoryPool pool;
  CUdeviceptr pointer;
  if (cuMemPoolCreate(&pool, (const CUmemPoolProps *)&wanted_pool) != CUDA_SUCCESS) return false;
  if (cuMemAllocFromPoolAsync(&pointer, TOO_MUCH, pool, stream) == CUDA_SUCCESS) {
    if (is_unpaid()) return true;
    OK(cuMemFreeAsync(pointer, stream));
  }
  OK(cuMemPoolDestroy(pool));
  return false;
}

static void a_pool_is_asked_for_elsewhere(void) {
  begin();
  wanted_pool.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  race(allocate_from_wanted, change_arguments);
}

static bool make_wanted_array(void) {
  CUarray array;
  const CUDA_ARRAY3D_DESCRIPTOR *wanted = (const CUDA_ARRAY3D_DESCRIPTOR *)&wanted_array;
  if (cuArray3DCreate_v2(&array, wanted) != CUDA_SUCCESS) return false;
  if (is_unpaid()) return true;
  OK(cuArrayDestroy(array));
  return false;
}

static void an_array_is_asked_for_without_memory(void) {
  begin();
  wanted_array.Width = wanted_array.Height = 16384;
  wanted_array.Depth = 8;
  wanted_array.Format = CU_AD_FORMAT_FLOAT;
  wanted_array.NumChannels = 1;
  race(make_wanted_array, change_arguments);
}

// ---- results ----

static CUdeviceptr large;
static volatile CUdeviceptr result_pointer;

static void *overwrite_result(void *unused) {
  while (goes_on()) result_pointer = large;
  return unused;
}

static bool allocate_beside(void) {
  for (int i = 0; i < 100; i++) cuMemAlloc_v2((CUdeviceptr *)&result_pointer, 256);
  CUdeviceptr more;
  if (cuMemAlloc_v2(&more, 3 * GIB) != CUDA_SUCCESS) return false;
  if (is_unpaid()) return true;
  OK(cuMemFree_v2(more));
  return false;
}

// The large one would count as gone, since its address was given out again.
static void a_result_is_overwritten(void) {
  begin();
  OK(cuMemAlloc_v2(&large, 3 * GIB));
  race(allocate_beside, overwrite_result);
}

static const test_case cases[] = {
    {"a_capture_ends", a_capture_ends},
    {"a_dead_context_is_there_again", a_dead_context_is_there_again},
    {"a_context_is_used_while_it_is_made", a_context_is_used_while_it_is_made},
    {"a_graph_is_added_to", a_graph_is_added_to},
    {"a_graph_has_another_ones_handle", a_graph_has_another_ones_handle},
    {"a_pool_has_another_ones_handle", a_pool_has_another_ones_handle},
    {"memory_is_asked_for_elsewhere", memory_is_asked_for_elsewhere},
    {"a_pool_is_asked_for_elsewhere", a_pool_is_asked_for_elsewhere},
    {"an_array_is_asked_for_without_memory", an_array_is_asked_for_without_memory},
    {"a_result_is_overwritten", a_result_is_overwritten},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
