// SPDX-License-Identifier: Apache-2.0
// Ends a thread at each place of a call where a driver may let it end (pthread_cancel).
//
// A driver opens, reads and waits wherever it likes. The simulated one keeps its threads from being
// cancelled there, as the shim does: so each change of that is taken for such a place.
#ifndef ALLOTMENT_TESTS_SHIM_CANCEL_H
#define ALLOTMENT_TESTS_SHIM_CANCEL_H

#include <dlfcn.h>
#include <pthread.h>

#include "host.h"

static __thread unsigned places_to_go;  // 0: the thread is not to end

static void may_end_here(void) {
  if (places_to_go == 0 || --places_to_go > 0) return;
  pthread_cancel(pthread_self());
  pthread_testcancel();
}

// Stands before libc's.
int pthread_setcancelstate(int state, int *before) {
  static int (*real)(int, int *);
  int was;
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "pthread_setcancelstate");
  real(PTHREAD_CANCEL_DISABLE, &was);
  real(was, NULL);
  if (was == PTHREAD_CANCEL_ENABLE) may_end_here();
  int result = real(state, before);
  if (was == PTHREAD_CANCEL_DISABLE && state == PTHREAD_CANCEL_ENABLE) may_end_here();
  return result;
}

typedef struct ended_call {
  void (*call)(void);
  CUcontext context;
  unsigned place;
} ended_call;

static void *call_and_end(void *argument) {
  const ended_call *one = argument;
  if (one->context != NULL) OK(cuCtxSetCurrent(one->context));
  places_to_go = one->place;
  one->call();
  places_to_go = 0;
  return NULL;
}

// Calls in a thread that ends at the place of that number. False: the call has fewer.
static bool ends_at(unsigned place, CUcontext context, void (*call)(void)) {
  ended_call one = {call, context, place};
  pthread_t thread;
  void *result;
  OK(pthread_create(&thread, NULL, call_and_end, &one));
  OK(pthread_join(thread, &result));
  return result == PTHREAD_CANCELED;
}

// A call, and what is around it. What the call did or not is to be undone.
typedef struct cancelled_call {
  const char *name;
  void (*prepare)(void);  // NULL: nothing
  void (*call)(void);
  void (*undo)(void);
} cancelled_call;

static void expect_as_before(const char *name, unsigned place, uint64_t before) {
  uint64_t now = charged(0);
  if (now != before || physical(0) != now) {
    FAIL("%s, ended at place %u: %llu bytes charged, %llu in use, %llu before", name, place,
         (unsigned long long)now, (unsigned long long)physical(0), (unsigned long long)before);
  }
}

// Wherever the thread ends, the next one goes on, and no memory is charged or left.
__attribute__((unused)) static void expect_whole(const cancelled_call *one, CUcontext context) {
  if (one->prepare != NULL) one->prepare();
  one->call();
  one->undo();
  uint64_t before = charged(0);
  bool has_ended = true;
  for (unsigned place = 1; has_ended; place++) {
    if (one->prepare != NULL) one->prepare();
    has_ended = ends_at(place, context, one->call);
    one->undo();
    expect_as_before(one->name, place, before);
  }
}

#endif
