// SPDX-License-Identifier: Apache-2.0
// A program that always wants the GPU, for tests/local/test_compute_storm.py.
//
//   host_turns FILE INDEX ROUNDS
//
// Writes into FILE, as 64-bit words at 2 * INDEX: its pid, and how many rounds of kernels it has
// seen end. It ends after so many, or never (0).
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_abi.h"

#define KERNEL_NS 200000ull
#define KERNELS 5

#define OK(call)                                          \
  do {                                                    \
    int result_ = (int)(call);                            \
    if (result_ != 0) {                                   \
      fprintf(stderr, "%s: result %d\n", #call, result_); \
      return 1;                                           \
    }                                                     \
  } while (0)

static const char *const spin =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry allot_spin(.param .u64 allot_spin_nanoseconds) { ret; }\n";

int main(int count, char **arguments) {
  if (count != 4) return 2;
  unsigned long index = strtoul(arguments[2], NULL, 10), rounds = strtoul(arguments[3], NULL, 10);
  int descriptor = open(arguments[1], O_RDWR);
  uint64_t *words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (words == MAP_FAILED) return 3;

  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction function;
  OK(cuInit(0));
  OK(cuDeviceGet(&device, 0));
  // A thread that waits for the GPU sleeps.
  OK(cuDevicePrimaryCtxSetFlags_v2(device, CU_CTX_SCHED_BLOCKING_SYNC));
  OK(cuDevicePrimaryCtxRetain(&context, device));
  OK(cuCtxSetCurrent(context));
  OK(cuModuleLoadData(&module, spin));
  OK(cuModuleGetFunction(&function, module, "allot_spin"));
  uint64_t kernel_ns = KERNEL_NS;
  void *parameters[] = {&kernel_ns};
  __atomic_store_n(&words[2 * index], (uint64_t)getpid(), __ATOMIC_SEQ_CST);
  for (unsigned long round = 0; rounds == 0 || round < rounds; round++) {
    for (int i = 0; i < KERNELS; i++) {
      OK(cuLaunchKernel(function, 4096, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL));
    }
    OK(cuCtxSynchronize());
    __atomic_add_fetch(&words[2 * index + 1], 1, __ATOMIC_SEQ_CST);
  }
  return 0;
}
