// SPDX-License-Identifier: Apache-2.0
// VMM allocations that something else than handles and mappings holds.
#ifndef ALLOTMENT_SHIM_VIRTUAL_H
#define ALLOTMENT_SHIM_VIRTUAL_H

#include "process.h"

// Another holder of an allocation, by its number, and one less; with virtual_lock held.
void virtual_hold(process *own, uint64_t id);
void virtual_let_go(process *own, uint64_t id);
// The mapping that an address lies in; its owner is the allocation's number.
bool virtual_mapping_of(process *own, uint64_t address, record *mapping);

// An array or mipmapped array is gone, and with it the mappings into it.
void virtual_array_gone(process *own, uint64_t array);

#endif
