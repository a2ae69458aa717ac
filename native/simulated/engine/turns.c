// SPDX-License-Identifier: Apache-2.0
// Which kernels compute.
//
// Processes take turns; the clients of an MPS server are one of them. Within a turn kernels run
// together while their demand of multiprocessors fits; one that does not fit waits, and so do those
// behind it: as on the hardware, where blocks are handed out kernel by kernel. No kernel slows
// another one down.
#include "simulated/engine/simulation.h"

static uint32_t demand(const simulation *run, const allot_work *kernel) {
  if (kernel->sms == 0) return 1;
  return kernel->sms < run->sm_count ? kernel->sms : run->sm_count;
}

void turn_begin(turn *begun) {
  begun->running = begun->running_sms = begun->waiting = 0;
  begun->first_end_ns = UINT64_MAX;
  for (size_t word = 0; word < sizeof begun->computing / sizeof *begun->computing; word++) {
    for (uint64_t bits = begun->computing[word]; bits != 0; bits &= bits - 1) {
      int slot = (int)word * 64 + __builtin_ctzll(bits);
      begun->own_running[slot] = begun->own_sms[slot] = 0;
    }
    begun->computing[word] = 0;
  }
}

void turn_add_running(const simulation *run, turn *of, int slot, const allot_work *kernel,
                      uint64_t end_ns) {
  of->running++;
  of->running_sms += demand(run, kernel);
  of->own_running[slot]++;
  of->own_sms[slot] += demand(run, kernel);
  of->computing[slot / 64] |= 1ull << (slot % 64);
  if (end_ns < of->first_end_ns) of->first_end_ns = end_ns;
}

static uint32_t client_priority(const simulation *run, int slot) {
  return allot_load(&run->handle->machine->processes[slot].mps.priority);
}

// Those that were put aside were running together and go on together; then by the process's and the
// stream's priority, then in the order of submission.
static bool goes_before(const simulation *run, const candidate *one, const candidate *other) {
  if (one->begun != other->begun) return one->begun;
  if (one->slot != other->slot) {
    uint32_t own = client_priority(run, one->slot), others = client_priority(run, other->slot);
    if (own != others) return own < others;
  }
  if (one->kernel->priority != other->kernel->priority) {
    return one->kernel->priority < other->kernel->priority;
  }
  if (one->slot == other->slot) return one->number < other->number;
  if (one->kernel->submitted_ns != other->kernel->submitted_ns) {
    return one->kernel->submitted_ns < other->kernel->submitted_ns;
  }
  return one->slot < other->slot;
}

void turn_add_ready(simulation *run, turn *of, const candidate *added) {
  uint32_t at = of->waiting;
  while (at > 0 && goes_before(run, added, &of->candidates[at - 1])) at--;
  if (at == ALLOT_TURN_KERNELS) return;  // as many as can run at all go first
  if (of->waiting < ALLOT_TURN_KERNELS) of->waiting++;
  for (uint32_t i = of->waiting - 1; i > at; i--) of->candidates[i] = of->candidates[i - 1];
  of->candidates[at] = *added;
}

static void put_aside(simulation *run, int slot) {
  allot_ring *ring = allot_ring_of(run->handle, slot, run->gpu);
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

static void put_turn_aside(simulation *run, int leader) {
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = run->begun[word]; bits != 0; bits &= bits - 1) {
      int slot = word * 64 + __builtin_ctzll(bits);
      if (allot_mps_leader(run->handle, slot) == leader) put_aside(run, slot);
    }
  }
}

void turn_give(simulation *run, int leader) {
  allot_gpu_engine *engine = run->engine;
  uint64_t now = engine->now_ns;
  int holder = (int)engine->holder - 1;
  if (holder == leader && now < engine->slice_end_ns) return;
  if (holder != leader) {
    if (holder >= 0) put_turn_aside(run, holder);
    allot_store(&engine->stalled_until_ns, (uint64_t)0);
  }
  allot_store(&engine->slice_end_ns, now + run->slice_ns);
  allot_store(&engine->holder, (uint32_t)leader + 1);
}

static void account_gpu(simulation *run, uint64_t from_ns, uint64_t to_ns) {
  if (from_ns >= to_ns) return;
  run->engine->busy_ns += to_ns - from_ns;
  allot_history_add(&run->engine->compute, from_ns, to_ns);
}

static void account_process(simulation *run, int slot, uint64_t from_ns, uint64_t to_ns) {
  if (from_ns >= to_ns) return;
  allot_process_gpu *process = &run->handle->machine->processes[slot].gpus[run->gpu];
  process->busy_ns += to_ns - from_ns;
  allot_history_add(&process->compute, from_ns, to_ns);
}

void turn_account(simulation *run, uint64_t from_ns, uint64_t to_ns) {
  if (run->turn.running > 0) account_gpu(run, from_ns, to_ns);
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = run->turn.computing[word]; bits != 0; bits &= bits - 1) {
      account_process(run, word * 64 + __builtin_ctzll(bits), from_ns, to_ns);
    }
  }
}

// Starts one kernel. Busy time is that in which any kernel runs: what is before the present and was
// not yet counted is counted here, all else as it passes.
static uint64_t start(simulation *run, const candidate *next) {
  allot_gpu_engine *engine = run->engine;
  int slot = next->slot;
  allot_process_gpu *process = &run->handle->machine->processes[slot].gpus[run->gpu];
  uint64_t now = engine->now_ns;
  managed_bring(run, slot);
  // A kernel submitted while nobody looked began as soon as it was ready and had room.
  uint64_t from = engine->room_since_ns;
  if (from < next->ready_ns) from = next->ready_ns;
  if (from > now) from = now;
  uint64_t begin = from < engine->stalled_until_ns ? engine->stalled_until_ns : from;
  uint64_t end = begin + ALLOT_PROGRESS_TIME(allot_load(&next->kernel->progress));
  allot_store(&next->kernel->progress, ALLOT_PROGRESS(ALLOT_RUNNING, end));
  bool first = run->turn.running == 0, first_own = run->turn.own_running[slot] == 0;
  uint64_t counted = first ? now : engine->busy_since_ns;
  uint64_t own_counted = first_own ? now : process->busy_since_ns;
  if (from < counted) account_gpu(run, from, end < counted ? end : counted);
  if (first || (from < counted && end >= counted)) engine->busy_since_ns = from;
  if (from < own_counted) account_process(run, slot, from, end < own_counted ? end : own_counted);
  if (first_own || (from < own_counted && end >= own_counted)) process->busy_since_ns = from;
  turn_add_running(run, &run->turn, slot, next->kernel, end);
  return end;
}

// A client's kernels have no more multiprocessors together than it may have: one that would wait
// for its process's own waits alone, and one that waits for room on the GPU holds those behind it
// up.
uint64_t turn_run(simulation *run) {
  turn *own = &run->turn;
  uint64_t full[ALLOT_MACHINE_PROCESSES / 64] = {0};
  for (uint32_t i = 0; i < own->waiting && own->running < run->most_kernels; i++) {
    const candidate *next = &own->candidates[i];
    int slot = next->slot;
    uint32_t wanted = demand(run, next->kernel);
    if (full[slot / 64] >> (slot % 64) & 1) continue;
    if (allot_mps_is_client(run->handle, slot) && own->own_sms[slot] > 0 &&
        own->own_sms[slot] + wanted > allot_mps_multiprocessors(run->handle, slot, run->gpu)) {
      full[slot / 64] |= 1ull << (slot % 64);
      continue;
    }
    if (wanted + own->running_sms > run->sm_count) break;
    if (start(run, next) <= run->engine->now_ns) break;
  }
  return own->first_end_ns;
}
