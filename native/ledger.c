// SPDX-License-Identifier: Apache-2.0
// Operations on a share's ledger: exact under any interleaving of processes, kill -9 and SIGSTOP.
//
// No lock is ever held by a process that could die or be stopped: every change of a device's total
// is one 16-byte compare-and-swap, and what a dead process had under way is decided afterwards by
// whoever clears its slot (docs/designs/ledger.md has the argument).
#include "ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "bus_guard.h"
#include "mapping.h"
#include "slots.h"

// The agent's own mark in `last`: no slot has this index, so there is nothing to help.
#define AGENT_SLOT 0xffffull

_Static_assert(offsetof(allot_usage, devices) % 16 == 0, "totals are aligned");
_Static_assert(sizeof(allot_slot) % 64 == 0, "slots do not share cache lines");
_Static_assert(sizeof(allot_usage) + sizeof(allot_policy) + 3 * 4096 < 1 << 20,
               "a share stays under 1 MiB");
_Static_assert(ALLOT_MAX_SLOTS < AGENT_SLOT, "slot indices fit beside the agent's mark");

#define load(p) ALLOT_LOAD(p)
#define store(p, v) ALLOT_STORE(p, v)

// ---- the total ----

static allot_part *part_of(allot_ledger *ledger, int slot, int device) {
  return &ledger->usage->slots[slot].devices[device].part;
}

// The total as it is, with the operation that made it so marked as committed.
static allot_counter read_total(allot_ledger *ledger, int device) {
  allot_counter seen = allot_counter_read(&ledger->usage->devices[device].total);
  uint64_t slot = allot_counter_mark(seen.last);
  if (slot < ALLOT_MAX_SLOTS) allot_part_help(part_of(ledger, (int)slot, device), seen.last);
  COUNTER_STEP("helped");
  return seen;
}

static bool exceeds(uint64_t used, uint64_t bytes, uint64_t limit) {
  return used > limit || bytes > limit - used;
}

enum change { RESERVE, CHARGE, RELEASE };

// One operation of slot `slot`, whose owner or reaper the caller is. False: RESERVE met the limit.
static bool change_use(allot_ledger *ledger, int slot, int device, enum change kind,
                       uint64_t bytes) {
  allot_usage_device *shared = &ledger->usage->devices[device];
  allot_slot_device *own = &ledger->usage->slots[slot].devices[device];
  for (;;) {
    allot_counter total = read_total(ledger, device);
    uint64_t before = allot_part_value(&own->part);
    uint64_t after, used;
    if (kind == RELEASE) {
      uint64_t less = bytes < before ? bytes : before;
      if (less == 0) return true;
      after = before - less;
      used = total.value > less ? total.value - less : 0;
    } else {
      // The limit is read after the total: set_limit() changes them in the opposite order, so that
      // a reservation under a limit that is gone fails in the swap below.
      uint64_t limit = kind == RESERVE ? allot_ledger_limit(ledger, device) : UINT64_MAX;
      if (exceeds(total.value, bytes, limit) || bytes > UINT64_MAX - before) return false;
      after = before + bytes;
      used = total.value + bytes;
    }
    if (!allot_counter_change(&shared->total, total, used, &own->part, (uint64_t)slot, before,
                              after)) {
      continue;
    }
    if (kind != RELEASE) {
      allot_raise_to(&shared->peak, used);
      allot_raise_to(&own->peak, after);
    }
    return true;
  }
}

// ---- files ----

static void remove_in(const char *directory, const char *name) {
  char path[4096];
  if (allot_path_in(directory, name, path, sizeof path) == 0) unlink(path);
}

// Writes a new file of `size` bytes that starts with `head`. Every block is allocated now: a full
// disk is an error here instead of a SIGBUS in a tenant later.
static int create_file(const char *directory, const char *name, const void *head, size_t head_size,
                       size_t size, mode_t mode) {
  int descriptor = allot_open_in(directory, name, O_RDWR | O_CREAT | O_EXCL);
  if (descriptor < 0) return descriptor;
  int error = posix_fallocate(descriptor, 0, (off_t)size);
  if (error == 0 && pwrite(descriptor, head, head_size, 0) != (ssize_t)head_size) error = EIO;
  if (error == 0 && fchmod(descriptor, mode) != 0) error = errno;
  close(descriptor);
  if (error != 0) remove_in(directory, name);
  return -error;
}

int allot_ledger_create(const char *directory, const allot_policy *policy) {
  if (policy->device_count == 0 || policy->device_count > ALLOT_MAX_DEVICES) return -EINVAL;
  allot_policy complete = *policy;
  complete.magic = ALLOT_POLICY_MAGIC;
  complete.version = ALLOT_LEDGER_VERSION;
  complete.generation = 1;
  int error = create_file(directory, "policy", &complete, sizeof complete, sizeof complete, 0644);
  if (error != 0) return error;

  struct {
    uint64_t magic;
    uint32_t version, slot_count;
  } head = {ALLOT_USAGE_MAGIC, ALLOT_LEDGER_VERSION, ALLOT_MAX_SLOTS};
  // Its owner's to write: who can write it can end the share's programs. For a container of other
  // users the mode is widened when the share is made.
  error = create_file(directory, "usage", &head, sizeof head, sizeof(allot_usage), 0644);
  if (error != 0) remove_in(directory, "policy");
  return error;
}

static int check_heads(void *argument) {
  const allot_ledger *ledger = argument;
  const allot_policy *policy = ledger->policy;
  const allot_usage *usage = ledger->usage;
  if (policy->magic != ALLOT_POLICY_MAGIC || usage->magic != ALLOT_USAGE_MAGIC) return -EINVAL;
  if (policy->version != ALLOT_LEDGER_VERSION || usage->version != ALLOT_LEDGER_VERSION)
    return -EPROTO;
  if (policy->device_count == 0 || policy->device_count > ALLOT_MAX_DEVICES) return -EINVAL;
  if (usage->slot_count != ALLOT_MAX_SLOTS) return -EINVAL;
  return 0;
}

int allot_ledger_open(allot_ledger *ledger, const char *directory) {
  *ledger = (allot_ledger){.slot = -1};
  if (strlen(directory) >= sizeof ledger->directory) return -ENAMETOOLONG;
  void *policy = NULL, *usage = NULL;
  int error = allot_map_in(directory, "policy", sizeof(allot_policy), O_RDONLY, &policy);
  if (error != 0) return error;
  error = allot_map_in(directory, "usage", sizeof(allot_usage), O_RDWR, &usage);
  if (error == -EACCES || error == -EROFS || error == -EPERM) {
    error = allot_map_in(directory, "usage", sizeof(allot_usage), O_RDONLY, &usage);
  }
  ledger->policy = policy;
  ledger->usage = error == 0 ? usage : NULL;
  if (error == 0) error = allot_guarded(check_heads, ledger);
  if (error != 0) {
    allot_ledger_close(ledger);
    return error;
  }
  strcpy(ledger->directory, directory);
  return 0;
}

void allot_ledger_close(allot_ledger *ledger) {
  if (ledger->policy != NULL) munmap((void *)(uintptr_t)ledger->policy, sizeof(allot_policy));
  if (ledger->usage != NULL) munmap(ledger->usage, sizeof(allot_usage));
  if (ledger->slot_map != NULL) munmap(ledger->slot_map, 1);
  *ledger = (allot_ledger){.slot = -1};
}

// ---- slots ----

static int64_t byte_of(int slot) {
  return ALLOT_SLOT_LOCK_BASE + slot;
}

// Gives back all that the slot has. The caller holds the slot's lock.
static void clear_slot(allot_ledger *ledger, int slot) {
  allot_slot *cleared = &ledger->usage->slots[slot];
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    change_use(ledger, slot, device, RELEASE, UINT64_MAX);
    store(&cleared->devices[device].context, 0);
    store(&cleared->devices[device].peak, 0);
  }
  store(&cleared->state, (uint32_t)ALLOT_SLOT_FREE);
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void mark_leaving(allot_slot *slot) {
  store(&slot->movable, now_ns());
  store(&slot->state, (uint32_t)ALLOT_SLOT_LEAVING);
}

// The first process that sees the owner's end starts the clock; one that knows that the driver
// still lists it starts it anew.
static bool is_over(allot_slot *slot, allot_held held) {
  uint64_t now = now_ns(), since = load(&slot->movable);
  bool is_leaving = load(&slot->state) == ALLOT_SLOT_LEAVING && since <= now;
  if (!is_leaving || held == ALLOT_HELD_STILL) {
    mark_leaving(slot);
    return false;
  }
  return now - since >= ALLOT_LEAVING_NS;
}

typedef struct reaping {
  allot_ledger *ledger;
  allot_held_check *check;
  void *context;
  int descriptor;  // of the usage, once a slot is asked for; -1
  allot_reaped reaped;
} reaping;

// May the use of a dead owner's slot be reclaimed? The caller holds the slot's lock.
static bool may_clear(const reaping *reaper, int slot) {
  allot_slot *left = &reaper->ledger->usage->slots[slot];
  if (load(&left->state) != ALLOT_SLOT_LEAVING) mark_leaving(left);  // the check takes its time
  allot_held held = ALLOT_HELD_NOT;
  for (int device = 0; device < ALLOT_MAX_DEVICES && held != ALLOT_HELD_STILL; device++) {
    read_total(reaper->ledger, device);
    if (allot_part_value(&left->devices[device].part) == 0) continue;
    allot_held here =
        reaper->check == NULL ? ALLOT_HELD_UNKNOWN : reaper->check(reaper->context, left, device);
    if (here != ALLOT_HELD_NOT) held = here;
  }
  return held == ALLOT_HELD_NOT || is_over(left, held);
}

static int try_slot(reaping *reaper, int slot) {
  if (reaper->descriptor < 0)
    reaper->descriptor = allot_open_in(reaper->ledger->directory, "usage", O_RDWR);
  return reaper->descriptor < 0 ? reaper->descriptor
                                : allot_slot_try(reaper->descriptor, byte_of(slot));
}

// A process that is alone in its share makes no system call here.
static int reap_with(reaping *reaper) {
  allot_ledger *ledger = reaper->ledger;
  uint32_t high = load(&ledger->usage->high_slot);
  for (int slot = 0; slot < ALLOT_MAX_SLOTS && (uint32_t)slot < high; slot++) {
    uint32_t *state = &ledger->usage->slots[slot].state;
    if (slot == ledger->slot || load(state) == ALLOT_SLOT_FREE) continue;
    int locked = try_slot(reaper, slot);
    if (locked < 0) return locked;
    if (locked == 0) {  // by its owner, or by another reaper
      if (load(state) == ALLOT_SLOT_LEAVING) reaper->reaped.leaving++;
      continue;
    }
    if (load(state) != ALLOT_SLOT_FREE && may_clear(reaper, slot)) {
      clear_slot(ledger, slot);
      reaper->reaped.cleared++;
    } else if (load(state) != ALLOT_SLOT_FREE) {
      reaper->reaped.leaving++;
    }
    allot_slot_release(reaper->descriptor, byte_of(slot));
  }
  return 0;
}

static int reap_guarded(void *argument) {
  return reap_with(argument);
}

allot_reaped allot_ledger_reap(allot_ledger *ledger, allot_held_check *check, void *context) {
  reaping reaper = {ledger, check, context, -1, {0}};
  int error = allot_guarded(reap_guarded, &reaper);
  if (reaper.descriptor >= 0) close(reaper.descriptor);
  if (error < 0) reaper.reaped.cleared = error;
  return reaper.reaped;
}

// Of an owner that ended after the caller asked, nothing is known.
static allot_held was_leaving(void *context, const allot_slot *slot, int device) {
  const uint64_t *asked_ns = context;
  bool was = load(&slot->state) == ALLOT_SLOT_LEAVING && load(&slot->movable) < *asked_ns;
  return was ? ALLOT_HELD_NOT : ALLOT_HELD_UNKNOWN;
}

int allot_ledger_clear(allot_ledger *ledger, uint64_t asked_ns) {
  return allot_ledger_reap(ledger, asked_ns > 0 ? was_leaving : NULL, &asked_ns).cleared;
}

bool allot_ledger_slot_alive(const allot_ledger *ledger, int slot) {
  if (slot < 0 || slot >= ALLOT_MAX_SLOTS) return false;
  if (load(&ledger->usage->slots[slot].state) == ALLOT_SLOT_FREE) return false;
  int descriptor = allot_open_in(ledger->directory, "usage", O_RDONLY);
  if (descriptor < 0) return true;  // unknown: never declare a running process dead
  bool alive = allot_slot_is_owned(descriptor, byte_of(slot));
  close(descriptor);
  return alive;
}

static bool is_claimable(void *argument, int slot) {
  allot_ledger *ledger = argument;
  const reaping reaper = {.ledger = ledger};
  return load(&ledger->usage->slots[slot].state) == ALLOT_SLOT_FREE || may_clear(&reaper, slot);
}

static void describe_owner(allot_slot *slot) {
  allot_own_command(slot->command, sizeof slot->command);
  slot->start_time = allot_start_time("/proc/self/stat");
  slot->pid = (int32_t)getpid();
}

static void take_slot(allot_ledger *ledger, int slot) {
  allot_slot *taken = &ledger->usage->slots[slot];
  if (load(&taken->state) != ALLOT_SLOT_FREE) clear_slot(ledger, slot);
  describe_owner(taken);
  taken->attaches++;
  store(&taken->refusals, 0);
  store(&taken->gpu_ns, 0);
  store(&taken->held_ns, 0);
  store(&taken->throttled, 0);
  store(&taken->movable, 0);
  store(&taken->listed_namespace, 0u);
  allot_slot_note_high(&ledger->usage->high_slot, slot);
  store(&taken->state, (uint32_t)ALLOT_SLOT_TAKEN);
  ledger->slot = slot;
}

int allot_ledger_attach(allot_ledger *ledger) {
  int descriptor = allot_open_in(ledger->directory, "usage", O_RDWR);
  if (descriptor < 0) return descriptor;
  int slot = allot_slot_claim_if(descriptor, ALLOT_SLOT_LOCK_BASE, ALLOT_MAX_SLOTS, is_claimable,
                                 ledger, &ledger->slot_map);
  close(descriptor);
  if (slot < 0) return slot;
  take_slot(ledger, slot);
  return 0;
}

// ---- what the shim calls ----

uint64_t allot_ledger_limit(const allot_ledger *ledger, int device) {
  return load(&ledger->policy->devices[device].memory_limit);
}

uint64_t allot_ledger_used(const allot_ledger *ledger, int device) {
  return load(&ledger->usage->devices[device].total.value);
}

uint64_t allot_ledger_slot_used(const allot_ledger *ledger, int slot, int device) {
  const allot_usage *usage = ledger->usage;
  return allot_part_peek(&usage->slots[slot].devices[device].part, &usage->devices[device].total,
                         (uint64_t)slot);
}

bool allot_ledger_reserve(allot_ledger *ledger, int device, uint64_t bytes) {
  if (change_use(ledger, ledger->slot, device, RESERVE, bytes)) return true;
  __atomic_add_fetch(&ledger->usage->devices[device].refusals, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&ledger->usage->slots[ledger->slot].refusals, 1, __ATOMIC_SEQ_CST);
  return false;
}

void allot_ledger_charge(allot_ledger *ledger, int device, uint64_t bytes) {
  if (bytes > 0) change_use(ledger, ledger->slot, device, CHARGE, bytes);
}

void allot_ledger_release(allot_ledger *ledger, int device, uint64_t bytes) {
  change_use(ledger, ledger->slot, device, RELEASE, bytes);
}

void allot_ledger_set_context(allot_ledger *ledger, int device, uint64_t bytes) {
  store(&ledger->usage->slots[ledger->slot].devices[device].context, bytes);
}

// ---- the agent's side ----

// Changes `last` and nothing else, so that every compare-and-swap prepared before this call fails.
static void fence(allot_ledger *ledger, int device, uint64_t mark) {
  uint64_t last = AGENT_SLOT << ALLOT_OPERATION_BITS | (mark & ALLOT_OPERATION_MASK);
  for (;;) {
    allot_counter total = read_total(ledger, device);
    allot_counter marked = {.value = total.value, .last = last};
    if (allot_counter_swap(&ledger->usage->devices[device].total, total, marked)) return;
  }
}

typedef struct limit_change {
  allot_ledger *ledger;
  allot_policy *policy;
  int device;
  uint64_t bytes;
  bool force;
  uint64_t *used;
} limit_change;

static int change_limit(void *argument) {
  const limit_change *change = argument;
  allot_ledger *ledger = change->ledger;
  allot_policy *policy = change->policy;
  int device = change->device;
  uint64_t bytes = change->bytes, *used = change->used;
  bool force = change->force;
  *used = allot_ledger_used(ledger, device);
  if (*used > bytes && !force) return -EBUSY;
  uint64_t old = load(&policy->devices[device].memory_limit);
  store(&policy->devices[device].memory_limit, bytes);
  COUNTER_STEP("limited");
  // A mark of its own, also after an agent that ended between these steps.
  uint64_t generation = __atomic_add_fetch(&policy->generation, 1, __ATOMIC_SEQ_CST);
  COUNTER_STEP("generated");
  fence(ledger, device, generation);
  COUNTER_STEP("fenced");
  *used = allot_ledger_used(ledger, device);
  bool overtaken = *used > bytes && !force;  // an allocation came first
  if (overtaken) store(&policy->devices[device].memory_limit, old);
  return overtaken ? -EBUSY : 0;
}

// The caller holds the state folder's lock, so that no other agent changes the policy meanwhile. No
// lock on `policy` itself: a container has it open, and could hold that.
static int change_limit_in(allot_ledger *ledger, int descriptor, int device, uint64_t bytes,
                           bool force, uint64_t *used) {
  void *policy = NULL;
  int result = allot_map(descriptor, sizeof(allot_policy), sizeof(allot_policy),
                         PROT_READ | PROT_WRITE, &policy);
  if (result != 0) return result;
  const limit_change change = {ledger, policy, device, bytes, force, used};
  result = -EINVAL;
  if (device >= 0 && (uint32_t)device < ledger->policy->device_count && bytes > 0) {
    result = allot_ledger_clear(ledger, 0);
    if (result >= 0) result = allot_guarded(change_limit, (void *)&change);
  }
  munmap(policy, sizeof(allot_policy));
  return result;
}

int allot_ledger_set_limit(const char *directory, int device, uint64_t bytes, bool force,
                           uint64_t *used) {
  allot_ledger ledger;
  int result = allot_ledger_open(&ledger, directory);
  if (result != 0) return result;
  int descriptor = allot_open_in(directory, "policy", O_RDWR);
  if (descriptor < 0) {
    result = descriptor;
  } else {
    result = change_limit_in(&ledger, descriptor, device, bytes, force, used);
    close(descriptor);
  }
  allot_ledger_close(&ledger);
  return result;
}
