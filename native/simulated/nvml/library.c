// SPDX-License-Identifier: Apache-2.0
// The library's life: init and shutdown with their count, and how a handle becomes a GPU.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "simulated/nvml/library.h"

// A device handle is the address of one of these: a GPU's at its number, a MIG device's at its
// place. As the real ones, a MIG device's handle names another one when it was made anew.
struct nvmlDevice_st {
  int nothing;  // wider than a byte: what lies beside a handle is none
};

static struct nvmlDevice_st devices[ALLOT_MACHINE_PLACES];

// A machine that was opened once. It stays mapped after nvmlShutdown: a call that hangs on it may
// still be under way, and the next nvmlInit most likely wants it again.
typedef struct known_machine {
  allot_handle handle;
  dev_t device;
  ino_t inode;
  struct known_machine *next;
} known_machine;

static pthread_mutex_t life = PTHREAD_MUTEX_INITIALIZER;

// Files are opened under it: until it is free again the thread is not cancelled.
static int hold_life(void) {
  int cancel_state;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
  pthread_mutex_lock(&life);
  return cancel_state;
}

static void release_life(int cancel_state) {
  pthread_mutex_unlock(&life);
  pthread_setcancelstate(cancel_state, NULL);
}
static unsigned int references;  // written under `life`, read by every call
static known_machine *known;
static allot_handle *engine;  // of the current machine, from nvmlInit on

static nvmlReturn_t of_errno(int error) {
  switch (error) {
    case 0:
      return NVML_SUCCESS;
    case -EACCES:
    case -EPERM:
      return NVML_ERROR_NO_PERMISSION;
    case -EPROTO:
      return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    case -EINVAL:
      return NVML_ERROR_UNKNOWN;
    default:
      return NVML_ERROR_DRIVER_NOT_LOADED;
  }
}

static known_machine *find_known(const char *path) {
  struct stat status;
  if (stat(path, &status) != 0) return NULL;
  for (known_machine *each = known; each != NULL; each = each->next) {
    if (each->device == status.st_dev && each->inode == status.st_ino) return each;
  }
  return NULL;
}

static nvmlReturn_t open_machine(known_machine **opened) {
  known_machine *made = calloc(1, sizeof *made);
  if (made == NULL) return NVML_ERROR_MEMORY;
  struct stat status;
  nvmlReturn_t result = of_errno(allot_machine_open(&made->handle));
  if (result == NVML_SUCCESS && stat(made->handle.path, &status) != 0) {
    allot_machine_close(&made->handle);
    result = NVML_ERROR_DRIVER_NOT_LOADED;
  }
  if (result != NVML_SUCCESS) {
    free(made);
    return result;
  }
  made->device = status.st_dev;
  made->inode = status.st_ino;
  made->next = known;
  *opened = known = made;
  return NVML_SUCCESS;
}

// A new machine may have GPUs that are cut already, of which nobody has written yet.
static void show_cuts(allot_handle *handle) {
  if (allot_is_tenant()) return;
  for (int index = 0; index < (int)handle->machine->description.gpu_count; index++) {
    nvml_gpu gpu = nvml_bare(handle, index);
    if (!allot_mig_is_on(handle, index) || nvml_has_capabilities(&gpu)) continue;
    int lock = allot_mig_lock(handle, index);
    if (lock < 0) continue;
    nvml_fit_capabilities(&gpu);
    allot_mig_unlock(lock, index);
  }
}

static nvmlReturn_t start(void) {
  const char *path = getenv(ALLOT_MACHINE_ENV);
  known_machine *found =
      find_known(path == NULL || *path == '\0' ? ALLOT_MACHINE_DEFAULT_PATH : path);
  nvmlReturn_t result = found != NULL ? NVML_SUCCESS : open_machine(&found);
  if (result != NVML_SUCCESS) return result;
  if (allot_load(&found->handle.machine->faults.nvml_not_loaded) != 0) {
    return NVML_ERROR_DRIVER_NOT_LOADED;
  }
  // A machine that is known already is opened by others now, perhaps.
  allot_store(&found->handle.nodes, allot_nodes(&found->handle));
  allot_store(&engine, &found->handle);
  show_cuts(&found->handle);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
  nvmlReturn_t result = NVML_SUCCESS;
  int cancel_state = hold_life();
  if (references == 0) result = start();
  if (result == NVML_SUCCESS) allot_store(&references, references + 1);
  release_life(cancel_state);
  return result;
}

NVML_EXPORT nvmlReturn_t nvmlInit_v2(void) {
  return nvmlInitWithFlags(0);
}

NVML_EXPORT nvmlReturn_t nvmlInit(void) {
  return nvmlInitWithFlags(0);
}

NVML_EXPORT nvmlReturn_t nvmlShutdown(void) {
  nvmlReturn_t result = NVML_ERROR_UNINITIALIZED;
  int cancel_state = hold_life();
  if (references > 0) {
    result = NVML_SUCCESS;
    allot_store(&references, references - 1);
    if (references == 0) allot_machine_detach(engine);
  }
  release_life(cancel_state);
  return result;
}

nvmlReturn_t nvml_ready(void) {
  return allot_load(&references) > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

allot_handle *nvml_engine(void) {
  return allot_load(&engine);
}

nvmlDevice_t nvml_device(int place) {
  return &devices[place];
}

bool nvml_is_mig_device(const nvml_gpu *gpu) {
  return gpu->place != gpu->index;
}

bool nvml_has_node(int gpu) {
  return (allot_load(&nvml_engine()->nodes) >> gpu & 1) != 0;
}

unsigned int nvml_index(const nvml_gpu *gpu) {
  uint32_t before = (1u << gpu->index) - 1;
  return (unsigned int)__builtin_popcount(allot_load(&nvml_engine()->nodes) & before);
}

bool nvml_is_lost(const nvml_gpu *gpu) {
  return allot_load(&gpu->faults->lost) != 0;
}

nvml_gpu nvml_bare(allot_handle *of, int index) {
  return (nvml_gpu){.index = index,
                    .place = index,
                    .description = &of->machine->description.gpus[index],
                    .faults = &of->machine->faults.gpus[index],
                    .engine = of};
}

static nvmlReturn_t resolve(nvmlDevice_t device, nvml_gpu *gpu) {
  if (nvml_ready() != NVML_SUCCESS) return NVML_ERROR_UNINITIALIZED;
  allot_machine *machine = nvml_engine()->machine;
  uintptr_t offset = (uintptr_t)device - (uintptr_t)devices;
  uintptr_t index = offset / sizeof devices[0];
  if (offset % sizeof devices[0] != 0 || index >= ALLOT_MACHINE_PLACES)
    return NVML_ERROR_INVALID_ARGUMENT;
  int place = (int)index, number = allot_place_gpu(place);
  if (number >= (int)machine->description.gpu_count || !nvml_has_node(number)) {
    return NVML_ERROR_INVALID_ARGUMENT;
  }
  if (place != number &&
      (allot_mig_compute(nvml_engine(), place) == NULL || !allot_reaches(nvml_engine(), place))) {
    return NVML_ERROR_INVALID_ARGUMENT;
  }
  *gpu = nvml_bare(nvml_engine(), number);
  gpu->place = place;
  return NVML_SUCCESS;
}

nvmlReturn_t nvml_find(nvmlDevice_t device, nvml_gpu *gpu) {
  nvmlReturn_t result = resolve(device, gpu);
  if (result != NVML_SUCCESS) return result;
  return nvml_is_mig_device(gpu) ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t nvml_ask(const nvml_gpu *gpu) {
  allot_wait_out(&gpu->faults->hang_us);
  return nvml_is_lost(gpu) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t nvml_enter(nvmlDevice_t device, nvml_gpu *gpu) {
  nvmlReturn_t result = nvml_find(device, gpu);
  return result == NVML_SUCCESS ? nvml_ask(gpu) : result;
}

nvmlReturn_t nvml_enter_any(nvmlDevice_t device, nvml_gpu *gpu) {
  nvmlReturn_t result = resolve(device, gpu);
  return result == NVML_SUCCESS ? nvml_ask(gpu) : result;
}

// The engine is moved along under a lock that names its holder, so this process needs a slot. Those
// who only count GPUs never get here.
void nvml_advance(const nvml_gpu *gpu) {
  int cancel_state = hold_life();
  bool attached = allot_machine_attached(gpu->engine) ||
                  allot_machine_attach(gpu->engine, ALLOT_PROCESS_MONITOR) == 0;
  release_life(cancel_state);
  // With every slot taken the figures are as old as their last reader.
  if (attached) allot_gpu_advance(gpu->engine, gpu->index);
}

nvmlReturn_t nvml_copy_text(const char *text, char *buffer, unsigned int length) {
  size_t size = strlen(text) + 1;
  if (size > length) return NVML_ERROR_INSUFFICIENT_SIZE;
  memcpy(buffer, text, size);
  return NVML_SUCCESS;
}

unsigned long long nvml_time_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (unsigned long long)now.tv_sec * 1000000u + (unsigned long long)now.tv_nsec / 1000u;
}

// Works before nvmlInit, as the real one does.
NVML_EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
  if (version == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  if (nvml_ready() == NVML_SUCCESS) {
    *version = (int)nvml_engine()->machine->description.cuda_version;
    return NVML_SUCCESS;
  }
  allot_handle handle;
  if (allot_machine_open(&handle) != 0) return NVML_ERROR_LIBRARY_NOT_FOUND;
  *version = (int)handle.machine->description.cuda_version;
  allot_machine_close(&handle);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
  return nvmlSystemGetCudaDriverVersion(version);
}
