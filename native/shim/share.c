// SPDX-License-Identifier: Apache-2.0
// Finds the shares: at the fixed path of a container, which no environment can override, else the
// one where ALLOTMENT_SHARE points.
//
// A container has each of its shares in a folder of the share's id below that path. `allot run` has
// its one share at the path itself. The environment is read when the program is loaded: many
// programs clean it up before they touch a GPU. The files are looked for only when something asks,
// so that a program that never does pays nothing.
#include "share.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "loader.h"

#ifndef ALLOT_SHARE_PATH
#define ALLOT_SHARE_PATH "/run/allotment/share"
#endif
#define SHARE_VARIABLE "ALLOTMENT_SHARE"
#define LONGEST 1024

typedef struct share_list {
  unsigned count;
  bool has_bare;
  char directories[MAX_SHARES][LONGEST];
} share_list;

static char named_directory[LONGEST];
static struct stat place;  // what was at the fixed path when the program was loaded
static bool has_place;
static int is_noted;
static share_list *decided;
// What cannot be read may be a share: the program gets no CUDA, and never the driver unlimited.
static share_list unreadable = {.count = 1, .directories = {ALLOT_SHARE_PATH}};
static int failure;

// Programs also change their root folder, or mount over the path, before they touch a GPU.
static void note_surroundings(void) {
  if (__atomic_exchange_n(&is_noted, 1, __ATOMIC_ACQ_REL) != 0) return;
  has_place = stat(ALLOT_SHARE_PATH, &place) == 0;
  const char *named = getenv(SHARE_VARIABLE);
  if (named != NULL && strlen(named) < sizeof named_directory) strcpy(named_directory, named);
}

__attribute__((constructor)) static void begin(void) {
  note_surroundings();
  loader_prepare();
}

static bool has_file(const char *directory, const char *name) {
  char path[LONGEST + sizeof "/policy"];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  return access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

// Keeps the list sorted: every program of the container numbers the devices alike.
static void add(share_list *list, const char *directory) {
  if (!has_file(directory, "policy")) {
    list->has_bare |= has_file(directory, "id");
    return;
  }
  unsigned at = list->count++;
  if (at >= MAX_SHARES) return;
  while (at > 0 && strcmp(list->directories[at - 1], directory) > 0) {
    memcpy(list->directories[at], list->directories[at - 1], LONGEST);
    at--;
  }
  strcpy(list->directories[at], directory);
}

// getdents64(2): opendir would take memory from the program's heap, which may be what asks.
typedef struct entry {
  uint64_t inode, offset;
  uint16_t size;
  uint8_t type;
  char name[];
} entry;

static bool add_below(share_list *list, int folder) {
  _Alignas(entry) char buffer[2048];
  long got;
  while ((got = syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0) {
    for (long at = 0; at < got;) {
      const entry *below = (const entry *)(const void *)(buffer + at);
      char directory[LONGEST];
      snprintf(directory, sizeof directory, ALLOT_SHARE_PATH "/%s", below->name);
      if (below->name[0] != '.') add(list, directory);
      at += below->size;
    }
  }
  return got == 0;
}

// False, and errno: the shares that the program was loaded in cannot be reached.
static bool is_in_place(void) {
  struct stat now;
  note_surroundings();  // constructors of other libraries may come before, and use the GPU
  if (!has_place) return true;
  if (stat(ALLOT_SHARE_PATH, &now) != 0) return false;
  errno = ENOENT;
  return now.st_dev == place.st_dev && now.st_ino == place.st_ino;
}

// False, and errno: it cannot be known which shares there are.
static bool find(share_list *list) {
  if (!is_in_place()) return false;
  int folder = open(ALLOT_SHARE_PATH, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    add(list, ALLOT_SHARE_PATH);
    bool is_read = add_below(list, folder);
    int error = errno;
    close(folder);
    errno = error;
    if (!is_read) return false;
  } else if (errno != ENOENT && errno != ENOTDIR) {
    // On a machine the path can be root's own; `allot run` has named the share of its program.
    if (errno != EACCES || named_directory[0] == '\0' || has_place) return false;
  }
  if (list->count > 0 || named_directory[0] == '\0') return true;
  strcpy(list->directories[list->count++], named_directory);
  return true;
}

// The first of two threads decides for both.
static const share_list *decide(void) {
  static share_list nothing;
  int before = errno;
  share_list *made =
      mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  share_list *first = NULL, *kept = &unreadable;
  if (made != MAP_FAILED && find(made)) {
    kept = made->count > 0 ? made : &nothing;
  } else {
    __atomic_store_n(&failure, errno, __ATOMIC_RELAXED);
  }
  bool is_first = __atomic_compare_exchange_n(&decided, &first, kept, false, __ATOMIC_ACQ_REL,
                                              __ATOMIC_ACQUIRE);
  if (made != MAP_FAILED && (!is_first || kept != made)) munmap(made, sizeof *made);
  errno = before;
  return is_first ? kept : first;
}

static const share_list *shares(void) {
  const share_list *list = __atomic_load_n(&decided, __ATOMIC_ACQUIRE);
  return LIKELY(list != NULL) ? list : decide();
}

unsigned share_count(void) {
  return shares()->count;
}

bool share_beside_bare(void) {
  return shares()->has_bare;
}

int share_failure(void) {
  if (shares() == &unreadable) return __atomic_load_n(&failure, __ATOMIC_RELAXED);
  return shares()->count == 0 || is_in_place() ? 0 : errno;
}

const char *share_directory(unsigned share) {
  return shares()->directories[share];
}

// A host program that is built with AddressSanitizer and its shared runtime refuses to start when
// any library was loaded before that runtime. The program's own definition of this goes first.
SHIM_EXPORT const char *__asan_default_options(void);
SHIM_EARLY const char *__asan_default_options(void) {
  return "verify_asan_link_order=0";
}
