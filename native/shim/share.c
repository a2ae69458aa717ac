// SPDX-License-Identifier: Apache-2.0
// Finds the shares: at the fixed path of a container, which no environment can override, else the
// one where ALLOTMENT_SHARE points.
//
// A container has each of its shares in a folder of the share's id below that path. `allot run` has
// its one share at the path itself. The environment is read when the program is loaded: many
// programs clean it up before they touch a GPU. The files are looked for only when something asks,
// so that a program that never does pays nothing.
#include "share.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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
  char directories[MAX_SHARES][LONGEST];
} share_list;

static char named_directory[LONGEST];
static share_list *decided;

__attribute__((constructor)) static void note_environment(void) {
  const char *named = getenv(SHARE_VARIABLE);
  if (named != NULL && strlen(named) < sizeof named_directory) strcpy(named_directory, named);
  loader_prepare();
}

static bool has_policy(const char *directory) {
  char policy[LONGEST + sizeof "/policy"];
  snprintf(policy, sizeof policy, "%s/policy", directory);
  return access(policy, F_OK) == 0;
}

// Keeps the list sorted: every program of the container numbers the devices alike.
static void add(share_list *list, const char *directory) {
  if (!has_policy(directory)) return;
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

static void add_below(share_list *list, int folder) {
  _Alignas(entry) char buffer[2048];
  long got;
  while ((got = syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0) {
    for (long at = 0; at < got;) {
      const entry *one = (const entry *)(const void *)(buffer + at);
      char directory[LONGEST];
      snprintf(directory, sizeof directory, ALLOT_SHARE_PATH "/%s", one->name);
      if (one->name[0] != '.') add(list, directory);
      at += one->size;
    }
  }
}

static void find(share_list *list) {
  int folder = open(ALLOT_SHARE_PATH, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    add(list, ALLOT_SHARE_PATH);
    add_below(list, folder);
    close(folder);
  }
  if (list->count > 0 || named_directory[0] == '\0') return;
  strcpy(list->directories[list->count++], named_directory);
}

// Two threads may decide at once: they decide the same.
static const share_list *decide(void) {
  static share_list nothing;
  share_list *made =
      mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return &nothing;
  find(made);
  share_list *first = NULL, *kept = made->count > 0 ? made : &nothing;
  bool is_first = __atomic_compare_exchange_n(&decided, &first, kept, false, __ATOMIC_ACQ_REL,
                                              __ATOMIC_ACQUIRE);
  if (!is_first || kept != made) munmap(made, sizeof *made);
  return is_first ? kept : first;
}

static const share_list *shares(void) {
  const share_list *list = __atomic_load_n(&decided, __ATOMIC_ACQUIRE);
  return LIKELY(list != NULL) ? list : decide();
}

unsigned share_count(void) {
  return shares()->count;
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
