// SPDX-License-Identifier: Apache-2.0
// A memory pool, for the files that make, ask and share pools.
#ifndef ALLOTMENT_CUDA_POOL_H
#define ALLOTMENT_CUDA_POOL_H

#include "simulated/cuda/driver.h"

// Which memory a pool hands out: cuMemPoolCreate's location and type of allocation.
typedef struct pool_place {
  CUmemAllocationType type;
  CUmemLocationType at;
  int gpu;   // DEVICE: by the machine's number; else -1
  int node;  // HOST_NUMA; else 0
} pool_place;

typedef struct pool {
  object head;
  struct pool *next;
  pool_place place;
  bool is_default;  // of its place: the driver made it
  bool is_current;  // of its place, set by the program
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

// CUDA_ERROR_INVALID_VALUE: no pool can be there.
CUresult pool_place_of(const CUmemLocation *location, CUmemAllocationType type, pool_place *place);
pool_place pool_place_on(int gpu);  // plain memory of a GPU
bool pool_same_place(const pool_place *one, const pool_place *other);
pool *pool_new(const pool_place *place);
pool *pool_default(const pool_place *place);
pool *pool_current(const pool_place *place);
void pool_make_current(pool *chosen);
CUresult pool_of(CUmemoryPool handle, pool **found);
// `gpu`: where a pool without a GPU of its own takes managed memory from.
CUresult pool_allocate_locked(pool *from, int gpu, uint64_t size, CUdeviceptr *address);
void pool_close(pool *dying);  // its descriptor

#endif
