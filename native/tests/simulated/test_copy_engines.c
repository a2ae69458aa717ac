// SPDX-License-Identifier: Apache-2.0
// Copies have engines of their own, one for each direction: they overlap with kernels and with each
// other, of whichever process, and wait only for copies of their own direction.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4
// sanitizers: plain address,undefined
// measures: time
#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

#define BYTES (16 * MIB)
#define HEAD_START (500 * MILLISECOND) /* for the host to move the bytes in */

static CUfunction spin;
static allot_handle machine;
static CUdeviceptr memory;
static void *host;

static double copy_ms(unsigned engine, uint64_t bytes) {
  return (double)allot_copy_ns(&machine, 0, engine, bytes) / (double)MILLISECOND;
}

static void expect_near(double value, double wanted) {
  if (value < wanted - 0.01 || value > wanted + 0.4) {
    fprintf(stderr, "%f is not near %f\n", value, wanted);
    abort();
  }
}

static double ended(CUevent start, CUevent end) {
  OK(cuEventSynchronize(end));
  return elapsed_ms(start, end);
}

// Streams that all go on at one moment, when what is submitted has long been moved on the host.
static CUevent line_up(CUstream *streams, int count) {
  CUstream first;
  OK(cuStreamCreate(&first, CU_STREAM_NON_BLOCKING));
  fill_for(spin, HEAD_START, first);
  CUevent start = mark(first);
  for (int i = 0; i < count; i++) {
    OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    OK(cuStreamWaitEvent(streams[i], start, 0));
  }
  return start;
}

static void directions_and_kernels_overlap(void) {
  CUstream streams[4];
  CUevent start = line_up(streams, 4), ends[4];
  allot_gpu_engine *engine = &machine.machine->engines[0];
  OK(cuEventSynchronize(start));
  start = line_up(streams, 4);
  uint64_t copied = allot_load(&engine->copy_busy_ns);
  fill_for(spin, 10 * MILLISECOND, streams[0]);
  OK(cuMemcpyHtoDAsync_v2(memory, host, BYTES, streams[1]));
  OK(cuMemcpyDtoHAsync_v2(host, memory + BYTES, BYTES, streams[2]));
  OK(cuMemsetD8Async(memory + 2 * BYTES, 1, BYTES, streams[3]));
  for (int i = 0; i < 4; i++) ends[i] = mark(streams[i]);
  expect_near(ended(start, ends[0]), 10);
  expect_near(ended(start, ends[1]), copy_ms(ALLOT_COPY_H2D, BYTES));
  expect_near(ended(start, ends[2]), copy_ms(ALLOT_COPY_D2H, BYTES));
  expect_near(ended(start, ends[3]), copy_ms(ALLOT_COPY_D2D, BYTES));
  uint64_t all = allot_copy_ns(&machine, 0, ALLOT_COPY_H2D, BYTES) +
                 allot_copy_ns(&machine, 0, ALLOT_COPY_D2H, BYTES) +
                 allot_copy_ns(&machine, 0, ALLOT_COPY_D2D, BYTES);
  assert(allot_load(&engine->copy_busy_ns) - copied == all);
  // Kernels' time is without theirs.
  assert(allot_load(&engine->busy_ns) == 2 * HEAD_START + 10 * MILLISECOND);
}

static void one_direction_takes_turns(void) {
  CUstream streams[2];
  CUevent start = line_up(streams, 2), ends[2];
  for (int i = 0; i < 2; i++) {
    OK(cuMemcpyHtoDAsync_v2(memory, host, BYTES, streams[i]));
    ends[i] = mark(streams[i]);
  }
  double each = copy_ms(ALLOT_COPY_H2D, BYTES);
  expect_near(ended(start, ends[0]), each);
  expect_near(ended(start, ends[1]), 2 * each);
}

// A neighbour that computes all the time slows no copy down.
static void others_kernels_are_no_matter(int go) {
  CUevent start = mark(NULL);
  assert(write(go, "", 1) == 1);
  usleep(50000);
  OK(cuMemcpyHtoDAsync_v2(memory, host, MIB, NULL));
  CUevent end = mark(NULL);
  double took = ended(start, end);
  assert(took < 1500);  // the neighbour's kernel takes three seconds
}

int main(void) {
  int go[2];
  assert(pipe(go) == 0);
  assert(allot_machine_open(&machine) == 0);
  pid_t child = fork();
  assert(child >= 0);
  if (child == 0) {
    char byte;
    close(go[1]);
    begin(0);
    CUfunction own = load_spin();
    assert(read(go[0], &byte, 1) == 1);
    fill_for(own, 3000 * MILLISECOND, NULL);
    OK(cuCtxSynchronize());
    _exit(0);
  }
  begin(0);
  spin = load_spin();
  OK(cuMemAlloc_v2(&memory, 3 * BYTES));
  OK(cuMemHostAlloc(&host, BYTES, 0));
  memset(host, 1, BYTES);
  directions_and_kernels_overlap();
  one_direction_takes_turns();
  others_kernels_are_no_matter(go[1]);
  expect_success(child);
  return 0;
}
