// SPDX-License-Identifier: Apache-2.0
// What is charged is the union of all intervals, in any order of arrival.
//
// sources: shim/timeline.c
#include <assert.h>
#include <stdlib.h>

#include "shim/marks.h"

#define US INT64_C(1000)
#define MS INT64_C(1000000)
#define SECOND INT64_C(1000000000)
#define SHORT_NS (10 * US)

static timeline covered;

static void begin(void) {
  covered.count = 0;
}

// A program that had work now and then: what lies far back says nothing about what comes.
static int64_t after_idle_hours(void) {
  begin();
  for (int i = 0; i < 2 * TIMELINE_PIECES; i++) {
    assert(timeline_add(&covered, i * SECOND, i * SECOND + MS) == (uint64_t)MS);
  }
  return 2 * TIMELINE_PIECES * SECOND;
}

static void a_long_kernel_beside_short_ones_counts(void) {
  int64_t now = after_idle_hours();
  uint64_t charged = 0;
  for (int i = 0; i < 8; i++) {
    charged += timeline_add(&covered, now + i * MS, now + i * MS + SHORT_NS);
  }
  charged += timeline_add(&covered, now, now + 8 * MS);
  assert(charged == (uint64_t)(8 * MS));
}

static void short_kernels_beside_a_long_one_count_once(void) {
  int64_t now = after_idle_hours();
  uint64_t charged = 0;
  for (int i = 0; i < TIMELINE_PIECES / 4; i++) {
    charged += timeline_add(&covered, now + i * MS, now + i * MS + SHORT_NS);
  }
  int64_t length = TIMELINE_PIECES / 4 * MS;
  charged += timeline_add(&covered, now, now + length);
  assert(charged == (uint64_t)length);
}

// More of them than are remembered: no less is charged than the GPU was used.
static void no_number_of_short_kernels_hides_a_long_one(void) {
  begin();
  int64_t length = 8 * TIMELINE_PIECES * MS;
  uint64_t charged = 0, all_short = 0;
  for (int64_t at = 0; at < length; at += MS) {
    charged += timeline_add(&covered, at, at + SHORT_NS);
    all_short += (uint64_t)SHORT_NS;
  }
  charged += timeline_add(&covered, 0, length);
  assert(charged >= (uint64_t)length);
  assert(charged <= (uint64_t)length + all_short);
}

#define SLOTS 400

// Beside a plain map of what is covered.
static void it_is_the_union(void) {
  srand(7);
  for (int round = 0; round < 300; round++) {
    char map[SLOTS] = {0};
    begin();
    for (int i = 0; i < 60; i++) {
      int64_t from = rand() % SLOTS, to = from + rand() % 40;
      if (to > SLOTS) to = SLOTS;
      uint64_t fresh = 0;
      for (int64_t at = from; at < to; at++) {
        fresh += map[at] == 0;
        map[at] = 1;
      }
      assert(timeline_add(&covered, from, to) == fresh);
    }
  }
}

int main(void) {
  a_long_kernel_beside_short_ones_counts();
  short_kernels_beside_a_long_one_count_once();
  no_number_of_short_kernels_hides_a_long_one();
  it_is_the_union();
  return 0;
}
