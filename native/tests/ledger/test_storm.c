// SPDX-License-Identifier: Apache-2.0
// sources: ledger.c
// Processes and threads reserve and release at random while some are killed or stopped and the
// limit changes. Never more in use than the limit; nothing left when all are gone.
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "ledger_test.h"

#define PROCESSES 6
#define THREADS 3
#define LIMIT 10000u

static allot_ledger own;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint_fast64_t held;

static void *thread_of_a_storm(void *argument) {
  unsigned seed = (unsigned)(uintptr_t)argument;
  uint64_t mine = 0;
  for (;;) {
    uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % 3000;
    pthread_mutex_lock(&turn);
    if (rand_r(&seed) % 2 == 0 && allot_ledger_reserve(&own, 0, bytes)) {
      mine += bytes;
      held += bytes;
    } else if (mine > 0) {
      uint64_t less = bytes < mine ? bytes : mine;
      allot_ledger_release(&own, 0, less);
      mine -= less;
      held -= less;
    }
    CHECK(allot_ledger_slot_used(&own, own.slot, 0) == held);
    pthread_mutex_unlock(&turn);
  }
  return NULL;
}

static pid_t start(unsigned seed) {
  pid_t child = fork();
  if (child != 0) return child;
  alarm(60);  // never outlive the test
  own = attach_share();
  pthread_t threads[THREADS];
  for (unsigned i = 0; i < THREADS; i++) {
    pthread_create(&threads[i], NULL, thread_of_a_storm, (void *)(uintptr_t)(seed * 31 + i));
  }
  pthread_join(threads[0], NULL);
  _exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int argc, char **argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 2.0;
  make_share(LIMIT);
  allot_ledger ledger = open_share();
  pid_t children[PROCESSES];
  unsigned seed = (unsigned)time(NULL), next = seed;
  for (int i = 0; i < PROCESSES; i++) children[i] = start(next++);

  uint64_t limit = LIMIT;
  unsigned long looks = 0, resizes = 0, kills = 0;
  for (double end = now() + seconds; now() < end || kills == 0 || resizes == 0; looks++) {
    uint64_t used = allot_ledger_used(&ledger, 0);
    CHECK(used <= limit, "seed %u: %llu of %llu", seed, (unsigned long long)used,
          (unsigned long long)limit);
    int i = rand_r(&next) % PROCESSES;
    switch (rand_r(&next) % 64) {
      case 0:
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
        children[i] = start(next++);
        kills++;
        break;
      case 1:
        kill(children[i], SIGSTOP);
        break;
      case 2:
        kill(children[i], SIGCONT);
        break;
      case 3: {
        uint64_t wanted = LIMIT / 2 + (uint64_t)rand_r(&next) % LIMIT, in_use;
        int error = allot_ledger_set_limit(share, 0, wanted, false, &in_use);
        CHECK(error == 0 || error == -16 /* EBUSY */, "%d", error);
        if (error == 0) limit = wanted, resizes++;
        break;
      }
      case 4:
        CHECK(clear_all(&ledger) >= 0);
        break;
      default:
        break;
    }
  }
  for (int i = 0; i < PROCESSES; i++) {
    kill(children[i], SIGKILL);
    waitpid(children[i], NULL, 0);
  }
  clear_all(&ledger);
  CHECK(allot_ledger_used(&ledger, 0) == 0, "seed %u", seed);
  check_sums(&ledger);
  printf("%lu looks, %lu kills, %lu resizes\n", looks, kills, resizes);
  allot_ledger_close(&ledger);
  remove_share();
  return 0;
}
