// SPDX-License-Identifier: Apache-2.0
// Stops a process, but not while it holds a lock of its simulated GPU: no other process could
// compute until it goes on, and no GPU has such a lock.
//
//     host_stop MACHINE PID
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulated/engine/state.h"

#define WAITERS 0x80000000u

// Whether every thread of it is stopped. Ends this program if there is no such process any more.
static bool is_stopped(pid_t pid) {
  char path[300], line[1024];
  snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR *threads = opendir(path);
  bool all = true;
  if (threads == NULL) exit(1);
  for (const struct dirent *entry; (entry = readdir(threads)) != NULL;) {
    if (entry->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, entry->d_name);
    FILE *file = fopen(path, "r");
    if (file == NULL) continue;  // it has ended
    const char *name_end = fgets(line, sizeof line, file) != NULL ? strrchr(line, ')') : NULL;
    fclose(file);
    char state = name_end != NULL ? name_end[2] : 'X';
    if (state == 'Z' && atoi(entry->d_name) == pid) exit(1);
    if (state != 'T' && state != 'Z' && state != 'X') all = false;
  }
  closedir(threads);
  return all;
}

static bool holds_a_lock(const allot_machine *machine, pid_t pid) {
  for (int place = 0; place < ALLOT_MACHINE_PLACES; place++) {
    uint32_t holder = __atomic_load_n(&machine->engines[place].lock, __ATOMIC_SEQ_CST) & ~WAITERS;
    if (holder != 0 && machine->processes[holder - 1].pid == pid) return true;
  }
  return false;
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  int descriptor = open(argv[1], O_RDONLY);
  const allot_machine *machine = mmap(NULL, sizeof *machine, PROT_READ, MAP_SHARED, descriptor, 0);
  if (machine == MAP_FAILED) return 1;
  pid_t pid = atoi(argv[2]);
  for (;;) {
    if (kill(pid, SIGSTOP) != 0) return 1;
    while (!is_stopped(pid)) usleep(100);
    if (!holds_a_lock(machine, pid)) return 0;
    kill(pid, SIGCONT);
    usleep(1000);
  }
}
