// SPDX-License-Identifier: Apache-2.0
// What nvidia-smi does to a real GPU and no function of NVML can: a reset, and the length of its
// time slices. Exported beside NVML's own by this library alone. Needs no nvmlInit.
#include <errno.h>
#include <pthread.h>

#include "simulated/nvml/times.h"

static bool is_used(allot_handle *handle, int gpu) {
  return allot_mig_in_use(handle, gpu, 0, ALLOT_MIG_SLOTS);
}

// A GPU is reset alone only if nobody is on those that NVLink joins to it either.
static bool has_busy_peer(const nvml_gpu *gpu) {
  for (int i = 0; i < (int)gpu->engine->machine->description.gpu_count; i++) {
    nvml_gpu other = nvml_bare(gpu->engine, i);
    if (i != gpu->index && nvml_are_linked(gpu, &other) && is_used(gpu->engine, i)) return true;
  }
  return false;
}

// All that was cut is gone then, the pending mode is in force, and counters since the last reset
// begin at 0.
static void reset(const nvml_gpu *gpu) {
  allot_machine *machine = gpu->engine->machine;
  allot_gpu_mig *mig = &machine->mig.gpus[gpu->index];
  allot_gpu_faults *faults = &machine->faults.gpus[gpu->index];
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    allot_store(&mig->computes[slot].there, 0u);
    allot_store(&mig->instances[slot].there, 0u);
  }
  allot_store(&mig->enabled, allot_load(&mig->pending));
  allot_store(&faults->ecc_volatile_corrected, (uint64_t)0);
  allot_store(&faults->ecc_volatile_uncorrected, (uint64_t)0);
  nvml_reset_energy(gpu);
}

int allotSimulatedReset(const char *machine, unsigned int number) {
  allot_handle *handle;
  int lock, error = times_begin(machine, number, &handle);
  if (error != 0) return error;
  nvml_gpu gpu = nvml_bare(handle, (int)number);
  nvmlReturn_t result = nvml_begin_change(&gpu, ALLOT_MIG_RESET, &lock);
  if (result == NVML_SUCCESS) {
    bool busy = is_used(handle, gpu.index) || has_busy_peer(&gpu);
    if (!busy) reset(&gpu);
    result = busy ? NVML_ERROR_IN_USE : NVML_SUCCESS;
    result = nvml_end_change(&gpu, ALLOT_MIG_RESET, lock, result);
  }
  times_end();
  if (result == NVML_SUCCESS) return 0;
  if (result == NVML_ERROR_IN_USE) return -EBUSY;
  return result == NVML_ERROR_NO_PERMISSION ? -EACCES : -EIO;
}

// A driver has four lengths and no figures for them; here they are parts of the machine's own.
int allotSimulatedSetTimeslice(const char *machine, unsigned int number, unsigned int length) {
  static const struct {
    unsigned int times, parts;
  } lengths[] = {{0, 1}, {1, 2}, {2, 1}, {4, 1}};  // 0: as long as the machine says
  if (length >= sizeof lengths / sizeof lengths[0]) return -EINVAL;
  if (allot_is_tenant()) return -EACCES;
  allot_handle *handle;
  int error = times_begin(machine, number, &handle);
  if (error != 0) return error;
  allot_machine_description *description = &handle->machine->description;
  uint32_t slice_us = description->timeslice_us * lengths[length].times / lengths[length].parts;
  if (slice_us == 0 && length != 0) slice_us = 1;
  allot_store(&description->gpus[number].timeslice_us, slice_us);
  times_end();
  return 0;
}
