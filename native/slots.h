// SPDX-License-Identifier: Apache-2.0
// The slots of tables that processes share: how one is claimed, who owns it, and how its owner is
// described. The kernel knows the owner, and forgets it with the process, however that ends.
//
// An owner has an open-file-description write lock on the slot's own byte of the file (which lies
// beyond its end, so that it need not exist). A mapping keeps the description, and with it the
// lock, after its descriptor is closed: programs close descriptors that they do not know. Children
// do not get the mapping (MADV_DONTFORK), but one that is forked in the midst of allot_slot_claim
// would: who attaches has to hold forks of other threads back meanwhile.
#ifndef ALLOTMENT_SLOTS_H
#define ALLOTMENT_SLOTS_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static inline struct flock allot_slot_flock(int64_t byte, short type) {
  return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
}

// Locks the byte for this open file description: 1 done, 0 it is someone else's, or negative errno.
static inline int allot_slot_try(int descriptor, int64_t byte) {
  struct flock lock = allot_slot_flock(byte, F_WRLCK);
  if (fcntl(descriptor, F_OFD_SETLK, &lock) == 0) return 1;
  return errno == EAGAIN || errno == EACCES ? 0 : -errno;
}

// A lock for reading, which no reader of the file can keep from its owner: shows others that it
// lives. 0 or a negative errno.
static inline int allot_slot_show(int descriptor, int64_t byte) {
  struct flock lock = allot_slot_flock(byte, F_RDLCK);
  return fcntl(descriptor, F_OFD_SETLK, &lock) == 0 ? 0 : -errno;
}

static inline void allot_slot_release(int descriptor, int64_t byte) {
  struct flock lock = allot_slot_flock(byte, F_UNLCK);
  fcntl(descriptor, F_OFD_SETLK, &lock);
}

// Has any other open file description a lock on one of the bytes? Yes, if that cannot be known: a
// running process must never be taken for dead. A descriptor for reading is enough.
static inline bool allot_slot_any_owned(int descriptor, int64_t byte, int count) {
  struct flock lock = allot_slot_flock(byte, F_WRLCK);
  lock.l_len = count;
  return fcntl(descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static inline bool allot_slot_is_owned(int descriptor, int64_t byte) {
  return allot_slot_any_owned(descriptor, byte, 1);
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

// May a slot be claimed that has no owner? Asked with its lock held.
typedef bool allot_slot_check(void *table, int slot);

// Claims the first slot of `count` that has no owner and passes the check (NULL: any). Their locks
// begin at `base`. Its number, -ENOSPC, or another negative errno.
static inline int allot_slot_claim_if(int descriptor, int64_t base, int count,
                                      allot_slot_check *check, void *table, void **keeper) {
  for (int slot = 0; slot < count; slot++) {
    int locked = allot_slot_try(descriptor, base + slot);
    if (locked < 0) return locked;
    if (locked == 0) continue;
    if (check != NULL && !check(table, slot)) {
      allot_slot_release(descriptor, base + slot);
      continue;
    }
    int error = allot_slot_keep(descriptor, keeper);
    return error == 0 ? slot : error;
  }
  return -ENOSPC;
}

static inline int allot_slot_claim(int descriptor, int64_t base, int count, void **keeper) {
  return allot_slot_claim_if(descriptor, base, count, NULL, NULL, keeper);
}

// Slots at `*high` and above were never taken: this one is.
static inline void allot_slot_note_high(uint32_t *high, int slot) {
  uint32_t seen = __atomic_load_n(high, __ATOMIC_SEQ_CST);
  while (seen <= (uint32_t)slot &&
         !__atomic_compare_exchange_n(high, &seen, (uint32_t)slot + 1, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST)) {
  }
}

// ---- the owner, as others see it ----

static inline size_t allot_read_start(const char *path, char *buffer, size_t size) {
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return 0;
  ssize_t got = read(descriptor, buffer, size);
  close(descriptor);
  return got < 0 ? 0 : (size_t)got;
}

// A /proc/<pid>/stat from the end of field 2 on, which may hold blanks and parentheses; NULL if it
// cannot be read.
static inline const char *allot_read_stat(const char *path, char *text, size_t size) {
  text[allot_read_start(path, text, size - 1)] = '\0';
  return strrchr(text, ')');
}

// Has the process ended, and its parent not asked for its status? Field 3.
static inline bool allot_is_zombie(const char *path) {
  char text[1024];
  const char *at = allot_read_stat(path, text, sizeof text);
  return at != NULL && (strncmp(at, ") Z", 3) == 0 || strncmp(at, ") X", 3) == 0);
}

// Field 22, 0 if it cannot be read.
static inline uint64_t allot_start_time(const char *path) {
  char text[1024];
  uint64_t start = 0;
  int blanks = 0;
  for (const char *at = allot_read_stat(path, text, sizeof text);
       at != NULL && *at != '\0' && blanks <= 20; at++) {
    if (*at == ' ') blanks++;
    if (blanks == 20 && *at >= '0' && *at <= '9') start = start * 10 + (uint64_t)(*at - '0');
  }
  return start;
}

// The start of the calling process's command line, blanks for NULs.
static inline void allot_own_command(char *command, size_t size) {
  memset(command, 0, size);
  size_t length = allot_read_start("/proc/self/cmdline", command, size - 1);
  for (size_t i = 0; i < length; i++) {
    if (command[i] == '\0') command[i] = ' ';
  }
  while (length > 0 && command[length - 1] == ' ') command[--length] = '\0';
}

#endif
