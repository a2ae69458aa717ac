// SPDX-License-Identifier: Apache-2.0
// One agent at a time changes a policy or a contract.
#ifndef ALLOTMENT_AGENT_LOCK_H
#define ALLOTMENT_AGENT_LOCK_H

#include <sys/file.h>
#include <time.h>

#define AGENT_LOCK_TRIES 500 /* a millisecond each */

// Agents are kept apart by the state folder's lock; this is for those that have none. A tenant can
// hold it, who may read the file: it is not waited for any longer. Given back by closing the file.
static inline void lock_for_a_while(int descriptor) {
  for (int tries = 0; tries < AGENT_LOCK_TRIES; tries++) {
    if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return;
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
}

#endif
