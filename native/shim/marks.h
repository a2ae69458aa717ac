// SPDX-License-Identifier: Apache-2.0
// Measuring: events around batches of launches in each stream, and what they tell.
//
// A stream's lock is held from before a launch until after it, so that marks stand where they
// belong when several threads use the stream; the driver takes the launches of a stream one at a
// time anyway.
#ifndef ALLOTMENT_SHIM_MARKS_H
#define ALLOTMENT_SHIM_MARKS_H

#include <pthread.h>

#include "cuda_abi.h"
#include "estimates.h"
#include "shim.h"

struct compute_device;
struct compute_state;

#define BATCH_LAUNCHES 64
// A launch that is inside the driver for so long waits there: for a full queue, for a module to be
// loaded, or for its own end (CUDA_LAUNCH_BLOCKING). It has its stream's lock, and may wait for
// what another thread does next: no other thread waits longer for that lock.
#define INSIDE_NS UINT64_C(20000000)
// A stream that is expected to be busy for so long yet will not run dry before the next mark.
#define MARGIN_NS UINT64_C(5000)

// ---- which time was covered (timeline.c) ----

#define TIMELINE_PIECES 1024

typedef struct timeline {
  int count;
  struct {
    int64_t from, to;
  } pieces[TIMELINE_PIECES];  // disjoint, in order
} timeline;

// How much of the interval was not covered yet; it is then.
uint64_t timeline_add(timeline *covered, int64_t from, int64_t to);

// ---- events ----

// Marks and their batches belong to a context, and go with it.
typedef struct mark_context {
  struct mark_context *next;
  CUcontext context;
  struct mark *marks;  // all of them
  struct mark *unused;
  struct mark *base;    // times are told from here
  int64_t base_ns;      // on the clock of this machine, about
  uint32_t streams;     // that were seen
  uint32_t joined;      // of them
  uint32_t is_leaving;  // the driver may be ending it: nothing is marked
  uint32_t marking;     // threads that are setting marks
} mark_context;

typedef struct mark {
  struct mark *next;  // unused
  struct mark *next_of_owner;
  mark_context *owner;
  CUevent event;
  uint32_t references;
} mark;

// Launches of the same in a row.
typedef struct batch_item {
  estimate *what;
  uint64_t expected_ns;  // of one
} batch_item;

typedef struct batch {
  struct batch *next;
  mark *start, *end;
  uint64_t opened_ns, closed_ns;
  uint64_t due_ns;      // when it is expected to end
  uint64_t submit_ns;   // between the mark and the launch, with nothing to run meanwhile
  uint64_t unready_ns;  // when its end was last asked for, and not passed
  uint64_t seen_ns;     // when it was seen to run for long; 0: it was not
  uint8_t is_late;      // its end was marked after the work may have ended
  uint8_t began_idle;
  uint8_t has_not_begun;  // when it was asked for last
  // What each launch changes.
  _Alignas(64) uint64_t expected_ns;  // all of it
  uint32_t launches;                  // 0: a copy. Else it is counted as queued until it has ended
  uint32_t item_count;
  batch_item items[BATCH_LAUNCHES];
} batch;

// ---- streams ----

// In the order in which a launch needs it: a launch into an open batch touches the first two lines
// of the cache.
typedef struct stream_state {
  struct stream_state *next;  // in its bucket
  // The three that tell which one it is; `stream` NULL: none.
  CUstream stream;
  CUcontext context;
  const void *thread;  // of a per-thread stream
  struct compute_device *at;
  mark_context *marks;
  batch *open;
  uint64_t free_ns;  // when the stream is expected to have done all

  pthread_mutex_t lock;  // by process_lock: the driver is called under it
  uint64_t last_ns;      // the newest launch
  uint32_t eager;        // so many launches are marked at once, since there are gaps between them
  uint32_t is_settled;   // the program waited for it since the newest launch
  // For the next batch, and for the next mark: taken when the store's lock is held anyway, and not
  // on the way of a launch.
  batch *spare_batch;
  mark *spare_mark;
  mark *last_end;     // of the newest batch, unless that is open: may serve as the next one's start
  uint64_t asked_ns;  // when the driver was last asked whether it is dry
  uint32_t is_captured;
  uint32_t is_joined;  // what it does, the legacy stream waits for, and the other way round

  // Under the store's lock.
  uint32_t is_active;  // in the device's list; read without the lock by who opens a batch
  struct stream_state *next_active;
  batch *first, *last;  // closed, oldest first
  uint64_t polled_ns;
  uint64_t looked_ns;  // when it was last asked whether work that ran for long has begun
} stream_state;

#define STREAM_BUCKETS 1024

typedef struct mark_store {
  // Lists and free places. Never held while the driver is called.
  pthread_mutex_t lock;
  stream_state *buckets[STREAM_BUCKETS];
  stream_state *active[16];  // by device: they have batches, or had some a moment ago
  stream_state *unused_streams;
  batch *unused_batches;
  mark *unused_marks;  // of contexts that are gone
  mark_context *contexts, *unused_contexts;
  char *chunk;
  size_t chunk_left;
  bool launches_block;  // they return when their work has ended
} mark_store;

// ---- streams.c's companions (stream_table.c) ----

// The stream by what a launch names it; NULL: not known (and not made), or of no device that takes
// turns, or the driver does not know it.
stream_state *stream_state_of(struct compute_state *all, CUstream stream, bool make);
// Is it a stream of a device that takes turns?
bool stream_takes_turns(struct compute_state *all, CUstream stream);
// It is about to be destroyed; what is under way in it is still measured, and nothing is marked in
// it any more.
void stream_state_forget(struct compute_state *all, CUstream stream);
// A context may be about to go: nothing is marked in it until it is said whether it did.
void stream_states_leave_context(struct compute_state *all, CUcontext context);
// `gone`: that context and everything in it, or NULL: it is still there. With the marks_lock held
// of every device.
void stream_states_left_context(struct compute_state *all, CUcontext gone);
// Memory that is never given back; with the store's lock held.
void *store_allocate(mark_store *store, size_t bytes);

static inline bool stream_state_is_default(const stream_state *of) {
  return (uintptr_t)of->stream <= 2;
}

// ---- marks (mark_pool.c) ----

// With the store's lock held. NULL: there is no memory for one.
mark *mark_take_locked(mark_store *store, mark_context *from);
// NULL does no harm.
void mark_give_back_locked(mark *used);
// Sets one in the stream, with the stream's lock held. NULL: it cannot be set, and nothing of a
// stream or context that goes was touched.
mark *mark_set(stream_state *of);

// ---- batches; with the stream's lock held ----

// What a launch is for the batches of its stream.
typedef struct batch_launch {
  estimate *what;
  uint64_t expected_ns;
  uint64_t began_ns;
  bool alone;       // in a batch of its own
  bool is_counted;  // as queued by itself, until its batch is
} batch_launch;

// Such a launch comes next: ends the batch that is open if it cannot stand in there. Is there one
// that it may join?
bool batch_prepare(stream_state *of, const batch_launch *launch);
// It is admitted, and goes into the batch that is open, or into another one.
void batch_before(stream_state *of, const batch_launch *launch);
// It is in the stream (`launched`), or the driver refused it.
void batch_after(stream_state *of, const batch_launch *launch, bool launched);
// Ends the batch that is open, if one is.
void batch_close(stream_state *of, bool is_late, uint64_t now);
// What follows in the stream does not directly follow the last batch.
void batch_interrupt(stream_state *of);
// A copy's marks, around the call.
batch *copy_before(stream_state *of);
// Without the lock (`is_ours` false) it cannot be measured.
void copy_after(stream_state *of, batch *copied, bool is_ours);

// Ends the open batches of the current context's streams: the program is about to wait.
void marks_settle(struct compute_state *all);
void marks_settle_all(struct compute_state *all);  // of all contexts
void marks_settle_stream(struct compute_state *all, CUstream stream);

// All streams of the context (NULL: the current one) are about to wait.
void marks_interrupt_all(struct compute_state *all, CUcontext context);
// Others wait for what comes next in this stream (`of` NULL: not known) without a call of their
// own: those that the legacy stream joins wait for that, and it for them. None of their batches
// goes on.
void marks_interrupt_joined(struct compute_state *all, const stream_state *of, CUstream stream);

// Nothing of the batch is under way any more.
void batch_leave(struct compute_device *at, const batch *done);
// With the store's lock held.
void batch_give_back_locked(mark_store *store, batch *used);
void stream_state_activate_locked(stream_state *of);
// Marks that other threads cannot set, that would hold up other streams, or that would come long
// after the work are set at once.
bool stream_state_marks_at_once(const stream_state *of);

// ---- for the keeper (collect.c); with the device's marks_lock held ----

// Takes in what has ended. Returns how much of the rest has begun (expected nanoseconds).
uint64_t marks_collect(struct compute_device *at, uint64_t now);
// Ends open batches whose work may have ended.
void marks_end_tails(struct compute_device *at, uint64_t now);
// Is anything to be taken in later?
bool marks_remain(struct compute_device *at);
// After these: the calling thread has a context current while it asks.
void marks_leave_context(void);
// A stream that is gone needs none of what it kept. With the store's lock held.
void stream_state_strip_locked(stream_state *gone);
// The same, without batches: its place is free. With the store's lock held.
void stream_state_unused_locked(stream_state *gone);
// Nothing of it is measured any more. With the store's lock held.
void batches_drop(struct compute_device *at, stream_state *of);

#endif
