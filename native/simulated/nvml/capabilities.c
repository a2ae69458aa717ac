// SPDX-License-Identifier: Apache-2.0
// The files by which a driver tells the device nodes of MIG: /proc/driver/nvidia/capabilities.
//
// Nobody can put files into /proc, so a machine has the same tree beside its file, in the folder
// `capabilities`: mig/config, mig/monitor, gpu<minor>/mig/gi<id>/access and ci<id>/access below.
// It follows from what the GPUs are cut into and is made to fit after each change; a process that
// ends in between leaves it to the next one. Where the folder cannot be written there is none.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated/nvml/library.h"

// As nvidia-caps numbers them (/proc/driver/nvidia-caps/mig-minors).
enum {
  CONFIG_MINOR = 1,
  MONITOR_MINOR = 2,
  FIRST_MINOR = 3,
  GPU_INSTANCES = 15,
  COMPUTE_INSTANCES = 8,
  MINORS_OF_INSTANCE = 1 + COMPUTE_INSTANCES,
};

typedef struct folder {
  char path[1200];
  size_t length;
} folder;

// The folder inside this one; made if it is to be there.
static folder inside(const folder *outer, const char *name, unsigned int number, bool make) {
  folder inner = *outer;
  int more = snprintf(inner.path + inner.length, sizeof inner.path - inner.length, name, number);
  inner.length += (size_t)more;
  if (make) mkdir(inner.path, 0755);
  return inner;
}

// Appears whole, and is then never changed: the same instance has the same number always.
static void tell(const folder *where, const char *name, int minor) {
  char path[1300], temporary[1300];
  snprintf(path, sizeof path, "%s/%s", where->path, name);
  snprintf(temporary, sizeof temporary, "%s/.%s", where->path, name);
  if (access(path, F_OK) == 0) return;
  int descriptor = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
  if (descriptor < 0) return;
  bool written =
      dprintf(descriptor, "DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
              minor) > 0;
  close(descriptor);
  if (written) rename(temporary, path);
}

static void forget(const folder *where) {
  char path[1300];
  snprintf(path, sizeof path, "%s/access", where->path);
  unlink(path);
  rmdir(where->path);
}

static const allot_compute_instance *find_compute(const nvml_gpu *gpu, int start, unsigned int id) {
  if (start < 0) return NULL;
  int end = start + (int)nvml_cut_profile(gpu, start)->size;
  for (int slot = start; slot < end; slot++) {
    const allot_compute_instance *each = &gpu->engine->machine->mig.gpus[gpu->index].computes[slot];
    if (allot_load(&each->there) && allot_load(&each->id) == id) return each;
  }
  return NULL;
}

static int find_cut(const nvml_gpu *gpu, unsigned int id) {
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    const allot_gpu_instance *each = nvml_cut(gpu, slot);
    if (allot_load(&each->there) && allot_load(&each->id) == id) return slot;
  }
  return -1;
}

static void fit_instance(const nvml_gpu *gpu, const folder *mig, unsigned int id) {
  int start = find_cut(gpu, id);
  int minor =
      FIRST_MINOR + ((int)gpu->description->minor * GPU_INSTANCES + (int)id) * MINORS_OF_INSTANCE;
  folder own = inside(mig, "/gi%u", id, start >= 0);
  if (access(own.path, F_OK) != 0) return;
  for (unsigned int compute = 0; compute < COMPUTE_INSTANCES; compute++) {
    bool is_there = find_compute(gpu, start, compute) != NULL;
    folder inner = inside(&own, "/ci%u", compute, is_there);
    if (is_there) tell(&inner, "access", minor + 1 + (int)compute);
    if (!is_there) forget(&inner);
  }
  if (start >= 0) tell(&own, "access", minor);
  if (start < 0) forget(&own);
}

static folder top_of(const nvml_gpu *gpu) {
  folder top;
  const char *end = strrchr(gpu->engine->path, '/');
  int length = end != NULL ? (int)(end - gpu->engine->path) : 0;
  int written = snprintf(top.path, sizeof top.path, "%.*s%scapabilities", length, gpu->engine->path,
                         end != NULL ? "/" : "");
  top.length = (size_t)written;
  return top;
}

bool nvml_has_capabilities(const nvml_gpu *gpu) {
  folder top = top_of(gpu), own = inside(&top, "/gpu%u", gpu->description->minor, false);
  return access(own.path, F_OK) == 0;
}

void nvml_fit_capabilities(const nvml_gpu *gpu) {
  folder top = top_of(gpu);
  if (mkdir(top.path, 0755) != 0 && errno != EEXIST) return;
  folder all = inside(&top, "/mig", 0, true);
  tell(&all, "config", CONFIG_MINOR);
  tell(&all, "monitor", MONITOR_MINOR);
  folder own = inside(&top, "/gpu%u", gpu->description->minor, true);
  folder mig = inside(&own, "/mig", 0, true);
  for (unsigned int id = 0; id < GPU_INSTANCES; id++) fit_instance(gpu, &mig, id);
}
