// SPDX-License-Identifier: Apache-2.0
// Ends, or stops, a process after every single step of every operation, and looks at the sums.
// (It includes ledger.c to be told of the steps.)
#include <stdbool.h>

static void step(const char *name);
#define COUNTER_STEP(name) step(name)
#include "../../ledger.c"

#include "ledger_test.h"

static int steps_left = -1;
static int fatal_signal;

static void (*interruption)(const char *name);

static void step(const char *name) {
  if (interruption != NULL) interruption(name);
  if (steps_left > 0 && --steps_left == 0) raise(fatal_signal);
}

typedef void operation(allot_ledger *ledger);
static void do_reserve(allot_ledger *ledger) {
  allot_ledger_reserve(ledger, 0, 100);
}
static void do_refused(allot_ledger *ledger) {
  CHECK(!allot_ledger_reserve(ledger, 0, 100000));
}
static void do_charge(allot_ledger *ledger) {
  allot_ledger_charge(ledger, 0, 70);
}
static void do_release(allot_ledger *ledger) {
  allot_ledger_release(ledger, 0, 30);
}
static void do_release_all(allot_ledger *ledger) {
  allot_ledger_release(ledger, 0, UINT64_MAX);
}
static void do_mixed(allot_ledger *ledger) {
  do_reserve(ledger);
  do_release(ledger);
  do_charge(ledger);
  do_reserve(ledger);
}

static void leave_a_dead_process(uint64_t bytes) {
  pid_t dead = fork();
  if (dead == 0) {
    steps_left = -1;
    allot_ledger own = attach_share();
    allot_ledger_charge(&own, 0, bytes);
    raise(SIGKILL);
  }
  waitpid(dead, NULL, 0);
}

static void do_reap(allot_ledger *ledger) {
  leave_a_dead_process(44);
  clear_all(ledger);
}

// Taking a dead owner's slot clears it first.
static void do_attach(allot_ledger *ledger) {
  leave_a_dead_process(55);
  allot_ledger second = attach_share();
  CHECK(second.slot != ledger->slot);
}

static const struct {
  const char *name;
  operation *run;
} operations[] = {{"reserve", do_reserve},         {"refused", do_refused},
                  {"charge", do_charge},           {"release", do_release},
                  {"release all", do_release_all}, {"reap", do_reap},
                  {"attach", do_attach},           {"mixed", do_mixed}};

// Runs the operation in a child that gets `signal` at step `at`. True when the child came so far.
static bool run_until(operation *run, int at, int signal, pid_t *child, int *status) {
  *child = fork();
  if (*child == 0) {
    allot_ledger own = attach_share();
    allot_ledger_reserve(&own, 0, 50);
    allot_ledger_reserve(&own, 1, 9);
    fatal_signal = signal;
    steps_left = at;
    run(&own);
    steps_left = -1;
    check_sums(&own);
    _exit(0);
  }
  CHECK(waitpid(*child, status, WUNTRACED) == *child);
  return !(WIFEXITED(*status) && WEXITSTATUS(*status) == 0);
}

static int kill_at_every_step(operation *run) {
  int at = 1;
  for (;; at++) {
    make_share(1000);
    allot_ledger ledger = attach_share();
    CHECK(allot_ledger_reserve(&ledger, 0, 200));
    leave_a_dead_process(33);
    pid_t child;
    int status;
    bool died = run_until(run, at, SIGKILL, &child, &status);
    CHECK(!died || WIFSIGNALED(status), "status %x", (unsigned)status);
    check_sums(&ledger);
    CHECK(allot_ledger_reserve(&ledger, 0, 11));  // somebody goes on before the dead is cleared
    check_sums(&ledger);
    CHECK(clear_all(&ledger) >= 1);
    check_sums(&ledger);
    CHECK(allot_ledger_used(&ledger, 0) == 211 && allot_ledger_used(&ledger, 1) == 0);
    allot_ledger_close(&ledger);
    remove_share();
    if (!died) return at;
  }
}

static void stop_at_every_step(operation *run) {
  for (int at = 1;; at++) {
    make_share(1000);
    allot_ledger ledger = attach_share();
    pid_t child;
    int status;
    bool stopped = run_until(run, at, SIGSTOP, &child, &status);
    for (int i = 0; i < 100; i++) {
      CHECK(allot_ledger_reserve(&ledger, 0, 5));
      allot_ledger_release(&ledger, 0, 5);
      check_sums(&ledger);
    }
    if (stopped) {
      CHECK(WIFSTOPPED(status));
      kill(child, SIGCONT);
      CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    clear_all(&ledger);
    CHECK(allot_ledger_used(&ledger, 0) == 0);
    allot_ledger_close(&ledger);
    remove_share();
    if (!stopped) return;
  }
}

// A reservation that read the old limit and was stopped does not succeed under it after the change.
static void resize_at_every_step(void) {
  bool overtook = false, refused = false;
  for (int at = 1;; at++) {
    make_share(1000);
    allot_ledger ledger = open_share();
    pid_t child;
    int status;
    bool stopped = run_until(do_reserve, at, SIGSTOP, &child, &status);
    uint64_t used;
    int error = allot_ledger_set_limit(share, 0, 120, false, &used);
    if (stopped) {
      CHECK(error == (used > 120 ? -EBUSY : 0));
      kill(child, SIGCONT);
      CHECK(waitpid(child, &status, 0) == child);
      CHECK(error != 0 || ledger.usage->devices[0].peak <= 120, "step %d", at);
      if (error == 0) overtook = true;
      if (error != 0) refused = true;
    }
    allot_ledger_close(&ledger);
    remove_share();
    if (!stopped) break;
  }
  CHECK(overtook && refused);
}

static void lower_limit_until(int at, int *status) {
  pid_t agent = fork();
  if (agent == 0) {
    uint64_t used;
    fatal_signal = SIGKILL;
    steps_left = at;
    allot_ledger_set_limit(share, 0, 900, false, &used);
    _exit(0);
  }
  waitpid(agent, status, 0);
}

// The same after an agent that was killed at any step of its resize. Nothing else happens between
// the two resizes, so that the total looks as the first left it.
static void resize_after_a_killed_resize(void) {
  for (int at = 1;; at++) {
    make_share(1000);
    allot_ledger ledger = open_share();
    pid_t tenant = fork();
    if (tenant == 0) {
      allot_ledger own = attach_share();
      CHECK(allot_ledger_reserve(&own, 0, 50));
      raise(SIGSTOP);
      const int published = 3;
      fatal_signal = SIGSTOP;
      steps_left = published;
      _exit(allot_ledger_reserve(&own, 0, 100) ? 1 : 0);
    }
    int status, agent_status;
    CHECK(waitpid(tenant, &status, WUNTRACED) == tenant && WIFSTOPPED(status));
    lower_limit_until(at, &agent_status);
    kill(tenant, SIGCONT);
    CHECK(waitpid(tenant, &status, WUNTRACED) == tenant && WIFSTOPPED(status));
    uint64_t used;
    CHECK(allot_ledger_set_limit(share, 0, 120, false, &used) == 0 && used == 50);
    kill(tenant, SIGCONT);
    CHECK(waitpid(tenant, &status, 0) == tenant && status == 0, "killed at step %d", at);
    allot_ledger_close(&ledger);
    remove_share();
    if (WIFEXITED(agent_status)) return;
  }
}

static allot_ledger overtaker;

static void overtake(const char *name) {
  if (strcmp(name, "generated") != 0) return;
  interruption = NULL;
  allot_ledger_charge(&overtaker, 0, 500);
}

// What was allocated while a limit was lowered, and does not fit below it, takes the change back.
static void an_overtaken_resize_is_taken_back(void) {
  make_share(1000);
  overtaker = attach_share();
  uint64_t used;
  interruption = overtake;
  CHECK(allot_ledger_set_limit(share, 0, 400, false, &used) == -EBUSY && used == 500);
  CHECK(interruption == NULL && allot_ledger_limit(&overtaker, 0) == 1000);
  allot_ledger_close(&overtaker);
  remove_share();
}

int main(void) {
  setvbuf(stdout, NULL, _IONBF, 0);  // children must not print it again
  for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
    int steps = kill_at_every_step(operations[i].run);
    CHECK(steps > 1, "%s has no step", operations[i].name);
    stop_at_every_step(operations[i].run);
    printf("%s: %d steps\n", operations[i].name, steps - 1);
  }
  resize_at_every_step();
  resize_after_a_killed_resize();
  an_overtaken_resize_is_taken_back();
  return 0;
}
