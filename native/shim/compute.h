// SPDX-License-Identifier: Apache-2.0
// Taking turns on a device, in this process: what is queued, what was measured, and the lease.
//
// A launch is *admitted* (admission.c), stands in a *batch* between two *marks* in its stream
// (marks.c), and is charged when the *keeper* (keeper.c) sees the batch's end. All of it lies in
// pages that forked children find empty, as the rest of the process's state.
// docs/designs/shim.md, "Compute", has the reasons.
#ifndef ALLOTMENT_SHIM_COMPUTE_H
#define ALLOTMENT_SHIM_COMPUTE_H

#include <pthread.h>
#include <time.h>

#include "estimates.h"
#include "lease.h"
#include "marks.h"
#include "process.h"

#define MICROSECOND UINT64_C(1000)
#define MILLISECOND UINT64_C(1000000)

enum { GATE_SHUT = 0, GATE_OPEN = 1 };
enum { PLACE_NONE = 0, PLACE_TAKEN = 1, PLACE_REFUSED = 2 };

// One device of the share.
typedef struct compute_device {
  struct compute_state *all;
  int device;          // the policy's index
  uint32_t has_turns;  // `leases` is open
  uint32_t place;      // PLACE_*
  allot_leases leases;

  // What launches change, without a lock: one line of the cache.
  _Alignas(64) uint64_t queued;  // batches that are not known to have ended, and launches without
  // What launches that were let in were expected to take, all of them since the beginning: the one
  // word that each launch changes. How much is queued, when the GPU will have done it (dry), and
  // what the ceiling leaves follow from it.
  uint64_t admitted_ns;
  uint64_t ended_ns;          // of these, what is known to have ended
  uint64_t dry_from_ns;       // and `admitted_ns`: when the GPU is dry, as far as is known
  uint64_t burst_began_ns;    // the queue was empty before
  uint64_t gap_ns, burst_ns;  // moving means: idle between bursts, and busy
  uint64_t progress_ns;       // when work was last seen to end, or was let in

  // What launches read: another line, which changes with a decision.
  _Alignas(64) uint32_t gate;  // GATE_*
  uint32_t is_strict;          // beside an active latency share: one launch at a time
  uint64_t seen_root;          // the decision that the limits below are from
  uint64_t bound_ns;           // how much may be queued
  uint64_t slack_ns;           // the next launch is let in so long before the queue is dry
  uint64_t batch_ns;           // launches that are expected to take so long are marked together
  uint64_t expires_ns;         // nothing is queued beyond this
  uint64_t room_to_ns;         // `admitted_ns` may come so far under the ceiling
  uint64_t keep_ns;            // the lease may be kept without work for so long

  // The lease: one decision at a time.
  _Alignas(64) pthread_mutex_t lease_lock;
  uint32_t is_held, is_alone, is_contended, is_moving;
  uint32_t waiters;  // launches that are held back now
  uint64_t epoch;
  uint64_t waiting_since_ns;  // for the lease; 0: not
  uint64_t move_ns;           // to be told with the next charge
  uint64_t idle_since_ns;     // 0: busy
  uint32_t is_running;        // something of the queue has begun and not ended
  uint32_t is_stalled;        // nothing of it has begun, as the driver says
  uint64_t forced_ns;         // when a launch was last let through a stuck queue

  // Measuring.
  _Alignas(64) pthread_mutex_t marks_lock;  // before the lease_lock
  timeline covered;
  uint64_t long_work_ns;  // up to when long work is charged, or will be with `uncharged_ns`
  uint64_t prepaid_ns;    // charged of work before its end, and not yet taken off what it took
  uint64_t longest_ns;    // of such work that has ended since the last charge
  uint64_t uncharged_ns;  // measured, not told yet
  uint64_t charged_at_ns;
} compute_device;

typedef struct keeper_state {
  uint32_t state;  // KEEPER_*
  uint32_t is_deep;
  pthread_t thread;
  compute_device *sleeps_on;
} keeper_state;

enum { KEEPER_NONE = 0, KEEPER_RUNS, KEEPER_STOPPED };

typedef struct compute_state {
  process *own;
  int device_count;
  uint32_t has_turns;  // some device has
  uint32_t is_paused;  // under the process's context_lock
  uint32_t captures;   // streams that are being captured, as far as is known
  pthread_mutex_t start_lock, late_lock;
  keeper_state keeper;
  mark_store marks;
  estimate_table estimates;
  compute_device devices[ALLOT_MAX_DEVICES];
} compute_state;

static inline uint64_t clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// The state of this process, made at the first call; NULL: the process is not in its share, or no
// device of the share has turns.
compute_state *compute_state_open(process *own);
// Stands for "no device of the share has turns".
extern char compute_nothing[64];
static inline compute_state *compute_state_of(process *own) {
  compute_state *all = __atomic_load_n(&own->compute, __ATOMIC_ACQUIRE);
  if (UNLIKELY(all == NULL)) all = compute_state_open(own);
  return (void *)all == compute_nothing ? NULL : all;
}

// Does anybody on the device ask for compute? If not, there are no turns.
static inline bool compute_is_governed(const compute_device *at) {
  if (at->has_turns == 0) return false;
  // Turns that could not be opened: launches are refused.
  if (at->leases.contract == NULL) return true;
  return __atomic_load_n(&at->leases.contract->governed, __ATOMIC_RELAXED) != 0;
}

// Is the share suspended? Only where turns could be opened.
static inline bool compute_is_suspended(const compute_device *at) {
  const uint64_t *terms = &at->leases.contract->seats[at->leases.seat].terms;
  return (__atomic_load_n(terms, __ATOMIC_RELAXED) & ALLOT_TERMS_SUSPENDED) != 0;
}

// A suspended share's memory on the device is promised to others: waits until it is resumed.
void compute_await_resume(process *own, int device);

// Does anybody on any device ask for compute? It is what a launch pays when there are no turns.
// NULL: let it through.
static inline compute_state *compute_governed(void) {
  process *own = process_known();
  if (own == NULL) return NULL;
  compute_state *all = compute_state_of(own);
  if (all == NULL) return NULL;
  for (int i = 0; i < all->device_count; i++) {
    if (compute_is_governed(&all->devices[i])) return all;
  }
  return NULL;
}

// Is it not known whether there are turns, for lack of memory? Then no launch may run. After
// compute_governed.
static inline bool compute_is_unknown(void) {
  const process *own = process_known();
  return own != NULL && __atomic_load_n(&own->compute, __ATOMIC_RELAXED) == NULL;
}

// Do launches return when their work has ended, as the environment says now?
bool compute_launches_block(void);

// Takes a place on the device and starts the keeper, once. False: it has none, and no launch may
// run.
bool compute_take_place(compute_device *at);
static inline bool compute_join(compute_device *at) {
  return (LIKELY(__atomic_load_n(&at->place, __ATOMIC_ACQUIRE) == PLACE_TAKEN) &&
          LIKELY(__atomic_load_n(&at->all->keeper.state, __ATOMIC_ACQUIRE) != KEEPER_NONE)) ||
         compute_take_place(at);
}

// The keeper asks the driver nothing between these two, since a context may go, and nobody marks
// anything in the one that may (NULL: not known); `gone`: it did.
void compute_pause(process *own, CUcontext leaving);
void compute_resume(process *own, CUcontext gone);

// ---- interrupts.c ----

// Recorded work runs later, in its graph. Only while something is recorded is the driver asked.
bool capture_may_have(CUstream stream);
static inline bool compute_is_recorded(const compute_state *all, CUstream stream) {
  return UNLIKELY(__atomic_load_n(&all->captures, __ATOMIC_SEQ_CST) != 0) &&
         capture_may_have(stream);
}

// ---- admission.c ----

// A launch that asks to be queued.
typedef struct launch_request {
  uint64_t expected_ns;     // what it is expected to take
  uint64_t now_ns;          // before, and afterwards
  const uint64_t *free_ns;  // when its stream is expected to have done all
} launch_request;

// May a launch stand in a batch that is open? That batch is counted, and stays open: its stream's
// lock is held.
bool admission_join(compute_device *at, const launch_request *launch);
// May it begin another batch now? It is counted then.
bool admission_enter(compute_device *at, const launch_request *launch);
// Waits until it may, without its stream's lock. False: there are no turns any more; it is not
// counted.
bool admission_wait(compute_device *at, launch_request *launch);
// Something counted and nothing of it is under way any more.
void admission_leave(compute_device *at);
// So much of what was let in has ended.
void admission_end(compute_device *at, uint64_t expected_ns);
// A launch that was let in was refused by the driver: it takes up nothing.
void admission_undo(compute_device *at, uint64_t expected_ns);
// GPU time that is not charged yet: no launch is let in on it before the keeper has charged it.
void admission_spend(compute_device *at, uint64_t used_ns);
// What is expected of the work under way.
uint64_t admission_queued_ns(const compute_device *at);
// When the GPU will have done all of it.
uint64_t admission_dry_ns(const compute_device *at);
// That is between these, as has been seen. Returns by how much it is earlier.
uint64_t admission_correct_dry(compute_device *at, uint64_t least_ns, uint64_t most_ns);
// Takes over what an operation on the lease told. With the lease_lock held.
void admission_update(compute_device *at, const allot_lease *lease, uint64_t root);
// The lease was gained: with the lease_lock held, which is let go of while memory is moved.
void admission_gained(compute_device *at, const allot_lease *lease, uint64_t now);
// The root, if the newest decision is this process's own; else 0.
uint64_t admission_root(const compute_device *at);
void admission_wake(const compute_device *at);

// ---- keeper.c ----

// Starts the keeper if it is not there. False: it cannot be.
bool keeper_start(compute_state *all);
// It may be asleep for long.
void keeper_wake(compute_state *all);
// The program works on in its exit handlers, without a keeper. A launch takes its turn and ends it
// in the calling thread, which waits for the work meanwhile; false: it goes on without, and is
// charged when the place is freed.
bool keeper_begin_late(compute_device *at);
void keeper_end_late(compute_device *at, CUstream stream, bool launched);
static inline bool keeper_is_stopped(const compute_state *all) {
  return __atomic_load_n(&all->keeper.state, __ATOMIC_ACQUIRE) == KEEPER_STOPPED;
}

// ---- accounts.c: the share's figures ----

void account_gpu(compute_device *at, uint64_t used_ns);
void account_copy(compute_device *at, uint64_t used_ns);
void account_launches(compute_device *at, uint64_t launches);
void account_throttled(compute_device *at);
void account_held(compute_device *at, uint64_t held_ns);
void account_wait(compute_device *at, uint64_t waited_ns);

#endif
