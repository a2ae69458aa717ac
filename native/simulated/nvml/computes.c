// SPDX-License-Identifier: Apache-2.0
// Compute instances: the compute slices of a GPU instance, all of them or some. Each is a MIG
// device.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "simulated/nvml/library.h"

struct nvmlComputeInstance_st {
  char nothing;
};

static struct nvmlComputeInstance_st handles[ALLOT_MACHINE_GPUS * ALLOT_MIG_SLOTS];

// By NVML's number of the profile, which is also what creating one is told: how many slices.
static const unsigned int slices_of[] = {1, 2, 3, 4, 7};

#define PROFILES 9u /* NVML_COMPUTE_INSTANCE_PROFILE_COUNT */

// One GPU instance, for the length of one call.
typedef struct cut {
  nvml_gpu gpu;
  int start;
  const allot_mig_profile *profile;
} cut;

static nvmlReturn_t enter(nvmlGpuInstance_t instance, cut *own) {
  nvmlReturn_t result = nvml_enter_cut(instance, &own->gpu, &own->start);
  if (result == NVML_SUCCESS) own->profile = nvml_cut_profile(&own->gpu, own->start);
  return result;
}

static allot_compute_instance *compute_at(const cut *own, unsigned int slice) {
  return &own->gpu.engine->machine->mig.gpus[own->gpu.index].computes[own->start + (int)slice];
}

static nvmlComputeInstance_t handle_of(const cut *own, unsigned int slice) {
  return &handles[own->gpu.index * ALLOT_MIG_SLOTS + own->start + (int)slice];
}

// NOT_SUPPORTED: this GPU instance has no such profile. 8 is 7g of a later generation
// (7_SLICE_NVL).
static nvmlReturn_t profile_of(const cut *own, unsigned int number, unsigned int *slices) {
  if (number >= PROFILES) return NVML_ERROR_INVALID_ARGUMENT;
  *slices = number < sizeof slices_of / sizeof *slices_of ? slices_of[number] : 0;
  if (*slices == 0 || *slices > own->profile->slices) return NVML_ERROR_NOT_SUPPORTED;
  // Of seven slices there are no three behind four.
  return NVML_SUCCESS;
}

// Slices begin at multiples of 1, 2, 4 or 8, whatever is the next to their count.
static bool may_begin(const cut *own, unsigned int slices, unsigned int slice) {
  unsigned int step = slices > 4 ? 8 : slices > 2 ? 4 : slices;
  return slice % step == 0 && slice + slices <= own->profile->slices;
}

static unsigned int most(const cut *own, unsigned int slices) {
  unsigned int count = 0;
  for (unsigned int slice = 0; slice < own->profile->slices; slice++) {
    count += may_begin(own, slices, slice);
  }
  return count;
}

static unsigned int multiprocessors(const cut *own, unsigned int slices) {
  return own->profile->sm_count * slices / own->profile->slices;
}

static void name_profile(const cut *own, unsigned int slices, char *name, size_t size) {
  if (slices == own->profile->slices) {
    snprintf(name, size, "MIG %s", own->profile->name);
  } else {
    snprintf(name, size, "MIG %uc.%s", slices, own->profile->name);
  }
}

#define PROFILE_FACTS                                                                              \
  .id = number, .sliceCount = slices, .instanceCount = most(&own, slices),                         \
  .multiprocessorCount = multiprocessors(&own, slices),                                            \
  .sharedCopyEngineCount = own.profile->copy_engines, .sharedDecoderCount = own.profile->decoders, \
  .sharedEncoderCount = own.profile->encoders, .sharedJpegCount = own.profile->jpegs,              \
  .sharedOfaCount = own.profile->ofas

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(
    nvmlGpuInstance_t instance, unsigned int number, unsigned int engines,
    nvmlComputeInstanceProfileInfo_t *info) {
  cut own;
  unsigned int slices;
  nvmlReturn_t result = enter(instance, &own);
  if (result != NVML_SUCCESS) return result;
  if (info == NULL || engines != NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED) {
    return NVML_ERROR_INVALID_ARGUMENT;
  }
  result = profile_of(&own, number, &slices);
  if (result == NVML_SUCCESS) *info = (nvmlComputeInstanceProfileInfo_t){PROFILE_FACTS};
  return result;
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance,
                                                                       unsigned int number,
                                                                       unsigned int engines,
                                                                       void *info) {
  cut own;
  unsigned int slices, version;
  nvmlReturn_t result = enter(instance, &own);
  if (result != NVML_SUCCESS) return result;
  if (info == NULL || engines != NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED) {
    return NVML_ERROR_INVALID_ARGUMENT;
  }
  result = profile_of(&own, number, &slices);
  if (result != NVML_SUCCESS) return result;
  memcpy(&version, info, sizeof version);
  if (version == nvmlComputeInstanceProfileInfo_v2) {
    nvmlComputeInstanceProfileInfo_v2_t *second = info;
    *second = (nvmlComputeInstanceProfileInfo_v2_t){.version = version, PROFILE_FACTS};
    name_profile(&own, slices, second->name, sizeof second->name);
  } else if (version == nvmlComputeInstanceProfileInfo_v3) {
    nvmlComputeInstanceProfileInfo_v3_t *third = info;
    *third = (nvmlComputeInstanceProfileInfo_v3_t){.version = version, PROFILE_FACTS};
    name_profile(&own, slices, third->name, sizeof third->name);
  } else {
    return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  }
  return NVML_SUCCESS;
}

// ---- room --------------------------------------------------------------------------------------

// A bit for each slice that is taken.
static unsigned int taken(const cut *own) {
  unsigned int slices = 0;
  for (unsigned int slice = 0; slice < own->profile->slices; slice++) {
    const allot_compute_instance *each = compute_at(own, slice);
    if (allot_load(&each->there)) slices |= ((1u << allot_load(&each->slices)) - 1) << slice;
  }
  return slices;
}

static bool has_room(const cut *own, unsigned int slices, unsigned int slice) {
  return may_begin(own, slices, slice) && (taken(own) & (((1u << slices) - 1) << slice)) == 0;
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
    nvmlGpuInstance_t instance, unsigned int number, unsigned int *count) {
  cut own;
  unsigned int slices;
  nvmlReturn_t result = enter(instance, &own);
  if (result != NVML_SUCCESS) return result;
  if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  result = profile_of(&own, number, &slices);
  if (result != NVML_SUCCESS) return result;
  *count = 0;
  for (unsigned int slice = 0; slice < own.profile->slices; slice++) {
    *count += has_room(&own, slices, slice);
  }
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(
    nvmlGpuInstance_t instance, unsigned int number, nvmlComputeInstancePlacement_t *placements,
    unsigned int *count) {
  cut own;
  unsigned int slices, found = 0;
  nvmlReturn_t result = enter(instance, &own);
  if (result != NVML_SUCCESS) return result;
  if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  result = profile_of(&own, number, &slices);
  if (result != NVML_SUCCESS) return result;
  for (unsigned int slice = 0; slice < own.profile->slices; slice++) {
    if (!may_begin(&own, slices, slice)) continue;
    if (placements != NULL) {
      placements[found] = (nvmlComputeInstancePlacement_t){.start = slice, .size = slices};
    }
    found++;
  }
  *count = found;
  return NVML_SUCCESS;
}

// ---- making and giving back
// ----------------------------------------------------------------------

static void make_uuid(char *uuid, size_t size) {
  unsigned char bytes[16] = {0};
  int descriptor = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (descriptor < 0 || read(descriptor, bytes, sizeof bytes) != (ssize_t)sizeof bytes) {
    uint64_t now = allot_now_ns();
    memcpy(bytes, &now, sizeof now);
  }
  if (descriptor >= 0) close(descriptor);
  bytes[6] = (unsigned char)((bytes[6] & 0x0f) | 0x50);
  bytes[8] = (unsigned char)((bytes[8] & 0x3f) | 0x80);
  size_t at = (size_t)snprintf(uuid, size, "MIG-");
  for (int i = 0; i < 16; i++) {
    bool dash = i == 4 || i == 6 || i == 8 || i == 10;
    at += (size_t)snprintf(uuid + at, size - at, dash ? "-%02x" : "%02x", bytes[i]);
  }
}

static unsigned int free_id(const cut *own) {
  for (unsigned int id = 0;; id++) {
    bool is_free = true;
    for (unsigned int slice = 0; slice < own->profile->slices; slice++) {
      const allot_compute_instance *each = compute_at(own, slice);
      if (allot_load(&each->there) && allot_load(&each->id) == id) is_free = false;
    }
    if (is_free) return id;
  }
}

static nvmlReturn_t make(const cut *own, unsigned int number,
                         const nvmlComputeInstancePlacement_t *wanted,
                         nvmlComputeInstance_t *made) {
  unsigned int slices, slice = 0;
  // It may have gone before the lock was had.
  if (!allot_load(&nvml_cut(&own->gpu, own->start)->there)) return NVML_ERROR_NOT_FOUND;
  nvmlReturn_t result = profile_of(own, number, &slices);
  if (result != NVML_SUCCESS) return result;
  if (wanted != NULL) {
    if (wanted->size != slices || !may_begin(own, slices, wanted->start)) {
      return NVML_ERROR_INVALID_ARGUMENT;
    }
    slice = wanted->start;
  } else {
    while (slice < own->profile->slices && !has_room(own, slices, slice)) slice++;
  }
  if (!has_room(own, slices, slice)) return NVML_ERROR_INSUFFICIENT_RESOURCES;
  allot_compute_instance *compute = compute_at(own, slice);
  allot_store(&compute->id, free_id(own));
  allot_store(&compute->slices, slices);
  allot_store(&compute->sm_count, multiprocessors(own, slices));
  make_uuid(compute->uuid, sizeof compute->uuid);
  int place = ALLOT_CUT(own->gpu.index, own->start + (int)slice);
  allot_store(&own->gpu.engine->machine->engines[place].compute_mode, 0u);
  allot_store(&compute->there, 1u);
  *made = handle_of(own, slice);
  return NVML_SUCCESS;
}

static nvmlReturn_t create(nvmlGpuInstance_t instance, unsigned int number,
                           const nvmlComputeInstancePlacement_t *wanted,
                           nvmlComputeInstance_t *made) {
  cut own;
  int lock;
  nvmlReturn_t result = enter(instance, &own);
  if (result != NVML_SUCCESS) return result;
  if (made == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  result = nvml_begin_change(&own.gpu, ALLOT_MIG_CREATE_COMPUTE, &lock);
  if (result != NVML_SUCCESS) return result;
  result = make(&own, number, wanted, made);
  return nvml_end_change(&own.gpu, ALLOT_MIG_CREATE_COMPUTE, lock, result);
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance,
                                                              unsigned int number,
                                                              nvmlComputeInstance_t *made) {
  return create(instance, number, NULL, made);
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(
    nvmlGpuInstance_t instance, unsigned int number,
    const nvmlComputeInstancePlacement_t *placement, nvmlComputeInstance_t *made) {
  if (placement == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  return create(instance, number, placement, made);
}

// The compute instance that a handle is of, and its GPU instance.
static nvmlReturn_t enter_compute(nvmlComputeInstance_t handle, cut *own, unsigned int *slice) {
  NVML_READY(handle != NULL);
  uintptr_t offset = (uintptr_t)handle - (uintptr_t)handles;
  if (offset >= sizeof handles) return NVML_ERROR_INVALID_ARGUMENT;
  int gpu = (int)offset / ALLOT_MIG_SLOTS, slot = (int)offset % ALLOT_MIG_SLOTS;
  if (allot_mig_compute(nvml_engine(), ALLOT_CUT(gpu, slot)) == NULL) return NVML_ERROR_NOT_FOUND;
  int start = allot_mig_around(nvml_engine(), gpu, slot);
  *slice = (unsigned int)(slot - start);
  return enter(nvml_cut_handle(gpu, start), own);
}

NVML_EXPORT nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance) {
  cut own;
  unsigned int slice;
  int lock;
  nvmlReturn_t result = enter_compute(instance, &own, &slice);
  if (result != NVML_SUCCESS) return result;
  result = nvml_begin_change(&own.gpu, ALLOT_MIG_DESTROY_COMPUTE, &lock);
  if (result != NVML_SUCCESS) return result;
  allot_compute_instance *compute = compute_at(&own, slice);
  int slot = own.start + (int)slice;
  if (!allot_load(&compute->there)) {
    result = NVML_ERROR_NOT_FOUND;
  } else if (allot_mig_in_use(own.gpu.engine, own.gpu.index, slot, slot + 1)) {
    result = NVML_ERROR_IN_USE;
  } else {
    allot_store(&compute->there, 0u);
  }
  return nvml_end_change(&own.gpu, ALLOT_MIG_DESTROY_COMPUTE, lock, result);
}

// ---- what is there ------------------------------------------------------------------------------

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance,
                                                            unsigned int number,
                                                            nvmlComputeInstance_t *instances,
                                                            unsigned int *count) {
  cut own;
  unsigned int slices, found = 0;
  nvmlReturn_t result = enter(instance, &own);
  if (result != NVML_SUCCESS) return result;
  if (instances == NULL || count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  result = profile_of(&own, number, &slices);
  if (result != NVML_SUCCESS) return result;
  for (unsigned int slice = 0; slice < own.profile->slices; slice++) {
    const allot_compute_instance *each = compute_at(&own, slice);
    if (!allot_load(&each->there) || allot_load(&each->slices) != slices) continue;
    instances[found++] = handle_of(&own, slice);
  }
  *count = found;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance,
                                                               unsigned int id,
                                                               nvmlComputeInstance_t *compute) {
  cut own;
  nvmlReturn_t result = enter(instance, &own);
  if (result != NVML_SUCCESS) return result;
  if (compute == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  for (unsigned int slice = 0; slice < own.profile->slices; slice++) {
    const allot_compute_instance *each = compute_at(&own, slice);
    if (!allot_load(&each->there) || allot_load(&each->id) != id) continue;
    *compute = handle_of(&own, slice);
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

static unsigned int number_of(unsigned int slices) {
  unsigned int number = 0;
  while (slices_of[number] < slices && number + 1 < sizeof slices_of / sizeof *slices_of) number++;
  return number;
}

NVML_EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance,
                                                       nvmlComputeInstanceInfo_t *info) {
  cut own;
  unsigned int slice;
  nvmlReturn_t result = enter_compute(instance, &own, &slice);
  if (result != NVML_SUCCESS) return result;
  if (info == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  const allot_compute_instance *compute = compute_at(&own, slice);
  unsigned int slices = allot_load(&compute->slices);
  *info = (nvmlComputeInstanceInfo_t){
      .device = nvml_device(ALLOT_CUT(own.gpu.index, own.start + (int)slice)),
      .gpuInstance = nvml_cut_handle(own.gpu.index, own.start),
      .id = allot_load(&compute->id),
      .profileId = number_of(slices),
      .placement = {.start = slice, .size = slices},
  };
  return NVML_SUCCESS;
}

// The first version ends before the placement.
NVML_EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t instance, void *info) {
  nvmlComputeInstanceInfo_t whole;
  nvmlReturn_t result = nvmlComputeInstanceGetInfo_v2(instance, &whole);
  if (result != NVML_SUCCESS) return result;
  if (info == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  memcpy(info, &whole, offsetof(nvmlComputeInstanceInfo_t, placement));
  return NVML_SUCCESS;
}
