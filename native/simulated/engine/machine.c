// SPDX-License-Identifier: Apache-2.0
// Finding and mapping the machine file.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "mapping.h"
#include "simulated/engine/engine.h"

_Static_assert(sizeof(allot_machine_description) % 8 == 0, "faults follow without a gap");
_Static_assert(sizeof(allot_machine) <= ALLOT_MACHINE_FILE_BYTES, "the file has room");
_Static_assert(sizeof(allot_work) == 64, "a work is one cache line");
_Static_assert(ALLOT_MACHINE_PROCESSES <= 512 && ALLOT_MACHINE_GPUS <= 16, "points have room");

uint64_t allot_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int map_machine(allot_handle *handle, int descriptor) {
  void *mapped = NULL;
  int error = allot_map(descriptor, sizeof(allot_machine), ALLOT_MACHINE_FILE_BYTES,
                        PROT_READ | PROT_WRITE, &mapped);
  if (error != 0) return error;
  const allot_machine_description *description = mapped;
  if (description->magic != ALLOT_MACHINE_MAGIC) {
    error = -EINVAL;
  } else if (description->version != ALLOT_MACHINE_VERSION) {
    error = -EPROTO;
  } else if (description->gpu_count > ALLOT_MACHINE_GPUS) {
    error = -EINVAL;
  }
  if (error != 0) {
    munmap(mapped, sizeof(allot_machine));
    return error;
  }
  handle->machine = mapped;
  handle->nodes = ALLOT_ALL_NODES(description->gpu_count);
  return 0;
}

int allot_machine_open(allot_handle *handle) {
  const char *path = getenv(ALLOT_MACHINE_ENV);
  int error = allot_machine_open_at(
      handle, path == NULL || *path == '\0' ? ALLOT_MACHINE_DEFAULT_PATH : path);
  if (error == 0) handle->nodes = allot_nodes(handle);
  return error;
}

int allot_machine_open_at(allot_handle *handle, const char *path) {
  *handle = (allot_handle){.slot = -1};
  if (strlen(path) >= sizeof handle->path) return -ENAMETOOLONG;
  strcpy(handle->path, path);
  int descriptor = allot_open(path, O_RDWR);
  if (descriptor < 0) return descriptor;
  int error = map_machine(handle, descriptor);
  close(descriptor);
  return error;
}

void allot_machine_close(allot_handle *handle) {
  allot_machine_detach(handle);
  if (handle->machine != NULL) munmap(handle->machine, sizeof(allot_machine));
  *handle = (allot_handle){.slot = -1};
}
