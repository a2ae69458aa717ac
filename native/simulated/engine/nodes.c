// SPDX-License-Identifier: Apache-2.0
// Which GPUs and MIG devices a process can reach: what the device nodes of its container are to
// real ones.
//
// ALLOTMENT_SIMULATED_DEVICES names their UUIDs, else the files in ALLOT_NODES_FOLDER, where each
// share mounts one. With neither, all are there. A GPU's UUID reaches all that is cut from it, a
// MIG device's that one alone and of the GPU what nvidia-smi shows beside it. Whoever may change
// the variable or the file may reach more: as with real nodes, that is for who makes the container.
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated/engine/engine.h"

#define UUID_SIZE 48
// Longer than the UUIDs of all that a machine can have.
#define LIST_SIZE (ALLOT_MACHINE_PLACES * UUID_SIZE + 1)

static const char *separators = ", \t\n";

static bool names(const char *list, const char *uuid) {
  size_t size = strlen(uuid);
  for (const char *at = list; *at != '\0';) {
    size_t length = strcspn(at, separators);
    if (length == size && strncmp(at, uuid, size) == 0) return true;
    at += length;
    at += strspn(at, separators);
  }
  return false;
}

// Adds a file's list to the text. False: there is no such file.
static bool add_list(char text[LIST_SIZE], int folder, const char *name) {
  int descriptor = openat(folder, name, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  size_t length = strlen(text);
  ssize_t size = read(descriptor, text + length, LIST_SIZE - 1 - length);
  close(descriptor);
  text[length + (size_t)(size > 0 ? size : 0)] = '\0';
  return true;
}

// The list that the process is held to, NULL: it is held to none.
static const char *read_list(char text[LIST_SIZE]) {
  const char *list = getenv(ALLOT_NODES_ENV);
  if (list != NULL) return list;
  DIR *folder = opendir(ALLOT_NODES_FOLDER);
  if (folder == NULL) return NULL;
  text[0] = '\0';
  bool is_held = false;
  const struct dirent *entry;
  while ((entry = readdir(folder)) != NULL) {
    if (entry->d_name[0] != '.' && add_list(text, dirfd(folder), entry->d_name)) is_held = true;
  }
  closedir(folder);
  return is_held ? text : NULL;
}

uint32_t allot_nodes(const allot_handle *handle) {
  const allot_machine_description *description = &handle->machine->description;
  char text[LIST_SIZE];
  const char *list = read_list(text);
  if (list == NULL) return ALLOT_ALL_NODES(description->gpu_count);
  uint32_t nodes = 0;
  for (uint32_t gpu = 0; gpu < description->gpu_count; gpu++) {
    if (names(list, description->gpus[gpu].uuid)) nodes |= 1u << gpu;
  }
  for (int place = ALLOT_FIRST_CUT; place < ALLOT_MACHINE_PLACES; place++) {
    const allot_compute_instance *compute = allot_mig_compute(handle, place);
    if (compute != NULL && names(list, compute->uuid)) nodes |= 1u << allot_place_gpu(place);
  }
  return nodes;
}

bool allot_reaches(const allot_handle *handle, int place) {
  char text[LIST_SIZE];
  const char *list = read_list(text);
  if (list == NULL) return true;
  const allot_compute_instance *compute = allot_mig_compute(handle, place);
  if (compute != NULL && names(list, compute->uuid)) return true;
  return names(list, handle->machine->description.gpus[allot_place_gpu(place)].uuid);
}

bool allot_is_tenant(void) {
  char text[LIST_SIZE];
  return read_list(text) != NULL;
}
