// SPDX-License-Identifier: Apache-2.0
// The lock of one engine, of a GPU or a compute instance, across processes.
//
// A futex word that names its holder's slot. Waiters look now and then whether that process still
// lives; whoever clears a dead process's slot frees its locks. Nothing has to be repaired then,
// because the engine changes by single words in an order that is right after each of them (run.c).
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "simulated/engine/engine.h"

#define WAITERS 0x80000000u

static bool try_take(uint32_t *word, uint32_t mark) {
  uint32_t free = 0;
  return __atomic_compare_exchange_n(word, &free, mark, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// A wake-up that is missed costs this long, and so does finding out that the holder died.
static const struct timespec patience = {.tv_nsec = 2000000};

void allot_engine_lock(allot_handle *handle, int place) {
  uint32_t *word = &handle->machine->engines[place].lock;
  uint32_t mark = (uint32_t)handle->slot + 1;
  for (int tries = 0; tries < 50; tries++) {
    if (try_take(word, mark)) return;
    if (tries > 10) sched_yield();
  }
  for (int sleeps = 0;; sleeps++) {
    uint32_t seen = allot_load(word);
    if (seen == 0) {
      // Others may be asleep; whoever slept once keeps the mark for them.
      if (try_take(word, mark | WAITERS)) return;
      continue;
    }
    if (!(seen & WAITERS) && !__atomic_compare_exchange_n(word, &seen, seen | WAITERS, false,
                                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      continue;
    }
    syscall(SYS_futex, word, FUTEX_WAIT, seen | WAITERS, &patience, NULL, 0);
    // A look at whether the holder lives costs system calls, so not at every turn.
    if (sleeps % 4 == 3 && allot_load(word) == (seen | WAITERS)) {
      allot_machine_reap_slot(handle, (int)(seen & ~WAITERS) - 1);
    }
  }
}

static void release(uint32_t *word) {
  uint32_t before = __atomic_exchange_n(word, 0u, __ATOMIC_SEQ_CST);
  if (before & WAITERS) syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void allot_engine_unlock(allot_handle *handle, int place) {
  release(&handle->machine->engines[place].lock);
}

void allot_engine_break_locks(allot_handle *handle, int slot) {
  for (int place = 0; place < ALLOT_MACHINE_PLACES; place++) {
    uint32_t *word = &handle->machine->engines[place].lock;
    if ((allot_load(word) & ~WAITERS) == (uint32_t)slot + 1) release(word);
  }
}
