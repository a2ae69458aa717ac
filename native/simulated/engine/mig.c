// SPDX-License-Identifier: Apache-2.0
// What a GPU with MIG is cut into, and where its pieces compute and count memory.
//
// Every piece has a place among the machine's engines (state.h). What is cut changes under the
// GPU's MIG lock: a lock of its own open file description, which the kernel drops with whoever
// holds it. Contexts begin under it too, so an instance never goes from under one. (A child that is
// forked meanwhile has the description too: so the lock is given back in so many words.)
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "simulated/engine/engine.h"
#include "slots.h"

// Behind the bytes of the processes' slots.
#define LOCK_BASE (ALLOT_PROCESS_LOCK_BASE + (1ll << 20))

int allot_mig_lock(const allot_handle *handle, int gpu) {
  int descriptor = open(handle->path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return -errno;
  struct flock byte = allot_slot_flock(LOCK_BASE + gpu, F_WRLCK);
  while (fcntl(descriptor, F_OFD_SETLKW, &byte) != 0) {
    if (errno == EINTR) continue;
    int error = -errno;
    close(descriptor);
    return error;
  }
  return descriptor;
}

void allot_mig_unlock(int lock, int gpu) {
  allot_slot_release(lock, LOCK_BASE + gpu);
  close(lock);
}

// ---- places ------------------------------------------------------------------------------------

int allot_place_gpu(int place) {
  return place < ALLOT_FIRST_CUT ? place : (place - ALLOT_FIRST_CUT) / ALLOT_MIG_SLOTS;
}

int allot_compute_place(const allot_handle *handle, int slot, int gpu) {
  if (slot < 0) return gpu;
  uint32_t place = allot_load(&handle->machine->processes[slot].gpus[gpu].compute_place);
  return place >= ALLOT_FIRST_CUT && place < ALLOT_MACHINE_PLACES ? (int)place : gpu;
}

int allot_memory_place(const allot_handle *handle, int slot, int gpu) {
  if (slot < 0) return gpu;
  uint32_t place = allot_load(&handle->machine->processes[slot].gpus[gpu].memory_place);
  return place >= ALLOT_FIRST_CUT && place < ALLOT_MACHINE_PLACES ? (int)place : gpu;
}

int allot_point_place(const allot_handle *handle, allot_point point) {
  return allot_compute_place(handle, ALLOT_POINT_SLOT(point), ALLOT_POINT_GPU(point));
}

static int slot_of(int place) {
  return (place - ALLOT_FIRST_CUT) % ALLOT_MIG_SLOTS;
}

static allot_gpu_mig *mig_of(const allot_handle *handle, int gpu) {
  return &handle->machine->mig.gpus[gpu];
}

const allot_mig_profile *allot_mig_profile_of(const allot_handle *handle, int gpu, uint32_t place) {
  static const allot_mig_profile none;
  if (place >= ALLOT_MIG_PROFILES) return &none;
  return &handle->machine->description.gpus[gpu].mig_profiles[place];
}

bool allot_mig_is_on(const allot_handle *handle, int gpu) {
  return allot_load(&mig_of(handle, gpu)->enabled) != 0;
}

int allot_mig_around(const allot_handle *handle, int gpu, int slot) {
  for (int start = slot; start >= 0; start--) {
    const allot_gpu_instance *instance = &mig_of(handle, gpu)->instances[start];
    if (!allot_load(&instance->there)) continue;
    uint32_t size = allot_mig_profile_of(handle, gpu, allot_load(&instance->profile))->size;
    return start + (int)size > slot ? start : -1;
  }
  return -1;
}

allot_compute_instance *allot_mig_compute(const allot_handle *handle, int place) {
  if (place < ALLOT_FIRST_CUT || place >= ALLOT_MACHINE_PLACES) return NULL;
  int gpu = allot_place_gpu(place), slot = slot_of(place);
  allot_compute_instance *compute = &mig_of(handle, gpu)->computes[slot];
  if (!allot_load(&compute->there) || allot_mig_around(handle, gpu, slot) < 0) return NULL;
  return compute;
}

static int start_of(const allot_handle *handle, int place) {
  int gpu = allot_place_gpu(place), start = allot_mig_around(handle, gpu, slot_of(place));
  return start >= 0 ? start : slot_of(place);
}

const allot_mig_profile *allot_mig_profile_at(const allot_handle *handle, int place) {
  int gpu = allot_place_gpu(place);
  const allot_gpu_instance *around = &mig_of(handle, gpu)->instances[start_of(handle, place)];
  return allot_mig_profile_of(handle, gpu, allot_load(&around->profile));
}

void allot_mig_name(const allot_handle *handle, int place, char *name, size_t size) {
  int gpu = allot_place_gpu(place);
  const char *whole = handle->machine->description.gpus[gpu].name;
  const allot_mig_profile *profile = allot_mig_profile_at(handle, place);
  unsigned int slices = allot_load(&mig_of(handle, gpu)->computes[slot_of(place)].slices);
  if (slices == profile->slices) {
    snprintf(name, size, "%s MIG %s", whole, profile->name);
  } else {
    snprintf(name, size, "%s MIG %uc.%s", whole, slices, profile->name);
  }
}

unsigned int allot_mig_ids(const allot_handle *handle, int place) {
  const allot_gpu_mig *mig = mig_of(handle, allot_place_gpu(place));
  return allot_load(&mig->instances[start_of(handle, place)].id) << 8 |
         allot_load(&mig->computes[slot_of(place)].id);
}

int allot_mig_list(const allot_handle *handle, int gpu, int places[ALLOT_MIG_SLOTS]) {
  int count = 0;
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    int place = ALLOT_CUT(gpu, slot);
    if (allot_mig_compute(handle, place) == NULL || !allot_reaches(handle, place)) continue;
    int at = count++;
    for (; at > 0; at--) {
      if (allot_mig_ids(handle, places[at - 1]) < allot_mig_ids(handle, place)) break;
      places[at] = places[at - 1];
    }
    places[at] = place;
  }
  return count;
}

int allot_mig_find(const allot_handle *handle, const char *uuid) {
  for (int place = ALLOT_FIRST_CUT; place < ALLOT_MACHINE_PLACES; place++) {
    const allot_compute_instance *compute = allot_mig_compute(handle, place);
    if (compute != NULL && strcmp(compute->uuid, uuid) == 0) return place;
  }
  return -1;
}

int allot_mig_memory_place(const allot_handle *handle, int place) {
  int gpu = allot_place_gpu(place);
  if (place < ALLOT_FIRST_CUT) return place;
  int start = allot_mig_around(handle, gpu, slot_of(place));
  return start < 0 ? place : ALLOT_CUT(gpu, start);
}

uint64_t allot_place_capacity(const allot_handle *handle, int place) {
  int gpu = allot_place_gpu(place);
  const allot_gpu_description *description = &handle->machine->description.gpus[gpu];
  if (place < ALLOT_FIRST_CUT) {
    uint64_t total = description->memory_total, kept = description->memory_reserved;
    return total > kept ? total - kept : 0;
  }
  const allot_gpu_instance *instance = &mig_of(handle, gpu)->instances[slot_of(place)];
  return allot_mig_profile_of(handle, gpu, allot_load(&instance->profile))->memory_bytes;
}

uint32_t allot_place_multiprocessors(const allot_handle *handle, int place) {
  int gpu = allot_place_gpu(place);
  uint32_t count = handle->machine->description.gpus[gpu].sm_count;
  if (place >= ALLOT_FIRST_CUT) {
    count = allot_load(&mig_of(handle, gpu)->computes[slot_of(place)].sm_count);
  }
  return count > 0 ? count : 1;
}

// ---- who uses what -----------------------------------------------------------------------------

bool allot_mig_in_use(allot_handle *handle, int gpu, int from, int to) {
  allot_machine_reap(handle);
  for (int slot = 0; slot < allot_machine_high(handle); slot++) {
    if (!allot_machine_taken(handle, slot)) continue;
    if (allot_load(&handle->machine->processes[slot].gpus[gpu].contexts) == 0) continue;
    int place = allot_compute_place(handle, slot, gpu);
    if (place == gpu || (slot_of(place) >= from && slot_of(place) < to)) return true;
  }
  return false;
}
