// SPDX-License-Identifier: Apache-2.0
// Memory pools: charged by what they reserve, which grows and shrinks.
#ifndef ALLOTMENT_SHIM_POOLS_H
#define ALLOTMENT_SHIM_POOLS_H

#include "process.h"

// Gives back what pools of the device no longer reserve. Not with one of their locks held.
void pools_settle(process *own, int device);
// After a synchronisation, when pools may have let go of what was freed.
void pools_settle_all(process *own);

// An allocation of a pool was freed: by cuMemFree (is_done), or in a stream, to be done later.
void pools_freed(process *own, const record *freed, bool is_done);

#endif
