// SPDX-License-Identifier: Apache-2.0
// Graph memory: what executable graphs with memory nodes reserve on a device.
#ifndef ALLOTMENT_SHIM_GRAPHS_H
#define ALLOTMENT_SHIM_GRAPHS_H

#include "process.h"

// Gives back what the device's graphs no longer reserve.
void graphs_settle(process *own, int device);

#endif
