// SPDX-License-Identifier: Apache-2.0
// The order of work: within streams, between streams, against the default streams, with events,
// functions on the host and awaited values.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: a100-80gb
#include <pthread.h>

#include "tests/simulated/driver_test.h"

static CUfunction spin;

static CUstream new_stream(unsigned flags) {
  CUstream stream;
  OK(cuStreamCreate(&stream, flags));
  return stream;
}

static CUevent wait_and_keep(CUevent event) {
  OK(cuEventSynchronize(event));
  return event;
}

static void expect_between(double value, double low, double high) {
  if (value < low || value > high) {
    fprintf(stderr, "%f is not within %f and %f\n", value, low, high);
    abort();
  }
}

static void legacy_synchronises(void) {
  CUstream blocking = new_stream(CU_STREAM_DEFAULT), free = new_stream(CU_STREAM_NON_BLOCKING);
  gate_close(blocking);
  CUevent start = mark(blocking);
  spin_for(spin, 2 * MILLISECOND, blocking);
  CUevent legacy = mark(NULL);       // after the blocking stream's kernel
  CUevent independent = mark(free);  // after nothing
  CUevent after = mark(blocking);    // after the legacy stream's mark
  FAILS(CUDA_ERROR_NOT_READY, cuStreamQuery(blocking));
  OK(cuStreamQuery(free));
  gate_open();
  wait_and_keep(after);
  expect_between(elapsed_ms(start, legacy), 2.0, 2.5);
  assert(elapsed_ms(start, independent) < 0);
  OK(cuStreamDestroy_v2(blocking));
  OK(cuStreamDestroy_v2(free));
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(free));
}

static void events_order_streams(void) {
  CUstream one = new_stream(CU_STREAM_NON_BLOCKING), two = new_stream(CU_STREAM_NON_BLOCKING);
  gate_close(one);
  CUevent start = mark(one);
  spin_for(spin, 3 * MILLISECOND, one);
  CUevent done = mark(one);
  OK(cuStreamWaitEvent(two, done, 0));
  CUevent behind = mark(two);
  gate_open();
  wait_and_keep(behind);
  expect_between(elapsed_ms(start, behind), 3.0, 3.5);
  OK(cuStreamDestroy_v2(one));
  OK(cuStreamDestroy_v2(two));
}

static void copies_overlap_kernels(void) {
  CUstream one = new_stream(CU_STREAM_NON_BLOCKING), two = new_stream(CU_STREAM_NON_BLOCKING);
  CUdeviceptr memory;
  void *host;
  OK(cuMemAlloc_v2(&memory, 64 * MIB));
  OK(cuMemHostAlloc(&host, 64 * MIB, 0));
  memset(host, 1, 64 * MIB);
  OK(cuMemcpyHtoD_v2(memory, host, 64 * MIB));  // pages are there from now on
  gate_close(one);
  CUevent start = mark(one);
  spin_for(spin, 50 * MILLISECOND, one);
  CUevent kernel = mark(one);
  gate_open();
  CUevent copy_start = mark(two);
  OK(cuMemcpyHtoDAsync_v2(memory, host, 64 * MIB, two));
  CUevent copy = mark(two);
  wait_and_keep(kernel);
  wait_and_keep(copy);
  expect_between(elapsed_ms(start, kernel), 50.0, 50.5);
  // 64 MiB at some 20 to 30 GiB/s; a busy host is slower than that.
  assert(elapsed_ms(copy_start, copy) >= 1.5);
  OK(cuMemFreeHost(host));
  OK(cuMemFree_v2(memory));
}

static int seen[8], seen_count;

static void note(void *data) {
  seen[__atomic_fetch_add(&seen_count, 1, __ATOMIC_SEQ_CST)] = *(int *)data;
}

static void write_seven(void *data) {
  *(unsigned char *)data = 7;
}

static void host_functions_keep_order(void) {
  int one = 1, two = 2;
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  CUstream other = new_stream(CU_STREAM_NON_BLOCKING);
  unsigned char value = 1, back = 0;
  CUdeviceptr memory, flag;
  OK(cuMemAlloc_v2(&memory, 1));
  OK(cuMemAlloc_v2(&flag, 4));
  OK(cuMemsetD32_v2(flag, 0, 1));
  OK(cuCtxSynchronize());
  OK(cuStreamWaitValue32_v2(stream, flag, 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUevent start = mark(stream);
  spin_for(spin, 3 * MILLISECOND, stream);
  OK(cuLaunchHostFunc(stream, note, &one));
  OK(cuLaunchHostFunc(stream, write_seven, &value));
  OK(cuMemcpyHtoDAsync_v2(memory, &value, 1, stream));  // copies what the function wrote
  OK(cuMemcpyDtoHAsync_v2(&back, memory, 1, stream));
  spin_for(spin, MILLISECOND, stream);
  CUevent end = mark(stream);
  OK(cuLaunchHostFunc(other, note, &two));  // need not wait for the other stream
  OK(cuStreamSynchronize(other));
  OK(cuStreamWriteValue32_v2(other, flag, 1, 0));
  OK(cuStreamSynchronize(stream));
  assert(seen_count == 2 && seen[0] == 2 && seen[1] == 1);
  assert(back == 7);
  assert(elapsed_ms(start, end) >= 4.0);
  OK(cuMemFree_v2(flag));
  OK(cuMemFree_v2(memory));
}

static void values_are_awaited(void) {
  CUstream one = new_stream(CU_STREAM_NON_BLOCKING), two = new_stream(CU_STREAM_NON_BLOCKING);
  CUdeviceptr flag;
  OK(cuMemAlloc_v2(&flag, 4));
  OK(cuMemsetD32_v2(flag, 0, 1));
  OK(cuCtxSynchronize());
  OK(cuStreamWaitValue32_v2(one, flag, 5, CU_STREAM_WAIT_VALUE_GEQ));
  CUevent end = mark(one);
  gate_close(two);
  OK(cuStreamWriteValue32_v2(two, flag, 5, 0));
  FAILS(CUDA_ERROR_NOT_READY, cuEventQuery(end));
  gate_open();
  OK(cuStreamSynchronize(one));
  OK(cuEventQuery(end));
  OK(cuMemFree_v2(flag));
}

static void priorities_count(void) {
  CUstream low, high;
  int least, greatest;
  OK(cuCtxGetStreamPriorityRange(&least, &greatest));
  assert(least == 0 && greatest < 0);
  OK(cuStreamCreateWithPriority(&low, CU_STREAM_NON_BLOCKING, least));
  OK(cuStreamCreateWithPriority(&high, CU_STREAM_NON_BLOCKING, greatest));
  gate_close(low);
  CUevent start = mark(low);
  OK(cuStreamWaitEvent(high, start, 0));
  for (int i = 0; i < 10; i++) fill_for(spin, 2 * MILLISECOND, low);
  CUevent low_end = mark(low);
  fill_for(spin, MILLISECOND, high);
  CUevent high_end = mark(high);
  gate_open();
  wait_and_keep(low_end);
  wait_and_keep(high_end);
  expect_between(elapsed_ms(start, high_end), 1.0, 5.0);  // overtook nine kernels
  expect_between(elapsed_ms(start, low_end), 21.0, 22.0);
}

static void *use_own_stream(void *context) {
  OK(cuCtxSetCurrent(context));
  CUevent start, end;
  OK(cuEventCreate(&start, 0));
  OK(cuEventCreate(&end, 0));
  OK(cuEventRecord_ptsz(start, NULL));
  uint64_t nanoseconds = MILLISECOND;
  void *parameters[] = {&nanoseconds};
  OK(cuLaunchKernel_ptsz(spin, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
  OK(cuEventRecord_ptsz(end, NULL));
  OK(cuStreamSynchronize_ptsz(NULL));
  assert(elapsed_ms(start, end) >= 1.0);
  return NULL;
}

static void threads_have_own_streams(CUcontext context) {
  unsigned long long shared_id, own_id;
  OK(cuStreamGetId(NULL, &shared_id));
  OK(cuStreamGetId_ptsz(NULL, &own_id));
  assert(shared_id != own_id);
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) {
    assert(pthread_create(&threads[i], NULL, use_own_stream, context) == 0);
  }
  for (int i = 0; i < 4; i++) assert(pthread_join(threads[i], NULL) == 0);
}

static void events_are_remembered(void) {
  gate_close(NULL);
  CUevent start = mark(NULL);
  spin_for(spin, MILLISECOND, NULL);
  CUevent end = mark(NULL);
  gate_open();
  for (int i = 0; i < 3000; i++) spin_for(spin, 100, NULL);  // the ring has long forgotten them
  OK(cuCtxSynchronize());
  expect_between(elapsed_ms(start, end), 1.0, 1.2);
  CUevent never;
  float ms;
  OK(cuEventCreate(&never, 0));
  OK(cuEventQuery(never));
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, never, end));
  OK(cuEventDestroy_v2(end));
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(end));
}

int main(void) {
  CUcontext context = begin(0);
  spin = load_spin();
  legacy_synchronises();
  events_order_streams();
  copies_overlap_kernels();
  host_functions_keep_order();
  values_are_awaited();
  priorities_count();
  threads_have_own_streams(context);
  events_are_remembered();
  return 0;
}
