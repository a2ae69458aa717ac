// SPDX-License-Identifier: Apache-2.0
// Managed memory moves: two processes that each need nearly all of a GPU compute in turns, at the
// cost that the rates of the copies say, and what is on the GPU is always known.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4[memory=1Gi]
// sanitizers: plain address,undefined
#include <signal.h>

#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

#define GRANULE (2 * MIB)

// What the parent has a child do. Each is answered with the milliseconds that it took on the GPU.
enum { ALLOCATE = 1, KERNEL, TO_GPU, TO_HOST, FREE, PLAIN, PLAIN_FREE, END };
typedef struct order {
  int what;
  uint64_t bytes;
} order;

typedef struct worker {
  pid_t pid;
  int orders, answers;
} worker;

static allot_handle machine;

static double obey(const order *given) {
  static CUdeviceptr memory, plain;
  static uint64_t size;
  static CUfunction spin;
  if (spin == NULL) spin = load_spin();
  const bool is_queued = given->what == KERNEL || given->what == TO_GPU || given->what == TO_HOST;
  if (is_queued) gate_close(NULL);
  CUevent start = mark(NULL);
  switch (given->what) {
    case ALLOCATE:
      size = given->bytes;
      OK(cuMemAllocManaged(&memory, size, CU_MEM_ATTACH_GLOBAL));
      break;
    case KERNEL:
      fill_for(spin, 5 * MILLISECOND, NULL);
      break;
    case TO_GPU:
      OK(cuMemPrefetchAsync(memory, size, 0, NULL));
      break;
    case TO_HOST:
      OK(cuMemPrefetchAsync_v2(memory, size, (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST}, 0,
                               NULL));
      break;
    case FREE:
      OK(cuMemFree_v2(memory));
      break;
    case PLAIN:
      OK(cuMemAlloc_v2(&plain, given->bytes));
      break;
    case PLAIN_FREE:
      OK(cuMemFree_v2(plain));
      break;
    default:
      _exit(0);
  }
  CUevent end = mark(NULL);
  gate_open();
  OK(cuEventSynchronize(end));
  return elapsed_ms(start, end);
}

static worker hire(void) {
  int orders[2], answers[2];
  assert(pipe(orders) == 0 && pipe(answers) == 0);
  worker made = {.orders = orders[1], .answers = answers[0]};
  made.pid = fork();
  assert(made.pid >= 0);
  if (made.pid == 0) {
    close(orders[1]);
    begin(0);
    order given;
    while (read(orders[0], &given, sizeof given) == sizeof given) {
      double took = obey(&given);
      assert(write(answers[1], &took, sizeof took) == sizeof took);
    }
    _exit(1);
  }
  return made;
}

static void tell(const worker *to, int what, uint64_t bytes) {
  order given = {what, bytes};
  assert(write(to->orders, &given, sizeof given) == sizeof given);
}

static double hear(const worker *from) {
  double took;
  assert(read(from->answers, &took, sizeof took) == sizeof took);
  return took;
}

static double ask(const worker *asked, int what, uint64_t bytes) {
  tell(asked, what, bytes);
  return hear(asked);
}

static double copy_ms(unsigned engine, uint64_t bytes) {
  return (double)allot_copy_ns(&machine, 0, engine, bytes) / (double)MILLISECOND;
}

static void expect_near(double value, double wanted) {
  if (value < wanted - 0.01 || value > wanted + 0.4) {
    fprintf(stderr, "%f is not near %f\n", value, wanted);
    abort();
  }
}

static uint64_t used(void) {
  assert(allot_machine_reap(&machine) >= 0);
  return allot_gpu_used(&machine, 0);
}

static void expect_used(uint64_t wanted) {
  if (used() == wanted) return;
  fprintf(stderr, "%.1f MiB used, not %.1f\n", (double)used() / MIB, (double)wanted / MIB);
  abort();
}

int main(void) {
  assert(allot_machine_open(&machine) == 0);
  worker one = hire(), other = hire();
  uint64_t context = machine.machine->description.gpus[0].context_bytes;
  uint64_t capacity = allot_gpu_capacity(&machine, 0), left = capacity - 2 * context;
  uint64_t each = left * 95 / 100 / GRANULE * GRANULE, over = 2 * each - left;
  double in = copy_ms(ALLOT_COPY_H2D, over), out = copy_ms(ALLOT_COPY_D2H, over);

  ask(&one, ALLOCATE, each);
  ask(&other, ALLOCATE, each);
  expect_used(2 * context);
  // What was never used comes in at once, and makes room at the price of what goes out.
  expect_near(ask(&one, KERNEL, 0), 5);
  expect_used(2 * context + each);
  expect_near(ask(&one, KERNEL, 0), 5);
  expect_near(ask(&other, KERNEL, 0), out + 5);
  expect_used(capacity);
  assert(allot_managed_on_host(&machine) == over);
  // From then on each turn brings in what the other displaced, by faults.
  for (int i = 0; i < 2; i++) {
    expect_near(ask(&one, KERNEL, 0), 2 * in + out + 5);
    expect_near(ask(&other, KERNEL, 0), 2 * in + out + 5);
    expect_near(ask(&other, KERNEL, 0), 5);
  }
  // Ahead of use it comes at the full rate, and the kernel waits for nothing.
  expect_near(ask(&one, TO_GPU, 0), in + out);
  expect_near(ask(&one, KERNEL, 0), 5);
  expect_near(ask(&one, TO_GPU, 0), 0);
  expect_used(capacity);
  assert(allot_managed_on_host(&machine) == over);
  // Where the one moves out by itself, the other's turn costs only what it brings in.
  expect_near(ask(&one, TO_HOST, 0), copy_ms(ALLOT_COPY_D2H, each));
  expect_used(2 * context + each - over);
  expect_near(ask(&other, TO_GPU, 0), in);
  expect_used(2 * context + each);

  // Both at once: whose turn it is finishes bringing its memory in.
  tell(&one, KERNEL, 0);
  tell(&other, KERNEL, 0);
  assert(hear(&one) > 5 && hear(&other) >= 5);

  // Memory of other kinds has precedence, up to all there is.
  ask(&one, PLAIN, left / GRANULE * GRANULE);
  assert(used() > capacity - GRANULE);
  assert(allot_managed_resident(&machine, 0) < GRANULE);
  assert(allot_gpu_used(&machine, 0) <= capacity);
  ask(&one, PLAIN_FREE, 0);
  ask(&other, TO_GPU, 0);
  expect_used(2 * context + each);

  // Freed, or its process killed, it is gone.
  ask(&one, FREE, 0);
  expect_used(2 * context + each);
  kill(other.pid, SIGKILL);
  int status;
  assert(waitpid(other.pid, &status, 0) == other.pid);
  expect_used(context);
  assert(allot_managed_on_host(&machine) == 0);
  // More than there is of it can be had, and computes, too.
  ask(&one, ALLOCATE, 2 * capacity / GRANULE * GRANULE);
  assert(ask(&one, KERNEL, 0) > 5);
  expect_used(capacity);
  tell(&one, END, 0);
  expect_success(one.pid);
  expect_used(0);
  return 0;
}
