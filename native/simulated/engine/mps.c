// SPDX-License-Identifier: Apache-2.0
// MPS as far as the GPU is concerned: processes that share one server's place on it.
//
// A server has a slot like any process, and its clients name it in theirs. They come to it through
// the control daemon (simulated/mps), which writes what they may have. What is theirs goes with
// their server: whoever clears its slot fails them first, so that the slot's next owner has none.
#include "simulated/engine/engine.h"

#define RPC_FAILURE 806u /* CUDA_ERROR_MPS_RPC_FAILURE */

int allot_mps_leader(const allot_handle *handle, int slot) {
  uint32_t server = allot_load(&handle->machine->processes[slot].mps.server);
  return server != 0 ? (int)server - 1 : slot;
}

bool allot_mps_is_client(const allot_handle *handle, int slot) {
  return allot_load(&handle->machine->processes[slot].mps.server) != 0;
}

// Multiprocessors are given by twos, as they lie on the chip.
uint32_t allot_mps_multiprocessors(const allot_handle *handle, int slot, int gpu) {
  int place = allot_compute_place(handle, slot, gpu);
  uint32_t all = allot_place_multiprocessors(handle, place);
  uint32_t percentage = allot_load(&handle->machine->processes[slot].mps.percentage);
  if (percentage == 0 || percentage >= 100) return all;
  uint32_t part = all * percentage / 100 & ~1u;
  return part >= 2 ? part : 2;
}

void allot_mps_end(allot_handle *handle, int slot, uint32_t error) {
  uint32_t none = 0;
  __atomic_compare_exchange_n(&handle->machine->processes[slot].failed, &none, error, false,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  for (int gpu = 0; gpu < (int)handle->machine->description.gpu_count; gpu++) {
    allot_work_cancel(handle, slot, gpu);
  }
}

static bool is_of(const allot_handle *handle, int slot, int server) {
  return allot_machine_taken(handle, slot) &&
         allot_load(&handle->machine->processes[slot].mps.server) == (uint32_t)server + 1;
}

void allot_mps_lose_server(allot_handle *handle, int server) {
  for (int slot = 0; slot < allot_machine_high(handle); slot++) {
    if (!is_of(handle, slot, server)) continue;
    allot_mps_end(handle, slot, RPC_FAILURE);
    allot_store(&handle->machine->processes[slot].mps.server, 0u);
  }
}

void allot_mps_fault(allot_handle *handle, int slot, int gpu, uint32_t error) {
  int server = allot_mps_leader(handle, slot);
  if (server != slot) {
    uint32_t *faulty = &handle->machine->processes[server].mps.faulty;
    __atomic_fetch_or(faulty, 1u << gpu, __ATOMIC_SEQ_CST);
    for (int other = 0; other < allot_machine_high(handle); other++) {
      if (other == slot || !is_of(handle, other, server)) continue;
      if (allot_load(&handle->machine->processes[other].gpus[gpu].contexts) == 0) continue;
      allot_mps_end(handle, other, error);
    }
  }
  allot_mps_end(handle, slot, error);
}

bool allot_mps_is_faulty(allot_handle *handle, int server) {
  uint32_t *faulty = &handle->machine->processes[server].mps.faulty;
  uint32_t seen = allot_load(faulty);
  if (seen == 0) return false;
  allot_machine_reap(handle);
  for (int slot = 0; slot < allot_machine_high(handle); slot++) {
    if (is_of(handle, slot, server) && allot_load(&handle->machine->processes[slot].failed) != 0) {
      return true;
    }
  }
  __atomic_fetch_and(faulty, ~seen, __ATOMIC_SEQ_CST);
  return false;
}
