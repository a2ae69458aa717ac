// SPDX-License-Identifier: Apache-2.0
// Memory pools: charged by what they reserve, which grows and shrinks.
#ifndef ALLOTMENT_SHIM_POOLS_H
#define ALLOTMENT_SHIM_POOLS_H

#include "process.h"

// Gives back what pools of the device no longer reserve. Not with one of their locks held.
void pools_settle(process *own, int device);
// After a synchronisation, when pools may have let go of what was freed.
#define EVERY_STREAM UINT64_C(0) /* of the current context */
#define NO_STREAM UINT64_MAX     /* that is known */
void pools_waited(process *own, uint64_t stream);

// A primary context is gone, and with it what pools of its device had.
void pools_reset(process *own, int device);

// Frees what cuMemAllocAsync gave, by cuMemFree.
CUresult pools_free(process *own, CUdeviceptr pointer);
// An allocation of a pool is known to be gone.
void pools_lost(process *own, const record *lost);

#endif
