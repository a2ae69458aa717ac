// SPDX-License-Identifier: Apache-2.0
// What lease.c (decisions) and lease_places.c (places and files) need of each other.
#ifndef ALLOTMENT_LEASE_PLACES_H
#define ALLOTMENT_LEASE_PLACES_H

#include <time.h>

#include "lease.h"

// Crash tests define this to stop the process at each step of an operation.
#ifndef LEASE_STEP
#define LEASE_STEP(name) ((void)0)
#endif

#define MILLISECOND 1000000ull

#define load(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define store(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)

static inline uint64_t since(uint64_t later, uint64_t earlier) {
  return later > earlier ? later - earlier : 0;
}

static inline uint64_t at_most(uint64_t value, uint64_t limit) {
  return value < limit ? value : limit;
}

static inline uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#pragma GCC visibility push(hidden)

// Copies this share's state: the root that names it.
uint64_t lease_read_state(const allot_leases *leases, allot_lease_state *state);
// Decides, and tells whom it concerns.
void lease_settle(allot_leases *leases, const allot_event *events, int count);
// Takes the seat anew, or the one of shares that were removed, if it is not this process's any
// more.
void lease_keep_seat(allot_leases *leases, uint64_t now_ns);
// Was this process stopped, so that it cannot tell how long others have known that it waits?
bool lease_was_stopped(const allot_leases *leases, uint64_t now_ns);
// After a decision: notes since when this process waits.
void lease_note_wanted(allot_leases *leases, const allot_lease_state *state, uint64_t now_ns);
// Frees the place if its owner is dead. `descriptor`: of the file of the places' locks.
bool lease_free_if_dead(allot_leases *leases, int descriptor, int place, uint64_t now_ns);
// Frees the places of this share's dead processes.
void lease_reap(allot_leases *leases, uint64_t now_ns);

#pragma GCC visibility pop

#endif
