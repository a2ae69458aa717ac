// SPDX-License-Identifier: Apache-2.0
// A program that waits for each result: one kernel, its end, so long on the CPU, and again.
//
//   steps KERNEL_NS GAP_NS SECONDS
//
// On the CPU it sleeps, so that a computer of two processors has room for several of them. Starts
// when stdin ends. Prints one JSON object: what it ran, how long a step took, and what the share's
// ledger says that it used.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "lanes.h"

enum { MOST_STEPS = 1 << 16 };

int main(int count, char **arguments) {
  static int64_t steps[MOST_STEPS];
  if (count != 4) {
    fprintf(stderr, "usage: steps KERNEL_NS GAP_NS SECONDS\n");
    return 2;
  }
  uint64_t kernel_ns = strtoull(arguments[1], NULL, 10), gap_ns = strtoull(arguments[2], NULL, 10);
  uint64_t length_ns = (uint64_t)(strtod(arguments[3], NULL) * 1e9);
  open_device();
  WRAPPED(cuStreamCreate);
  WRAPPED(cuEventRecord);
  WRAPPED(cuEventSynchronize);
  CUfunction function = spin_function();
  unsigned int grid = whole_grid();
  CUstream stream;
  need(wrapped_cuStreamCreate(&stream, 1), "cuStreamCreate");
  CUevent over = blocking_event();
  wait_for_start();
  uint64_t begun_ns = now_ns(), last_ns = begun_ns, kernels = 0;
  while (last_ns < begun_ns + length_ns) {
    launch_whole(function, grid, &kernel_ns, stream);
    need(wrapped_cuEventRecord(over, stream), "cuEventRecord");
    need(wrapped_cuEventSynchronize(over), "cuEventSynchronize");
    sleep_until(now_ns() + gap_ns);
    uint64_t now = now_ns();
    steps[kernels++ % MOST_STEPS] = (int64_t)(now - last_ns);
    last_ns = now;
  }
  sleep_until(last_ns + 30000000u);  // what measures in the background has its say
  size_t kept = kernels < MOST_STEPS ? kernels : MOST_STEPS;
  printf(
      "{\"pid\": %d, \"begun_ns\": %llu, \"ended_ns\": %llu, \"kernels\": %llu, "
      "\"work_ns\": %llu, \"charged_ns\": %llu, "
      "\"gap_ns\": {\"p50\": %lld, \"p99\": %lld, \"max\": %lld}}\n",
      (int)getpid(), (unsigned long long)begun_ns, (unsigned long long)last_ns,
      (unsigned long long)kernels, (unsigned long long)(kernels * kernel_ns),
      (unsigned long long)charged_ns(), (long long)percentile(steps, kept, 0.5),
      (long long)percentile(steps, kept, 0.99), (long long)percentile(steps, kept, 1.0));
  fflush(stdout);
  sleep_until(last_ns + 200000000u);  // the sampler sees the last of this process
  return 0;
}
