// SPDX-License-Identifier: Apache-2.0
// The keeper: one thread of a process that takes turns. It sees work end, charges it, gives the
// lease back and wakes what was held back.
//
// It blocks all signals, captures nothing, and is not there in children. While the program's own
// exit is under way it is stopped, and each launch does its part.
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "compute.h"
#include "driver.h"
#include "reason.h"
#include "residency.h"

// So often it shows that it lives, and charges.
#define BEAT_NS (2 * MILLISECOND)
#define CHARGE_NS MILLISECOND
#define CHARGE_ALONE_NS (2 * MILLISECOND)
// It wakes so long before work is expected to end.
#define EARLY_NS (50 * MICROSECOND)
#define NAP_NS (30 * MICROSECOND)
// A latency share waits for the end.
#define PRESSED_NAP_NS (5 * MICROSECOND)
#define LONG_NAP_NS (500 * MICROSECOND)
// Idle for so long, it sleeps until it is woken.
#define AWAKE_NS (20 * MILLISECOND)
#define DEEP_NS (1000 * MILLISECOND)
#define SUSPENDED_NS (50 * MILLISECOND)
// A holder that is expected back is waited for so long.
#define LINGER_NS (100 * MICROSECOND)
#define SHORTER_NS (200 * MICROSECOND)
#define EXIT_NS (50 * MILLISECOND)
#define LATE_NS (1000 * MILLISECOND)
#define STACK_BYTES ((size_t)256 << 10)

#define load(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
#define store(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELAXED)

// ---- one device ----

static uint64_t take_uncharged(compute_device *at) {
  uint64_t used = __atomic_exchange_n(&at->uncharged_ns, 0, __ATOMIC_RELAXED);
  account_gpu(at, used);
  allot_lease_tell_charged(&at->leases, load(at->long_work_ns));
  return used;
}

static void tell_habits(compute_device *at) {
  at->leases.longest_ns = __atomic_exchange_n(&at->longest_ns, 0, __ATOMIC_RELAXED);
  at->leases.burst_ns = load(at->burst_ns);
  at->leases.gap_ns = load(at->gap_ns);
  at->leases.is_stalled = load(at->is_stalled) != 0;
}

// Tells the lease what was used, and takes over how things stand. With the lease_lock held.
static void charge(compute_device *at, uint64_t now) {
  allot_lease lease;
  uint64_t used = take_uncharged(at);
  tell_habits(at);
  allot_lease_charge(&at->leases, used, at->move_ns, now, &lease);
  at->move_ns = 0;
  at->charged_at_ns = now;
  bool was_shut = load(at->gate) == GATE_SHUT;
  admission_update(at, &lease, admission_root(at));
  if (was_shut && load(at->gate) == GATE_OPEN) admission_wake(at);
}

// Gives the lease back if nothing is queued, or if the queue waits for the host or for a copy: for
// an unknown time, after which it may begin in another's turn. With the lease_lock held.
static bool release(compute_device *at, uint64_t now) {
  __atomic_store_n(&at->gate, GATE_SHUT, __ATOMIC_SEQ_CST);
  bool is_empty = __atomic_load_n(&at->queued, __ATOMIC_SEQ_CST) == 0;
  if (!is_empty && load(at->is_stalled) == 0) return false;
  allot_lease lease;
  // Launches behind a queue that waits ask anew later. A wish at the same moment would count as
  // work without a gap: it would save time up, and end the next lease before anything runs in it.
  bool wants_more = is_empty && load(at->waiters) != 0;
  uint64_t used = take_uncharged(at);
  tell_habits(at);
  at->is_held = 0;
  allot_lease_release(&at->leases, used, at->move_ns, wants_more, now, &lease);
  at->move_ns = 0;
  at->charged_at_ns = now;
  at->is_alone = lease.alone;
  if (wants_more && !lease.held) at->waiting_since_ns = now;
  if (lease.held) {
    admission_gained(at, &lease, now);
  }
  if (wants_more) admission_wake(at);
  return true;
}

// May it hold the lease without work? Alone, where it is expected back sooner than another could
// have begun, and where it is behind and another's launch would take longer than its gap.
static bool may_idle(const compute_device *at, uint64_t now) {
  uint64_t idle_ns = now - load(at->idle_since_ns);
  if (idle_ns < residency_linger_ns(at->all->own, at->device)) return true;
  if (idle_ns < load(at->keep_ns)) return true;
  uint64_t gap = load(at->gap_ns);
  if (gap < LINGER_NS && gap * 4 <= load(at->burst_ns) && idle_ns < LINGER_NS) return true;
  // With several devices the keeper can be woken through one of them only.
  return at->is_alone != 0 && at->all->device_count == 1;
}

static void give_way(compute_device *at, uint64_t now) {
  charge(at, now);  // it may still be furthest behind
  if (at->is_held != 0 && load(at->gate) == GATE_SHUT) release(at, now);
}

static void keep_lease(compute_device *at, uint64_t now, uint64_t queued) {
  bool is_open = load(at->gate) == GATE_OPEN, is_contended = load(at->is_contended) != 0;
  bool is_due = now - at->charged_at_ns >= (is_contended ? CHARGE_NS : CHARGE_ALONE_NS);
  bool is_over = is_open && is_contended && now >= load(at->expires_ns);
  bool is_told = load(at->seen_root) == __atomic_load_n(&at->leases.file->root, __ATOMIC_SEQ_CST) &&
                 !allot_lease_is_called(&at->leases);
  if (is_due || is_over || (is_open && !is_told)) charge(at, now);
  if (at->is_held == 0 || at->is_moving != 0) return;
  if (queued != 0) {
    if (load(at->is_stalled) != 0 && load(at->is_contended) != 0) release(at, now);
    return;
  }
  if (load(at->gate) == GATE_SHUT) give_way(at, now);
  if (at->is_held == 0 || load(at->gate) == GATE_SHUT) return;
  if (load(at->waiters) != 0) {
    admission_wake(at);
  } else if (!may_idle(at, now)) {
    // A launch that was let in meanwhile keeps the lease.
    if (!release(at, now)) __atomic_store_n(&at->gate, GATE_OPEN, __ATOMIC_SEQ_CST);
  }
}

// When the queue will be dry, from what has ended: those that have begun are about to end.
static void correct_dry(compute_device *at, uint64_t begun_ns, uint64_t now) {
  uint64_t queued_ns = admission_queued_ns(at);
  uint64_t least_ns = now + (queued_ns > begun_ns ? queued_ns - begun_ns : 0);
  uint64_t earlier_ns = admission_correct_dry(at, least_ns, now + queued_ns);
  // Who is held back sleeps until the queue was to be short again: it is shorter by now.
  if (earlier_ns > SHORTER_NS) admission_wake(at);
}

// Since when its work runs: what is charged should the process die. Of a queue that waits nothing
// has begun.
static uint64_t running_since(const compute_device *at, bool is_busy) {
  return is_busy && load(at->is_stalled) == 0 ? load(at->progress_ns) : 0;
}

// Returns when to look again.
static uint64_t step(compute_device *at, uint64_t now) {
  pthread_mutex_lock(&at->marks_lock);
  marks_end_tails(at, now);
  uint64_t begun = marks_collect(at, now);
  bool remain = marks_remain(at);
  marks_leave_context();
  pthread_mutex_unlock(&at->marks_lock);
  correct_dry(at, begun, now);
  pthread_mutex_lock(&at->lease_lock);
  uint64_t queued = __atomic_load_n(&at->queued, __ATOMIC_SEQ_CST);
  if (queued != 0) {
    store(at->idle_since_ns, 0);
  } else if (load(at->idle_since_ns) == 0) {
    store(at->idle_since_ns, now);
  }
  bool has_ended = queued == 0 && load(at->uncharged_ns) != 0;
  bool shows_life = at->is_held != 0 || queued != 0 || has_ended;
  // Before it says that nothing runs: work is not charged any more if the process dies after that.
  if (has_ended) charge(at, now);
  if (queued != 0) allot_lease_tell_running(&at->leases, running_since(at, true));
  if (shows_life) allot_lease_beat(&at->leases, queued != 0, now);
  if (at->is_held != 0) {
    keep_lease(at, now, queued);
  } else if (load(at->uncharged_ns) != 0) {
    charge(at, now);  // what ran on after the lease was lost
  } else if (allot_lease_is_called(&at->leases)) {
    allot_lease lease;  // it is for another process of the share: or it would end each sleep
    allot_lease_look(&at->leases, now, &lease);
  }
  bool evict = at->is_held == 0 && queued == 0 && compute_is_suspended(at) &&
               residency_active(at->all->own, at->device);
  bool busy = queued != 0, held = at->is_held != 0, alone = at->is_alone != 0;
  pthread_mutex_unlock(&at->lease_lock);
  if (evict) {
    residency_evict(at->all->own, at->device);
    return now + SUSPENDED_NS;
  }
  if (!busy) {
    uint64_t idle_since = load(at->idle_since_ns);
    uint64_t kept_ns = idle_since + load(at->keep_ns);
    if (held && !alone && kept_ns > now + EARLY_NS) {
      return kept_ns < now + BEAT_NS ? kept_ns : now + BEAT_NS;
    }
    if (held && !alone) return now + (now - idle_since < LINGER_NS ? EARLY_NS : BEAT_NS);
    // Copies are under way, which nobody waits for.
    if (remain) return now + BEAT_NS;
    return now - idle_since < AWAKE_NS ? now + BEAT_NS : UINT64_MAX;
  }
  // Nobody waits for the end of the work: others send a message when they do.
  bool is_watched =
      load(at->is_contended) != 0 || load(at->is_strict) != 0 || load(at->waiters) != 0 || !held;
  if (!is_watched || (!held && load(at->is_stalled) != 0)) return now + BEAT_NS / 2;
  uint64_t dry = admission_dry_ns(at), last = load(at->progress_ns);
  uint64_t latest = now + (load(at->is_contended) != 0 ? CHARGE_NS : BEAT_NS);
  if (dry > now + EARLY_NS + NAP_NS) return dry - EARLY_NS < latest ? dry - EARLY_NS : latest;
  // It should have ended: the longer it has not, the longer the naps.
  uint64_t overdue = now > last ? (now - last) / 16 : 0;
  uint64_t least =
      load(at->is_contended) != 0 && load(at->is_strict) != 0 ? PRESSED_NAP_NS : NAP_NS;
  uint64_t nap = overdue < least ? least : overdue > LONG_NAP_NS ? LONG_NAP_NS : overdue;
  return now + nap;
}

// ---- the thread ----

static bool is_quiet(const compute_state *all) {
  for (int device = 0; device < all->device_count; device++) {
    if (__atomic_load_n(&all->devices[device].queued, __ATOMIC_SEQ_CST) != 0) return false;
  }
  return true;
}

static compute_device *any_place(compute_state *all) {
  for (int device = 0; device < all->device_count; device++) {
    compute_device *at = &all->devices[device];
    if (__atomic_load_n(&at->place, __ATOMIC_ACQUIRE) == PLACE_TAKEN) return at;
  }
  return NULL;
}

static void sleep_deep(compute_state *all, compute_device *at, uint32_t ticket, uint64_t now) {
  bool may_be_suspended = residency_possible(all->own, at->device);
  __atomic_store_n(&all->keeper.is_deep, 1, __ATOMIC_SEQ_CST);
  if (is_quiet(all) && !keeper_is_stopped(all)) {
    allot_lease_sleep(&at->leases, ticket, now + (may_be_suspended ? SUSPENDED_NS : DEEP_NS));
  }
  __atomic_store_n(&all->keeper.is_deep, 0, __ATOMIC_SEQ_CST);
}

static void *keep(void *context) {
  compute_state *all = context;
  prctl(PR_SET_TIMERSLACK, 1000);
  pthread_setname_np(pthread_self(), "allotment");
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  DRIVER(USED(cuThreadExchangeStreamCaptureMode)(&mode));
  driver_entry always;
  driver_enter(&always);
  while (!keeper_is_stopped(all)) {
    compute_device *sleeps_on = all->keeper.sleeps_on;
    uint32_t ticket = __atomic_load_n(&sleeps_on->leases.file->heads[sleeps_on->leases.place].wake,
                                      __ATOMIC_SEQ_CST);
    uint64_t now = clock_ns(), next = UINT64_MAX;
    for (int device = 0; device < all->device_count; device++) {
      compute_device *at = &all->devices[device];
      if (__atomic_load_n(&at->place, __ATOMIC_ACQUIRE) != PLACE_TAKEN) continue;
      uint64_t wanted = step(at, now);
      if (wanted < next) next = wanted;
    }
    now = clock_ns();
    if (next == UINT64_MAX) {
      sleep_deep(all, sleeps_on, ticket, now);
    } else if (next > now + 200 * MICROSECOND) {
      allot_lease_sleep(&sleeps_on->leases, ticket, next);
    } else if (next > now) {
      struct timespec nap = {.tv_nsec = (long)(next - now)};
      nanosleep(&nap, NULL);
    }
  }
  driver_leave(&always);
  return NULL;
}

// ---- once exit has begun ----
//
// The driver may be torn down at any moment: it is called only by threads of the program that are
// calling it anyway. No exit hangs: what another thread or the GPU does not end within LATE_NS is
// not waited for.

static void note_late(compute_device *at, uint64_t now) {
  if (load(at->leases.file->heads[at->leases.place].running_ns) == 0) {
    allot_lease_tell_running(&at->leases, now);
  }
  allot_lease_beat(&at->leases, true, now);
}

// Returns when to ask again; 0: it has the turn, or there are none.
static uint64_t ask_late(compute_device *at, uint32_t *ticket) {
  uint64_t now = clock_ns();
  allot_lease lease;
  at->leases.is_stalled = false;
  allot_lease_want(&at->leases, now, &lease);
  if (!lease.held) allot_lease_check(&at->leases, now, &lease);
  if (!compute_is_governed(at)) return 0;
  bool is_allowed = lease.held && !lease.yield && lease.budget_ns > 0;
  if (is_allowed) note_late(at, now);
  if (is_allowed) return 0;
  if (lease.held) allot_lease_release(&at->leases, 0, 0, true, now, &lease);
  *ticket = lease.ticket;
  return lease.retry_ns > now && lease.retry_ns < now + BEAT_NS ? lease.retry_ns : now + BEAT_NS;
}

bool keeper_begin_late(compute_device *at) {
  if (process_lock_within(&at->all->late_lock, LATE_NS)) {
    for (uint64_t again_ns = 1; again_ns != 0 && process_lock_within(&at->lease_lock, LATE_NS);) {
      uint32_t ticket = 0;
      again_ns = ask_late(at, &ticket);
      process_unlock(&at->lease_lock);
      if (again_ns == 0) return true;
      allot_lease_sleep(&at->leases, ticket, again_ns);
    }
    process_unlock(&at->all->late_lock);
  }
  note_late(at, clock_ns());
  return false;
}

void keeper_end_late(compute_device *at, CUstream stream, bool launched) {
  uint64_t now = clock_ns(), end = now + LATE_NS;
  CUresult result = CUDA_SUCCESS;
  for (; launched && now < end; now = clock_ns()) {
    result = DRIVER(USED(cuStreamQuery)(stream));
    if (result != CUDA_ERROR_NOT_READY) break;
    allot_lease_beat(&at->leases, true, now);
    nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
  }
  bool runs = result == CUDA_ERROR_NOT_READY;
  uint64_t since_ns = allot_lease_uncharged_since(&at->leases.file->heads[at->leases.place]);
  if (process_lock_within(&at->lease_lock, LATE_NS)) {
    allot_lease lease;
    admission_spend(at, now > since_ns && since_ns != 0 ? now - since_ns : 0);
    allot_lease_tell_running(&at->leases, runs ? now : 0);
    allot_lease_beat(&at->leases, runs, now);
    at->is_held = 0;
    allot_lease_release(&at->leases, take_uncharged(at), 0, false, now, &lease);
    process_unlock(&at->lease_lock);
  }
  process_unlock(&at->all->late_lock);
}

void keeper_wake(compute_state *all) {
  if (all->keeper.sleeps_on != NULL) allot_lease_wake_own(&all->keeper.sleeps_on->leases);
}

// ---- beginning and end ----

static compute_state *running;

// Charges what has ended, and leaves word of what has not: whoever frees this place charges that.
static void settle_accounts(compute_state *all) {
  driver_entry entry;
  driver_enter(&entry);
  CUcontext current = NULL;  // the program's exit handlers may still need it
  USED(cuCtxGetCurrent)(&current);
  marks_settle_all(all);
  for (int device = 0; device < all->device_count; device++) {
    compute_device *at = &all->devices[device];
    if (__atomic_load_n(&at->place, __ATOMIC_ACQUIRE) != PLACE_TAKEN) continue;
    uint64_t now = clock_ns();
    pthread_mutex_lock(&at->marks_lock);
    admission_correct_dry(at, 0, 0);  // nothing is too early to be asked for
    marks_collect(at, now);
    marks_leave_context();
    pthread_mutex_unlock(&at->marks_lock);
    pthread_mutex_lock(&at->lease_lock);
    if (load(at->uncharged_ns) != 0) charge(at, now);
    bool busy = __atomic_load_n(&at->queued, __ATOMIC_SEQ_CST) != 0;
    allot_lease_tell_running(&at->leases, running_since(at, busy));
    allot_lease_beat(&at->leases, busy, now);
    pthread_mutex_unlock(&at->lease_lock);
  }
  USED(cuCtxSetCurrent)(current);
  driver_leave(&entry);
}

// By the monotonic clock, which nobody puts back.
static bool join_within(pthread_t thread, uint64_t ns) {
  for (uint64_t until_ns = clock_ns() + ns; pthread_tryjoin_np(thread, NULL) != 0;) {
    if (clock_ns() >= until_ns) return false;
    nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
  }
  return true;
}

// The driver is torn down after this: nothing of it may be called any more.
static void stop_at_exit(void) {
  process *own = process_known();
  compute_state *all = own == NULL ? NULL : own->compute;
  // In a child the state is another one, or none.
  if (all == NULL || all != running || all->keeper.state != KEEPER_RUNS) return;
  __atomic_store_n(&all->keeper.state, KEEPER_STOPPED, __ATOMIC_SEQ_CST);
  for (int device = 0; device < all->device_count; device++) {
    compute_device *at = &all->devices[device];
    if (__atomic_load_n(&at->place, __ATOMIC_ACQUIRE) == PLACE_TAKEN) {
      allot_lease_wake_own(&at->leases);
    }
  }
  if (pthread_equal(all->keeper.thread, pthread_self())) return;
  if (join_within(all->keeper.thread, EXIT_NS)) settle_accounts(all);
}

static bool start_thread(compute_state *all) {
  pthread_attr_t attributes;
  sigset_t every, before;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  bool started = pthread_create(&all->keeper.thread, &attributes, keep, all) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  if (!started) say_once("no thread can be started to take turns; see `ulimit -u`");
  return started;
}

bool keeper_start(compute_state *all) {
  if (all->keeper.state != KEEPER_NONE) return true;
  all->keeper.sleeps_on = any_place(all);
  if (all->keeper.sleeps_on == NULL || !start_thread(all)) return false;
  static bool is_registered;
  running = all;
  if (!__atomic_exchange_n(&is_registered, true, __ATOMIC_ACQ_REL)) atexit(stop_at_exit);
  __atomic_store_n(&all->keeper.state, KEEPER_RUNS, __ATOMIC_RELEASE);
  return true;
}
