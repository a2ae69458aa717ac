// SPDX-License-Identifier: Apache-2.0
// For programs that take turns on a simulated GPU: kernels of known length, what the simulated GPU
// says that they took, and what the share was charged.
#ifndef ALLOTMENT_TESTS_SHIM_COMPUTE_HOST_H
#define ALLOTMENT_TESTS_SHIM_COMPUTE_HOST_H

#include <dirent.h>
#include <time.h>

#include "host.h"

#define US UINT64_C(1000)
#define MS UINT64_C(1000000)

// The simulated libnvidia-ml.so.1 has it (docs/reference/simulated.md).
extern int allotSimulatedProcessBusy(unsigned int pid, unsigned int gpu,
                                     unsigned long long *busy_ns);

__attribute__((unused)) static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

__attribute__((unused)) static void pause_ns(uint64_t ns) {
  struct timespec time = {.tv_sec = (time_t)(ns / 1000000000u),
                          .tv_nsec = (long)(ns % 1000000000u)};
  nanosleep(&time, NULL);
}

// GPU time that this process's kernels really had.
__attribute__((unused)) static uint64_t truth_ns(void) {
  unsigned long long busy = 0;
  OK(allotSimulatedProcessBusy((unsigned)getpid(), 0, &busy));
  return busy;
}

__attribute__((unused)) static uint64_t figure(const uint64_t *word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

__attribute__((unused)) static uint64_t gpu_ns(void) {
  return figure(&share.usage->devices[0].gpu_ns);
}

__attribute__((unused)) static uint64_t copy_ns(void) {
  return figure(&share.usage->devices[0].copy_ns);
}

// The keeper charges a little after work has ended: waits until nothing was added for a while.
__attribute__((unused)) static uint64_t settled(const uint64_t *word) {
  uint64_t seen = figure(word);
  for (int quiet = 0; quiet < 10; quiet++) {
    pause_ns(5 * MS);
    if (figure(word) != seen) quiet = 0;
    seen = figure(word);
  }
  return seen;
}

__attribute__((unused)) static CUfunction spin_function(void) {
  static const char source[] =
      ".version 7.0\n.target sm_80\n.address_size 64\n"
      ".visible .entry allot_spin(.param .u64 ns)\n{ ret; }\n";
  CUmodule module;
  CUfunction function;
  OK(cuModuleLoadData(&module, source));
  OK(cuModuleGetFunction(&function, module, "allot_spin"));
  return function;
}

// Fills the whole device, so that kernels of several streams run one after another.
__attribute__((unused)) static void spin(CUfunction function, uint64_t ns, CUstream stream) {
  void *parameters[] = {&ns};
  OK(cuLaunchKernel(function, 432, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL));
}

__attribute__((unused)) static void spin_on_devices(CUfunction function, uint64_t ns,
                                                    CUstream stream) {
  void *parameters[] = {&ns};
  CUDA_LAUNCH_PARAMS list[1] = {{.function = function,
                                 .gridDimX = 1,
                                 .gridDimY = 1,
                                 .gridDimZ = 1,
                                 .blockDimX = 32,
                                 .blockDimY = 1,
                                 .blockDimZ = 1,
                                 .hStream = stream,
                                 .kernelParams = parameters}};
  OK(cuLaunchCooperativeKernelMultiDevice(list, 1, 0));
}

// Sanitized programs launch so slowly that the GPU idles between any two launches.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define IS_SLOW 1
#else
#define IS_SLOW 0
#endif

// Charged is what was really used, but for what the marks themselves take and for gaps of
// microseconds: to `percent` and 100 us.
__attribute__((unused)) static void expect_near(uint64_t actual, uint64_t wanted, uint64_t percent,
                                                const char *what) {
  uint64_t difference = actual > wanted ? actual - wanted : wanted - actual;
  if (difference <= wanted * percent / 100 + 100 * US) return;
  if (IS_SLOW && actual > wanted && actual < wanted * 5) return;
  FAIL("%s: charged %.3f ms, really %.3f ms", what, (double)actual / 1e6, (double)wanted / 1e6);
}

__attribute__((unused)) static int thread_count(void) {
  DIR *tasks = opendir("/proc/self/task");
  int count = 0;
  EXPECT(tasks != NULL);
  for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) count += entry->d_name[0] != '.';
  closedir(tasks);
  return count;
}

#endif
