// SPDX-License-Identifier: Apache-2.0
// For programs that run in a share on a simulated machine: what the ledger says, what the machine
// says, and ways to fail.
#ifndef ALLOTMENT_TESTS_SHIM_HOST_H
#define ALLOTMENT_TESTS_SHIM_HOST_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "ledger.h"
#include "nvml_abi.h"
#include "simulated/engine/engine.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define GRANULE (2 * MIB)

#define FAIL(...)                                   \
  do {                                              \
    fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
    fprintf(stderr, __VA_ARGS__);                   \
    fputc('\n', stderr);                            \
    _exit(1);                                       \
  } while (0)

#define EXPECT(condition)                          \
  do {                                             \
    if (!(condition)) FAIL("not so: " #condition); \
  } while (0)

#define EXPECT_EQUAL(actual, wanted)                                                            \
  do {                                                                                          \
    unsigned long long actual_ = (unsigned long long)(actual);                                  \
    unsigned long long wanted_ = (unsigned long long)(wanted);                                  \
    if (actual_ != wanted_) FAIL(#actual " is %llu, not %llu (" #wanted ")", actual_, wanted_); \
  } while (0)

#define OK(call)                                             \
  do {                                                       \
    int result_ = (int)(call);                               \
    if (result_ != 0) FAIL("%s: result %d", #call, result_); \
  } while (0)

#define GIVES(call, wanted)                                                            \
  do {                                                                                 \
    int result_ = (int)(call);                                                         \
    if (result_ != (int)(wanted)) FAIL("%s: result %d, not " #wanted, #call, result_); \
  } while (0)

static allot_ledger share;
static allot_handle simulation;

__attribute__((unused)) static void look_at_share(void) {
  const char *directory = getenv("SHARE_TO_LOOK_AT");
  if (directory == NULL) directory = getenv("ALLOTMENT_SHARE");
  OK(allot_ledger_open(&share, directory));
  OK(allot_machine_open(&simulation));
}

// What all processes of the share are charged with.
__attribute__((unused)) static uint64_t charged(int device) {
  allot_ledger_reap(&share);
  return allot_ledger_used(&share, device);
}

// What the simulated GPU has really given to programs.
__attribute__((unused)) static uint64_t physical(int gpu) {
  allot_machine_reap(&simulation);
  return allot_gpu_used(&simulation, gpu);
}

__attribute__((unused)) static uint64_t limit_of(int device) {
  return allot_ledger_limit(&share, device);
}

__attribute__((unused)) static uint64_t context_cost(void) {
  return simulation.machine->description.gpus[0].context_bytes;
}

#define AGREE() EXPECT_EQUAL(charged(0), physical(0))

// The calling thread's context on the device.
__attribute__((unused)) static CUcontext start_on(CUdevice ordinal) {
  CUcontext context;
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, ordinal));
  OK(cuCtxSetCurrent(context));
  return context;
}

typedef struct test_case {
  const char *name;
  void (*run)(void);
} test_case;

// Runs the case that the command line names.
__attribute__((unused)) static int run_case(const test_case *cases, int argc, char **argv) {
  for (; cases->name != NULL; cases++) {
    if (argc < 2) puts(cases->name);
    if (argc < 2 || strcmp(cases->name, argv[1]) != 0) continue;
    look_at_share();
    cases->run();
    return 0;
  }
  return argc < 2 ? 0 : 2;
}

#endif
