// SPDX-License-Identifier: Apache-2.0
// What the test programs of the simulated driver share.
#ifndef ALLOTMENT_DRIVER_TEST_H
#define ALLOTMENT_DRIVER_TEST_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_abi.h"

#define MIB (1024ull * 1024)
#define MILLISECOND 1000000ull

// The call succeeds.
#define OK(call)                                                                     \
  do {                                                                               \
    CUresult ok_result = (call);                                                     \
    if (ok_result != CUDA_SUCCESS) {                                                 \
      fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, (int)ok_result); \
      abort();                                                                       \
    }                                                                                \
  } while (0)

// The call fails with this code.
#define FAILS(code, call)                                                               \
  do {                                                                                  \
    CUresult fails_result = (call);                                                     \
    if (fails_result != (code)) {                                                       \
      fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, (int)fails_result); \
      abort();                                                                          \
    }                                                                                   \
  } while (0)

static const char spin_ptx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    "// a comment with .entry not_this(\n"
    ".visible .entry allot_spin(.param .u64 nanoseconds)\n{\n  ret;\n}\n"
    ".visible .entry other()\n{\n  { .reg .b32 %r<2>; }\n  ret;\n}\n";

static inline CUcontext begin(int ordinal) {
  CUdevice device;
  CUcontext context;
  OK(cuInit(0));
  OK(cuDeviceGet(&device, ordinal));
  OK(cuDevicePrimaryCtxRetain(&context, device));
  OK(cuCtxSetCurrent(context));
  return context;
}

static inline CUfunction load_spin(void) {
  CUmodule module;
  CUfunction spin;
  OK(cuModuleLoadData(&module, spin_ptx));
  OK(cuModuleGetFunction(&spin, module, "allot_spin"));
  return spin;
}

static inline void spin_for(CUfunction spin, uint64_t nanoseconds, CUstream stream) {
  void *parameters[] = {&nanoseconds};
  OK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

// On every multiprocessor, so that no other kernel runs beside it.
static inline void fill_for(CUfunction spin, uint64_t nanoseconds, CUstream stream) {
  void *parameters[] = {&nanoseconds};
  OK(cuLaunchKernel(spin, 65535, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL));
}

static inline size_t free_bytes(void) {
  size_t free, total;
  OK(cuMemGetInfo_v2(&free, &total));
  return free;
}

static inline CUevent mark(CUstream stream) {
  CUevent event;
  OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
  OK(cuEventRecord(event, stream));
  return event;
}

// Keeps a stream back until the gate is opened. What is timed behind it is then all submitted
// before it begins, so that no delay of the host counts. One at a time in a process.
static int gate_is_open;

static inline void gate_wait(void *unused) {
  (void)unused;
  while (!__atomic_load_n(&gate_is_open, __ATOMIC_SEQ_CST)) usleep(100);
}

static inline void gate_close(CUstream stream) {
  __atomic_store_n(&gate_is_open, 0, __ATOMIC_SEQ_CST);
  OK(cuLaunchHostFunc(stream, gate_wait, NULL));
}

static inline void gate_open(void) {
  __atomic_store_n(&gate_is_open, 1, __ATOMIC_SEQ_CST);
}

static inline double elapsed_ms(CUevent start, CUevent end) {
  float milliseconds;
  OK(cuEventElapsedTime(&milliseconds, start, end));
  return (double)milliseconds;
}

// The child's status is checked: it must have exited with 0.
static inline void expect_success(pid_t child) {
  int status;
  assert(waitpid(child, &status, 0) == child);
  assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#endif
