// SPDX-License-Identifier: Apache-2.0
// Times calls in pairs, bare and wrapped, and prints one JSON object for each kind of call.
//
//   calls PAIRS MILLISECONDS [allocate|launch|query]...
//
// PAIRS or MILLISECONDS of each kind of call, whichever is over first. Which of a pair goes first
// alternates, so that neither always finds the caches warm. Times are nanoseconds of one call.
// Starts when stdin ends.
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { BATCH = 16 };  // calls in one sample of what takes less time than reading the clock

typedef CUresult (*allocate_function)(CUdeviceptr *, size_t);
typedef CUresult (*free_function)(CUdeviceptr);

static uint64_t budget_ns;

typedef struct {
  int64_t *bare;
  int64_t *wrapped;
} pairs;

static pairs make_pairs(size_t count) {
  pairs made = {calloc(count, sizeof(int64_t)), calloc(count, sizeof(int64_t))};
  if (made.bare == NULL || made.wrapped == NULL) exit(3);
  return made;
}

static void drop_pairs(pairs *used) {
  free(used->bare);
  free(used->wrapped);
}

static void allocate_once(allocate_function allocate, free_function release, size_t bytes,
                          int64_t *allocate_ns, int64_t *free_ns) {
  CUdeviceptr address;
  uint64_t start = now_ns();
  need(allocate(&address, bytes), "cuMemAlloc");
  uint64_t middle = now_ns();
  need(release(address), "cuMemFree");
  uint64_t end = now_ns();
  *allocate_ns = (int64_t)(middle - start);
  *free_ns = (int64_t)(end - middle);
}

static void time_allocations(const char *label, size_t bytes, size_t count) {
  WRAPPED(cuMemAlloc_v2);
  WRAPPED(cuMemFree_v2);
  BARE(cuMemAlloc_v2);
  BARE(cuMemFree_v2);
  pairs allocations = make_pairs(count), frees = make_pairs(count);
  size_t index = 0;
  for (uint64_t end = now_ns() + budget_ns; index < count && now_ns() < end; index++)
    for (size_t turn = 0; turn < 2; turn++) {
      bool bare = (index ^ turn) & 1;
      allocate_once(bare ? bare_cuMemAlloc_v2 : wrapped_cuMemAlloc_v2,
                    bare ? bare_cuMemFree_v2 : wrapped_cuMemFree_v2, bytes,
                    &(bare ? allocations.bare : allocations.wrapped)[index],
                    &(bare ? frees.bare : frees.wrapped)[index]);
    }
  char operation[64];
  snprintf(operation, sizeof operation, "allocate %s", label);
  print_pairs(operation, allocations.bare, allocations.wrapped, index, 1);
  snprintf(operation, sizeof operation, "free %s", label);
  print_pairs(operation, frees.bare, frees.wrapped, index, 1);
  drop_pairs(&allocations);
  drop_pairs(&frees);
}

static void time_launches(size_t count) {
  WRAPPED(cuLaunchKernel);
  BARE(cuLaunchKernel);
  WRAPPED(cuStreamCreate);
  WRAPPED(cuStreamSynchronize);
  CUfunction function = spin_function();
  CUstream stream;
  need(wrapped_cuStreamCreate(&stream, 1), "cuStreamCreate");
  uint64_t nanoseconds = 0;
  void *parameters[] = {&nanoseconds};
  pairs launches = make_pairs(count);
  size_t index = 0;
  for (uint64_t end = now_ns() + budget_ns; index < count && now_ns() < end; index++)
    for (size_t turn = 0; turn < 2; turn++) {
      bool bare = (index ^ turn) & 1;
      __typeof__(cuLaunchKernel) *launch = bare ? bare_cuLaunchKernel : wrapped_cuLaunchKernel;
      uint64_t start = now_ns();
      for (int each = 0; each < BATCH; each++)
        need(launch(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
      (bare ? launches.bare : launches.wrapped)[index] = (int64_t)(now_ns() - start);
      need(wrapped_cuStreamSynchronize(stream), "cuStreamSynchronize");
    }
  print_pairs("launch", launches.bare, launches.wrapped, index, BATCH);
  drop_pairs(&launches);
}

static CUgraphExec one_kernel_graph(void) {
  WRAPPED(cuGraphCreate);
  WRAPPED(cuGraphAddKernelNode);
  WRAPPED(cuGraphInstantiateWithFlags);
  static uint64_t nanoseconds = 0;
  static void *parameters[] = {&nanoseconds};
  CUDA_KERNEL_NODE_PARAMS_v1 node = {.func = spin_function(),
                                     .gridDimX = 1,
                                     .gridDimY = 1,
                                     .gridDimZ = 1,
                                     .blockDimX = 1,
                                     .blockDimY = 1,
                                     .blockDimZ = 1,
                                     .kernelParams = parameters};
  CUgraph graph;
  CUgraphNode added;
  CUgraphExec executable;
  need(wrapped_cuGraphCreate(&graph, 0), "cuGraphCreate");
  need(wrapped_cuGraphAddKernelNode(&added, graph, NULL, 0, &node), "cuGraphAddKernelNode");
  need(wrapped_cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiate");
  return executable;
}

static void time_graph_launches(size_t count) {
  WRAPPED(cuGraphLaunch);
  BARE(cuGraphLaunch);
  WRAPPED(cuStreamCreate);
  WRAPPED(cuStreamSynchronize);
  CUgraphExec graph = one_kernel_graph();
  CUstream stream;
  need(wrapped_cuStreamCreate(&stream, 1), "cuStreamCreate");
  pairs launches = make_pairs(count);
  size_t index = 0;
  for (uint64_t end = now_ns() + budget_ns; index < count && now_ns() < end; index++)
    for (size_t turn = 0; turn < 2; turn++) {
      bool bare = (index ^ turn) & 1;
      __typeof__(cuGraphLaunch) *launch = bare ? bare_cuGraphLaunch : wrapped_cuGraphLaunch;
      uint64_t start = now_ns();
      for (int each = 0; each < BATCH; each++) need(launch(graph, stream), "cuGraphLaunch");
      (bare ? launches.bare : launches.wrapped)[index] = (int64_t)(now_ns() - start);
      need(wrapped_cuStreamSynchronize(stream), "cuStreamSynchronize");
    }
  print_pairs("launch a graph", launches.bare, launches.wrapped, index, BATCH);
  drop_pairs(&launches);
}

static void time_reports(size_t count) {
  WRAPPED(cuMemGetInfo_v2);
  BARE(cuMemGetInfo_v2);
  pairs reports = make_pairs(count);
  size_t index = 0;
  for (uint64_t end = now_ns() + budget_ns; index < count && now_ns() < end; index++)
    for (size_t turn = 0; turn < 2; turn++) {
      bool bare = (index ^ turn) & 1;
      __typeof__(cuMemGetInfo_v2) *ask = bare ? bare_cuMemGetInfo_v2 : wrapped_cuMemGetInfo_v2;
      size_t available, total;
      uint64_t start = now_ns();
      for (int each = 0; each < BATCH; each++) need(ask(&available, &total), "cuMemGetInfo");
      (bare ? reports.bare : reports.wrapped)[index] = (int64_t)(now_ns() - start);
    }
  print_pairs("cuMemGetInfo", reports.bare, reports.wrapped, index, BATCH);
  drop_pairs(&reports);
}

// A call that the shim does not own: it must be the driver's own, however it was looked up.
static void time_unwrapped(size_t count) {
  WRAPPED(cuStreamQuery);
  BARE(cuStreamQuery);
  WRAPPED(cuGetProcAddress);
  pairs queries = make_pairs(count);
  size_t index = 0;
  for (uint64_t end = now_ns() + budget_ns; index < count && now_ns() < end; index++)
    for (size_t turn = 0; turn < 2; turn++) {
      bool bare = (index ^ turn) & 1;
      __typeof__(cuStreamQuery) *query = bare ? bare_cuStreamQuery : wrapped_cuStreamQuery;
      uint64_t start = now_ns();
      for (int each = 0; each < BATCH; each++) need(query(NULL), "cuStreamQuery");
      (bare ? queries.bare : queries.wrapped)[index] = (int64_t)(now_ns() - start);
    }
  void *found = NULL;
  need(wrapped_cuGetProcAddress("cuStreamQuery", &found, 11080, 0), "cuGetProcAddress");
  bool same = (void *)wrapped_cuStreamQuery == (void *)bare_cuStreamQuery &&
              found == (void *)bare_cuStreamQuery;
  print_pairs(same ? "unwrapped call, same address" : "unwrapped call, other address", queries.bare,
              queries.wrapped, index, BATCH);
  drop_pairs(&queries);
}

int main(int count, char **arguments) {
  if (count < 4) {
    fprintf(stderr, "usage: calls PAIRS MILLISECONDS [allocate|launch|query]...\n");
    return 2;
  }
  size_t number = strtoul(arguments[1], NULL, 10);
  budget_ns = strtoul(arguments[2], NULL, 10) * 1000000u;
  open_device();
  wait_for_start();
  for (int index = 3; index < count; index++) {
    if (strcmp(arguments[index], "allocate") == 0) {
      time_allocations("64 MiB", 64u << 20, number);
      time_allocations("4 KiB", 4096, number);
    } else if (strcmp(arguments[index], "launch") == 0) {
      time_launches(number);
      time_graph_launches(number);
    } else if (strcmp(arguments[index], "query") == 0) {
      time_reports(number);
      time_unwrapped(number);
    }
  }
  return 0;
}
