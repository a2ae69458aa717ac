// SPDX-License-Identifier: Apache-2.0
// Memory files from hand to hand.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulated/cuda/virtual.h"

#define LOWEST 200
#define PAGE 4096ull

void handoff_name(char *name, size_t size, const char *what, int gpu, uint64_t bytes) {
  // The machine's UUID keeps memory of one machine from being taken for another's.
  snprintf(name, size, "allotment-%s %d %llu %s", what, gpu, (unsigned long long)bytes,
           driver_description(gpu)->uuid);
}

bool handoff_read_name(int descriptor, const char *what, int *gpu, uint64_t *bytes) {
  char path[64], link[256], wanted[32], uuid[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(path, link, sizeof link - 1);
  if (length <= 0) return false;
  link[length] = '\0';
  int used = snprintf(wanted, sizeof wanted, "/memfd:allotment-%s ", what);
  if (strncmp(link, wanted, (size_t)used) != 0) return false;
  unsigned long long size;
  if (sscanf(link + used, "%d %llu %63s", gpu, &size, uuid) != 3) return false;
  if (*gpu < 0 || *gpu >= (int)driver.machine.machine->description.gpu_count) return false;
  *bytes = size;
  return strcmp(uuid, driver_description(*gpu)->uuid) == 0;
}

int handoff_keep(int descriptor) {
  return fcntl(descriptor, F_DUPFD_CLOEXEC, LOWEST);
}

int handoff_open(int pid, int descriptor) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
  return open(path, O_RDWR | O_CLOEXEC);
}

range *handoff_map_locked(int descriptor, uint64_t offset, uint64_t size, int gpu,
                          enum range_kind kind) {
  uint64_t skipped = offset % PAGE;
  size_t mapped_size = (size_t)((skipped + size + PAGE - 1) / PAGE * PAGE);
  char *mapped = mmap(NULL, mapped_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                      descriptor, (off_t)(offset - skipped));
  if (mapped == MAP_FAILED) return NULL;
  madvise(mapped, mapped_size, MADV_DONTFORK);
  range *added = range_add((CUdeviceptr)(uintptr_t)mapped + skipped, size, kind, gpu);
  if (added == NULL) {
    munmap(mapped, mapped_size);
    return NULL;
  }
  added->accessible = true;
  return added;
}

void imported_free_locked(range *freed) {
  CUdeviceptr base = freed->base / PAGE * PAGE;
  uint64_t size = (freed->base - base + freed->size + PAGE - 1) / PAGE * PAGE;
  munmap((void *)(uintptr_t)base, size);
}
