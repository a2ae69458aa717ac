// SPDX-License-Identifier: Apache-2.0
// sources: lease.c lease_places.c neighbours.c lease_core.c lease_view.c contract.c
// Processes of several threads take turns while some are killed or stopped and seats change hands.
// Nobody works beside somebody who holds the lease, work goes on, and nobody is forgotten.
#include <pthread.h>

#include "lease_test.h"

#define PROCESSES 6
#define THREADS 3
#define SEATS 4
#define LONGEST_STALL_MS 20000  // of a loaded machine

// The GPU: whoever works on it leaves its lease's epoch and place here.
typedef struct gpu {
  uint64_t mark;
  uint64_t takeovers;  // of marks that somebody left who lost the lease while at work
  uint64_t work[PROCESSES];
} gpu;

static gpu *shared;
static allot_leases own;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static uint64_t seen_mark(void) {
  return __atomic_load_n(&shared->mark, __ATOMIC_SEQ_CST);
}

static bool swap_mark(uint64_t from, uint64_t to) {
  return __atomic_compare_exchange_n(&shared->mark, &from, to, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST);
}

static void nap(uint64_t ns) {
  nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
}

// Somebody else is at work in our time: that lease must have been taken from us.
static void check_lost(uint64_t epoch) {
  allot_lease lease;
  allot_lease_look(&own, monotonic_ns(), &lease);
  CHECK(!lease.held || lease.epoch != epoch,
        "two hold the lease: mark %llx, epoch %llu, seat %d place %d, distrusted %llx",
        (unsigned long long)seen_mark(), (unsigned long long)epoch, own.seat, own.place,
        (unsigned long long)own.file->distrusted);
}

static bool enter(uint64_t mark) {
  for (;;) {
    uint64_t seen = seen_mark();
    if (seen >> 16 >= mark >> 16 && seen != 0) {
      check_lost(mark >> 16);
      return false;
    }
    if (!swap_mark(seen, mark)) continue;
    if (seen != 0) __atomic_add_fetch(&shared->takeovers, 1, __ATOMIC_SEQ_CST);
    return true;
  }
}

// A piece of work in the lease of that epoch.
static void work(int number, uint64_t epoch, unsigned *seed) {
  uint64_t mark = epoch << 16 | (uint64_t)(own.place + 1);
  // No process sees the turns of one without a seat: they end when others begin, no earlier.
  if (own.seat == (int)ALLOT_SEAT_UNBOOKED) {
    __atomic_add_fetch(&shared->work[number], 1, __ATOMIC_SEQ_CST);
    return;
  }
  if (!enter(mark)) return;
  for (int pieces = rand_r(seed) % 4; pieces >= 0; pieces--) {
    allot_lease_beat(&own, true, monotonic_ns());
    nap(20000 + (uint64_t)rand_r(seed) % 200000);
    if (seen_mark() != mark) {
      check_lost(epoch);
      return;
    }
  }
  if (!swap_mark(mark, 0)) check_lost(epoch);
  __atomic_add_fetch(&shared->work[number], 1, __ATOMIC_SEQ_CST);
}

static void take_a_turn(int number, unsigned *seed) {
  allot_lease lease;
  pthread_mutex_lock(&turn);
  allot_lease_want(&own, monotonic_ns(), &lease);
  if (!lease.held) allot_lease_check(&own, monotonic_ns(), &lease);
  bool releases = false;
  while (lease.held && !releases) {
    uint64_t start = monotonic_ns();
    work(number, lease.epoch, seed);
    uint64_t now = monotonic_ns();
    releases = lease.yield || rand_r(seed) % 4 == 0;
    if (releases) {
      bool wants_more = rand_r(seed) % 2 == 0;
      allot_lease_release(&own, now - start, 0, wants_more, now, &lease);
      allot_lease_beat(&own, false, now);
    } else {
      allot_lease_charge(&own, now - start, 0, now, &lease);
    }
  }
  pthread_mutex_unlock(&turn);
  if (releases) {
    nap(1000 + (uint64_t)rand_r(seed) % 500000);
  } else {
    allot_lease_sleep(&own, lease.ticket, lease.retry_ns);
  }
}

typedef struct worker {
  int number;
  unsigned seed;
} worker;

static void *run_thread(void *argument) {
  worker self = *(worker *)argument;
  for (;;) take_a_turn(self.number, &self.seed);
  return NULL;
}

static pid_t start(int number, int seat, unsigned seed) {
  pid_t child = fork_child();
  if (child != 0) return child;
  join_seat(&own, seat);
  pthread_t threads[THREADS];
  worker workers[THREADS];
  for (unsigned i = 0; i < THREADS; i++) {
    workers[i] = (worker){.number = number, .seed = seed * 31 + i};
    pthread_create(&threads[i], NULL, run_thread, &workers[i]);
  }
  pthread_join(threads[0], NULL);
  _exit(1);
}

// ---- the one who makes the storm ----

static allot_leases observer;
static pid_t children[PROCESSES];
static bool is_stopped[PROCESSES];
static unsigned next_seed;

static unsigned pick(unsigned count) {
  return (unsigned)rand_r(&next_seed) % count;
}

// Something is left for best effort.
static uint64_t any_terms(unsigned seat) {
  static const uint32_t guarantees[SEATS] = {3000, 2000, 0, 1000};
  static const uint32_t ceilings[SEATS] = {4000, 2000, ALLOT_WHOLE, 2000};
  static const uint32_t classes[SEATS] = {ALLOT_CLASS_NORMAL, ALLOT_CLASS_NORMAL,
                                          ALLOT_CLASS_BESTEFFORT, ALLOT_CLASS_LATENCY};
  return ALLOT_TERMS(guarantees[seat], ceilings[seat], 1 + pick(300), classes[seat],
                     ALLOT_TERMS_TAKEN | ALLOT_TERMS_GOVERNED);
}

static void check_end(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %x", (unsigned)status);
}

static void replace(int number) {
  kill(children[number], SIGKILL);
  check_end(children[number]);
  children[number] = start(number, number % SEATS, next_seed++);
  is_stopped[number] = false;
}

static void all_go_on(void) {
  for (int i = 0; i < PROCESSES; i++) {
    kill(children[i], SIGCONT);
    is_stopped[i] = false;
  }
}

static uint64_t all_work(void) {
  uint64_t sum = 0;
  for (int i = 0; i < PROCESSES; i++) sum += __atomic_load_n(&shared->work[i], __ATOMIC_SEQ_CST);
  return sum;
}

static void do_harm(unsigned long *kills) {
  int i = (int)pick(PROCESSES);
  switch (pick(24)) {
    case 0:
      replace(i);
      ++*kills;
      break;
    case 1:
    case 2:
      kill(children[i], SIGSTOP);
      is_stopped[i] = true;
      break;
    case 3:
    case 4:
    case 5:
      kill(children[i], SIGCONT);
      is_stopped[i] = false;
      break;
    case 6: {
      // The seat changes hands while processes of it hold and wait.
      int seat = i % SEATS;
      CHECK(allot_contract_free(device, seat, serials[seat]) == 0);
      CHECK(take_seat(any_terms((unsigned)seat)) == seat);
      replace(i);
      ++*kills;
      break;
    }
    case 7: {
      int seat = i % SEATS;
      CHECK(allot_contract_change(device, seat, serials[seat], any_terms((unsigned)seat)) == 0);
      break;
    }
    default:
      break;
  }
}

static bool any_runs(void) {
  for (int i = 0; i < PROCESSES; i++) {
    if (!is_stopped[i]) return true;
  }
  return false;
}

// Every process of a share works again, once nobody disturbs them.
static void nobody_is_forgotten(void) {
  all_go_on();
  for (int i = 0; i < PROCESSES; i++) replace(i);
  uint64_t before[PROCESSES];
  for (int i = 0; i < PROCESSES; i++) before[i] = shared->work[i];
  for (int i = 0; i < PROCESSES; i++) {
    for (int ms = 0; __atomic_load_n(&shared->work[i], __ATOMIC_SEQ_CST) < before[i] + 3; ms++) {
      CHECK(ms < 4 * LONGEST_STALL_MS, "process %d gets no turn", i);
      nap(MS);
    }
  }
}

int main(int argc, char **argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 2.5;
  unsigned seed = next_seed = argc > 2 ? (unsigned)atoi(argv[2]) : (unsigned)time(NULL);
  printf("seed %u\n", seed);
  fflush(stdout);
  make_device();
  shared = make_shared(sizeof *shared);
  for (unsigned seat = 0; seat < SEATS; seat++) CHECK(take_seat(any_terms(seat)) == (int)seat);
  open_seat(&observer, 0);
  for (int i = 0; i < PROCESSES; i++) children[i] = start(i, i % SEATS, next_seed++);

  unsigned long kills = 0, looks = 0;
  uint64_t end = monotonic_ns() + (uint64_t)(seconds * 1e9), progress_ns = monotonic_ns();
  for (uint64_t done = 0; monotonic_ns() < end || kills == 0; looks++) {
    do_harm(&kills);
    check_state(&observer);
    nap(pick(2 * MS));
    uint64_t sum = all_work();
    if (sum != done || !any_runs()) progress_ns = monotonic_ns();
    CHECK(monotonic_ns() - progress_ns < LONGEST_STALL_MS * MS, "seed %u: no work is done", seed);
    done = sum;
  }
  nobody_is_forgotten();
  for (int i = 0; i < PROCESSES; i++) {
    kill(children[i], SIGKILL);
    check_end(children[i]);
  }
  kills += 2 * PROCESSES;

  // All are dead: whoever comes next has the device to itself.
  join_seat(&own, 0);
  check_state(&own);
  static allot_lease_state state;
  allot_leases_read(&own, &state);
  uint64_t evictions = 0;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) evictions += state.seats[seat].evictions;
  CHECK(state.places_taken == 1 && state.holder == -1);
  printf("%llu works, %lu looks, %lu kills, %llu evictions from the last seats, %llu marks\n",
         (unsigned long long)all_work(), looks, kills, (unsigned long long)evictions,
         (unsigned long long)shared->takeovers);
  allot_leases_close(&own);
  allot_leases_close(&observer);
  remove_device();
  return 0;
}
