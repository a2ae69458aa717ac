// SPDX-License-Identifier: Apache-2.0
// The event simulation of one GPU.
//
// Whoever wants to know something brings the GPU from the time it was last looked at to the
// present, event by event: works become ready, copies end, kernels end, turns end. What computes is
// turns.c's affair, and memory that moves managed.c's.
#include "simulated/engine/simulation.h"

// How long the owners of queued work are believed to live without a look.
#define BELIEF_NS 5000000ull

static void note(simulation *run, uint64_t time_ns) {
  if (time_ns < run->next_ns) run->next_ns = time_ns;
}

static void finish(allot_work *work, uint64_t time_ns) {
  allot_store(&work->progress, ALLOT_PROGRESS(ALLOT_DONE, time_ns));
}

uint64_t allot_copy_ns(const allot_handle *handle, int gpu, unsigned engine, uint64_t bytes) {
  const allot_gpu_description *own = &handle->machine->description.gpus[gpu];
  uint64_t rate = own->d2d_mib_per_s;
  if (engine == ALLOT_COPY_H2D) rate = own->h2d_mib_per_s;
  if (engine == ALLOT_COPY_D2H) rate = own->d2h_mib_per_s;
  if (rate == 0) return 0;
  return (uint64_t)((unsigned __int128)bytes * 1000000000u / (rate << 20));
}

// A ready copy is given its place on its copy engine at once: those are first come, first served.
static void start_copy(simulation *run, int slot, allot_work *work, uint64_t ready_ns) {
  if (work->flags & ALLOT_WORK_MANAGED) managed_prefetch(run, slot, work);
  uint64_t *free_ns = &run->engine->copy_free_ns[work->engine];
  uint64_t start = ready_ns > *free_ns ? ready_ns : *free_ns;
  uint64_t end = start + work->duration_ns;
  *free_ns = end;
  allot_store(&work->progress, ALLOT_PROGRESS(ALLOT_RUNNING, end));
  run->engine->copy_busy_ns += end - start;
  run->handle->machine->processes[slot].gpus[run->gpu].copy_busy_ns += end - start;
  allot_history_add(&run->engine->copies, start, end);
}

// A WAIT on another ring's work. What another GPU is to do may not have been simulated yet.
static void settle_wait(simulation *run, allot_work *work, uint64_t ready_ns) {
  if (allot_work_done(run->handle, work->target)) {
    uint64_t ended = allot_work_ended(run->handle, work->target);
    if (ended < ready_ns) ended = ready_ns;
    if (ended > run->engine->now_ns) {
      note(run, ended);
    } else {
      finish(work, ended);
    }
  } else if (ALLOT_POINT_GPU(work->target) != run->gpu) {
    run->other_gpus |= 1u << ALLOT_POINT_GPU(work->target);
  }
}

static void settle_running(simulation *run, allot_work *work, uint64_t end_ns, turn *turn) {
  bool computes = work->kind == ALLOT_WORK_KERNEL;
  if (end_ns > run->engine->now_ns) {
    if (computes && turn != NULL) turn_add_running(run, turn, work, end_ns);
    if (!computes) note(run, end_ns);
    return;
  }
  if (computes && end_ns > run->engine->room_since_ns) {
    allot_store(&run->engine->room_since_ns, end_ns);
  }
  finish(work, end_ns);
}

// What became of one work at the present moment.
enum settled {
  SETTLED,
  COMPUTES,  // a kernel that runs, or could
  LATER,     // submitted later than now, as are all after it
};

// `turn` NULL: it is enough to know whether there is a kernel at all.
static enum settled settle_work(simulation *run, int slot, uint64_t number, turn *turn) {
  allot_work *work = allot_ring_work(allot_ring_of(run->handle, slot, run->gpu), number);
  uint64_t progress = allot_load(&work->progress), now = run->engine->now_ns;
  if (ALLOT_PROGRESS_STATE(progress) == ALLOT_RUNNING) {
    settle_running(run, work, ALLOT_PROGRESS_TIME(progress), turn);
    bool over = ALLOT_PROGRESS_STATE(allot_load(&work->progress)) == ALLOT_DONE;
    return work->kind == ALLOT_WORK_KERNEL && !over ? COMPUTES : SETTLED;
  }
  if (work->submitted_ns > now) {
    note(run, work->submitted_ns);
    return LATER;
  }
  uint64_t ready_ns;
  if (!allot_work_ready(run->handle, ALLOT_POINT(slot, run->gpu, number), &ready_ns)) {
    return SETTLED;
  }
  if (ready_ns > now) {
    // A function on the host ended after the moment that is looked at.
    note(run, ready_ns);
    return SETTLED;
  }
  switch (work->kind) {
    case ALLOT_WORK_MARK:
      finish(work, ready_ns);
      break;
    case ALLOT_WORK_KERNEL:
      if (turn != NULL) turn_add_ready(run, turn, work, number, ready_ns);
      return COMPUTES;
    case ALLOT_WORK_COPY:
      start_copy(run, slot, work, ready_ns);
      return settle_work(run, slot, number, turn);
    case ALLOT_WORK_WAIT:
      settle_wait(run, work, ready_ns);
      break;
    default:  // HOST: its process says when it is done
      break;
  }
  return SETTLED;
}

static void move_tail(allot_ring *ring) {
  uint64_t tail = allot_load(&ring->tail), moved = tail, head = allot_load(&ring->head);
  while (moved < head) {
    uint64_t progress = allot_load(&allot_ring_work(ring, moved + 1)->progress);
    if (ALLOT_PROGRESS_STATE(progress) != ALLOT_DONE) break;
    moved++;
  }
  if (moved != tail) allot_store(&ring->tail, moved);
}

// Brings the works of one process to the present moment, in the order of their numbers, since each
// depends on lower ones only. True: it has a kernel that runs or could.
static bool settle_process(simulation *run, int slot, turn *turn) {
  allot_ring *ring = allot_ring_of(run->handle, slot, run->gpu);
  bool computes = false;
  if (turn != NULL) turn_begin(turn);
  front_extend(run, slot);
  for (uint32_t at = 0; at < ring->front_count;) {
    if (front_pass(ring, at)) continue;
    enum settled settled = settle_work(run, slot, front_number(ring, at), turn);
    if (settled == LATER) break;
    computes = computes || settled == COMPUTES;
    if (!front_pass(ring, at)) at++;
  }
  move_tail(ring);
  return computes;
}

static void forget_if_idle(simulation *run, int slot) {
  allot_ring *ring = allot_ring_of(run->handle, slot, run->gpu);
  if (allot_load(&ring->tail) != allot_load(&ring->head)) return;
  uint64_t *active = &run->engine->active[slot / 64];
  uint64_t bit = 1ull << (slot % 64);
  __atomic_fetch_and(active, ~bit, __ATOMIC_SEQ_CST);
  if (allot_load(&ring->tail) != allot_load(&ring->head)) {
    __atomic_fetch_or(active, bit, __ATOMIC_SEQ_CST);
  }
}

// Settles every process. Returns how many have a kernel to run; *chosen is whose turn it is.
static int settle(simulation *run, int *chosen) {
  allot_gpu_engine *engine = run->engine;
  int holder = (int)engine->holder - 1, ready = 0, first = -1, following = -1;
  bool holding = false;
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = allot_load(&engine->active[word]); bits != 0; bits &= bits - 1) {
      int slot = word * 64 + __builtin_ctzll(bits);
      if (!settle_process(run, slot, slot == holder ? &run->turn : NULL)) {
        forget_if_idle(run, slot);
        continue;
      }
      ready++;
      if (slot == holder) holding = true;
      if (first < 0) first = slot;
      if (following < 0 && slot > holder) following = slot;
    }
  }
  bool turn_over = ready > 1 && engine->now_ns >= engine->slice_end_ns;
  if (holding && !turn_over) {
    *chosen = holder;
  } else {
    *chosen = following >= 0 ? following : first;
  }
  return ready;
}

static void simulate(simulation *run, uint64_t target_ns) {
  allot_gpu_engine *engine = run->engine;
  for (;;) {
    run->next_ns = target_ns;
    int chosen = -1, ready = settle(run, &chosen);
    uint64_t now = engine->now_ns;
    if (ready > 0) {
      bool changes = chosen != (int)engine->holder - 1;
      turn_give(run, chosen);
      if (changes) settle_process(run, chosen, &run->turn);
      uint64_t end = turn_run(run, chosen);
      if (end <= now) continue;  // it began and ended while nobody looked
      note(run, end);
      if (ready > 1) note(run, engine->slice_end_ns);
    }
    if (now >= target_ns) return;
    if (ready > 0) turn_account(run, chosen, now, run->next_ns);
    allot_store(&engine->now_ns, run->next_ns);
  }
}

// Looks now and then whether the owners of queued work still live: a dead process's kernels would
// otherwise run on.
static void bury_the_dead(allot_handle *handle, int gpu, uint64_t now_ns) {
  allot_gpu_engine *engine = &handle->machine->engines[gpu];
  uint64_t checked = allot_load(&engine->checked_ns);
  if (now_ns < checked + BELIEF_NS) return;
  allot_store(&engine->checked_ns, now_ns);
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = allot_load(&engine->active[word]); bits != 0; bits &= bits - 1) {
      int slot = word * 64 + __builtin_ctzll(bits);
      if (slot != handle->slot) allot_machine_reap_slot(handle, slot);
    }
  }
}

uint64_t allot_slice_ns(const allot_handle *handle, int gpu) {
  const allot_machine_description *machine = &handle->machine->description;
  uint32_t slice_us = allot_load(&machine->gpus[gpu].timeslice_us);
  if (slice_us == 0) slice_us = machine->timeslice_us;
  return slice_us > 0 ? slice_us * 1000ull : 2000000;
}

static uint32_t advance_one(allot_handle *handle, int gpu) {
  allot_gpu_engine *engine = &handle->machine->engines[gpu];
  bury_the_dead(handle, gpu, allot_now_ns());
  allot_engine_lock(handle, gpu);
  simulation run = {
      .handle = handle, .engine = engine, .gpu = gpu, .slice_ns = allot_slice_ns(handle, gpu)};
  const allot_gpu_description *own = &handle->machine->description.gpus[gpu];
  run.sm_count = own->sm_count > 0 ? own->sm_count : 1;
  run.most_kernels = own->engine_concurrent_kernels;
  if (run.most_kernels == 0) run.most_kernels = 1;
  if (run.most_kernels > ALLOT_TURN_KERNELS) run.most_kernels = ALLOT_TURN_KERNELS;
  simulate(&run, allot_now_ns());
  allot_engine_unlock(handle, gpu);
  return run.other_gpus;
}

void allot_engine_advance(allot_handle *handle, int gpu) {
  if (!allot_machine_attached(handle) && allot_machine_attach(handle, ALLOT_PROCESS_MONITOR) != 0) {
    return;
  }
  uint32_t others = advance_one(handle, gpu), seen = 1u << gpu;
  if (others == 0) return;
  // Works here wait for works of other GPUs, which may wait for others still.
  while ((others & ~seen) != 0) {
    int other = __builtin_ctz(others & ~seen);
    seen |= 1u << other;
    others |= advance_one(handle, other);
  }
  advance_one(handle, gpu);
}
