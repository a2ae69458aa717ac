// SPDX-License-Identifier: Apache-2.0
// Children that are forked while another thread takes a slot do not keep it after its owner.
//
// sources: simulated/engine/*.c
// machine: t4
// sanitizers: plain
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include "simulated/engine/engine.h"
#include "slots.h"
#include "tests/simulated/driver_test.h"

#define CHILDREN 150

static bool over;
static unsigned taken;

static void *come_and_go(void *data) {
  allot_handle *machine = data;
  while (!__atomic_load_n(&over, __ATOMIC_SEQ_CST)) {
    assert(allot_machine_attach(machine, ALLOT_PROCESS_MONITOR) == 0);
    allot_machine_detach(machine);
    __atomic_fetch_add(&taken, 1, __ATOMIC_SEQ_CST);
  }
  return NULL;
}

int main(void) {
  allot_handle machine;
  assert(allot_machine_open(&machine) == 0);
  pthread_t thread;
  assert(pthread_create(&thread, NULL, come_and_go, &machine) == 0);
  pid_t children[CHILDREN];
  for (int i = 0; i < CHILDREN; i++) {
    unsigned before = __atomic_load_n(&taken, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&taken, __ATOMIC_SEQ_CST) == before) sched_yield();
    children[i] = fork();
    assert(children[i] >= 0);
    if (children[i] == 0) {
      alarm(20);  // if the parent fails
      for (;;) pause();
    }
  }
  __atomic_store_n(&over, true, __ATOMIC_SEQ_CST);
  assert(pthread_join(thread, NULL) == 0);
  int descriptor = open(machine.path, O_RDWR | O_CLOEXEC);
  for (int slot = 0; slot < 8; slot++) {
    assert(!allot_slot_is_owned(descriptor, ALLOT_PROCESS_LOCK_BASE + slot));
  }
  for (int i = 0; i < CHILDREN; i++) kill(children[i], SIGKILL);
  for (int i = 0; i < CHILDREN; i++) waitpid(children[i], NULL, 0);
  return 0;
}
