// SPDX-License-Identifier: Apache-2.0
// Who may have a context on a device: anybody, one process, or nobody.
//
// It holds for contexts that begin: those that are there stay. MPS clients of one server count as
// one process, which is how a device is kept for them (cuda/contexts.c asks). A MIG device has its
// own (nvml.h of CUDA 13: with MIG on the handle has to be a MIG device's).
#include <unistd.h>

#include "simulated/nvml/library.h"

NVML_GETTER_ANY(nvmlDeviceGetComputeMode, nvmlComputeMode_t,
                allot_load(&gpu.engine->machine->engines[gpu.place].compute_mode))

NVML_EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode) {
  NVML_ENTER_ANY(device, mode <= NVML_COMPUTEMODE_EXCLUSIVE_PROCESS);
  // Threads of one process alone: gone since CUDA 8.
  if (mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD) return NVML_ERROR_NOT_SUPPORTED;
  if (geteuid() != 0) return NVML_ERROR_NO_PERMISSION;
  allot_store(&gpu.engine->machine->engines[gpu.place].compute_mode, (uint32_t)mode);
  return NVML_SUCCESS;
}
