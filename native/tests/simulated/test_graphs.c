// SPDX-License-Identifier: Apache-2.0
// Graphs: built by hand and captured, launched, changed, with memory of their own.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: a100-80gb
#include "tests/simulated/driver_test.h"

static CUfunction spin;
static CUstream stream;

static void expect_between(double value, double low, double high) {
  if (value < low || value > high) {
    fprintf(stderr, "%f is not within %f and %f\n", value, low, high);
    abort();
  }
}

static CUDA_KERNEL_NODE_PARAMS kernel(void **parameters) {
  return (CUDA_KERNEL_NODE_PARAMS){.func = spin,
                                   .gridDimX = 1,
                                   .gridDimY = 1,
                                   .gridDimZ = 1,
                                   .blockDimX = 32,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .kernelParams = parameters};
}

static double launch_ms(CUgraphExec exec) {
  gate_close(stream);
  CUevent start = mark(stream);
  OK(cuGraphLaunch(exec, stream));
  CUevent end = mark(stream);
  gate_open();
  OK(cuEventSynchronize(end));
  double ms = elapsed_ms(start, end);
  OK(cuEventDestroy_v2(start));
  OK(cuEventDestroy_v2(end));
  return ms;
}

static void by_hand(void) {
  CUgraph graph;
  CUgraphNode first, second, empty, listed[4];
  CUgraphExec exec;
  uint64_t nanoseconds = MILLISECOND;
  void *parameters[] = {&nanoseconds};
  CUDA_KERNEL_NODE_PARAMS wanted = kernel(parameters);
  OK(cuGraphCreate(&graph, 0));
  OK(cuGraphAddKernelNode_v2(&first, graph, NULL, 0, &wanted));
  nanoseconds = 2 * MILLISECOND;
  OK(cuGraphAddKernelNode_v2(&second, graph, &first, 1, &wanted));
  OK(cuGraphAddEmptyNode(&empty, graph, NULL, 0));
  OK(cuGraphAddDependencies_v2(graph, &second, &empty, NULL, 1));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGraphAddDependencies_v2(graph, &second, &empty, NULL, 1));
  size_t count = 0;
  OK(cuGraphGetNodes(graph, NULL, &count));
  assert(count == 3);
  count = 4;
  OK(cuGraphGetRootNodes(graph, listed, &count));
  assert(count == 1 && listed[0] == first);
  OK(cuGraphGetEdges_v2(graph, NULL, NULL, NULL, &count));
  assert(count == 2);
  count = 4;
  OK(cuGraphNodeGetDependentNodes_v2(first, listed, NULL, &count));
  assert(count == 1 && listed[0] == second);
  OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  expect_between(launch_ms(exec), 3.0, 3.3);

  nanoseconds = 5 * MILLISECOND;
  OK(cuGraphExecKernelNodeSetParams_v2(exec, first, &wanted));
  expect_between(launch_ms(exec), 7.0, 7.3);
  OK(cuGraphNodeSetEnabled(exec, first, 0));
  expect_between(launch_ms(exec), 2.0, 2.3);
  nanoseconds = 4 * MILLISECOND;
  OK(cuGraphKernelNodeSetParams_v2(second, &wanted));
  CUgraphExecUpdateResultInfo info;
  OK(cuGraphExecUpdate_v2(exec, graph, &info));
  expect_between(launch_ms(exec), 5.0, 5.3);
  CUDA_KERNEL_NODE_PARAMS back;
  OK(cuGraphKernelNodeGetParams_v2(second, &back));
  assert(back.func == spin && *(uint64_t *)back.kernelParams[0] == 4 * MILLISECOND);

  CUgraph clone;
  CUgraphNode same;
  OK(cuGraphClone(&clone, graph));
  OK(cuGraphNodeFindInClone(&same, second, clone));
  OK(cuGraphDestroyNode(same));
  FAILS(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecUpdate_v2(exec, clone, &info));
  assert(info.result == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  OK(cuGraphAddChildGraphNode(&same, graph, NULL, 0, clone));
  OK(cuGraphDestroy(clone));
  OK(cuGraphAddDependencies_v2(graph, &empty, &first, NULL, 1));  // a circle
  CUgraphExec none;
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiateWithFlags(&none, graph, 0));
  OK(cuGraphExecDestroy(exec));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGraphLaunch(exec, stream));
  OK(cuGraphDestroy(graph));
}

static void captured(void) {
  CUstream other;
  CUevent fork, join;
  CUgraph graph;
  CUgraphExec exec;
  CUdeviceptr memory;
  unsigned char back[4] = {0};
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
  OK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
  OK(cuMemAlloc_v2(&memory, 4));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CUstreamCaptureStatus status;
  OK(cuStreamIsCapturing(stream, &status));
  assert(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  spin_for(spin, MILLISECOND, stream);
  OK(cuEventRecord(fork, stream));
  OK(cuStreamWaitEvent(other, fork, 0));
  spin_for(spin, MILLISECOND, other);
  OK(cuMemsetD8Async(memory, 9, 4, stream));
  OK(cuMemcpyDtoHAsync_v2(back, memory, 4, stream));
  OK(cuEventRecord(join, other));
  FAILS(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(join));
  OK(cuStreamWaitEvent(stream, join, 0));
  spin_for(spin, MILLISECOND, stream);
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuStreamQuery(stream));
  assert(back[0] == 0);  // nothing has run yet
  size_t nodes = 0, edges = 0;
  OK(cuGraphGetNodes(graph, NULL, &nodes));
  OK(cuGraphGetEdges_v2(graph, NULL, NULL, NULL, &edges));
  assert(nodes == 5 && edges == 5);
  OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  // Its copies are moved by a thread of the host, which may be kept waiting: the best launch
  // counts.
  double least = launch_ms(exec);
  for (int i = 0; i < 1000 && least > 3.6; i++) {
    double ms = launch_ms(exec);
    least = ms < least ? ms : least;
  }
  expect_between(least, 3.0, 3.6);
  assert(back[0] == 9 && back[3] == 9);
  OK(cuGraphExecDestroy(exec));
  OK(cuGraphDestroy(graph));
  OK(cuMemFree_v2(memory));
}

static void capture_errors(void) {
  CUstream blocking, other;
  CUgraph graph;
  CUdeviceptr memory;
  CUevent fork;
  OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
  FAILS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamBeginCapture_v2(NULL, 0));
  FAILS(CUDA_ERROR_ILLEGAL_STATE, cuStreamEndCapture(blocking, &graph));
  // Waiting ends a capture in failure.
  OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_GLOBAL));
  FAILS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(blocking));
  FAILS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(blocking, &graph));
  // So does the legacy stream's work, which would have to wait for the captured one.
  OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
  FAILS(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cuEventRecord(fork, NULL));
  FAILS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(blocking, &graph));
  // And allocating, unless the capture or the thread is relaxed.
  OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  OK(cuThreadExchangeStreamCaptureMode(&mode));
  OK(cuMemAlloc_v2(&memory, 10));
  OK(cuThreadExchangeStreamCaptureMode(&mode));
  FAILS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuMemAlloc_v2(&memory, 10));
  FAILS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(blocking, &graph));
  // Work of a joined stream must come back.
  OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_GLOBAL));
  OK(cuEventRecord(fork, blocking));
  OK(cuStreamWaitEvent(other, fork, 0));
  spin_for(spin, MILLISECOND, other);
  FAILS(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cuStreamEndCapture(other, &graph));
  FAILS(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(blocking, &graph));
  spin_for(spin, 1000, other);  // both streams work as before
  OK(cuCtxSynchronize());
}

static uint64_t graph_bytes(CUgraphMem_attribute attribute) {
  uint64_t bytes;
  OK(cuDeviceGetGraphMemAttribute(0, attribute, &bytes));
  return bytes;
}

static void memory_nodes(void) {
  size_t before = free_bytes();
  CUdeviceptr one, kept;
  CUgraph graph;
  CUgraphExec exec;
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  OK(cuMemAllocAsync(&one, 10 * MIB, stream));
  OK(cuMemsetD8Async(one, 3, 10 * MIB, stream));
  OK(cuMemFreeAsync(one, stream));
  OK(cuMemAllocAsync(&kept, 6 * MIB, stream));
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  assert(free_bytes() == before);  // nothing until it is launched
  OK(cuGraphLaunch(exec, stream));
  OK(cuStreamSynchronize(stream));
  assert(before - free_bytes() == 10 * MIB);
  assert(graph_bytes(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) == 6 * MIB);
  assert(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) == 10 * MIB);
  OK(cuMemcpyHtoD_v2(kept, "kept", 5));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGraphLaunch(exec, stream));  // `kept` is still there
  OK(cuMemFreeAsync(kept, stream));
  OK(cuGraphLaunch(exec, stream));
  OK(cuStreamSynchronize(stream));
  OK(cuMemFree_v2(kept));
  OK(cuDeviceGraphMemTrim(0));
  assert(free_bytes() == before);
  assert(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) == 10 * MIB);
  OK(cuGraphExecDestroy(exec));
  OK(cuGraphInstantiateWithFlags(&exec, graph, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH));
  for (int i = 0; i < 3; i++) OK(cuGraphLaunch(exec, stream));
  OK(cuStreamSynchronize(stream));
  OK(cuMemFree_v2(kept));
  OK(cuGraphExecDestroy(exec));
  OK(cuGraphDestroy(graph));
  OK(cuDeviceGraphMemTrim(0));
  assert(free_bytes() == before);
}

static int calls;

static void count_call(void *data) {
  __atomic_fetch_add((int *)data, 1, __ATOMIC_SEQ_CST);
}

static void user_objects_and_host_nodes(void) {
  CUgraph graph;
  CUgraphNode node;
  CUgraphExec exec;
  CUuserObject object;
  int destroyed = 0;
  CUDA_HOST_NODE_PARAMS host = {count_call, &calls};
  OK(cuGraphCreate(&graph, 0));
  OK(cuGraphAddHostNode(&node, graph, NULL, 0, &host));
  OK(cuUserObjectCreate(&object, &destroyed, count_call, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  OK(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
  OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  OK(cuGraphLaunch(exec, stream));
  OK(cuGraphLaunch(exec, stream));
  OK(cuStreamSynchronize(stream));
  assert(__atomic_load_n(&calls, __ATOMIC_SEQ_CST) == 2);
  OK(cuGraphDestroy(graph));
  assert(destroyed == 0);  // the executable graph still needs it
  OK(cuGraphExecDestroy(exec));
  assert(destroyed == 1);
}

int main(void) {
  begin(0);
  spin = load_spin();
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  by_hand();
  captured();
  capture_errors();
  memory_nodes();
  user_objects_and_host_nodes();
  return 0;
}
