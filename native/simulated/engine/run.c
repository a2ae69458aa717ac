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
  } else {
    int place = allot_point_place(run->handle, work->target);
    if (place != run->place) run->others[place / 64] |= 1ull << (place % 64);
  }
}

static void settle_running(simulation *run, int slot, allot_work *work, uint64_t end_ns,
                           turn *turn) {
  bool computes = work->kind == ALLOT_WORK_KERNEL;
  if (end_ns > run->engine->now_ns) {
    if (computes && turn != NULL) turn_add_running(run, turn, slot, work, end_ns);
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
    settle_running(run, slot, work, ALLOT_PROGRESS_TIME(progress), turn);
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
      if (turn != NULL) {
        uint64_t left = ALLOT_PROGRESS_TIME(progress);
        turn_add_ready(run, turn,
                       &(candidate){work, slot, number, ready_ns, left < work->duration_ns});
      }
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

// The first that is named in the bits, at or above a slot; -1: none.
static int first_of(const uint64_t bits[], int from) {
  for (int slot = from; slot < ALLOT_MACHINE_PROCESSES; slot++) {
    if (bits[slot / 64] >> (slot % 64) & 1) return slot;
  }
  return -1;
}

// Settles every process. Returns how many turns are wanted; *chosen is the leader whose it is.
static int settle(simulation *run, int *chosen) {
  allot_gpu_engine *engine = run->engine;
  int holder = (int)engine->holder - 1, ready = 0;
  uint64_t leaders[ALLOT_MACHINE_PROCESSES / 64] = {0};
  turn_begin(&run->turn);
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = allot_load(&engine->active[word]); bits != 0; bits &= bits - 1) {
      int slot = word * 64 + __builtin_ctzll(bits);
      int leader = allot_mps_leader(run->handle, slot);
      if (!settle_process(run, slot, leader == holder ? &run->turn : NULL)) {
        forget_if_idle(run, slot);
        continue;
      }
      leaders[leader / 64] |= 1ull << (leader % 64);
    }
  }
  for (size_t word = 0; word < sizeof leaders / sizeof *leaders; word++) {
    ready += __builtin_popcountll(leaders[word]);
  }
  bool holding = holder >= 0 && leaders[holder / 64] >> (holder % 64) & 1;
  bool turn_over = ready > 1 && engine->now_ns >= engine->slice_end_ns;
  *chosen = holder;
  if (!holding || turn_over) {
    *chosen = first_of(leaders, holder + 1);
    if (*chosen < 0) *chosen = first_of(leaders, 0);
  }
  return ready;
}

// Settles the processes of one turn, to know what they have.
static void settle_turn(simulation *run, int leader) {
  turn_begin(&run->turn);
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = allot_load(&run->engine->active[word]); bits != 0; bits &= bits - 1) {
      int slot = word * 64 + __builtin_ctzll(bits);
      if (allot_mps_leader(run->handle, slot) == leader) settle_process(run, slot, &run->turn);
    }
  }
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
      if (changes) settle_turn(run, chosen);
      uint64_t end = turn_run(run);
      if (end <= now) continue;  // it began and ended while nobody looked
      note(run, end);
      if (ready > 1) note(run, engine->slice_end_ns);
    }
    if (now >= target_ns) return;
    if (ready > 0) turn_account(run, now, run->next_ns);
    allot_store(&engine->now_ns, run->next_ns);
  }
}

// Looks now and then whether the owners of queued work still live: a dead process's kernels would
// otherwise run on.
static void bury_the_dead(allot_handle *handle, int place, uint64_t now_ns) {
  allot_gpu_engine *engine = &handle->machine->engines[place];
  uint64_t checked = allot_load(&engine->checked_ns);
  if (now_ns < checked + BELIEF_NS) return;
  allot_store(&engine->checked_ns, now_ns);
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = allot_load(&engine->active[word]); bits != 0; bits &= bits - 1) {
      int slot = word * 64 + __builtin_ctzll(bits);
      int server = allot_mps_leader(handle, slot);
      if (server != slot && server != handle->slot) allot_machine_reap_slot(handle, server);
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

static void advance_one(allot_handle *handle, int place, places others) {
  int gpu = allot_place_gpu(place);
  allot_gpu_engine *engine = &handle->machine->engines[place];
  bury_the_dead(handle, place, allot_now_ns());
  allot_engine_lock(handle, place);
  simulation run = {.handle = handle,
                    .engine = engine,
                    .place = place,
                    .gpu = gpu,
                    .slice_ns = allot_slice_ns(handle, gpu)};
  run.sm_count = allot_place_multiprocessors(handle, place);
  run.most_kernels = handle->machine->description.gpus[gpu].engine_concurrent_kernels;
  if (run.most_kernels == 0) run.most_kernels = 1;
  if (run.most_kernels > ALLOT_TURN_KERNELS) run.most_kernels = ALLOT_TURN_KERNELS;
  simulate(&run, allot_now_ns());
  allot_engine_unlock(handle, place);
  for (size_t word = 0; word < sizeof run.others / sizeof *run.others; word++) {
    others[word] |= run.others[word];
  }
}

void allot_engine_advance(allot_handle *handle, int place) {
  if (!allot_machine_attached(handle) && allot_machine_attach(handle, ALLOT_PROCESS_MONITOR) != 0) {
    return;
  }
  places others = {0};
  advance_one(handle, place, others);
  // Works here wait for works of other places, which may wait for others still.
  bool waited = false;
  others[place / 64] |= 1ull << (place % 64);
  places seen = {0};
  seen[place / 64] = others[place / 64] & 1ull << (place % 64);
  for (int other = 0; other < ALLOT_MACHINE_PLACES; other++) {
    uint64_t bit = 1ull << (other % 64);
    if (!(others[other / 64] & bit) || (seen[other / 64] & bit)) continue;
    seen[other / 64] |= bit;
    waited = true;
    advance_one(handle, other, others);
    other = -1;  // it may wait for one before it
  }
  if (waited) advance_one(handle, place, others);
}

void allot_gpu_advance(allot_handle *handle, int gpu) {
  allot_engine_advance(handle, gpu);
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    int place = ALLOT_CUT(gpu, slot);
    if (allot_mig_compute(handle, place) != NULL) allot_engine_advance(handle, place);
  }
}
