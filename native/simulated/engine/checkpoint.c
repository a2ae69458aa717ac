// SPDX-License-Identifier: Apache-2.0
// Putting a process's memory aside from outside, and back.
//
// The process's state is one word, with the process that is at work on it beside it. A process that
// is not RUNNING changes nothing of its memory, nor submits work, so that another one can do the
// accounting in its place: it publishes in the slot's part of the memory (memory.c), as the owner
// would. Every step can be done again by whoever takes over from a worker that was killed.
#include <errno.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "simulated/engine/engine.h"
#include "slots.h"

#define STATE(word) ((unsigned)(word))
#define WORKER(word) ((int)((word) >> 32) - 1)
#define WORD(state, slot) ((uint64_t)(state) | (uint64_t)((slot) + 1) << 32)
#define LOOK_NS 500000ull

static uint64_t *word_of(const allot_handle *handle, int slot) {
  return &handle->machine->processes[slot].checkpoint;
}

static bool swap(uint64_t *word, uint64_t from, uint64_t to) {
  return __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

unsigned allot_checkpoint_state(const allot_handle *handle, int slot) {
  return STATE(allot_load(word_of(handle, slot)));
}

void allot_checkpoint_wait(const allot_handle *handle) {
  uint64_t *word = word_of(handle, handle->slot);
  // The owner has no part in the changes: it looks again after a while even if nobody wakes it.
  struct timespec patience = {.tv_nsec = 100000000};
  for (;;) {
    uint64_t seen = allot_load(word);
    if (STATE(seen) == ALLOT_CHECKPOINT_RUNNING) return;
    syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &patience, NULL, 0);
  }
}

void allot_gate_enter(const allot_handle *handle) {
  uint32_t *gate = &handle->machine->processes[handle->slot].gate;
  for (;;) {
    __atomic_fetch_add(gate, 1u, __ATOMIC_SEQ_CST);
    if (allot_checkpoint_state(handle, handle->slot) == ALLOT_CHECKPOINT_RUNNING) return;
    allot_gate_leave(handle);
    allot_checkpoint_wait(handle);
  }
}

void allot_gate_leave(const allot_handle *handle) {
  __atomic_fetch_sub(&handle->machine->processes[handle->slot].gate, 1u, __ATOMIC_SEQ_CST);
}

bool allot_checkpoint_bar(allot_handle *handle, int slot) {
  uint64_t *word = word_of(handle, slot);
  for (;;) {
    uint64_t seen = allot_load(word);
    int worker = WORKER(seen);
    if (worker >= 0 && worker != slot &&
        (worker == handle->slot || allot_machine_lives(handle, worker))) {
      return false;
    }
    if (swap(word, seen, WORD(ALLOT_CHECKPOINT_FAILED, -1))) return true;
  }
}

// Takes the work from the state it has to be in: 0, -EPERM (it is in another), -EBUSY (somebody is
// at it).
static int claim(allot_handle *handle, int slot, unsigned from, unsigned busy) {
  uint64_t *word = word_of(handle, slot);
  uint64_t seen = allot_load(word);
  if (STATE(seen) == busy && WORKER(seen) >= 0) {
    if (WORKER(seen) == handle->slot || allot_machine_lives(handle, WORKER(seen))) return -EBUSY;
  } else if (STATE(seen) != from) {
    return -EPERM;
  }
  return swap(word, seen, WORD(busy, handle->slot)) ? 0 : -EBUSY;
}

static void settle(allot_handle *handle, int slot, unsigned state) {
  uint64_t *word = word_of(handle, slot);
  allot_store(word, WORD(state, -1));
  syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

// ---- whom a number means -----------------------------------------------------------------------

int allot_number_inside(int pid) {
  char path[64], line[512];
  snprintf(path, sizeof path, "/proc/%d/status", pid);
  FILE *file = fopen(path, "re");
  int number = pid;
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, "NSpid:", 6) != 0) continue;
    const char *last = strrchr(line, '\t');
    if (last != NULL) number = atoi(last + 1);
  }
  if (file != NULL) fclose(file);
  return number;
}

int allot_checkpoint_find(allot_handle *handle, int pid) {
  if (pid <= 0) return -ESRCH;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  uint64_t start_time = allot_start_time(path);
  snprintf(path, sizeof path, "/proc/%d/ns/pid", pid);
  uint64_t namespace_id = allot_pid_namespace(path);
  int number = allot_number_inside(pid);
  allot_machine_reap(handle);
  for (int slot = 0; slot < allot_machine_high(handle); slot++) {
    const allot_process *process = &handle->machine->processes[slot];
    if (!allot_machine_taken(handle, slot) || process->kind != ALLOT_PROCESS_COMPUTE) continue;
    if (allot_load(&process->pid) != number) continue;
    uint64_t own = allot_load(&process->namespace_id);
    if (namespace_id != 0 && own != 0 && own != namespace_id) continue;
    if (start_time == 0 || allot_load(&process->start_time) == start_time) return slot;
  }
  return -ESRCH;
}

// ---- the four steps ----------------------------------------------------------------------------

static bool has_ring(const allot_handle *handle, int slot, int gpu) {
  return allot_load(&handle->machine->processes[slot].gpus[gpu].has_ring) != 0;
}

// Is nothing of the process under way, on its GPUs or in its memory?
static bool rests(allot_handle *handle, int slot) {
  if (allot_load(&handle->machine->processes[slot].gate) != 0) return false;
  for (int gpu = 0; gpu < (int)handle->machine->description.gpu_count; gpu++) {
    if (!has_ring(handle, slot, gpu)) continue;
    const allot_ring *ring = allot_ring_of(handle, slot, gpu);
    if (allot_load(&ring->head) == allot_load(&ring->tail)) continue;
    allot_engine_advance(handle, allot_compute_place(handle, slot, gpu));
    if (allot_load(&ring->head) != allot_load(&ring->tail)) return false;
  }
  return true;
}

int allot_checkpoint_lock(allot_handle *handle, int slot, uint64_t timeout_ns) {
  uint64_t *word = word_of(handle, slot);
  if (!swap(word, WORD(ALLOT_CHECKPOINT_RUNNING, -1), WORD(ALLOT_CHECKPOINT_LOCKED, -1))) {
    return -EPERM;
  }
  uint64_t began = allot_now_ns();
  while (!rests(handle, slot)) {
    if (!allot_machine_lives(handle, slot)) return -ESRCH;
    uint64_t now = allot_now_ns();
    if (timeout_ns > 0 && now - began >= timeout_ns) {
      settle(handle, slot, ALLOT_CHECKPOINT_RUNNING);
      return -ETIMEDOUT;
    }
    allot_sleep_until(now + LOOK_NS);
  }
  return 0;
}

// Keeps a copy engine for so many bytes. Returns when it is done with them.
static uint64_t copied_at(allot_handle *handle, int slot, int gpu, unsigned engine,
                          uint64_t bytes) {
  int place = allot_compute_place(handle, slot, gpu);
  uint64_t takes = allot_copy_ns(handle, gpu, engine, bytes);
  if (takes == 0) return 0;
  allot_engine_advance(handle, place);
  allot_engine_lock(handle, place);
  allot_gpu_engine *own = &handle->machine->engines[place];
  uint64_t now = allot_now_ns();
  uint64_t start = own->copy_free_ns[engine] > now ? own->copy_free_ns[engine] : now;
  own->copy_free_ns[engine] = start + takes;
  own->copy_busy_ns += takes;
  allot_history_add(&own->copies, start, start + takes);
  allot_engine_unlock(handle, place);
  return start + takes;
}

static uint64_t later(uint64_t one, uint64_t other) {
  return one > other ? one : other;
}

int allot_checkpoint_save(allot_handle *handle, int slot) {
  int error = claim(handle, slot, ALLOT_CHECKPOINT_LOCKED, ALLOT_CHECKPOINT_SAVING);
  if (error != 0) return error;
  int gpus = (int)handle->machine->description.gpu_count;
  uint64_t end = 0;
  for (int gpu = 0; gpu < gpus; gpu++) {
    uint64_t bytes = allot_process_used(handle, slot, gpu);
    end = later(end, copied_at(handle, slot, gpu, ALLOT_COPY_D2H, bytes));
  }
  allot_sleep_until(end);
  for (int gpu = 0; gpu < gpus; gpu++) {
    allot_process_gpu *own = &handle->machine->processes[slot].gpus[gpu];
    allot_managed_evict(handle, slot, gpu);
    uint64_t bytes = allot_process_used(handle, slot, gpu);
    // Nothing is left where another worker was before.
    if (bytes > 0) allot_store(&own->saved, bytes);
    allot_slot_give_back(handle, slot, gpu, UINT64_MAX);
  }
  settle(handle, slot, ALLOT_CHECKPOINT_SAVED);
  return 0;
}

static bool take_again(allot_handle *handle, int slot, int gpu) {
  uint64_t saved = allot_load(&handle->machine->processes[slot].gpus[gpu].saved);
  if (saved == 0 || allot_process_used(handle, slot, gpu) > 0) return true;
  return allot_slot_take(handle, slot, gpu, saved);
}

int allot_checkpoint_restore(allot_handle *handle, int slot) {
  int error = claim(handle, slot, ALLOT_CHECKPOINT_SAVED, ALLOT_CHECKPOINT_RESTORING);
  if (error != 0) return error;
  int gpus = (int)handle->machine->description.gpu_count;
  for (int gpu = 0; gpu < gpus; gpu++) {
    if (take_again(handle, slot, gpu)) continue;
    for (int taken = 0; taken < gpu; taken++) {
      allot_slot_give_back(handle, slot, taken, UINT64_MAX);
    }
    settle(handle, slot, ALLOT_CHECKPOINT_SAVED);
    return -ENOMEM;
  }
  uint64_t end = 0;
  for (int gpu = 0; gpu < gpus; gpu++) {
    uint64_t bytes = allot_process_used(handle, slot, gpu);
    end = later(end, copied_at(handle, slot, gpu, ALLOT_COPY_H2D, bytes));
  }
  allot_sleep_until(end);
  for (int gpu = 0; gpu < gpus; gpu++) {
    allot_store(&handle->machine->processes[slot].gpus[gpu].saved, (uint64_t)0);
  }
  settle(handle, slot, ALLOT_CHECKPOINT_LOCKED);
  return 0;
}

int allot_checkpoint_unlock(allot_handle *handle, int slot) {
  uint64_t *word = word_of(handle, slot);
  if (!swap(word, WORD(ALLOT_CHECKPOINT_LOCKED, -1), WORD(ALLOT_CHECKPOINT_RUNNING, -1))) {
    return -EPERM;
  }
  syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
  return 0;
}
