// SPDX-License-Identifier: Apache-2.0
// The streams that a program launches into, by the handles it uses for them.
//
// Look-ups take no lock: places are chained once filled, and a reader that meets one which has just
// become another stream's only fails to find what it looks for, and looks again under the lock.
#include <errno.h>
#include <sys/mman.h>

#include "compute.h"
#include "driver.h"
#include "streams.h"

#define CHUNK_BYTES ((size_t)64 << 10)

void *store_allocate(mark_store *store, size_t bytes) {
  bytes = (bytes + 63) & ~(size_t)63;
  if (bytes > store->chunk_left) {
    void *chunk =
        mmap(NULL, CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (chunk == MAP_FAILED) return NULL;
    store->chunk = chunk;
    store->chunk_left = CHUNK_BYTES;
  }
  void *allocated = store->chunk;
  store->chunk += bytes;
  store->chunk_left -= bytes;
  return allocated;
}

typedef struct stream_name {
  CUstream stream;
  CUcontext context;  // of default streams
  const void *thread;
} stream_name;

static bool name_of(CUstream stream, stream_name *name) {
  *name = (stream_name){.stream = stream == NULL ? STREAM_LEGACY : stream};
  if (name->stream != STREAM_LEGACY && name->stream != STREAM_PER_THREAD) return true;
  if (name->stream == STREAM_PER_THREAD) name->thread = &driver_inside;
  return DRIVER(USED(cuCtxGetCurrent)(&name->context)) == CUDA_SUCCESS && name->context != NULL;
}

static size_t bucket_of(const stream_name *name) {
  uint64_t hash = (uint64_t)(uintptr_t)name->stream ^ (uint64_t)(uintptr_t)name->context << 3 ^
                  (uint64_t)(uintptr_t)name->thread << 7;
  return (size_t)((hash * UINT64_C(0x9e3779b97f4a7c15)) >> 54) % STREAM_BUCKETS;
}

static bool is_named(const stream_state *place, const stream_name *name) {
  if (__atomic_load_n(&place->stream, __ATOMIC_ACQUIRE) != name->stream) return false;
  return name->context == NULL ||
         (__atomic_load_n(&place->context, __ATOMIC_RELAXED) == name->context &&
          __atomic_load_n(&place->thread, __ATOMIC_RELAXED) == name->thread);
}

static stream_state *find(mark_store *store, const stream_name *name, size_t bucket) {
  stream_state *place = __atomic_load_n(&store->buckets[bucket], __ATOMIC_ACQUIRE);
  while (place != NULL && !is_named(place, name)) {
    place = __atomic_load_n(&place->next, __ATOMIC_ACQUIRE);
  }
  return place;
}

static mark_context *marks_of_context(mark_store *store, CUcontext context) {
  mark_context *found = store->contexts;
  while (found != NULL && found->context != context) found = found->next;
  if (found != NULL) return found;
  found = store->unused_contexts;
  if (found != NULL) {
    store->unused_contexts = found->next;
  } else {
    found = store_allocate(store, sizeof *found);
    if (found == NULL) return NULL;
  }
  found->context = context;
  found->next = store->contexts;
  store->contexts = found;
  return found;
}

// Does the legacy stream wait for it?
static bool is_joined(const stream_name *name) {
  unsigned int flags = 0;
  if (name->stream == STREAM_LEGACY) return false;
  if (name->stream == STREAM_PER_THREAD) return true;
  DRIVER(USED(cuStreamGetFlags)(name->stream, &flags));
  return (flags & CU_STREAM_NON_BLOCKING) == 0;
}

static stream_state *insert(compute_state *all, const stream_name *name, const target *of,
                            size_t bucket, bool joined) {
  mark_store *store = &all->marks;
  stream_state *place = store->unused_streams;
  if (place != NULL) {
    store->unused_streams = place->next_active;
  } else {
    place = store_allocate(store, sizeof *place);
  }
  mark_context *marks = place == NULL ? NULL : marks_of_context(store, of->context);
  if (marks == NULL) return NULL;
  __atomic_add_fetch(&marks->streams, 1, __ATOMIC_RELAXED);
  if (joined) __atomic_add_fetch(&marks->joined, 1, __ATOMIC_RELAXED);
  __atomic_store_n(&place->is_joined, joined ? 1 : 0, __ATOMIC_RELAXED);
  place->at = &all->devices[of->device];
  place->marks = marks;
  // Unused places have no batches and no marks; late comers may be looking for some.
  __atomic_store_n(&place->free_ns, 0, __ATOMIC_RELAXED);
  place->last_ns = 0;
  place->eager = 0;
  __atomic_store_n(&place->context, of->context, __ATOMIC_RELAXED);
  __atomic_store_n(&place->thread, name->thread, __ATOMIC_RELAXED);
  __atomic_store_n(&place->next, store->buckets[bucket], __ATOMIC_RELEASE);
  __atomic_store_n(&place->stream, name->stream, __ATOMIC_RELEASE);
  __atomic_store_n(&store->buckets[bucket], place, __ATOMIC_RELEASE);
  return place;
}

// The device whose turns the stream's work takes; NULL: there are none, or no such stream.
static compute_device *device_of(compute_state *all, CUstream stream, target *at) {
  if (target_stream(at, stream) != CUDA_SUCCESS || at->context == NULL || at->device < 0) {
    return NULL;
  }
  compute_device *device = &all->devices[at->device];
  return device->has_turns == 0 ? NULL : device;
}

bool stream_takes_turns(compute_state *all, CUstream stream) {
  target at;
  return device_of(all, stream, &at) != NULL;
}

static stream_state *make(compute_state *all, CUstream stream, const stream_name *name,
                          size_t bucket) {
  target at;
  compute_device *device = device_of(all, stream, &at);
  if (device == NULL) return NULL;
  bool joined = is_joined(name);
  pthread_mutex_lock(&all->marks.lock);
  stream_state *made = find(&all->marks, name, bucket);
  if (made == NULL) made = insert(all, name, &at, bucket, joined);
  pthread_mutex_unlock(&all->marks.lock);
  return made;
}

stream_state *stream_state_of(compute_state *all, CUstream stream, bool may_make) {
  stream_name name;
  if (!name_of(stream, &name)) return NULL;
  size_t bucket = bucket_of(&name);
  stream_state *found = find(&all->marks, &name, bucket);
  if (LIKELY(found != NULL) || !may_make) return found;
  return make(all, stream, &name, bucket);
}

// ---- the end of streams; with the store's lock held ----

// What stands in the middle of a chain is taken out of it, and used again when its batches have
// been taken in.
static void unlink_place(mark_store *store, stream_state *gone) {
  stream_name name = {.stream = gone->stream, .thread = gone->thread};
  if (stream_state_is_default(gone)) name.context = gone->context;
  stream_state **link = &store->buckets[bucket_of(&name)];
  while (*link != NULL && *link != gone) link = &(*link)->next;
  if (*link != gone) return;
  __atomic_store_n(link, gone->next, __ATOMIC_RELEASE);
  __atomic_store_n(&gone->stream, NULL, __ATOMIC_SEQ_CST);
  stream_state_strip_locked(gone);
  __atomic_sub_fetch(&gone->marks->streams, 1, __ATOMIC_RELAXED);
  __atomic_sub_fetch(&gone->marks->joined, gone->is_joined, __ATOMIC_RELAXED);
  if (__atomic_exchange_n(&gone->is_captured, 0, __ATOMIC_RELAXED) != 0) {
    __atomic_sub_fetch(&gone->at->all->captures, 1, __ATOMIC_SEQ_CST);
  }
  if (gone->is_active == 0) stream_state_unused_locked(gone);
}

static void forget_locked(compute_state *all, stream_state *gone) {
  uint64_t now = clock_ns();
  batch_close(gone, now > gone->free_ns, now);
  pthread_mutex_lock(&all->marks.lock);
  unlink_place(&all->marks, gone);
  pthread_mutex_unlock(&all->marks.lock);
}

// All under the stream's lock: whoever else ends its batch does so before, or not at all.
void stream_state_forget(compute_state *all, CUstream stream) {
  stream_name name;
  if ((uintptr_t)stream <= 2 || !name_of(stream, &name)) return;
  pthread_mutex_lock(&all->marks.lock);
  stream_state *gone = find(&all->marks, &name, bucket_of(&name));
  pthread_mutex_unlock(&all->marks.lock);
  if (gone == NULL) return;
  process_lock(&gone->lock);
  if (is_named(gone, &name)) forget_locked(all, gone);
  process_unlock(&gone->lock);
}

// ---- the end of contexts ----

// A driver whose queue is full takes no mark until there is room, which may never be.
#define MARKING_NAPS 10000

void stream_states_leave_context(compute_state *all, CUcontext context) {
  mark_store *store = &all->marks;
  pthread_mutex_lock(&store->lock);
  mark_context *leaving = store->contexts;
  while (leaving != NULL && leaving->context != context) leaving = leaving->next;
  if (leaving != NULL) __atomic_store_n(&leaving->is_leaving, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&store->lock);
  if (leaving == NULL) return;
  for (int naps = 0; naps < MARKING_NAPS; naps++) {
    if (__atomic_load_n(&leaving->marking, __ATOMIC_SEQ_CST) == 0) return;
    struct timespec nap = {.tv_nsec = (long)(20 * MICROSECOND)};
    nanosleep(&nap, NULL);
  }
}

// Its events are gone with it; what they were kept in is used again. `marking` stays: a late comer
// may be counting itself out.
static void put_context(mark_store *store, mark_context *gone) {
  for (mark *each = gone->marks, *next; each != NULL; each = next) {
    next = each->next_of_owner;
    *each = (mark){.next = store->unused_marks};
    store->unused_marks = each;
  }
  gone->context = NULL;
  gone->marks = gone->unused = gone->base = NULL;
  gone->streams = gone->joined = 0;
  gone->next = store->unused_contexts;
  store->unused_contexts = gone;
}

// A thread may be ending the stream's batch right now, under the stream's lock. True: it is gone.
static bool drop_stream(mark_store *store, stream_state *gone, CUcontext context) {
  process_lock(&gone->lock);
  pthread_mutex_lock(&store->lock);
  if (gone->context == context) {
    batches_drop(gone->at, gone);
    unlink_place(store, gone);
  }
  bool is_gone = gone->context != context || gone->stream == NULL;
  pthread_mutex_unlock(&store->lock);
  process_unlock(&gone->lock);
  return is_gone;
}

// Streams that were destroyed before are in no bucket, but may still have batches.
static stream_state *active_of(mark_store *store, int device, CUcontext context) {
  pthread_mutex_lock(&store->lock);
  stream_state *seen = store->active[device];
  while (seen != NULL &&
         (seen->context != context ||
          (seen->first == NULL && __atomic_load_n(&seen->open, __ATOMIC_RELAXED) == NULL))) {
    seen = seen->next_active;
  }
  pthread_mutex_unlock(&store->lock);
  return seen;
}

static stream_state *place_of(mark_store *store, int bucket, CUcontext context) {
  pthread_mutex_lock(&store->lock);
  stream_state *seen = store->buckets[bucket];
  while (seen != NULL && seen->context != context) seen = seen->next;
  pthread_mutex_unlock(&store->lock);
  return seen;
}

static void forget_context(mark_store *store, CUcontext context) {
  stream_state *gone;
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    do {
      gone = active_of(store, device, context);
    } while (gone != NULL && drop_stream(store, gone, context));
  }
  for (int bucket = 0; bucket < STREAM_BUCKETS; bucket++) {
    do {
      gone = place_of(store, bucket, context);
    } while (gone != NULL && drop_stream(store, gone, context));
  }
  pthread_mutex_lock(&store->lock);
  mark_context **link = &store->contexts;
  while (*link != NULL && (*link)->context != context) link = &(*link)->next;
  mark_context *left = *link;
  if (left != NULL) {
    *link = left->next;
    put_context(store, left);
  }
  pthread_mutex_unlock(&store->lock);
}

void stream_states_left_context(compute_state *all, CUcontext gone) {
  mark_store *store = &all->marks;
  if (gone != NULL) forget_context(store, gone);
  pthread_mutex_lock(&store->lock);
  for (mark_context *each = store->contexts; each != NULL; each = each->next) {
    __atomic_store_n(&each->is_leaving, 0, __ATOMIC_SEQ_CST);
  }
  for (mark_context *each = store->unused_contexts; each != NULL; each = each->next) {
    __atomic_store_n(&each->is_leaving, 0, __ATOMIC_SEQ_CST);
  }
  pthread_mutex_unlock(&store->lock);
}
