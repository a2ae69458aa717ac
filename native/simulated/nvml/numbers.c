// SPDX-License-Identifier: Apache-2.0
// By what number a process is known to the caller.
//
// The machine has each process under the number that it knows itself by, which is 1 in many a
// container. A real driver has the kernel's own name of the process, and gives its number in the
// caller's pid namespace (open kernel modules: osFindNsPid); a process that cannot be seen from
// there, since it is of the node or of another container, it leaves out of the list. The same comes
// of looking through the caller's /proc, once for each process.
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "simulated/nvml/library.h"
#include "slots.h"

// What was found out of each slot's process, for callers in namespace `known_here`.
static pthread_mutex_t knowing = PTHREAD_MUTEX_INITIALIZER;
static uint64_t known_here;
static nvml_number known[ALLOT_MACHINE_PROCESSES];

static bool is_same(const nvml_number *one, const nvml_number *other) {
  return one->namespace_id == other->namespace_id && one->start_time == other->start_time &&
         one->inside == other->inside;
}

static bool remember(uint64_t here, nvml_number *number) {
  pthread_mutex_lock(&knowing);
  const nvml_number *before = &known[number->slot];
  bool found = known_here == here && before->namespace_id != 0 && is_same(before, number);
  if (found) number->here = before->here;
  pthread_mutex_unlock(&knowing);
  return found;
}

static void learn(uint64_t here, const nvml_number *number) {
  pthread_mutex_lock(&knowing);
  if (known_here != here) memset(known, 0, sizeof known);
  known_here = here;
  known[number->slot] = *number;
  pthread_mutex_unlock(&knowing);
}

// Does the caller's /proc have the numbers of its own namespace?
static bool is_proc_ours(void) {
  char text[32] = {0}, own[32];
  snprintf(own, sizeof own, "%d", (int)getpid());
  return readlink("/proc/self", text, sizeof text - 1) > 0 && strcmp(text, own) == 0;
}

static int number_of(const char *name) {
  int number = 0;
  for (; *name >= '0' && *name <= '9' && number < 100000000; name++) {
    number = number * 10 + (*name - '0');
  }
  return *name == '\0' ? number : 0;
}

// Is the process that the caller knows as `pid` the one that knows itself as `number` says?
static bool is_it(int pid, const nvml_number *number) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/ns/pid", pid);
  uint64_t its = allot_pid_namespace(path);
  // Another user's cannot be read, and whoever has the same number may be one of this namespace.
  if (its == 0 ? pid == number->inside : its != number->namespace_id) return false;
  return allot_number_inside(pid) == number->inside;
}

// Looks at each process once, for all that are sought.
static void look_around(nvml_number *sought[], unsigned int count) {
  DIR *folder = is_proc_ours() ? opendir("/proc") : NULL;
  if (folder == NULL) return;
  const struct dirent *entry;
  while ((entry = readdir(folder)) != NULL) {
    int pid = number_of(entry->d_name);
    if (pid <= 0) continue;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    uint64_t start_time = allot_start_time(path);
    for (unsigned int i = 0; i < count; i++) {
      if (sought[i]->here != 0 || start_time == 0) continue;
      if (sought[i]->start_time != start_time || !is_it(pid, sought[i])) continue;
      sought[i]->here = (unsigned int)pid;
    }
  }
  closedir(folder);
}

void nvml_number_here(nvml_number *numbers, unsigned int count) {
  uint64_t here = allot_pid_namespace("/proc/self/ns/pid");
  nvml_number *sought[ALLOT_MACHINE_PROCESSES];
  unsigned int left = 0;
  for (unsigned int i = 0; i < count; i++) {
    nvml_number *each = &numbers[i];
    // Without a /proc nobody knows of namespaces.
    bool is_ours = here == 0 || each->namespace_id == 0 || each->namespace_id == here;
    each->here = is_ours ? (unsigned int)each->inside : 0;
    if (!is_ours && !remember(here, each)) sought[left++] = each;
  }
  if (left == 0) return;
  look_around(sought, left);
  for (unsigned int i = 0; i < left; i++) learn(here, sought[i]);
}
