// SPDX-License-Identifier: Apache-2.0
// Plain device memory, as the driver takes it from a GPU.
#ifndef ALLOTMENT_SHIM_MEMORY_H
#define ALLOTMENT_SHIM_MEMORY_H

#include "charge.h"

// Smaller allocations are pieces of blocks of CHARGE_GRANULE bytes; larger ones are whole granules.
#define SMALL_LIMIT (1 * MIB)
#define SMALL_UNIT 512

// Reserves what an allocation may take at most. CUDA_SUCCESS, or what to return.
typedef struct plain_request {
  target at;
  uint64_t bytes;  // as asked for
  uint64_t reserved;
  bool small;        // then the process's small_lock is held from begin to end
  uint32_t managed;  // MANAGED_* of residency.h
} plain_request;
CUresult plain_begin(plain_request *request, uint64_t bytes, bool may_be_small);
// After the driver's answer: keeps the charge with the pointer, or gives it back. Returns the
// result for the program; an allocation that cannot be recorded is freed again.
CUresult plain_end(plain_request *request, CUresult result, CUdeviceptr pointer);

// Memory around this address was exported: whoever has the export keeps it after it was freed, so
// its charge is not given back before this process ends. False: it is no plain memory.
bool plain_exported(process *own, uint64_t address);

// Counts a small allocation in its block. Returns the bytes that this charges: a whole block for
// the first, nothing for others. They must be reserved.
uint64_t small_enter(const target *at, uint64_t pointer);
// A small allocation is gone: the last one of a block gives the block back.
void small_leave(process *own, uint64_t pointer);
// Numbers a small allocation or a piece of a pool, whose record stays until the driver has freed
// it: by then another one may have the address.
uint32_t piece_number(process *own);
// A record was found at an address that the driver has just given out again.
void record_displaced(process *own, const record *stale);

#endif
