// SPDX-License-Identifier: Apache-2.0
// Batches: where marks are set in streams. collect.c learns from those that are passed.
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
// A launch takes the driver less than this, or the driver had to load something first.
#define SUBMIT_NS (50 * MICROSECOND)
// The driver is asked only so often whether a stream has run dry earlier than expected, and no
// sooner after it was.
#define ASK_NS (100 * MICROSECOND)

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

void batch_give_back_locked(mark_store *store, batch *used) {
  mark_give_back_locked(used->start);
  mark_give_back_locked(used->end);
  used->next = store->unused_batches;
  store->unused_batches = used;
}

void batch_leave(compute_device *at, const batch *done) {
  admission_end(at, done->expected_ns);
  if (done->launches == 0) return;
  account_launches(at, done->launches);
  admission_leave(at);
}

// Launches that cannot be measured are charged as they were expected.
static void guess_batch(stream_state *of, batch *lost) {
  compute_device *at = of->at;
  __atomic_add_fetch(&at->uncharged_ns, lost->expected_ns, __ATOMIC_RELAXED);
  batch_leave(at, lost);
  pthread_mutex_lock(&at->all->marks.lock);
  batch_give_back_locked(&at->all->marks, lost);
  pthread_mutex_unlock(&at->all->marks.lock);
}

void stream_state_activate_locked(stream_state *of) {
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
  stream_state_activate_locked(of);
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
  stream_state_activate_locked(of);
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
  pthread_mutex_lock(&store->lock);
  if (of->last_end == NULL) {
    of->last_end = empty->start;
    empty->start = NULL;
  }
  batch_give_back_locked(store, empty);
  pthread_mutex_unlock(&store->lock);
}

bool stream_state_marks_at_once(const stream_state *of) {
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
      open->expected_ns >= batch_ns(of) || stream_state_marks_at_once(of) ||
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
