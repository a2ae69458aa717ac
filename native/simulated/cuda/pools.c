// SPDX-License-Identifier: Apache-2.0
// Memory pools. A pool takes device memory in chunks and hands out pieces of them; what is freed
// stays with the pool until a synchronisation finds more reserved than its threshold, or it is
// trimmed.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/pool.h"

#define UNIT 512u
#define GRANULE (2 * MIB)
#define GROWTH (32 * MIB)

typedef struct gap {
  uint64_t at, size;
  struct gap *next;
} gap;

typedef struct chunk {
  CUdeviceptr base;
  uint64_t size, used;
  bool touched;
  gap *gaps;  // what is free, by place
  struct chunk *next;
} chunk;

static uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) & ~(unit - 1);
}

// ---- chunks ------------------------------------------------------------------------------------

static void raise(uint64_t *high, uint64_t value) {
  if (value > *high) *high = value;
}

static bool grow_by(pool *grown, uint64_t size) {
  if (grown->most > 0 && grown->reserved + size > grown->most) return false;
  if (!allot_gpu_take(&driver.machine, grown->gpu, size)) return false;
  chunk *made = calloc(1, sizeof *made);
  gap *all = malloc(sizeof *all);
  CUdeviceptr base = made != NULL && all != NULL ? address_take(size, GRANULE) : 0;
  if (base == 0) {
    free(made);
    free(all);
    allot_gpu_give_back(&driver.machine, grown->gpu, size);
    return false;
  }
  *all = (gap){.size = size};
  *made = (chunk){.base = base, .size = size, .gaps = all, .next = grown->chunks};
  grown->chunks = made;
  grown->reserved += size;
  raise(&grown->reserved_high, grown->reserved);
  return true;
}

static bool grow(pool *grown, uint64_t size) {
  uint64_t least = round_up(size, GRANULE);
  uint64_t wanted = least > GROWTH ? least : GROWTH;
  // Where the usual step no longer fits, what is needed still may.
  return grow_by(grown, wanted) || (wanted > least && grow_by(grown, least));
}

static void drop_chunk(pool *from, chunk **at) {
  chunk *gone = *at;
  *at = gone->next;
  from->reserved -= gone->size;
  address_give_back(gone->base, gone->size, gone->touched);
  allot_gpu_give_back(&driver.machine, from->gpu, gone->size);
  while (gone->gaps != NULL) {
    gap *first = gone->gaps;
    gone->gaps = first->next;
    free(first);
  }
  free(gone);
}

// Gives unused chunks back while more than `keep` bytes are reserved.
static void trim(pool *trimmed, uint64_t keep) {
  for (chunk **at = &trimmed->chunks; *at != NULL && trimmed->reserved > keep;) {
    if ((*at)->used == 0) {
      drop_chunk(trimmed, at);
    } else {
      at = &(*at)->next;
    }
  }
}

static CUdeviceptr take_from(chunk *from, uint64_t size) {
  for (gap **at = &from->gaps; *at != NULL; at = &(*at)->next) {
    gap *found = *at;
    if (found->size < size) continue;
    CUdeviceptr taken = from->base + found->at;
    found->at += size;
    found->size -= size;
    from->used += size;
    if (found->size == 0) {
      *at = found->next;
      free(found);
    }
    return taken;
  }
  return 0;
}

static void put_back(chunk *into, CUdeviceptr address, uint64_t size) {
  uint64_t place = address - into->base;
  gap **at = &into->gaps;
  gap *before = NULL;
  while (*at != NULL && (*at)->at < place) {
    before = *at;
    at = &(*at)->next;
  }
  into->used -= size;
  gap *after = *at;
  bool joins_after = after != NULL && place + size == after->at;
  if (before != NULL && before->at + before->size == place) {
    before->size += size;
    if (joins_after) {
      before->size += after->size;
      before->next = after->next;
      free(after);
    }
  } else if (joins_after) {
    after->at = place;
    after->size += size;
  } else {
    gap *made = malloc(sizeof *made);
    // Without host memory for the note the piece is lost until the chunk goes.
    if (made == NULL) return;
    *made = (gap){place, size, after};
    *at = made;
  }
}

static chunk *chunk_of(const pool *from, CUdeviceptr address) {
  chunk *at = from->chunks;
  while (at != NULL && address - at->base >= at->size) at = at->next;
  return at;
}

// ---- pieces ------------------------------------------------------------------------------------

CUresult pool_allocate_locked(pool *from, uint64_t size, CUdeviceptr *address) {
  uint64_t whole = round_up(size, UNIT);
  if (size > UINT64_MAX / 4) return CUDA_ERROR_OUT_OF_MEMORY;
  CUdeviceptr taken = 0;
  for (chunk *at = from->chunks; at != NULL && taken == 0; at = at->next) {
    taken = take_from(at, whole);
  }
  if (taken == 0) {
    if (!grow(from, whole)) return CUDA_ERROR_OUT_OF_MEMORY;
    taken = take_from(from->chunks, whole);
  }
  range *added = range_add(taken, size, RANGE_POOL, from->gpu);
  if (added == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  added->origin = from;
  added->accessible = true;
  from->used += whole;
  raise(&from->used_high, from->used);
  *address = taken;
  return CUDA_SUCCESS;
}

static void bury_if_empty(pool *dead) {
  if (!dead->dead || dead->used > 0) return;
  trim(dead, 0);
  object_free(dead);
}

CUresult pool_free_locked(range *freed, stream *after) {
  pool *into = freed->origin;
  uint64_t whole = round_up(freed->size, UNIT);
  chunk *from = chunk_of(into, freed->base);
  if (from != NULL) {
    from->touched = from->touched || freed->touched;
    put_back(from, freed->base, whole);
  }
  into->used -= whole;
  range_remove(freed);
  // Freed in stream order, the memory goes when the stream is waited for; freed now, at once.
  if (after == NULL && into->used == 0) trim(into, into->threshold);
  bury_if_empty(into);
  return CUDA_SUCCESS;
}

// ---- the life of pools -------------------------------------------------------------------------

static pool *all_pools;

pool *pool_new(int gpu) {
  pool *made = object_new(OBJECT_POOL, sizeof(pool), NULL);
  if (made == NULL) return NULL;
  made->gpu = gpu;
  made->descriptor = -1;
  made->reuse[0] = made->reuse[1] = made->reuse[2] = 1;
  made->next = all_pools;
  __atomic_store_n(&all_pools, made, __ATOMIC_RELAXED);
  return made;
}

static void unlist(pool *gone) {
  pool **at = &all_pools;
  while (*at != NULL && *at != gone) at = &(*at)->next;
  if (*at != NULL) __atomic_store_n(at, gone->next, __ATOMIC_RELAXED);
}

void pools_release_surplus(int gpu) {
  // Looked at without the lock: most programs have no pool.
  if (__atomic_load_n(&all_pools, __ATOMIC_RELAXED) == NULL) return;
  LOCK();
  for (pool *at = all_pools; at != NULL; at = at->next) {
    if (at->gpu == gpu && at->reserved > at->used && at->reserved > at->threshold) {
      trim(at, at->threshold);
    }
  }
  UNLOCK();
}

static void free_all(pool *emptied) {
  for (range *at = range_first(0), *next; at != NULL; at = next) {
    next = range_first(at->base + 1);
    if (at->kind == RANGE_POOL && at->origin == emptied) range_remove(at);
  }
  while (emptied->chunks != NULL) drop_chunk(emptied, &emptied->chunks);
  emptied->used = 0;
}

// A reset takes pools that the program made, and empties the one that it did not.
void pools_reset(int gpu) {
  device *own = &driver.devices[gpu];
  for (pool *at = all_pools, *next; at != NULL; at = next) {
    next = at->next;
    if (at->gpu != gpu) continue;
    free_all(at);
    if (at == own->default_pool) continue;
    unlist(at);
    object_free(at);
  }
  own->current_pool = own->default_pool;
  graph_memory_reset(gpu);
}

pool *pool_default(int gpu) {
  device *own = &driver.devices[gpu];
  if (own->default_pool == NULL) own->default_pool = pool_new(gpu);
  return own->default_pool;
}

pool *pool_current(int gpu) {
  device *own = &driver.devices[gpu];
  return own->current_pool != NULL ? own->current_pool : pool_default(gpu);
}

CUresult pool_of(CUmemoryPool handle, pool **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_POOL) || ((pool *)handle)->dead) return CUDA_ERROR_INVALID_VALUE;
  *found = (pool *)handle;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *handle, const CUmemPoolProps *wanted) {
  ENTER();
  if (handle == NULL || wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (wanted->allocType != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_NOT_SUPPORTED;
  if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (((unsigned)wanted->handleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  int gpu;
  TRY(driver_gpu(wanted->location.id, &gpu));
  LOCK();
  pool *made = pool_new(gpu);
  if (made != NULL) {
    made->handle_types = wanted->handleTypes;
    made->most = round_up(wanted->maxSize, GRANULE);
  }
  UNLOCK();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemoryPool)made;
  return CUDA_SUCCESS;
}

// Memory that is still in use lives on until it is freed.
CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  pool *dying;
  TRY(pool_of(handle, &dying));
  device *own = &driver.devices[dying->gpu];
  if (dying == own->default_pool) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  if (own->current_pool == dying) own->current_pool = NULL;
  unlist(dying);
  pool_close(dying);
  dying->dead = true;
  trim(dying, 0);
  bury_if_empty(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
  pool *trimmed;
  TRY(pool_of(handle, &trimmed));
  LOCK();
  trim(trimmed, keep);
  UNLOCK();
  return CUDA_SUCCESS;
}

// ---- allocating --------------------------------------------------------------------------------

static CUresult allocate(CUdeviceptr *address, size_t size, pool *from, stream *target) {
  if (address == NULL || size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (from != NULL && from->imported) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  if (from == NULL) from = pool_current(target->owner->gpu);
  UNLOCK();
  if (from == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  if (target->capture != NULL) return capture_allocate(target, from, size, address);
  TRY(capture_forbids_legacy(target));
  LOCK();
  CUresult result = pool_allocate_locked(from, size, address);
  UNLOCK();
  return result;
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream handle) {
  stream *target;
  TRY(stream_of(handle, &target));
  return allocate(address, size, NULL, target);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t size, CUmemoryPool from,
                                 CUstream handle) {
  stream *target;
  pool *wanted;
  TRY(stream_of(handle, &target));
  TRY(pool_of(from, &wanted));
  return allocate(address, size, wanted, target);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  stream *target;
  TRY(stream_of(handle, &target));
  if (address == 0) return CUDA_SUCCESS;
  if (target->capture != NULL) return capture_free(target, address);
  TRY(capture_forbids_legacy(target));
  LOCK();
  range *freed = range_find(address);
  bool known = freed != NULL && freed->base == address && freed->gpu >= 0;
  enum range_kind kind = known ? freed->kind : RANGE_HOST;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (kind == RANGE_POOL) result = pool_free_locked(freed, target);
  if (kind == RANGE_GRAPH) result = graph_memory_free_locked(freed);
  UNLOCK();
  // Memory of no pool is freed when the stream has come this far.
  if (kind == RANGE_PLAIN || kind == RANGE_SMALL || kind == RANGE_MANAGED ||
      kind == RANGE_EXTERNAL) {
    TRY(stream_synchronize(target));
    return cuMemFree_v2(address);
  }
  return result;
}
