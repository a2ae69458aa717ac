// SPDX-License-Identifier: Apache-2.0
// sources: lease.c lease_places.c neighbours.c lease_core.c lease_view.c contract.c
// Shares that come back: from a stop, from a suspension, from terms that owed them nothing. Time in
// which they were owed nothing, or took none, is not repaid, and their neighbour is not evicted.
// In simulated time, each process with a copy of the leases of its own.
#include "lease_test.h"

#define PART(guarantee, class, flags)             \
  ALLOT_TERMS(guarantee, ALLOT_WHOLE, 100, class, \
              ALLOT_TERMS_TAKEN | ALLOT_TERMS_GOVERNED | (flags))
#define HALF PART(5000, ALLOT_CLASS_NORMAL, 0)
#define MOST_PROGRAMS 4

// A process that always has work: kernels of a millisecond.
typedef struct program {
  allot_leases leases;
  allot_lease lease;
  bool is_stopped;
  uint64_t had_ms;
} program;

static program programs[MOST_PROGRAMS];
static int count;
static uint64_t now_ns;

static void begin(void) {
  count = 0;
  now_ns = monotonic_ns();
  make_device();
}

static void end(void) {
  for (int i = 0; i < count; i++) allot_leases_close(&programs[i].leases);
  remove_device();
}

static program *start(int seat) {
  program *started = &programs[count++];
  memset(started, 0, sizeof *started);
  join_seat(&started->leases, seat);
  // As a launch does: it asks, and looks at the holder at once.
  allot_lease_want(&started->leases, now_ns, &started->lease);
  if (!started->lease.held) allot_lease_check(&started->leases, now_ns, &started->lease);
  return started;
}

static void step(program *of) {
  if (of->is_stopped) return;
  allot_leases *leases = &of->leases;
  allot_lease_beat(leases, true, now_ns);
  allot_lease_tell_running(leases, now_ns);
  if (!of->lease.held) {
    allot_lease_check(leases, now_ns, &of->lease);
    return;
  }
  of->had_ms++;
  allot_lease_charge(leases, MS, 0, now_ns, &of->lease);
  if (of->lease.held && of->lease.yield) {
    allot_lease_release(leases, 0, 0, true, now_ns, &of->lease);
  }
}

static void run(uint64_t ms) {
  for (int i = 0; i < count; i++) programs[i].had_ms = 0;
  for (const uint64_t until = now_ns + ms * MS; now_ns < until;) {
    now_ns += MS;
    for (int i = 0; i < count; i++) step(&programs[i]);
  }
}

static void change(int seat, uint64_t terms) {
  CHECK(allot_contract_change(device, seat, serials[seat], terms) == 0);
}

// From the first second on both have about a half, as before, and they trust each other.
static void expect_halves(const program *neighbour, const char *what, int number) {
  for (int second = 0; second < 3; second++) {
    run(1000);
    CHECK(neighbour->had_ms > 420 && neighbour->had_ms < 560, "%s %d: %llu ms in second %d", what,
          number, (unsigned long long)neighbour->had_ms, second);
  }
  for (int i = 0; i < count; i++) {
    CHECK(programs[i].leases.file->distrusted == 0, "%s %d: process %d distrusts", what, number, i);
  }
}

// ---- stops ----

// By SIGSTOP, by the freezer of a container, by `allot suspend`. In each phase of the turns.
static void a_stopped_share_is_not_repaid(void) {
  for (int processes = 1; processes <= 3; processes++) {
    for (int phase = 0; phase < 40; phase += 5) {
      begin();
      const int stopped = take_seat(HALF), other = take_seat(HALF);
      for (int i = 0; i < processes; i++) start(stopped);
      program *neighbour = start(other);
      run(1000 + (uint64_t)phase);
      for (int i = 0; i < processes; i++) programs[i].is_stopped = true;
      run(20000);
      CHECK(neighbour->had_ms > 19000, "%llu ms", (unsigned long long)neighbour->had_ms);
      for (int i = 0; i < processes; i++) programs[i].is_stopped = false;
      expect_halves(neighbour, "processes", processes * 100 + phase);
      end();
    }
  }
}

// ---- terms ----

static void expect_halves_after(uint64_t meanwhile) {
  begin();
  const int changed = take_seat(HALF), other = take_seat(HALF);
  start(changed);
  program *neighbour = start(other);
  run(1000);
  change(changed, meanwhile);
  change(other, PART(0, ALLOT_CLASS_NORMAL, 0));
  run(20000);
  CHECK(neighbour->had_ms > 19000, "%llu ms", (unsigned long long)neighbour->had_ms);
  change(changed, HALF);
  change(other, HALF);
  expect_halves(neighbour, "terms", 0);
  end();
}

static void a_suspended_share_is_not_repaid(void) {
  expect_halves_after(PART(5000, ALLOT_CLASS_NORMAL, ALLOT_TERMS_SUSPENDED));
}

static void a_share_that_was_owed_nothing_is_not_repaid(void) {
  expect_halves_after(PART(0, ALLOT_CLASS_BESTEFFORT, 0));
}

// ---- newcomers ----

// Its lease was over long ago, but nobody waited.
static void who_was_alone_is_not_evicted(void) {
  begin();
  const int alone = take_seat(HALF), comes = take_seat(HALF);
  program *neighbour = start(alone);
  run(15000);
  start(comes);
  expect_halves(neighbour, "alone", 0);
  end();
}

int main(void) {
  a_stopped_share_is_not_repaid();
  a_suspended_share_is_not_repaid();
  a_share_that_was_owed_nothing_is_not_repaid();
  who_was_alone_is_not_evicted();
  return 0;
}
