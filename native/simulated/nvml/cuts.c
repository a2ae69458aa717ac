// SPDX-License-Identifier: Apache-2.0
// GPU instances: what can be cut from a GPU, what has been, cutting and giving back.
//
// A handle names the slot that an instance begins at. As with the real ones, it names whatever
// instance begins there later.
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "simulated/nvml/library.h"

struct nvmlGpuInstance_st {
  char nothing;
};

static struct nvmlGpuInstance_st handles[ALLOT_MACHINE_GPUS * ALLOT_MIG_SLOTS];

#define MIB 20
// Drivers from here on answer about profiles while MIG is off (r545; 535 does not).
#define FIRST_BRANCH_WITHOUT_MODE 545

static allot_gpu_mig *mig_of(const nvml_gpu *gpu) {
  return &gpu->engine->machine->mig.gpus[gpu->index];
}

nvmlGpuInstance_t nvml_cut_handle(int gpu, int slot) {
  return &handles[gpu * ALLOT_MIG_SLOTS + slot];
}

const allot_gpu_instance *nvml_cut(const nvml_gpu *gpu, int slot) {
  return &mig_of(gpu)->instances[slot];
}

int nvml_cut_around(const nvml_gpu *gpu) {
  return allot_mig_around(gpu->engine, gpu->index,
                          (gpu->place - ALLOT_FIRST_CUT) % ALLOT_MIG_SLOTS);
}

const allot_compute_instance *nvml_compute(const nvml_gpu *gpu) {
  return &mig_of(gpu)->computes[(gpu->place - ALLOT_FIRST_CUT) % ALLOT_MIG_SLOTS];
}

const allot_mig_profile *nvml_cut_profile(const nvml_gpu *gpu, int slot) {
  return allot_mig_profile_of(gpu->engine, gpu->index, allot_load(&nvml_cut(gpu, slot)->profile));
}

nvmlReturn_t nvml_enter_cut(nvmlGpuInstance_t handle, nvml_gpu *gpu, int *slot) {
  NVML_READY(handle != NULL);
  uintptr_t offset = (uintptr_t)handle - (uintptr_t)handles;
  if (offset >= sizeof handles) return NVML_ERROR_INVALID_ARGUMENT;
  nvmlReturn_t result = nvml_enter(nvml_device((int)offset / ALLOT_MIG_SLOTS), gpu);
  *slot = (int)offset % ALLOT_MIG_SLOTS;
  if (result != NVML_SUCCESS) return result;
  return allot_load(&nvml_cut(gpu, *slot)->there) ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

// ---- changes -----------------------------------------------------------------------------------

nvmlReturn_t nvml_begin_change(const nvml_gpu *gpu, unsigned int call, int *lock) {
  if (allot_is_tenant()) return NVML_ERROR_NO_PERMISSION;
  allot_wait_out(&gpu->faults->mig_slow_us[call]);
  if (allot_load(&gpu->faults->mig_ends_before) >> call & 1) kill(getpid(), SIGKILL);
  uint32_t error = allot_load(&gpu->faults->mig_errors[call]);
  if (error != 0) return (nvmlReturn_t)error;
  *lock = allot_mig_lock(gpu->engine, gpu->index);
  if (*lock >= 0) return NVML_SUCCESS;
  return *lock == -EACCES ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_OPERATING_SYSTEM;
}

nvmlReturn_t nvml_end_change(const nvml_gpu *gpu, unsigned int call, int lock,
                             nvmlReturn_t result) {
  bool ends = allot_load(&gpu->faults->mig_ends_after) >> call & 1;
  if (result == NVML_SUCCESS && ends) kill(getpid(), SIGKILL);
  if (result == NVML_SUCCESS) nvml_fit_capabilities(gpu);
  allot_mig_unlock(lock, gpu->index);
  return result;
}

// ---- profiles ----------------------------------------------------------------------------------

static bool answers(const nvml_gpu *gpu) {
  int branch = 0;
  sscanf(gpu->engine->machine->description.driver_version, "%d", &branch);
  return branch >= FIRST_BRANCH_WITHOUT_MODE || allot_mig_is_on(gpu->engine, gpu->index);
}

static nvmlReturn_t profile_at(const nvml_gpu *gpu, unsigned int place,
                               const allot_mig_profile **profile) {
  if (!nvml_can_mig(gpu) || !answers(gpu)) return NVML_ERROR_NOT_SUPPORTED;
  if (place >= ALLOT_MIG_PROFILES) return NVML_ERROR_INVALID_ARGUMENT;
  *profile = allot_mig_profile_of(gpu->engine, gpu->index, place);
  return (*profile)->slices > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t profile_of_id(const nvml_gpu *gpu, unsigned int id, unsigned int *place) {
  if (!nvml_can_mig(gpu) || !answers(gpu)) return NVML_ERROR_NOT_SUPPORTED;
  for (*place = 0; *place < ALLOT_MIG_PROFILES; ++*place) {
    const allot_mig_profile *each = allot_mig_profile_of(gpu->engine, gpu->index, *place);
    if (each->slices > 0 && each->id == id) return NVML_SUCCESS;
  }
  return NVML_ERROR_INVALID_ARGUMENT;
}

#define PROFILE_FACTS                                                                 \
  .id = profile->id, .sliceCount = profile->slices, .instanceCount = profile->most,   \
  .multiprocessorCount = profile->sm_count, .copyEngineCount = profile->copy_engines, \
  .decoderCount = profile->decoders, .encoderCount = profile->encoders,               \
  .jpegCount = profile->jpegs, .ofaCount = profile->ofas,                             \
  .memorySizeMB = profile->memory_bytes >> MIB

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device,
                                                             unsigned int place,
                                                             nvmlGpuInstanceProfileInfo_t *info) {
  NVML_ENTER(device, info != NULL);
  const allot_mig_profile *profile;
  nvmlReturn_t result = profile_at(&gpu, place, &profile);
  if (result == NVML_SUCCESS) *info = (nvmlGpuInstanceProfileInfo_t){PROFILE_FACTS};
  return result;
}

// `info` is one of the versioned structures; which one its first member says.
static nvmlReturn_t fill_versioned(const allot_mig_profile *profile, void *info) {
  unsigned int version;
  memcpy(&version, info, sizeof version);
  if (version == nvmlGpuInstanceProfileInfo_v2) {
    nvmlGpuInstanceProfileInfo_v2_t *second = info;
    *second = (nvmlGpuInstanceProfileInfo_v2_t){.version = version, PROFILE_FACTS};
    snprintf(second->name, sizeof second->name, "MIG %s", profile->name);
  } else if (version == nvmlGpuInstanceProfileInfo_v3) {
    nvmlGpuInstanceProfileInfo_v3_t *third = info;
    *third = (nvmlGpuInstanceProfileInfo_v3_t){.version = version, PROFILE_FACTS};
    snprintf(third->name, sizeof third->name, "MIG %s", profile->name);
  } else {
    return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  }
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device,
                                                              unsigned int place, void *info) {
  NVML_ENTER(device, info != NULL);
  const allot_mig_profile *profile;
  nvmlReturn_t result = profile_at(&gpu, place, &profile);
  return result == NVML_SUCCESS ? fill_versioned(profile, info) : result;
}

static nvmlReturn_t list_placements(const nvml_gpu *gpu, unsigned int id,
                                    nvmlGpuInstancePlacement_t *placements, unsigned int *count) {
  unsigned int place, found = 0;
  nvmlReturn_t result = profile_of_id(gpu, id, &place);
  if (result != NVML_SUCCESS) return result;
  const allot_mig_profile *profile = allot_mig_profile_of(gpu->engine, gpu->index, place);
  for (unsigned int start = 0; start < ALLOT_MIG_SLOTS; start++) {
    if (!(profile->starts >> start & 1)) continue;
    if (placements != NULL) {
      placements[found] = (nvmlGpuInstancePlacement_t){.start = start, .size = profile->size};
    }
    found++;
  }
  *count = found;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    nvmlDevice_t device, unsigned int id, nvmlGpuInstancePlacement_t *placements,
    unsigned int *count) {
  NVML_ENTER(device, count != NULL);
  return list_placements(&gpu, id, placements, count);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(
    nvmlDevice_t device, unsigned int id, nvmlGpuInstancePlacement_t *placements,
    unsigned int *count) {
  NVML_ENTER(device, count != NULL);
  if (!allot_mig_is_on(gpu.engine, gpu.index)) return NVML_ERROR_NOT_SUPPORTED;
  return list_placements(&gpu, id, placements, count);
}

// ---- room --------------------------------------------------------------------------------------

typedef struct occupied {
  unsigned int slots;  // a bit each
  unsigned int media;  // instances with media engines
  unsigned int of[ALLOT_MIG_PROFILES];
} occupied;

static occupied what_is_there(const nvml_gpu *gpu) {
  occupied now = {0};
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    if (!allot_load(&nvml_cut(gpu, slot)->there)) continue;
    const allot_mig_profile *profile = nvml_cut_profile(gpu, slot);
    now.slots |= ((1u << profile->size) - 1) << slot;
    now.media += profile->media;
    now.of[allot_load(&nvml_cut(gpu, slot)->profile)]++;
  }
  return now;
}

static bool has_room(const nvml_gpu *gpu, const occupied *now, unsigned int place,
                     unsigned int start) {
  const allot_mig_profile *profile = allot_mig_profile_of(gpu->engine, gpu->index, place);
  if (now->of[place] >= profile->most || (profile->media > 0 && now->media > 0)) return false;
  return (now->slots & (((1u << profile->size) - 1) << start)) == 0;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device,
                                                                   unsigned int id,
                                                                   unsigned int *count) {
  NVML_ENTER(device, count != NULL);
  unsigned int place;
  nvmlReturn_t result = profile_of_id(&gpu, id, &place);
  if (result != NVML_SUCCESS) return result;
  if (!allot_mig_is_on(gpu.engine, gpu.index)) return NVML_ERROR_NOT_SUPPORTED;
  const allot_mig_profile *profile = allot_mig_profile_of(gpu.engine, gpu.index, place);
  occupied now = what_is_there(&gpu);
  *count = 0;
  // Of intervals of one length as many as possible: each as early as it can be.
  for (unsigned int start = 0; start < ALLOT_MIG_SLOTS; start++) {
    if (!(profile->starts >> start & 1) || !has_room(&gpu, &now, place, start)) continue;
    now.slots |= ((1u << profile->size) - 1) << start;
    now.media += profile->media;
    now.of[place]++;
    ++*count;
  }
  return NVML_SUCCESS;
}

// Where the driver puts an instance that nobody gave a place: seven 1g on an A100 come to 6, 4, 5,
// 0, 1, 2, 3, three 2g to 4, 0, 2. What leaves a small rest goes first, whatever is wanted later.
static int driver_choice(const nvml_gpu *gpu, const occupied *now, unsigned int place) {
  static const unsigned int eight[] = {6, 4, 5, 0, 1, 2, 3, 7}, four[] = {0, 1, 2, 3};
  const allot_mig_profile *profile = allot_mig_profile_of(gpu->engine, gpu->index, place);
  unsigned int slots = gpu->description->mig_slots;
  for (unsigned int i = 0; i < slots; i++) {
    unsigned int start = slots == 8 ? eight[i] : four[i % 4];
    if (profile->starts >> start & 1 && has_room(gpu, now, place, start)) return (int)start;
  }
  return -1;
}

// ---- ids ---------------------------------------------------------------------------------------

static bool id_is_free(const nvml_gpu *gpu, unsigned int id) {
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    const allot_gpu_instance *each = nvml_cut(gpu, slot);
    if (allot_load(&each->there) && allot_load(&each->id) == id) return false;
  }
  return true;
}

// Halves, quarters and eighths have ids of their own in that order, by place. Of the halves of
// eight slots 3g at 0 has 2, all else the lower one that is free.
static unsigned int id_for(const nvml_gpu *gpu, const allot_mig_profile *profile,
                           unsigned int start) {
  unsigned int slots = gpu->description->mig_slots;
  unsigned int id = slots / profile->size - 1 + start / profile->size;
  if (slots == 8 && profile->size == 4) {
    id = profile->slices == 3 && start == 0 ? 2 : 1;
    if (!id_is_free(gpu, id)) id = 3 - id;
  }
  return id;
}

// ---- making and giving back
// ----------------------------------------------------------------------

static nvmlReturn_t cut(const nvml_gpu *gpu, unsigned int id,
                        const nvmlGpuInstancePlacement_t *wanted, nvmlGpuInstance_t *made) {
  unsigned int place;
  if (!allot_mig_is_on(gpu->engine, gpu->index)) return NVML_ERROR_NOT_SUPPORTED;
  nvmlReturn_t result = profile_of_id(gpu, id, &place);
  if (result != NVML_SUCCESS) return result;
  const allot_mig_profile *profile = allot_mig_profile_of(gpu->engine, gpu->index, place);
  occupied now = what_is_there(gpu);
  int start = -1;
  if (wanted == NULL) {
    start = driver_choice(gpu, &now, place);
  } else if (wanted->start >= ALLOT_MIG_SLOTS || !(profile->starts >> wanted->start & 1) ||
             wanted->size != profile->size) {
    return NVML_ERROR_INVALID_ARGUMENT;
  } else if (has_room(gpu, &now, place, wanted->start)) {
    start = (int)wanted->start;
  }
  if (start < 0) return NVML_ERROR_INSUFFICIENT_RESOURCES;
  allot_gpu_instance *instance = &mig_of(gpu)->instances[start];
  allot_store(&instance->id, id_for(gpu, profile, (unsigned int)start));
  allot_store(&instance->profile, place);
  allot_store(&instance->there, 1u);
  *made = nvml_cut_handle(gpu->index, start);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int id,
                                                     nvmlGpuInstance_t *instance) {
  NVML_ENTER(device, instance != NULL);
  int lock;
  nvmlReturn_t result = nvml_begin_change(&gpu, ALLOT_MIG_CREATE_GPU, &lock);
  if (result != NVML_SUCCESS) return result;
  result = cut(&gpu, id, NULL, instance);
  return nvml_end_change(&gpu, ALLOT_MIG_CREATE_GPU, lock, result);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(
    nvmlDevice_t device, unsigned int id, const nvmlGpuInstancePlacement_t *placement,
    nvmlGpuInstance_t *instance) {
  NVML_ENTER(device, placement != NULL && instance != NULL);
  int lock;
  nvmlReturn_t result = nvml_begin_change(&gpu, ALLOT_MIG_CREATE_GPU, &lock);
  if (result != NVML_SUCCESS) return result;
  result = cut(&gpu, id, placement, instance);
  return nvml_end_change(&gpu, ALLOT_MIG_CREATE_GPU, lock, result);
}

static bool has_computes(const nvml_gpu *gpu, int start) {
  int end = start + (int)nvml_cut_profile(gpu, start)->size;
  for (int slot = start; slot < end; slot++) {
    if (allot_load(&mig_of(gpu)->computes[slot].there)) return true;
  }
  return false;
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance) {
  nvml_gpu gpu;
  int slot, lock;
  nvmlReturn_t result = nvml_enter_cut(instance, &gpu, &slot);
  if (result == NVML_SUCCESS) result = nvml_begin_change(&gpu, ALLOT_MIG_DESTROY_GPU, &lock);
  if (result != NVML_SUCCESS) return result;
  allot_gpu_instance *own = &mig_of(&gpu)->instances[slot];
  if (!allot_load(&own->there)) {
    result = NVML_ERROR_NOT_FOUND;
  } else if (has_computes(&gpu, slot)) {
    result = NVML_ERROR_IN_USE;
  } else {
    allot_store(&own->there, 0u);
  }
  return nvml_end_change(&gpu, ALLOT_MIG_DESTROY_GPU, lock, result);
}

// ---- what is there ------------------------------------------------------------------------------

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id,
                                                   nvmlGpuInstance_t *instances,
                                                   unsigned int *count) {
  NVML_ENTER(device, instances != NULL && count != NULL);
  unsigned int place, found = 0;
  nvmlReturn_t result = profile_of_id(&gpu, id, &place);
  if (result != NVML_SUCCESS) return result;
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    const allot_gpu_instance *each = nvml_cut(&gpu, slot);
    if (!allot_load(&each->there) || allot_load(&each->profile) != place) continue;
    instances[found++] = nvml_cut_handle(gpu.index, slot);
  }
  *count = found;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id,
                                                      nvmlGpuInstance_t *instance) {
  NVML_ENTER(device, instance != NULL);
  if (!nvml_can_mig(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    const allot_gpu_instance *each = nvml_cut(&gpu, slot);
    if (!allot_load(&each->there) || allot_load(&each->id) != id) continue;
    *instance = nvml_cut_handle(gpu.index, slot);
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance,
                                                nvmlGpuInstanceInfo_t *info) {
  nvml_gpu gpu;
  int slot;
  nvmlReturn_t result = nvml_enter_cut(instance, &gpu, &slot);
  if (result != NVML_SUCCESS) return result;
  if (info == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  const allot_mig_profile *profile = nvml_cut_profile(&gpu, slot);
  *info = (nvmlGpuInstanceInfo_t){
      .device = nvml_device(gpu.index),
      .id = allot_load(&nvml_cut(&gpu, slot)->id),
      .profileId = profile->id,
      .placement = {.start = (unsigned int)slot, .size = profile->size},
  };
  return NVML_SUCCESS;
}
