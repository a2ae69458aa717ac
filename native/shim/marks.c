// SPDX-License-Identifier: Apache-2.0
// Batches: where marks are set in streams, and what is learned when they are passed.
//
// One mark often serves twice, as the end of a batch and as the start of the one that follows it
// while the GPU is still busy. Where the stream may have run dry in between, the next batch has a
// start of its own, so that idle time is not charged.
#include "marks.h"

#include <stddef.h>
#include <string.h>

#include "compute.h"
#include "driver.h"

// Idle gaps up to this length are charged with what surrounds them; behind a longer one, launches
// are marked at once for a while.
#define GAP_NS (8 * MICROSECOND)
#define EAGER_LAUNCHES 16
// A stream that is expected to be busy for so long yet will not run dry before the next mark.
#define MARGIN_NS (5 * MICROSECOND)
// A launch takes the driver less than this, or the driver had to load something first.
#define SUBMIT_NS (50 * MICROSECOND)
#define BASE_NS INT64_C(500000000)
// The driver is asked only so often whether a stream has run dry earlier than expected, and no
// sooner after it was.
#define ASK_NS (100 * MICROSECOND)
// Streams whose work is not due are asked only so often.
#define POLL_NS MILLISECOND
#define NEAR_NS (20 * MICROSECOND)
// A stream without work is looked after for so long yet.
#define RETIRE_NS (20 * MILLISECOND)
// After so long without an end of anything it is asked whether anything has begun. Longer than a
// slice of the driver's time slicing, in which a foreign process may run.
#define OVERDUE_NS (2200 * MICROSECOND)

// ---- batches ----

// Launches of other threads look at it before they have the stream's lock.
static void set_free(stream_state *of, uint64_t free_ns) {
  __atomic_store_n(&of->free_ns, free_ns, __ATOMIC_RELAXED);
}

static batch *take_batch_locked(mark_store *store) {
  batch *taken = store->unused_batches;
  if (taken != NULL) {
    store->unused_batches = taken->next;
  } else {
    taken = store_allocate(store, sizeof *taken);
  }
  if (taken != NULL) memset(taken, 0, offsetof(batch, items));
  return taken;
}

static batch *take_batch(stream_state *of) {
  batch *taken = of->spare_batch;
  of->spare_batch = NULL;
  if (taken != NULL) return taken;
  mark_store *store = &of->at->all->marks;
  pthread_mutex_lock(&store->lock);
  taken = take_batch_locked(store);
  pthread_mutex_unlock(&store->lock);
  return taken;
}

static void take_spares_locked(mark_store *store, stream_state *of) {
  if (of->spare_batch == NULL) of->spare_batch = take_batch_locked(store);
  if (of->spare_mark == NULL) of->spare_mark = mark_take_locked(store, of->marks);
}

static void put_batch_locked(mark_store *store, batch *used) {
  mark_give_back_locked(used->start);
  mark_give_back_locked(used->end);
  used->next = store->unused_batches;
  store->unused_batches = used;
}

// Nothing of the batch is under way any more.
static void leave_batch(compute_device *at, const batch *done) {
  admission_end(at, done->expected_ns);
  if (done->launches == 0) return;
  account_launches(at, done->launches);
  admission_leave(at);
}

// Launches that cannot be measured are charged as they were expected.
static void guess_batch(stream_state *of, batch *lost) {
  compute_device *at = of->at;
  __atomic_add_fetch(&at->uncharged_ns, lost->expected_ns, __ATOMIC_RELAXED);
  leave_batch(at, lost);
  pthread_mutex_lock(&at->all->marks.lock);
  put_batch_locked(&at->all->marks, lost);
  pthread_mutex_unlock(&at->all->marks.lock);
}

static void make_active_locked(stream_state *of) {
  if (of->is_active != 0) return;
  mark_store *store = &of->at->all->marks;
  __atomic_store_n(&of->is_active, 1, __ATOMIC_SEQ_CST);
  of->next_active = store->active[of->at->device];
  store->active[of->at->device] = of;
}

static void push_locked(stream_state *of, batch *closed) {
  closed->next = NULL;
  if (of->last != NULL) {
    of->last->next = closed;
  } else {
    of->first = closed;
  }
  of->last = closed;
  make_active_locked(of);
}

void batch_close(stream_state *of, bool is_late, uint64_t now) {
  batch *closed = of->open;
  if (closed == NULL) return;
  mark_store *store = &of->at->all->marks;
  __atomic_store_n(&of->open, NULL, __ATOMIC_RELAXED);
  mark *end = closed->end = mark_set(of);
  closed->closed_ns = clock_ns();
  closed->due_ns = of->free_ns;
  // The thread may have been kept from setting the mark. Where launches block, all work has ended
  // by then, and nothing but the mark says when.
  closed->is_late = is_late || (!store->launches_block && closed->closed_ns - now > SUBMIT_NS);
  bool is_measured = end != NULL && closed->start != NULL;
  pthread_mutex_lock(&store->lock);
  mark_give_back_locked(of->last_end);
  of->last_end = end;
  if (end != NULL) end->references++;
  if (is_measured) push_locked(of, closed);
  take_spares_locked(store, of);
  pthread_mutex_unlock(&store->lock);
  if (!is_measured) guess_batch(of, closed);
}

// Is the newest batch known to have ended? Expectations alone would charge idle time whenever they
// are too long, and grow from it. While something is recorded nothing may be asked.
static bool has_ended(stream_state *of, uint64_t now) {
  if (of->last_end == NULL) return true;
  if (__atomic_load_n(&of->at->all->captures, __ATOMIC_SEQ_CST) != 0) return true;
  if (now - of->asked_ns < ASK_NS) return false;
  of->asked_ns = now;
  return DRIVER(USED(cuEventQuery)(of->last_end->event)) != CUDA_ERROR_NOT_READY;
}

// It is in the list as soon as it may have a batch: whoever takes it out of there looks at `open`
// afterwards, and one of the two sees the other.
static void set_open(stream_state *of, batch *opened) {
  __atomic_store_n(&of->open, opened, __ATOMIC_SEQ_CST);
  if (LIKELY(__atomic_load_n(&of->is_active, __ATOMIC_SEQ_CST) != 0)) return;
  mark_store *store = &of->at->all->marks;
  pthread_mutex_lock(&store->lock);
  make_active_locked(of);
  pthread_mutex_unlock(&store->lock);
}

static void batch_open(stream_state *of, uint64_t now) {
  // A launch into a stream that was destroyed meanwhile.
  if (__atomic_load_n(&of->stream, __ATOMIC_RELAXED) == NULL) return;
  batch *opened = take_batch(of);
  if (opened == NULL) return;
  bool is_idle = now + MARGIN_NS >= of->free_ns || has_ended(of, now);
  if (is_idle) {
    set_free(of, now);
    of->asked_ns = now;
  }
  opened->opened_ns = now;
  opened->began_idle = is_idle;
  if (is_idle || of->last_end == NULL) {
    opened->start = mark_set(of);
  } else {
    opened->start = of->last_end;
    of->last_end = NULL;
  }
  set_open(of, opened);
}

static uint64_t batch_ns(const stream_state *of) {
  return __atomic_load_n(&of->at->batch_ns, __ATOMIC_RELAXED);
}

// Such a launch stands alone.
static bool is_long(const stream_state *of, uint64_t expected_ns) {
  return expected_ns >= batch_ns(of) / 3 * 2;
}

bool batch_prepare(stream_state *of, const batch_launch *launch) {
  uint64_t now = launch->began_ns;
  uint64_t dry = of->free_ns > of->last_ns ? of->free_ns : of->last_ns;
  uint64_t gap = now > dry ? now - dry : 0;
  // A program that waits for each burst has its gaps marked when it waits.
  bool is_settled = __atomic_load_n(&of->is_settled, __ATOMIC_RELAXED) != 0;
  if (gap > GAP_NS && !is_settled && of->last_ns != 0) of->eager = EAGER_LAUNCHES;
  if (of->open == NULL) return false;
  if (LIKELY(!launch->alone && gap <= GAP_NS && !is_long(of, launch->expected_ns))) {
    return of->open->launches != 0;
  }
  batch_close(of, gap > GAP_NS, now);
  return false;
}

void batch_before(stream_state *of, const batch_launch *launch) {
  if (of->open == NULL) batch_open(of, launch->began_ns);
}

static void abandon_batch(stream_state *of) {
  mark_store *store = &of->at->all->marks;
  batch *empty = of->open;
  __atomic_store_n(&of->open, NULL, __ATOMIC_RELAXED);
  if (of->last_end == NULL) {
    of->last_end = empty->start;
    empty->start = NULL;
  }
  pthread_mutex_lock(&store->lock);
  put_batch_locked(store, empty);
  pthread_mutex_unlock(&store->lock);
}

// Marks that other threads cannot set, that would hold up other streams, or that would come long
// after the work are set at once.
static bool must_mark_at_once(const stream_state *of) {
  if (of->at->all->marks.launches_block) return true;
  if ((uintptr_t)of->stream == 2) return true;
  return (uintptr_t)of->stream == 1 && __atomic_load_n(&of->marks->streams, __ATOMIC_RELAXED) > 1;
}

// The driver refused it. Others that waited meanwhile are owed that time: a program whose launches
// fail again and again would else stay furthest behind, and keep the device idle.
static void refuse(stream_state *of, const batch_launch *launch) {
  compute_device *at = of->at;
  admission_undo(at, launch->expected_ns);
  if (launch->is_counted && __atomic_load_n(&at->is_contended, __ATOMIC_RELAXED) != 0) {
    admission_spend(at, clock_ns() - launch->began_ns);
  }
  if (launch->is_counted) admission_leave(at);
  if (of->open != NULL && of->open->launches == 0) abandon_batch(of);
}

// There was no memory for a batch, or the stream is being destroyed.
static void guess_launch(const stream_state *of, const batch_launch *launch) {
  __atomic_add_fetch(&of->at->uncharged_ns, launch->expected_ns, __ATOMIC_RELAXED);
  admission_end(of->at, launch->expected_ns);
  account_launches(of->at, 1);
  if (launch->is_counted) admission_leave(of->at);
}

// The batch is counted with its first launch, and the others are not.
static void add_launch(batch *open, const batch_launch *launch, compute_device *at) {
  if (open->launches++ != 0 && launch->is_counted) admission_leave(at);
  open->expected_ns += launch->expected_ns;
  if (open->item_count != 0 && open->items[open->item_count - 1].what == launch->what) return;
  open->items[open->item_count++] =
      (batch_item){.what = launch->what, .expected_ns = launch->expected_ns};
}

void batch_after(stream_state *of, const batch_launch *launch, bool launched) {
  batch *open = of->open;
  if (UNLIKELY(!launched)) {
    refuse(of, launch);
    return;
  }
  if (UNLIKELY(open == NULL)) {
    guess_launch(of, launch);
    return;
  }
  uint64_t before_ns = launch->began_ns;
  uint64_t start = of->free_ns > before_ns ? of->free_ns : before_ns;
  set_free(of, start + launch->expected_ns);
  of->last_ns = before_ns;
  if (__atomic_load_n(&of->is_settled, __ATOMIC_RELAXED) != 0) {
    __atomic_store_n(&of->is_settled, 0, __ATOMIC_RELAXED);
  }
  add_launch(open, launch, of->at);
  if (open->launches == 1 && open->began_idle && !of->at->all->marks.launches_block) {
    uint64_t took_ns = clock_ns() - before_ns;
    if (took_ns > SUBMIT_NS) open->submit_ns = took_ns;
  }
  bool is_eager = of->eager > 0;
  if (is_eager) of->eager--;
  if (launch->alone || is_eager || open->launches == BATCH_LAUNCHES ||
      open->expected_ns >= batch_ns(of) || must_mark_at_once(of) ||
      __atomic_load_n(&of->at->all->captures, __ATOMIC_SEQ_CST) != 0) {
    batch_close(of, false, clock_ns());
  }
}

void batch_interrupt(stream_state *of) {
  if (of->open != NULL) {
    uint64_t now = clock_ns();
    batch_close(of, now > of->free_ns, now);
  }
  set_free(of, 0);
}

// ---- copies: batches without launches ----

batch *copy_before(stream_state *of) {
  batch_interrupt(of);
  batch *copied = take_batch(of);
  if (copied != NULL) copied->start = mark_set(of);
  return copied;
}

void copy_after(stream_state *of, batch *copied, bool is_ours) {
  if (copied == NULL) return;
  if (is_ours) copied->end = mark_set(of);
  if (copied->start == NULL || copied->end == NULL) {
    guess_batch(of, copied);
    return;
  }
  mark_store *store = &of->at->all->marks;
  pthread_mutex_lock(&store->lock);
  push_locked(of, copied);
  take_spares_locked(store, of);
  pthread_mutex_unlock(&store->lock);
}

// ---- taking in what has ended ----

static uint64_t elapsed_ns(const mark *from, const mark *to, bool *told) {
  float milliseconds = 0;
  *told = DRIVER(USED(cuEventElapsedTime)(&milliseconds, from->event, to->event)) == CUDA_SUCCESS;
  return milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
}

// Where the batch begins on the context's time; renews the base, since times from it are told with
// 24 bits.
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
  int64_t position = marks->base_ns + (told ? (int64_t)((double)milliseconds * 1e6) : 0);
  if (position - marks->base_ns > BASE_NS) {
    mark *old = marks->base;
    marks->base = of->start;
    of->start->references++;
    marks->base_ns = position;
    mark_give_back_locked(old);
  }
  return position;
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

// Its events cannot be queried any more: its work ran from its launch until now, at most.
static void measure_lost(compute_device *at, const batch *lost) {
  if (lost->launches == 0) return;
  admission_spend(at, timeline_add(&at->covered, (int64_t)lost->opened_ns, (int64_t)clock_ns()));
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
  int64_t from = position_of(of->marks, done);
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
  __atomic_add_fetch(&at->uncharged_ns, added, __ATOMIC_RELAXED);
  if (is_exact) learn(at, done, added);
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
  CUresult result = DRIVER(USED(cuEventQuery)(oldest->end->event));
  if (result == CUDA_ERROR_NOT_READY) return false;
  // After a fault of the program the driver has only that error for every call.
  if (result != CUDA_SUCCESS || !measure(at, of, oldest)) measure_lost(at, oldest);
  mark_store *store = &at->all->marks;
  pthread_mutex_lock(&store->lock);
  of->first = oldest->next;
  if (of->first == NULL) of->last = NULL;
  if (oldest->launches == 1) estimate_settle(oldest->items[0].what);
  leave_batch(at, oldest);
  put_batch_locked(store, oldest);
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
      make_active_locked(seen);
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
    if (of->open != NULL && is_due && !must_mark_at_once(of)) {
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
    leave_batch(at, dropped);
    if (dropped->launches == 1) estimate_settle(dropped->items[0].what);
    // Its events are gone with the context.
    dropped->start = dropped->end = NULL;
    put_batch_locked(store, dropped);
  }
  of->last = NULL;
  of->last_end = of->spare_mark = NULL;
}
