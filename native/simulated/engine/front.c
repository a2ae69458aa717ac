// SPDX-License-Identifier: Apache-2.0
// The works of a ring that have to be looked at: of each stream the first that is not over.
//
// A ring may hold a thousand works, of which one in each stream can change at all. Looking at
// these alone is what keeps an event cheap.
#include <string.h>

#include "simulated/engine/simulation.h"

static bool is_done(allot_ring *ring, uint64_t number) {
  if (number <= allot_load(&ring->tail)) return true;
  return ALLOT_PROGRESS_STATE(allot_load(&allot_ring_work(ring, number)->progress)) == ALLOT_DONE;
}

uint64_t front_number(const allot_ring *ring, uint32_t at) {
  return allot_whole_number(ring->front[at], ring->seen);
}

// Behind all with lower numbers, from `from` on.
static void insert(allot_ring *ring, uint32_t from, uint64_t number) {
  if (ring->front_count == ALLOT_RING_WORKS) return;  // cannot be: works not done are fewer
  uint32_t at = ring->front_count;
  while (at > from && front_number(ring, at - 1) > number) at--;
  memmove(&ring->front[at + 1], &ring->front[at], (ring->front_count - at) * sizeof ring->front[0]);
  ring->front[at] = (uint32_t)number;
  ring->front_count++;
}

void front_extend(simulation *run, int slot) {
  allot_ring *ring = allot_ring_of(run->handle, slot, run->gpu);
  uint64_t bit = 1ull << (slot % 64), head = allot_load(&ring->head);
  if (!(run->begun[slot / 64] & bit)) {
    run->begun[slot / 64] |= bit;
    ring->seen = allot_load(&ring->tail);
    ring->front_count = 0;
  }
  for (uint64_t number = ring->seen + 1; number <= head; number++) {
    ring->seen = number;
    if (is_done(ring, number)) continue;
    // One whose stream has not come to it joins when the one before it leaves.
    uint64_t previous = allot_whole_number(allot_ring_work(ring, number)->previous, number);
    if (previous == number || is_done(ring, previous)) insert(ring, ring->front_count, number);
  }
}

bool front_pass(allot_ring *ring, uint32_t at) {
  uint64_t number = front_number(ring, at);
  if (!is_done(ring, number)) return false;
  ring->front_count--;
  memmove(&ring->front[at], &ring->front[at + 1], (ring->front_count - at) * sizeof ring->front[0]);
  uint32_t low = allot_load(&allot_ring_work(ring, number)->next);
  // What is not yet seen is found when it is.
  uint64_t next = number + (uint32_t)(low - (uint32_t)number);
  if (low != 0 && next <= ring->seen && !is_done(ring, next)) insert(ring, at, next);
  return true;
}
