// SPDX-License-Identifier: Apache-2.0
// Reads the marks that the GPU has passed: charges the work, long work also before its end, learns
// how long launches take, and sees whether anything runs.
#include "compute.h"
#include "driver.h"
#include "marks.h"

// Times from a mark that is older are told too coarsely.
#define BASE_NS INT64_C(500000000)
// What is known of a context's clock may be wrong by so much; and the driver may notice so much
// later that a mark is passed.
#define CLOCK_NS INT64_C(5000)
#define NOTICED_NS INT64_C(50000000)
// Streams whose work is not due are asked only so often.
#define POLL_NS MILLISECOND
#define NEAR_NS (20 * MICROSECOND)
// A stream without work is looked after for so long yet.
#define RETIRE_NS (20 * MILLISECOND)
// After so long without an end of anything it is asked whether anything has begun. Longer than a
// slice of the driver's time slicing, in which a foreign process may run.
#define OVERDUE_NS (2200 * MICROSECOND)
// Work that runs for longer is charged meanwhile, so often.
#define LONG_NS (5 * MILLISECOND)

static uint64_t elapsed_ns(const mark *from, const mark *to, bool *told) {
  float milliseconds = 0;
  *told = DRIVER(USED(cuEventElapsedTime)(&milliseconds, from->event, to->event)) == CUDA_SUCCESS;
  return milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
}

// Where the batch begins on the host's clock; renews the base, since the driver measures times from
// it with 24 bits.
static int64_t position_of(mark_context *marks, const batch *of) {
  if (marks->base == NULL) {
    marks->base = of->start;
    of->start->references++;
    marks->base_ns = (int64_t)of->opened_ns;
    return marks->base_ns;
  }
  bool told;
  float milliseconds = 0;
  told = DRIVER(USED(cuEventElapsedTime)(&milliseconds, marks->base->event, of->start->event)) ==
         CUDA_SUCCESS;
  if (!told) return (int64_t)of->opened_ns;
  int64_t position = marks->base_ns + (int64_t)((double)milliseconds * 1e6);
  if (position - marks->base_ns > BASE_NS) {
    mark *old = marks->base;
    marks->base = of->start;
    of->start->references++;
    marks->base_ns = position;
    mark_give_back_locked(old);
  }
  return position;
}

// The batch began no sooner than its mark was set, its end was not passed when it was asked for in
// vain, and is now. Puts right what is known of the context's clock: its first work may have waited
// for the host, and no two clocks run equally fast. Returns where the batch begins.
static int64_t corrected_position(mark_context *marks, const batch *of, uint64_t took_ns,
                                  int64_t now) {
  int64_t from = position_of(marks, of), to = from + (int64_t)took_ns, late_ns = 0;
  const int64_t opened_ns = of->began_idle != 0 ? (int64_t)of->opened_ns : from;
  if (opened_ns - from > CLOCK_NS) late_ns = opened_ns - from;
  const int64_t unready_ns = (int64_t)of->unready_ns - NOTICED_NS;
  if (unready_ns - to > late_ns) late_ns = unready_ns - to;
  if (to + late_ns > now) late_ns = now - to;
  marks->base_ns += late_ns;
  return from + late_ns;
}

// Of a batch of different launches each is taken to have been as wrong as all of them.
static void learn(compute_device *at, const batch *of, uint64_t took_ns) {
  for (uint32_t i = 0; i < of->item_count; i++) {
    double part = of->expected_ns != 0 ? (double)of->items[i].expected_ns / (double)of->expected_ns
                                       : 1.0 / (double)of->launches;
    estimate_learn(&at->all->estimates, of->items[i].what, (uint64_t)((double)took_ns * part),
                   of->launches == 1);
  }
}

// What is to be charged of measured work: without what was charged while it ran.
static uint64_t unpaid(compute_device *at, uint64_t added_ns) {
  uint64_t paid_ns = added_ns < at->prepaid_ns ? added_ns : at->prepaid_ns;
  at->prepaid_ns -= paid_ns;
  if (paid_ns != 0 && added_ns > __atomic_load_n(&at->longest_ns, __ATOMIC_RELAXED)) {
    __atomic_store_n(&at->longest_ns, added_ns, __ATOMIC_RELAXED);
  }
  return added_ns - paid_ns;
}

// Its events cannot be queried any more: its work ran from its launch until now, at most.
static void measure_lost(compute_device *at, const batch *lost) {
  if (lost->launches == 0) return;
  uint64_t added = timeline_add(&at->covered, (int64_t)lost->opened_ns, (int64_t)clock_ns());
  admission_spend(at, unpaid(at, added));
}

// False: the driver does not tell.
static bool measure(compute_device *at, stream_state *of, const batch *done) {
  bool told;
  uint64_t took = elapsed_ns(done->start, done->end, &told);
  if (!told) return false;
  if (done->launches == 0) {
    account_copy(at, took);
    return true;
  }
  pthread_mutex_lock(&at->all->marks.lock);  // references of marks
  int64_t from = corrected_position(of->marks, done, took, (int64_t)clock_ns());
  pthread_mutex_unlock(&at->all->marks.lock);
  int64_t to = from + (int64_t)took;
  // The launch may also have begun early in the driver's call.
  uint64_t most_ns = took > done->expected_ns ? took - done->expected_ns : 0;
  from += (int64_t)(done->submit_ns < most_ns ? done->submit_ns : most_ns);
  // Had the work ended when its end was marked? Then the time of its end is unknown.
  bool is_exact = done->is_late == 0 || to - from <= (int64_t)done->expected_ns ||
                  to > (int64_t)done->closed_ns + (int64_t)(20 * MICROSECOND);
  if (!is_exact) to = from + (int64_t)done->expected_ns;
  uint64_t added = timeline_add(&at->covered, from, to);
  if (is_exact) learn(at, done, added);
  __atomic_add_fetch(&at->uncharged_ns, unpaid(at, added), __ATOMIC_RELAXED);
  return true;
}

// The keeper's current context is that of the events it asks for. Only while the marks_lock is
// held: no context goes meanwhile.
static __thread CUcontext entered __attribute__((tls_model("initial-exec")));

static void enter_context(CUcontext context) {
  if (entered == context) return;
  entered = DRIVER(USED(cuCtxSetCurrent)(context)) == CUDA_SUCCESS ? context : NULL;
}

void marks_leave_context(void) {
  enter_context(NULL);
}

// Takes in the stream's oldest batch. False: it has not ended.
static bool collect_one(compute_device *at, stream_state *of, batch *oldest) {
  uint64_t asked_ns = clock_ns();
  CUresult result = DRIVER(USED(cuEventQuery)(oldest->end->event));
  if (result == CUDA_ERROR_NOT_READY) {
    oldest->unready_ns = asked_ns;
    return false;
  }
  // After a fault of the program the driver has only that error for every call.
  if (result != CUDA_SUCCESS || !measure(at, of, oldest)) measure_lost(at, oldest);
  mark_store *store = &at->all->marks;
  pthread_mutex_lock(&store->lock);
  of->first = oldest->next;
  if (of->first == NULL) of->last = NULL;
  if (oldest->launches == 1) estimate_settle(oldest->items[0].what);
  batch_leave(at, oldest);
  batch_give_back_locked(store, oldest);
  pthread_mutex_unlock(&store->lock);
  return true;
}

// Work ended sooner than expected: what follows it in the stream will, too.
static void bring_forward(compute_device *at, stream_state *of, uint64_t early_ns) {
  if (!process_trylock(&of->lock)) return;
  __atomic_store_n(&of->free_ns, of->free_ns > early_ns ? of->free_ns - early_ns : 0,
                   __ATOMIC_RELAXED);
  mark_store *store = &at->all->marks;
  pthread_mutex_lock(&store->lock);
  for (batch *each = of->first; each != NULL; each = each->next) {
    each->due_ns = each->due_ns > early_ns ? each->due_ns - early_ns : 0;
  }
  pthread_mutex_unlock(&store->lock);
  process_unlock(&of->lock);
}

// The stream's work that has run for long, if any has. Launches that block are inside the driver
// until their end. With the store's lock held.
static batch *long_work_of(const mark_store *store, const stream_state *of, uint64_t now) {
  batch *runs = of->first;
  if (runs == NULL && store->launches_block) runs = __atomic_load_n(&of->open, __ATOMIC_SEQ_CST);
  bool is_copy = runs != NULL && runs == of->first && runs->launches == 0;
  bool is_long = runs != NULL && !is_copy && now > runs->opened_ns + LONG_NS;
  return is_long && runs->start != NULL ? runs : NULL;
}

// Of all streams together: what is queued in one may have to wait for what runs in another. With
// the store's lock held.
static uint64_t charge_begun(compute_device *at, batch *runs, uint64_t now) {
  if (runs->seen_ns == 0) runs->seen_ns = now;
  uint64_t charged_ns = __atomic_load_n(&at->long_work_ns, __ATOMIC_RELAXED);
  uint64_t from = charged_ns > runs->seen_ns ? charged_ns : runs->seen_ns;
  uint64_t added = now > from ? now - from : 0;
  at->prepaid_ns += added;
  return added;
}

// A kernel may run for hours, or end with its process: until its end neither the neighbours' turns
// nor the share's ceiling and figures would know of it.
static void charge_long_work(compute_device *at, stream_state *of, uint64_t now) {
  mark_store *store = &at->all->marks;
  if (now < of->looked_ns + LONG_NS) return;
  of->looked_ns = now;
  pthread_mutex_lock(&store->lock);
  batch *runs = long_work_of(store, of, now);
  mark *start = runs == NULL ? NULL : runs->start;
  if (start != NULL) start->references++;
  pthread_mutex_unlock(&store->lock);
  if (start == NULL) return;
  enter_context(of->context);
  bool has_begun = DRIVER(USED(cuEventQuery)(start->event)) == CUDA_SUCCESS;
  pthread_mutex_lock(&store->lock);
  bool is_same = long_work_of(store, of, now) == runs && runs->start == start;
  uint64_t added = has_begun && is_same ? charge_begun(at, runs, now) : 0;
  mark_give_back_locked(start);
  pthread_mutex_unlock(&store->lock);
  __atomic_add_fetch(&at->uncharged_ns, added, __ATOMIC_RELAXED);
  if (added != 0) __atomic_store_n(&at->long_work_ns, now, __ATOMIC_RELAXED);
}

static batch *oldest_of(mark_store *store, const stream_state *of) {
  pthread_mutex_lock(&store->lock);
  batch *oldest = of->first;
  pthread_mutex_unlock(&store->lock);
  return oldest;
}

void stream_state_strip_locked(stream_state *gone) {
  mark_give_back_locked(gone->last_end);
  mark_give_back_locked(gone->spare_mark);
  gone->last_end = gone->spare_mark = NULL;
}

void stream_state_unused_locked(stream_state *gone) {
  mark_store *store = &gone->at->all->marks;
  gone->next_active = store->unused_streams;
  store->unused_streams = gone;
}

static bool has_batches(const stream_state *of) {
  return of->first != NULL || __atomic_load_n(&of->open, __ATOMIC_SEQ_CST) != NULL;
}

// Streams that have been without batches for a while leave the list: who launches one kernel after
// the other and waits for each would else come back at each launch.
static void retire_idle(compute_device *at, uint64_t now) {
  mark_store *store = &at->all->marks;
  pthread_mutex_lock(&store->lock);
  stream_state **link = &store->active[at->device];
  while (*link != NULL) {
    stream_state *seen = *link;
    bool is_gone = __atomic_load_n(&seen->stream, __ATOMIC_RELAXED) == NULL;
    if (has_batches(seen) || (!is_gone && now - seen->polled_ns < RETIRE_NS)) {
      link = &seen->next_active;
      continue;
    }
    *link = seen->next_active;
    __atomic_store_n(&seen->is_active, 0, __ATOMIC_SEQ_CST);
    if (has_batches(seen)) {
      stream_state_activate_locked(seen);
    } else if (is_gone) {
      stream_state_unused_locked(seen);
    }
  }
  pthread_mutex_unlock(&store->lock);
}

static stream_state *first_active(compute_device *at) {
  pthread_mutex_lock(&at->all->marks.lock);
  stream_state *first = at->all->marks.active[at->device];
  pthread_mutex_unlock(&at->all->marks.lock);
  return first;
}

// What is queued behind a copy or a wait of the host has not begun: the device is not used.
static void note_running(compute_device *at, bool is_running, bool is_stalled, uint64_t now) {
  if (is_running && __atomic_load_n(&at->is_stalled, __ATOMIC_RELAXED) != 0) {
    __atomic_store_n(&at->progress_ns, now, __ATOMIC_RELAXED);
  }
  __atomic_store_n(&at->is_running, is_running, __ATOMIC_RELAXED);
  __atomic_store_n(&at->is_stalled, is_stalled, __ATOMIC_RELAXED);
}

// May work of the stream run of which nothing is known, as no mark follows it yet? A launch that
// waits inside the driver holds the stream's lock.
static bool may_run_unmarked(stream_state *of, bool is_inside) {
  if (__atomic_load_n(&of->open, __ATOMIC_RELAXED) == NULL) return false;
  if (!is_inside || of->at->all->marks.launches_block) return true;
  if (!process_trylock(&of->lock)) return false;
  process_unlock(&of->lock);
  return true;
}

uint64_t marks_collect(compute_device *at, uint64_t now) {
  mark_store *store = &at->all->marks;
  uint64_t begun = 0;
  uint64_t last = __atomic_load_n(&at->progress_ns, __ATOMIC_RELAXED);
  bool is_overdue = now > last + OVERDUE_NS, is_inside = now > last + INSIDE_NS;
  bool is_running = false, is_open = false;
  bool is_left = is_inside && __atomic_load_n(&at->queued, __ATOMIC_SEQ_CST) != 0;
  bool is_dry = now + NEAR_NS > admission_dry_ns(at);
  for (stream_state *of = first_active(at); of != NULL; of = of->next_active) {
    batch *oldest = oldest_of(store, of);
    if (may_run_unmarked(of, is_inside)) is_open = true;
    if (oldest == NULL && store->launches_block) charge_long_work(at, of, now);
    if (oldest == NULL) continue;
    if (!is_dry && oldest->due_ns > now + NEAR_NS && now - of->polled_ns < POLL_NS) {
      is_left = true;
      if (oldest->launches == 0) continue;
      begun += oldest->expected_ns;
      if (oldest->has_not_begun == 0) is_running = true;  // as far as is known
      continue;
    }
    of->polled_ns = now;
    enter_context(of->context);
    uint64_t early_ns = 0;
    bool any = false;
    while (oldest != NULL) {
      uint64_t due_ns = oldest->due_ns;
      if (!collect_one(at, of, oldest)) break;
      early_ns = due_ns > now ? due_ns - now : 0;
      oldest = oldest_of(store, of);
      any = true;
    }
    if (any) __atomic_store_n(&at->progress_ns, now, __ATOMIC_RELAXED);
    if (early_ns > MARGIN_NS) bring_forward(at, of, early_ns);
    if (oldest != NULL) is_left = true;
    if (oldest == NULL || oldest->launches == 0) continue;
    charge_long_work(at, of, now);
    begun += oldest->expected_ns;
    oldest->has_not_begun = is_overdue && !is_running &&
                            DRIVER(USED(cuEventQuery)(oldest->start->event)) != CUDA_SUCCESS;
    if (is_overdue && oldest->has_not_begun == 0) is_running = true;
  }
  note_running(at, is_running, is_overdue && is_left && !is_running && !is_open, now);
  retire_idle(at, now);
  return begun;
}

bool marks_remain(compute_device *at) {
  mark_store *store = &at->all->marks;
  pthread_mutex_lock(&store->lock);
  const stream_state *of = store->active[at->device];
  while (of != NULL && !has_batches(of)) of = of->next_active;
  pthread_mutex_unlock(&store->lock);
  return of != NULL;
}

void marks_end_tails(compute_device *at, uint64_t now) {
  if (__atomic_load_n(&at->all->captures, __ATOMIC_SEQ_CST) != 0) return;
  for (stream_state *of = first_active(at); of != NULL; of = of->next_active) {
    if (__atomic_load_n(&of->open, __ATOMIC_RELAXED) == NULL) continue;
    if (!process_trylock(&of->lock)) continue;
    bool is_due = of->free_ns < now + 30 * MICROSECOND && of->last_ns + 30 * MICROSECOND < now;
    // The thread that may end its context waits for the keeper.
    if (__atomic_load_n(&of->marks->is_leaving, __ATOMIC_SEQ_CST) != 0) is_due = false;
    if (of->open != NULL && is_due && !stream_state_marks_at_once(of)) {
      enter_context(of->context);
      now = clock_ns();  // each mark takes its time
      // A capture that began meanwhile waits for the stream's lock.
      if (__atomic_load_n(&at->all->captures, __ATOMIC_SEQ_CST) == 0) {
        batch_close(of, now > of->free_ns, now);
      }
    }
    process_unlock(&of->lock);
  }
}

void batches_drop(compute_device *at, stream_state *of) {
  mark_store *store = &at->all->marks;
  batch *dropped = of->open;
  __atomic_store_n(&of->open, NULL, __ATOMIC_RELAXED);
  if (dropped != NULL) {
    dropped->next = of->first;
    of->first = dropped;
  }
  for (const batch *each = of->first; each != NULL; each = each->next) measure_lost(at, each);
  while ((dropped = of->first) != NULL) {
    of->first = dropped->next;
    batch_leave(at, dropped);
    if (dropped->launches == 1) estimate_settle(dropped->items[0].what);
    // Its events are gone with the context.
    dropped->start = dropped->end = NULL;
    batch_give_back_locked(store, dropped);
  }
  of->last = NULL;
  of->last_end = of->spare_mark = NULL;
}
