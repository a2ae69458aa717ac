// SPDX-License-Identifier: Apache-2.0
// What a decision sees: a valid state, who is active, and what each share is owed.
//
// States come from memory that other processes can write, so nothing in one is believed.
#include "lease_view.h"

#include <string.h>

// Between two pieces of work a share still counts as active, so that what it is owed does not
// swing with every gap.
#define ACTIVE_NS (25 * MILLISECOND)
// An unused guarantee is remembered for as long, for telling what was borrowed.
#define OWED_NS (1000 * MILLISECOND)
// The most that a share pays back or is paid, of a budget or in virtual time.
#define LARGEST_DEBT_NS (600000 * MILLISECOND)
#define LATEST_VIRTUAL_NS (1ull << 62)

// ---- what is there ----

// Anything that is not a valid state becomes one.
static void repair_places(view *at) {
  allot_lease_state *state = at->state;
  if (state->holder < 0 || state->holder >= (int)ALLOT_PLACES) state->holder = -1;
  state->places_taken = 0;
  for (int place = 0; place < (int)ALLOT_PLACES; place++) {
    allot_place_state *taken = &state->places[place];
    if (taken->state == ALLOT_PLACE_FREE) {
      if (state->holder == place) state->holder = -1;
      continue;
    }
    if (taken->seat >= ALLOT_SEATS || taken->state > ALLOT_PLACE_HOLDING) {
      *taken = (allot_place_state){.state = ALLOT_PLACE_FREE};
      if (state->holder == place) state->holder = -1;
      continue;
    }
    if (taken->state == ALLOT_PLACE_HOLDING && state->holder != place)
      taken->state = ALLOT_PLACE_IDLE;
    if (taken->state != ALLOT_PLACE_HOLDING && state->holder == place) state->holder = -1;
    state->places_taken++;
  }
}

// No time is later than now: the clock starts again with the machine, and the file may have been on
// a disk.
static void repair_times(view *at) {
  allot_lease_state *state = at->state;
  uint64_t now = at->now_ns;
  if (state->virtual_ns > LATEST_VIRTUAL_NS) state->virtual_ns = 0;
  state->granted_ns = at_most(state->granted_ns, now);
  if (since(state->expires_ns, now) > (uint64_t)LONGEST_LEASE_NS) state->expires_ns = now;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    allot_seat_state *own = &state->seats[seat];
    own->active_ns = at_most(own->active_ns, now);
    own->virtual_ns = at_most(own->virtual_ns, state->virtual_ns + (uint64_t)LARGEST_DEBT_NS);
    uint64_t least = since(state->virtual_ns, LARGEST_DEBT_NS);
    if (own->virtual_ns < least) own->virtual_ns = least;
    if (own->budget_ns < -LARGEST_DEBT_NS) own->budget_ns = -LARGEST_DEBT_NS;
    if (own->grace_ns < -LARGEST_DEBT_NS) own->grace_ns = -LARGEST_DEBT_NS;
    own->launch_ns = at_most(own->launch_ns, LONGEST_LEASE_NS);
  }
  for (int place = 0; place < (int)ALLOT_PLACES; place++) {
    state->places[place].since_ns = at_most(state->places[place].since_ns, now);
  }
}

static void read_contract(view *at) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    const allot_contract_seat *promised = &at->contract->seats[seat];
    at->terms[seat] = __atomic_load_n(&promised->terms, __ATOMIC_RELAXED);
    at->serials[seat] = __atomic_load_n(&promised->serial, __ATOMIC_RELAXED);
  }
}

void lease_view_open(view *at) {
  repair_places(at);
  repair_times(at);
  read_contract(at);
}

static void settle_seat(view *at, int seat, uint64_t elapsed) {
  allot_seat_state *own = &at->state->seats[seat];
  if (own->serial != at->serials[seat]) {
    *own = (allot_seat_state){
        .serial = at->serials[seat], .virtual_ns = at->state->virtual_ns, .budget_ns = PIECE_NS};
  }
  uint32_t ceiling = ceiling_of(at, seat);
  if (ceiling == ALLOT_WHOLE) {
    own->budget_ns = BURST_NS;
    own->blocked = 0;
  } else {
    // What runs is charged when it has ended: until then its budget may grow (see charge).
    bool holds = at->state->holder >= 0 && at->state->places[at->state->holder].seat == seat;
    int64_t most = holds ? LONGEST_CHARGE_NS : BURST_NS;
    own->budget_ns = fill(own->budget_ns, part_of(elapsed, ceiling), most);
    if (own->blocked != 0 && own->budget_ns >= PIECE_NS) own->blocked = 0;
  }
  uint32_t guarantee = guarantee_of(at, seat);
  int64_t owed = (int64_t)part_of(OWED_NS, guarantee);
  own->owed_ns = own->owed_ns < 0 ? 0 : fill(own->owed_ns, part_of(elapsed, guarantee), owed);
}

void lease_view_settle(view *at, uint64_t elapsed) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (is_taken(at, seat)) settle_seat(at, seat, elapsed);
  }
}

void lease_view_look(view *at) {
  memset(at->working, 0, sizeof at->working);
  for (int place = 0; place < (int)ALLOT_PLACES; place++) {
    const allot_place_state *taken = &at->state->places[place];
    if (taken->state >= ALLOT_PLACE_WAITING && has_current_seat(at, place))
      at->working[taken->seat]++;
  }
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    const allot_seat_state *own = &at->state->seats[seat];
    at->active[seat] =
        is_taken(at, seat) && !(at->terms[seat] & ALLOT_TERMS_SUSPENDED) &&
        (at->working[seat] > 0 ||
         (own->active_ns != 0 && since(at->now_ns, own->active_ns) < (uint64_t)ACTIVE_NS));
  }
}

// ---- what each is owed ----

static bool shares_the_rest(const view *at, int seat, bool best_effort) {
  return at->active[seat] && at->fraction[seat] < ceiling_of(at, seat) &&
         is_best_effort(at, seat) == best_effort;
}

// Distributes by weight up to the ceilings, in rounds: in each, somebody's ceiling is reached, or
// all is given out.
static uint32_t pour(view *at, uint32_t rest, bool best_effort) {
  while (rest > 0) {
    uint64_t weights = 0;
    for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
      if (shares_the_rest(at, seat, best_effort)) weights += weight_of(at, seat);
    }
    if (weights == 0) return rest;
    uint32_t given = 0;
    for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
      if (!shares_the_rest(at, seat, best_effort)) continue;
      uint32_t more = (uint32_t)((uint64_t)rest * weight_of(at, seat) / weights);
      uint32_t room = ceiling_of(at, seat) - at->fraction[seat];
      more = more < room ? more : room;
      at->fraction[seat] += more;
      given += more;
    }
    if (given == 0) return rest;  // less is left than there are shares
    rest -= given;
  }
  return 0;
}

void lease_view_divide(view *at) {
  uint32_t rest = ALLOT_WHOLE;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    uint32_t guarantee = at->active[seat] ? guarantee_of(at, seat) : 0;
    at->fraction[seat] = guarantee < rest ? guarantee : rest;
    rest -= at->fraction[seat];
  }
  rest = pour(at, rest, false);
  pour(at, rest, true);
}

// Those that are owed nothing divide what they find by weight.
uint32_t lease_rate_of(const view *at, int seat) {
  if (at->fraction[seat] > 0) return at->fraction[seat];
  uint64_t weights = 0, own = weight_of(at, seat);
  for (int other = 0; other < (int)ALLOT_SEATS; other++) {
    if (at->active[other] && at->fraction[other] == 0) weights += weight_of(at, other);
  }
  uint64_t rate = weights < own ? ALLOT_WHOLE : own * ALLOT_WHOLE / weights;
  return rate > 0 ? (uint32_t)rate : 1;
}
