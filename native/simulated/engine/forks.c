// SPDX-License-Identifier: Apache-2.0
// Forks wait while a slot is being taken.
//
// A child that is forked while another thread takes a slot would inherit what holds the slot's lock
// (its descriptor, or its mapping before it is kept out of children), and keep the slot after its
// owner's end. A fork of the attaching thread itself can only come from a signal's handler, where
// nothing can be waited for.
#include <pthread.h>

#include "simulated/engine/engine.h"

static pthread_mutex_t attaching = PTHREAD_MUTEX_INITIALIZER;
static __thread bool attaches, waited;

// glibc's own registration, which pthread_atfork calls: it is in every libc.so.6. It ends with the
// library that the handle names.
extern int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void),
                             void *object);
extern char __dso_handle[] __attribute__((weak, visibility("hidden")));

static void before_fork(void) {
  waited = !attaches;
  if (waited) pthread_mutex_lock(&attaching);
}

static void after_fork(void) {
  if (waited) pthread_mutex_unlock(&attaching);
  waited = false;
}

// From the start: a fork that began before the first call may end in the midst of it.
__attribute__((constructor)) static void watch_forks(void) {
  __register_atfork(before_fork, after_fork, after_fork, __dso_handle);
}

void allot_forks_hold(void) {
  pthread_mutex_lock(&attaching);
  attaches = true;
}

void allot_forks_release(void) {
  attaches = false;
  pthread_mutex_unlock(&attaching);
}
