// SPDX-License-Identifier: Apache-2.0
// A dead process's memory stays charged until the driver has freed it.
//
// sources: ledger.c
#include "ledger_test.h"

static allot_held answer;

static allot_held check(void *context, const allot_slot *slot, int device) {
  CHECK(device == *(const int *)context && slot->pid != 0);
  return answer;
}

static allot_reaped reap(allot_ledger *ledger, allot_held held) {
  int device = 1;
  answer = held;
  return allot_ledger_reap(ledger, check, &device);
}

// Leaves a slot whose owner was killed with so many bytes.
static void leave(uint64_t bytes) {
  pid_t child = fork();
  if (child == 0) {
    allot_ledger own = attach_share();
    if (bytes > 0) CHECK(allot_ledger_reserve(&own, 1, bytes));
    raise(SIGKILL);
  }
  waitpid(child, NULL, 0);
}

static void expect_left(allot_ledger *ledger, allot_reaped reaped) {
  CHECK(reaped.cleared == 0 && reaped.leaving == 1, "%d %d", reaped.cleared, reaped.leaving);
  CHECK(allot_ledger_used(ledger, 1) == 400);
  check_sums(ledger);
}

static void expect_cleared(allot_ledger *ledger, allot_reaped reaped) {
  CHECK(reaped.cleared == 1 && reaped.leaving == 0, "%d %d", reaped.cleared, reaped.leaving);
  CHECK(allot_ledger_used(ledger, 1) == 0);
  check_sums(ledger);
}

static void pass_time(allot_ledger *ledger) {
  ledger->usage->slots[0].movable -= ALLOT_LEAVING_NS;
}

int main(void) {
  make_share(1000);
  allot_ledger ledger = open_share();

  leave(400);
  expect_left(&ledger, reap(&ledger, ALLOT_HELD_STILL));
  expect_left(&ledger, reap(&ledger, ALLOT_HELD_UNKNOWN));
  CHECK(ledger.usage->slots[0].state == ALLOT_SLOT_LEAVING);
  expect_cleared(&ledger, reap(&ledger, ALLOT_HELD_NOT));

  // Without an answer, time decides.
  leave(400);
  expect_left(&ledger, reap(&ledger, ALLOT_HELD_UNKNOWN));
  pass_time(&ledger);
  expect_cleared(&ledger, reap(&ledger, ALLOT_HELD_UNKNOWN));

  // What the driver certainly holds stays, and begins its time again.
  leave(400);
  expect_left(&ledger, reap(&ledger, ALLOT_HELD_UNKNOWN));
  pass_time(&ledger);
  expect_left(&ledger, reap(&ledger, ALLOT_HELD_STILL));
  expect_left(&ledger, reap(&ledger, ALLOT_HELD_UNKNOWN));

  // The next process takes another slot, and cannot have the bytes.
  allot_ledger next = attach_share();
  CHECK(next.slot == 1);
  CHECK(!allot_ledger_reserve(&next, 1, 601) && allot_ledger_reserve(&next, 1, 600));
  CHECK(allot_ledger_used(&ledger, 1) == 1000);
  allot_ledger_release(&next, 1, 600);
  expect_cleared(&ledger, reap(&ledger, ALLOT_HELD_NOT));

  // A driver that was asked before the end was seen says nothing about it.
  leave(400);
  CHECK(allot_ledger_clear(&ledger, 0) == 0);
  uint64_t marked_ns = ledger.usage->slots[0].movable;
  CHECK(allot_ledger_clear(&ledger, marked_ns) == 0 && allot_ledger_used(&ledger, 1) == 400);
  CHECK(allot_ledger_clear(&ledger, marked_ns + 1) == 1 && allot_ledger_used(&ledger, 1) == 0);

  // A process without memory leaves nothing to wait for.
  leave(0);
  expect_cleared(&ledger, reap(&ledger, ALLOT_HELD_STILL));

  // A clock that was set back, or garbage, is no reason to wait for ever.
  leave(400);
  expect_left(&ledger, reap(&ledger, ALLOT_HELD_UNKNOWN));
  ledger.usage->slots[0].movable = UINT64_MAX;
  expect_left(&ledger, reap(&ledger, ALLOT_HELD_UNKNOWN));
  pass_time(&ledger);
  expect_cleared(&ledger, reap(&ledger, ALLOT_HELD_UNKNOWN));

  // A process that is alone opens nothing: each cuMemGetInfo comes here.
  snprintf(next.directory, sizeof next.directory, "/nowhere");
  CHECK(reap(&next, ALLOT_HELD_NOT).cleared == 0);

  allot_ledger_close(&next);
  allot_ledger_close(&ledger);
  remove_share();
  return 0;
}
