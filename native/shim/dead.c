// SPDX-License-Identifier: Apache-2.0
// A process's memory is free some time after its end, when the driver has got to it. Until then its
// charge stays: otherwise the share's next program would take the bytes a second time.
//
// Whether the driver still has them, NVML's list of processes shows: there a process stays under
// its number until its memory is freed. Two processes have to mean the same by a number: each notes
// in its slot the pid namespace in which NVML listed it, and one of another namespace cannot tell.
// Nor can one without NVML, or a driver that gives containers the numbers of the host, or where a
// process has become another program. Then time decides (ALLOT_LEAVING_NS).
#include "dead.h"

#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "measure.h"
#include "slots.h"

#define FIRST_STEP_NS 1000000ull
#define LONGEST_STEP_NS 50000000ull
// A driver that was out of memory for all that time has other reasons: the program hears of them
// at once for so long.
#define PRESSURE_NS 10000000000ull

static uint32_t own_namespace(void) {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? (uint32_t)status.st_ino : 0;
}

// ---- is it still there? ----

typedef struct look {
  const allot_ledger *ledger;
  uint32_t here;  // 0: not asked yet
  int device;     // whose list this is; -1: none
  bool is_listed;
  process_list list;
} look;

static bool list_device(look *at, int device) {
  if (at->device != device) {
    at->device = device;
    at->is_listed = measure_processes(at->ledger->policy->devices[device].uuid, &at->list);
  }
  return at->is_listed;
}

// The driver lists the slot's number. Is that its owner, which has ended? A process that lives and
// has lost its slot runs another program (exec), which may be what is listed: time decides.
static allot_held held_by_number(const allot_slot *slot) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", (int)slot->pid);
  uint64_t start_time = allot_start_time(path);
  if (start_time != 0 && start_time != slot->start_time) return ALLOT_HELD_NOT;
  return start_time == 0 || allot_is_zombie(path) ? ALLOT_HELD_STILL : ALLOT_HELD_UNKNOWN;
}

static allot_held is_held(void *context, const allot_slot *slot, int device) {
  look *at = context;
  if (at->here == 0) at->here = own_namespace();
  if (slot->listed_namespace == 0 || slot->listed_namespace != at->here ||
      device >= (int)at->ledger->policy->device_count || !list_device(at, device)) {
    return ALLOT_HELD_UNKNOWN;
  }
  for (unsigned i = 0; i < at->list.count; i++) {
    if (at->list.processes[i].pid != (unsigned)slot->pid) continue;
    return held_by_number(slot);
  }
  return ALLOT_HELD_NOT;
}

allot_reaped dead_reap(allot_ledger *ledger) {
  look at;  // the list is long: no time is spent on zeros
  at.ledger = ledger;
  at.here = 0;
  at.device = -1;
  uncancelled_begin();  // a cancelled thread would keep the lock of a dead process's slot
  allot_reaped reaped = allot_ledger_reap(ledger, is_held, &at);
  uncancelled_end();
  return reaped;
}

static uint64_t leaving_bytes(const allot_ledger *ledger, int index) {
  const allot_usage *usage = ledger->usage;
  uint64_t sum = 0;
  for (int slot = 0; slot < ALLOT_MAX_SLOTS && slot < (int)usage->high_slot; slot++) {
    if (__atomic_load_n(&usage->slots[slot].state, __ATOMIC_ACQUIRE) != ALLOT_SLOT_LEAVING)
      continue;
    sum += allot_ledger_slot_used(ledger, slot, index);
  }
  return sum;
}

bool dead_could_give(process *own, int device, uint64_t bytes) {
  allot_ledger *ledger = own->joined[device].ledger;
  int index = own->joined[device].index;
  allot_reaped reaped = dead_reap(ledger);
  if (reaped.cleared > 0) return true;
  if (reaped.leaving == 0) return false;
  uint64_t left = leaving_bytes(ledger, index), used = allot_ledger_used(ledger, index);
  uint64_t limit = allot_ledger_limit(ledger, index), others = used > left ? used - left : 0;
  return left > 0 && others <= limit && bytes <= limit - others;
}

void dead_note_listed(process *own, int device) {
  allot_slot *slot = process_slot(own, device);
  if (__atomic_load_n(&slot->listed_namespace, __ATOMIC_RELAXED) != 0) return;
  process_list list;
  if (!measure_processes(own->policies[device]->uuid, &list)) return;
  for (unsigned i = 0; i < list.count; i++) {
    if (list.processes[i].pid != (unsigned)getpid()) continue;
    __atomic_store_n(&slot->listed_namespace, own_namespace(), __ATOMIC_RELEASE);
  }
}

// ---- waiting ----

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

patience patience_begin(uint64_t most_ns) {
  return (patience){.until_ns = now_ns() + most_ns, .step_ns = FIRST_STEP_NS};
}

bool patience_step(patience *left) {
  if (now_ns() >= left->until_ns) return false;
  nanosleep(&(struct timespec){.tv_nsec = (long)left->step_ns}, NULL);
  left->step_ns += left->step_ns / 2;
  if (left->step_ns > LONGEST_STEP_NS) left->step_ns = LONGEST_STEP_NS;
  return true;
}

bool dead_may_be_freed(process *own, int device, patience *left) {
  if (own == NULL || device < 0) return false;  // nothing was reserved
  uint64_t *gave_up_ns = &own->devices[device].gave_up_ns;
  uint64_t before = __atomic_load_n(gave_up_ns, __ATOMIC_RELAXED);
  if (before != 0 && now_ns() - before < PRESSURE_NS) return false;
  if (left->until_ns == 0) *left = patience_begin(DRIVER_PATIENCE_NS);
  if (patience_step(left)) return true;
  __atomic_store_n(gave_up_ns, now_ns(), __ATOMIC_RELAXED);
  return false;
}
