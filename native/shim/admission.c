// SPDX-License-Identifier: Apache-2.0
// May a launch be queued now?
//
// Without contention: two loads, an addition and a compare-and-swap. A launch is counted before the
// gate is looked at, and the keeper shuts the gate before it looks at the count: one of them sees
// the other, so nothing is queued once the lease is given back.
#include <errno.h>

#include "compute.h"
#include "residency.h"

#define BOUND_ALONE_NS (10 * MILLISECOND)
#define BOUND_CONTENDED_NS (2 * MILLISECOND)
#define BOUND_LENT_NS (500 * MICROSECOND)
#define BOUND_STRICT_NS (150 * MICROSECOND)
#define BATCH_NS (150 * MICROSECOND)
#define BATCH_ALONE_NS MILLISECOND
// In company the next launch is let in a little before the one before it is expected to end.
#define SLACK_ALONE_NS (5 * MILLISECOND)
#define SLACK_CONTENDED_NS MILLISECOND
#define SLACK_LENT_NS (100 * MICROSECOND)
#define SLACK_STRICT_NS (10 * MICROSECOND)
#define NO_CEILING INT64_MAX

// A queue without progress for so long may be waiting for a further launch.
#define STUCK_NS (20 * MILLISECOND)
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

static bool fits(const compute_device *at, uint64_t dry, uint64_t expected_ns, bool stream_is_idle,
                 uint64_t now) {
  uint64_t ahead = dry - now, bound = load(at->bound_ns);
  if (bound < BOUND_ALONE_NS) {
    if (ahead > load(at->slack_ns) && ahead + expected_ns > bound) return false;
  } else if (ahead > bound && !stream_is_idle) {
    // Alone, what is queued in other streams may run at the same time: it holds up no idle stream.
    return false;
  }
  // It begins within the lease; waiting for an empty queue first would leave a gap and end it no
  // earlier.
  if (dry >= load(at->expires_ns)) return false;
  return load(at->room_ns) >= (int64_t)expected_ns;
}

// With the launch counted already; `before`: how many were before it.
static bool may_enter(compute_device *at, uint64_t expected_ns, bool stream_is_idle, uint64_t now,
                      uint64_t before) {
  if (__atomic_load_n(&at->gate, __ATOMIC_SEQ_CST) != GATE_OPEN || !is_current(at)) return false;
  if (now >= load(at->expires_ns) || load(at->room_ns) <= 0) return false;
  uint64_t seen = load(at->dry_ns), dry;
  do {
    dry = later(seen, now);
    if (before > 0 && !fits(at, dry, expected_ns, stream_is_idle, now)) return false;
  } while (!__atomic_compare_exchange_n(&at->dry_ns, &seen, dry + expected_ns, true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return true;
}

static void count_in(compute_device *at, uint64_t expected_ns) {
  __atomic_add_fetch(&at->queued_ns, expected_ns, __ATOMIC_RELAXED);
  if (load(at->room_ns) != NO_CEILING) {
    __atomic_sub_fetch(&at->room_ns, (int64_t)expected_ns, __ATOMIC_RELAXED);
  }
}

static bool try_enter(compute_device *at, uint64_t expected_ns, bool stream_is_idle, uint64_t now) {
  uint64_t before = __atomic_fetch_add(&at->queued, 1, __ATOMIC_SEQ_CST);
  if (LIKELY(may_enter(at, expected_ns, stream_is_idle, now, before))) {
    count_in(at, expected_ns);
    return true;
  }
  __atomic_sub_fetch(&at->queued, 1, __ATOMIC_SEQ_CST);
  return false;
}

void admission_leave(compute_device *at, uint64_t launches, uint64_t expected_ns) {
  __atomic_sub_fetch(&at->queued_ns, expected_ns, __ATOMIC_RELAXED);
  __atomic_sub_fetch(&at->queued, launches, __ATOMIC_SEQ_CST);
}

void admission_spend(compute_device *at, uint64_t used_ns) {
  __atomic_add_fetch(&at->uncharged_ns, used_ns, __ATOMIC_RELAXED);
  if (load(at->room_ns) != NO_CEILING) {
    __atomic_sub_fetch(&at->room_ns, (int64_t)used_ns, __ATOMIC_RELAXED);
  }
}

void admission_undo(compute_device *at, uint64_t expected_ns) {
  __atomic_sub_fetch(&at->dry_ns, expected_ns, __ATOMIC_RELAXED);
  if (load(at->room_ns) != NO_CEILING) {
    __atomic_add_fetch(&at->room_ns, (int64_t)expected_ns, __ATOMIC_RELAXED);
  }
  admission_leave(at, 1, expected_ns);
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
  uint64_t spent = load(at->queued_ns) + load(at->uncharged_ns);
  store(at->room_ns,
        lease->budget_ns == UINT64_MAX ? NO_CEILING : (int64_t)lease->budget_ns - (int64_t)spent);
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
  if (load(at->waits) == 0) store(at->progress_ns, now);
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
  uint64_t expected_ns;
  const uint64_t *free_ns;  // of its stream: when that is expected to have done all
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
static bool is_stuck(compute_device *at, bool stream_is_idle, uint64_t now) {
  if (load(at->queued) == 0) return false;
  uint64_t patience = STUCK_NS;
  if (load(at->is_running) != 0) {
    if (!stream_is_idle) return false;
    patience = STUCK_RUNNING_NS;
  }
  return now > later(load(at->progress_ns), at->forced_ns) + patience;
}

static bool force(compute_device *at, uint64_t expected_ns, uint64_t now) {
  at->forced_ns = now;
  __atomic_fetch_add(&at->queued, 1, __ATOMIC_SEQ_CST);
  count_in(at, expected_ns);
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
static bool attempt_locked(compute_device *at, attempt *of, uint64_t now) {
  // Drawn before anything is looked at: who changes it afterwards wakes us.
  of->ticket = __atomic_load_n(&at->leases.file->heads[at->leases.place].wake, __ATOMIC_SEQ_CST);
  of->sleep_until_ns = now + NAP_NS;
  // No less than what follows it at once.
  at->leases.launch_ns = later(of->expected_ns, BOUND_LENT_NS);
  if (at->is_held != 0) look(at, now);
  if (at->is_moving != 0) return false;
  if (at->is_held == 0 && !ask(at, of, now)) return false;
  if (at->is_held == 0) return false;
  bool stream_is_idle = now > load(*of->free_ns);
  if (try_enter(at, of->expected_ns, stream_is_idle, now)) return true;
  // Not where the others' turn has come: they go on when the lease is taken from a stuck queue.
  if (load(at->gate) == GATE_OPEN && is_stuck(at, stream_is_idle, now)) {
    return force(at, of->expected_ns, now);
  }
  // Where only the queue is full, until it has been worked off by half.
  uint64_t low = load(at->slack_ns);
  uint64_t dry = load(at->dry_ns);
  if (load(at->gate) == GATE_OPEN && dry > low + now && dry - low < of->sleep_until_ns) {
    of->sleep_until_ns = dry - low;
  }
  uint64_t free_ns = load(*of->free_ns);
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

static bool wait_for_turn(compute_device *at, attempt *of, uint64_t now) {
  int error = errno;
  bool entered = false, waited = false;
  pthread_mutex_lock(&at->lease_lock);
  __atomic_add_fetch(&at->waiters, 1, __ATOMIC_SEQ_CST);
  while (compute_is_governed(at) && !keeper_is_stopped(at->all)) {
    entered = attempt_locked(at, of, now);
    if (entered) break;
    if (!waited) account_throttled(at);
    waited = true;
    pthread_mutex_unlock(&at->lease_lock);
    pause_until(at, of);
    pthread_mutex_lock(&at->lease_lock);
    // Count a wait while it lasts: else seconds of waiting would appear at its end.
    uint64_t before = now;
    now = clock_ns();
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
  uint64_t dry = load(at->dry_ns), began = load(at->burst_began_ns);
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

bool admission_enter(compute_device *at, uint64_t expected_ns, const uint64_t *free_ns,
                     uint64_t *now) {
  bool begins = load(at->queued) == 0;
  if (begins) note_gap(at, *now);
  if (LIKELY(try_enter(at, expected_ns, *now > load(*free_ns), *now))) {
    if (begins) begin_burst(at, *now);
    // It shuts its eyes before it looks at the count for the last time.
    if (UNLIKELY(__atomic_load_n(&at->all->keeper.is_deep, __ATOMIC_SEQ_CST) != 0)) {
      keeper_wake(at->all);
    }
    return true;
  }
  attempt of = {.expected_ns = expected_ns, .free_ns = free_ns};
  if (!wait_for_turn(at, &of, *now)) return false;
  *now = clock_ns();
  if (begins) begin_burst(at, *now);
  return true;
}
