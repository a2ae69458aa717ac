// SPDX-License-Identifier: Apache-2.0
// MIG mode, and MIG devices: handles of compute instances that many calls take like a GPU's.
#include <stdio.h>
#include <string.h>

#include "simulated/nvml/library.h"

static allot_gpu_mig *mig_of(const nvml_gpu *gpu) {
  return &gpu->engine->machine->mig.gpus[gpu->index];
}

bool nvml_mig_is_on(const nvml_gpu *gpu) {
  return nvml_can_mig(gpu) && allot_load(&mig_of(gpu)->enabled) != 0;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                              unsigned int *pending) {
  NVML_ENTER(device, current != NULL && pending != NULL);
  if (!nvml_can_mig(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  *current = allot_load(&mig_of(&gpu)->enabled);
  *pending = allot_load(&mig_of(&gpu)->pending);
  return NVML_SUCCESS;
}

static bool has_cuts(const nvml_gpu *gpu) {
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    if (allot_load(&nvml_cut(gpu, slot)->there)) return true;
  }
  return false;
}

// From Hopper on a mode is in force at once, or refused while somebody uses the GPU or what is cut
// from it. Before, it is pending until the GPU is reset.
static nvmlReturn_t set_mode(const nvml_gpu *gpu, unsigned int mode, nvmlReturn_t *activation) {
  bool is_used = allot_mig_in_use(gpu->engine, gpu->index, 0, ALLOT_MIG_SLOTS);
  *activation = NVML_SUCCESS;
  if (allot_load(&mig_of(gpu)->enabled) == mode) {
    allot_store(&mig_of(gpu)->pending, mode);
  } else if (gpu->description->mig_needs_reset != 0) {
    *activation = is_used ? NVML_ERROR_IN_USE : NVML_ERROR_RESET_REQUIRED;
    allot_store(&mig_of(gpu)->pending, mode);
  } else if (is_used || has_cuts(gpu)) {
    return *activation = NVML_ERROR_IN_USE;
  } else {
    allot_store(&mig_of(gpu)->pending, mode);
    allot_store(&mig_of(gpu)->enabled, mode);
  }
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode,
                                              nvmlReturn_t *activation) {
  NVML_ENTER(device, activation != NULL && mode <= NVML_DEVICE_MIG_ENABLE);
  if (!nvml_can_mig(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  int lock;
  nvmlReturn_t result = nvml_begin_change(&gpu, ALLOT_MIG_SET_MODE, &lock);
  if (result != NVML_SUCCESS) {
    *activation = result;
    return result;
  }
  result = set_mode(&gpu, mode, activation);
  return nvml_end_change(&gpu, ALLOT_MIG_SET_MODE, lock, result);
}

// ---- MIG devices -------------------------------------------------------------------------------

NVML_GETTER_ANY(nvmlDeviceIsMigDeviceHandle, unsigned int, nvml_is_mig_device(&gpu))

// As many as the smallest profile has instances.
static unsigned int most_devices(const nvml_gpu *gpu) {
  if (!allot_mig_is_on(gpu->engine, gpu->index)) return 0;
  unsigned int most = 0;
  for (unsigned int place = 0; place < ALLOT_MIG_PROFILES; place++) {
    unsigned int own = allot_mig_profile_of(gpu->engine, gpu->index, place)->most;
    if (own > most) most = own;
  }
  return most;
}

NVML_GETTER(nvmlDeviceGetMaxMigDeviceCount, unsigned int, true, most_devices(&gpu))

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device,
                                                             unsigned int index,
                                                             nvmlDevice_t *found) {
  NVML_ENTER(device, found != NULL);
  if (!nvml_can_mig(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  int places[ALLOT_MIG_SLOTS];
  unsigned int count = (unsigned int)allot_mig_list(gpu.engine, gpu.index, places);
  unsigned int most = most_devices(&gpu);
  if (most > 0 && index >= most) return NVML_ERROR_INVALID_ARGUMENT;
  if (index >= count) return NVML_ERROR_NOT_FOUND;
  *found = nvml_device(places[index]);
  return NVML_SUCCESS;
}

unsigned int nvml_mig_index(const nvml_gpu *gpu) {
  int places[ALLOT_MIG_SLOTS];
  int count = allot_mig_list(gpu->engine, gpu->index, places);
  for (int i = 0; i < count; i++) {
    if (places[i] == gpu->place) return (unsigned int)i;
  }
  return 0;
}

// Calls that only a MIG device's handle can make.
#define ONLY_FOR_MIG(name, type, expression)                           \
  NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, type *value) {    \
    NVML_ENTER_ANY(device, value != NULL);                             \
    if (!nvml_is_mig_device(&gpu)) return NVML_ERROR_INVALID_ARGUMENT; \
    *value = (expression);                                             \
    return NVML_SUCCESS;                                               \
  }

ONLY_FOR_MIG(nvmlDeviceGetGpuInstanceId, unsigned int,
             allot_load(&nvml_cut(&gpu, nvml_cut_around(&gpu))->id))
ONLY_FOR_MIG(nvmlDeviceGetComputeInstanceId, unsigned int, allot_load(&nvml_compute(&gpu)->id))
ONLY_FOR_MIG(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, nvmlDevice_t, nvml_device(gpu.index))

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device,
                                                    nvmlDeviceAttributes_t *attributes) {
  NVML_ENTER_ANY(device, attributes != NULL);
  if (!nvml_is_mig_device(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  const allot_mig_profile *profile = nvml_cut_profile(&gpu, nvml_cut_around(&gpu));
  const allot_compute_instance *compute = nvml_compute(&gpu);
  *attributes = (nvmlDeviceAttributes_t){
      .multiprocessorCount = allot_load(&compute->sm_count),
      .sharedCopyEngineCount = profile->copy_engines,
      .sharedDecoderCount = profile->decoders,
      .sharedEncoderCount = profile->encoders,
      .sharedJpegCount = profile->jpegs,
      .sharedOfaCount = profile->ofas,
      .gpuInstanceSliceCount = profile->slices,
      .computeInstanceSliceCount = allot_load(&compute->slices),
      .memorySizeMB = profile->memory_bytes >> 20,
  };
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device,
                                                 nvmlDeviceAttributes_t *attributes) {
  return nvmlDeviceGetAttributes_v2(device, attributes);
}
