// SPDX-License-Identifier: Apache-2.0
// Device memory in use, exact over all processes at any instant.
//
// The protocol is the ledger's (docs/designs/ledger.md): an operation is published in the slot with
// the use before and after it, and takes effect by the one compare-and-swap of the GPU's total that
// carries its number. Whoever comes next marks it as committed. So a process may end, or be
// stopped, at any instruction, and no lock is held meanwhile.
#include "simulated/engine/engine.h"

// The total as it is, with the operation that made it so marked as committed.
static allot_counter read_total(allot_machine *machine, int place) {
  allot_counter seen = allot_counter_read(&machine->engines[place].memory);
  // Slots are numbered from 1 here: the zero of a new file is no operation of anyone.
  uint64_t slot = allot_counter_mark(seen.last);
  if (slot > 0 && slot <= ALLOT_MACHINE_PROCESSES) {
    int gpu = allot_place_gpu(place);
    allot_part_help(&machine->processes[slot - 1].gpus[gpu].memory, seen.last);
  }
  return seen;
}

static bool take(allot_handle *handle, int slot, int gpu, uint64_t bytes) {
  allot_machine *machine = handle->machine;
  allot_process_gpu *own = &machine->processes[slot].gpus[gpu];
  int place = allot_memory_place(handle, slot, gpu);
  uint64_t capacity = allot_place_capacity(handle, place);
  uint64_t limit = allot_load(&machine->processes[slot].mps.memory_limit[gpu]);
  for (;;) {
    allot_counter total = read_total(machine, place);
    if (total.value > capacity || bytes > capacity - total.value) return false;
    uint64_t before = allot_part_value(&own->memory);
    if (limit != 0 && before + bytes > limit) return false;
    if (!allot_counter_change(&machine->engines[place].memory, total, total.value + bytes,
                              &own->memory, (uint64_t)slot + 1, before, before + bytes)) {
      continue;
    }
    if (before + bytes > own->memory_peak) allot_store(&own->memory_peak, before + bytes);
    return true;
  }
}

static void give_back(allot_handle *handle, int slot, int gpu, uint64_t bytes) {
  allot_machine *machine = handle->machine;
  allot_part *own = &machine->processes[slot].gpus[gpu].memory;
  int place = allot_memory_place(handle, slot, gpu);
  for (;;) {
    allot_counter total = read_total(machine, place);
    uint64_t before = allot_part_value(own);
    uint64_t less = bytes < before ? bytes : before;
    if (less == 0) return;
    uint64_t left = total.value > less ? total.value - less : 0;
    if (allot_counter_change(&machine->engines[place].memory, total, left, own, (uint64_t)slot + 1,
                             before, before - less)) {
      return;
    }
  }
}

uint64_t allot_gpu_capacity(const allot_handle *handle, int gpu) {
  return allot_place_capacity(handle, allot_memory_place(handle, handle->slot, gpu));
}

uint64_t allot_gpu_used(const allot_handle *handle, int gpu) {
  return allot_place_used(handle, allot_memory_place(handle, handle->slot, gpu));
}

uint64_t allot_place_used(const allot_handle *handle, int place) {
  uint64_t used = allot_load(&handle->machine->engines[place].memory.value);
  uint64_t all = used + allot_managed_resident(handle, place);
  uint64_t capacity = allot_place_capacity(handle, place);
  // Managed memory that has still to make room for the rest.
  return all > capacity && used <= capacity ? capacity : all;
}

uint64_t allot_process_used(const allot_handle *handle, int slot, int gpu) {
  const allot_machine *machine = handle->machine;
  const allot_process_gpu *own = &machine->processes[slot].gpus[gpu];
  int place = allot_memory_place(handle, slot, gpu);
  return allot_part_peek(&own->memory, &machine->engines[place].memory, (uint64_t)slot + 1) +
         allot_load(&own->resident);
}

bool allot_slot_take(allot_handle *handle, int slot, int gpu, uint64_t bytes) {
  bool taken = take(handle, slot, gpu, bytes) ||
               (allot_machine_reap(handle) > 0 && take(handle, slot, gpu, bytes));
  if (taken) allot_managed_squeeze(handle, allot_compute_place(handle, slot, gpu));
  return taken;
}

void allot_slot_give_back(allot_handle *handle, int slot, int gpu, uint64_t bytes) {
  give_back(handle, slot, gpu, bytes);
}

bool allot_gpu_take(allot_handle *handle, int gpu, uint64_t bytes) {
  allot_gate_enter(handle);
  bool taken = allot_slot_take(handle, handle->slot, gpu, bytes);
  allot_gate_leave(handle);
  return taken;
}

void allot_gpu_give_back(allot_handle *handle, int gpu, uint64_t bytes) {
  allot_gate_enter(handle);
  give_back(handle, handle->slot, gpu, bytes);
  allot_gate_leave(handle);
}

void allot_process_forget_memory(allot_handle *handle, int slot) {
  for (int gpu = 0; gpu < ALLOT_MACHINE_GPUS; gpu++) {
    give_back(handle, slot, gpu, UINT64_MAX);
    allot_store(&handle->machine->processes[slot].gpus[gpu].memory_peak, (uint64_t)0);
  }
}
