// SPDX-License-Identifier: Apache-2.0
// Holds a thread in the shim's wait for memory, for as long as the test wants.
#ifndef ALLOTMENT_TESTS_SHIM_WAITING_H
#define ALLOTMENT_TESTS_SHIM_WAITING_H

#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>

#include "host.h"

static pthread_mutex_t sign_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sign_given = PTHREAD_COND_INITIALIZER;

static bool await(const bool *sign, int milliseconds) {
  struct timespec end;
  OK(clock_gettime(CLOCK_REALTIME, &end));
  end.tv_nsec += milliseconds % 1000 * 1000000L;
  end.tv_sec += milliseconds / 1000 + end.tv_nsec / 1000000000;
  end.tv_nsec %= 1000000000;
  pthread_mutex_lock(&sign_lock);
  while (!*sign && pthread_cond_timedwait(&sign_given, &sign_lock, &end) == 0) continue;
  bool came = *sign;
  pthread_mutex_unlock(&sign_lock);
  return came;
}

static void announce(bool *sign) {
  pthread_mutex_lock(&sign_lock);
  *sign = true;
  pthread_cond_broadcast(&sign_given);
  pthread_mutex_unlock(&sign_lock);
}

// ---- a call that waits for memory ----

#define HELD_MS 20000 /* no call takes so long, on a busy machine either */

typedef struct waiting_call {
  CUresult (*call)(void);
  CUcontext context;
  pthread_t thread;
  CUresult result;
  bool is_waiting, may_go_on;
} waiting_call;

static __thread waiting_call *held_call;  // by its next sleep

// Stands before libc's: the shim sleeps so between two attempts.
int nanosleep(const struct timespec *time, struct timespec *left) {
  waiting_call *held = held_call;
  if (held == NULL) return (int)syscall(SYS_nanosleep, time, left);
  held_call = NULL;
  announce(&held->is_waiting);
  if (!await(&held->may_go_on, HELD_MS)) FAIL("others wait for a call that waits for memory");
  return 0;
}

static void *call_and_wait(void *argument) {
  waiting_call *held = argument;
  OK(cuCtxSetCurrent(held->context));
  held_call = held;
  held->result = held->call();
  if (held_call != NULL) FAIL("the call does not wait, but gives %d", (int)held->result);
  return NULL;
}

// Returns while the call waits for memory: the driver has none for it, or the share.
__attribute__((unused)) static void begin_waiting_call(waiting_call *held, CUcontext context,
                                                       CUresult (*call)(void)) {
  *held = (waiting_call){.call = call, .context = context};
  OK(pthread_create(&held->thread, NULL, call_and_wait, held));
  EXPECT(await(&held->is_waiting, HELD_MS));
}

// The memory is free: the call has it at the next attempt.
__attribute__((unused)) static void end_waiting_call(waiting_call *held) {
  announce(&held->may_go_on);
  OK(pthread_join(held->thread, NULL));
  OK(held->result);
}

#endif
