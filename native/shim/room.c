// SPDX-License-Identifier: Apache-2.0
// Near the limit, whether the driver takes more memory for an allocation or has a gap for it
// decides between refusing and allowing. The driver does not tell; the records of what lies where
// do.
//
// Asked for only when a reservation has failed, so it may look at every record.
#include "room.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "memory.h"

typedef struct stretch {
  uint64_t start, size;
  bool is_holder;
} stretch;

typedef struct survey {
  const room_question *question;
  stretch *found;
  size_t count, capacity;
} survey;

static uint64_t start_of(const record *seen) {
  return seen->space == SPACE_BLOCK ? seen->key * CHARGE_GRANULE : seen->key;
}

static bool note(const record *seen, void *context) {
  survey *all = context;
  const room_question *question = all->question;
  bool is_holder = seen->space == question->holders;
  bool is_piece = seen->space == SPACE_POINTER && seen->kind == question->pieces;
  if (seen->owner != question->owner || (!is_holder && !is_piece)) return false;
  if (all->count < all->capacity) {
    // Of a block that was exported no bytes are left to give back.
    uint64_t size = seen->space == SPACE_BLOCK ? CHARGE_GRANULE : round_up(seen->bytes, SMALL_UNIT);
    all->found[all->count] = (stretch){start_of(seen), size, is_holder};
  }
  all->count++;
  return false;
}

// A holder comes before the pieces in it.
static int by_place(const void *one, const void *other) {
  const stretch *a = one, *b = other;
  if (a->start != b->start) return a->start < b->start ? -1 : 1;
  return (int)b->is_holder - (int)a->is_holder;
}

// All stretches in memory of their own, by place. False: no memory, or too much has changed
// meanwhile.
static bool take_survey(process *own, survey *all) {
  records_sweep(&own->records, note, all);
  all->capacity = all->count + 64;
  void *memory = mmap(NULL, all->capacity * sizeof(stretch), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  all->found = memory;
  all->count = 0;
  records_sweep(&own->records, note, all);
  if (all->count > all->capacity) return false;
  qsort(all->found, all->count, sizeof(stretch), by_place);
  return true;
}

typedef struct holding {
  const stretch *holder;
  uint64_t largest_gap;
  bool is_used;
} holding;

// Reads one holder and its pieces; returns the index behind them.
static size_t read_holder(const survey *all, size_t at, holding *read) {
  const stretch *holder = &all->found[at];
  uint64_t free_from = holder->start, end = holder->start + holder->size;
  *read = (holding){.holder = holder};
  for (at++; at < all->count && !all->found[at].is_holder && all->found[at].start < end; at++) {
    const stretch *piece = &all->found[at];
    uint64_t gap = piece->start > free_from ? piece->start - free_from : 0;
    if (gap > read->largest_gap) read->largest_gap = gap;
    if (piece->start + piece->size > free_from) free_from = piece->start + piece->size;
    read->is_used = true;
  }
  uint64_t rest = end > free_from ? end - free_from : 0;
  if (rest > read->largest_gap) read->largest_gap = rest;
  return at;
}

typedef struct totals {
  uint64_t all, used;    // bytes of holders, and of those with pieces
  bool fits, used_fits;  // in any of them
  bool is_complete;      // every piece lies in a holder
} totals;

static totals add_up(const survey *all, uint64_t bytes) {
  totals sum = {.is_complete = true};
  for (size_t at = 0; at < all->count;) {
    if (!all->found[at].is_holder) {
      sum.is_complete = false;
      at++;
      continue;
    }
    holding read;
    at = read_holder(all, at, &read);
    sum.all += read.holder->size;
    sum.fits = sum.fits || read.largest_gap >= bytes;
    if (!read.is_used) continue;
    sum.used += read.holder->size;
    sum.used_fits = sum.used_fits || read.largest_gap >= bytes;
  }
  return sum;
}

static void forget_unused(process *own, const survey *all) {
  for (size_t at = 0; at < all->count;) {
    if (!all->found[at].is_holder) {
      at++;
      continue;
    }
    holding read;
    record gone;
    at = read_holder(all, at, &read);
    if (!read.is_used) {
      records_take(&own->records, all->question->holders, read.holder->start, &gone);
    }
  }
}

bool room_exists(process *own, const room_question *question) {
  survey all = {.question = question};
  bool exists = false;
  if (take_survey(own, &all)) {
    totals sum = add_up(&all, round_up(question->bytes, SMALL_UNIT));
    if (!sum.is_complete) {
      exists = false;
    } else if (question->total == UINT64_MAX || question->total == sum.all) {
      exists = sum.fits;
    } else if (question->total == sum.used) {
      forget_unused(own, &all);
      exists = sum.used_fits;
    }
  }
  if (all.found != NULL) munmap(all.found, all.capacity * sizeof(stretch));
  return exists;
}
