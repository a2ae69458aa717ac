// SPDX-License-Identifier: Apache-2.0
// The ring of works that a process has submitted to a GPU.
//
// The process adds at the head without any lock; whoever holds the GPU's lock moves works through
// their states and the tail along. A launch therefore costs a few stores, whatever the GPU does.
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simulated/engine/engine.h"

bool allot_ring_prepare(allot_handle *handle, int gpu) {
  uint32_t *has_ring = &handle->machine->processes[handle->slot].gpus[gpu].has_ring;
  if (allot_load(has_ring)) return true;
  int error = 0;
  int descriptor = open(handle->path, O_RDWR | O_CLOEXEC);
  if (descriptor >= 0) {
    size_t at = offsetof(allot_machine, rings) +
                sizeof(allot_ring) * ((size_t)handle->slot * ALLOT_MACHINE_GPUS + (size_t)gpu);
    do {
      error = posix_fallocate(descriptor, (off_t)at, (off_t)sizeof(allot_ring));
    } while (error == EINTR);
    close(descriptor);
  }
  // A sandbox that forbids asking is no full disk.
  if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == EIO) return false;
  allot_store(has_ring, 1u);
  return true;
}

allot_ring *allot_ring_of(const allot_handle *handle, int slot, int gpu) {
  return &handle->machine->rings[slot][gpu];
}

allot_work *allot_ring_work(allot_ring *ring, uint64_t number) {
  return &ring->works[number % ALLOT_RING_WORKS];
}

uint64_t allot_whole_number(uint32_t low, uint64_t near) {
  return near - (uint32_t)((uint32_t)near - low);
}

bool allot_work_done(const allot_handle *handle, allot_point point) {
  if (point == 0) return true;
  allot_ring *ring = allot_ring_of(handle, ALLOT_POINT_SLOT(point), ALLOT_POINT_GPU(point));
  uint64_t number = ALLOT_POINT_NUMBER(point);
  if (allot_load(&ring->tail) >= number) return true;
  uint64_t progress = allot_load(&allot_ring_work(ring, number)->progress);
  // If the work was overwritten meanwhile, the tail has passed it.
  return allot_load(&ring->tail) >= number || ALLOT_PROGRESS_STATE(progress) == ALLOT_DONE;
}

uint64_t allot_work_ended(const allot_handle *handle, allot_point point) {
  allot_ring *ring = allot_ring_of(handle, ALLOT_POINT_SLOT(point), ALLOT_POINT_GPU(point));
  uint64_t number = ALLOT_POINT_NUMBER(point);
  if (allot_load(&ring->head) - number >= ALLOT_RING_WORKS) return 0;
  uint64_t progress = allot_load(&allot_ring_work(ring, number)->progress);
  return ALLOT_PROGRESS_STATE(progress) == ALLOT_DONE ? ALLOT_PROGRESS_TIME(progress) : 0;
}

uint64_t allot_work_oldest(const allot_handle *handle, int gpu) {
  uint64_t head = allot_load(&allot_ring_of(handle, handle->slot, gpu)->head);
  return head + 1 > ALLOT_RING_WORKS ? head + 1 - ALLOT_RING_WORKS : 0;
}

allot_work *allot_work_new(allot_handle *handle, int gpu) {
  allot_ring *ring = allot_ring_of(handle, handle->slot, gpu);
  uint64_t head = allot_load(&ring->head);
  if (head - allot_load(&ring->tail) >= ALLOT_RING_WORKS) return NULL;
  return allot_ring_work(ring, head + 1);
}

allot_point allot_work_submit(allot_handle *handle, int gpu) {
  allot_ring *ring = allot_ring_of(handle, handle->slot, gpu);
  uint64_t number = allot_load(&ring->head) + 1;
  const allot_work *work = allot_ring_work(ring, number);
  if (work->previous != (uint32_t)(number - 1)) allot_store(&ring->last_break, number);
  // Those who bring the GPU to the present go from work to work along the stream.
  uint64_t previous = allot_whole_number(work->previous, number);
  if (previous != number && previous != 0 && number - previous < ALLOT_RING_WORKS) {
    allot_store(&allot_ring_work(ring, previous)->next, (uint32_t)number);
  }
  allot_store(&ring->head, number);
  // The engine clears the bit before it looks at the head for the last time.
  int place = allot_compute_place(handle, handle->slot, gpu);
  uint64_t *active = &handle->machine->engines[place].active[handle->slot / 64];
  uint64_t bit = 1ull << (handle->slot % 64);
  if (!(allot_load(active) & bit)) __atomic_fetch_or(active, bit, __ATOMIC_SEQ_CST);
  return ALLOT_POINT(handle->slot, gpu, number);
}

void allot_work_finish_host(allot_handle *handle, allot_point point) {
  allot_ring *ring = allot_ring_of(handle, ALLOT_POINT_SLOT(point), ALLOT_POINT_GPU(point));
  allot_work *work = allot_ring_work(ring, ALLOT_POINT_NUMBER(point));
  allot_store(&work->progress, ALLOT_PROGRESS(ALLOT_DONE, allot_now_ns()));
  syscall(SYS_futex, &work->progress, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

void allot_work_cancel(allot_handle *handle, int slot, int gpu) {
  if (!allot_load(&handle->machine->processes[slot].gpus[gpu].has_ring)) return;
  allot_ring *ring = allot_ring_of(handle, slot, gpu);
  if (allot_load(&ring->head) == allot_load(&ring->tail)) return;
  // Without a slot of its own (and none left) there is no way to lock; the next reaper has one.
  if (!allot_machine_attached(handle) && allot_machine_attach(handle, ALLOT_PROCESS_MONITOR) != 0) {
    return;
  }
  int place = allot_compute_place(handle, slot, gpu);
  allot_engine_lock(handle, place);
  allot_gpu_engine *engine = &handle->machine->engines[place];
  uint64_t head = allot_load(&ring->head), now = allot_now_ns();
  if (allot_load(&engine->holder) == (uint32_t)slot + 1) {
    // Its turn, which may have been long while memory came in, ends.
    allot_store(&engine->stalled_until_ns, (uint64_t)0);
    allot_store(&engine->slice_end_ns, now);
  }
  for (uint64_t number = allot_load(&ring->tail) + 1; number <= head; number++) {
    allot_work *work = allot_ring_work(ring, number);
    uint64_t progress = allot_load(&work->progress);
    if (ALLOT_PROGRESS_STATE(progress) == ALLOT_DONE) continue;
    if (ALLOT_PROGRESS_STATE(progress) == ALLOT_RUNNING && work->kind == ALLOT_WORK_KERNEL) {
      allot_store(&engine->room_since_ns, now);
    }
    allot_store(&work->progress, ALLOT_PROGRESS(ALLOT_DONE, now));
  }
  allot_store(&ring->tail, head);
  allot_engine_unlock(handle, place);
}

static bool ended(allot_ring *ring, uint32_t low, uint64_t near, uint64_t *ready_ns) {
  uint64_t number = allot_whole_number(low, near);
  if (number == 0 || number == near) return true;
  uint64_t head = allot_load(&ring->head);
  if (head - number + 1 >= ALLOT_RING_WORKS) return true;
  uint64_t progress = allot_load(&allot_ring_work(ring, number)->progress);
  // Only what is under the tail can be overwritten while we look, and is then not yet done.
  if (ALLOT_PROGRESS_STATE(progress) != ALLOT_DONE) return allot_load(&ring->tail) >= number;
  uint64_t time = ALLOT_PROGRESS_TIME(progress);
  if (time > *ready_ns) *ready_ns = time;
  return true;
}

bool allot_work_ready(const allot_handle *handle, allot_point point, uint64_t *ready_ns) {
  allot_ring *ring = allot_ring_of(handle, ALLOT_POINT_SLOT(point), ALLOT_POINT_GPU(point));
  uint64_t number = ALLOT_POINT_NUMBER(point);
  const allot_work *work = allot_ring_work(ring, number);
  *ready_ns = work->submitted_ns;
  if (!ended(ring, work->previous, number, ready_ns)) return false;
  if (!ended(ring, work->after, number, ready_ns)) return false;
  if (!(work->flags & ALLOT_WORK_BARRIER)) return true;
  // What came before the stream's last work was waited for by that one: it was a barrier too.
  uint64_t previous = allot_whole_number(work->previous, number);
  uint64_t first = number >= ALLOT_RING_WORKS ? number - ALLOT_RING_WORKS + 1 : 1;
  if (previous < number && previous >= first) first = previous + 1;
  for (uint64_t other = first; other < number; other++) {
    // Of works under the tail the owner may be writing a successor: hence loads of their own.
    const allot_work *earlier = allot_ring_work(ring, other);
    unsigned flags = __atomic_load_n(&earlier->flags, __ATOMIC_RELAXED);
    if (!(flags & ALLOT_WORK_BLOCKING)) continue;
    if (__atomic_load_n(&earlier->context, __ATOMIC_RELAXED) != work->context) continue;
    if (!ended(ring, (uint32_t)other, number, ready_ns)) return false;
  }
  return true;
}
