// SPDX-License-Identifier: Apache-2.0
// May a launch be queued now?
//
// Without contention a launch into a batch that is open makes one compare-and-swap. A batch is
// counted before the gate is looked at, and the keeper shuts the gate before it looks at the count:
// one of them sees the other, so nothing that may begin is queued once the
// lease is given back: only what waits for the host, or for a copy.
#include <errno.h>

#include "compute.h"
#include "residency.h"

#define BOUND_ALONE_NS (10 * MILLISECOND)
#define BOUND_CONTENDED_NS (2 * MILLISECOND)
#define BOUND_LENT_NS (500 * MICROSECOND)
#define BOUND_STRICT_NS (150 * MICROSECOND)
// In idle streams too, of more batches than these.
#define BOUND_STREAMS_NS (200 * MILLISECOND)
#define FEW_BATCHES 8
#define BATCH_NS (150 * MICROSECOND)
#define BATCH_ALONE_NS MILLISECOND
// In company the next launch is let in a little before the one before it is expected to end.
#define SLACK_ALONE_NS (5 * MILLISECOND)
#define SLACK_CONTENDED_NS MILLISECOND
#define SLACK_LENT_NS (100 * MICROSECOND)
#define SLACK_STRICT_NS (10 * MICROSECOND)
#define NO_CEILING ((uint64_t)INT64_MAX)

// A queue without progress for so long may be waiting for a further launch.
#define STUCK_NS (20 * MILLISECOND)
// And for so many times what is queued: when the wait is over, all of it runs in another's turn.
// What is expected may be wrong, so no longer than that.
#define STUCK_TIMES 2
#define STUCK_MORE_NS (500 * MILLISECOND)
// If something runs meanwhile, it is rather that which takes long.
#define STUCK_RUNNING_NS (1000 * MILLISECOND)

#define NAP_NS (2 * MILLISECOND)
// A gap beyond twice the usual and this is an exception.
#define UNUSUAL_GAP_NS (200 * MICROSECOND)
#define SPIN_NS (60 * MICROSECOND)

#define load(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
#define store(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELAXED)

static uint64_t later(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

// ---- the common path ----

static bool is_current(const compute_device *at) {
  uint64_t root = __atomic_load_n(&at->leases.file->root, __ATOMIC_SEQ_CST);
  if (root == load(at->seen_root)) return true;
  return ALLOT_ROOT_HOLDER(root) == at->leases.place && !ALLOT_ROOT_CONTENDED(root);
}

// What the ceiling leaves, once so much was let in.
static int64_t room(const compute_device *at, uint64_t admitted_ns) {
  return (int64_t)(load(at->room_to_ns) - admitted_ns);
}

// Alone, what is queued in other streams may run at the same time: it holds up no idle stream. But
// a share that comes back waits for all of it.
static bool fits_alone(const compute_device *at, uint64_t ahead_ns, const launch_request *launch) {
  if (ahead_ns <= BOUND_ALONE_NS) return true;
  if (launch->now_ns <= load(*launch->free_ns)) return false;
  return ahead_ns <= BOUND_STREAMS_NS || load(at->queued) <= FEW_BATCHES;
}

static bool fits(const compute_device *at, uint64_t dry, const launch_request *launch) {
  uint64_t ahead = dry - launch->now_ns, bound = load(at->bound_ns);
  if (bound < BOUND_ALONE_NS) {
    if (ahead > load(at->slack_ns) && ahead + launch->expected_ns > bound) return false;
  } else if (!fits_alone(at, ahead, launch)) {
    return false;
  }
  // It begins within the lease; waiting for an empty queue first would leave a gap and end it no
  // earlier.
  if (dry >= load(at->expires_ns)) return false;
  return room(at, load(at->admitted_ns)) >= (int64_t)launch->expected_ns;
}

// A queue that has been dry is dry until now.
static void note_dry(compute_device *at, uint64_t admitted_ns, uint64_t now) {
  uint64_t seen = load(at->dry_from_ns), right = now - admitted_ns;
  while ((int64_t)(right - seen) > 0 &&
         !__atomic_compare_exchange_n(&at->dry_from_ns, &seen, right, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

// Lets a launch in whose batch is counted. `is_first`: nothing else is.
static bool let_in(compute_device *at, const launch_request *launch, bool is_first) {
  if (__atomic_load_n(&at->gate, __ATOMIC_SEQ_CST) != GATE_OPEN || !is_current(at)) return false;
  if (launch->now_ns >= load(at->expires_ns)) return false;
  uint64_t seen = load(at->admitted_ns);
  do {
    if (room(at, seen) <= 0) return false;
    uint64_t dry = seen + load(at->dry_from_ns);
    if (dry < launch->now_ns) {
      note_dry(at, seen, launch->now_ns);
      dry = launch->now_ns;
    }
    if (!is_first && !fits(at, dry, launch)) return false;
  } while (!__atomic_compare_exchange_n(&at->admitted_ns, &seen, seen + launch->expected_ns, true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return true;
}

bool admission_join(compute_device *at, const launch_request *launch) {
  return let_in(at, launch, false);
}

static bool try_enter(compute_device *at, const launch_request *launch) {
  uint64_t before = __atomic_fetch_add(&at->queued, 1, __ATOMIC_SEQ_CST);
  if (LIKELY(let_in(at, launch, before == 0))) return true;
  admission_leave(at);
  return false;
}

void admission_leave(compute_device *at) {
  __atomic_sub_fetch(&at->queued, 1, __ATOMIC_SEQ_CST);
}

void admission_end(compute_device *at, uint64_t expected_ns) {
  __atomic_add_fetch(&at->ended_ns, expected_ns, __ATOMIC_RELAXED);
}

void admission_undo(compute_device *at, uint64_t expected_ns) {
  __atomic_sub_fetch(&at->admitted_ns, expected_ns, __ATOMIC_RELAXED);
}

void admission_spend(compute_device *at, uint64_t used_ns) {
  __atomic_add_fetch(&at->uncharged_ns, used_ns, __ATOMIC_RELAXED);
  if (load(at->room_to_ns) != NO_CEILING) {
    __atomic_sub_fetch(&at->room_to_ns, used_ns, __ATOMIC_RELAXED);
  }
}

uint64_t admission_queued_ns(const compute_device *at) {
  uint64_t ended_ns = load(at->ended_ns), admitted_ns = load(at->admitted_ns);
  return admitted_ns > ended_ns ? admitted_ns - ended_ns : 0;
}

uint64_t admission_dry_ns(const compute_device *at) {
  return load(at->dry_from_ns) + load(at->admitted_ns);
}

uint64_t admission_correct_dry(compute_device *at, uint64_t least_ns, uint64_t most_ns) {
  uint64_t seen = load(at->dry_from_ns), dry, right;
  do {
    dry = right = seen + load(at->admitted_ns);
    if (right > most_ns) right = most_ns;
    if (right < least_ns) right = least_ns;
    if (right == dry) return 0;
    // A launch that finds the queue dry says so at the same time.
  } while (!__atomic_compare_exchange_n(&at->dry_from_ns, &seen, seen + right - dry, true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return dry > right ? dry - right : 0;
}

void admission_wake(const compute_device *at) {
  if (__atomic_load_n(&at->waiters, __ATOMIC_SEQ_CST) != 0) allot_lease_wake_own(&at->leases);
}

// ---- the lease; with the lease_lock held ----

void admission_update(compute_device *at, const allot_lease *lease, uint64_t root) {
  bool held = lease->held && at->is_held != 0 && lease->epoch == at->epoch;
  at->is_alone = lease->alone;
  if (!held) {
    at->is_held = 0;
    __atomic_store_n(&at->gate, GATE_SHUT, __ATOMIC_SEQ_CST);
    return;
  }
  uint64_t terms = load(at->leases.contract->seats[at->leases.seat].terms);
  bool strict = lease->latency_active && ALLOT_TERMS_CLASS(terms) != ALLOT_CLASS_LATENCY;
  store(at->is_strict, strict);
  store(at->is_contended, lease->contended);
  bool lent = lease->lent, contended = lease->contended;
  store(at->bound_ns, strict      ? BOUND_STRICT_NS
                      : lent      ? BOUND_LENT_NS
                      : contended ? BOUND_CONTENDED_NS
                                  : BOUND_ALONE_NS);
  store(at->slack_ns, strict      ? SLACK_STRICT_NS
                      : lent      ? SLACK_LENT_NS
                      : contended ? SLACK_CONTENDED_NS
                                  : SLACK_ALONE_NS);
  store(at->batch_ns, strict || lent || contended ? BATCH_NS : BATCH_ALONE_NS);
  store(at->keep_ns, lease->keep_ns);
  store(at->expires_ns, lease->contended ? lease->expires_ns : UINT64_MAX);
  // What is queued or measured and not charged yet is spent already.
  uint64_t spent_to = load(at->ended_ns) - load(at->uncharged_ns);
  store(at->room_to_ns, lease->budget_ns == UINT64_MAX ? NO_CEILING : spent_to + lease->budget_ns);
  store(at->seen_root, root);
  bool open = !lease->yield && at->is_moving == 0;
  __atomic_store_n(&at->gate, open ? GATE_OPEN : GATE_SHUT, __ATOMIC_SEQ_CST);
}

uint64_t admission_root(const compute_device *at) {
  uint64_t root = __atomic_load_n(&at->leases.file->root, __ATOMIC_SEQ_CST);
  return (int)ALLOT_ROOT_BUFFER(root) / 2 == at->leases.place ? root : 0;
}

// While memory comes in: the others see that this process lives, and the lease gets longer.
static bool still_moving(void *context, uint64_t took_ns) {
  compute_device *at = context;
  allot_lease lease;
  uint64_t now = clock_ns();
  pthread_mutex_lock(&at->lease_lock);
  allot_lease_beat(&at->leases, true, now);
  allot_lease_charge(&at->leases, 0, took_ns, now, &lease);
  bool held = lease.held && lease.epoch == at->epoch;
  pthread_mutex_unlock(&at->lease_lock);
  return held;
}

void admission_gained(compute_device *at, const allot_lease *lease, uint64_t now) {
  at->is_held = 1;
  at->epoch = lease->epoch;
  // A queue that waits may depend on a launch: how long it has, counts on.
  if (load(at->is_stalled) == 0) store(at->progress_ns, now);
  store(at->idle_since_ns, now);
  allot_lease_beat(&at->leases, true, now);
  if (at->waiting_since_ns != 0) {
    account_wait(at, now > at->waiting_since_ns ? now - at->waiting_since_ns : 0);
    at->waiting_since_ns = 0;
  }
  process *own = at->all->own;
  if (residency_active(own, at->device)) {
    at->is_moving = 1;
    admission_update(at, lease, 0);
    pthread_mutex_unlock(&at->lease_lock);
    uint64_t took = residency_gained(own, at->device, still_moving, at);
    pthread_mutex_lock(&at->lease_lock);
    at->is_moving = 0;
    at->move_ns = took;
    allot_lease now_held;
    // Tells what the move took, so that the lease lasts accordingly.
    allot_lease_charge(&at->leases, 0, took, clock_ns(), &now_held);
    at->move_ns = 0;
    admission_update(at, &now_held, admission_root(at));
    admission_wake(at);
    return;
  }
  admission_update(at, lease, admission_root(at));
}

// ---- being held back ----

typedef struct attempt {
  launch_request *launch;
  uint64_t sleep_until_ns;  // after a failure
  uint32_t ticket;
} attempt;

static void look(compute_device *at, uint64_t now) {
  allot_lease lease;
  // Should it move before the look, the next launch looks again.
  uint64_t root = __atomic_load_n(&at->leases.file->root, __ATOMIC_SEQ_CST);
  allot_lease_look(&at->leases, now, &lease);
  admission_update(at, &lease, root);
}

// Does the queue look as if it waited for this very launch?
static bool is_stuck(const compute_device *at, const launch_request *launch) {
  uint64_t now = launch->now_ns;
  if (load(at->queued) == 0) return false;
  uint64_t patience = STUCK_NS;
  if (load(at->is_running) != 0) {
    if (now <= load(*launch->free_ns)) return false;
    patience = STUCK_RUNNING_NS;
  }
  // Who comes back to a program that is alone waits for some of its work anyway.
  uint64_t queued_ns = admission_queued_ns(at), usual_ns = at->is_alone ? BOUND_STREAMS_NS : 0;
  uint64_t more_ns = queued_ns > usual_ns ? STUCK_TIMES * (queued_ns - usual_ns) : 0;
  patience += more_ns < STUCK_MORE_NS ? more_ns : STUCK_MORE_NS;
  return now > later(load(at->progress_ns), at->forced_ns) + patience;
}

// Would the lease be of no use yet? A queue that waits has to be short, or to have waited for long.
// But who has asked for it takes it.
static bool is_in_vain(const compute_device *at, const launch_request *launch) {
  if (at->is_held != 0 || at->waiting_since_ns != 0) return false;
  if (load(at->is_stalled) == 0 || load(at->queued) == 0) return false;
  uint64_t dry = admission_dry_ns(at), ahead = dry > launch->now_ns ? dry - launch->now_ns : 0;
  bool is_short = ahead <= load(at->slack_ns) || ahead + launch->expected_ns <= load(at->bound_ns);
  return !is_short && !is_stuck(at, launch);
}

static bool force(compute_device *at, const launch_request *launch) {
  at->forced_ns = launch->now_ns;
  __atomic_add_fetch(&at->queued, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&at->admitted_ns, launch->expected_ns, __ATOMIC_RELAXED);
  return true;
}

static bool ask(compute_device *at, attempt *of, uint64_t now) {
  allot_lease lease;
  allot_lease_want(&at->leases, now, &lease);
  if (!lease.held) allot_lease_check(&at->leases, now, &lease);
  if (lease.held) {
    admission_gained(at, &lease, now);
    keeper_wake(at->all);
    return true;
  }
  if (at->waiting_since_ns == 0) at->waiting_since_ns = now;
  of->ticket = lease.ticket;
  of->sleep_until_ns = lease.retry_ns;
  return false;
}

// With the lease_lock held.
static bool attempt_locked(compute_device *at, attempt *of) {
  uint64_t now = of->launch->now_ns;
  // Drawn before anything is looked at: who changes it afterwards wakes us.
  of->ticket = __atomic_load_n(&at->leases.file->heads[at->leases.place].wake, __ATOMIC_SEQ_CST);
  of->sleep_until_ns = now + NAP_NS;
  // No less than what follows it at once.
  at->leases.launch_ns = later(of->launch->expected_ns, BOUND_LENT_NS);
  if (at->is_held != 0) look(at, now);
  if (at->is_moving != 0) return false;
  if (is_in_vain(at, of->launch)) return false;
  if (at->is_held == 0 && !ask(at, of, now)) return false;
  if (at->is_held == 0) return false;
  if (try_enter(at, of->launch)) return true;
  // Not where the others' turn has come: they go on when the lease is taken from a stuck queue.
  if (load(at->gate) == GATE_OPEN && is_stuck(at, of->launch)) return force(at, of->launch);
  // Where only the queue is full, until it has been worked off by half.
  uint64_t low = load(at->slack_ns);
  uint64_t dry = admission_dry_ns(at);
  if (load(at->gate) == GATE_OPEN && dry > low + now && dry - low < of->sleep_until_ns) {
    of->sleep_until_ns = dry - low;
  }
  uint64_t free_ns = load(*of->launch->free_ns);
  if (load(at->gate) == GATE_OPEN && free_ns > now && free_ns < of->sleep_until_ns) {
    of->sleep_until_ns = free_ns;
  }
  return false;
}

static void pause_until(const compute_device *at, const attempt *of) {
  uint64_t now = clock_ns();
  if (of->sleep_until_ns > now + SPIN_NS) {
    allot_lease_sleep(&at->leases, of->ticket, of->sleep_until_ns - SPIN_NS / 2);
    return;
  }
  while (clock_ns() < of->sleep_until_ns) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

static bool wait_for_turn(compute_device *at, launch_request *launch) {
  int error = errno;
  attempt of = {.launch = launch};
  bool entered = false, waited = false;
  pthread_mutex_lock(&at->lease_lock);
  __atomic_add_fetch(&at->waiters, 1, __ATOMIC_SEQ_CST);
  while (compute_is_governed(at) && !keeper_is_stopped(at->all)) {
    entered = attempt_locked(at, &of);
    if (entered) break;
    if (!waited) account_throttled(at);
    waited = true;
    pthread_mutex_unlock(&at->lease_lock);
    pause_until(at, &of);
    pthread_mutex_lock(&at->lease_lock);
    // Count a wait while it lasts: else seconds of waiting would appear at its end.
    uint64_t before = launch->now_ns, now = launch->now_ns = clock_ns();
    account_held(at, now > before ? now - before : 0);
  }
  __atomic_sub_fetch(&at->waiters, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&at->lease_lock);
  errno = error;
  return entered;
}

// How long the program leaves the device idle between two bursts of work, and how long those are:
// who comes back soon keeps its lease meanwhile.
static void note_gap(compute_device *at, uint64_t now) {
  uint64_t dry = admission_dry_ns(at), began = load(at->burst_began_ns);
  if (now <= dry) return;
  uint64_t gap = now - dry, burst = dry > began ? dry - began : 0;
  uint64_t usual = load(at->gap_ns), most = 2 * usual + UNUSUAL_GAP_NS;
  if (gap > most) gap = most;
  store(at->gap_ns, (usual * 3 + gap) / 4);
  store(at->burst_ns, (load(at->burst_ns) * 3 + burst) / 4);
}

// The first launch of a burst is let in.
static void begin_burst(compute_device *at, uint64_t now) {
  store(at->burst_began_ns, now);
  store(at->progress_ns, now);
  allot_lease_tell_running(&at->leases, now);
}

bool admission_enter(compute_device *at, const launch_request *launch) {
  bool begins = load(at->queued) == 0;
  if (begins) note_gap(at, launch->now_ns);
  if (UNLIKELY(!try_enter(at, launch))) return false;
  if (begins) begin_burst(at, launch->now_ns);
  // It shuts its eyes before it looks at the count for the last time.
  if (UNLIKELY(__atomic_load_n(&at->all->keeper.is_deep, __ATOMIC_SEQ_CST) != 0)) {
    keeper_wake(at->all);
  }
  return true;
}

bool admission_wait(compute_device *at, launch_request *launch) {
  bool begins = load(at->queued) == 0;
  if (!wait_for_turn(at, launch)) return false;
  launch->now_ns = clock_ns();
  if (begins) begin_burst(at, launch->now_ns);
  return true;
}
