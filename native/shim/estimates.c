// SPDX-License-Identifier: Apache-2.0
// An open-addressing table without locks: places are taken by compare-and-swap and never given
// back. Two threads that learn at once lose one of two samples, which nobody misses.
#include "estimates.h"

#define TRIES 16
#define FIRST_GUESS_NS 20000 /* of a program's first kernel */
#define MEAN_STEPS 8

estimate *estimate_of(estimate_table *table, uint64_t key) {
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

uint64_t estimate_ns(const estimate_table *table, const estimate *of) {
  uint64_t mean = __atomic_load_n(&of->mean_ns, __ATOMIC_RELAXED);
  if (LIKELY(__atomic_load_n(&of->samples, __ATOMIC_RELAXED) != 0 || mean != 0)) {
    return mean * ESTIMATE_UNIT_NS;
  }
  mean = __atomic_load_n(&table->mean_ns, __ATOMIC_RELAXED);
  return mean != 0 ? mean : FIRST_GUESS_NS;
}

static void store_mean(estimate *of, uint64_t mean_ns) {
  uint64_t units = mean_ns / ESTIMATE_UNIT_NS;
  if (units > UINT32_MAX) units = UINT32_MAX;
  __atomic_store_n(&of->mean_ns, (uint32_t)units, __ATOMIC_RELAXED);
}

static uint64_t move_towards(uint64_t mean, uint64_t sample, uint32_t steps) {
  return sample >= mean ? mean + (sample - mean) / steps : mean - (mean - sample) / steps;
}

void estimate_learn(estimate_table *table, estimate *of, uint64_t expected_ns, uint64_t took_ns,
                    uint32_t launches) {
  uint32_t samples = __atomic_load_n(&of->samples, __ATOMIC_RELAXED);
  uint64_t mean = (uint64_t)__atomic_load_n(&of->mean_ns, __ATOMIC_RELAXED) * ESTIMATE_UNIT_NS;
  // Of a batch of different functions each is taken to have been as wrong as all of them.
  uint64_t sample = took_ns / launches;
  if (launches > 1 && expected_ns != 0 && mean != 0) {
    sample = (uint64_t)((double)mean * (double)took_ns / (double)expected_ns);
  }
  if (samples < MEAN_STEPS) samples++;
  store_mean(of, move_towards(mean, sample, samples));
  __atomic_store_n(&of->samples, samples, __ATOMIC_RELAXED);
  uint64_t all = __atomic_load_n(&table->mean_ns, __ATOMIC_RELAXED);
  if (launches > 1 || all == 0 || samples < MEAN_STEPS) {
    __atomic_store_n(&table->mean_ns, move_towards(all, took_ns / launches, all == 0 ? 1 : 16),
                     __ATOMIC_RELAXED);
  }
}

void estimate_guess(estimate_table *table, uint64_t key, uint64_t kernels) {
  estimate *of = estimate_of(table, key);
  uint64_t mean = __atomic_load_n(&table->mean_ns, __ATOMIC_RELAXED);
  __atomic_store_n(&of->samples, 0, __ATOMIC_RELAXED);
  store_mean(of, multiply(mean != 0 ? mean : FIRST_GUESS_NS, kernels));
}
