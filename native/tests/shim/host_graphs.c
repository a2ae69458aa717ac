// SPDX-License-Identifier: Apache-2.0
// Graphs with memory nodes: what they reserve of a device is charged when it grows, and refused
// before it does.
#include <pthread.h>

#include "queue.h"
#include "shim/extra_abi.h"

#define CONTEXT context_cost()

// What is not destroyed is not lost either, for those who look for leaks.
static void *volatile kept[32];

static void *keep(void *made) {
  int place = 0;
  while (kept[place] != NULL) place++;
  kept[place] = made;
  return made;
}

static CUgraphNode add_allocation(CUgraph graph, const CUgraphNode *after, uint64_t bytes,
                                  CUdeviceptr *pointer) {
  CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
      .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
      .bytesize = bytes};
  CUgraphNode node;
  OK(cuGraphAddMemAllocNode(&node, graph, after, after == NULL ? 0 : 1, &parameters));
  *pointer = parameters.dptr;
  return node;
}

// A graph that allocates and frees.
static CUgraph allocating_graph(uint64_t bytes) {
  CUgraph graph;
  CUdeviceptr pointer;
  CUgraphNode allocation, end;
  OK(cuGraphCreate(&graph, 0));
  keep(graph);
  allocation = add_allocation(graph, NULL, bytes, &pointer);
  OK(cuGraphAddMemFreeNode(&end, graph, &allocation, 1, pointer));
  return graph;
}

static CUgraphExec executable(CUgraph graph) {
  CUgraphExec made;
  OK(cuGraphInstantiateWithFlags(&made, graph, 0));
  return keep(made);
}

static void memory_nodes_are_charged_at_launch(void) {
  start_on(0);
  CUgraphExec graph = executable(allocating_graph(100 * MIB));
  AGREE();
  for (int i = 0; i < 5; i++) OK(cuGraphLaunch(graph, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT + 100 * MIB);
  AGREE();
  OK(cuCtxSynchronize());
  EXPECT_EQUAL(charged(0), CONTEXT + 100 * MIB);
  OK(cuDeviceGraphMemTrim(0));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  OK(cuGraphLaunch(graph, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT + 100 * MIB);
  OK(cuCtxSynchronize());
  OK(cuGraphExecDestroy(graph));
  OK(cuDeviceGraphMemTrim(0));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void graphs_share_their_memory(void) {
  start_on(0);
  CUgraphExec one = executable(allocating_graph(100 * MIB));
  CUgraphExec other = executable(allocating_graph(60 * MIB));
  OK(cuGraphLaunch(other, NULL));
  OK(cuGraphLaunch(one, NULL));
  OK(cuGraphLaunch(other, NULL));
  AGREE();
  EXPECT_EQUAL(charged(0), CONTEXT + 100 * MIB);
  OK(cuDevicePrimaryCtxReset_v2(0));
  EXPECT_EQUAL(charged(0), 0);
  AGREE();
}

// A graph of 64 MiB that are allocated, set and freed.
static CUgraph captured_on(CUstream stream) {
  CUgraph graph;
  CUdeviceptr pointer;
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  OK(cuMemAllocAsync(&pointer, 64 * MIB, stream));
  OK(cuMemsetD8Async(pointer, 1, 64 * MIB, stream));
  OK(cuMemFreeAsync(pointer, stream));
  OK(cuStreamEndCapture(stream, &graph));
  return keep(graph);
}

static void captured_allocations_are_nodes(void) {
  start_on(0);
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUgraph graph = captured_on(stream);
  EXPECT_EQUAL(charged(0), CONTEXT);
  CUgraphExec made;
  OK(cuGraphInstantiate(&made, graph, NULL, NULL, 0));
  keep(made);
  OK(cuGraphUpload(made, stream));
  OK(cuGraphLaunch_ptsz(made, stream));
  EXPECT_EQUAL(charged(0), CONTEXT + 64 * MIB);
  AGREE();
}

static void children_count(void) {
  start_on(0);
  CUgraph parent;
  CUgraphNode child;
  OK(cuGraphCreate(&parent, 0));
  keep(parent);
  // A child with memory nodes has to be handed over (CUDA 12.9), or is refused.
  CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
  parameters.graph.graph = allocating_graph(48 * MIB);
  parameters.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
  if (cuGraphAddNode_v2(&child, parent, NULL, NULL, 0, &parameters) != CUDA_SUCCESS) {
    if (cuGraphAddChildGraphNode(&child, parent, NULL, 0, parameters.graph.graph) != CUDA_SUCCESS) {
      return;
    }
  }
  CUgraphExec made = executable(parent);
  OK(cuGraphLaunch(made, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT + 48 * MIB);
  AGREE();
}

// What an executable graph allocates was read when it was made.
static void children_are_not_exchanged_for_some_that_allocate(void) {
  start_on(0);
  CUgraph parent, empty;
  CUgraphNode child, node;
  OK(cuGraphCreate(&parent, 0));
  OK(cuGraphCreate(&empty, 0));
  keep(parent);
  keep(empty);
  OK(cuGraphAddEmptyNode(&node, empty, NULL, 0));
  OK(cuGraphAddChildGraphNode(&child, parent, NULL, 0, empty));
  CUgraphExec made = executable(parent);
  CUgraph allocating = allocating_graph(48 * MIB);
  EXPECT(cuGraphExecChildGraphNodeSetParams(made, child, allocating) != CUDA_SUCCESS);
  CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
  parameters.graph.graph = allocating;
  EXPECT(cuGraphExecNodeSetParams(made, child, &parameters) != CUDA_SUCCESS);
  OK(cuGraphExecChildGraphNodeSetParams(made, child, empty));
  OK(cuGraphLaunch(made, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

// The memory is where its node says, wherever the graph runs.
static void memory_of_another_device_is_charged_there(void) {
  start_on(0);
  uint64_t contexts[2] = {CONTEXT, 0};
  CUgraph graph;
  CUgraphNode node;
  CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
      .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1}},
      .bytesize = 100 * MIB};
  OK(cuGraphCreate(&graph, 0));
  keep(graph);
  OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &parameters));
  OK(cuGraphLaunch(executable(graph), NULL));
  for (int device = 0; device < 2; device++) {
    EXPECT_EQUAL(charged(device), contexts[device] + (device == 1 ? 100 * MIB : 0));
    EXPECT_EQUAL(physical(device), charged(device));
  }
}

static void captures_for_graphics_are_refused(void) {
  start_on(0);
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  GIVES(cuStreamBeginCaptureToCig(stream, NULL), CUDA_ERROR_NOT_PERMITTED);
  GIVES(cuStreamBeginCaptureToCig_ptsz(stream, NULL), CUDA_ERROR_NOT_PERMITTED);
}

// Deeper than the shim reads.
static void graphs_that_are_not_read_to_their_end_are_refused(void) {
  start_on(0);
  CUgraph outer, inner = allocating_graph(48 * MIB);
  for (int depth = 0; depth < 100; depth++) {
    CUgraphNode child;
    OK(cuGraphCreate(&outer, 0));
    CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
    parameters.graph.graph = inner;
    parameters.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    OK(cuGraphAddNode_v2(&child, outer, NULL, NULL, 0, &parameters));
    inner = outer;
  }
  CUgraphExec made;
  GIVES(cuGraphInstantiateWithFlags(&made, keep(outer), 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void allocations_outlive_their_graph(void) {
  start_on(0);
  CUgraph graph;
  CUdeviceptr pointer;
  OK(cuGraphCreate(&graph, 0));
  keep(graph);
  add_allocation(graph, NULL, 80 * MIB, &pointer);
  CUgraphExec made = executable(graph);
  OK(cuGraphLaunch(made, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT + 80 * MIB);
  OK(cuGraphExecDestroy(made));
  OK(cuDeviceGraphMemTrim(0));
  EXPECT_EQUAL(charged(0), CONTEXT + 80 * MIB);
  AGREE();
  OK(cuMemFreeAsync(pointer, NULL));
  OK(cuCtxSynchronize());
  OK(cuDeviceGraphMemTrim(0));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void launches_are_refused(void) {
  start_on(0);
  CUgraph huge = allocating_graph(1000 * GIB);
  CUgraphExec made;
  GIVES(cuGraphInstantiateWithFlags(&made, huge, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQUAL(charged(0), CONTEXT);
  CUgraphExec graph = executable(allocating_graph(200 * MIB));
  CUdeviceptr pointer;
  while (limit_of(0) - charged(0) >= 200 * MIB) OK(cuMemAlloc_v2(&pointer, GRANULE));
  GIVES(cuGraphLaunch(graph, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
  OK(cuMemFree_v2(pointer));
  OK(cuGraphLaunch(graph, NULL));
  AGREE();
  // Once placed it runs on, with nothing left under the limit.
  for (int i = 0; i < 20; i++) OK(cuGraphLaunch(graph, NULL));
  AGREE();
}

// An upload may have placed nothing: the launch after it has to fit.
static void uploaded_graphs_have_to_fit(void) {
  start_on(0);
  CUgraphExec graph = executable(allocating_graph(200 * MIB));
  CUdeviceptr pointer;
  OK(cuGraphUpload(graph, NULL));
  while (limit_of(0) - charged(0) >= 200 * MIB) OK(cuMemAlloc_v2(&pointer, GRANULE));
  GIVES(cuGraphLaunch(graph, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT(physical(0) <= limit_of(0));
  AGREE();
  OK(cuMemFree_v2(pointer));
  OK(cuGraphUpload(graph, NULL));
  OK(cuGraphLaunch(graph, NULL));
  AGREE();
}

// A chain that frees before it allocates again needs its largest part, whatever the sum.
static void chains_need_their_peak(void) {
  start_on(0);
  CUstream stream;
  CUgraph graph;
  CUdeviceptr pointer;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  for (int i = 0; i < 40; i++) {
    OK(cuMemAllocAsync(&pointer, 300 * MIB, stream));
    OK(cuMemFreeAsync(pointer, stream));
  }
  OK(cuStreamEndCapture(stream, &graph));
  keep(graph);
  CUgraphExec made = executable(graph);
  for (int i = 0; i < 3; i++) OK(cuGraphLaunch(made, stream));
  EXPECT_EQUAL(charged(0), CONTEXT + 300 * MIB);
  AGREE();
}

// Two graphs that take turns near the limit make room for each other.
static void graphs_take_turns_at_the_limit(void) {
  start_on(0);
  CUgraphExec one = executable(allocating_graph(200 * MIB));
  CUgraphExec other = executable(allocating_graph(150 * MIB));
  CUdeviceptr pointer;
  while (limit_of(0) - charged(0) >= 202 * MIB) OK(cuMemAlloc_v2(&pointer, GRANULE));
  for (int i = 0; i < 10; i++) {
    OK(cuGraphLaunch(one, NULL));
    AGREE();
    OK(cuGraphLaunch(other, NULL));
    AGREE();
    EXPECT(charged(0) <= limit_of(0));
  }
  // And for plain memory.
  OK(cuCtxSynchronize());
  OK(cuDeviceGraphMemTrim(0));
  OK(cuMemAlloc_v2(&pointer, 100 * MIB));
  GIVES(cuGraphLaunch(one, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
}

typedef struct launcher {
  pthread_t thread;
  CUcontext context;
  CUgraphExec graph;
} launcher;

static void *launch_often(void *argument) {
  const launcher *own = argument;
  CUstream stream;
  OK(cuCtxSetCurrent(own->context));
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 100; i++) {
    CUresult result = cuGraphLaunch(own->graph, stream);
    EXPECT(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT(physical(0) <= limit_of(0));
  }
  OK(cuStreamSynchronize(stream));
  return NULL;
}

static void threads_launch_at_the_limit(void) {
  launcher launchers[3];
  CUcontext context = start_on(0);
  CUdeviceptr pointer;
  for (int i = 0; i < 3; i++) {
    launchers[i].context = context;
    launchers[i].graph = executable(allocating_graph((uint64_t)(100 + 40 * i) * MIB));
  }
  while (limit_of(0) - charged(0) >= 300 * MIB) OK(cuMemAlloc_v2(&pointer, GRANULE));
  for (int i = 0; i < 3; i++) {
    OK(pthread_create(&launchers[i].thread, NULL, launch_often, &launchers[i]));
  }
  for (int i = 0; i < 3; i++) OK(pthread_join(launchers[i].thread, NULL));
  AGREE();
}

// A graph whose memory went without a trim of the program's has it no longer in place.
static void a_reset_takes_graphs_memory(void) {
  CUdevice device = 0;
  start_on(device);
  CUgraphExec graph = executable(allocating_graph(200 * MIB));
  OK(cuGraphLaunch(graph, NULL));
  OK(cuCtxSynchronize());
  OK(cuDevicePrimaryCtxReset_v2(device));
  EXPECT_EQUAL(charged(0), 0);
  start_on(device);
  CUdeviceptr pointer;
  while (limit_of(0) - charged(0) >= 200 * MIB) OK(cuMemAlloc_v2(&pointer, GRANULE));
  EXPECT(cuGraphLaunch(graph, NULL) != CUDA_SUCCESS);
  EXPECT(physical(0) <= limit_of(0));
  AGREE();
}

static void graphs_without_memory_are_free(void) {
  start_on(0);
  CUgraph graph;
  CUgraphNode node;
  OK(cuGraphCreate(&graph, 0));
  keep(graph);
  OK(cuGraphAddEmptyNode(&node, graph, NULL, 0));
  CUgraphExec made = executable(graph);
  OK(cuGraphLaunch(made, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuGraphExecDestroy(made));
  CUgraphExec with = executable(allocating_graph(10 * MIB));
  made = executable(graph);
  OK(cuGraphLaunch(made, NULL));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuGraphExecDestroy(made));
  OK(cuGraphExecDestroy(with));
  EXPECT_EQUAL(charged(0), CONTEXT);
}

static CUgraphExec stuck_graph;

static void launch_stuck(CUstream stream) {
  OK(cuGraphLaunch(stuck_graph, stream));
}

// Of other threads, which may be what the launch's stream waits for.
static void no_call_waits_for_another_threads_graph(void) {
  CUcontext context = start_on(0);
  CUstream stream;
  CUdeviceptr pointer;
  stuck_call stuck;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  stuck_graph = executable(captured_on(stream));
  CUgraphExec other = executable(allocating_graph(100 * MIB));
  for (int round = 0; round < 2; round++) {  // the second is launched again
    if (round == 1) OK(cuGraphLaunch(stuck_graph, stream));
    begin_stuck_call(&stuck, context, launch_stuck);
    CUgraphExec made;
    OK(cuGraphInstantiateWithFlags(&made, allocating_graph(10 * MIB), 0));
    OK(cuGraphLaunch(other, stream));
    OK(cuGraphExecDestroy(made));
    EXPECT(charged(0) >= physical(0));
    GIVES(cuMemAlloc_v2(&pointer, limit_of(0)), CUDA_ERROR_OUT_OF_MEMORY);
    end_stuck_call(&stuck);
    OK(cuCtxSynchronize());
    AGREE();
  }
  OK(cuDeviceGraphMemTrim(0));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static const test_case cases[] = {
    {"no_call_waits_for_another_threads_graph", no_call_waits_for_another_threads_graph},
    {"memory_nodes_are_charged_at_launch", memory_nodes_are_charged_at_launch},
    {"graphs_share_their_memory", graphs_share_their_memory},
    {"captured_allocations_are_nodes", captured_allocations_are_nodes},
    {"children_are_not_exchanged_for_some_that_allocate",
     children_are_not_exchanged_for_some_that_allocate},
    {"memory_of_another_device_is_charged_there", memory_of_another_device_is_charged_there},
    {"captures_for_graphics_are_refused", captures_for_graphics_are_refused},
    {"children_count", children_count},
    {"graphs_that_are_not_read_to_their_end_are_refused",
     graphs_that_are_not_read_to_their_end_are_refused},
    {"allocations_outlive_their_graph", allocations_outlive_their_graph},
    {"launches_are_refused", launches_are_refused},
    {"uploaded_graphs_have_to_fit", uploaded_graphs_have_to_fit},
    {"chains_need_their_peak", chains_need_their_peak},
    {"graphs_take_turns_at_the_limit", graphs_take_turns_at_the_limit},
    {"threads_launch_at_the_limit", threads_launch_at_the_limit},
    {"a_reset_takes_graphs_memory", a_reset_takes_graphs_memory},
    {"graphs_without_memory_are_free", graphs_without_memory_are_free},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
