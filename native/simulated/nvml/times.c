// SPDX-License-Identifier: Apache-2.0
// What no real NVML tells: how long each process has computed, exactly. For benches and tests,
// which measure what others claim against this. Needs no nvmlInit.
//
// Times are of all intervals in which at least one kernel of the process ran, in nanoseconds since
// it began. Errors are negative errno values.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "simulated/nvml/times.h"

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

typedef struct opened {
  allot_handle handle;
  struct opened *next;
} opened;

// Machines stay open, as NVML's do: the next question comes soon.
static int open_machine(const char *path, allot_handle **handle) {
  static opened *known;
  for (opened *each = known; each != NULL; each = each->next) {
    if (strcmp(each->handle.path, path) != 0) continue;
    *handle = &each->handle;
    // A forked child has not the parent's slot, and takes one of its own.
    return allot_machine_attached(*handle) ? 0
                                           : allot_machine_attach(*handle, ALLOT_PROCESS_MONITOR);
  }
  opened *made = calloc(1, sizeof *made);
  if (made == NULL) return -ENOMEM;
  int error = allot_machine_open_at(&made->handle, path);
  if (error == 0) error = allot_machine_attach(&made->handle, ALLOT_PROCESS_MONITOR);
  if (error != 0) {
    allot_machine_close(&made->handle);
    free(made);
    return error;
  }
  made->next = known;
  known = made;
  *handle = &made->handle;
  return 0;
}

int times_begin(const char *path, unsigned int gpu, allot_handle **handle) {
  if (path == NULL) path = getenv(ALLOT_MACHINE_ENV);
  if (path == NULL || *path == '\0') path = ALLOT_MACHINE_DEFAULT_PATH;
  pthread_mutex_lock(&opening);
  int error = open_machine(path, handle);
  if (error == 0 && gpu >= (*handle)->machine->description.gpu_count) error = -ENODEV;
  if (error == 0) {
    allot_machine_reap(*handle);
    allot_gpu_advance(*handle, (int)gpu);
  } else {
    pthread_mutex_unlock(&opening);
  }
  return error;
}

void times_end(void) {
  pthread_mutex_unlock(&opening);
}

int allotSimulatedTimes(const char *machine, unsigned int gpu, allot_simulated_time *times,
                        unsigned int *count, unsigned long long *busy_ns,
                        unsigned long long *now_ns) {
  if (count == NULL || (times == NULL && *count > 0)) return -EINVAL;
  allot_handle *handle;
  int error = times_begin(machine, gpu, &handle);
  if (error != 0) return error;
  unsigned int room = *count, found = 0;
  for (int slot = 0; slot < allot_machine_high(handle); slot++) {
    const allot_process *process = &handle->machine->processes[slot];
    const allot_process_gpu *part = &process->gpus[gpu];
    if (allot_load(&process->kind) != ALLOT_PROCESS_COMPUTE) continue;
    if (allot_load(&process->attaches) == 0) continue;
    if (found++ >= room) continue;
    times[found - 1] = (allot_simulated_time){
        .pid = allot_load(&process->pid),
        .lives = allot_machine_taken(handle, slot),
        .start_time = allot_load(&process->start_time),
        .busy_ns = allot_load(&part->busy_ns),
        .copy_ns = allot_load(&part->copy_busy_ns),
        .memory_bytes = allot_process_used(handle, slot, (int)gpu),
    };
  }
  const allot_gpu_engine *engine = &handle->machine->engines[gpu];
  if (busy_ns != NULL) *busy_ns = allot_load(&engine->busy_ns);
  if (now_ns != NULL) *now_ns = allot_load(&engine->now_ns);
  *count = found;
  times_end();
  return found > room ? -ENOSPC : 0;
}

int allotSimulatedProcessBusy(unsigned int pid, unsigned int gpu, unsigned long long *busy_ns) {
  if (busy_ns == NULL) return -EINVAL;
  allot_handle *handle;
  int error = times_begin(NULL, gpu, &handle);
  if (error != 0) return error;
  int found = -1;
  for (int slot = 0; slot < allot_machine_high(handle); slot++) {
    const allot_process *process = &handle->machine->processes[slot];
    if (allot_load(&process->attaches) == 0) continue;
    if ((unsigned int)allot_load(&process->pid) != pid) continue;
    if (allot_load(&process->kind) != ALLOT_PROCESS_COMPUTE) continue;
    // Numbers are used again: of two processes the one that came later is meant.
    if (found < 0 || allot_load(&process->attached_ns) >
                         allot_load(&handle->machine->processes[found].attached_ns)) {
      found = slot;
    }
  }
  if (found >= 0) *busy_ns = allot_load(&handle->machine->processes[found].gpus[gpu].busy_ns);
  times_end();
  return found >= 0 ? 0 : -ESRCH;
}
