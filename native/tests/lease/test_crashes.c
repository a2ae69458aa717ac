// SPDX-License-Identifier: Apache-2.0
// sources: lease_core.c lease_view.c
// Ends, or stops, a process after every single step of every operation. The others go on: nobody
// holds beside somebody else, the lease comes back within a bounded time, places are used again.
// (It includes lease.c and contract.c to be told of the steps. Time is the test's own, so that
// nothing is slow.)
#include <stdbool.h>

static void step(const char *name);
#define LEASE_STEP(name) step(name)
#include "../../contract.c"
#include "../../lease.c"
#include "../../lease_places.c"
#include "../../neighbours.c"

#include "lease_test.h"

// A holder that died or stopped is found out by its missing beat, and a little later.
#define LONGEST_OUTAGE_MS 60
#define NEVER (-1)

static int steps_left = NEVER;
static int fatal_signal;
static uint64_t *ahead_ns;  // of the machine's clock; shared by all processes of a test

static void (*interruption)(const char *name);

static void step(const char *name) {
  if (interruption != NULL) interruption(name);
  if (steps_left > 0 && --steps_left == 0) raise(fatal_signal);
}

static uint64_t now(void) {
  return monotonic_ns() + __atomic_load_n(ahead_ns, __ATOMIC_SEQ_CST);
}

static uint64_t later(uint64_t ns) {
  __atomic_add_fetch(ahead_ns, ns, __ATOMIC_SEQ_CST);
  return now();
}

// ---- what a process does, and in which situation ----

// The process that ends or stops has `own`; `other` is a process that lives.
typedef struct situation {
  allot_leases own, other;
  int own_seat, other_seat, third_seat;
} situation;

typedef void action(situation *in);

static void nothing(situation *in) {
  (void)in;
}

static void own_holds(situation *in) {
  allot_lease lease;
  allot_lease_want(&in->own, now(), &lease);
  CHECK(lease.held);
  allot_lease_beat(&in->own, true, now());
}

static void other_holds(situation *in) {
  allot_lease lease;
  allot_lease_want(&in->other, now(), &lease);
  CHECK(lease.held);
  allot_lease_beat(&in->other, true, now());
}

static void other_waits(situation *in) {
  allot_lease lease;
  allot_lease_want(&in->other, now(), &lease);
  CHECK(!lease.held);
}

static void a_dead_process_holds(situation *in) {
  pid_t dead = fork_child();
  if (dead == 0) {
    allot_leases leases;
    allot_lease lease;
    join_seat(&leases, in->third_seat);
    allot_lease_want(&leases, now(), &lease);
    CHECK(lease.held);
    allot_lease_beat(&leases, true, now());
    raise(SIGKILL);
  }
  int status;
  CHECK(waitpid(dead, &status, 0) == dead && WIFSIGNALED(status));
}

static void want(situation *in) {
  allot_lease lease;
  allot_lease_want(&in->own, now(), &lease);
}

static void charge(situation *in) {
  allot_lease lease;
  allot_lease_charge(&in->own, 2 * MS, 0, later(2 * MS), &lease);
}

static void charge_all_of_it(situation *in) {
  allot_lease lease;
  allot_lease_charge(&in->own, 40 * MS, 0, later(40 * MS), &lease);
}

static void release(situation *in) {
  allot_lease lease;
  allot_lease_release(&in->own, MS, 0, false, later(MS), &lease);
}

static void release_and_want(situation *in) {
  allot_lease lease;
  allot_lease_release(&in->own, MS, 0, true, later(MS), &lease);
}

static void check_the_dead(situation *in) {
  allot_lease lease;
  allot_lease_want(&in->own, now(), &lease);
  for (int i = 0; i < LONGEST_OUTAGE_MS && !lease.held; i++)
    allot_lease_check(&in->own, later(MS), &lease);
  CHECK(lease.held);
}

static void leave(situation *in) {
  allot_leases_leave(&in->own);
  CHECK(allot_leases_join(&in->own) == 0);
}

static void join_beside_the_dead(situation *in) {
  allot_leases second;
  join_seat(&second, in->own_seat);
  CHECK(second.place != in->own.place && second.place != in->other.place);
}

// Several of all, with a second place.
static void mixed(situation *in) {
  want(in);
  charge(in);
  release_and_want(in);
  charge_all_of_it(in);
  release(in);
  leave(in);
  want(in);
}

static void take(situation *in) {
  (void)in;
  uint64_t serial;
  CHECK(allot_contract_take(device, "new", ANYTHING_GOES | 3000, &serial) >= 0);
}

static void change_terms(situation *in) {
  uint64_t terms = ANYTHING_GOES | 5000;
  CHECK(allot_contract_change(device, in->third_seat, serials[in->third_seat], terms) == 0);
}

static void give_up(situation *in) {
  CHECK(allot_contract_free(device, in->third_seat, serials[in->third_seat]) == 0);
}

static const struct scenario {
  const char *name;
  action *first;   // by the process that will end
  action *second;  // by the other
  action *third;   // by the process that will end, and it ends in there
} scenarios[] = {
    {"want", nothing, nothing, want},
    {"want what another has", nothing, other_holds, want},
    {"charge", own_holds, nothing, charge},
    {"charge while another waits", own_holds, other_waits, charge},
    {"charge beyond the lease", own_holds, other_waits, charge_all_of_it},
    {"release", own_holds, nothing, release},
    {"release to another", own_holds, other_waits, release},
    {"release and want", own_holds, nothing, release_and_want},
    {"release to another and want", own_holds, other_waits, release_and_want},
    {"check the dead", a_dead_process_holds, nothing, check_the_dead},
    {"leave", nothing, nothing, leave},
    {"leave with the lease", own_holds, other_waits, leave},
    {"join", nothing, other_holds, join_beside_the_dead},
    {"join beside the dead", a_dead_process_holds, nothing, join_beside_the_dead},
    {"mixed", nothing, nothing, mixed},
    {"take a seat", own_holds, other_waits, take},
    {"change terms", own_holds, other_waits, change_terms},
    {"free a seat", own_holds, other_waits, give_up},
};

// ---- who goes on ----

// Wants the lease until it is there, and tells how long that took.
static int get_the_lease(allot_leases *own) {
  allot_lease lease;
  allot_lease_want(own, now(), &lease);
  check_state(own);
  int waited_ms = 0;
  for (; !lease.held; waited_ms++) {
    CHECK(waited_ms <= LONGEST_OUTAGE_MS, "the lease did not come back");
    allot_lease_check(own, later(MS), &lease);
    check_state(own);
  }
  CHECK(lease.epoch != 0);
  return waited_ms;
}

// The other process works on. Returns the time that it waited in all.
static int go_on(allot_leases *own) {
  int waited_ms = 0;
  for (int i = 0; i < 8; i++) {
    allot_lease lease;
    waited_ms += get_the_lease(own);
    allot_lease_beat(own, true, now());
    allot_lease_charge(own, MS, 0, later(MS), &lease);
    allot_lease_release(own, MS, 0, false, later(MS), &lease);
    allot_lease_beat(own, false, now());
    CHECK(!lease.held);
    check_state(own);
  }
  return waited_ms;
}

// Whoever ends leaves nothing that a newcomer cannot take over.
static void newcomers_find_room(const situation *in) {
  allot_leases newcomer;
  join_seat(&newcomer, in->other_seat);
  CHECK(newcomer.place < 6, "place %d: those of the dead are not used again", newcomer.place);
  check_state(&newcomer);
  get_the_lease(&newcomer);
  allot_leases_leave(&newcomer);
  check_state(&newcomer);
  allot_leases_close(&newcomer);
}

static void seats_can_be_taken(void) {
  allot_contract contract;
  for (int round = 0; round < 2; round++) {
    // A newcomer of an agent that was killed may sit there: whoever knows the shares frees it.
    int descriptor = open(contract_path, O_RDONLY);
    CHECK(descriptor >= 0 && read(descriptor, &contract, sizeof contract) == sizeof contract);
    close(descriptor);
    for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
      const allot_contract_seat *seen = &contract.seats[seat];
      if ((seen->terms & ALLOT_TERMS_TAKEN) != 0 && strcmp(seen->share_id, "new") == 0)
        CHECK(allot_contract_free(device, seat, seen->serial) == 0);
    }
    uint64_t serial;
    int seat = allot_contract_take(device, "new", ANYTHING_GOES | 4000, &serial);
    CHECK(seat >= 0, "%d", seat);
  }
  int descriptor = open(contract_path, O_RDONLY);
  CHECK(descriptor >= 0 && read(descriptor, &contract, sizeof contract) == sizeof contract);
  close(descriptor);
  uint32_t governed = 0, guarantees = 0;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    uint64_t terms = contract.seats[seat].terms;
    if ((terms & ALLOT_TERMS_TAKEN) == 0) continue;
    if ((terms & ALLOT_TERMS_GOVERNED) != 0) governed++;
    guarantees += ALLOT_TERMS_GUARANTEE(terms);
    for (int before = 0; before < seat; before++)
      CHECK(contract.seats[before].serial != contract.seats[seat].serial);
  }
  CHECK(contract.governed == governed, "%u governed, %u counted", governed, contract.governed);
  CHECK(guarantees <= ALLOT_WHOLE);
}

// ---- one scenario ----

static void set_up(situation *in) {
  make_device();
  *ahead_ns = 0;
  in->own_seat = take_seat(ANYTHING_GOES);
  in->other_seat = take_seat(ANYTHING_GOES);
  in->third_seat = take_seat(ANYTHING_GOES);
  join_seat(&in->other, in->other_seat);
}

static void tear_down(situation *in) {
  allot_leases_close(&in->other);
  remove_device();
}

// A child that does its part and gets `signal` at step `at`. It ends normally if there are fewer.
static pid_t start(situation *in, const struct scenario *scenario, int at, int signal) {
  pid_t child = fork_child();
  if (child != 0) {
    int status;
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status), "status %x",
          (unsigned)status);
    scenario->second(in);
    kill(child, SIGCONT);
    return child;
  }
  join_seat(&in->own, in->own_seat);
  scenario->first(in);
  raise(SIGSTOP);
  fatal_signal = signal;
  steps_left = at;
  scenario->third(in);
  steps_left = NEVER;
  check_state(&in->own);
  // After a long stop it may have lost the lease; then it must say so.
  allot_lease lease;
  allot_lease_look(&in->own, now(), &lease);
  static allot_lease_state state;
  allot_leases_read(&in->own, &state);
  CHECK(!lease.held || state.holder == in->own.place);
  _exit(0);
}

static int kill_at_every_step(const struct scenario *scenario) {
  for (int at = 1;; at++) {
    situation in;
    set_up(&in);
    int status;
    pid_t child = start(&in, scenario, at, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child);
    bool died = WIFSIGNALED(status);
    CHECK(died || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "%s, step %d: status %x",
          scenario->name, at, (unsigned)status);
    check_state(&in.other);
    int waited_ms = go_on(&in.other);
    CHECK(waited_ms <= 2 * LONGEST_OUTAGE_MS, "%s, step %d: %d ms: the dead are given leases",
          scenario->name, at, waited_ms);
    newcomers_find_room(&in);
    seats_can_be_taken();
    tear_down(&in);
    if (!died) return at - 1;
  }
}

static void stop_at_every_step(const struct scenario *scenario) {
  for (int at = 1;; at++) {
    situation in;
    set_up(&in);
    int status;
    pid_t child = start(&in, scenario, at, SIGSTOP);
    CHECK(waitpid(child, &status, WUNTRACED) == child);
    bool stopped = WIFSTOPPED(status);
    check_state(&in.other);
    go_on(&in.other);
    if (stopped) {
      // What it goes on with is long out of date.
      kill(child, SIGCONT);
      wait_for(child);
    }
    check_state(&in.other);
    go_on(&in.other);
    newcomers_find_room(&in);
    tear_down(&in);
    if (!stopped) return;
  }
}

// An agent that dies while it gives a share its first terms leaves none without effect.
static void terms_are_never_without_effect(void) {
  const uint64_t ungoverned = ALLOT_TERMS(0, ALLOT_WHOLE, 100, ALLOT_CLASS_NORMAL, 0);
  bool died = true;
  for (int at = 1; died; at++) {
    make_device();
    int seat = take_seat(ungoverned);
    allot_leases leases;
    open_seat(&leases, seat);
    CHECK(leases.contract->governed == 0);
    pid_t agent = fork_child();
    if (agent == 0) {
      fatal_signal = SIGKILL;
      steps_left = at;
      _exit(allot_contract_change(device, seat, serials[seat], ANYTHING_GOES) == 0 ? 0 : 1);
    }
    int status;
    CHECK(waitpid(agent, &status, 0) == agent);
    died = WIFSIGNALED(status);
    bool is_governed = (leases.contract->seats[seat].terms & ALLOT_TERMS_GOVERNED) != 0;
    CHECK(died || is_governed);
    CHECK(!is_governed || leases.contract->governed > 0, "killed at step %d", at);
    CHECK(allot_contract_change(device, seat, serials[seat], ungoverned) == 0);
    CHECK(leases.contract->governed == 0);
    allot_leases_close(&leases);
    remove_device();
  }
}

static allot_leases newcomer;

static void newcomer_joins(const char *name) {
  static const char *const at[] = {"reaping", "found dead"};
  if (strcmp(name, at[newcomer.seat]) != 0) return;
  interruption = NULL;
  join_seat(&newcomer, newcomer.seat);
}

// Between the moment that a process is found dead and that its place is freed, the place may be
// another's.
static void newcomers_are_not_taken_for_the_dead(void) {
  for (int moment = 0; moment < 2; moment++) {
    situation in;
    set_up(&in);
    in.third_seat = in.other_seat;
    a_dead_process_holds(&in);
    newcomer.seat = moment;
    interruption = newcomer_joins;
    get_the_lease(&in.other);
    CHECK(interruption == NULL, "%d", moment);
    allot_lease lease;
    allot_lease_release(&in.other, MS, 0, false, later(MS), &lease);
    get_the_lease(&newcomer);
    static allot_lease_state state;
    allot_leases_read(&newcomer, &state);
    CHECK(state.places[newcomer.place].state == ALLOT_PLACE_HOLDING);
    CHECK(state.seats[in.third_seat].evictions == 0 && state.places_taken == 2);
    allot_leases_close(&newcomer);
    tear_down(&in);
  }
}

static allot_leases busy;
static int hands_over_at;

static void hands_over(const char *name) {
  static const char *const at[] = {"reading", "swapped"};
  if (strcmp(name, at[hands_over_at]) != 0) return;
  interruption = NULL;
  allot_lease lease;
  allot_lease_release(&busy, MS, 0, false, now(), &lease);
  // Its buffers are used in turn: the one that was in force is overwritten.
  if (hands_over_at == 0) allot_lease_want(&busy, now(), &lease);
}

// What a reader copied while it was replaced is thrown away, and a message that comes between a
// decision and its answer is not slept over.
static void nothing_is_missed_between_two_steps(void) {
  situation in;
  set_up(&in);
  join_seat(&busy, in.own_seat);
  allot_lease lease, other;
  allot_lease_want(&busy, now(), &lease);
  allot_lease_want(&in.other, now(), &other);
  CHECK(lease.held && !other.held);
  hands_over_at = 0;
  interruption = hands_over;
  static allot_lease_state state;
  allot_leases_read(&in.other, &state);
  CHECK(interruption == NULL && state.holder == in.other.place &&
        state.next == (int)ALLOT_PLACES_OF(busy.seat) + 1);

  allot_lease_release(&in.other, MS, 0, false, now(), &other);
  hands_over_at = 1;
  interruption = hands_over;
  allot_lease_want(&in.other, now(), &other);
  CHECK(interruption == NULL);
  uint64_t begun = monotonic_ns();
  if (!other.held) allot_lease_sleep(&in.other, other.ticket, begun + 20000 * MS);
  CHECK(monotonic_ns() - begun < 10000 * MS);
  allot_leases_close(&busy);
  tear_down(&in);
}

int main(void) {
  setvbuf(stdout, NULL, _IONBF, 0);  // children must not print it again
  ahead_ns = make_shared(sizeof *ahead_ns);
  for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
    int steps = kill_at_every_step(&scenarios[i]);
    CHECK(steps > 0, "%s has no step", scenarios[i].name);
    stop_at_every_step(&scenarios[i]);
    printf("%s: %d steps\n", scenarios[i].name, steps);
  }
  terms_are_never_without_effect();
  newcomers_are_not_taken_for_the_dead();
  nothing_is_missed_between_two_steps();
  return 0;
}
