// SPDX-License-Identifier: Apache-2.0
// The union of intervals that come in any order. Where there are more pieces than places, the
// older half is forgotten.
#include <string.h>

#include "marks.h"

static void remove_pieces(timeline *covered, int at, int count) {
  memmove(&covered->pieces[at], &covered->pieces[at + count],
          (size_t)(covered->count - at - count) * sizeof covered->pieces[0]);
  covered->count -= count;
}

// An interval reported later for a forgotten time counts again. It must not count less: a long
// kernel beside many short ones would cost next to nothing.
static void forget_the_oldest(timeline *covered) {
  remove_pieces(covered, 0, TIMELINE_PIECES / 2);
}

uint64_t timeline_add(timeline *covered, int64_t from, int64_t to) {
  if (to <= from) return 0;
  int first = covered->count;
  // New intervals are nearly always the latest.
  while (first > 0 && covered->pieces[first - 1].to >= from) first--;
  int end = first;
  uint64_t known = 0;
  int64_t low = from, high = to;
  for (; end < covered->count && covered->pieces[end].from <= to; end++) {
    int64_t start = covered->pieces[end].from, stop = covered->pieces[end].to;
    int64_t inner_from = start > from ? start : from, inner_to = stop < to ? stop : to;
    if (inner_to > inner_from) known += (uint64_t)(inner_to - inner_from);
    if (start < low) low = start;
    if (stop > high) high = stop;
  }
  uint64_t added = (uint64_t)(to - from) - known;
  if (end > first) {
    covered->pieces[first].from = low;
    covered->pieces[first].to = high;
    remove_pieces(covered, first + 1, end - first - 1);
    return added;
  }
  if (covered->count == TIMELINE_PIECES) {
    forget_the_oldest(covered);
    return timeline_add(covered, from, to);
  }
  memmove(&covered->pieces[first + 1], &covered->pieces[first],
          (size_t)(covered->count - first) * sizeof covered->pieces[0]);
  covered->pieces[first].from = from;
  covered->pieces[first].to = to;
  covered->count++;
  return added;
}
