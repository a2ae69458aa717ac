// SPDX-License-Identifier: Apache-2.0
// Putting works behind each other: streams, the legacy stream's barriers, and events' marks.
#include "simulated/cuda/driver.h"

// Waits until the ring has room, and for some more than one work: going to sleep for each of them
// would make every launch of a long burst cost a sleep.
static void make_room(int gpu) {
  uint64_t oldest = allot_work_oldest(&driver.machine, gpu);
  uint64_t enough = oldest + ALLOT_RING_WORKS / 8;
  allot_engine_wait(&driver.machine, ALLOT_POINT(driver.machine.slot, gpu, oldest));
  const allot_ring *ring = allot_ring_of(&driver.machine, driver.machine.slot, gpu);
  // The tail passes the first works only when they are done, and those behind may already be.
  if (allot_load(&ring->tail) < enough) {
    allot_engine_wait(&driver.machine, ALLOT_POINT(driver.machine.slot, gpu, enough));
  }
}

void submit_wait_for_room(const stream *target) {
  int gpu = target->owner->gpu;
  device *own = &driver.devices[gpu];
  while (!allot_work_done(&driver.machine, stream_end(target))) {
    pthread_mutex_lock(&own->submit_lock);
    bool has_room = allot_work_new(&driver.machine, gpu) != NULL;
    pthread_mutex_unlock(&own->submit_lock);
    if (has_room) return;
    make_room(gpu);
  }
}

// The event whose mark is about to be overwritten keeps the time for itself.
static void keep_time(device *own, int gpu, uint64_t number) {
  event **marked = &own->marked[number % ALLOT_RING_WORKS];
  if (*marked == NULL) return;
  uint64_t old = number - ALLOT_RING_WORKS;
  (*marked)->ended_ns =
      allot_work_ended(&driver.machine, ALLOT_POINT(driver.machine.slot, gpu, old));
  *marked = NULL;
}

static void order(allot_work *work, const stream *target, uint64_t number, unsigned wanted) {
  const context *owner = target->owner;
  bool blocking = !target->legacy && !(target->flags & CU_STREAM_NON_BLOCKING);
  work->previous = (uint32_t)(target->last != 0 ? target->last : number);
  work->after = (uint32_t)number;
  unsigned flags = wanted;
  if (blocking) {
    flags |= ALLOT_WORK_BLOCKING;
    if (owner->legacy_last != 0) work->after = (uint32_t)owner->legacy_last;
  } else if (target->legacy) {
    flags |= ALLOT_WORK_LEGACY;
    if (owner->blocking > 0) flags |= ALLOT_WORK_BARRIER;
  }
  // The engine may still look at these of the work whose place this one takes.
  __atomic_store_n(&work->flags, (uint8_t)flags, __ATOMIC_RELAXED);
  __atomic_store_n(&work->context, (uint32_t)owner->head.id, __ATOMIC_RELAXED);
}

static void mark_event(device *own, event *marked, allot_point point) {
  uint64_t number = ALLOT_POINT_NUMBER(point);
  event **before = &own->marked[ALLOT_POINT_NUMBER(marked->point) % ALLOT_RING_WORKS];
  if (marked->point != 0 && *before == marked) *before = NULL;
  marked->point = point;
  marked->ended_ns = 0;
  marked->recorded = true;
  own->marked[number % ALLOT_RING_WORKS] = marked;
}

allot_point submit(stream *target, const submission *wanted) {
  int gpu = target->owner->gpu;
  device *own = &driver.devices[gpu];
  if (__builtin_expect(driver_is_locked(), 0)) allot_checkpoint_wait(&driver.machine);
  uint64_t now = allot_now_ns();
  pthread_mutex_lock(&own->submit_lock);
  allot_work *work;
  while ((work = allot_work_new(&driver.machine, gpu)) == NULL) {
    pthread_mutex_unlock(&own->submit_lock);
    make_room(gpu);
    now = allot_now_ns();
    pthread_mutex_lock(&own->submit_lock);
  }
  const allot_ring *ring = allot_ring_of(&driver.machine, driver.machine.slot, gpu);
  uint64_t number = allot_load(&ring->head) + 1;
  keep_time(own, gpu, number);
  order(work, target, number, wanted->flags);
  allot_store(&work->progress, ALLOT_PROGRESS(ALLOT_WAITING, wanted->duration_ns));
  work->submitted_ns = now;
  work->kind = (uint8_t)wanted->kind;
  work->engine = (uint8_t)wanted->engine;
  work->priority = (int8_t)target->priority;
  work->target = wanted->target;
  work->sms = wanted->sms;
  allot_store(&work->next, 0u);
  work->duration_ns = wanted->duration_ns;
  work->bytes = wanted->bytes;
  allot_point point = allot_work_submit(&driver.machine, gpu);
  __atomic_store_n(&target->last, number, __ATOMIC_RELAXED);
  if (target->legacy) target->owner->legacy_last = number;
  if (wanted->marked != NULL) mark_event(own, wanted->marked, point);
  pthread_mutex_unlock(&own->submit_lock);
  return point;
}

void submit_forget_event(event *dying) {
  if (dying->point == 0) return;
  int gpu = ALLOT_POINT_GPU(dying->point);
  device *own = &driver.devices[gpu];
  pthread_mutex_lock(&own->submit_lock);
  event **marked = &own->marked[ALLOT_POINT_NUMBER(dying->point) % ALLOT_RING_WORKS];
  if (*marked == dying) *marked = NULL;
  pthread_mutex_unlock(&own->submit_lock);
}

uint64_t copy_duration_ns(int gpu, unsigned engine, uint64_t bytes) {
  return allot_copy_ns(&driver.machine, gpu, engine, bytes);
}

CUresult stream_submit_copy(stream *target, unsigned engine, uint64_t bytes) {
  submit(target, &(submission){.kind = ALLOT_WORK_COPY,
                               .engine = engine,
                               .bytes = bytes,
                               .duration_ns = copy_duration_ns(target->owner->gpu, engine, bytes)});
  return CUDA_SUCCESS;
}
