// SPDX-License-Identifier: Apache-2.0
// The table of processes: who has a slot, and what becomes of the slots of the dead.
//
// A slot's owner holds a lock of its own open file description, which the kernel drops when the
// process ends, however it ends. Whoever clears a dead owner's slot holds that same lock meanwhile,
// so clearing happens once, and starts again if the clearing process dies too.
//
// A driver frees a process's memory some time after its end. With `release_us` the slot keeps its
// memory and contexts for as long; its work is over at once. No process runs at the moment of the
// end, so that time begins when another one first sees it.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mapping.h"
#include "simulated/engine/engine.h"
#include "slots.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

static int64_t byte_of(int slot) {
  return ALLOT_PROCESS_LOCK_BASE + slot;
}

static int open_machine(const allot_handle *handle) {
  return allot_open(handle->path, O_RDWR);
}

static void drop_shared_events(allot_machine *machine, int slot) {
  for (int index = 0; index < ALLOT_SHARED_EVENTS; index++) {
    allot_shared_event *shared = &machine->events[index];
    if (allot_load(&shared->owner) != (uint32_t)slot + 1) continue;
    allot_store(&shared->state, (uint64_t)0);
    allot_store(&shared->owner, 0u);
  }
}

// Ends what the slot's process was doing. The caller holds the slot's lock.
static void stop_slot(allot_handle *handle, int slot) {
  allot_engine_break_locks(handle, slot);
  for (int gpu = 0; gpu < (int)handle->machine->description.gpu_count; gpu++) {
    allot_work_cancel(handle, slot, gpu);
  }
  if (handle->machine->processes[slot].kind == ALLOT_PROCESS_MPS_SERVER) {
    allot_mps_lose_server(handle, slot);
  }
  drop_shared_events(handle->machine, slot);
}

// Takes everything from the slot. The caller holds the slot's lock.
static void clear_slot(allot_handle *handle, int slot) {
  allot_process *process = &handle->machine->processes[slot];
  stop_slot(handle, slot);
  for (int gpu = 0; gpu < (int)handle->machine->description.gpu_count; gpu++) {
    allot_managed_forget(handle, slot, gpu);
    allot_store(&process->gpus[gpu].contexts, 0u);
    allot_store(&process->gpus[gpu].saved, (uint64_t)0);
  }
  allot_process_forget_memory(handle, slot);
  memset(&process->mps, 0, sizeof process->mps);
  allot_store(&process->ended_ns, (uint64_t)0);
  allot_store(&process->state, (uint32_t)ALLOT_PROCESS_FREE);
}

static bool has_contexts(const allot_handle *handle, int slot) {
  for (int gpu = 0; gpu < (int)handle->machine->description.gpu_count; gpu++) {
    if (allot_load(&handle->machine->processes[slot].gpus[gpu].contexts) > 0) return true;
  }
  return false;
}

// Has the driver freed the memory of the slot's dead owner? The caller holds the slot's lock.
static bool is_released(const allot_handle *handle, int slot) {
  uint64_t keeps_ns = allot_load(&handle->machine->faults.release_us) * 1000ull;
  if (keeps_ns == 0 || !has_contexts(handle, slot)) return true;
  uint64_t ended_ns = allot_load(&handle->machine->processes[slot].ended_ns);
  return ended_ns != 0 && allot_now_ns() - ended_ns >= keeps_ns;
}

// Clears the slot of a dead owner, or ends its work while the driver keeps its memory.
static bool clear_if_released(allot_handle *handle, int slot) {
  if (is_released(handle, slot)) {
    clear_slot(handle, slot);
    return true;
  }
  uint64_t *ended_ns = &handle->machine->processes[slot].ended_ns;
  if (allot_load(ended_ns) == 0) {
    stop_slot(handle, slot);
    allot_store(ended_ns, allot_now_ns());
  }
  return false;
}

int allot_machine_high(const allot_handle *handle) {
  uint32_t high = allot_load(&handle->machine->high_process);
  return high < ALLOT_MACHINE_PROCESSES ? (int)high : ALLOT_MACHINE_PROCESSES;
}

bool allot_machine_taken(const allot_handle *handle, int slot) {
  return allot_load(&handle->machine->processes[slot].state) != ALLOT_PROCESS_FREE;
}

static bool reap_one(allot_handle *handle, int descriptor, int slot) {
  if (slot == handle->slot || !allot_machine_taken(handle, slot)) return false;
  if (allot_slot_try(descriptor, byte_of(slot)) != 1) return false;
  bool dead = allot_machine_taken(handle, slot) && allot_checkpoint_bar(handle, slot);
  bool cleared = dead && clear_if_released(handle, slot);
  allot_slot_release(descriptor, byte_of(slot));
  return cleared;
}

bool allot_machine_lives(allot_handle *handle, int slot) {
  if (slot == handle->slot) return true;
  if (!allot_machine_taken(handle, slot)) return false;
  int descriptor = open_machine(handle);
  if (descriptor < 0) return true;
  bool owned = allot_slot_is_owned(descriptor, byte_of(slot));
  close(descriptor);
  return owned;
}

int allot_machine_reap(allot_handle *handle) {
  int descriptor = open_machine(handle);
  if (descriptor < 0) return descriptor;
  int cleared = 0;
  for (int slot = 0; slot < allot_machine_high(handle); slot++) {
    if (reap_one(handle, descriptor, slot)) cleared++;
  }
  close(descriptor);
  return cleared;
}

bool allot_machine_reap_slot(allot_handle *handle, int slot) {
  int descriptor = open_machine(handle);
  if (descriptor < 0) return false;
  bool cleared = reap_one(handle, descriptor, slot);
  close(descriptor);
  return cleared;
}

uint64_t allot_pid_namespace(const char *path) {
  struct stat status;
  return stat(path, &status) == 0 ? (uint64_t)status.st_ino : 0;
}

static void describe_owner(allot_process *process) {
  allot_own_command(process->command, sizeof process->command);
  process->start_time = allot_start_time("/proc/self/stat");
  process->attached_ns = allot_now_ns();
  process->namespace_id = allot_pid_namespace("/proc/self/ns/pid");
  process->pid = (int32_t)getpid();
  for (int gpu = 0; gpu < ALLOT_MACHINE_GPUS; gpu++) {
    process->gpus[gpu].busy_ns = 0;
    process->gpus[gpu].copy_busy_ns = 0;
    process->gpus[gpu].compute_place = process->gpus[gpu].memory_place = 0;
    memset(&process->gpus[gpu].compute, 0, sizeof process->gpus[gpu].compute);
  }
}

static void take_slot(allot_handle *handle, int slot, unsigned kind) {
  allot_process *process = &handle->machine->processes[slot];
  handle->slot = slot;  // clearing takes locks in the slot's name
  if (allot_machine_taken(handle, slot)) clear_slot(handle, slot);
  describe_owner(process);
  process->kind = kind;
  allot_store(&process->failed, 0u);
  allot_store(&process->gate, 0u);
  allot_store(&process->checkpoint, (uint64_t)ALLOT_CHECKPOINT_RUNNING);
  process->attaches++;
  allot_slot_note_high(&handle->machine->high_process, slot);
  allot_store(&process->state, (uint32_t)ALLOT_PROCESS_TAKEN);
}

// A child must not have the slot, which is this process's alone: it finds zero in `mine`.
static int make_mine(allot_handle *handle) {
  void *mine = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mine == MAP_FAILED) return -errno;
  if (madvise(mine, 1, MADV_WIPEONFORK) != 0) {
    int error = -errno;
    munmap(mine, 1);
    return error;
  }
  handle->mine = mine;
  *handle->mine = 1;
  return 0;
}

static bool is_claimable(void *handle, int slot) {
  return !allot_machine_taken(handle, slot) || is_released(handle, slot);
}

static int claim_slot(allot_handle *handle) {
  int descriptor = open_machine(handle);
  if (descriptor < 0) return descriptor;
  int slot = allot_slot_claim_if(descriptor, ALLOT_PROCESS_LOCK_BASE, ALLOT_MACHINE_PROCESSES,
                                 is_claimable, handle, &handle->keeper);
  close(descriptor);
  if (slot < 0) return slot;
  int error = make_mine(handle);
  if (error == 0) return slot;
  munmap(handle->keeper, 1);
  handle->keeper = NULL;
  return error;
}

int allot_machine_attach(allot_handle *handle, unsigned kind) {
  handle->slot = -1;
  allot_forks_hold();
  int slot = claim_slot(handle);
  allot_forks_release();
  if (slot < 0) return slot;
  take_slot(handle, slot, kind);
  return 0;
}

bool allot_machine_attached(const allot_handle *handle) {
  return handle->slot >= 0 && allot_load(handle->mine) != 0;
}

void allot_machine_detach(allot_handle *handle) {
  if (!allot_machine_attached(handle)) return;
  clear_slot(handle, handle->slot);
  munmap(handle->keeper, 1);
  munmap(handle->mine, 1);
  handle->keeper = NULL;
  handle->mine = NULL;
  handle->slot = -1;
}
