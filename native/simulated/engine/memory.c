// SPDX-License-Identifier: Apache-2.0
// Device memory in use, exact over all processes at any instant.
//
// The protocol is the ledger's (docs/designs/ledger.md): an operation is published in the slot with
// the use before and after it, and takes effect by the one compare-and-swap of the GPU's total that
// carries its number. Whoever comes next marks it as committed. So a process may end, or be
// stopped, at any instruction, and no lock is held meanwhile.
#include <string.h>

#include "simulated/engine/engine.h"

#define OPERATION_BITS 48
#define OPERATION_MASK ((1ull << OPERATION_BITS) - 1)

typedef unsigned __int128 __attribute__((may_alias)) total_word;

static allot_machine_total read_total(const allot_gpu_engine *engine) {
  // The halves may be of two moments: `last` alone is always of an operation that happened, and the
  // swap fails unless both halves still hold.
  allot_machine_total total = {.last = allot_load(&engine->memory.last)};
  total.used = allot_load(&engine->memory.used);
  return total;
}

static bool swap_total(allot_gpu_engine *engine, allot_machine_total expected,
                       allot_machine_total desired) {
  total_word from, to;
  memcpy(&from, &expected, sizeof from);
  memcpy(&to, &desired, sizeof to);
  return __sync_bool_compare_and_swap((total_word *)(void *)&engine->memory, from, to);
}

static void raise_to(uint64_t *word, uint64_t value) {
  uint64_t seen = allot_load(word);
  while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, false, __ATOMIC_SEQ_CST,
                                                      __ATOMIC_SEQ_CST)) {
  }
}

static void help(allot_machine *machine, int gpu, uint64_t last) {
  // Slots are numbered from 1 here: the zero of a new file is no operation of anyone.
  uint64_t slot = last >> OPERATION_BITS;
  if (slot == 0 || slot > ALLOT_MACHINE_PROCESSES) return;
  raise_to(&machine->processes[slot - 1].gpus[gpu].committed, last & OPERATION_MASK);
}

static uint64_t effective(const allot_process_gpu *own) {
  uint64_t operation = allot_load(&own->operation);
  const allot_machine_intent *intent = &own->intents[operation & 1];
  bool done = allot_load(&own->committed) >= operation;
  return done ? allot_load(&intent->after) : allot_load(&intent->before);
}

// Publishes the change and returns its number; until that is committed the slot has `before`.
static uint64_t publish(allot_process_gpu *own, uint64_t before, uint64_t after) {
  uint64_t operation = allot_load(&own->operation);
  if (allot_load(&own->committed) < operation) {
    // The last one never reached the total, so its number and its `before` serve again.
    allot_store(&own->intents[operation & 1].after, after);
    return operation;
  }
  allot_machine_intent *intent = &own->intents[(operation + 1) & 1];
  allot_store(&intent->before, before);
  allot_store(&intent->after, after);
  allot_store(&own->operation, operation + 1);
  return operation + 1;
}

static bool take(allot_handle *handle, int gpu, uint64_t bytes) {
  allot_machine *machine = handle->machine;
  allot_gpu_engine *engine = &machine->engines[gpu];
  allot_process_gpu *own = &machine->processes[handle->slot].gpus[gpu];
  uint64_t capacity = allot_gpu_capacity(handle, gpu);
  for (;;) {
    allot_machine_total total = read_total(engine);
    help(machine, gpu, total.last);
    if (total.used > capacity || bytes > capacity - total.used) return false;
    uint64_t before = effective(own);
    uint64_t operation = publish(own, before, before + bytes);
    allot_machine_total wanted = {
        .used = total.used + bytes,
        .last = (uint64_t)(handle->slot + 1) << OPERATION_BITS | operation};
    if (!swap_total(engine, total, wanted)) continue;
    raise_to(&own->committed, operation);
    if (before + bytes > own->memory_peak) allot_store(&own->memory_peak, before + bytes);
    return true;
  }
}

static void give_back(allot_handle *handle, int slot, int gpu, uint64_t bytes) {
  allot_machine *machine = handle->machine;
  allot_gpu_engine *engine = &machine->engines[gpu];
  allot_process_gpu *own = &machine->processes[slot].gpus[gpu];
  for (;;) {
    allot_machine_total total = read_total(engine);
    help(machine, gpu, total.last);
    uint64_t before = effective(own);
    uint64_t less = bytes < before ? bytes : before;
    if (less == 0) return;
    uint64_t operation = publish(own, before, before - less);
    allot_machine_total wanted = {.used = total.used > less ? total.used - less : 0,
                                  .last = (uint64_t)(slot + 1) << OPERATION_BITS | operation};
    if (!swap_total(engine, total, wanted)) continue;
    raise_to(&own->committed, operation);
    return;
  }
}

uint64_t allot_gpu_capacity(const allot_handle *handle, int gpu) {
  const allot_gpu_description *description = &handle->machine->description.gpus[gpu];
  uint64_t total = description->memory_total, kept = description->memory_reserved;
  return total > kept ? total - kept : 0;
}

uint64_t allot_gpu_used(const allot_handle *handle, int gpu) {
  return allot_load(&handle->machine->engines[gpu].memory.used);
}

uint64_t allot_process_used(const allot_handle *handle, int slot, int gpu) {
  const allot_machine *machine = handle->machine;
  const allot_process_gpu *own = &machine->processes[slot].gpus[gpu];
  // An operation is in the total before it is marked as committed: look at both, and again while
  // the owner moves on.
  for (int tries = 0; tries < 100; tries++) {
    uint64_t operation = allot_load(&own->operation);
    uint64_t before = allot_load(&own->intents[operation & 1].before);
    uint64_t after = allot_load(&own->intents[operation & 1].after);
    uint64_t mark = (uint64_t)(slot + 1) << OPERATION_BITS | operation;
    bool done = allot_load(&machine->engines[gpu].memory.last) == mark ||
                allot_load(&own->committed) >= operation;
    if (allot_load(&own->operation) == operation) return done ? after : before;
  }
  return effective(own);
}

bool allot_gpu_take(allot_handle *handle, int gpu, uint64_t bytes) {
  if (take(handle, gpu, bytes)) return true;
  return allot_machine_reap(handle) > 0 && take(handle, gpu, bytes);
}

void allot_gpu_give_back(allot_handle *handle, int gpu, uint64_t bytes) {
  give_back(handle, handle->slot, gpu, bytes);
}

void allot_process_forget_memory(allot_handle *handle, int slot) {
  for (int gpu = 0; gpu < ALLOT_MACHINE_GPUS; gpu++) {
    give_back(handle, slot, gpu, UINT64_MAX);
    allot_store(&handle->machine->processes[slot].gpus[gpu].memory_peak, (uint64_t)0);
  }
}
