// SPDX-License-Identifier: Apache-2.0
// NVML handles and the share's devices.
#ifndef ALLOTMENT_SHIM_NVML_H
#define ALLOTMENT_SHIM_NVML_H

#include "driver.h"
#include "process.h"

// NVML's own answer to a question about the share that cannot be had.
#define NVML_NO_SHARE NVML_ERROR_NOT_READY

// The policy's index of a device. Not NVML_SUCCESS: what NVML says to that handle, or
// NVML_ERROR_NO_PERMISSION for a device of others.
nvmlReturn_t nvml_device(process *own, nvmlDevice_t handle, int *device);

#endif
