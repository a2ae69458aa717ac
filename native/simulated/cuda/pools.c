// SPDX-License-Identifier: Apache-2.0
// Memory pools. A pool takes memory in chunks and hands out pieces of them; what is freed
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

// Work that a free waits for.
typedef struct pending {
  allot_point after;
  struct pending *next;
} pending;

typedef struct chunk {
  CUdeviceptr base;
  uint64_t size, used;
  int gpu;  // that it was taken from; -1: the host
  bool touched;
  gap *gaps;  // what is free, by place
  pending *frees;
  struct chunk *next;
} chunk;

static uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) & ~(unit - 1);
}

// ---- chunks ------------------------------------------------------------------------------------

static void raise(uint64_t *high, uint64_t value) {
  if (value > *high) *high = value;
}

static bool is_managed(const pool *asked) {
  return asked->place.type == CU_MEM_ALLOCATION_TYPE_MANAGED;
}

bool range_is_managed(const range *asked) {
  return asked->kind == RANGE_MANAGED ||
         (asked->kind == RANGE_POOL && is_managed((const pool *)asked->origin));
}

static bool take(const pool *grown, int gpu, uint64_t size) {
  if (gpu < 0) return true;
  if (!is_managed(grown)) return allot_gpu_take(&driver.machine, gpu, size);
  allot_managed_add(&driver.machine, gpu, size);
  return true;
}

static void give_back(const pool *from, int gpu, uint64_t size) {
  if (gpu < 0) return;
  if (is_managed(from)) {
    allot_managed_remove(&driver.machine, gpu, size);
  } else {
    allot_gpu_give_back(&driver.machine, gpu, size);
  }
}

static bool grow_by(pool *grown, int gpu, uint64_t size) {
  if (grown->most > 0 && grown->reserved + size > grown->most) return false;
  if (!take(grown, gpu, size)) return false;
  chunk *made = calloc(1, sizeof *made);
  gap *all = malloc(sizeof *all);
  CUdeviceptr base = made != NULL && all != NULL ? address_take(size, GRANULE) : 0;
  if (base == 0) {
    free(made);
    free(all);
    give_back(grown, gpu, size);
    return false;
  }
  *all = (gap){.size = size};
  *made = (chunk){.base = base, .size = size, .gpu = gpu, .gaps = all, .next = grown->chunks};
  grown->chunks = made;
  grown->reserved += size;
  raise(&grown->reserved_high, grown->reserved);
  return true;
}

static bool grow(pool *grown, int gpu, uint64_t size) {
  uint64_t least = round_up(size, GRANULE);
  uint64_t wanted = least > GROWTH ? least : GROWTH;
  // Where the usual step no longer fits, what is needed still may.
  return grow_by(grown, gpu, wanted) || (wanted > least && grow_by(grown, gpu, least));
}

static void drop_passed(chunk *of) {
  for (pending **at = &of->frees; *at != NULL;) {
    pending *first = *at;
    if (!allot_work_done(&driver.machine, first->after)) {
      at = &first->next;
      continue;
    }
    *at = first->next;
    free(first);
  }
}

static void note_free(chunk *of, const stream *after) {
  drop_passed(of);
  allot_point end = stream_end(after);
  if (end == 0 || allot_work_done(&driver.machine, end)) return;
  pending *noted = malloc(sizeof *noted);
  if (noted == NULL) return;
  *noted = (pending){end, of->frees};
  of->frees = noted;
}

static bool is_unused(chunk *asked) {
  if (asked->used > 0) return false;
  drop_passed(asked);
  return asked->frees == NULL;
}

static void drop_chunk(pool *from, chunk **at) {
  chunk *gone = *at;
  *at = gone->next;
  from->reserved -= gone->size;
  address_give_back(gone->base, gone->size, gone->touched);
  give_back(from, gone->gpu, gone->size);
  while (gone->gaps != NULL) {
    gap *first = gone->gaps;
    gone->gaps = first->next;
    free(first);
  }
  while (gone->frees != NULL) {
    pending *first = gone->frees;
    gone->frees = first->next;
    free(first);
  }
  free(gone);
}

// Gives unused chunks back while more than `keep` bytes are reserved.
static void trim(pool *trimmed, uint64_t keep) {
  for (chunk **at = &trimmed->chunks; *at != NULL && trimmed->reserved > keep;) {
    if (is_unused(*at)) {
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

CUresult pool_allocate_locked(pool *from, int gpu, uint64_t size, CUdeviceptr *address) {
  uint64_t whole = round_up(size, UNIT);
  if (size > UINT64_MAX / 4) return CUDA_ERROR_OUT_OF_MEMORY;
  CUdeviceptr taken = 0;
  for (chunk *at = from->chunks; at != NULL && taken == 0; at = at->next) {
    taken = take_from(at, whole);
  }
  if (taken == 0) {
    bool is_on_host = from->place.at != CU_MEM_LOCATION_TYPE_DEVICE && !is_managed(from);
    int grown_on = from->place.gpu >= 0 ? from->place.gpu : is_on_host ? -1 : gpu;
    if (!grow(from, grown_on, whole)) return CUDA_ERROR_OUT_OF_MEMORY;
    taken = take_from(from->chunks, whole);
  }
  range *added = range_add(taken, size, RANGE_POOL, chunk_of(from, taken)->gpu);
  if (added == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  added->origin = from;
  added->accessible = true;
  // The program writes managed memory, and the host's, without asking.
  added->touched = is_managed(from) || added->gpu < 0;
  from->used += whole;
  raise(&from->used_high, from->used);
  *address = taken;
  return CUDA_SUCCESS;
}

static pool *all_pools;

static void unlist(pool *gone) {
  pool **at = &all_pools;
  while (*at != NULL && *at != gone) at = &(*at)->next;
  if (*at != NULL) __atomic_store_n(at, gone->next, __ATOMIC_RELAXED);
}

// The memory of a destroyed pool goes once all of it is freed, and the work before the frees done.
static void bury_if_empty(pool *dead) {
  if (!dead->dead || dead->used > 0) return;
  trim(dead, 0);
  if (dead->chunks != NULL) return;
  unlist(dead);
  object_free(dead);
}

CUresult pool_free_locked(range *freed, stream *after) {
  pool *into = freed->origin;
  uint64_t whole = round_up(freed->size, UNIT);
  chunk *from = chunk_of(into, freed->base);
  if (from != NULL) {
    from->touched = from->touched || freed->touched;
    put_back(from, freed->base, whole);
    if (after != NULL) note_free(from, after);
  }
  into->used -= whole;
  range_remove(freed);
  // Freed in stream order, the memory goes when the stream is waited for; freed now, at once.
  if (after == NULL && into->used == 0) trim(into, into->threshold);
  bury_if_empty(into);
  return CUDA_SUCCESS;
}

// ---- the life of pools -------------------------------------------------------------------------

pool_place pool_place_on(int gpu) {
  return (pool_place){
      .type = CU_MEM_ALLOCATION_TYPE_PINNED, .at = CU_MEM_LOCATION_TYPE_DEVICE, .gpu = gpu};
}

CUresult pool_place_of(const CUmemLocation *location, CUmemAllocationType type, pool_place *place) {
  bool managed = type == CU_MEM_ALLOCATION_TYPE_MANAGED;
  if (location == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (!managed && type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  *place = (pool_place){.type = type, .at = location->type, .gpu = -1};
  switch (location->type) {
    case CU_MEM_LOCATION_TYPE_NONE:
      return managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return driver_gpu(location->id, &place->gpu);
    case CU_MEM_LOCATION_TYPE_HOST:
      return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      place->node = location->id;
      return location->id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN:
      // Simulated GPUs have one domain, which is the whole device.
      if (managed || location->localized.localityDomainId != 0) return CUDA_ERROR_INVALID_VALUE;
      place->at = CU_MEM_LOCATION_TYPE_DEVICE;
      return driver_gpu(location->localized.deviceId, &place->gpu);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

bool pool_same_place(const pool_place *one, const pool_place *other) {
  return one->type == other->type && one->at == other->at && one->gpu == other->gpu &&
         one->node == other->node;
}

pool *pool_new(const pool_place *place) {
  pool *made = object_new(OBJECT_POOL, sizeof(pool), NULL);
  if (made == NULL) return NULL;
  made->place = *place;
  made->descriptor = -1;
  made->reuse[0] = made->reuse[1] = made->reuse[2] = 1;
  made->next = all_pools;
  __atomic_store_n(&all_pools, made, __ATOMIC_RELAXED);
  return made;
}

void pools_release_surplus(int gpu) {
  // Looked at without the lock: most programs have no pool.
  if (__atomic_load_n(&all_pools, __ATOMIC_RELAXED) == NULL) return;
  LOCK();
  for (pool *at = all_pools, *next; at != NULL; at = next) {
    next = at->next;
    bury_if_empty(at);
  }
  for (pool *at = all_pools; at != NULL; at = at->next) {
    bool is_elsewhere = at->place.gpu >= 0 && at->place.gpu != gpu;
    if (!is_elsewhere && at->reserved > at->used && at->reserved > at->threshold) {
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
  for (pool *at = all_pools, *next; at != NULL; at = next) {
    next = at->next;
    if (at->place.gpu != gpu) continue;
    free_all(at);
    if (at->is_default) continue;
    unlist(at);
    object_free(at);
  }
  graph_memory_reset(gpu);
}

pool *pool_default(const pool_place *place) {
  for (pool *at = all_pools; at != NULL; at = at->next) {
    if (!at->dead && at->is_default && pool_same_place(&at->place, place)) return at;
  }
  pool *made = pool_new(place);
  if (made != NULL) made->is_default = true;
  return made;
}

pool *pool_current(const pool_place *place) {
  for (pool *at = all_pools; at != NULL; at = at->next) {
    if (!at->dead && at->is_current && pool_same_place(&at->place, place)) return at;
  }
  return pool_default(place);
}

void pool_make_current(pool *chosen) {
  for (pool *at = all_pools; at != NULL; at = at->next) {
    if (pool_same_place(&at->place, &chosen->place)) at->is_current = at == chosen;
  }
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
  pool_place place;
  TRY(pool_place_of(&wanted->location, wanted->allocType, &place));
  bool managed = place.type == CU_MEM_ALLOCATION_TYPE_MANAGED;
  if (managed && driver.machine.machine->description.cuda_version < 13000) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  bool is_exportable = !managed && place.at == CU_MEM_LOCATION_TYPE_DEVICE;
  if (!is_exportable && wanted->handleTypes != 0) return CUDA_ERROR_INVALID_VALUE;
  if (managed && wanted->maxSize != 0) return CUDA_ERROR_INVALID_VALUE;
  if (((unsigned)wanted->handleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  LOCK();
  pool *made = pool_new(&place);
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
  if (dying->is_default) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
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
  pool_place own = pool_place_on(target->owner->gpu);
  if (from == NULL) from = pool_current(&own);
  UNLOCK();
  if (from == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  bool is_plain = !is_managed(from) && from->place.at == CU_MEM_LOCATION_TYPE_DEVICE;
  if (target->capture != NULL && !is_plain) return CUDA_ERROR_NOT_SUPPORTED;
  if (target->capture != NULL) return capture_allocate(target, from, size, address);
  TRY(capture_forbids_legacy(target));
  submit_wait_for_room(target);
  LOCK();
  CUresult result = pool_allocate_locked(from, target->owner->gpu, size, address);
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
  submit_wait_for_room(target);
  LOCK();
  range *freed = range_find(address);
  bool known = freed != NULL && freed->base == address;
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
