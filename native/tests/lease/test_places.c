// SPDX-License-Identifier: Apache-2.0
// sources: ledger.c lease.c lease_places.c neighbours.c lease_core.c lease_view.c contract.c
// Places: they outlive closed descriptors, end with their process and not with its children's, run
// out with a clear error. Seats: who has lost one goes on as best effort. Damaged files are
// refused.
#include <stddef.h>

#include "../../ledger.h"
#include "lease_test.h"

static allot_lease_state state;

// A clock that goes on by a little at each look, if it is set: nobody is evicted because the
// machine let this process wait.
static uint64_t slow_ns;

static uint64_t clock_ns(void) {
  return slow_ns != 0 ? slow_ns += 10000 : monotonic_ns();
}

static allot_lease want(allot_leases *leases) {
  allot_lease lease;
  allot_lease_want(leases, clock_ns(), &lease);
  return lease;
}

static allot_lease release(allot_leases *leases, uint64_t used_ns) {
  allot_lease lease;
  allot_lease_release(leases, used_ns, 0, false, clock_ns(), &lease);
  return lease;
}

static allot_lease look(allot_leases *leases) {
  allot_lease lease;
  allot_lease_look(leases, clock_ns(), &lease);
  return lease;
}

// As a waiter does until it has the lease.
static bool wait_for_lease(allot_leases *leases, int longest_ms) {
  allot_lease lease = want(leases);
  for (int ms = 0; !lease.held && ms < longest_ms; ms++) {
    usleep(1000);
    allot_lease_check(leases, monotonic_ns(), &lease);
  }
  return lease.held;
}

// ---- one process's life ----

static void turns_are_taken(void) {
  make_device();
  allot_leases first, second;
  join_seat(&first, take_seat(ANYTHING_GOES));
  allot_lease lease = want(&first);
  CHECK(lease.held && lease.alone && !lease.contended && !lease.yield);
  const uint64_t first_epoch = lease.epoch;
  CHECK(lease.budget_ns == UINT64_MAX && !lease.latency_active);
  join_seat(&second, take_seat(ANYTHING_GOES));
  CHECK(!look(&first).alone && !allot_lease_is_called(&first));
  lease = want(&second);
  CHECK(!lease.held && lease.retry_ns > slow_ns);
  CHECK(allot_lease_is_called(&first) && !allot_lease_is_called(&second));
  lease = look(&first);
  CHECK(lease.held && lease.contended && !allot_lease_is_called(&first));
  lease = release(&first, 3 * MS);
  const uint64_t second_epoch = lease.epoch;
  CHECK(!lease.held && second_epoch > first_epoch);
  lease = look(&second);
  CHECK(lease.held && lease.epoch == second_epoch && !lease.contended);
  allot_leases_read(&second, &state);
  CHECK(state.seats[first.seat].used_ns == 3 * MS && state.seats[first.seat].leases == 1);
  allot_leases_leave(&second);
  CHECK(second.place == -1 && !look(&first).contended && want(&first).held);
  check_state(&first);
  allot_leases_close(&second);
  allot_leases_close(&first);
  remove_device();
}

// The first of two seats, whose word counts of equally new ones, waits: the other still knows best
// for how long it has the lease.
static void a_prolonged_lease_lasts(void) {
  make_device();
  allot_leases first, second;
  join_seat(&first, take_seat(ANYTHING_GOES));
  join_seat(&second, take_seat(ANYTHING_GOES));
  uint64_t now = monotonic_ns();
  allot_lease lease;
  allot_lease_want(&first, now, &lease);
  allot_lease_want(&second, now + MS, &lease);
  allot_lease_release(&first, 50 * MS, 0, false, now + 2 * MS, &lease);
  allot_lease_charge(&second, 0, 0, now + 2 * MS, &lease);
  CHECK(lease.held);
  allot_lease_want(&first, now + 3 * MS, &lease);
  CHECK(!lease.held);
  allot_lease_charge(&second, 10 * MS, 0, now + 14 * MS, &lease);
  CHECK(lease.held && lease.contended && !lease.yield);
  allot_lease_look(&second, now + 15 * MS, &lease);
  CHECK(lease.held && lease.contended && !lease.yield);
  allot_leases_close(&second);
  allot_leases_close(&first);
  remove_device();
}

static void ceilings_are_told(void) {
  make_device();
  allot_leases own;
  uint64_t terms =
      ALLOT_TERMS(1000, 1000, 100, ALLOT_CLASS_NORMAL, ALLOT_TERMS_TAKEN | ALLOT_TERMS_GOVERNED);
  join_seat(&own, take_seat(terms));
  uint64_t now = slow_ns = monotonic_ns();  // no earlier than the budget's
  allot_lease lease = want(&own);
  CHECK(lease.held && lease.budget_ns > 0 && lease.budget_ns <= 25 * MS);
  allot_lease_charge(&own, 40 * MS, 0, now, &lease);
  CHECK(lease.held && lease.yield && lease.budget_ns == 0);
  allot_lease_release(&own, 0, 0, true, now, &lease);
  // A tenth of the time: what lacks of 2 ms is there ten times as long later.
  CHECK(!lease.held && lease.retry_ns > now && lease.retry_ns <= now + 51 * MS);
  for (uint64_t at = now; at < now + 149 * MS; at += 10 * MS) {
    allot_lease_check(&own, at, &lease);
    CHECK(!lease.held, "%llu ms early", (unsigned long long)((now + 150 * MS - at) / MS));
  }
  allot_lease_check(&own, now + 450 * MS, &lease);
  CHECK(lease.held);
  allot_leases_close(&own);
  remove_device();
}

// ---- places ----

static void closing_all_descriptors_keeps_the_place(void) {
  make_device();
  int seat = take_seat(ANYTHING_GOES);
  allot_leases other;
  join_seat(&other, seat);
  int pipes[2], back[2];
  CHECK(pipe(pipes) == 0 && pipe(back) == 0);
  pid_t child = fork_child();
  if (child == 0) {
    allot_leases own;
    join_seat(&own, seat);
    CHECK(want(&own).held);
    for (int i = 3; i < 256; i++) {
      if (i != pipes[0] && i != back[1]) close(i);
    }
    CHECK(write(back[1], "x", 1) == 1);
    char byte;
    while (read(pipes[0], &byte, 1) == 1) allot_lease_beat(&own, true, monotonic_ns());
    _exit(look(&own).held ? 1 : 0);
  }
  close(pipes[0]);
  char byte;
  CHECK(read(back[0], &byte, 1) == 1);
  allot_lease lease = want(&other);
  // Its time runs out and it answers nothing but its beat: not dead, so it keeps the lease.
  for (int i = 0; i < 50; i++) {
    CHECK(write(pipes[1], "x", 1) == 1);
    usleep(1000);
    allot_lease_check(&other, monotonic_ns(), &lease);
    if (lease.held) break;
  }
  allot_leases_read(&other, &state);
  // (A machine that did not run it for 25 ms had it evicted as stopped. It still has its place.)
  CHECK(!lease.held || state.seats[seat].evictions == 1);
  CHECK(state.places_taken == 2);
  kill(child, SIGSTOP);
  CHECK(wait_for_lease(&other, 2000));
  close(pipes[1]);
  kill(child, SIGCONT);
  wait_for(child);
  allot_leases newcomer;
  join_seat(&newcomer, seat);
  CHECK(newcomer.place == 1);
  allot_leases_close(&newcomer);
  allot_leases_close(&other);
  remove_device();
}

static void children_do_not_keep_a_dead_parents_place(void) {
  make_device();
  int seat = take_seat(ANYTHING_GOES);
  allot_leases other;
  join_seat(&other, seat);
  int pipes[2], back[2];
  CHECK(pipe(pipes) == 0 && pipe(back) == 0);
  pid_t parent = fork_child();
  if (parent == 0) {
    allot_leases own;
    join_seat(&own, seat);
    CHECK(want(&own).held);
    if (fork() == 0) {
      char byte = 'x';
      close(pipes[1]);
      CHECK(write(back[1], &byte, 1) == 1);
      _exit(read(pipes[0], &byte, 1) < 0 ? 1 : 0);
    }
    raise(SIGKILL);
  }
  char byte;
  CHECK(read(back[0], &byte, 1) == 1);
  CHECK(waitpid(parent, NULL, 0) == parent);
  CHECK(wait_for_lease(&other, 2000));
  allot_leases_read(&other, &state);
  CHECK(state.places_taken == 1 && state.seats[seat].evictions == 0);
  close(pipes[1]);
  allot_leases_close(&other);
  remove_device();
}

static void places_run_out_and_come_back(void) {
  make_device();
  int seat = take_seat(ANYTHING_GOES);
  static allot_leases owners[ALLOT_OWN_PLACES];
  allot_leases one_more;
  for (int i = 0; i < (int)ALLOT_OWN_PLACES; i++) {
    join_seat(&owners[i], seat);
    CHECK(owners[i].place == i);
  }
  open_seat(&one_more, seat);
  CHECK(allot_leases_join(&one_more) == -ENOSPC && one_more.place == -1);
  CHECK(want(&owners[ALLOT_OWN_PLACES - 1]).held && !want(&owners[7]).held);
  check_state(&one_more);
  allot_leases_close(&owners[5]);
  CHECK(allot_leases_join(&one_more) == 0 && one_more.place == 5);
  release(&owners[ALLOT_OWN_PLACES - 1], 0);
  CHECK(look(&owners[7]).held);
  for (int i = 0; i < (int)ALLOT_OWN_PLACES; i++) {
    if (i != 5) allot_leases_close(&owners[i]);
  }
  CHECK(look(&one_more).alone && want(&one_more).held);
  allot_leases_close(&one_more);
  remove_device();
}

static void new_terms_wake_the_places_that_processes_have(void) {
  make_device();
  allot_leases own;
  int seat = take_seat(ANYTHING_GOES);
  join_seat(&own, seat);
  const uint32_t before = own.file->heads[own.place].wake;
  take_seat(ANYTHING_GOES);
  CHECK(own.file->heads[own.place].wake == before + 1);
  CHECK(allot_contract_change(device, seat, serials[seat], ANYTHING_GOES | 100) == 0);
  CHECK(own.file->heads[own.place].wake == before + 2);
  for (int place = 0; place < (int)ALLOT_OWN_PLACES; place++) {
    if (place != own.place) CHECK(own.file->heads[place].wake == 0, "%d", place);
  }
  allot_leases_close(&own);
  remove_device();
}

// Both are bytes of one file. A place must not make the slot of a process that ended look alive:
// its memory would stay charged.
static void places_are_no_slots(void) {
  make_device();
  snprintf(lock_path, sizeof lock_path, "%s/usage", device);
  const allot_policy policy = {.device_count = 1, .devices = {{.memory_limit = 1000}}};
  CHECK(allot_ledger_create(device, &policy) == 0);
  allot_ledger ended, looker;
  CHECK(allot_ledger_open(&ended, device) == 0 && allot_ledger_open(&looker, device) == 0);
  CHECK(allot_ledger_attach(&ended) == 0 && allot_ledger_reserve(&ended, 0, 400));
  allot_ledger_close(&ended);
  allot_leases own;
  join_seat(&own, take_seat(ANYTHING_GOES));
  CHECK(!allot_ledger_slot_alive(&looker, 0));
  CHECK(allot_ledger_clear(&looker, 0) == 0 && allot_ledger_clear(&looker, UINT64_MAX) == 1);
  CHECK(allot_ledger_used(&looker, 0) == 0);
  CHECK(allot_ledger_attach(&looker) == 0 && looker.slot == 0 && own.place == 0);
  allot_leases_close(&own);
  allot_ledger_close(&looker);
  remove_device();
}

// A process that reads a file can lock it for reading.
static void readers_locks_keep_nobody_from_a_place(void) {
  make_device();
  int seat = take_seat(ANYTHING_GOES);
  char path[128];
  path_of_seat(serials[seat], path);
  int descriptor = open(path, O_RDONLY);
  struct flock all = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
  CHECK(descriptor >= 0 && fcntl(descriptor, F_OFD_SETLK, &all) == 0);
  allot_leases own;
  join_seat(&own, seat);
  CHECK(want(&own).held);
  allot_leases_close(&own);
  close(descriptor);
  remove_device();
}

static void a_damaged_place_is_taken_anew(void) {
  make_device();
  allot_leases own, other;
  join_seat(&own, take_seat(ANYTHING_GOES));
  join_seat(&other, take_seat(ANYTHING_GOES));
  CHECK(want(&own).held);
  uint64_t root = own.file->root;
  allot_lease_state *in_force = &own.file->buffers[ALLOT_ROOT_BUFFER(root)].state;
  memset(in_force->places, 0, sizeof in_force->places);
  CHECK(wait_for_lease(&other, 100));
  CHECK(release(&other, 0).epoch != 0 && wait_for_lease(&own, 100));
  check_state(&own);
  allot_leases_read(&own, &state);
  CHECK(state.places_taken == 2 && state.places[own.place].seat == own.seat);
  allot_leases_close(&own);
  allot_leases_close(&other);
  remove_device();
}

// What a machine finds in a file on its disk after it was started again: a holder and beats of a
// later time, and no living process.
static void a_machine_that_was_started_again(void) {
  make_device();
  int seat = take_seat(ANYTHING_GOES);
  const uint64_t later = monotonic_ns() + 86400ull * 1000 * MS;
  pid_t before = fork_child();
  if (before == 0) {
    allot_leases leases[3];
    for (int i = 0; i < 3; i++) {
      allot_lease lease;
      join_seat(&leases[i], seat);
      allot_lease_want(&leases[i], later, &lease);
      allot_lease_beat(&leases[i], true, later);
    }
    _exit(0);
  }
  wait_for(before);
  allot_leases own;
  join_seat(&own, seat);
  CHECK(wait_for_lease(&own, 100));
  CHECK(look(&own).alone);
  allot_leases_close(&own);
  remove_device();
}

// ---- seats ----

static void who_lost_the_seat_is_best_effort(void) {
  make_device();
  allot_leases own, other;
  int seat = take_seat(ANYTHING_GOES | 5000);
  join_seat(&own, seat);
  CHECK(want(&own).held);
  CHECK(allot_contract_free(device, seat, serials[seat]) == 0);
  CHECK(look(&own).yield);
  CHECK(take_seat(ANYTHING_GOES | 2000) == seat);
  join_seat(&other, seat);
  CHECK(look(&own).yield);
  // What it used by then is not the newcomer's.
  allot_lease lease;
  allot_lease_release(&own, 30 * MS, 0, true, clock_ns(), &lease);
  CHECK(own.seat == (int)ALLOT_SEAT_UNBOOKED);
  allot_leases_read(&own, &state);
  CHECK(state.seats[seat].used_ns == 0 && state.seats[seat].serial == serials[seat]);
  CHECK(lease.held);  // no other process wants it
  // No other process sees it, and it sees the others: it runs while none of them wants to.
  CHECK(want(&other).held && !look(&own).held);
  CHECK(!want(&own).held);
  release(&other, MS);
  CHECK(look(&own).held);
  check_state(&own);
  allot_leases_close(&other);
  allot_leases_close(&own);
  remove_device();
}

static void suspended_shares_get_no_lease(void) {
  make_device();
  allot_leases own, other;
  int seat = take_seat(ANYTHING_GOES);
  join_seat(&own, seat);
  join_seat(&other, take_seat(ANYTHING_GOES));
  CHECK(want(&own).held);
  uint64_t terms = ANYTHING_GOES | ALLOT_TERMS_SUSPENDED;
  CHECK(allot_contract_change(device, seat, serials[seat], terms) == 0);
  allot_lease lease;
  allot_lease_charge(&own, MS, 0, clock_ns(), &lease);
  CHECK(lease.held && lease.yield);
  allot_lease_release(&own, MS, 0, true, clock_ns(), &lease);
  CHECK(!lease.held && !want(&own).held && want(&other).held);
  CHECK(!release(&other, MS).held && !look(&own).held);
  CHECK(allot_contract_change(device, seat, serials[seat], ANYTHING_GOES) == 0);
  CHECK(wait_for_lease(&own, 100));
  allot_leases_close(&own);
  allot_leases_close(&other);
  remove_device();
}

static void guarantees_are_not_promised_twice(void) {
  make_device();
  uint64_t serial;
  int seat = take_seat(ANYTHING_GOES | 6000);
  CHECK(allot_contract_take(device, "b", ANYTHING_GOES | 4001, &serial) == -ERANGE);
  int other = take_seat(ANYTHING_GOES | 4000);
  CHECK(other != seat && serials[other] != serials[seat]);
  CHECK(allot_contract_change(device, seat, serials[seat], ANYTHING_GOES | 6001) == -ERANGE);
  CHECK(allot_contract_change(device, seat, serials[seat], ANYTHING_GOES | 5000) == 0);
  CHECK(allot_contract_change(device, seat, serials[seat] + 9, ANYTHING_GOES) == -ESTALE);
  CHECK(allot_contract_free(device, seat, serials[seat] + 9) == 0);
  CHECK(allot_contract_take(device, "c", ANYTHING_GOES | 5001, &serial) == -ERANGE);
  CHECK(allot_contract_free(device, seat, serials[seat]) == 0);
  CHECK(allot_contract_take(device, "c", ANYTHING_GOES | 6000, &serial) == seat);
  CHECK(serial != serials[seat] && serial != serials[other]);

  const uint64_t impossible[] = {
      ALLOT_TERMS(0, 0, 100, ALLOT_CLASS_NORMAL, 0),
      ALLOT_TERMS(0, ALLOT_WHOLE + 1, 100, ALLOT_CLASS_NORMAL, 0),
      ALLOT_TERMS(301, 300, 100, ALLOT_CLASS_NORMAL, 0),
      ALLOT_TERMS(0, ALLOT_WHOLE, 0, ALLOT_CLASS_NORMAL, 0),
      ALLOT_TERMS(0, ALLOT_WHOLE, 100, 3, 0),
  };
  for (size_t i = 0; i < sizeof impossible / sizeof *impossible; i++)
    CHECK(allot_contract_take(device, "d", impossible[i], &serial) == -EINVAL, "%zu", i);
  CHECK(allot_contract_change(device, (int)ALLOT_SEAT_UNBOOKED, 1, ANYTHING_GOES) == -EINVAL);
  for (int i = 2; i < (int)ALLOT_SEAT_UNBOOKED; i++) take_seat(ANYTHING_GOES);
  CHECK(allot_contract_take(device, "e", ANYTHING_GOES, &serial) == -ENOSPC);
  remove_device();
}

// ---- files ----

static void write_at(const char *path, size_t offset, const void *data, size_t size) {
  int descriptor = open(path, O_WRONLY);
  CHECK(descriptor >= 0 && pwrite(descriptor, data, size, (off_t)offset) == (ssize_t)size);
  close(descriptor);
}

static int open_first(void) {
  allot_leases leases;
  int error = try_to_open(&leases, 0, serials[0]);
  if (error == 0) allot_leases_close(&leases);
  return error;
}

static void damaged_files_are_refused(void) {
  const uint32_t newer = ALLOT_SEAT_VERSION + 1;
  uint64_t serial;
  allot_leases leases;
  char own[128];
  const allot_leases_paths none = {"/nonexistent", "/nonexistent", "/nonexistent", "/x", 0};
  CHECK(allot_leases_open(&leases, &none, 0, 1) == -ENOENT);
  make_device();
  take_seat(ANYTHING_GOES);
  CHECK(open_first() == 0);
  CHECK(allot_contract_create(device, "GPU-0") == -EEXIST && open_first() == 0);
  path_of_seat(serials[0], own);
  allot_leases_paths paths = {contract_path, seats_path, own, lock_path, 0};
  CHECK(allot_leases_open(&leases, &paths, -1, 1) == -EINVAL);
  CHECK(allot_leases_open(&leases, &paths, ALLOT_SEATS, 1) == -EINVAL);
  // One for the other.
  paths.contract = own;
  CHECK(allot_leases_open(&leases, &paths, 0, 1) == -EINVAL);
  paths.contract = paths.own = contract_path;
  CHECK(allot_leases_open(&leases, &paths, 0, 1) == -EINVAL);
  write_at(contract_path, offsetof(allot_contract, version), &newer, sizeof newer);
  CHECK(open_first() == -EPROTO);
  CHECK(allot_contract_take(device, "a", ANYTHING_GOES, &serial) == -EPROTO);
  write_at(contract_path, 0, "garbage!", 8);
  CHECK(open_first() == -EINVAL);
  remove_device();

  static const off_t lengths[] = {0, 8, 4096, (off_t)sizeof(allot_contract) - 1};
  for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) {
    make_device();
    take_seat(ANYTHING_GOES);
    CHECK(truncate(contract_path, lengths[j]) == 0);
    CHECK(open_first() == -EINVAL, "%zu", j);
    CHECK(allot_contract_take(device, "a", ANYTHING_GOES, &serial) == -EINVAL);
    CHECK(allot_contract_free(device, 0, 9) == -EINVAL);
    remove_device();
  }
}

// ---- a share's own file that one of its programs damaged, and that was put right ----

static void goes_on(allot_leases *first, allot_leases *second, uint64_t now) {
  allot_lease lease;
  allot_lease_want(first, now, &lease);
  CHECK(lease.held);
  allot_lease_want(second, now + MS, &lease);
  CHECK(!lease.held);
  allot_lease_release(first, MS, 0, false, now + 2 * MS, &lease);
  allot_lease_look(second, now + 2 * MS, &lease);
  CHECK(lease.held);
  allot_lease_release(second, MS, 0, false, now + 3 * MS, &lease);
  CHECK(first->file->heads[first->place].pid == getpid());
  check_state(first);
}

static void damaged_leases_are_put_right(void) {
  static const off_t lengths[] = {0, 1, 100, 4096, 20480, 30000, sizeof(allot_leases_file) - 1};
  static const size_t places[] = {0, offsetof(allot_leases_file, version),
                                  offsetof(allot_leases_file, root)};
  const uint64_t nonsense = UINT64_MAX;
  const size_t count = sizeof lengths / sizeof *lengths, all = count + 3;
  for (size_t i = 0; i < all; i++) {
    make_device();
    allot_leases first, second, newcomer;
    char path[128];
    int one = take_seat(ANYTHING_GOES), other = take_seat(ANYTHING_GOES);
    CHECK(one == 0);
    path_of_seat(serials[one], path);
    join_seat(&first, one);
    join_seat(&second, other);
    CHECK(allot_leases_mend(path) == 0);
    goes_on(&first, &second, monotonic_ns());

    if (i < count) {
      CHECK(truncate(path, lengths[i]) == 0);
    } else {
      write_at(path, places[i - count], &nonsense, sizeof(uint32_t));
      // What nothing depends on is seen with the share's next decision.
      allot_lease lease;
      if (i < all - 1) allot_lease_charge(&first, 0, 0, monotonic_ns(), &lease);
    }
    CHECK(i == all - 1 || open_first() != 0);
    // The other does without it meanwhile.
    CHECK(want(&second).held);
    bool is_seen = i >= count || lengths[i] < 12;  // its mark is gone
    CHECK(!is_seen || (second.file->distrusted & 1u << one) != 0, "%zu", i);
    release(&second, MS);
    CHECK(allot_leases_mend(path) == 1, "%zu", i);
    CHECK(allot_leases_mend(path) == 0 && open_first() == 0);
    // Processes that were there go on, and none gets a place of another. It is believed again
    // later.
    uint64_t later = monotonic_ns() + 11000 * MS;
    goes_on(&first, &second, later);
    CHECK(second.file->distrusted == 0);
    join_seat(&newcomer, one);
    CHECK(newcomer.place != first.place);
    goes_on(&newcomer, &second, later + 100 * MS);
    allot_leases_close(&newcomer);
    allot_leases_close(&second);
    allot_leases_close(&first);
    remove_device();
  }
}

int main(void) {
  slow_ns = monotonic_ns();
  turns_are_taken();
  a_prolonged_lease_lasts();
  ceilings_are_told();
  places_run_out_and_come_back();
  new_terms_wake_the_places_that_processes_have();
  places_are_no_slots();
  suspended_shares_get_no_lease();
  slow_ns = 0;
  closing_all_descriptors_keeps_the_place();
  children_do_not_keep_a_dead_parents_place();
  readers_locks_keep_nobody_from_a_place();
  a_damaged_place_is_taken_anew();
  a_machine_that_was_started_again();
  who_lost_the_seat_is_best_effort();
  guarantees_are_not_promised_twice();
  damaged_files_are_refused();
  damaged_leases_are_put_right();
  puts("ok");
  return 0;
}
