// SPDX-License-Identifier: Apache-2.0
// Who runs next: the pure core of leases. No clock, no memory but its arguments, no failure.
//
// Each share advances in virtual time: GPU time divided by the fraction of the device that it is
// owed. Whoever is furthest behind goes first, so over any stretch of contention the shares have
// had time in proportion to their fractions: guarantees first, what is left by weight up to the
// ceilings, best effort last. Of many that are nearly level, whoever waits longest goes first.
// A share that returns from idling starts where the others are.
// Ceilings are token buckets over the clock, whoever else is there. docs/designs/compute.md
// compares this with deficit round robin.
//
// lease_view.c makes anything that lies in the file a state, and divides the device.
#include <string.h>

#include "lease_view.h"

#define CRUMB_NS (MILLISECOND / 5)
// So far ahead of the others a latency share may be and still go first.
#define LATENCY_LEAD_NS (5 * MILLISECOND)
// Equals have a turn about so often, unless their leases would become shorter than is worth a
// change.
#define ROUND_NS (32 * MILLISECOND)
#define SHORTEST_LEASE_NS (3 * MILLISECOND)
// Bringing memory in takes at most one part in so many of a lease.
#define MOVE_PARTS 20
// Processors' clocks differ by less. Times further ahead are of a clock that was started again, or
// of nowhere.
#define CLOCKS_DIFFER_NS (1000 * MILLISECOND)
// The device is kept idle for a share that is behind for at most one part in so many of what the
// share is owed, or so many basis points of the time if that is more, saved up for so long.
#define GRACE_PARTS 4
#define GRACE_LEAST 500
#define GRACE_MOST_NS (20 * MILLISECOND)
// No gap is exactly as long as those before it.
#define GRACE_MARGIN_NS (MILLISECOND / 10)
// A longer one is worth waiting for if the launch that would begin in it is longer by so much.
#define GRACE_LAUNCH_PARTS 8
// A share whose gaps are longer than half its bursts is harmed where it loses more than one part
// in so many of what it is owed.
#define HARM_PARTS 8

// ---- whose turn it is ----

static int rank_of(const view *at, int seat) {
  if (at->fraction[seat] > 0 && ALLOT_TERMS_CLASS(at->terms[seat]) == ALLOT_CLASS_LATENCY &&
      at->state->seats[seat].virtual_ns <= at->state->virtual_ns + (uint64_t)LATENCY_LEAD_NS) {
    return 0;
  }
  if (at->fraction[seat] > 0) return 1;
  return is_best_effort(at, seat) ? 3 : 2;
}

static bool goes_before(const view *at, int seat, int other) {
  int rank = rank_of(at, seat), other_rank = rank_of(at, other);
  if (rank != other_rank) return rank < other_rank;
  return at->state->seats[seat].virtual_ns < at->state->seats[other].virtual_ns;
}

// The same for equals too: each share puts its own places first in its state, and all are to come
// to the same.
static bool goes_first(const view *at, int seat, int other) {
  return goes_before(at, seat, other) || (seat < other && !goes_before(at, other, seat));
}

static bool may_run(const view *at, int place) {
  const allot_place_state *candidate = &at->state->places[place];
  if (!has_current_seat(at, place) || (at->terms[candidate->seat] & ALLOT_TERMS_SUSPENDED))
    return false;
  return at->state->seats[candidate->seat].blocked == 0;
}

static uint64_t longest_turn(const view *at) {
  uint64_t quantum = at->contract->quantum_us * 1000ull;
  return quantum == 0 ? 10 * MILLISECOND : quantum;
}

// Where many want the device, leases are shorter, so that each has its turn soon.
static uint64_t turn_of(const view *at) {
  uint64_t hungry = 0;
  for (int each = 0; each < (int)ALLOT_SEATS; each++) {
    if (at->active[each] && at->working[each] > 0) hungry++;
  }
  uint64_t fair = hungry > 0 ? ROUND_NS / hungry : ROUND_NS;
  if (fair < SHORTEST_LEASE_NS) fair = SHORTEST_LEASE_NS;
  return at_most(longest_turn(at), fair);
}

static bool has_short_turns(const view *at) {
  return turn_of(at) < longest_turn(at);
}

static uint64_t quantum_of(const view *at, int seat) {
  uint64_t quantum = turn_of(at);
  uint64_t moving = at_most(at->state->seats[seat].move_ns, LONGEST_LEASE_NS) * MOVE_PARTS;
  return at_most(moving > quantum ? moving : quantum, LONGEST_LEASE_NS);
}

// By how much a seat gets ahead in one lease, in virtual time.
static uint64_t lead_of_a_lease(const view *at, int seat) {
  return quantum_of(at, seat) * ALLOT_WHOLE / lease_rate_of(at, seat);
}

// Of those that wait and may run, who goes before all others: of a share's processes, who waits
// longest.
static int most_behind(const view *at) {
  int best = -1;
  for (int place = 0; place < (int)ALLOT_PLACES; place++) {
    const allot_place_state *candidate = &at->state->places[place];
    if (candidate->state != ALLOT_PLACE_WAITING || !may_run(at, place)) continue;
    if (best >= 0) {
      const allot_place_state *leader = &at->state->places[best];
      if (candidate->seat == leader->seat ? candidate->since_ns >= leader->since_ns
                                          : !goes_first(at, candidate->seat, leader->seat)) {
        continue;
      }
    }
    best = place;
  }
  return best;
}

// In virtual time.
static uint64_t ahead_of(const view *at, int seat, int other) {
  return since(at->state->seats[seat].virtual_ns, at->state->seats[other].virtual_ns);
}

// Where many want the device: is a seat ahead of another by no more than half a turn of either? No
// lease ends to the nanosecond: if what one has had too much of decided the order, it would wait
// for two turns of all others. Among few that is soon over, and costs fewer changes.
static bool is_level(const view *at, int seat, int behind) {
  if (!has_short_turns(at) || at->fraction[seat] == 0) return false;
  if (rank_of(at, seat) != rank_of(at, behind)) return false;
  uint64_t rate =
      at->fraction[seat] > at->fraction[behind] ? at->fraction[seat] : at->fraction[behind];
  return ahead_of(at, seat, behind) <= turn_of(at) * ALLOT_WHOLE / rate / 2;
}

// The one to go first: of those that are level with whoever is furthest behind, who waits longest.
static int first_waiting(const view *at) {
  int least = most_behind(at);
  if (least < 0) return -1;
  int best = least;
  for (int place = 0; place < (int)ALLOT_PLACES; place++) {
    const allot_place_state *candidate = &at->state->places[place];
    if (candidate->state != ALLOT_PLACE_WAITING || !may_run(at, place)) continue;
    if (candidate->since_ns >= at->state->places[best].since_ns) continue;
    if (is_level(at, candidate->seat, at->state->places[least].seat)) best = place;
  }
  return best;
}

// Of the active seats that are owed something, or of those that are owed nothing, the one that is
// furthest behind, or -1. Without `apart`.
static int furthest_behind(const view *at, bool is_owed, int apart) {
  int least = -1;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    const allot_seat_state *own = &at->state->seats[seat];
    if (seat == apart || !at->active[seat] || own->blocked != 0) continue;
    if ((at->fraction[seat] > 0) != is_owed) continue;
    if (least < 0 || own->virtual_ns < at->state->seats[least].virtual_ns) least = seat;
  }
  return least;
}

static void grant(view *at, int place) {
  allot_lease_state *state = at->state;
  allot_place_state *winner = &state->places[place];
  allot_seat_state *own = &state->seats[winner->seat];
  winner->state = ALLOT_PLACE_HOLDING;
  state->holder = place;
  state->epoch++;
  state->granted_ns = at->now_ns;
  state->expires_ns = at->now_ns + quantum_of(at, winner->seat);
  own->leases++;
  own->active_ns = at->now_ns;
  own->move_ns = 0;  // told anew if moving is still needed
}

static void end_lease(view *at, int place, uint8_t becomes) {
  allot_place_state *former = &at->state->places[place];
  former->state = becomes;
  if (at->state->holder != place) return;
  at->state->holder = -1;
  int64_t *budget = &at->state->seats[former->seat].budget_ns;
  if (*budget > BURST_NS) *budget = BURST_NS;
}

// Where newcomers begin: with whoever is furthest behind. Those that are owed nothing go along, and
// so keep their order; those that a ceiling holds back fall no further behind meanwhile.
static void follow(view *at) {
  int least = furthest_behind(at, true, -1);
  if (least < 0) return;
  uint64_t advance = since(at->state->seats[least].virtual_ns, at->state->virtual_ns);
  at->state->virtual_ns += advance;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    allot_seat_state *own = &at->state->seats[seat];
    if (!at->active[seat]) continue;
    if (at->fraction[seat] == 0) {
      own->virtual_ns += advance;
    } else if (own->blocked != 0) {
      own->virtual_ns += at_most(advance, since(at->state->virtual_ns, own->virtual_ns));
    }
  }
}

// ---- gaps ----
//
// A program that waits for its results leaves the device idle for moments. A neighbour's launch
// that begins in one cannot be taken back, and may be longer than many such moments. So while the
// holder is behind, it keeps the device over a gap that is shorter than that launch.

// Idle time that is kept counts from the holder's allowance, which grows with what it is owed.
static void settle_grace(view *at, uint64_t elapsed) {
  const allot_lease_state *state = at->state;
  // Another share may have given it the lease since the last event here.
  uint64_t held = at_most(elapsed, since(at->now_ns, state->granted_ns));
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    allot_seat_state *own = &at->state->seats[seat];
    if (!at->active[seat]) continue;
    uint32_t part = at->fraction[seat] / GRACE_PARTS;
    uint64_t more = part_of(elapsed, part > GRACE_LEAST ? part : GRACE_LEAST);
    own->grace_ns = fill(own->grace_ns, more, GRACE_MOST_NS);
    // What it computes meanwhile is given back with its charge.
    bool holds = state->holder >= 0 && state->places[state->holder].seat == seat;
    if (holds && state->next >= 0) own->grace_ns -= (int64_t)held;
  }
}

// Would it be left with less than it is owed if another's launch ran in each of its gaps? Gaps of
// more than half a burst cost others more: they are kept only where that is clearly less.
static bool is_harmed(const view *at, const allot_place_state *holder, uint64_t launch_ns) {
  if (launch_ns <= holder->gap_ns) return false;
  uint64_t burst_ns = at_most(holder->burst_ns, LONGEST_LEASE_NS);
  uint64_t left = burst_ns * ALLOT_WHOLE / (burst_ns + launch_ns);
  uint64_t owed = at->fraction[holder->seat];
  if (holder->gap_ns > burst_ns / 2) owed -= owed / HARM_PARTS;
  return left < owed;
}

static uint64_t keep_of(const view *at) {
  const allot_lease_state *state = at->state;
  if (state->holder < 0 || !may_run(at, state->holder)) return 0;
  const allot_place_state *holder = &state->places[state->holder];
  int64_t grace = state->seats[holder->seat].grace_ns;
  if (grace <= 0 || holder->gap_ns == 0 || holder->gap_ns > (uint64_t)grace) return 0;
  // Keeping it would cost others more than it brings. Who may come next is not known yet.
  if (holder->gap_ns >= holder->burst_ns / (state->next >= 0 ? 1 : 2)) return 0;
  uint64_t keep = 2 * holder->gap_ns + GRACE_MARGIN_NS;
  if (state->next >= 0) {
    int other = state->places[state->next].seat;
    if (other == holder->seat || !goes_before(at, holder->seat, other)) return 0;
    uint64_t launch = state->seats[other].launch_ns;
    if (!is_harmed(at, holder, launch)) return 0;
    if (keep < launch / GRACE_LAUNCH_PARTS) keep = launch / GRACE_LAUNCH_PARTS;
  }
  return at_most(keep, (uint64_t)grace);
}

static bool is_lent(const view *at) {
  const allot_lease_state *state = at->state;
  if (state->holder < 0) return false;
  int holder = state->places[state->holder].seat;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (seat == holder || !at->active[seat] || at->working[seat] > 0) continue;
    if (state->seats[seat].blocked == 0 && goes_before(at, seat, holder)) return true;
  }
  return false;
}

// ---- events ----

static void lend(view *at, int borrower, uint64_t time_ns) {
  uint64_t idle = 0, all = 0;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (!is_taken(at, seat)) continue;
    all += guarantee_of(at, seat);
    if (seat != borrower && !at->active[seat]) idle += guarantee_of(at, seat);
  }
  uint64_t unpromised = all < ALLOT_WHOLE ? ALLOT_WHOLE - all : 0;
  if (idle == 0) return;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (seat == borrower || !is_taken(at, seat) || at->active[seat]) continue;
    at->state->seats[seat].lent_ns += time_ns * guarantee_of(at, seat) / (idle + unpromised);
  }
}

static void charge(view *at, int seat, uint64_t time_ns) {
  allot_seat_state *own = &at->state->seats[seat];
  if (time_ns == 0) return;
  time_ns = at_most(time_ns, LONGEST_CHARGE_NS);
  own->active_ns = at->now_ns;
  at->active[seat] = !(at->terms[seat] & ALLOT_TERMS_SUSPENDED);
  lease_view_divide(at);
  own->used_ns += time_ns;
  own->virtual_ns += time_ns * ALLOT_WHOLE / lease_rate_of(at, seat);
  if (ceiling_of(at, seat) < ALLOT_WHOLE) {
    // Idle before the work, it kept no more than a burst.
    int64_t most = BURST_NS + (int64_t)part_of(time_ns, ceiling_of(at, seat));
    own->budget_ns = (own->budget_ns < most ? own->budget_ns : most) - (int64_t)time_ns;
    if (own->budget_ns < CRUMB_NS) own->blocked = 1;
  }
  own->grace_ns = fill(own->grace_ns, time_ns, GRACE_MOST_NS);
  uint64_t owed = own->owed_ns > 0 ? at_most((uint64_t)own->owed_ns, time_ns) : 0;
  own->owed_ns -= (int64_t)owed;
  own->borrowed_ns += time_ns - owed;
  if (time_ns > owed) lend(at, seat, time_ns - owed);
}

// Who was away begins where the others are: time that was not asked for is not saved up. Between
// two pieces of work a share may stay behind, but only so far that it can end a lease of another.
// Where those that are level go by how long they wait, it would else come after all of them.
static void come_back(view *at, int seat) {
  allot_seat_state *own = &at->state->seats[seat];
  if (own->active_ns == at->now_ns) return;
  bool was_active = at->active[seat];
  at->active[seat] = !(at->terms[seat] & ALLOT_TERMS_SUSPENDED);
  lease_view_divide(at);
  int other = furthest_behind(at, at->fraction[seat] > 0, seat);
  uint64_t begin = other >= 0 ? at->state->seats[other].virtual_ns : at->state->virtual_ns;
  if (other >= 0) {
    uint64_t lead = lead_of_a_lease(at, other);
    if (was_active) {
      begin -= at_most(begin, 2 * lead);
    } else if (has_short_turns(at)) {
      begin -= at_most(begin, lead / 2 + 1);  // level with nobody: next
    }
  }
  if (own->virtual_ns < begin) own->virtual_ns = begin;
}

// All others wait for a share that is owed something and has work. Where it lies behind them all
// the same, they did not count it: it was suspended, stopped, owed nothing, or not believed. Beyond
// what a share may be behind between two pieces of work, that is not repaid.
static void catch_up(view *at) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    allot_seat_state *own = &at->state->seats[seat];
    if (!at->active[seat] || at->fraction[seat] == 0 || own->blocked != 0) continue;
    uint64_t behind = since(at->state->virtual_ns, own->virtual_ns);
    int other = behind > 0 ? furthest_behind(at, true, seat) : -1;
    if (other >= 0 && behind > 2 * lead_of_a_lease(at, other)) {
      own->virtual_ns = at->state->virtual_ns;
    }
  }
}

static void want(view *at, int place, uint64_t launch_ns) {
  allot_place_state *waiter = &at->state->places[place];
  if (launch_ns > 0 && has_current_seat(at, place)) {
    at->state->seats[waiter->seat].launch_ns = at_most(launch_ns, LONGEST_LEASE_NS);
  }
  if (waiter->state != ALLOT_PLACE_IDLE) return;
  if (at->working[waiter->seat] == 0 && has_current_seat(at, place)) come_back(at, waiter->seat);
  waiter->state = ALLOT_PLACE_WAITING;
  waiter->since_ns = at->now_ns;
}

// A lease that nobody waited for may have lasted for long, and then ends as soon as somebody does.
// In any case it ends at once for a latency share, for any other where the holder is owed nothing,
// and for one that is further behind than a lease of the holder makes it: who gives the lease back
// at each gap in its work would else wait for a whole lease each time.
static void limit_lease(view *at) {
  allot_lease_state *state = at->state;
  if (state->holder < 0 || state->next < 0 || state->expires_ns <= at->now_ns) return;
  int seat = state->places[state->holder].seat, other = state->places[state->next].seat;
  int rank = rank_of(at, seat), other_rank = rank_of(at, other);
  bool ends;
  if (other_rank == rank) {
    ends = ahead_of(at, seat, other) > lead_of_a_lease(at, seat);
  } else {
    // Memory that was moved in for a lease is to be worth it.
    ends = other_rank < rank && (other_rank == 0 || state->seats[seat].move_ns == 0);
  }
  if (ends) state->expires_ns = at->now_ns;
}

// The holder's time is over. Is it still the one that is furthest behind?
static void extend_lease(view *at) {
  allot_lease_state *state = at->state;
  if (state->holder < 0 || state->next < 0 || at->now_ns < state->expires_ns) return;
  if (!may_run(at, state->holder)) return;
  int seat = state->places[state->holder].seat, other = state->places[state->next].seat;
  if (seat != other && goes_before(at, seat, other)) {
    state->expires_ns = at->now_ns + quantum_of(at, seat);
  }
}

static void apply(view *at, const allot_event *event) {
  allot_lease_state *state = at->state;
  if (event->kind == ALLOT_EVENT_LOOK) return;
  if (event->place < 0 || event->place >= (int)ALLOT_PLACES) return;
  allot_place_state *changed = &state->places[event->place];
  if (event->kind == ALLOT_EVENT_JOIN) {
    if (event->seat < 0 || event->seat >= (int)ALLOT_SEATS) return;
    end_lease(at, event->place, ALLOT_PLACE_IDLE);
    changed->seat = (uint16_t)event->seat;
    changed->serial = (uint32_t)at->serials[event->seat];
    changed->burst_ns = changed->gap_ns = 0;
    return;
  }
  if (changed->state == ALLOT_PLACE_FREE) return;
  bool worked = changed->state >= ALLOT_PLACE_WAITING;
  if (event->kind == ALLOT_EVENT_WANT) want(at, event->place, event->launch_ns);
  if ((worked || changed->state >= ALLOT_PLACE_WAITING) && has_current_seat(at, event->place)) {
    state->seats[changed->seat].active_ns = at->now_ns;
  }
  switch (event->kind) {
    case ALLOT_EVENT_CHARGE:
    case ALLOT_EVENT_RELEASE:
      if (has_current_seat(at, event->place)) charge(at, changed->seat, event->used_ns);
      changed->burst_ns = event->burst_ns;
      changed->gap_ns = event->gap_ns;
      if (state->holder == event->place && event->move_ns > 0) {
        state->seats[changed->seat].move_ns = event->move_ns;
        uint64_t end = state->granted_ns + quantum_of(at, changed->seat);
        if (end > state->expires_ns) state->expires_ns = end;
      }
      if (event->kind == ALLOT_EVENT_RELEASE) end_lease(at, event->place, ALLOT_PLACE_IDLE);
      break;
    case ALLOT_EVENT_EVICT:
      if (state->holder != event->place || state->epoch != event->epoch) break;
      state->seats[changed->seat].evictions++;
      end_lease(at, event->place, ALLOT_PLACE_IDLE);
      break;
    case ALLOT_EVENT_LEAVE:
      if (has_current_seat(at, event->place)) charge(at, changed->seat, event->used_ns);
      end_lease(at, event->place, ALLOT_PLACE_FREE);
      *changed = (allot_place_state){.state = ALLOT_PLACE_FREE};
      break;
    default:
      break;
  }
}

static void count(view *at) {
  allot_lease_state *state = at->state;
  state->waiting = 0;
  state->places_taken = 0;
  for (int place = 0; place < (int)ALLOT_PLACES; place++) {
    if (state->places[place].state == ALLOT_PLACE_WAITING) state->waiting++;
    if (state->places[place].state != ALLOT_PLACE_FREE) state->places_taken++;
  }
}

void allot_lease_decide(allot_lease_state *state, const allot_contract *contract,
                        const allot_event *event) {
  // Events of different processors may come out of order: time stands still then.
  uint64_t now = event->now_ns > state->now_ns ? event->now_ns : state->now_ns;
  if (since(now, event->now_ns) > (uint64_t)CLOCKS_DIFFER_NS) now = event->now_ns;
  view at = {.state = state, .contract = contract, .now_ns = now};
  uint64_t elapsed = state->now_ns == 0 ? 0 : at_most(since(now, state->now_ns), LONGEST_CHARGE_NS);
  state->now_ns = now;
  lease_view_open(&at);
  lease_view_settle(&at, elapsed);
  lease_view_look(&at);
  lease_view_divide(&at);
  settle_grace(&at, elapsed);
  catch_up(&at);
  apply(&at, event);
  lease_view_look(&at);
  lease_view_divide(&at);
  state->next = first_waiting(&at);
  if (state->holder < 0 && state->next >= 0) {
    grant(&at, state->next);
    state->next = first_waiting(&at);
  }
  follow(&at);
  limit_lease(&at);
  if (event->kind == ALLOT_EVENT_CHARGE) extend_lease(&at);
  state->keep_ns = keep_of(&at);
  state->is_lent = is_lent(&at) ? 1 : 0;
  count(&at);
}

bool allot_lease_must_yield(const allot_lease_state *state, const allot_contract *contract,
                            uint64_t now_ns) {
  if (state->holder < 0 || state->holder >= (int)ALLOT_PLACES) return true;
  const allot_place_state *holder = &state->places[state->holder];
  if (holder->seat >= ALLOT_SEATS) return true;
  const allot_contract_seat *seat = &contract->seats[holder->seat];
  uint64_t terms = __atomic_load_n(&seat->terms, __ATOMIC_RELAXED);
  if (!(terms & ALLOT_TERMS_TAKEN) || (terms & ALLOT_TERMS_SUSPENDED)) return true;
  if (holder->serial != (uint32_t)__atomic_load_n(&seat->serial, __ATOMIC_RELAXED)) return true;
  if (state->seats[holder->seat].blocked != 0) return true;
  return state->next >= 0 && now_ns >= state->expires_ns;
}

uint32_t allot_lease_fraction(const allot_lease_state *state, const allot_contract *contract,
                              int seat, uint64_t now_ns) {
  if (seat < 0 || seat >= (int)ALLOT_SEATS) return 0;
  allot_lease_state copy = *state;
  view at = {.state = &copy, .contract = contract, .now_ns = now_ns};
  lease_view_open(&at);
  lease_view_look(&at);
  lease_view_divide(&at);
  return at.fraction[seat];
}
