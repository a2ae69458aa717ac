// SPDX-License-Identifier: Apache-2.0
// How busy a GPU or a process was lately.
#include "simulated/engine/engine.h"

#define CELL_NS (1ull << ALLOT_HISTORY_CELL_BITS)
#define BUSY_BITS (ALLOT_HISTORY_CELL_BITS + 1)
#define SECOND_NS 1000000000ull

static uint64_t *cell_of(allot_history *history, uint64_t number) {
  return &history->cells[number % ALLOT_HISTORY_CELLS];
}

static void add_to_cell(allot_history *history, uint64_t number, uint64_t busy_ns) {
  uint64_t *cell = cell_of(history, number);
  uint64_t seen = allot_load(cell);
  uint64_t before = seen >> BUSY_BITS == number ? seen & ((1ull << BUSY_BITS) - 1) : 0;
  uint64_t busy = before + busy_ns < CELL_NS ? before + busy_ns : CELL_NS;
  allot_store(cell, number << BUSY_BITS | busy);
}

void allot_history_add(allot_history *history, uint64_t from_ns, uint64_t to_ns) {
  uint64_t oldest =
      to_ns > ALLOT_HISTORY_CELLS * CELL_NS ? to_ns - ALLOT_HISTORY_CELLS * CELL_NS : 0;
  if (from_ns < oldest) from_ns = oldest;
  while (from_ns < to_ns) {
    uint64_t number = from_ns / CELL_NS;
    uint64_t end = (number + 1) * CELL_NS;
    if (end > to_ns) end = to_ns;
    add_to_cell(history, number, end - from_ns);
    from_ns = end;
  }
}

uint64_t allot_history_busy(const allot_history *history, uint64_t now_ns, uint64_t window_ns) {
  if (window_ns > SECOND_NS) window_ns = SECOND_NS;
  uint64_t from = now_ns > window_ns ? now_ns - window_ns : 0;
  uint64_t busy = 0;
  for (uint64_t number = from / CELL_NS; number <= now_ns / CELL_NS; number++) {
    uint64_t cell = allot_load(&history->cells[number % ALLOT_HISTORY_CELLS]);
    if (cell >> BUSY_BITS != number) continue;
    uint64_t had = cell & ((1ull << BUSY_BITS) - 1);
    // Of the oldest cell only the part inside the window, as if it had been busy evenly.
    if (number == from / CELL_NS) had = had * ((number + 1) * CELL_NS - from) / CELL_NS;
    busy += had;
  }
  return busy < window_ns ? busy : window_ns;
}

static unsigned percent(const allot_history *history) {
  uint64_t busy = allot_history_busy(history, allot_now_ns(), SECOND_NS);
  return (unsigned)((busy * 100 + SECOND_NS / 2) / SECOND_NS);
}

unsigned allot_gpu_utilization(allot_handle *handle, int gpu) {
  allot_engine_advance(handle, gpu);
  return percent(&handle->machine->engines[gpu].compute);
}

unsigned allot_gpu_copy_utilization(allot_handle *handle, int gpu) {
  allot_engine_advance(handle, gpu);
  return percent(&handle->machine->engines[gpu].copies);
}

unsigned allot_process_utilization(allot_handle *handle, int slot, int gpu) {
  allot_engine_advance(handle, allot_compute_place(handle, slot, gpu));
  return percent(&handle->machine->processes[slot].gpus[gpu].compute);
}
