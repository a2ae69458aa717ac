// SPDX-License-Identifier: Apache-2.0
// The library's life: init and shutdown with their count, and how a handle becomes a GPU.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "simulated/nvml/library.h"

// A device handle is the address of one of these.
struct nvmlDevice_st {
  int index;
};

static struct nvmlDevice_st devices[ALLOT_MACHINE_GPUS] = {
    {0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}};

// A machine that was opened once. It stays mapped after nvmlShutdown: a call that hangs on it may
// still be under way, and the next nvmlInit most likely wants it again.
typedef struct known_machine {
  allot_handle handle;
  dev_t device;
  ino_t inode;
  struct known_machine *next;
} known_machine;

static pthread_mutex_t life = PTHREAD_MUTEX_INITIALIZER;
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
  allot_store(&found->handle.nodes, allot_nodes(&found->handle.machine->description));
  allot_store(&engine, &found->handle);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
  nvmlReturn_t result = NVML_SUCCESS;
  pthread_mutex_lock(&life);
  if (references == 0) result = start();
  if (result == NVML_SUCCESS) allot_store(&references, references + 1);
  pthread_mutex_unlock(&life);
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
  pthread_mutex_lock(&life);
  if (references > 0) {
    result = NVML_SUCCESS;
    allot_store(&references, references - 1);
    if (references == 0) allot_machine_detach(engine);
  }
  pthread_mutex_unlock(&life);
  return result;
}

nvmlReturn_t nvml_ready(void) {
  return allot_load(&references) > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

allot_handle *nvml_engine(void) {
  return allot_load(&engine);
}

nvmlDevice_t nvml_device(int index) {
  return &devices[index];
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

nvmlReturn_t nvml_find(nvmlDevice_t device, nvml_gpu *gpu) {
  if (nvml_ready() != NVML_SUCCESS) return NVML_ERROR_UNINITIALIZED;
  allot_machine *machine = nvml_engine()->machine;
  uintptr_t offset = (uintptr_t)device - (uintptr_t)devices;
  uintptr_t index = offset / sizeof devices[0];
  if (offset % sizeof devices[0] != 0 || index >= machine->description.gpu_count ||
      !nvml_has_node((int)index)) {
    return NVML_ERROR_INVALID_ARGUMENT;
  }
  *gpu = (nvml_gpu){.index = (int)index,
                    .description = &machine->description.gpus[index],
                    .faults = &machine->faults.gpus[index],
                    .engine = nvml_engine()};
  return NVML_SUCCESS;
}

static void sleep_us(uint32_t microseconds) {
  struct timespec left = {.tv_sec = microseconds / 1000000u,
                          .tv_nsec = (long)(microseconds % 1000000u) * 1000};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

nvmlReturn_t nvml_enter(nvmlDevice_t device, nvml_gpu *gpu) {
  nvmlReturn_t result = nvml_find(device, gpu);
  if (result != NVML_SUCCESS) return result;
  uint32_t hang_us = allot_load(&gpu->faults->hang_us);
  if (hang_us != 0) sleep_us(hang_us);
  return nvml_is_lost(gpu) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

// The engine is moved along under a lock that names its holder, so this process needs a slot. Those
// who only count GPUs never get here.
void nvml_advance(const nvml_gpu *gpu) {
  static pthread_mutex_t attaching = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&attaching);
  bool attached = allot_machine_attached(gpu->engine) ||
                  allot_machine_attach(gpu->engine, ALLOT_PROCESS_MONITOR) == 0;
  pthread_mutex_unlock(&attaching);
  // With every slot taken the figures are as old as their last reader.
  if (attached) allot_engine_advance(gpu->engine, gpu->index);
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
