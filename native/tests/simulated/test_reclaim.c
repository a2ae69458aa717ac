// SPDX-License-Identifier: Apache-2.0
// Processes killed at any instruction of allocation storms and launches leave nothing behind, and
// together never have more than there is.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4
// sanitizers: plain address,undefined
#include <signal.h>

#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

#define PROCESSES 6
#define ROUNDS 8

// The others may have all memory just now.
static void begin_patiently(void) {
  CUcontext context;
  OK(cuInit(0));
  for (;;) {
    CUresult result = cuDevicePrimaryCtxRetain(&context, 0);
    if (result == CUDA_SUCCESS) break;
    assert(result == CUDA_ERROR_OUT_OF_MEMORY);
    usleep(100);
  }
  OK(cuCtxSetCurrent(context));
}

static void storm(unsigned seed) {
  begin_patiently();
  CUfunction spin = load_spin();
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUdeviceptr held[64] = {0};
  for (unsigned i = 0;; i++) {
    seed = seed * 1103515245u + 12345u;
    CUdeviceptr *one = &held[seed >> 8 & 63];
    if (*one != 0) {
      OK(cuMemFree_v2(*one));
      *one = 0;
      continue;
    }
    uint64_t size = (uint64_t)(seed >> 16) * (i % 2 == 0 ? 37 : 8191);
    CUresult result = i % 7 == 0   ? cuMemAllocManaged(one, 8 * size + 1, CU_MEM_ATTACH_GLOBAL)
                      : i % 3 == 0 ? cuMemAllocAsync(one, size + 1, stream)
                                   : cuMemAlloc_v2(one, size + 1);
    if (i % 7 == 0 && i % 2 == 0) OK(cuMemPrefetchAsync(*one, 8 * size + 1, 0, stream));
    if (result != CUDA_SUCCESS) {
      assert(result == CUDA_ERROR_OUT_OF_MEMORY);
      *one = 0;
    }
    if (i % 16 == 0) spin_for(spin, 20000, stream);
  }
}

static void check_totals(const allot_handle *handle) {
  uint64_t sum = 0;
  for (int slot = 0; slot < allot_machine_high(handle); slot++) {
    sum += allot_process_used(handle, slot, 0);
  }
  assert(sum == allot_gpu_used(handle, 0));
}

int main(void) {
  allot_handle handle;
  assert(allot_machine_open(&handle) == 0);
  for (int round = 0; round < ROUNDS; round++) {
    pid_t children[PROCESSES];
    for (unsigned i = 0; i < PROCESSES; i++) {
      children[i] = fork();
      assert(children[i] >= 0);
      if (children[i] == 0) storm((unsigned)round * 100 + i);
    }
    for (int look = 0; look < 30; look++) {
      usleep(1000);
      assert(allot_gpu_used(&handle, 0) <= allot_gpu_capacity(&handle, 0));
    }
    // Stopped first, so that some are caught in the middle of an operation for long.
    for (int i = 0; i < PROCESSES; i += 2) kill(children[i], SIGSTOP);
    usleep(2000);
    for (int i = 0; i < PROCESSES; i++) kill(children[i], SIGKILL);
    for (int i = 0; i < PROCESSES; i++) {
      int status;
      assert(waitpid(children[i], &status, 0) == children[i]);
      assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
    assert(allot_machine_reap(&handle) >= 0);
    assert(allot_gpu_used(&handle, 0) == 0);
    assert(allot_managed_resident(&handle, 0) == 0 && allot_managed_on_host(&handle) == 0);
    check_totals(&handle);
  }
  // Whoever comes next finds an idle GPU, too.
  begin(0);
  CUfunction spin = load_spin();
  gate_close(NULL);
  CUevent start = mark(NULL);
  spin_for(spin, 2 * MILLISECOND, NULL);
  CUevent end = mark(NULL);
  gate_open();
  OK(cuEventSynchronize(end));
  double ms = elapsed_ms(start, end);
  if (ms < 2.0 || ms >= 2.5) fprintf(stderr, "%f ms\n", ms);
  assert(ms >= 2.0 && ms < 2.5);
  return 0;
}
