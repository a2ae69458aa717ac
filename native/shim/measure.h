// SPDX-License-Identifier: Apache-2.0
// What the driver itself says that this process has of a device.
#ifndef ALLOTMENT_SHIM_MEASURE_H
#define ALLOTMENT_SHIM_MEASURE_H

#include "process.h"

// By NVML. False: it cannot tell (no NVML, or this process is not in its list under the number that
// it has here, as in most containers).
bool measure_process_bytes(process *own, int device, uint64_t *bytes);

#endif
