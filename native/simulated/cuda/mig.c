// SPDX-License-Identifier: Apache-2.0
// MIG as programs on CUDA see it: a process has one MIG device, or whole GPUs.
//
// CUDA_VISIBLE_DEVICES may name a MIG device, as MIG-<uuid> or as MIG-GPU-<uuid>/<gpu instance>/
// <compute instance>; the first entry counts. A GPU with MIG on that is named instead means the
// first of its MIG devices that the process can reach. Without the variable GPUs with MIG on are
// passed over, unless there are no others.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

static bool is_cut(int gpu) {
  return allot_mig_is_on(&driver.machine, gpu);
}

// The place of the first MIG device of a GPU, -1: it has none.
static int first_device(int gpu) {
  int places[ALLOT_MIG_SLOTS];
  return allot_mig_list(&driver.machine, gpu, places) > 0 ? places[0] : -1;
}

static int by_ids(const char *name) {
  const char *slash = strchr(name, '/');
  unsigned gpu_id, compute_id;
  if (slash == NULL || sscanf(slash, "/%u/%u", &gpu_id, &compute_id) != 2) return -1;
  for (int gpu = 0; gpu < (int)driver.machine.machine->description.gpu_count; gpu++) {
    const char *uuid = driver.machine.machine->description.gpus[gpu].uuid;
    size_t length = strlen(uuid);
    if (strncmp(name + 4, uuid, length) != 0 || name + 4 + length != slash) continue;
    int places[ALLOT_MIG_SLOTS], count = allot_mig_list(&driver.machine, gpu, places);
    for (int i = 0; i < count; i++) {
      unsigned ids = allot_mig_ids(&driver.machine, places[i]);
      if (ids == (gpu_id << 8 | compute_id)) return places[i];
    }
  }
  return -1;
}

static int by_name(const char *entry, size_t length) {
  char name[128];
  snprintf(name, sizeof name, "%.*s", (int)length, entry);
  int place =
      strncmp(name, "MIG-GPU-", 8) == 0 ? by_ids(name) : allot_mig_find(&driver.machine, name);
  if (place < 0 || !allot_reaches(&driver.machine, place)) return -1;
  bool has_node = driver.machine.nodes >> allot_place_gpu(place) & 1;
  return has_node && is_cut(allot_place_gpu(place)) ? place : -1;
}

// Takes GPUs that are cut out of the list. `named`: the list ends with the first of them.
static int keep_whole(int gpus[ALLOT_MACHINE_GPUS], int count, bool named) {
  int kept = 0;
  for (int i = 0; i < count; i++) {
    if (!is_cut(gpus[i])) gpus[kept++] = gpus[i];
    if (named && is_cut(gpus[i])) break;
  }
  return kept;
}

static void describe(int place) {
  int gpu = allot_place_gpu(place);
  const allot_gpu_description *whole = &driver.machine.machine->description.gpus[gpu];
  const allot_mig_profile *profile = allot_mig_profile_at(&driver.machine, place);
  const allot_compute_instance *compute = allot_mig_compute(&driver.machine, place);
  allot_gpu_description *own = &driver.cut;
  *own = *whole;
  allot_mig_name(&driver.machine, place, own->name, sizeof own->name);
  memcpy(own->uuid, compute->uuid, sizeof own->uuid);
  own->sm_count = allot_place_multiprocessors(&driver.machine, place);
  own->memory_total = profile->memory_bytes;
  own->memory_reserved = 0;
  own->l2_bytes = (uint32_t)((uint64_t)whole->l2_bytes * profile->size / whole->mig_slots);
}

static void take(int place) {
  int gpu = allot_place_gpu(place);
  allot_process_gpu *part = &driver.machine.machine->processes[driver.machine.slot].gpus[gpu];
  describe(place);
  driver.cut_place = place;
  driver.device_count = 1;
  driver.gpus[0] = gpu;
  allot_store(&part->memory_place, (uint32_t)allot_mig_memory_place(&driver.machine, place));
  allot_store(&part->compute_place, (uint32_t)place);
}

void mig_choose(void) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  int place = -1, count = driver.device_count, *gpus = driver.gpus;
  if (list != NULL) list += strspn(list, " \t");
  if (list != NULL && strncmp(list, "MIG-", 4) == 0) {
    place = by_name(list, strcspn(list, ", \t"));
    count = 0;
  } else if (list == NULL || count == 0 || !is_cut(gpus[0])) {
    int first = count > 0 ? gpus[0] : -1;
    count = keep_whole(gpus, count, list != NULL);
    if (count == 0 && first >= 0) place = first_device(first);
  } else {
    place = first_device(gpus[0]);
    count = 0;
  }
  driver.device_count = count;
  driver.cut_place = 0;
  if (place >= 0) take(place);
}

CUresult mig_hold(int gpu, int *lock) {
  *lock = -1;
  if (driver.machine.machine->description.gpus[gpu].mig_slots == 0) return CUDA_SUCCESS;
  *lock = allot_mig_lock(&driver.machine, gpu);
  if (*lock < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  bool there = !is_cut(gpu);
  if (driver.cut_place > 0) {
    // Another instance may have been made where the process's own was.
    const allot_compute_instance *own = allot_mig_compute(&driver.machine, driver.cut_place);
    there = own != NULL && strcmp(own->uuid, driver.cut.uuid) == 0;
  }
  if (there) return CUDA_SUCCESS;
  mig_release(gpu, *lock);
  return CUDA_ERROR_DEVICE_UNAVAILABLE;
}

void mig_release(int gpu, int lock) {
  if (lock >= 0) allot_mig_unlock(lock, gpu);
}
