// SPDX-License-Identifier: Apache-2.0
// Busy time adds up: what each process had is what its kernels took, together it is what the GPU
// did, and the GPU never did more than there was time for. Works of several streams, priorities,
// events and copies are mixed at random, in several processes at once. Kernels of the whole GPU run
// one by one; of small ones several run at once, as far as they fit.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4
#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

#define PROCESSES 4
#define STREAMS 5
#define LAUNCHES 400
#define SMS 40

typedef struct report {
  uint64_t asked_ns, had_ns;
  uint64_t area_ns;  // times the multiprocessors that each took
} report;

static uint64_t own_busy_ns(const allot_handle *machine) {
  for (int slot = 0; slot < allot_machine_high(machine); slot++) {
    const allot_process *process = &machine->machine->processes[slot];
    if (allot_machine_taken(machine, slot) && process->pid == getpid()) {
      return allot_load(&process->gpus[0].busy_ns);
    }
  }
  abort();
}

static void launch(CUfunction spin, unsigned blocks, uint64_t nanoseconds, CUstream stream) {
  void *parameters[] = {&nanoseconds};
  OK(cuLaunchKernel(spin, blocks, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL));
}

static report mix(const allot_handle *machine, unsigned seed, bool whole) {
  begin(0);
  CUfunction spin = load_spin();
  CUstream streams[STREAMS];
  CUevent events[STREAMS];
  CUdeviceptr memory;
  OK(cuMemAlloc_v2(&memory, MIB));
  for (int i = 0; i < STREAMS; i++) {
    OK(cuStreamCreateWithPriority(&streams[i], i % 2 == 0 ? CU_STREAM_NON_BLOCKING : 0, -(i % 3)));
    OK(cuEventCreate(&events[i], 0));
    OK(cuEventRecord(events[i], streams[i]));
  }
  report sum = {0};
  for (int i = 0; i < LAUNCHES; i++) {
    seed = seed * 1103515245u + 12345u;
    unsigned at = (seed >> 8) % STREAMS, other = (seed >> 12) % STREAMS;
    CUstream stream = (seed >> 16) % 9 == 0 ? NULL : streams[at];
    uint64_t nanoseconds = (seed >> 20) * 40ull;
    unsigned blocks = whole ? SMS : 1 + (seed >> 9) % SMS;
    launch(spin, blocks, nanoseconds, stream);
    sum.asked_ns += nanoseconds;
    sum.area_ns += nanoseconds * blocks;
    if (seed >> 28 == 3) OK(cuStreamWaitEvent(streams[at], events[other], 0));
    if (seed >> 28 == 5) OK(cuMemsetD8Async(memory, 1, MIB, stream));
    if (seed >> 28 == 7) OK(cuEventRecord(events[at], streams[at]));
    if (seed >> 28 == 9) OK(cuStreamSynchronize(streams[other]));
    if (seed >> 28 == 11) usleep(300);
  }
  OK(cuCtxSynchronize());
  sum.had_ns = own_busy_ns(machine);
  return sum;
}

static void together(const allot_handle *machine, bool whole) {
  allot_gpu_engine *engine = &machine->machine->engines[0];
  uint64_t before = allot_load(&engine->busy_ns);
  int results[2];
  assert(pipe(results) == 0);
  uint64_t began = allot_now_ns();
  pid_t children[PROCESSES];
  for (unsigned i = 0; i < PROCESSES; i++) {
    children[i] = fork();
    assert(children[i] >= 0);
    if (children[i] == 0) {
      report sum = mix(machine, i + 1, whole);
      _exit(write(results[1], &sum, sizeof sum) == sizeof sum ? 0 : 1);
    }
  }
  uint64_t all = 0;
  for (int i = 0; i < PROCESSES; i++) {
    report sum;
    assert(read(results[0], &sum, sizeof sum) == sizeof sum);
    if (whole) assert(sum.asked_ns == sum.had_ns);
    // Some of it at once, but no more than there are multiprocessors.
    if (!whole) assert(sum.had_ns < sum.asked_ns && sum.had_ns >= sum.area_ns / SMS);
    all += sum.had_ns;
  }
  for (int i = 0; i < PROCESSES; i++) expect_success(children[i]);
  assert(allot_load(&engine->busy_ns) - before == all);
  assert(all <= allot_now_ns() - began);
  // The history of the last second tells the same.
  uint64_t lately = allot_history_busy(&engine->compute, allot_now_ns(), 1000000000);
  uint64_t elapsed = allot_now_ns() - began;
  if (before == 0 && elapsed < 900 * MILLISECOND) assert(lately == all);
}

int main(void) {
  allot_handle machine;
  assert(allot_machine_open(&machine) == 0);
  together(&machine, true);
  together(&machine, false);
  return 0;
}
