// SPDX-License-Identifier: Apache-2.0
// What launches are expected to take, by what they took.
//
// sources: shim/estimates.c
#include <assert.h>

#include "shim/estimates.h"

#define MS UINT64_C(1000000)

static estimate_table table;

static uint64_t learned(const void *launched, uint64_t took_ns, uint64_t added_ns) {
  estimate *of = estimate_of(&table, estimate_key(launched, 1));
  for (int i = 0; i < 100; i++) {
    estimate_learn(&table, of, estimate_sample(took_ns, added_ns), true);
  }
  return estimate_ns(of);
}

static void what_runs_alone_is_expected_to_take_as_long(void) {
  static char launched;
  uint64_t expected_ns = learned(&launched, 5 * MS, 5 * MS);
  assert(expected_ns > 4 * MS && expected_ns <= 5 * MS);
}

// Each of them would be queued at once, without end, and others would wait for all of them.
static void what_runs_beside_others_is_not_for_nothing(void) {
  static char launched;
  assert(learned(&launched, 20 * MS, 0) > MS / 2);
  assert(learned(&launched, 20 * MS, 5 * MS) > 4 * MS);
}

int main(void) {
  what_runs_alone_is_expected_to_take_as_long();
  what_runs_beside_others_is_not_for_nothing();
  return 0;
}
