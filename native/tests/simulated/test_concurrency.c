// SPDX-License-Identifier: Apache-2.0
// Kernels of one process run together while their multiprocessors suffice, in whichever streams and
// contexts; busy time is the time in which any of them ran.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4
// measures: time
#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

#define SMS 40 /* of a T4, which holds one block of 1024 threads on each */

static CUfunction spin;
static allot_handle machine;

static CUstream new_stream(int priority) {
  CUstream stream;
  OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority));
  return stream;
}

static void launch(unsigned blocks, uint64_t nanoseconds, CUstream stream) {
  void *parameters[] = {&nanoseconds};
  OK(cuLaunchKernel(spin, blocks, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL));
}

static void expect_near(double value, double wanted) {
  if (value < wanted - 0.01 || value > wanted + 0.4) {
    fprintf(stderr, "%f is not near %f\n", value, wanted);
    abort();
  }
}

static uint64_t busy_ns(void) {
  return allot_load(&machine.machine->engines[0].busy_ns);
}

// Starts with an event that all streams wait for, so that all are ready at one moment.
static CUevent line_up(CUstream *streams, int count) {
  for (int i = 0; i < count; i++) streams[i] = new_stream(0);
  CUstream first = new_stream(0);
  gate_close(first);
  CUevent start = mark(first);
  for (int i = 0; i < count; i++) OK(cuStreamWaitEvent(streams[i], start, 0));
  return start;
}

static double ended(CUevent start, CUevent end) {
  gate_open();
  OK(cuEventSynchronize(end));
  return elapsed_ms(start, end);
}

static void small_ones_run_together(void) {
  CUstream streams[SMS];
  CUevent ends[SMS];
  uint64_t before = busy_ns();
  CUevent start = line_up(streams, SMS);
  for (int i = 0; i < SMS; i++) {
    launch(1, 10 * MILLISECOND, streams[i]);
    ends[i] = mark(streams[i]);
  }
  for (int i = 0; i < SMS; i++) expect_near(ended(start, ends[i]), 10);
  OK(cuCtxSynchronize());
  assert(busy_ns() - before == 10 * MILLISECOND);
}

static void those_that_do_not_fit_wait_in_order(void) {
  CUstream streams[4];
  CUevent ends[4];
  CUevent start = line_up(streams, 4);
  const unsigned blocks[4] = {30, 20, 10, 10};
  for (int i = 0; i < 4; i++) {
    launch(blocks[i], 4 * MILLISECOND, streams[i]);
    ends[i] = mark(streams[i]);
  }
  expect_near(ended(start, ends[0]), 4);
  expect_near(ended(start, ends[1]), 8);  // 10 are free, it needs 20
  expect_near(ended(start, ends[2]), 8);  // would fit beside the first, but is behind the second
  expect_near(ended(start, ends[3]), 8);
}

static void urgent_ones_go_first(void) {
  CUstream first = new_stream(0), low = new_stream(0), high = new_stream(-1);
  gate_close(first);
  CUevent start = mark(first);
  OK(cuStreamWaitEvent(low, start, 0));
  OK(cuStreamWaitEvent(high, start, 0));
  launch(SMS, 4 * MILLISECOND, low);
  CUevent low_end = mark(low);
  launch(SMS, 4 * MILLISECOND, high);
  CUevent high_end = mark(high);
  expect_near(ended(start, high_end), 4);
  expect_near(ended(start, low_end), 8);
}

static void streams_keep_their_order(void) {
  CUstream streams[2];
  CUevent start = line_up(streams, 2);
  for (int i = 0; i < 5; i++) {
    launch(1, MILLISECOND, streams[0]);
    launch(2, 2 * MILLISECOND, streams[1]);
  }
  CUevent one = mark(streams[0]), other = mark(streams[1]);
  expect_near(ended(start, one), 5);
  expect_near(ended(start, other), 10);
}

static void occupancy_counts(void) {
  // 32 threads: 16 blocks on a multiprocessor of a T4.
  CUstream streams[3];
  CUevent start = line_up(streams, 3), ends[3];
  uint64_t nanoseconds = 4 * MILLISECOND;
  void *parameters[] = {&nanoseconds};
  const unsigned blocks[3] = {16 * SMS / 2, 16 * SMS / 2, 1};
  for (int i = 0; i < 3; i++) {
    OK(cuLaunchKernel(spin, blocks[i], 1, 1, 32, 1, 1, 0, streams[i], parameters, NULL));
    ends[i] = mark(streams[i]);
  }
  expect_near(ended(start, ends[0]), 4);
  expect_near(ended(start, ends[1]), 4);
  expect_near(ended(start, ends[2]), 8);
}

// No more at once than the hardware has queues for.
static void there_is_a_most(void) {
  enum { LAUNCHES = 129 };
  static CUstream streams[LAUNCHES];
  static CUevent ends[LAUNCHES];
  uint32_t *most = &machine.machine->description.gpus[0].engine_concurrent_kernels;
  assert(*most == 128);
  *most = 8;
  CUevent start = line_up(streams, 12);
  for (int i = 0; i < 12; i++) {
    launch(1, 4 * MILLISECOND, streams[i]);
    ends[i] = mark(streams[i]);
  }
  for (int i = 0; i < 12; i++) expect_near(ended(start, ends[i]), i < 8 ? 4 : 8);
  *most = 128;
}

// Rounds with another process are taken again where a busy host kept one of both from its start.
#define ROUNDS 8

typedef struct neighbour {
  pid_t pid;
  int orders, answers;
} neighbour;

// For each order computes that many milliseconds, and answers with the milliseconds that it took.
static neighbour hire_neighbour(void) {
  int orders[2], answers[2];
  assert(pipe(orders) == 0 && pipe(answers) == 0);
  pid_t child = fork();
  assert(child >= 0);
  if (child == 0) {
    close(orders[1]);
    begin(0);
    CUfunction own = load_spin();
    double took = 0;
    assert(write(answers[1], &took, sizeof took) == sizeof took);
    unsigned char milliseconds;
    while (read(orders[0], &milliseconds, 1) == 1) {
      CUevent start = mark(NULL);
      fill_for(own, milliseconds * MILLISECOND, NULL);
      CUevent end = mark(NULL);
      OK(cuEventSynchronize(end));
      took = elapsed_ms(start, end);
      assert(write(answers[1], &took, sizeof took) == sizeof took);
    }
    _exit(0);
  }
  close(orders[0]);
  return (neighbour){child, orders[1], answers[0]};
}

static void tell(const neighbour *other, unsigned char milliseconds) {
  assert(write(other->orders, &milliseconds, 1) == 1);
}

static double hear(const neighbour *other) {
  double took;
  assert(read(other->answers, &took, sizeof took) == sizeof took);
  return took;
}

// Another process's turn puts all of this one's kernels aside, and none is lost.
static bool takes_turns(const neighbour *other) {
  CUstream streams[4];
  CUevent start = line_up(streams, 4), ends[4];
  for (int i = 0; i < 4; i++) {
    for (int j = 0; j < 4; j++) launch(10, 20 * MILLISECOND, streams[i]);
    ends[i] = mark(streams[i]);
  }
  tell(other, 40);
  bool is_right = true;
  for (int i = 0; i < 4; i++) {
    double took = ended(start, ends[i]);
    assert(took > 79.9);  // four of 20 one after another, whatever else
    is_right = is_right && took > 115 && took < 130;
  }
  double took = hear(other);
  return is_right && took >= 60 && took <= 84;
}

// What was put aside goes on in its next turn, even if something more urgent waits by then.
static bool ends_begun_ones_first(const neighbour *other) {
  CUstream low = new_stream(0), high = new_stream(-1);
  tell(other, 60);
  usleep(10000);
  launch(SMS, 10 * MILLISECOND, low);
  CUevent low_end = mark(low);
  usleep(5000);  // in which it has had a turn
  launch(SMS, MILLISECOND, high);
  CUevent high_end = mark(high);
  OK(cuEventSynchronize(high_end));
  OK(cuEventSynchronize(low_end));
  hear(other);
  return elapsed_ms(low_end, high_end) > 0.9;
}

static void in_one_of_the_rounds(bool (*is_right)(const neighbour *), const neighbour *other) {
  for (int round = 0; round < ROUNDS; round++) {
    if (is_right(other)) return;
  }
  abort();
}

static void turns_are_of_all(void) {
  neighbour other = hire_neighbour();
  begin(0);
  spin = load_spin();
  hear(&other);  // it has its context
  in_one_of_the_rounds(takes_turns, &other);
  in_one_of_the_rounds(ends_begun_ones_first, &other);
  close(other.orders);
  expect_success(other.pid);
}

int main(void) {
  assert(allot_machine_open(&machine) == 0);
  // First, since children of a process with a context have no GPU.
  turns_are_of_all();
  small_ones_run_together();
  those_that_do_not_fit_wait_in_order();
  urgent_ones_go_first();
  streams_keep_their_order();
  occupancy_counts();
  there_is_a_most();
  return 0;
}
