// SPDX-License-Identifier: Apache-2.0
// sources: lease.c lease_places.c neighbours.c lease_core.c lease_view.c contract.c
// Which neighbours a share believes: no thief of turns, no storm of messages, and each honest one.
#include <stddef.h>

#include "lease_test.h"

// Publishes what it likes, under the epoch of that time: that it has the lease, or that it is a
// little further than the victim and waits.
static void publish(allot_leases *thief, const allot_leases *victim, uint64_t epoch, uint64_t now,
                    bool claims) {
  allot_leases_file *file = thief->file;
  const uint64_t version = (file->root >> 33) + 1, buffer = version % 2;
  const uint64_t root = version << 33 | buffer << 16 | 1;
  const allot_place_state own = {.state = claims ? ALLOT_PLACE_HOLDING : ALLOT_PLACE_WAITING,
                                 .slot = (uint8_t)thief->place,
                                 .since_ns = epoch};
  const allot_seat_buffer *victims = &victim->file->buffers[ALLOT_ROOT_BUFFER(victim->file->root)];
  static uint64_t virtual_ns;
  if (claims) virtual_ns = victims->facts.account.virtual_ns + MS;
  file->buffers[buffer].facts =
      (allot_seat_facts){.account = {.serial = thief->serial, .virtual_ns = virtual_ns},
                         .root = root,
                         .now_ns = now,
                         .epoch = epoch,
                         .granted_ns = epoch,
                         .expires_ns = epoch + 1000 * MS,
                         .holder_seat = claims ? thief->seat : -1,
                         .holder_slot = (unsigned)thief->place,
                         .taken = 1,
                         .holding = claims ? own : (allot_place_state){0},
                         .first = claims ? (allot_place_state){0} : own};
  file->heads[thief->place].beat_ns = file->heads[thief->place].running_ns = now;
  __atomic_store_n(&file->root, root, __ATOMIC_SEQ_CST);
}

// ---- thieves ----

// For how long `victim`, which always has work, computes beside `thief` until it does without it.
typedef struct outcome {
  uint64_t after_ms;  // 0: it believes the thief to the end
  uint64_t turns_ms;
} outcome;

// The thief claims the device for `claimed_ms` of each `period_ms`, and then waits behind the
// victim, whose turn ends as it should. So does that of a third share.
static outcome steal(unsigned claimed_ms, unsigned period_ms, bool has_third, uint64_t seconds) {
  make_device();
  allot_leases thief, victim, third;
  const int one = take_seat(ANYTHING_GOES);
  join_seat(&thief, one);
  join_seat(&victim, take_seat(ANYTHING_GOES));
  if (has_third) join_seat(&third, take_seat(ANYTHING_GOES));
  const uint64_t began = monotonic_ns();
  outcome seen = {0};
  allot_lease lease, thirds = {0};
  allot_lease_want(&victim, began, &lease);
  for (uint64_t now = began + MS; now < began + seconds * 1000 * MS; now += MS) {
    const uint64_t phase = now / MS % period_ms;
    const bool claims = phase < claimed_ms;
    publish(&thief, &victim, claims ? now : now - (phase - claimed_ms) * MS, now, claims);
    allot_lease_beat(&victim, false, now);
    if (lease.held) {
      seen.turns_ms++;
      allot_lease_charge(&victim, MS, 0, now, &lease);
      if (lease.yield) allot_lease_release(&victim, 0, 0, true, now, &lease);
    } else {
      allot_lease_check(&victim, now, &lease);
    }
    if (has_third) {
      allot_lease_beat(&third, false, now);
      if (thirds.held) allot_lease_charge(&third, MS, 0, now, &thirds);
      if (thirds.held && thirds.yield) allot_lease_release(&third, 0, 0, true, now, &thirds);
      if (!thirds.held) allot_lease_check(&third, now, &thirds);
    }
    if (victim.file->distrusted == 0) continue;
    seen.after_ms = (now - began) / MS;
    break;
  }
  CHECK((victim.file->distrusted & ~(1ull << one)) == 0, "the third share is not believed");
  allot_leases_close(&victim);
  allot_leases_close(&thief);
  if (has_third) allot_leases_close(&third);
  remove_device();
  return seen;
}

// However it spreads what it leaves: less than a quarter of the part is too little.
static void a_thief_is_known_whatever_it_leaves(void) {
  static const unsigned patterns[][2] = {{20, 20}, {9980, 10000}, {95, 100}};
  for (unsigned i = 0; i < sizeof patterns / sizeof *patterns; i++) {
    const outcome seen = steal(patterns[i][0], patterns[i][1], false, 60);
    CHECK(seen.after_ms > 0, "%u of %u ms", patterns[i][0], patterns[i][1]);
  }
}

// Two shares of equal weight: the victim keeps more than an eighth of the device.
static void a_share_with_a_quarter_of_its_part_believes(void) {
  const outcome seen = steal(40, 50, false, 20);
  CHECK(seen.after_ms == 0, "after %llu ms", (unsigned long long)seen.after_ms);
  CHECK(seen.turns_ms >= 20000 / 8, "%llu ms", (unsigned long long)seen.turns_ms);
}

static void the_thief_is_blamed_and_not_who_is_robbed_too(void) {
  const outcome seen = steal(97, 100, true, 60);
  CHECK(seen.after_ms > 0);
}

// Says again and again that `named` has the lease.
static void name_other(allot_leases *thief, const allot_leases *victim, const allot_leases *named,
                       uint64_t now) {
  publish(thief, victim, now, now, true);
  allot_seat_facts *facts = &thief->file->buffers[ALLOT_ROOT_BUFFER(thief->file->root)].facts;
  facts->holder_seat = named->seat;
  facts->holder_slot = (unsigned)named->place;
  facts->holding = (allot_place_state){0};
}

static void who_gives_the_device_to_another_is_blamed(void) {
  make_device();
  allot_leases named, victim, thief;
  join_seat(&named, take_seat(ANYTHING_GOES));
  join_seat(&victim, take_seat(ANYTHING_GOES));
  const int last = take_seat(ANYTHING_GOES);
  join_seat(&thief, last);
  uint64_t now = monotonic_ns();
  const uint64_t end = now + 30000 * MS;
  allot_lease theirs = {0}, ours = {0};
  while (now < end && victim.file->distrusted == 0) {
    name_other(&thief, &victim, &named, now += MS / 2);
    allot_lease_beat(&named, true, now);
    allot_lease_tell_running(&named, now);
    if (theirs.held) allot_lease_charge(&named, MS, 0, now, &theirs);
    if (theirs.held && theirs.yield) allot_lease_release(&named, 0, 0, true, now, &theirs);
    if (!theirs.held) allot_lease_check(&named, now, &theirs);
    name_other(&thief, &victim, &named, now += MS / 2);
    allot_lease_beat(&victim, false, now);
    allot_lease_look(&victim, now, &ours);
    if (!ours.held) allot_lease_check(&victim, now, &ours);
  }
  CHECK(victim.file->distrusted == 1ull << last, "%llx",
        (unsigned long long)victim.file->distrusted);
  allot_leases_close(&thief);
  allot_leases_close(&victim);
  allot_leases_close(&named);
  remove_device();
}

// It is given the device by the rules, since it says that it used nothing.
static void who_charges_nothing_is_known_too(void) {
  make_device();
  allot_leases liar, victim;
  const int one = take_seat(ANYTHING_GOES);
  join_seat(&liar, one);
  join_seat(&victim, take_seat(ANYTHING_GOES));
  uint64_t now = monotonic_ns();
  const uint64_t end = now + 60000 * MS;
  allot_lease ours, lies;
  allot_lease_want(&victim, now, &ours);
  allot_lease_want(&liar, now, &lies);
  for (; now < end && victim.file->distrusted == 0; now += MS) {
    allot_lease_beat(&liar, true, now);
    allot_lease_tell_running(&liar, now);
    if (lies.held) allot_lease_charge(&liar, 0, 0, now, &lies);
    if (!lies.held) allot_lease_check(&liar, now, &lies);
    allot_lease_beat(&victim, true, now);
    if (ours.held) {
      allot_lease_charge(&victim, MS, 0, now, &ours);
      if (ours.yield) allot_lease_release(&victim, 0, 0, true, now, &ours);
    } else {
      allot_lease_check(&victim, now, &ours);
    }
  }
  CHECK(victim.file->distrusted == 1u << one);
  allot_leases_close(&victim);
  allot_leases_close(&liar);
  remove_device();
}

// ---- nonsense ----

typedef enum nonsense { FUTURE, NO_SEAT, NO_PLACE, NO_BUFFER, NO_FILE, KINDS } nonsense;

// It claims the device by something that no program of ours writes.
static void claim(allot_leases *liar, const allot_leases *victim, nonsense kind, uint64_t now) {
  publish(liar, victim, now, now, true);
  allot_leases_file *file = liar->file;
  allot_seat_facts *facts = &file->buffers[ALLOT_ROOT_BUFFER(file->root)].facts;
  if (kind == FUTURE) facts->epoch = now + 2000 * MS;
  if (kind == NO_SEAT) facts->holder_seat = ALLOT_SEATS;
  if (kind == NO_PLACE) facts->holding.slot = ALLOT_OWN_PLACES;
  if (kind == NO_BUFFER) file->root |= 0xffffull << 16;
  if (kind == NO_FILE) file->magic = 0;
}

static void nonsense_is_not_believed_for_a_moment(void) {
  for (nonsense kind = FUTURE; kind < KINDS; kind++) {
    make_device();
    allot_leases liar, victim;
    const int one = take_seat(ANYTHING_GOES);
    join_seat(&liar, one);
    join_seat(&victim, take_seat(ANYTHING_GOES));
    const uint64_t now = monotonic_ns();
    allot_lease lease;
    claim(&liar, &victim, kind, now);
    allot_lease_want(&victim, now, &lease);
    CHECK(lease.held && victim.file->distrusted == 1ull << one, "%d", kind);
    allot_leases_close(&victim);
    allot_leases_close(&liar);
    remove_device();
  }
}

// ---- honest neighbours ----

typedef struct program {
  uint32_t guarantee;
  uint64_t kernel_ms, gap_ms;    // it works so long, and then leaves the device idle
  unsigned awake_ms, period_ms;  // where its processor time is limited
  allot_leases leases;
  allot_lease lease;
  bool is_running;
  uint64_t ends_ns, idle_until_ns, uncharged_ns, charged_ns, used_ms;
} program;

// What the shim does in a millisecond. It charges long kernels while they run.
static void advance(program *of, uint64_t now) {
  if (of->is_running && of->kernel_ms > 5 && now < of->ends_ns) {
    uint64_t ran_ns = of->kernel_ms * MS - (of->ends_ns - now);
    of->uncharged_ns += ran_ns - of->charged_ns;
    of->charged_ns = ran_ns;
  }
  if (of->is_running && now >= of->ends_ns) {
    of->is_running = false;
    of->uncharged_ns += of->kernel_ms * MS - of->charged_ns;
    if (of->charged_ns > 0) of->leases.longest_ns = of->kernel_ms * MS;
    of->charged_ns = 0;
    of->used_ms += of->kernel_ms;
    of->idle_until_ns = now + of->gap_ms * MS;
  }
  if (of->period_ms > 0 && now / MS % of->period_ms >= of->awake_ms) return;
  const bool wants = !of->is_running && now >= of->idle_until_ns;
  allot_leases *leases = &of->leases;
  leases->burst_ns = leases->launch_ns = of->kernel_ms * MS;
  leases->gap_ns = of->gap_ms * MS;
  if (of->is_running) allot_lease_tell_running(leases, of->ends_ns - of->kernel_ms * MS);
  if (of->lease.held || of->is_running) allot_lease_beat(leases, of->is_running, now);
  if (of->lease.held || of->uncharged_ns > 0) {
    allot_lease_charge(leases, of->uncharged_ns, 0, now, &of->lease);
    of->uncharged_ns = 0;
  }
  const bool is_over = of->lease.yield || (!wants && of->lease.keep_ns < of->gap_ms * MS);
  if (of->lease.held && !of->is_running && is_over) {
    allot_lease_release(leases, 0, 0, wants, now, &of->lease);
  }
  if (wants && !of->lease.held) allot_lease_want(leases, now, &of->lease);
  if (wants && !of->lease.held) allot_lease_check(leases, now, &of->lease);
  if (!wants || !of->lease.held || of->lease.yield) return;
  of->is_running = true;
  of->ends_ns = now + of->kernel_ms * MS;
}

// In points of the device.
static double part_of(const program *of, uint64_t seconds) {
  return (double)of->used_ms / (double)seconds / 10;
}

static void compute_side_by_side(program *first, program *second, uint64_t seconds) {
  program *both[2] = {first, second};
  make_device();
  for (int i = 0; i < 2; i++) {
    join_seat(&both[i]->leases,
              take_seat(ALLOT_TERMS(both[i]->guarantee, ALLOT_WHOLE, 100, ALLOT_CLASS_NORMAL,
                                    ALLOT_TERMS_TAKEN | ALLOT_TERMS_GOVERNED)));
  }
  const uint64_t began = monotonic_ns();
  for (uint64_t now = began; now < began + seconds * 1000 * MS; now += MS) {
    for (int i = 0; i < 2; i++) {
      advance(both[i], now);
      CHECK(both[i]->leases.file->distrusted == 0, "after %llu ms, %.1f beside %.1f points",
            (unsigned long long)((now - began) / MS), part_of(first, seconds),
            part_of(second, seconds));
    }
  }
  for (int i = 0; i < 2; i++) allot_leases_close(&both[i]->leases);
  remove_device();
}

// Whose processor time is limited is stopped for nine tenths of the time, and loses its turns while
// it is. Neither is its neighbour's fault.
static void a_throttled_share_and_its_neighbour_believe_each_other(void) {
  static const unsigned limits[][2] = {{10, 100}, {2, 10}};
  for (unsigned i = 0; i < sizeof limits / sizeof *limits; i++) {
    program slow = {.guarantee = 5000, .kernel_ms = 1, .awake_ms = limits[i][0]};
    slow.period_ms = limits[i][1];
    program quick = {.guarantee = 5000, .kernel_ms = 1};
    compute_side_by_side(&slow, &quick, 15);
    if (slow.period_ms == 100) CHECK(part_of(&slow, 15) >= 0.8 * slow.awake_ms);
    CHECK(part_of(&quick, 15) >= 12.5);
  }
}

static void long_kernels_are_no_theft(void) {
  program usual = {.guarantee = 5000, .kernel_ms = 1};
  program slow = {.guarantee = 5000, .kernel_ms = 900};
  compute_side_by_side(&usual, &slow, 15);
  CHECK(part_of(&usual, 15) >= 45);
  // It leaves gaps, in which a long kernel begins.
  program waits = {.guarantee = 7500, .kernel_ms = 1, .gap_ms = 1};
  slow = (program){.guarantee = 2500, .kernel_ms = 900};
  compute_side_by_side(&waits, &slow, 15);
}

// After a kernel of two seconds, 38 pass before its next.
static void a_small_part_of_long_kernels_is_waited_for(void) {
  program small = {.guarantee = 500, .kernel_ms = 2000};
  program large = {.guarantee = 9500, .kernel_ms = 1};
  compute_side_by_side(&small, &large, 30);
}

// It begins when its share is behind, which is no reason to let it run for ever.
static void a_kernel_without_an_end_is_waited_for_a_second(void) {
  program busy = {.guarantee = 5000, .kernel_ms = 1};
  program endless = {.guarantee = 5000, .kernel_ms = 3600000, .idle_until_ns = monotonic_ns() + MS};
  compute_side_by_side(&busy, &endless, 4);
  CHECK(busy.used_ms >= 2900, "%llu ms", (unsigned long long)busy.used_ms);
}

// Its launches wait behind a queue that waits for the host before each kernel. With each turn it
// finds that nothing of the queue has begun, and gives it back.
static void a_queue_that_waits_and_its_neighbour_believe_each_other(void) {
  make_device();
  program waits = {.guarantee = 5000}, other = {.guarantee = 5000, .kernel_ms = 20};
  program *both[2] = {&waits, &other};
  for (int i = 0; i < 2; i++) {
    join_seat(&both[i]->leases, take_seat(ANYTHING_GOES));
  }
  allot_leases *leases = &waits.leases;
  leases->launch_ns = MS;
  leases->is_stalled = true;
  const uint64_t began = monotonic_ns();
  uint64_t asks_ns = began, ends_ns = began + 30 * MS;
  for (uint64_t now = began; now < began + 40000 * MS; now += MS) {
    allot_lease_beat(leases, true, now);
    if (now >= ends_ns) {
      ends_ns = now + 31 * MS;
      allot_lease_charge(leases, MS, 0, now, &waits.lease);
    }
    if (now >= asks_ns) allot_lease_check(leases, now, &waits.lease);
    if (waits.lease.held) {
      asks_ns = now + 2 * MS;
      allot_lease_release(leases, 0, 0, false, now + MS / 10, &waits.lease);
    }
    advance(&other, now + MS / 5);
    CHECK(leases->file->distrusted == 0 && other.leases.file->distrusted == 0, "after %llu ms",
          (unsigned long long)((now - began) / MS));
  }
  CHECK(part_of(&other, 40) >= 75);
  for (int i = 0; i < 2; i++) allot_leases_close(&both[i]->leases);
  remove_device();
}

// ---- messages ----

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
  a_share_with_a_quarter_of_its_part_believes();
  the_thief_is_blamed_and_not_who_is_robbed_too();
  who_gives_the_device_to_another_is_blamed();
  who_charges_nothing_is_known_too();
  nonsense_is_not_believed_for_a_moment();
  a_throttled_share_and_its_neighbour_believe_each_other();
  long_kernels_are_no_theft();
  a_small_part_of_long_kernels_is_waited_for();
  a_kernel_without_an_end_is_waited_for_a_second();
  a_queue_that_waits_and_its_neighbour_believe_each_other();
  storms_of_messages_are_not_heard();
  puts("ok");
  return 0;
}
