// SPDX-License-Identifier: Apache-2.0
// Functions on the host in stream order.
//
// One thread, started by the first such function, runs whichever is ready. The program's own data
// copies go the same way while any is pending, so that a copy behind a function sees what it wrote.
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "simulated/cuda/driver.h"

// How often a value that another program may write is looked at.
#define VALUE_NS 200000ull

typedef struct callback {
  callback_function function;
  void *data;
  bool (*holds)(const void *data);  // NULL: nothing but its turn to wait for
  allot_point point;
  struct callback *next;
} callback;

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t arrived;
static callback *queue;  // in order of submission
static unsigned pending;
static bool started;

bool callbacks_pending(void) {
  return __atomic_load_n(&pending, __ATOMIC_SEQ_CST) > 0;
}

// Takes the first one that is ready off the queue. *look_again: when one may become ready.
static callback *take_ready(uint64_t *look_again) {
  *look_again = UINT64_MAX;
  for (callback **at = &queue; *at != NULL; at = &(*at)->next) {
    uint64_t since;
    if (!allot_work_ready(&driver.machine, (*at)->point, &since)) {
      uint64_t then = allot_engine_ready_at(&driver.machine, (*at)->point);
      if (then < *look_again) *look_again = then;
      continue;
    }
    callback *ready = *at;
    if (ready->holds != NULL && !ready->holds(ready->data)) {
      uint64_t then = allot_now_ns() + VALUE_NS;
      if (then < *look_again) *look_again = then;
      continue;
    }
    *at = ready->next;
    return ready;
  }
  return NULL;
}

static void advance_all(void) {
  for (int ordinal = 0; ordinal < driver.device_count; ordinal++) {
    allot_engine_advance(&driver.machine, driver_place(driver.gpus[ordinal]));
  }
}

static void wait_until(uint64_t time_ns) {
  struct timespec until = {.tv_sec = (time_t)(time_ns / 1000000000u),
                           .tv_nsec = (long)(time_ns % 1000000000u)};
  pthread_cond_timedwait(&arrived, &queue_lock, &until);
}

static void *serve(void *unused) {
  for (;;) {
    pthread_mutex_lock(&queue_lock);
    while (queue == NULL) pthread_cond_wait(&arrived, &queue_lock);
    pthread_mutex_unlock(&queue_lock);
    advance_all();
    pthread_mutex_lock(&queue_lock);
    uint64_t look_again;
    callback *ready = take_ready(&look_again);
    if (ready == NULL && queue != NULL) wait_until(look_again);
    pthread_mutex_unlock(&queue_lock);
    if (ready == NULL) continue;
    ready->function(ready->data);
    __atomic_sub_fetch(&pending, 1, __ATOMIC_SEQ_CST);
    allot_work_finish_host(&driver.machine, ready->point);
    free(ready);
  }
  return unused;
}

// The thread must not take the program's signals.
static bool start_thread(void) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&arrived, &attributes);
  pthread_condattr_destroy(&attributes);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  bool made = pthread_create(&thread, NULL, serve, NULL) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (made) pthread_detach(thread);
  return made;
}

CUresult callback_submit(stream *target, callback_function function, void *data) {
  return callback_submit_when(target, NULL, function, data);
}

CUresult callback_submit_when(stream *target, bool (*holds)(const void *data),
                              callback_function function, void *data) {
  callback *made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&queue_lock);
  if (!started) started = start_thread();
  bool ready = started;
  pthread_mutex_unlock(&queue_lock);
  if (!ready) {
    free(made);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  __atomic_add_fetch(&pending, 1, __ATOMIC_SEQ_CST);
  *made = (callback){.function = function, .data = data, .holds = holds};
  made->point = submit(target, &(submission){.kind = ALLOT_WORK_HOST});
  pthread_mutex_lock(&queue_lock);
  callback **last = &queue;
  while (*last != NULL) last = &(*last)->next;
  *last = made;
  pthread_cond_signal(&arrived);
  pthread_mutex_unlock(&queue_lock);
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
  stream *target;
  TRY(stream_of(handle, &target));
  if (function == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (target->capture != NULL) return capture_host(target, function, data);
  TRY(capture_forbids_legacy(target));
  return callback_submit(target, function, data);
}

CUresult cuLaunchHostFunc_v2(CUstream handle, CUhostFn function, void *data, unsigned int mode) {
  return cuLaunchHostFunc(handle, function, data);
}

typedef struct stream_callback {
  CUstreamCallback function;
  CUstream handle;
  void *data;
} stream_callback;

static void run_stream_callback(void *data) {
  stream_callback *called = data;
  called->function(called->handle, CUDA_SUCCESS, called->data);
  free(called);
}

CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback function, void *data,
                             unsigned int flags) {
  stream *target;
  TRY(stream_of(handle, &target));
  if (function == NULL || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (target->capture != NULL) return capture_unsupported(target);
  stream_callback *made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (stream_callback){function, handle, data};
  CUresult result = callback_submit(target, run_stream_callback, made);
  if (result != CUDA_SUCCESS) free(made);
  return result;
}
