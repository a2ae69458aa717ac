// SPDX-License-Identifier: Apache-2.0
// A memory pool, for the files that make, ask and share pools.
#ifndef ALLOTMENT_CUDA_POOL_H
#define ALLOTMENT_CUDA_POOL_H

#include "simulated/cuda/driver.h"

typedef struct pool {
  object head;
  struct pool *next;
  int gpu;
  CUmemAllocationHandleType handle_types;
  uint64_t threshold, most;  // most 0: no limit of its own
  uint64_t reserved, reserved_high, used, used_high;
  uint32_t reuse[3];  // the three reuse policies, which make no difference here
  uint32_t access;    // a bit for each ordinal that was given access
  bool dead;          // destroyed, with memory still in use
  bool imported;
  int descriptor;  // once exported or imported: what names the pool between processes
  struct chunk *chunks;
} pool;

pool *pool_new(int gpu);
pool *pool_default(int gpu);
pool *pool_current(int gpu);
CUresult pool_of(CUmemoryPool handle, pool **found);
CUresult pool_allocate_locked(pool *from, uint64_t size, CUdeviceptr *address);
void pool_close(pool *dying);  // its descriptor

#endif
