// SPDX-License-Identifier: Apache-2.0
// Who owns a slot of a table that processes share: the kernel knows, and forgets it with the
// process, however that ends.
//
// An owner has an open-file-description write lock on the slot's own byte of the file (which lies
// beyond its end, so that it need not exist). A mapping keeps the description, and with it the
// lock, after its descriptor is closed: programs close descriptors that they do not know. Children
// do not get the mapping (MADV_DONTFORK), but one that is forked between allot_slot_try and the end
// of allot_slot_keep would: who attaches has to hold forks of other threads back meanwhile.
#ifndef ALLOTMENT_SLOT_LOCK_H
#define ALLOTMENT_SLOT_LOCK_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

static inline struct flock allot_slot_flock(int64_t byte, short type) {
  return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
}

// Locks the byte for this open file description: 1 done, 0 it is someone else's, or negative errno.
static inline int allot_slot_try(int descriptor, int64_t byte) {
  struct flock lock = allot_slot_flock(byte, F_WRLCK);
  if (fcntl(descriptor, F_OFD_SETLK, &lock) == 0) return 1;
  return errno == EAGAIN || errno == EACCES ? 0 : -errno;
}

static inline void allot_slot_release(int descriptor, int64_t byte) {
  struct flock lock = allot_slot_flock(byte, F_UNLCK);
  fcntl(descriptor, F_OFD_SETLK, &lock);
}

// Has any other open file description the lock? Yes, if that cannot be known: a running process
// must never be taken for dead. A descriptor for reading is enough.
static inline bool allot_slot_is_owned(int descriptor, int64_t byte) {
  struct flock lock = allot_slot_flock(byte, F_WRLCK);
  return fcntl(descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// Keeps what the description has locked after the descriptor is closed, until the mapping (one
// byte) is taken away. 0 or a negative errno.
static inline int allot_slot_keep(int descriptor, void **keeper) {
  void *made = mmap(NULL, 1, PROT_READ, MAP_SHARED, descriptor, 0);
  if (made == MAP_FAILED) return -errno;
  if (madvise(made, 1, MADV_DONTFORK) != 0) {
    int error = -errno;
    munmap(made, 1);
    return error;
  }
  *keeper = made;
  return 0;
}

#endif
