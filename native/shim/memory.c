// SPDX-License-Identifier: Apache-2.0
// Plain, pitched and managed memory, and freeing.
//
// The driver takes memory from a GPU in granules of 2 MiB. From 1 MiB an allocation has granules of
// its own; smaller ones share blocks of one granule, in one context. So a block is charged when the
// first allocation in it is seen and given back with the last: what is charged is what the GPU has
// less of, not what programs asked for.
//
// In an oversubscribed share what has granules of its own is managed memory (residency.c), so that
// it can be put aside; small blocks stay on the device.
#include "memory.h"

#include "dead.h"
#include "driver.h"
#include "pools.h"
#include "residency.h"
#include "room.h"

// ---- blocks of small allocations ----

typedef struct block_visit {
  const target *at;
  uint64_t charged;
} block_visit;

static uint64_t block_of(uint64_t pointer) {
  return pointer / CHARGE_GRANULE;
}

static bool enter_block(record *block, bool exists, void *context) {
  block_visit *visit = context;
  if (!exists) {
    block->bytes = visit->charged = CHARGE_GRANULE;
    block->owner = (uint64_t)(uintptr_t)visit->at->context;
    block->device = (int16_t)visit->at->device;
  }
  block->count++;
  return true;
}

// Without memory for the record the block is not given back before its context: too much is
// charged then, not too little.
uint64_t small_enter(const target *at, uint64_t pointer) {
  block_visit visit = {.at = at};
  bool kept =
      records_change(&at->own->records, SPACE_BLOCK, block_of(pointer), enter_block, &visit);
  return kept ? visit.charged : CHARGE_GRANULE;
}

static bool leave_block(record *block, bool exists, void *context) {
  record *left = context;
  if (!exists) return false;
  if (--block->count > 0) return true;
  *left = *block;
  return false;
}

void small_leave(process *own, uint64_t pointer) {
  record left = {.bytes = 0};
  records_change(&own->records, SPACE_BLOCK, block_of(pointer), leave_block, &left);
  if (left.bytes != 0) charge_release(own, left.device, left.bytes);
}

void record_displaced(process *own, const record *stale) {
  if (stale->kind == KIND_SMALL) {
    small_leave(own, stale->key);
  } else if (stale->kind == KIND_POOLED) {
    pools_lost(own, stale);
  } else {
    if (managed_whose(stale) != MANAGED_NOT) residency_removed(own, stale->device, stale->bytes);
    charge_release(own, stale->device, stale->bytes);
  }
}

uint32_t piece_number(process *own) {
  return __atomic_add_fetch(&own->piece_serial, 1, __ATOMIC_RELAXED);
}

// ---- allocating ----

// Is there a gap in one of the context's blocks? Small allocations come one at a time, so that it
// is still there when the driver looks for it.
static bool has_room(const plain_request *request) {
  room_question question = {.holders = SPACE_BLOCK,
                            .pieces = KIND_SMALL,
                            .owner = (uint64_t)(uintptr_t)request->at.context,
                            .bytes = request->bytes,
                            .total = UINT64_MAX};
  return room_exists(request->at.own, &question);
}

static bool reserve(plain_request *request) {
  process *own = request->at.own;
  if (!request->small) return charge_acquire(own, request->at.device, request->reserved);
  process_lock(&own->small_lock);
  if (LIKELY(charge_try(own, request->at.device, request->reserved))) return true;
  if (has_room(request)) {
    request->reserved = 0;
    return true;
  }
  process_unlock(&own->small_lock);
  if (!charge_acquire(own, request->at.device, request->reserved)) return false;
  process_lock(&own->small_lock);
  return true;
}

CUresult plain_begin(plain_request *request, uint64_t bytes, bool may_be_small) {
  CUresult refusal = target_current(&request->at);
  if (refusal != CUDA_SUCCESS) return refusal;
  request->bytes = bytes;
  request->small = may_be_small && bytes < SMALL_LIMIT;
  request->managed = MANAGED_NOT;
  request->reserved = round_up(bytes, CHARGE_GRANULE);
  // Without a context, or for nothing, the driver has its own error.
  if (bytes == 0) request->at.context = NULL;
  if (request->at.context == NULL) return CUDA_SUCCESS;
  return reserve(request) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// False: the driver has taken more than was reserved, or there is no memory for the record. It is
// freed again then.
static bool keep(plain_request *request, CUdeviceptr pointer) {
  process *own = request->at.own;
  record added = {
      .space = SPACE_POINTER,
      .kind = request->small ? KIND_SMALL : KIND_PLAIN,
      .key = pointer,
      .owner = (uint64_t)(uintptr_t)request->at.context,
      .device = (int16_t)request->at.device,
      .bytes = request->small ? round_up(request->bytes, SMALL_UNIT) : request->reserved};
  if (request->small) added.count = piece_number(own);
  if (request->managed != MANAGED_NOT) {
    added.count = managed_mark(request->managed, request->reserved, request->bytes);
  }
  record displaced;
  bool was_displaced;
  if (!records_put(&own->records, &added, &displaced, &was_displaced)) {
    DRIVER(REAL(cuMemFree_v2)(pointer));
    return false;
  }
  // The block is entered before what was displaced leaves it.
  uint64_t charged = request->small ? small_enter(&request->at, pointer) : 0;
  if (was_displaced) record_displaced(own, &displaced);
  if (request->managed != MANAGED_NOT) residency_added(own, added.device, added.bytes);
  if (!request->small) return true;
  if (charged <= request->reserved) {
    charge_release(own, request->at.device, request->reserved - charged);
    return true;
  }
  // Only after the driver's free may the block's charge, which nothing covers, be given back.
  charge_force(own, request->at.device, charged);
  records_take(&own->records, SPACE_POINTER, pointer, &added);
  DRIVER(REAL(cuMemFree_v2)(pointer));
  small_leave(own, pointer);
  return false;
}

CUresult plain_end(plain_request *request, CUresult result, CUdeviceptr pointer) {
  if (request->at.context == NULL) return result;
  process *own = request->at.own;
  if (result == CUDA_SUCCESS && !keep(request, pointer)) result = CUDA_ERROR_OUT_OF_MEMORY;
  if (result != CUDA_SUCCESS) charge_release(own, request->at.device, request->reserved);
  if (request->small) process_unlock(&own->small_lock);
  return result;
}

// ---- memory that can be put aside ----

// Shall this allocation be managed? `pointer` is where the driver would write it.
static bool becomes_managed(plain_request *request, const void *pointer) {
  const target *at = &request->at;
  bool may = at->context != NULL && !request->small && pointer != NULL;
  if (LIKELY(!may || !residency_wanted(at->own, at->device, at->ordinal))) return false;
  request->managed = MANAGED_BY_SHIM;
  return true;
}

// Where the driver has no managed memory for it, there is none at all: the host's is used up.
static CUresult allocate_managed(const plain_request *request, CUdeviceptr *pointer) {
  CUdeviceptr made = 0;
  CUresult result = DRIVER(REAL(cuMemAllocManaged)(&made, request->bytes, CU_MEM_ATTACH_GLOBAL));
  if (result != CUDA_SUCCESS) return result;
  // First touched on the device, and left there while there is room, as plain memory is. Without it
  // the memory works all the same.
  DRIVER(USED(cuMemAdvise)(made, request->bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                           request->at.ordinal));
  *pointer = made;
  return CUDA_SUCCESS;
}

#define PLAIN(call) WITH_PATIENCE(request.at.own, request.at.device, call)

CUDA_WRAPPER(cuMemAlloc_v2, (CUdeviceptr * pointer, size_t bytes)) {
  if (!governed()) return UNGOVERNED(cuMemAlloc_v2)(pointer, bytes);
  UNCANCELLED;
  plain_request request;
  CUresult result = plain_begin(&request, bytes, true);
  if (result != CUDA_SUCCESS) return result;
  CUdeviceptr made = 0;
  if (becomes_managed(&request, pointer)) {
    result = allocate_managed(&request, &made);
  } else {
    result = PLAIN(REAL(cuMemAlloc_v2)(RESULT(pointer, made), bytes));
  }
  result = plain_end(&request, result, made);
  GIVE_RESULT(pointer, made, result);
  return result;
}

// The oldest form, with pointers of 32 bits.
CUDA_WRAPPER(cuMemAlloc, (CUdeviceptr_v1 * pointer, unsigned int bytes)) {
  if (!governed()) return UNGOVERNED(cuMemAlloc)(pointer, bytes);
  UNCANCELLED;
  plain_request request;
  CUresult result = plain_begin(&request, bytes, true);
  if (result != CUDA_SUCCESS) return result;
  CUdeviceptr_v1 made = 0;
  result = PLAIN(REAL(cuMemAlloc)(RESULT(pointer, made), bytes));
  result = plain_end(&request, result, made);
  GIVE_RESULT(pointer, made, result);
  return result;
}

// Rows are padded to a multiple of this at most on every GPU so far; what was padded less is given
// back.
#define PITCH_ALIGNMENT 512

// Narrows the reservation to what the rows turned out to need. Rows are never padded more than was
// reserved for; if they are, the memory is given back and refused.
static CUresult pitched_end(plain_request *request, CUresult result, CUdeviceptr pointer,
                            uint64_t pitch, uint64_t height) {
  if (result != CUDA_SUCCESS || request->at.context == NULL || request->small) {
    return plain_end(request, result, pointer);
  }
  process *own = request->at.own;
  uint64_t needed = round_up(multiply(pitch, height), CHARGE_GRANULE);
  if (needed > request->reserved) {
    DRIVER(REAL(cuMemFree_v2)(pointer));
    return plain_end(request, CUDA_ERROR_OUT_OF_MEMORY, pointer);
  }
  charge_release(own, request->at.device, request->reserved - needed);
  request->reserved = needed;
  return plain_end(request, result, pointer);
}

static CUresult pitched_begin(plain_request *request, uint64_t width, uint64_t height) {
  return plain_begin(request, multiply(round_up(width, PITCH_ALIGNMENT), height), true);
}

// What the driver refuses is left to it to refuse.
static bool is_pitched(size_t width, const size_t *pitch, unsigned int element_bytes) {
  bool known = element_bytes == 4 || element_bytes == 8 || element_bytes == 16;
  return known && pitch != NULL && round_up(width, PITCH_ALIGNMENT) <= INT32_MAX;
}

CUDA_WRAPPER(cuMemAllocPitch_v2, (CUdeviceptr * pointer, size_t *pitch, size_t width, size_t height,
                                  unsigned int element_bytes)) {
  if (!governed())
    return UNGOVERNED(cuMemAllocPitch_v2)(pointer, pitch, width, height, element_bytes);
  UNCANCELLED;
  plain_request request;
  CUresult result = pitched_begin(&request, width, height);
  if (result != CUDA_SUCCESS) return result;
  CUdeviceptr made = 0;
  size_t row = 0;
  if (is_pitched(width, pitch, element_bytes) && becomes_managed(&request, pointer)) {
    result = allocate_managed(&request, &made);
    row = round_up(width, PITCH_ALIGNMENT);
  } else {
    result = PLAIN(REAL(cuMemAllocPitch_v2)(RESULT(pointer, made), RESULT(pitch, row), width,
                                            height, element_bytes));
  }
  result = pitched_end(&request, result, made, row, height);
  GIVE_RESULT(pitch, row, result);
  GIVE_RESULT(pointer, made, result);
  return result;
}

CUDA_WRAPPER(cuMemAllocPitch, (CUdeviceptr_v1 * pointer, unsigned int *pitch, unsigned int width,
                               unsigned int height, unsigned int element_bytes)) {
  if (!governed()) return UNGOVERNED(cuMemAllocPitch)(pointer, pitch, width, height, element_bytes);
  UNCANCELLED;
  plain_request request;
  CUresult result = pitched_begin(&request, width, height);
  if (result != CUDA_SUCCESS) return result;
  CUdeviceptr_v1 made = 0;
  unsigned int row = 0;
  result = PLAIN(REAL(cuMemAllocPitch)(RESULT(pointer, made), RESULT(pitch, row), width, height,
                                       element_bytes));
  result = pitched_end(&request, result, made, row, height);
  GIVE_RESULT(pitch, row, result);
  GIVE_RESULT(pointer, made, result);
  return result;
}

// Managed memory may be anywhere, and may all be on the device at once: it is charged in full.
// Small pieces share blocks, as plain ones do; these are left to the driver to move.
CUDA_WRAPPER(cuMemAllocManaged, (CUdeviceptr * pointer, size_t bytes, unsigned int flags)) {
  if (!governed()) return UNGOVERNED(cuMemAllocManaged)(pointer, bytes, flags);
  UNCANCELLED;
  plain_request request;
  CUresult result = plain_begin(&request, bytes, true);
  if (result != CUDA_SUCCESS) return result;
  if (request.at.context != NULL && !request.small) {
    residency_wanted(request.at.own, request.at.device, request.at.ordinal);
    request.managed = MANAGED_BY_PROGRAM;
  }
  CUdeviceptr made = 0;
  result = PLAIN(REAL(cuMemAllocManaged)(RESULT(pointer, made), bytes, flags));
  result = plain_end(&request, result, made);
  GIVE_RESULT(pointer, made, result);
  return result;
}

// ---- exporting ----

static bool keep_charged(record *changed, bool exists, void *context) {
  if (exists) changed->bytes = 0;
  return exists;
}

bool plain_exported(process *own, uint64_t address) {
  CUdeviceptr base = 0;
  size_t size;
  record known;
  if (DRIVER(USED(cuMemGetAddressRange_v2)(&base, &size, address)) != CUDA_SUCCESS ||
      !records_find(&own->records, SPACE_POINTER, base, &known)) {
    return false;
  }
  if (known.kind == KIND_PLAIN) {
    records_change(&own->records, SPACE_POINTER, base, keep_charged, NULL);
  } else if (known.kind == KIND_SMALL) {
    records_change(&own->records, SPACE_BLOCK, block_of(base), keep_charged, NULL);
  }
  return true;
}

// ---- freeing ----

// A piece of a block is there until the driver has freed it. Should another thread have been given
// its address by then, that thread has given it back.
static CUresult small_freed(process *own, const record *gone, CUresult result) {
  if (result == CUDA_SUCCESS && records_take_same(&own->records, gone)) small_leave(own, gone->key);
  return result;
}

// The record of what has its own granules goes first: as soon as the driver has freed it, another
// thread may be given the address. What is not known (imported, mapped from elsewhere, freed twice)
// is the driver's business alone.
#define FREE(pointer, call)                                                               \
  do {                                                                                    \
    UNCANCELLED;                                                                          \
    process *own = process_state();                                                       \
    record gone;                                                                          \
    if (own == NULL || !records_find(&own->records, SPACE_POINTER, pointer, &gone)) {     \
      return DRIVER(call);                                                                \
    }                                                                                     \
    if (gone.kind == KIND_POOLED) return pools_free(own, &gone);                          \
    if (gone.kind == KIND_SMALL) return small_freed(own, &gone, DRIVER(call));            \
    if (!records_take(&own->records, SPACE_POINTER, pointer, &gone)) return DRIVER(call); \
    CUresult result = DRIVER(call);                                                       \
    if (result == CUDA_SUCCESS) {                                                         \
      record_displaced(own, &gone);                                                       \
    } else {                                                                              \
      records_keep(&own->records, &gone);                                                 \
    }                                                                                     \
    return result;                                                                        \
  } while (0)

CUDA_WRAPPER(cuMemFree_v2, (CUdeviceptr pointer)) {
  if (!governed()) return REAL(cuMemFree_v2)(pointer);
  FREE(pointer, REAL(cuMemFree_v2)(pointer));
}

CUDA_WRAPPER(cuMemFree, (CUdeviceptr_v1 pointer)) {
  if (!governed()) return REAL(cuMemFree)(pointer);
  FREE(pointer, REAL(cuMemFree)(pointer));
}
