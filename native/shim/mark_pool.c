// SPDX-License-Identifier: Apache-2.0
// Marks: where they come from, how they are set in a stream, and where they go.
#include "compute.h"
#include "driver.h"

mark *mark_take_locked(mark_store *store, mark_context *from) {
  mark *taken = from->unused;
  if (taken != NULL) {
    from->unused = taken->next;
  } else {
    taken = store->unused_marks;
    if (taken != NULL) {
      store->unused_marks = taken->next;
    } else {
      taken = store_allocate(store, sizeof *taken);
    }
    if (taken == NULL) return NULL;
    *taken = (mark){.owner = from, .next_of_owner = from->marks};
    from->marks = taken;
  }
  taken->references = 1;
  return taken;
}

static mark *take_mark(stream_state *of) {
  mark *taken = of->spare_mark;
  of->spare_mark = NULL;
  if (taken != NULL) return taken;
  mark_store *store = &of->at->all->marks;
  pthread_mutex_lock(&store->lock);
  taken = mark_take_locked(store, of->marks);
  pthread_mutex_unlock(&store->lock);
  return taken;
}

void mark_give_back_locked(mark *used) {
  if (used == NULL || --used->references > 0) return;
  used->next = used->owner->unused;
  used->owner->unused = used;
}

static void give_back(mark_store *store, mark *used) {
  if (used == NULL) return;
  pthread_mutex_lock(&store->lock);
  mark_give_back_locked(used);
  pthread_mutex_unlock(&store->lock);
}

// Events are made in the current context.
static bool make_event(mark *made) {
  CUcontext current = NULL, popped;
  bool is_current =
      DRIVER(USED(cuCtxGetCurrent)(&current)) == CUDA_SUCCESS && current == made->owner->context;
  if (!is_current && DRIVER(USED(cuCtxPushCurrent_v2)(made->owner->context)) != CUDA_SUCCESS) {
    return false;
  }
  bool is_made = DRIVER(USED(cuEventCreate)(&made->event, CU_EVENT_DEFAULT)) == CUDA_SUCCESS;
  if (!is_current) DRIVER(USED(cuCtxPopCurrent_v2)(&popped));
  return is_made;
}

static mark *record_mark(stream_state *of) {
  mark *set = take_mark(of);
  if (set == NULL) return NULL;
  bool has_event = set->event != NULL || make_event(set);
  if (has_event && DRIVER(USED(cuEventRecord)(set->event, of->stream)) == CUDA_SUCCESS) return set;
  give_back(&of->at->all->marks, set);
  return NULL;
}

#define LEAVING_NAP_NS ((long)(20 * MICROSECOND))

// `is_leaving` is read before `stream`: if the context has gone meanwhile, one of them says so.
static mark *set_unless_leaving(stream_state *of, bool *is_leaving) {
  mark_context *owner = of->marks;
  mark *set = NULL;
  __atomic_add_fetch(&owner->marking, 1, __ATOMIC_SEQ_CST);
  *is_leaving = __atomic_load_n(&owner->is_leaving, __ATOMIC_SEQ_CST) != 0;
  if (!*is_leaving && __atomic_load_n(&of->stream, __ATOMIC_SEQ_CST) != NULL) {
    set = record_mark(of);
  }
  __atomic_sub_fetch(&owner->marking, 1, __ATOMIC_SEQ_CST);
  return set;
}

// Most contexts that may end do not: another thread releases one of several holds. Work without
// marks would not be measured.
mark *mark_set(stream_state *of) {
  bool is_leaving;
  mark *set = set_unless_leaving(of, &is_leaving);
  if (LIKELY(!is_leaving)) return set;
  for (uint64_t until_ns = clock_ns() + INSIDE_NS; is_leaving && clock_ns() < until_ns;) {
    nanosleep(&(struct timespec){.tv_nsec = LEAVING_NAP_NS}, NULL);
    set = set_unless_leaving(of, &is_leaving);
  }
  return set;
}
