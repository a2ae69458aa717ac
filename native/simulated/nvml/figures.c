// SPDX-License-Identifier: Apache-2.0
// What a GPU does at the moment. Everything follows from the engine's busy time and nothing else:
// the same load gives the same power, temperature and clocks.
#include "simulated/nvml/library.h"

#define SECOND_NS 1000000000ull

enum {
  IDLE_GDDR_MEMORY_MHZ = 405,
  IDLE_SM_MHZ = 210,
  FULL_LOAD_POWER_PERCENT = 90,  // of the way from idle to the limit
  SLOWDOWN_MARGIN_C = 14,        // a fully loaded GPU stays this far below its slowdown
  MEMORY_PER_GPU_PERCENT = 45,   // how much of its busy time a program reads or writes memory
  HOTTER_MEMORY_C = 6,
};

unsigned int nvml_busy_percent(const allot_history *history) {
  uint64_t busy = allot_history_busy(history, allot_now_ns(), SECOND_NS);
  return (unsigned int)((busy * 100 + SECOND_NS / 2) / SECOND_NS);
}

unsigned int nvml_gpu_percent(const nvml_gpu *gpu) {
  nvml_advance(gpu);
  return nvml_busy_percent(&gpu->engine->machine->engines[gpu->index].compute);
}

unsigned int nvml_copy_percent(const nvml_gpu *gpu) {
  nvml_advance(gpu);
  return nvml_busy_percent(&gpu->engine->machine->engines[gpu->index].copies);
}

unsigned int nvml_memory_percent(const nvml_gpu *gpu) {
  unsigned int copies = nvml_copy_percent(gpu);
  unsigned int kernels = nvml_gpu_percent(gpu) * MEMORY_PER_GPU_PERCENT / 100;
  return copies > kernels ? copies : kernels;
}

unsigned int nvml_memory_per_gpu_percent(void) {
  return MEMORY_PER_GPU_PERCENT;
}

bool nvml_has_contexts(const nvml_gpu *gpu) {
  allot_machine_reap(gpu->engine);
  for (int slot = 0; slot < allot_machine_high(gpu->engine); slot++) {
    if (!allot_machine_taken(gpu->engine, slot)) continue;
    const allot_process *process = &gpu->engine->machine->processes[slot];
    if (allot_load(&process->gpus[gpu->index].contexts) != 0) return true;
  }
  return false;
}

// Milliwatts above idle when the GPU computes all the time.
static unsigned long long load_mw(const nvml_gpu *gpu) {
  const allot_gpu_description *d = gpu->description;
  return (unsigned long long)(d->power_limit_mw - d->power_idle_mw) * FULL_LOAD_POWER_PERCENT / 100;
}

unsigned int nvml_power_mw(const nvml_gpu *gpu) {
  unsigned long long load = load_mw(gpu) * nvml_gpu_percent(gpu) / 100;
  return gpu->description->power_idle_mw + (unsigned int)load;
}

// Idle since the clock's start, and the load's share of the time the GPU computed. Takes no slot: a
// process that only watches for resets reads the meter as it was when the GPU was last looked at.
static unsigned long long energy_in_all_mj(const nvml_gpu *gpu) {
  if (allot_machine_attached(gpu->engine)) allot_gpu_advance(gpu->engine, gpu->index);
  unsigned long long busy_ms =
      allot_load(&gpu->engine->machine->engines[gpu->index].busy_ns) / 1000000u;
  unsigned long long now_ms = allot_now_ns() / 1000000u;
  return gpu->description->power_idle_mw * now_ms / 1000u + load_mw(gpu) * busy_ms / 1000u;
}

unsigned long long nvml_energy_mj(const nvml_gpu *gpu) {
  unsigned long long all = energy_in_all_mj(gpu);
  unsigned long long before =
      allot_load(&gpu->engine->machine->engines[gpu->index].energy_reset_mj);
  return all > before ? all - before : 0;
}

void nvml_reset_energy(const nvml_gpu *gpu) {
  allot_store(&gpu->engine->machine->engines[gpu->index].energy_reset_mj, energy_in_all_mj(gpu));
}

unsigned int nvml_temperature_c(const nvml_gpu *gpu) {
  const allot_gpu_description *d = gpu->description;
  unsigned int span = d->temperature_slowdown_c - SLOWDOWN_MARGIN_C - d->temperature_idle_c;
  return d->temperature_idle_c + span * nvml_gpu_percent(gpu) / 100;
}

unsigned int nvml_memory_temperature_c(const nvml_gpu *gpu) {
  return nvml_temperature_c(gpu) + HOTTER_MEMORY_C;
}

unsigned int nvml_max_clock_mhz(const nvml_gpu *gpu, nvmlClockType_t type) {
  const allot_gpu_description *d = gpu->description;
  switch (type) {
    case NVML_CLOCK_MEM:
      return d->memory_clock_max_mhz;
    case NVML_CLOCK_VIDEO:
      return d->sm_clock_max_mhz * 9 / 10;
    default:
      return d->sm_clock_max_mhz;
  }
}

// With a context on it a GPU runs as fast as it can; without, it rests (HBM keeps its clock).
unsigned int nvml_clock_mhz(const nvml_gpu *gpu, nvmlClockType_t type) {
  if (nvml_has_contexts(gpu)) return nvml_max_clock_mhz(gpu, type);
  if (type != NVML_CLOCK_MEM) return IDLE_SM_MHZ;
  return nvml_has_hbm(gpu) ? gpu->description->memory_clock_mhz : IDLE_GDDR_MEMORY_MHZ;
}
