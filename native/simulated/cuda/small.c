// SPDX-License-Identifier: Apache-2.0
// Allocations under 1 MiB: units of 512 bytes in blocks of 2 MiB, which belong to a context. Plain
// and managed ones have blocks of their own. A block in which nothing is left goes back.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

#define UNIT 512u
#define BLOCK (2 * MIB)
#define UNITS ((unsigned)(BLOCK / UNIT))

struct small_block {
  CUdeviceptr base;
  unsigned free_units;
  unsigned first_free;  // no unit below is free
  bool touched, managed;
  small_block *next;
  uint64_t taken[UNITS / 64];
};

static bool is_taken(const small_block *block, unsigned unit) {
  return (block->taken[unit / 64] >> (unit % 64) & 1) != 0;
}

static void mark(small_block *block, unsigned first, unsigned count, bool taken) {
  for (unsigned unit = first; unit < first + count; unit++) {
    uint64_t bit = 1ull << (unit % 64);
    if (taken) {
      block->taken[unit / 64] |= bit;
    } else {
      block->taken[unit / 64] &= ~bit;
    }
  }
}

// The first run of so many free units, or UNITS.
static unsigned find_run(small_block *block, unsigned count) {
  unsigned run = 0;
  for (unsigned unit = block->first_free; unit < UNITS; unit++) {
    if (run == 0 && unit % 64 == 0 && block->taken[unit / 64] == UINT64_MAX) {
      unit += 63;
      continue;
    }
    run = is_taken(block, unit) ? 0 : run + 1;
    if (run == count) return unit + 1 - count;
  }
  return UNITS;
}

static CUdeviceptr take_from(small_block *block, unsigned count) {
  if (block->free_units < count) return 0;
  unsigned first = find_run(block, count);
  if (first == UNITS) return 0;
  mark(block, first, count, true);
  block->free_units -= count;
  if (first == block->first_free) block->first_free = first + count;
  return block->base + (uint64_t)first * UNIT;
}

static small_block *new_block(context *owner, bool managed) {
  if (!memory_take(owner->gpu, BLOCK, managed)) return NULL;
  small_block *made = calloc(1, sizeof *made);
  CUdeviceptr base = made != NULL ? address_take(BLOCK, BLOCK) : 0;
  if (base == 0) {
    free(made);
    memory_give_back(owner->gpu, BLOCK, managed);
    return NULL;
  }
  made->base = base;
  made->managed = managed;
  made->free_units = UNITS;
  made->next = owner->blocks;
  owner->blocks = made;
  return made;
}

static unsigned units_of(uint64_t size) {
  return size == 0 ? 1 : (unsigned)((size + UNIT - 1) / UNIT);
}

CUdeviceptr small_take(context *owner, uint64_t size, bool managed, small_block **block) {
  unsigned count = units_of(size);
  for (small_block *at = owner->blocks; at != NULL; at = at->next) {
    if (at->managed != managed) continue;
    CUdeviceptr taken = take_from(at, count);
    if (taken == 0) continue;
    *block = at;
    return taken;
  }
  *block = new_block(owner, managed);
  return *block != NULL ? take_from(*block, count) : 0;
}

static void drop(context *owner, small_block *block) {
  for (small_block **at = &owner->blocks; *at != NULL; at = &(*at)->next) {
    if (*at != block) continue;
    *at = block->next;
    break;
  }
  address_give_back(block->base, BLOCK, block->touched);
  memory_give_back(owner->gpu, BLOCK, block->managed);
  free(block);
}

void small_give_back(context *owner, small_block *block, CUdeviceptr address, uint64_t size,
                     bool touched) {
  unsigned first = (unsigned)((address - block->base) / UNIT), count = units_of(size);
  mark(block, first, count, false);
  block->free_units += count;
  block->touched = block->touched || touched;
  if (first < block->first_free) block->first_free = first;
  if (block->free_units == UNITS) drop(owner, block);
}

void small_drop_all(context *owner) {
  while (owner->blocks != NULL) drop(owner, owner->blocks);
}

void small_range(const small_block *block, CUdeviceptr *base, uint64_t *size) {
  *base = block->base;
  *size = BLOCK;
}
