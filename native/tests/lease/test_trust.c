// SPDX-License-Identifier: Apache-2.0
// sources: lease.c lease_places.c neighbours.c lease_core.c lease_view.c contract.c
// Which neighbours a share believes: no thief of turns, no storm of messages, and each honest one.
#include <stddef.h>

#include "lease_test.h"

static allot_lease_state state;

// Says that the share has the lease, and lives.
static void claim(allot_leases *thief, uint64_t now) {
  allot_leases_file *file = thief->file;
  const uint64_t version = (file->root >> 33) + 1, buffer = version % 2;
  const uint64_t root = version << 33 | buffer << 16 | 1;
  file->buffers[buffer].facts =
      (allot_seat_facts){.account = {.serial = thief->serial},
                         .root = root,
                         .now_ns = now,
                         .epoch = now,
                         .granted_ns = now,
                         .expires_ns = now + 1000 * MS,
                         .holder_seat = thief->seat,
                         .holder_slot = (unsigned)thief->place,
                         .taken = 1,
                         .holding = {.state = ALLOT_PLACE_HOLDING, .slot = (uint8_t)thief->place}};
  file->heads[thief->place].beat_ns = file->heads[thief->place].running_ns = now;
  __atomic_store_n(&file->root, root, __ATOMIC_SEQ_CST);
}

// A thief that the machine stops now and then leaves crumbs of turns: they are not what the other
// waits for. Half a minute of waits suffices to go on without it.
static void a_thief_is_known_whatever_it_leaves(void) {
  make_device();
  allot_leases thief, other;
  int one = take_seat(ANYTHING_GOES);
  join_seat(&thief, one);
  join_seat(&other, take_seat(ANYTHING_GOES));
  uint64_t now = monotonic_ns();
  const uint64_t began = now;
  uint64_t turns = 0;
  allot_lease lease;
  allot_lease_want(&other, now, &lease);
  while (other.file->distrusted == 0 && now < began + 60000 * MS) {
    now += MS;
    if (now / MS % 70 < 40) claim(&thief, now);
    allot_lease_beat(&other, false, now);
    if (lease.held) {
      turns++;
      allot_lease_charge(&other, MS, 0, now, &lease);
    } else {
      allot_lease_check(&other, now, &lease);
    }
  }
  CHECK(other.file->distrusted == 1u << one && turns > 0);
  CHECK(now < began + 30000 * MS, "after %llu ms", (unsigned long long)((now - began) / MS));
  allot_lease_check(&other, now, &lease);
  CHECK(lease.held && lease.alone);
  allot_leases_close(&other);
  allot_leases_close(&thief);
  remove_device();
}

// A share whose processor time is limited is stopped for nine tenths of the time, and loses its
// turns while it is. Its neighbour is honest.
static void a_neighbour_of_a_throttled_share_is_believed(void) {
  make_device();
  allot_leases slow, honest;
  join_seat(&slow, take_seat(ANYTHING_GOES));
  join_seat(&honest, take_seat(ANYTHING_GOES));
  uint64_t now = monotonic_ns();
  const uint64_t end = now + 120000 * MS;
  allot_lease ours, theirs;
  allot_lease_want(&honest, now, &theirs);
  allot_lease_want(&slow, now, &ours);
  for (; now < end; now += MS) {
    allot_lease_beat(&honest, true, now);
    if (!theirs.held) allot_lease_check(&honest, now, &theirs);
    // Pieces of 20 ms: its turns end while the other is stopped.
    if (theirs.held && now / MS % 20 == 0) {
      allot_lease_release(&honest, 20 * MS, 0, true, now, &theirs);
    }
    if (now / MS % 100 >= 10) continue;
    allot_lease_beat(&slow, true, now);
    if (ours.held) {
      allot_lease_charge(&slow, MS, 0, now, &ours);
      if (ours.yield) allot_lease_release(&slow, 0, 0, true, now, &ours);
    } else {
      allot_lease_check(&slow, now, &ours);
    }
    CHECK(slow.file->distrusted == 0, "after %llu ms", (unsigned long long)(end - now) / MS);
  }
  allot_leases_read(&slow, &state);
  CHECK(state.seats[slow.seat].used_ns < 12000 * MS);  // it is far from its half
  allot_leases_close(&honest);
  allot_leases_close(&slow);
  remove_device();
}

// Who wakes another without end is not heard for some time.
static void storms_of_messages_are_not_heard(void) {
  make_device();
  allot_leases first, second;
  int one = take_seat(ANYTHING_GOES);
  join_seat(&first, one);
  join_seat(&second, take_seat(ANYTHING_GOES));
  uint64_t now = monotonic_ns();
  allot_lease lease;
  allot_lease_want(&second, now, &lease);
  CHECK(lease.held && !lease.alone);
  for (int i = 0; i < 5000; i++) {
    __atomic_add_fetch(&first.file->told[second.seat], 1, __ATOMIC_SEQ_CST);
    if (i % 100 != 0) continue;
    if (i < 1000) CHECK(allot_lease_is_called(&second));
    allot_lease_look(&second, now += MS / 10, &lease);
  }
  CHECK(!allot_lease_is_called(&second) && (second.file->distrusted & 1u << one) != 0);
  CHECK(lease.held && lease.alone);
  allot_lease_look(&second, now + 11000 * MS, &lease);
  CHECK(lease.held && !lease.alone && second.file->distrusted == 0);
  allot_leases_close(&second);
  allot_leases_close(&first);
  remove_device();
}

int main(void) {
  a_thief_is_known_whatever_it_leaves();
  a_neighbour_of_a_throttled_share_is_believed();
  storms_of_messages_are_not_heard();
  puts("ok");
  return 0;
}
