// SPDX-License-Identifier: Apache-2.0
// The event simulation of one GPU.
//
// Whoever wants to know something brings the GPU from the time it was last looked at to the
// present, event by event: works become ready, copies end, kernels end, turns end. Processes with a
// kernel ready take turns of one time slice; within a process kernels run one after another.
//
// Every change is one store of one word (`now_ns` first, then what follows from it), so a process
// that is killed in here leaves a state from which the next goes on with the same outcome.
#include "simulated/engine/engine.h"

#define FOREVER UINT64_MAX
// How long the owners of queued work are believed to live without a look.
#define BELIEF_NS 5000000ull

typedef struct simulation {
  allot_handle *handle;
  allot_gpu_engine *engine;
  int gpu;
  uint64_t slice_ns;
  uint64_t next_ns;     // the first moment after now at which a work changes by itself
  uint32_t other_gpus;  // a bit for each GPU that a WAIT here depends on
} simulation;

typedef struct candidate {
  int slot;
  allot_work *kernel;
  uint64_t ready_ns;
} candidate;

static void note(simulation *run, uint64_t time_ns) {
  if (time_ns < run->next_ns) run->next_ns = time_ns;
}

static void finish(allot_work *work, uint64_t time_ns) {
  allot_store(&work->progress, ALLOT_PROGRESS(ALLOT_DONE, time_ns));
}

// A ready copy is given its place on its copy engine at once: those are first come, first served.
static void start_copy(simulation *run, int slot, allot_work *work, uint64_t ready_ns) {
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
    if (ended < ready_ns || ended > run->engine->now_ns) ended = ready_ns;
    finish(work, ended);
  } else if (ALLOT_POINT_GPU(work->target) != run->gpu) {
    run->other_gpus |= 1u << ALLOT_POINT_GPU(work->target);
  }
}

static void consider(candidate *best, allot_work *kernel, uint64_t ready_ns) {
  if (best->kernel != NULL) {
    bool runs = ALLOT_PROGRESS_STATE(allot_load(&best->kernel->progress)) == ALLOT_RUNNING;
    // Priorities decide who is next, never whether a running kernel is put aside.
    if (runs || kernel->priority >= best->kernel->priority) return;
  }
  best->kernel = kernel;
  best->ready_ns = ready_ns;
}

// One work at the present moment. False: it is submitted later than now, as are all after it.
static bool settle_work(simulation *run, int slot, uint64_t number, candidate *best) {
  allot_work *work = allot_ring_work(allot_ring_of(run->handle, slot, run->gpu), number);
  uint64_t progress = allot_load(&work->progress);
  uint64_t now = run->engine->now_ns;
  if (ALLOT_PROGRESS_STATE(progress) == ALLOT_RUNNING) {
    uint64_t end = ALLOT_PROGRESS_TIME(progress);
    if (work->kind == ALLOT_WORK_KERNEL && end > now) {
      best->kernel = work;
    } else if (end > now) {
      note(run, end);
    } else {
      finish(work, end);
      if (work->kind == ALLOT_WORK_KERNEL) run->engine->idle_since_ns = end;
    }
    return true;
  }
  if (work->submitted_ns > now) {
    note(run, work->submitted_ns);
    return false;
  }
  uint64_t ready_ns;
  if (!allot_work_ready(run->handle, ALLOT_POINT(slot, run->gpu, number), &ready_ns)) return true;
  switch (work->kind) {
    case ALLOT_WORK_MARK:
      finish(work, ready_ns);
      break;
    case ALLOT_WORK_KERNEL:
      consider(best, work, ready_ns);
      break;
    case ALLOT_WORK_COPY:
      start_copy(run, slot, work, ready_ns);
      return settle_work(run, slot, number, best);
    case ALLOT_WORK_WAIT:
      settle_wait(run, work, ready_ns);
      break;
    default:  // HOST: its process says when it is done
      break;
  }
  return true;
}

// Brings the works of one process to the present moment; its next kernel, if it has one ready.
static candidate settle_process(simulation *run, int slot) {
  allot_ring *ring = allot_ring_of(run->handle, slot, run->gpu);
  candidate best = {.slot = slot};
  uint64_t head = allot_load(&ring->head);
  uint64_t last_break = allot_load(&ring->last_break);
  uint64_t last_other = allot_load(&ring->last_other);
  bool by_number = allot_load(&ring->has_priorities) == 0;
  bool contiguous = true;
  for (uint64_t number = allot_load(&ring->tail) + 1; number <= head; number++) {
    allot_work *work = allot_ring_work(ring, number);
    if (ALLOT_PROGRESS_STATE(allot_load(&work->progress)) != ALLOT_DONE &&
        !settle_work(run, slot, number, &best)) {
      break;
    }
    bool done = ALLOT_PROGRESS_STATE(allot_load(&work->progress)) == ALLOT_DONE;
    contiguous = contiguous && done;
    if (contiguous) allot_store(&ring->tail, number);
    // From here on each work follows the one before it.
    if (!done && number >= last_break) break;
    // Only kernels are left, and one with a lower number is ready.
    if (best.kernel != NULL && by_number && number >= last_other) break;
  }
  return best;
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

// Settles every process. Returns how many have a kernel ready; *chosen is the one whose turn it is.
static int settle(simulation *run, candidate *chosen) {
  allot_gpu_engine *engine = run->engine;
  int holder = (int)engine->holder - 1, ready = 0;
  candidate first = {0}, following = {0}, holding = {0};
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = allot_load(&engine->active[word]); bits != 0; bits &= bits - 1) {
      int slot = word * 64 + __builtin_ctzll(bits);
      candidate next = settle_process(run, slot);
      if (next.kernel == NULL) {
        forget_if_idle(run, slot);
        continue;
      }
      ready++;
      if (slot == holder) holding = next;
      if (first.kernel == NULL) first = next;
      if (following.kernel == NULL && slot > holder) following = next;
    }
  }
  bool turn_over = ready > 1 && engine->now_ns >= engine->slice_end_ns;
  if (holding.kernel != NULL && !turn_over) {
    *chosen = holding;
  } else {
    *chosen = following.kernel != NULL ? following : first;
  }
  return ready;
}

static void put_aside(simulation *run, int slot) {
  allot_ring *ring = allot_ring_of(run->handle, slot, run->gpu);
  uint64_t head = allot_load(&ring->head), now = run->engine->now_ns;
  for (uint64_t number = allot_load(&ring->tail) + 1; number <= head; number++) {
    allot_work *work = allot_ring_work(ring, number);
    uint64_t progress = allot_load(&work->progress);
    if (work->kind != ALLOT_WORK_KERNEL || ALLOT_PROGRESS_STATE(progress) != ALLOT_RUNNING) {
      continue;
    }
    uint64_t end = ALLOT_PROGRESS_TIME(progress);
    run->engine->idle_since_ns = now;
    allot_store(&work->progress, ALLOT_PROGRESS(ALLOT_WAITING, end > now ? end - now : 0));
    return;
  }
}

static void account(simulation *run, int slot, uint64_t from_ns, uint64_t to_ns) {
  if (from_ns >= to_ns) return;
  allot_process_gpu *process = &run->handle->machine->processes[slot].gpus[run->gpu];
  run->engine->busy_ns += to_ns - from_ns;
  process->busy_ns += to_ns - from_ns;
  allot_history_add(&run->engine->compute, from_ns, to_ns);
  allot_history_add(&process->compute, from_ns, to_ns);
}

// Gives the GPU to the chosen process. Returns when its kernel ends if nothing intervenes.
static uint64_t run_kernel(simulation *run, const candidate *chosen) {
  allot_gpu_engine *engine = run->engine;
  uint64_t now = engine->now_ns;
  int holder = (int)engine->holder - 1;
  if (holder != chosen->slot && holder >= 0) put_aside(run, holder);
  if (holder != chosen->slot || now >= engine->slice_end_ns) {
    engine->slice_end_ns = now + run->slice_ns;
    engine->holder = (uint32_t)chosen->slot + 1;
  }
  uint64_t progress = allot_load(&chosen->kernel->progress);
  if (ALLOT_PROGRESS_STATE(progress) == ALLOT_RUNNING) return ALLOT_PROGRESS_TIME(progress);
  // A kernel submitted while nobody looked began as soon as it was ready and the GPU free.
  uint64_t start = engine->idle_since_ns;
  if (start < chosen->ready_ns) start = chosen->ready_ns;
  if (start > now) start = now;
  uint64_t end = start + ALLOT_PROGRESS_TIME(progress);
  allot_store(&chosen->kernel->progress, ALLOT_PROGRESS(ALLOT_RUNNING, end));
  account(run, chosen->slot, start, end < now ? end : now);
  return end;
}

static void simulate(simulation *run, uint64_t target_ns) {
  allot_gpu_engine *engine = run->engine;
  for (;;) {
    run->next_ns = target_ns;
    candidate chosen = {0};
    int ready = settle(run, &chosen);
    uint64_t now = engine->now_ns;
    if (ready > 0) {
      uint64_t end = run_kernel(run, &chosen);
      if (end <= now) continue;  // it began and ended while nobody looked
      if (end < run->next_ns) run->next_ns = end;
      if (ready > 1) note(run, engine->slice_end_ns);
    }
    if (now >= target_ns) return;
    if (ready > 0) account(run, chosen.slot, now, run->next_ns);
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

static uint32_t advance_one(allot_handle *handle, int gpu) {
  allot_gpu_engine *engine = &handle->machine->engines[gpu];
  bury_the_dead(handle, gpu, allot_now_ns());
  allot_engine_lock(handle, gpu);
  simulation run = {.handle = handle,
                    .engine = engine,
                    .gpu = gpu,
                    .slice_ns = handle->machine->description.timeslice_us * 1000ull};
  if (run.slice_ns == 0) run.slice_ns = 2000000;
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
