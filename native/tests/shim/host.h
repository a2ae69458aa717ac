// SPDX-License-Identifier: Apache-2.0
// For programs that run in a share on a simulated machine: what the ledger says, what the machine
// says, and ways to fail.
#ifndef ALLOTMENT_TESTS_SHIM_HOST_H
#define ALLOTMENT_TESTS_SHIM_HOST_H

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
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

// What dead processes left is given back, as after a look that found it freed.
__attribute__((unused)) static void clear_the_dead(void) {
  allot_ledger_clear(&share, 0);
  allot_ledger_clear(&share, UINT64_MAX);
}

// What all processes of the share are charged with.
__attribute__((unused)) static uint64_t charged(int device) {
  clear_the_dead();
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

// A process of no share keeps all of the GPU that is left.
__attribute__((unused)) static pid_t keep_the_rest(void) {
  fflush(NULL);
  physical(0);  // of the dead nothing is left to be counted as in use
  pid_t child = fork();
  if (child == 0) {
    allot_handle apart;
    OK(allot_machine_open(&apart));
    OK(allot_machine_attach(&apart, ALLOT_PROCESS_COMPUTE));
    apart.machine->processes[apart.slot].gpus[0].contexts = 1;
    EXPECT(allot_gpu_take(&apart, 0, allot_gpu_capacity(&apart, 0) - allot_gpu_used(&apart, 0)));
    for (;;) pause();
  }
  while (physical(0) != allot_place_capacity(&simulation, 0)) usleep(1000);
  return child;
}

// A process of the share is killed while it has so much memory beside its context.
__attribute__((unused)) static void be_killed_with(uint64_t bytes) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    CUdeviceptr pointer;
    start_on(0);
    OK(cuMemAlloc_v2(&pointer, bytes));
    raise(SIGKILL);
  }
  int status;
  EXPECT(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

typedef struct test_case {
  const char *name;
  void (*run)(void);
} test_case;

// Runs a case in a child, with the share and the machine that `folder` has for it.
__attribute__((unused)) static void run_apart(const test_case *one, const char *folder) {
  char path[4096], now[4096];
  snprintf(now, sizeof now, "%s/now", folder);
  unlink(now);
  OK(symlink(one->name, now));
  pid_t child = fork();
  if (child < 0) FAIL("fork");
  if (child == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(60);
    snprintf(path, sizeof path, "%s/%s/output", folder, one->name);
    int output = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (output < 0 || dup2(output, 1) != 1 || dup2(output, 2) != 2) _exit(3);
    snprintf(path, sizeof path, "%s/%s/machine", folder, one->name);
    setenv(ALLOT_MACHINE_ENV, path, 1);
    look_at_share();
    one->run();
    exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) != child) {
  }
  kill(-child, SIGKILL);  // what the case may have left running
  printf("%s %d\n", one->name, status);
  fflush(stdout);
}

// Without words: lists the cases. NAME: runs that case. --each FOLDER NAME...: runs these cases,
// each in a child of a process that has touched neither the share nor the GPU, and prints the name
// and the wait status of each. FOLDER has a folder for each case with its `share` and its
// `machine`; what the case writes goes to `output` there. `now` leads to the case that runs, so
// that ALLOTMENT_SHARE, which is read when the program starts, can be FOLDER/now/share for all.
__attribute__((unused)) static int run_case(const test_case *cases, int argc, char **argv) {
  bool is_each = argc > 3 && strcmp(argv[1], "--each") == 0;
  int ran = 0;
  for (; cases->name != NULL; cases++) {
    if (argc < 2) puts(cases->name);
    for (int i = is_each ? 3 : 1; i < argc; i++) {
      if (strcmp(cases->name, argv[i]) != 0) continue;
      ran++;
      if (is_each) {
        run_apart(cases, argv[2]);
        continue;
      }
      look_at_share();
      cases->run();
    }
  }
  return argc < 2 || ran > 0 ? 0 : 2;
}

#endif
