// SPDX-License-Identifier: Apache-2.0
// Work that ends with its process or its context, and work with gaps: for the tests of what shares
// get when no program runs for long.
//
//   host_brief exit NANOSECONDS          one kernel, waited for, and out by exit
//   host_brief _exit NANOSECONDS         the same without exit handlers
//   host_brief contexts COUNT NANOSECONDS   as many contexts, one kernel in each
//   host_brief gaps SECONDS NANOSECONDS GAP kernels that are waited for, and a gap after each
//
// Prints how many nanoseconds of kernels it has run, and in how many.
#include <unistd.h>

#include "compute_host.h"

static uint64_t run_one(CUfunction function, uint64_t ns) {
  spin(function, ns, NULL);
  OK(cuCtxSynchronize());
  return ns;
}

static uint64_t run_contexts(int count, uint64_t ns) {
  for (int i = 0; i < count; i++) {
    CUcontext context;
    OK(cuCtxCreate_v2(&context, 0, 0));
    spin(spin_function(), ns, NULL);
    OK(cuCtxDestroy_v2(context));
  }
  return ns * (uint64_t)count;
}

static uint64_t run_gaps(double seconds, uint64_t ns, uint64_t gap_ns) {
  CUfunction function = spin_function();
  uint64_t end = now_ns() + (uint64_t)(seconds * 1e9), had = 0;
  while (now_ns() < end) {
    had += run_one(function, ns);
    pause_ns(gap_ns);
  }
  return had;
}

int main(int argc, char **argv) {
  look_at_share();
  start_on(0);
  uint64_t begun = now_ns(), had = 0;
  if (argc == 3) had = run_one(spin_function(), strtoull(argv[2], NULL, 10));
  if (argc == 4) had = run_contexts(atoi(argv[2]), strtoull(argv[3], NULL, 10));
  if (argc == 5) {
    had = run_gaps(strtod(argv[2], NULL), strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
  }
  printf("%llu %llu\n", (unsigned long long)had, (unsigned long long)(now_ns() - begun));
  fflush(stdout);
  if (strcmp(argv[1], "_exit") == 0) _exit(0);
  return 0;
}
