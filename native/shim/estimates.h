// SPDX-License-Identifier: Apache-2.0
// What launches are expected to take, by what was launched: the moving mean of what it took.
//
// Estimates decide how much may be queued and where marks are set. They are never charged.
#ifndef ALLOTMENT_SHIM_ESTIMATES_H
#define ALLOTMENT_SHIM_ESTIMATES_H

#include "shim.h"

typedef struct estimate {
  uint64_t key;
  uint32_t mean_ns;  // in units of ESTIMATE_UNIT_NS
  uint16_t samples;
  // Before the first sample: launches that have not ended. Then it counts launches.
  uint16_t pending;
} estimate;

#define ESTIMATE_PLACES 8192
#define ESTIMATE_UNIT_NS 16 /* 68 s at most */

typedef struct estimate_table {
  estimate places[ESTIMATE_PLACES];
  uint64_t mean_ns;  // over all launches
} estimate_table;

// A function with its grid, or an executable graph.
static inline uint64_t estimate_key(const void *launched, uint64_t size) {
  uint64_t key = (uint64_t)(uintptr_t)launched * UINT64_C(0x9e3779b97f4a7c15) ^
                 size * UINT64_C(0xc2b2ae3d27d4eb4f);
  return key ^ key >> 32;
}

// Never NULL; when the table is full, others share the place.
estimate *estimate_find(estimate_table *table, uint64_t key);
static inline estimate *estimate_of(estimate_table *table, uint64_t key) {
  estimate *first = &table->places[key % ESTIMATE_PLACES];
  if (LIKELY(__atomic_load_n(&first->key, __ATOMIC_RELAXED) == key && key != 0)) return first;
  return estimate_find(table, key);
}
// Is its length known well enough to stand in a batch with others?
static inline bool estimate_is_known(const estimate *of) {
  return __atomic_load_n(&of->samples, __ATOMIC_RELAXED) >= 2;
}
uint64_t estimate_unknown_ns(const estimate *of);
static inline uint64_t estimate_ns(const estimate *of) {
  uint64_t mean = __atomic_load_n(&of->mean_ns, __ATOMIC_RELAXED);
  if (LIKELY(mean != 0 || __atomic_load_n(&of->samples, __ATOMIC_RELAXED) != 0)) {
    return mean * ESTIMATE_UNIT_NS;
  }
  return estimate_unknown_ns(of);
}
// Should the next launch be measured by itself, as nothing is known of it, or as it is its turn?
// Gaps inside a batch are not seen, and would make an estimate that stays too long.
#define ESTIMATE_ALONE_EVERY 128
static inline bool estimate_is_due(const estimate *of) {
  return !estimate_is_known(of) ||
         __atomic_load_n(&of->pending, __ATOMIC_RELAXED) % ESTIMATE_ALONE_EVERY == 0;
}
// A launch goes ahead.
static inline void estimate_count(estimate *of) {
  uint16_t count = (uint16_t)(__atomic_load_n(&of->pending, __ATOMIC_RELAXED) + 1);
  __atomic_store_n(&of->pending, count, __ATOMIC_RELAXED);
}
// One that stood alone has ended.
static inline void estimate_settle(estimate *of) {
  if (estimate_is_known(of)) return;
  uint16_t seen = __atomic_load_n(&of->pending, __ATOMIC_RELAXED);
  if (UNLIKELY(seen != 0)) __atomic_store_n(&of->pending, (uint16_t)(seen - 1), __ATOMIC_RELAXED);
}
// A launch of it took so long, by itself or as a part of a batch.
void estimate_learn(estimate_table *table, estimate *of, uint64_t took_ns, bool was_alone);
// A first guess, of a graph by its nodes.
void estimate_guess(estimate_table *table, uint64_t key, uint64_t kernels);

#endif
