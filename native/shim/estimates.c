// SPDX-License-Identifier: Apache-2.0
// An open-addressing table without locks: places are taken by compare-and-swap and never given
// back. Two threads that learn at once lose one of two samples, which nobody misses.
#include "estimates.h"

#define TRIES 16
#define FIRST_GUESS_NS 20000 /* of a graph's node, before any kernel was seen */
#define UNKNOWN_NS UINT64_C(1000000)
#define MOST_DOUBLED 4
#define MEAN_STEPS 8
#define ALONE_STEPS 3

estimate *estimate_find(estimate_table *table, uint64_t key) {
  if (key == 0) key = 1;
  estimate *first = &table->places[key % ESTIMATE_PLACES];
  for (uint64_t i = 0; i < TRIES; i++) {
    estimate *place = &table->places[(key + i) % ESTIMATE_PLACES];
    uint64_t seen = __atomic_load_n(&place->key, __ATOMIC_RELAXED);
    if (LIKELY(seen == key)) return place;
    if (seen == 0 && __atomic_compare_exchange_n(&place->key, &seen, key, false, __ATOMIC_RELAXED,
                                                 __ATOMIC_RELAXED)) {
      return place;
    }
    if (seen == key) return place;
  }
  return first;
}

// Of what was never seen to end little is queued: the more of it, the longer it is taken to be.
uint64_t estimate_unknown_ns(const estimate *of) {
  uint16_t pending = __atomic_load_n(&of->pending, __ATOMIC_RELAXED);
  return UNKNOWN_NS << (pending < MOST_DOUBLED ? pending : MOST_DOUBLED);
}

static void store_mean(estimate *of, uint64_t mean_ns) {
  uint64_t units = mean_ns / ESTIMATE_UNIT_NS;
  if (units > UINT32_MAX) units = UINT32_MAX;
  __atomic_store_n(&of->mean_ns, (uint32_t)units, __ATOMIC_RELAXED);
}

static uint64_t move_towards(uint64_t mean, uint64_t sample, uint32_t steps) {
  return sample >= mean ? mean + (sample - mean) / steps : mean - (mean - sample) / steps;
}

void estimate_learn(estimate_table *table, estimate *of, uint64_t took_ns, bool was_alone) {
  uint16_t samples = __atomic_load_n(&of->samples, __ATOMIC_RELAXED);
  uint64_t mean = (uint64_t)__atomic_load_n(&of->mean_ns, __ATOMIC_RELAXED) * ESTIMATE_UNIT_NS;
  if (samples < MEAN_STEPS) samples++;
  uint32_t steps = was_alone && samples > ALONE_STEPS ? ALONE_STEPS : samples;
  store_mean(of, move_towards(mean, took_ns, steps));
  __atomic_store_n(&of->samples, samples, __ATOMIC_RELAXED);
  uint64_t all = __atomic_load_n(&table->mean_ns, __ATOMIC_RELAXED);
  __atomic_store_n(&table->mean_ns, move_towards(all, took_ns, all == 0 ? 1 : 16),
                   __ATOMIC_RELAXED);
}

void estimate_guess(estimate_table *table, uint64_t key, uint64_t kernels) {
  estimate *of = estimate_of(table, key);
  uint64_t mean = __atomic_load_n(&table->mean_ns, __ATOMIC_RELAXED);
  __atomic_store_n(&of->samples, 0, __ATOMIC_RELAXED);
  store_mean(of, multiply(mean != 0 ? mean : FIRST_GUESS_NS, kernels));
}
