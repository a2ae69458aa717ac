// SPDX-License-Identifier: Apache-2.0
// SIGBUS as an error, for the length of one call. The handler is ours only during that, so that a
// program's own is in force at all other times.
#include "bus_guard.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;
static __thread sigjmp_buf *landing;  // of the thread that is in a guarded call

static void on_bus_error(int number, siginfo_t *info, void *context) {
  (void)info, (void)context;
  if (landing != NULL) siglongjmp(*landing, 1);
  // Another thread's, which nothing guards: it meets the signal again, as if we were not here.
  sigaction(number, &before, NULL);
}

int allot_guarded(int (*run)(void *), void *argument) {
  // SA_NODEFER: the jump out of the handler leaves the signal unblocked.
  struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigemptyset(&ours.sa_mask);
  pthread_mutex_lock(&one_at_a_time);
  volatile int result = -EINVAL;
  sigjmp_buf here;
  if (sigaction(SIGBUS, &ours, &before) == 0) {
    landing = &here;
    if (sigsetjmp(here, 0) == 0) result = run(argument);
    landing = NULL;
    sigaction(SIGBUS, &before, NULL);
  }
  pthread_mutex_unlock(&one_at_a_time);
  return result;
}
