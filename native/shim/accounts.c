// SPDX-License-Identifier: Apache-2.0
// What the ledger shows of compute. Only ever added to, by any process of the share.
#include "compute.h"

static void add(uint64_t *figure, uint64_t more) {
  __atomic_add_fetch(figure, more, __ATOMIC_RELAXED);
}

static allot_usage_device *shared_of(const compute_device *at) {
  return process_usage(at->all->own, at->device);
}

static allot_slot *slot_of(const compute_device *at) {
  return process_slot(at->all->own, at->device);
}

void account_gpu(compute_device *at, uint64_t used_ns) {
  if (used_ns == 0) return;
  add(&shared_of(at)->gpu_ns, used_ns);
  add(&slot_of(at)->gpu_ns, used_ns);
}

void account_copy(compute_device *at, uint64_t used_ns) {
  add(&shared_of(at)->copy_ns, used_ns);
}

// For a whole batch: a launch itself adds to nothing that is shared.
void account_launches(compute_device *at, uint64_t launches) {
  add(&shared_of(at)->launches, launches);
}

void account_throttled(compute_device *at) {
  add(&shared_of(at)->throttled, 1);
  add(&slot_of(at)->throttled, 1);
}

void account_held(compute_device *at, uint64_t held_ns) {
  add(&shared_of(at)->held_ns, held_ns);
  add(&slot_of(at)->held_ns, held_ns);
}

void account_wait(compute_device *at, uint64_t waited_ns) {
  allot_usage_device *shared = shared_of(at);
  int bucket = 0;
  while (bucket < ALLOT_WAIT_BUCKETS - 1 && waited_ns >= ALLOT_WAIT_FIRST_NS << bucket) bucket++;
  add(&shared->lease_waits[bucket], 1);
  add(&shared->lease_wait_ns, waited_ns);
}
