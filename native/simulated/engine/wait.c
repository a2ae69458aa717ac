// SPDX-License-Identifier: Apache-2.0
// Waiting for a work without polling: the earliest moment at which it can be done is computed,
// slept for, and looked at again, since other processes may have brought work meanwhile.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "simulated/engine/engine.h"

#define SPIN_NS 50000ull
// A dead process leaves the GPU to others earlier than computed, so sleep no longer in company.
#define COMPANY_NS 20000000ull
#define HOST_NS 10000000ull
// How soon a call that hangs sees that its GPU does so no more.
#define FAULT_NS 10000000ull
#define DEPTH 8

void allot_sleep_until(uint64_t time_ns) {
  uint64_t now = allot_now_ns();
  if (time_ns <= now) return;
  if (time_ns - now <= SPIN_NS) {
    while (allot_now_ns() < time_ns) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    return;
  }
  struct timespec until = {.tv_sec = (time_t)(time_ns / 1000000000u),
                           .tv_nsec = (long)(time_ns % 1000000000u)};
  // The bare system call: a thread must not be cancelled in here.
  syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

void allot_wait_out(const uint32_t *fault_us) {
  uint64_t all = allot_load(fault_us) * 1000ull;
  if (__builtin_expect(all == 0, 1)) return;
  uint64_t began = allot_now_ns();
  for (uint64_t now = began; all != 0 && now - began < all; now = allot_now_ns()) {
    uint64_t left = began + all - now;
    allot_sleep_until(now + (left < FAULT_NS ? left : FAULT_NS));
    all = allot_load(fault_us) * 1000ull;
  }
}

typedef struct need {
  uint64_t compute_ns;  // kernels that must run first, at least
  uint64_t copy_ns;
  allot_point host;  // a callback that must return first
} need;

static void add_need(need *sum, const allot_work *work, uint64_t progress, uint64_t now_ns) {
  uint64_t time = ALLOT_PROGRESS_TIME(progress);
  uint64_t left = time;
  if (ALLOT_PROGRESS_STATE(progress) == ALLOT_RUNNING) left = time > now_ns ? time - now_ns : 0;
  if (work->kind == ALLOT_WORK_KERNEL) sum->compute_ns += left;
  if (work->kind == ALLOT_WORK_COPY) sum->copy_ns += left;
}

// Follows the stream back from the work: each work needs the one before it.
static need needed(const allot_handle *handle, allot_point point, uint64_t now_ns, int depth) {
  allot_ring *ring = allot_ring_of(handle, ALLOT_POINT_SLOT(point), ALLOT_POINT_GPU(point));
  uint64_t number = ALLOT_POINT_NUMBER(point);
  need sum = {0};
  while (number > allot_load(&ring->tail)) {
    const allot_work *work = allot_ring_work(ring, number);
    uint64_t progress = allot_load(&work->progress);
    if (ALLOT_PROGRESS_STATE(progress) == ALLOT_DONE) break;
    add_need(&sum, work, progress, now_ns);
    if (work->kind == ALLOT_WORK_HOST) {
      sum.host = ALLOT_POINT(ALLOT_POINT_SLOT(point), ALLOT_POINT_GPU(point), number);
    }
    if (work->kind == ALLOT_WORK_WAIT && depth < DEPTH && !allot_work_done(handle, work->target)) {
      need other = needed(handle, work->target, now_ns, depth + 1);
      if (other.compute_ns > sum.compute_ns) sum.compute_ns = other.compute_ns;
      if (other.copy_ns > sum.copy_ns) sum.copy_ns = other.copy_ns;
      if (other.host != 0) sum.host = other.host;
    }
    uint64_t previous = allot_whole_number(work->previous, number);
    uint64_t after = allot_whole_number(work->after, number);
    uint64_t next = previous;
    if (work->flags & ALLOT_WORK_BARRIER) {
      next = number - 1;
    } else if (previous == 0 || previous == number || previous <= allot_load(&ring->tail)) {
      next = after;
    }
    if (next >= number) break;
    number = next;
  }
  return sum;
}

// How long a process's kernels that are queued without a gap keep the GPU, at least. In one stream
// that is their sum; of several streams it is the longest, or what fills all multiprocessors.
static uint64_t queued(const allot_handle *handle, int slot, int gpu, uint64_t now_ns) {
  allot_ring *ring = allot_ring_of(handle, slot, gpu);
  uint64_t head = allot_load(&ring->head), first = allot_load(&ring->tail) + 1;
  uint64_t sum = 0, longest = 0, area = 0;
  uint32_t sms = allot_place_multiprocessors(handle, allot_compute_place(handle, slot, gpu));
  for (uint64_t number = first; number <= head; number++) {
    const allot_work *work = allot_ring_work(ring, number);
    uint64_t progress = allot_load(&work->progress);
    if (ALLOT_PROGRESS_STATE(progress) == ALLOT_DONE || work->kind == ALLOT_WORK_MARK) continue;
    if (work->kind != ALLOT_WORK_KERNEL) break;
    need one = {0};
    add_need(&one, work, progress, now_ns);
    sum += one.compute_ns;
    area += sms > 0 ? one.compute_ns / sms * work->sms : 0;
    if (one.compute_ns > longest) longest = one.compute_ns;
  }
  if (allot_load(&ring->last_break) <= first) return sum;
  return longest > area ? longest : area;
}

// How long at least others keep the GPU while this process computes for `own_ns`: as many slices
// each as this process ends before its last one.
static uint64_t others_have(const allot_handle *handle, int own_slot, int gpu, uint64_t own_ns,
                            uint64_t now_ns, bool *company) {
  const allot_gpu_engine *engine =
      &handle->machine->engines[allot_compute_place(handle, own_slot, gpu)];
  uint64_t slice_ns = allot_slice_ns(handle, gpu);
  uint64_t turns = own_ns / slice_ns;
  uint64_t most = turns > 1 ? (turns - 1) * slice_ns : 0, sum = 0;
  for (int word = 0; word < ALLOT_MACHINE_PROCESSES / 64; word++) {
    for (uint64_t bits = allot_load(&engine->active[word]); bits != 0; bits &= bits - 1) {
      int slot = word * 64 + __builtin_ctzll(bits);
      if (allot_mps_leader(handle, slot) == allot_mps_leader(handle, own_slot)) continue;
      uint64_t theirs = queued(handle, slot, gpu, now_ns);
      if (theirs > 0) *company = true;
      sum += theirs < most ? theirs : most;
    }
  }
  return sum;
}

static void wait_for_host(allot_handle *handle, allot_point point) {
  allot_ring *ring = allot_ring_of(handle, ALLOT_POINT_SLOT(point), ALLOT_POINT_GPU(point));
  uint64_t *progress = &allot_ring_work(ring, ALLOT_POINT_NUMBER(point))->progress;
  uint64_t seen = allot_load(progress);
  if (allot_work_done(handle, point)) return;
  // The low half of a time is a good enough witness: a wake-up that is missed costs HOST_NS.
  struct timespec patience = {.tv_nsec = (long)HOST_NS};
  syscall(SYS_futex, progress, FUTEX_WAIT, (uint32_t)seen, &patience, NULL, 0);
}

// The earliest moment at which all that `own` names can be over.
static uint64_t earliest(const allot_handle *handle, allot_point point, const need *own,
                         uint64_t now_ns) {
  bool company = false;
  uint64_t most = own->compute_ns > own->copy_ns ? own->compute_ns : own->copy_ns;
  int gpu = ALLOT_POINT_GPU(point);
  most += others_have(handle, ALLOT_POINT_SLOT(point), gpu, own->compute_ns, now_ns, &company);
  if (company && most > COMPANY_NS) most = COMPANY_NS;
  // Of something in another stream or process the end is not computed: look again soon.
  return now_ns + (most > 0 ? most : SPIN_NS + 1);
}

void allot_engine_wait(allot_handle *handle, allot_point point) {
  if (point == 0) return;
  int place = allot_point_place(handle, point);
  for (;;) {
    if (allot_work_done(handle, point)) return;
    allot_engine_advance(handle, place);
    if (allot_work_done(handle, point)) return;
    uint64_t now = allot_now_ns();
    need own = needed(handle, point, now, 0);
    if (own.compute_ns == 0 && own.copy_ns == 0 && own.host != 0) {
      wait_for_host(handle, own.host);
    } else {
      allot_sleep_until(earliest(handle, point, &own, now));
    }
  }
}

uint64_t allot_engine_ready_at(const allot_handle *handle, allot_point point) {
  uint64_t now = allot_now_ns();
  need own = needed(handle, point, now, 0);
  return earliest(handle, point, &own, now);
}
