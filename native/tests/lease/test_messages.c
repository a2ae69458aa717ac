// SPDX-License-Identifier: Apache-2.0
// sources: lease.c lease_places.c neighbours.c lease_core.c lease_view.c contract.c
// Whoever sleeps for the lease is woken when it is given it, and by whatever else concerns it. No
// message is lost: sleeps here are so long that one would be seen.
#include "lease_test.h"

#define HANDOVERS 400
// Longer than anything that looks by itself would wait, even on a loaded machine.
#define FOREVER_NS (100000 * MS)

static void sleep_for_the_lease(allot_leases *own, allot_lease lease) {
  while (!lease.held) {
    uint64_t start = monotonic_ns();
    allot_lease_sleep(own, lease.ticket, start + FOREVER_NS);
    CHECK(monotonic_ns() - start < FOREVER_NS / 2, "it was not woken");
    allot_lease_look(own, monotonic_ns(), &lease);
  }
}

// Two processes that hand the lease to each other, with nobody who looks by himself.
static void hand_over(int seat) {
  allot_leases own;
  join_seat(&own, seat);
  for (int i = 0; i < HANDOVERS; i++) {
    allot_lease lease;
    allot_lease_want(&own, monotonic_ns(), &lease);
    sleep_for_the_lease(&own, lease);
    allot_lease_beat(&own, true, monotonic_ns());
    allot_lease_release(&own, 1000, 0, i % 2 == 0, monotonic_ns(), &lease);
    if (i % 2 == 0) sleep_for_the_lease(&own, lease);
  }
  allot_leases_leave(&own);
  _exit(0);
}

static void no_handover_is_lost(void) {
  make_device();
  pid_t children[3];
  for (int i = 0; i < 3; i++) {
    int seat = take_seat(ANYTHING_GOES);
    children[i] = fork_child();
    if (children[i] == 0) hand_over(seat);
  }
  for (int i = 0; i < 3; i++) wait_for(children[i]);
  remove_device();
}

// Sleeps in a child until it is woken, and tells so.
static pid_t start_sleeper(allot_leases *own, uint32_t ticket) {
  pid_t child = fork_child();
  if (child != 0) return child;
  uint64_t start = monotonic_ns();
  allot_lease_sleep(own, ticket, start + FOREVER_NS);
  _exit(monotonic_ns() - start < FOREVER_NS / 2 ? 0 : 1);
}

static void messages_come_to_whom_they_concern(void) {
  make_device();
  allot_leases holder, waiter;
  int seat = take_seat(ANYTHING_GOES);
  join_seat(&holder, seat);
  join_seat(&waiter, take_seat(ANYTHING_GOES));
  allot_lease lease, other;
  allot_lease_want(&holder, monotonic_ns(), &lease);
  CHECK(lease.held);

  // A holder with nothing to do hears that somebody waits.
  allot_lease_look(&holder, monotonic_ns(), &lease);
  pid_t sleeper = start_sleeper(&holder, lease.ticket);
  usleep(20000);
  allot_lease_want(&waiter, monotonic_ns(), &other);
  CHECK(!other.held);
  wait_for(sleeper);

  // A message between the ticket and the sleep is not lost.
  allot_lease_release(&holder, MS, 0, false, monotonic_ns(), &lease);
  wait_for(start_sleeper(&waiter, other.ticket));

  // New terms, for holders and waiters.
  allot_lease_want(&holder, monotonic_ns(), &lease);
  allot_lease_look(&waiter, monotonic_ns(), &other);
  CHECK(!lease.held && other.held);
  sleeper = start_sleeper(&holder, lease.ticket);
  pid_t second = start_sleeper(&waiter, other.ticket);
  usleep(20000);
  CHECK(allot_contract_change(device, seat, serials[seat], ANYTHING_GOES | 100) == 0);
  wait_for(sleeper);
  wait_for(second);

  // Its own process.
  allot_lease_look(&holder, monotonic_ns(), &lease);
  sleeper = start_sleeper(&holder, lease.ticket);
  usleep(20000);
  allot_lease_wake_own(&holder);
  wait_for(sleeper);

  // Nobody else's business wakes it.
  allot_leases third;
  join_seat(&third, take_seat(ANYTHING_GOES));
  allot_lease_look(&holder, monotonic_ns(), &lease);
  allot_lease_want(&third, monotonic_ns(), &other);
  allot_lease_release(&third, 0, 0, false, monotonic_ns(), &other);
  allot_lease_look(&holder, monotonic_ns(), &other);
  CHECK(other.ticket == lease.ticket);
  allot_lease_sleep(&holder, lease.ticket, monotonic_ns() + MS);
  allot_leases_close(&third);
  allot_leases_close(&holder);
  allot_leases_close(&waiter);
  remove_device();
}

int main(void) {
  no_handover_is_lost();
  messages_come_to_whom_they_concern();
  puts("ok");
  return 0;
}
