// SPDX-License-Identifier: Apache-2.0
// VMM allocations that something else than handles and mappings holds.
#ifndef ALLOTMENT_SHIM_VIRTUAL_H
#define ALLOTMENT_SHIM_VIRTUAL_H

#include "process.h"

// An array or mipmapped array is gone, and with it the mappings into it.
void virtual_array_gone(process *own, uint64_t array);

#endif
