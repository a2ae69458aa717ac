// SPDX-License-Identifier: Apache-2.0
// Injected faults: an initialisation that fails, a GPU that falls off the bus, calls that hang.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4:2
#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

int main(void) {
  allot_handle machine;
  assert(allot_machine_open(&machine) == 0);
  allot_machine_faults *faults = &machine.machine->faults;
  allot_store(&faults->cuda_init_error, (uint32_t)CUDA_ERROR_SYSTEM_NOT_READY);
  FAILS(CUDA_ERROR_SYSTEM_NOT_READY, cuInit(0));
  allot_store(&faults->cuda_init_error, 0u);
  begin(0);
  CUdeviceptr memory;
  OK(cuMemAlloc_v2(&memory, 100));
  allot_store(&faults->gpus[0].hang_us, 20000u);
  uint64_t before = allot_now_ns();
  OK(cuMemAlloc_v2(&memory, 100));
  assert(allot_now_ns() - before >= 20 * MILLISECOND);
  allot_store(&faults->gpus[0].hang_us, 0u);
  allot_store(&faults->gpus[0].lost, 1u);
  FAILS(CUDA_ERROR_UNKNOWN, cuMemAlloc_v2(&memory, 100));
  FAILS(CUDA_ERROR_UNKNOWN, cuCtxSynchronize());
  char name[96];
  FAILS(CUDA_ERROR_UNKNOWN, cuDeviceGetName(name, sizeof name, 0));
  OK(cuDeviceGetName(name, sizeof name, 1));  // the other one is well
  allot_store(&faults->gpus[0].lost, 0u);
  return 0;
}
