// SPDX-License-Identifier: Apache-2.0
// Events: marks in streams, when they were passed, and waiting for them.
#include <stdlib.h>

#include "simulated/cuda/driver.h"

#define KNOWN_FLAGS \
  ((unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS))

CUresult cuEventCreate(CUevent *handle, unsigned int flags) {
  ENTER_CONTEXT(current);
  if (handle == NULL || (flags & ~KNOWN_FLAGS) != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  event *made = object_new(OBJECT_EVENT, sizeof(event), current);
  if (made != NULL) {
    made->owner = current;
    made->flags = flags;
    made->shared = -1;
    if ((flags & CU_EVENT_INTERPROCESS) && !shared_event_make(made)) {
      object_free(made);
      made = NULL;
    }
  }
  UNLOCK();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUevent)made;
  return CUDA_SUCCESS;
}

static CUresult event_of(CUevent handle, event **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (event *)handle;
  return CUDA_SUCCESS;
}

void event_destroy_locked(event *dying) {
  capture_forget_event(dying);
  submit_forget_event(dying);
  shared_event_release(dying);
  object_free(dying);
}

CUresult cuEventDestroy_v2(CUevent handle) {
  event *dying;
  TRY(event_of(handle, &dying));
  LOCK();
  event_destroy_locked(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
  return cuEventDestroy_v2(handle);
}

CUresult event_record(event *recorded, stream *target) {
  if (recorded->owner->gpu != target->owner->gpu) return CUDA_ERROR_INVALID_HANDLE;
  capture_forget_event(recorded);
  allot_point point = submit(target, &(submission){.kind = ALLOT_WORK_MARK, .marked = recorded});
  shared_event_record(recorded, point);
  return CUDA_SUCCESS;
}

CUresult cuEventRecordWithFlags(CUevent handle, CUstream target_handle, unsigned int flags) {
  event *recorded;
  stream *target;
  TRY(event_of(handle, &recorded));
  TRY(stream_of(target_handle, &target));
  if (flags > CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  if (target->capture != NULL) return capture_event_record(target, recorded, flags);
  TRY(capture_forbids_legacy(target));
  return event_record(recorded, target);
}

CUresult cuEventRecord(CUevent handle, CUstream target) {
  return cuEventRecordWithFlags(handle, target, CU_EVENT_RECORD_DEFAULT);
}

// Where the event was last recorded, by whichever process; 0: nowhere.
static allot_point point_of(const event *asked) {
  return asked->shared >= 0 ? shared_event_point(asked) : asked->point;
}

bool event_done(event *asked) {
  allot_point point = point_of(asked);
  if (allot_work_done(&driver.machine, point)) return true;
  allot_engine_advance(&driver.machine, allot_point_place(&driver.machine, point));
  return allot_work_done(&driver.machine, point);
}

CUresult event_wait(event *waited) {
  allot_engine_wait(&driver.machine, point_of(waited));
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
  event *asked;
  TRY(event_of(handle, &asked));
  if (asked->captured != NULL) return CUDA_ERROR_CAPTURED_EVENT;
  TRY(driver_gpu_usable(asked->owner->gpu));
  return event_done(asked) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
  event *waited;
  TRY(event_of(handle, &waited));
  if (waited->captured != NULL) return CUDA_ERROR_CAPTURED_EVENT;
  int gpu = waited->owner->gpu;
  TRY(driver_gpu_usable(gpu));
  TRY(event_wait(waited));
  pools_release_surplus(gpu);
  return driver_gpu_usable(gpu);
}

static uint64_t ended_ns(event *asked) {
  device *own = &driver.devices[ALLOT_POINT_GPU(asked->point)];
  pthread_mutex_lock(&own->submit_lock);
  uint64_t ended = asked->ended_ns;
  if (ended == 0) ended = allot_work_ended(&driver.machine, asked->point);
  pthread_mutex_unlock(&own->submit_lock);
  return ended;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
  event *start, *end;
  TRY(event_of(start_handle, &start));
  TRY(event_of(end_handle, &end));
  if (milliseconds == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (start->captured != NULL || end->captured != NULL) return CUDA_ERROR_CAPTURED_EVENT;
  if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  if (!start->recorded || !end->recorded) return CUDA_ERROR_INVALID_HANDLE;
  if (start->owner->gpu != end->owner->gpu) return CUDA_ERROR_INVALID_HANDLE;
  TRY(driver_gpu_usable(start->owner->gpu));
  if (!event_done(start) || !event_done(end)) return CUDA_ERROR_NOT_READY;
  int64_t elapsed = (int64_t)(ended_ns(end) - ended_ns(start));
  *milliseconds = (float)((double)elapsed / 1e6);
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime(milliseconds, start, end);
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
  event *waited;
  stream *target;
  TRY(event_of(event_handle, &waited));
  TRY(stream_of(handle, &target));
  if (flags > CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  if (target->capture != NULL || waited->captured != NULL) {
    return capture_event_wait(target, waited, flags);
  }
  allot_point point = point_of(waited);
  if (allot_work_done(&driver.machine, point)) return CUDA_SUCCESS;
  submit(target, &(submission){.kind = ALLOT_WORK_WAIT, .target = point});
  return CUDA_SUCCESS;
}

// ---- all streams of a context ------------------------------------------------------------------

static bool is_stream(const object *child) {
  return child->kind == OBJECT_STREAM;
}

// The streams that are there; NULL: there is no memory for the list.
static stream **streams_in(const context *owner, size_t *count) {
  LOCK();
  *count = 1;
  for (object *each = owner->head.children; each != NULL; each = each->next) {
    *count += is_stream(each);
  }
  for (stream *each = owner->per_thread; each != NULL; each = each->sibling) ++*count;
  stream **all = malloc(*count * sizeof *all);
  if (all != NULL) {
    stream **next = all;
    *next++ = owner->legacy;
    for (object *each = owner->head.children; each != NULL; each = each->next) {
      if (is_stream(each)) *next++ = (stream *)each;
    }
    for (stream *each = owner->per_thread; each != NULL; each = each->sibling) *next++ = each;
  }
  UNLOCK();
  return all;
}

CUresult cuCtxWaitEvent(CUcontext handle, CUevent event_handle) {
  context *waiting;
  event *waited;
  TRY(context_of(handle, &waiting));
  TRY(event_of(event_handle, &waited));
  if (waited->captured != NULL) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  allot_point point = point_of(waited);
  if (allot_work_done(&driver.machine, point)) return CUDA_SUCCESS;
  size_t count;
  stream **all = streams_in(waiting, &count);
  if (all == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  for (size_t i = 0; i < count; i++) {
    submit(all[i], &(submission){.kind = ALLOT_WORK_WAIT, .target = point});
  }
  free(all);
  return CUDA_SUCCESS;
}
