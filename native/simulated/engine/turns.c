// SPDX-License-Identifier: Apache-2.0
// Which kernels compute.
//
// Processes take turns. Within a turn a process's kernels run together while their demand of
// multiprocessors fits; one that does not fit waits, and so do those behind it: as on the hardware,
// where blocks are handed out kernel by kernel. No kernel slows another one down.
#include "simulated/engine/simulation.h"

static uint32_t demand(const simulation *run, const allot_work *kernel) {
  if (kernel->sms == 0) return 1;
  return kernel->sms < run->sm_count ? kernel->sms : run->sm_count;
}

void turn_begin(turn *begun) {
  begun->running = begun->running_sms = begun->waiting = begun->waiting_sms = 0;
  begun->first_end_ns = UINT64_MAX;
}

void turn_add_running(const simulation *run, turn *of, const allot_work *kernel, uint64_t end_ns) {
  of->running++;
  of->running_sms += demand(run, kernel);
  if (end_ns < of->first_end_ns) of->first_end_ns = end_ns;
}

// Those that were put aside were running together and go on together; then by priority, then in
// the order of submission.
static bool goes_before(const candidate *one, const candidate *other) {
  if (one->begun != other->begun) return one->begun;
  if (one->kernel->priority != other->kernel->priority) {
    return one->kernel->priority < other->kernel->priority;
  }
  return one->number < other->number;
}

void turn_add_ready(simulation *run, turn *of, allot_work *kernel, uint64_t number,
                    uint64_t ready_ns) {
  uint64_t left = ALLOT_PROGRESS_TIME(allot_load(&kernel->progress));
  candidate added = {kernel, number, ready_ns, left < kernel->duration_ns};
  uint32_t at = of->waiting;
  while (at > 0 && goes_before(&added, &of->candidates[at - 1])) at--;
  if (at == ALLOT_TURN_KERNELS) return;  // as many as can run at all go first
  if (of->waiting < ALLOT_TURN_KERNELS) of->waiting++;
  for (uint32_t i = of->waiting - 1; i > at; i--) of->candidates[i] = of->candidates[i - 1];
  of->candidates[at] = added;
  of->waiting_sms += demand(run, kernel);
}

static void put_aside(simulation *run, int slot) {
  allot_ring *ring = allot_ring_of(run->handle, slot, run->gpu);
  // Without works it has no front.
  if (!(run->begun[slot / 64] >> (slot % 64) & 1)) return;
  uint64_t now = run->engine->now_ns;
  for (uint32_t at = 0; at < ring->front_count; at++) {
    allot_work *work = allot_ring_work(ring, front_number(ring, at));
    uint64_t progress = allot_load(&work->progress);
    if (work->kind != ALLOT_WORK_KERNEL || ALLOT_PROGRESS_STATE(progress) != ALLOT_RUNNING) {
      continue;
    }
    uint64_t end = ALLOT_PROGRESS_TIME(progress);
    allot_store(&run->engine->room_since_ns, now);
    allot_store(&work->progress, ALLOT_PROGRESS(ALLOT_WAITING, end > now ? end - now : 0));
  }
}

void turn_give(simulation *run, int slot) {
  allot_gpu_engine *engine = run->engine;
  uint64_t now = engine->now_ns;
  int holder = (int)engine->holder - 1;
  if (holder == slot && now < engine->slice_end_ns) return;
  if (holder != slot) {
    if (holder >= 0) put_aside(run, holder);
    allot_store(&engine->stalled_until_ns, (uint64_t)0);
  }
  allot_store(&engine->slice_end_ns, now + run->slice_ns);
  allot_store(&engine->holder, (uint32_t)slot + 1);
}

void turn_account(simulation *run, int slot, uint64_t from_ns, uint64_t to_ns) {
  if (from_ns >= to_ns) return;
  allot_process_gpu *process = &run->handle->machine->processes[slot].gpus[run->gpu];
  run->engine->busy_ns += to_ns - from_ns;
  process->busy_ns += to_ns - from_ns;
  allot_history_add(&run->engine->compute, from_ns, to_ns);
  allot_history_add(&process->compute, from_ns, to_ns);
}

// Starts one kernel. Busy time is that in which any kernel runs: what is before the present and was
// not yet counted is counted here, all else as it passes.
static uint64_t start(simulation *run, int slot, const candidate *next) {
  allot_gpu_engine *engine = run->engine;
  uint64_t now = engine->now_ns;
  managed_bring(run, slot);
  // A kernel submitted while nobody looked began as soon as it was ready and had room.
  uint64_t from = engine->room_since_ns;
  if (from < next->ready_ns) from = next->ready_ns;
  if (from > now) from = now;
  uint64_t begin = from < engine->stalled_until_ns ? engine->stalled_until_ns : from;
  uint64_t end = begin + ALLOT_PROGRESS_TIME(allot_load(&next->kernel->progress));
  allot_store(&next->kernel->progress, ALLOT_PROGRESS(ALLOT_RUNNING, end));
  uint64_t counted = run->turn.running > 0 ? engine->busy_since_ns : now;
  if (from < counted) turn_account(run, slot, from, end < counted ? end : counted);
  if (run->turn.running == 0 || (from < counted && end >= counted)) engine->busy_since_ns = from;
  turn_add_running(run, &run->turn, next->kernel, end);
  return end;
}

uint64_t turn_run(simulation *run, int slot) {
  turn *own = &run->turn;
  for (uint32_t i = 0; i < own->waiting && own->running < run->most_kernels; i++) {
    const candidate *next = &own->candidates[i];
    if (demand(run, next->kernel) + own->running_sms > run->sm_count) break;
    if (start(run, slot, next) <= run->engine->now_ns) break;
  }
  return own->first_end_ns;
}
