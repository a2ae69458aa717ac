// SPDX-License-Identifier: Apache-2.0
// Which GPUs a process can reach: what the device nodes of its container are to real ones.
//
// ALLOTMENT_SIMULATED_DEVICES names their UUIDs, else the file at ALLOT_NODES_DEFAULT_PATH, which a
// share mounts. With neither, all are there. Whoever may change the variable or the file may reach
// more: as with real nodes, that is for who makes the container.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated/engine/engine.h"

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

static uint32_t named(const allot_machine_description *description, const char *list) {
  uint32_t nodes = 0;
  for (uint32_t gpu = 0; gpu < description->gpu_count; gpu++) {
    if (names(list, description->gpus[gpu].uuid)) nodes |= 1u << gpu;
  }
  return nodes;
}

uint32_t allot_nodes(const allot_machine_description *description) {
  const char *list = getenv(ALLOT_NODES_ENV);
  if (list != NULL) return named(description, list);
  int descriptor = open(ALLOT_NODES_DEFAULT_PATH, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return ALLOT_ALL_NODES(description->gpu_count);
  // Longer than the UUIDs of all the GPUs that a machine can have.
  char text[ALLOT_MACHINE_GPUS * sizeof description->gpus[0].uuid + 1];
  ssize_t size = read(descriptor, text, sizeof text - 1);
  close(descriptor);
  text[size > 0 ? size : 0] = '\0';
  return named(description, text);
}
