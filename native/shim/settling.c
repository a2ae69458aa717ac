// SPDX-License-Identifier: Apache-2.0
// Programs that are about to wait: where their work ends is marked before they do.
#include "compute.h"
#include "driver.h"
#include "streams.h"

#define SETTLED_STREAMS 64

// Default streams have names in their own context alone, and per-thread ones in their thread.
static bool may_settle(const stream_state *of, CUcontext context, bool of_all) {
  if (__atomic_load_n(&of->open, __ATOMIC_RELAXED) == NULL) return false;
  if (of->context != context && (!of_all || stream_state_is_default(of))) return false;
  return (uintptr_t)of->stream != 2 || of->thread == (const void *)&driver_inside;
}

// Without the lock another thread is launching into the stream, and ends the batch later.
static bool settle_one(stream_state *of, uint64_t patience_ns) {
  if (!process_lock_within(&of->lock, patience_ns)) return false;
  if (of->open != NULL) {
    uint64_t now = clock_ns();
    batch_close(of, now > of->free_ns, now);
  }
  process_unlock(&of->lock);
  return true;
}

// Returns of how many streams. Of all: the keeper is waited for, which may be setting a mark.
static int settle_some(compute_state *all, bool of_all) {
  CUcontext context = NULL;
  DRIVER(USED(cuCtxGetCurrent)(&context));
  stream_state *found[SETTLED_STREAMS];
  int count = 0, settled = 0;
  pthread_mutex_lock(&all->marks.lock);
  for (int device = 0; device < all->device_count; device++) {
    for (stream_state *seen = all->marks.active[device]; seen != NULL; seen = seen->next_active) {
      __atomic_store_n(&seen->is_settled, 1, __ATOMIC_RELAXED);
      if (count < SETTLED_STREAMS && may_settle(seen, context, of_all)) found[count++] = seen;
    }
  }
  pthread_mutex_unlock(&all->marks.lock);
  for (int i = 0; i < count; i++) settled += settle_one(found[i], of_all ? INSIDE_NS : 0);
  return settled;
}

void marks_settle(compute_state *all) {
  settle_some(all, false);
}

void marks_settle_all(compute_state *all) {
  while (settle_some(all, true) == SETTLED_STREAMS) continue;
}

void marks_settle_stream(compute_state *all, CUstream stream) {
  stream_state *of = stream_state_of(all, stream, false);
  if (of == NULL) return;
  if (__atomic_load_n(&of->open, __ATOMIC_RELAXED) != NULL) settle_one(of, INSIDE_NS);
  __atomic_store_n(&of->is_settled, 1, __ATOMIC_RELAXED);
}

// ---- streams that wait without a call of their own ----

typedef enum meant_streams { EVERY, THE_LEGACY, THE_JOINED } meant_streams;

static bool is_meant(const stream_state *of, meant_streams meant) {
  if (meant == EVERY) return true;
  if (meant == THE_LEGACY) return (uintptr_t)of->stream == 1;
  return __atomic_load_n(&of->is_joined, __ATOMIC_RELAXED) != 0;
}

// Other threads' per-thread streams are marked at each launch, and only here forgotten to be busy.
static void interrupt_one(stream_state *of, CUcontext context) {
  if (!process_lock_within(&of->lock, 0)) return;
  bool is_ours = (uintptr_t)of->stream != 2 || of->thread == (const void *)&driver_inside;
  if (of->context == context && (is_ours || of->open == NULL)) batch_interrupt(of);
  process_unlock(&of->lock);
}

static void interrupt_some(compute_state *all, CUcontext context, meant_streams meant) {
  if (context == NULL) DRIVER(USED(cuCtxGetCurrent)(&context));
  stream_state *found[SETTLED_STREAMS];
  int count = 0;
  pthread_mutex_lock(&all->marks.lock);
  for (int device = 0; device < all->device_count; device++) {
    for (stream_state *seen = all->marks.active[device]; seen != NULL; seen = seen->next_active) {
      if (seen->context != context || !is_meant(seen, meant)) continue;
      if (count < SETTLED_STREAMS) found[count++] = seen;
    }
  }
  pthread_mutex_unlock(&all->marks.lock);
  for (int i = 0; i < count; i++) interrupt_one(found[i], context);
}

void marks_interrupt_all(compute_state *all, CUcontext context) {
  interrupt_some(all, context, EVERY);
}

void marks_interrupt_joined(compute_state *all, const stream_state *of, CUstream stream) {
  if (stream == NULL || stream == STREAM_LEGACY) {
    interrupt_some(all, NULL, THE_JOINED);
  } else if (of != NULL && is_meant(of, THE_JOINED)) {
    interrupt_some(all, of->context, THE_LEGACY);
  }
}
