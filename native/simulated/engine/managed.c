// SPDX-License-Identifier: Apache-2.0
// Managed memory: more of it than a GPU has can be allocated, and it moves.
//
// A process's managed memory of a GPU is one set, of which so many bytes are on the GPU; which
// ones has no meaning here, since kernels do nothing. A kernel uses all of it: what is not on the
// GPU comes in before. What was used longest ago makes room, whosever it is. Memory that was never
// on a GPU holds no data and comes in at once.
//
// What is resident counts beside the memory of other kinds (memory.c), which has precedence: the
// sum never passes what the GPU has, except for a moment while somebody moves something out.
#include "simulated/engine/simulation.h"

// A page that a kernel misses comes in at half the rate of a copy: what faults cost.
#define FAULT_FACTOR 2

static allot_process_gpu *part_of(const allot_handle *handle, int slot, int gpu) {
  return &handle->machine->processes[slot].gpus[gpu];
}

static uint64_t smaller(uint64_t one, uint64_t other) {
  return one < other ? one : other;
}

// Walks the slots that may have managed memory: the next one from `slot` on, or -1.
static int next_slot(const allot_gpu_engine *engine, int slot) {
  while (slot < ALLOT_MACHINE_PROCESSES) {
    uint64_t bits = allot_load(&engine->managed[slot / 64]) >> (slot % 64);
    if (bits != 0) return slot + __builtin_ctzll(bits);
    slot = (slot / 64 + 1) * 64;
  }
  return -1;
}

static bool is_used(const allot_gpu_engine *engine) {
  return next_slot(engine, 0) >= 0;
}

// Of the processes that compute at a place.
static uint64_t resident_at(const allot_handle *handle, int place) {
  const allot_gpu_engine *engine = &handle->machine->engines[place];
  uint64_t sum = 0;
  for (int slot = next_slot(engine, 0); slot >= 0; slot = next_slot(engine, slot + 1)) {
    sum += allot_load(&part_of(handle, slot, allot_place_gpu(place))->resident);
  }
  return sum;
}

uint64_t allot_managed_resident(const allot_handle *handle, int place) {
  uint64_t sum = resident_at(handle, place);
  if (place < ALLOT_FIRST_CUT) return sum;
  // A GPU instance's other compute instances are behind its place.
  int end = ALLOT_CUT(allot_place_gpu(place) + 1, 0);
  for (int other = place + 1; other < end; other++) {
    if (allot_mig_memory_place(handle, other) == place) sum += resident_at(handle, other);
  }
  return sum;
}

uint64_t allot_managed_on_host(const allot_handle *handle) {
  uint64_t sum = 0;
  for (int place = 0; place < ALLOT_MACHINE_PLACES; place++) {
    const allot_gpu_engine *engine = &handle->machine->engines[place];
    for (int slot = next_slot(engine, 0); slot >= 0; slot = next_slot(engine, slot + 1)) {
      const allot_process_gpu *part = part_of(handle, slot, allot_place_gpu(place));
      uint64_t populated = allot_load(&part->populated), resident = allot_load(&part->resident);
      if (populated > resident) sum += populated - resident;
    }
  }
  return sum;
}

// ---- under the GPU's lock ----

// What all managed memory of a place together may have.
static uint64_t most(const allot_handle *handle, int place) {
  int memory_place = allot_mig_memory_place(handle, place);
  uint64_t capacity = allot_place_capacity(handle, memory_place);
  uint64_t taken = allot_load(&handle->machine->engines[memory_place].memory.value);
  // What moves within one compute instance leaves its neighbours' alone.
  taken += allot_managed_resident(handle, memory_place) - resident_at(handle, place);
  return taken < capacity ? capacity - taken : 0;
}

static int least_recent(const allot_handle *handle, int place, int spared) {
  const allot_gpu_engine *engine = &handle->machine->engines[place];
  int found = -1, gpu = allot_place_gpu(place);
  for (int slot = next_slot(engine, 0); slot >= 0; slot = next_slot(engine, slot + 1)) {
    if (slot == spared || allot_load(&part_of(handle, slot, gpu)->resident) == 0) continue;
    if (found < 0 || allot_load(&part_of(handle, slot, gpu)->managed_used_ns) <
                         allot_load(&part_of(handle, found, gpu)->managed_used_ns)) {
      found = slot;
    }
  }
  return found;
}

// Moves so many bytes out, of `spared` only when no other has any. Returns how many there were.
static uint64_t evict(const allot_handle *handle, int place, uint64_t bytes, int spared) {
  uint64_t left = bytes;
  while (left > 0) {
    int slot = least_recent(handle, place, spared);
    if (slot < 0 && spared >= 0) slot = least_recent(handle, place, -1);
    if (slot < 0) break;
    uint64_t *resident = &part_of(handle, slot, allot_place_gpu(place))->resident;
    uint64_t had = allot_load(resident), taken = smaller(left, had);
    allot_store(resident, had - taken);
    left -= taken;
  }
  return bytes - left;
}

static uint64_t excess(uint64_t wanted, uint64_t room) {
  return wanted > room ? wanted - room : 0;
}

// Gives the slot `goal` bytes on the GPU, for which others make room. The same when done again.
static void reach(simulation *run, int slot, uint64_t goal) {
  allot_process_gpu *own = part_of(run->handle, slot, run->gpu);
  uint64_t resident = allot_load(&own->resident);
  goal = smaller(goal, allot_load(&own->managed));
  if (resident < goal) {
    uint64_t all = resident_at(run->handle, run->place) + goal - resident;
    evict(run->handle, run->place, excess(all, most(run->handle, run->place)), slot);
    if (allot_load(&own->populated) < goal) allot_store(&own->populated, goal);
    allot_store(&own->resident, goal);
  }
}

void managed_bring(simulation *run, int slot) {
  allot_process_gpu *own = part_of(run->handle, slot, run->gpu);
  uint64_t managed = allot_load(&own->managed);
  if (managed == 0) return;
  uint64_t now = run->engine->now_ns, resident = allot_load(&own->resident);
  allot_store(&own->managed_used_ns, now);
  if (resident >= managed) return;
  uint64_t limit = most(run->handle, run->place);
  uint64_t others = resident_at(run->handle, run->place) - resident;
  uint64_t in = excess(allot_load(&own->populated), resident);
  // What does not fit at all passes through: every kernel has it come in and go out again.
  uint64_t out = excess(others + managed, limit);
  uint64_t takes = FAULT_FACTOR * allot_copy_ns(run->handle, run->gpu, ALLOT_COPY_H2D, in) +
                   allot_copy_ns(run->handle, run->gpu, ALLOT_COPY_D2H, out);
  if (takes > 0 && run->engine->stalled_until_ns <= now) {
    // The turn itself begins when all is there.
    allot_store(&run->engine->stalled_until_ns, now + takes);
    allot_store(&run->engine->slice_end_ns, now + takes + run->slice_ns);
  }
  reach(run, slot, smaller(managed, limit));
  if (allot_load(&own->populated) < managed) allot_store(&own->populated, managed);
}

// The goal is stored before anything moves: whoever takes over from a killed process goes on to it.
void managed_prefetch(simulation *run, int slot, allot_work *work) {
  allot_process_gpu *own = part_of(run->handle, slot, run->gpu);
  uint64_t resident = allot_load(&own->resident);
  bool in = work->engine == ALLOT_COPY_H2D;
  if (work->target == 0) {
    uint64_t goal = resident - smaller(work->bytes, resident), takes;
    if (in) {
      uint64_t limit = smaller(most(run->handle, run->place), allot_load(&own->managed));
      goal = smaller(resident + work->bytes, limit > resident ? limit : resident);
      uint64_t data = excess(allot_load(&own->populated), resident);
      uint64_t all = resident_at(run->handle, run->place) + goal - resident;
      uint64_t out = excess(all, most(run->handle, run->place));
      takes = allot_copy_ns(run->handle, run->gpu, ALLOT_COPY_H2D, smaller(goal - resident, data)) +
              allot_copy_ns(run->handle, run->gpu, ALLOT_COPY_D2H, out);
    } else {
      takes = allot_copy_ns(run->handle, run->gpu, ALLOT_COPY_D2H, resident - goal);
    }
    allot_store(&work->duration_ns, takes);
    allot_store(&work->target, goal + 1);
  }
  if (in) {
    allot_store(&own->managed_used_ns, run->engine->now_ns);
    reach(run, slot, work->target - 1);
  } else if (resident > work->target - 1) {
    allot_store(&own->resident, work->target - 1);
  }
}

// ---- what processes do ----

void allot_managed_add(allot_handle *handle, int gpu, uint64_t bytes) {
  allot_process_gpu *own = part_of(handle, handle->slot, gpu);
  uint64_t bit = 1ull << (handle->slot % 64);
  int place = allot_compute_place(handle, handle->slot, gpu);
  allot_engine_lock(handle, place);
  uint64_t *used = &handle->machine->engines[place].managed[handle->slot / 64];
  __atomic_fetch_or(used, bit, __ATOMIC_SEQ_CST);
  allot_store(&own->managed, allot_load(&own->managed) + bytes);
  allot_engine_unlock(handle, place);
}

static void shrink(const allot_handle *handle, int slot, int gpu, uint64_t managed) {
  allot_process_gpu *own = part_of(handle, slot, gpu);
  if (allot_load(&own->resident) > managed) allot_store(&own->resident, managed);
  if (allot_load(&own->populated) > managed) allot_store(&own->populated, managed);
  allot_store(&own->managed, managed);
  if (managed > 0) return;
  int place = allot_compute_place(handle, slot, gpu);
  uint64_t *used = &handle->machine->engines[place].managed[slot / 64];
  __atomic_fetch_and(used, ~(1ull << (slot % 64)), __ATOMIC_SEQ_CST);
}

void allot_managed_remove(allot_handle *handle, int gpu, uint64_t bytes) {
  int place = allot_compute_place(handle, handle->slot, gpu);
  allot_engine_lock(handle, place);
  uint64_t managed = allot_load(&part_of(handle, handle->slot, gpu)->managed);
  shrink(handle, handle->slot, gpu, excess(managed, bytes));
  allot_engine_unlock(handle, place);
}

void allot_managed_forget(allot_handle *handle, int slot, int gpu) {
  int place = allot_compute_place(handle, slot, gpu);
  const uint64_t *used = &handle->machine->engines[place].managed[slot / 64];
  if (!(allot_load(used) >> (slot % 64) & 1)) return;
  // Without a slot of its own (and none left) there is no way to lock.
  bool locks =
      allot_machine_attached(handle) || allot_machine_attach(handle, ALLOT_PROCESS_MONITOR) == 0;
  if (locks) allot_engine_lock(handle, place);
  shrink(handle, slot, gpu, 0);
  if (locks) allot_engine_unlock(handle, place);
}

void allot_managed_squeeze(allot_handle *handle, int place) {
  allot_gpu_engine *engine = &handle->machine->engines[place];
  if (!is_used(engine)) return;
  allot_engine_lock(handle, place);
  uint64_t over = excess(resident_at(handle, place), most(handle, place));
  uint64_t moved = evict(handle, place, over, -1), now = allot_now_ns();
  uint64_t *free_ns = &engine->copy_free_ns[ALLOT_COPY_D2H];
  if (moved > 0) {
    *free_ns = (*free_ns > now ? *free_ns : now) +
               allot_copy_ns(handle, allot_place_gpu(place), ALLOT_COPY_D2H, moved);
  }
  allot_engine_unlock(handle, place);
}

uint64_t allot_managed_evict(allot_handle *handle, int slot, int gpu) {
  int place = allot_compute_place(handle, slot, gpu);
  allot_engine_lock(handle, place);
  uint64_t *resident = &part_of(handle, slot, gpu)->resident;
  uint64_t had = allot_load(resident);
  allot_store(resident, (uint64_t)0);
  allot_engine_unlock(handle, place);
  return had;
}
