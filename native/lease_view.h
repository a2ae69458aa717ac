// SPDX-License-Identifier: Apache-2.0
// One decision's view of the leases: a state made valid, one reading of the contract, and what each
// share is owed. Internal to lease_core.c.
#ifndef ALLOTMENT_LEASE_VIEW_H
#define ALLOTMENT_LEASE_VIEW_H

#include "lease.h"

#define MILLISECOND 1000000ll

#define BURST_NS ((int64_t)ALLOT_BURST_NS)
// A share that has spent its budget runs again when it has this much: in pieces, not in crumbs.
#define PIECE_NS (2 * MILLISECOND)
#define LONGEST_LEASE_NS (60000 * MILLISECOND)
#define LONGEST_CHARGE_NS (3600000 * MILLISECOND)

typedef struct view {
  allot_lease_state *state;
  const allot_contract *contract;
  uint64_t now_ns;
  uint64_t terms[ALLOT_SEATS];  // one reading for the whole decision
  uint64_t serials[ALLOT_SEATS];
  uint32_t working[ALLOT_SEATS];   // places that wait or hold
  uint32_t fraction[ALLOT_SEATS];  // of the active seats; 0: the others leave nothing
  bool active[ALLOT_SEATS];
} view;

static inline uint64_t since(uint64_t later, uint64_t earlier) {
  return later > earlier ? later - earlier : 0;
}

static inline uint64_t at_most(uint64_t value, uint64_t limit) {
  return value < limit ? value : limit;
}

// Some part of `time_ns`, which is at most LONGEST_CHARGE_NS.
static inline uint64_t part_of(uint64_t time_ns, uint64_t basis_points) {
  return time_ns * basis_points / ALLOT_WHOLE;
}

static inline int64_t fill(int64_t bucket, uint64_t more, int64_t limit) {
  if (bucket >= limit) return limit;
  return (uint64_t)(limit - bucket) > more ? bucket + (int64_t)more : limit;
}

static inline bool is_taken(const view *at, int seat) {
  return (at->terms[seat] & ALLOT_TERMS_TAKEN) != 0;
}

static inline uint32_t ceiling_of(const view *at, int seat) {
  uint32_t ceiling = ALLOT_TERMS_CEILING(at->terms[seat]);
  return ceiling < ALLOT_WHOLE ? ceiling : ALLOT_WHOLE;
}

static inline uint32_t guarantee_of(const view *at, int seat) {
  uint32_t guarantee = ALLOT_TERMS_GUARANTEE(at->terms[seat]), ceiling = ceiling_of(at, seat);
  return guarantee < ceiling ? guarantee : ceiling;
}

static inline bool has_current_seat(const view *at, int place) {
  const allot_place_state *owner = &at->state->places[place];
  return is_taken(at, owner->seat) && owner->serial == (uint32_t)at->serials[owner->seat];
}

static inline uint32_t weight_of(const view *at, int seat) {
  uint32_t weight = ALLOT_TERMS_WEIGHT(at->terms[seat]);
  return weight > 0 ? weight : 1;
}

static inline bool is_best_effort(const view *at, int seat) {
  return ALLOT_TERMS_CLASS(at->terms[seat]) >= ALLOT_CLASS_BESTEFFORT;
}

// The library for Python exports what is not hidden.
#pragma GCC visibility push(hidden)

// Makes anything that lies in the file a state, and reads the contract.
void lease_view_open(view *at);
// `elapsed` nanoseconds have passed for every share.
void lease_view_settle(view *at, uint64_t elapsed);
// Who is active, and what is each owed?
void lease_view_divide(view *at);
void lease_view_look(view *at);
// The part of the device by which a share's virtual time advances, in basis points. Never 0.
uint32_t lease_rate_of(const view *at, int seat);

#pragma GCC visibility pop

#endif
