// SPDX-License-Identifier: Apache-2.0
// Opening and mapping the files that processes share: the ledger's, the leases', the simulated
// machine's. Errors are negative errno values; -EINVAL is a file that is too short or not ours.
#ifndef ALLOTMENT_MAPPING_H
#define ALLOTMENT_MAPPING_H

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static inline int allot_path_in(const char *directory, const char *name, char *path, size_t size) {
  int length = snprintf(path, size, "%s/%s", directory, name);
  return length < 0 || (size_t)length >= size ? -ENAMETOOLONG : 0;
}

// The file of the seat of that serial.
static inline int allot_seat_path(const char *seats, uint64_t serial, char *path, size_t size) {
  int length = snprintf(path, size, "%s/%llu", seats, (unsigned long long)serial);
  return length < 0 || (size_t)length >= size ? -ENAMETOOLONG : 0;
}

// Does not wait for a pipe that another user has put there: it is too short to be mapped.
static inline int allot_open(const char *path, int flags) {
  int descriptor = open(path, flags | O_CLOEXEC | O_NONBLOCK, 0600);
  return descriptor < 0 ? -errno : descriptor;
}

// Not through a link that another user has put there.
static inline int allot_open_in(const char *directory, const char *name, int flags) {
  char path[4096];
  int error = allot_path_in(directory, name, path, sizeof path);
  return error != 0 ? error : allot_open(path, flags | O_NOFOLLOW);
}

// Maps the first `size` bytes of a file that has `least` bytes or more.
static inline int allot_map(int descriptor, size_t size, uint64_t least, int protection,
                            void **mapped) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) return -errno;
  if ((uint64_t)status.st_size < least) return -EINVAL;
  void *made = mmap(NULL, size, protection, MAP_SHARED, descriptor, 0);
  if (made == MAP_FAILED) return -errno;
  *mapped = made;
  return 0;
}

static inline int allot_map_opened(int descriptor, size_t size, int flags, void **mapped) {
  if (descriptor < 0) return descriptor;
  int protection = flags == O_RDWR ? PROT_READ | PROT_WRITE : PROT_READ;
  int error = allot_map(descriptor, size, size, protection, mapped);
  close(descriptor);
  return error;
}

// Maps the first `size` bytes of a file that has as many. `flags`: O_RDONLY or O_RDWR, which is
// what may be done with the mapping as well.
static inline int allot_map_file(const char *path, size_t size, int flags, void **mapped) {
  return allot_map_opened(allot_open(path, flags), size, flags, mapped);
}

static inline int allot_map_in(const char *directory, const char *name, size_t size, int flags,
                               void **mapped) {
  return allot_map_opened(allot_open_in(directory, name, flags), size, flags, mapped);
}

#endif
