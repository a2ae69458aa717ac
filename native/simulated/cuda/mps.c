// SPDX-License-Identifier: Apache-2.0
// Becoming a client of MPS, which happens in cuInit and without the program's doing: where a
// control daemon answers in the pipe directory, the process is one; where none does, it is none,
// and nothing says so.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated/cuda/driver.h"
#include "simulated/mps/protocol.h"

// Whether the limits of a namespace are in force (protocol 3).
static bool is_in_namespace;

static const char *setting(const char *name) {
  const char *value = getenv(name);
  return value != NULL && *value != '\0' ? value : NULL;
}

// What is no percentage is as if it were not there.
static uint32_t percentage(void) {
  const char *value = setting(MPS_PERCENTAGE_ENV);
  double wanted = value != NULL ? atof(value) : 100;
  return wanted >= 1 && wanted < 100 ? (uint32_t)wanted : 100;
}

static mps_question question(void) {
  struct stat status = {0};
  stat(driver.machine.path, &status);
  const char *priority = setting(MPS_PRIORITY_ENV);
  return (mps_question){.machine = status.st_ino,
                        .slot = (uint32_t)driver.machine.slot,
                        .percentage = percentage(),
                        .priority = priority != NULL && atoi(priority) > 0,
                        .has_priority = priority != NULL};
}

// The daemon answers when it can serve this user, which may be long.
static bool ask(int descriptor, const mps_question *asked, mps_answer *answer) {
  if (send(descriptor, asked, sizeof *asked, MSG_NOSIGNAL) != (ssize_t)sizeof *asked) return false;
  ssize_t got;
  do {
    got = recv(descriptor, answer, sizeof *answer, MSG_WAITALL);
  } while (got < 0 && errno == EINTR);
  return got == (ssize_t)sizeof *answer;
}

CUresult mps_become_client(uint32_t *nodes) {
  const char *folder = setting(MPS_PIPE_ENV);
  int descriptor = mps_connect(folder != NULL ? folder : MPS_PIPE_DEFAULT, MPS_CONTROL);
  if (descriptor < 0) return CUDA_SUCCESS;
  mps_question asked = question();
  mps_answer answer;
  bool answered = ask(descriptor, &asked, &answer);
  close(descriptor);
  if (!answered) return CUDA_ERROR_MPS_CONNECTION_FAILED;
  if (answer.result != CUDA_SUCCESS) return (CUresult)answer.result;
  *nodes &= answer.gpus;
  is_in_namespace = answer.protocol == 3;
  return CUDA_SUCCESS;
}

// The GPU that one entry of the variable means, -1: none that is visible.
static int limited(const char *name, size_t length) {
  for (int ordinal = 0; ordinal < driver.device_count; ordinal++) {
    const char *uuid = driver_description(driver.gpus[ordinal])->uuid;
    if (strlen(uuid) == length && memcmp(uuid, name, length) == 0) return driver.gpus[ordinal];
  }
  char *end;
  long number = strtol(name, &end, 10);
  bool is_number = end == name + length && length > 0;
  return is_number && number >= 0 && number < driver.device_count ? driver.gpus[number] : -1;
}

static void drop_limits(uint64_t *limits) {
  for (int gpu = 0; gpu < ALLOT_MACHINE_GPUS; gpu++) allot_store(&limits[gpu], (uint64_t)0);
}

// As the driver does: one entry that names no visible device makes all of them void, and with them
// those of a namespace.
void mps_limit_memory(void) {
  const char *at = setting(MPS_MEMORY_ENV);
  if (at == NULL || !allot_mps_is_client(&driver.machine, driver.machine.slot)) return;
  uint64_t *own = driver.machine.machine->processes[driver.machine.slot].mps.memory_limit;
  uint64_t limits[ALLOT_MACHINE_GPUS] = {0};
  while (*at != '\0') {
    size_t length = strcspn(at, ","), name = strcspn(at, "=,");
    int gpu = limited(at, name);
    if (gpu < 0 || name >= length) {
      if (is_in_namespace) drop_limits(own);
      return;
    }
    limits[gpu] = mps_amount(at + name + 1, length - name - 1);
    at += length;
    if (*at == ',') at++;
  }
  for (int gpu = 0; gpu < ALLOT_MACHINE_GPUS; gpu++) {
    if (limits[gpu] != 0 && (own[gpu] == 0 || limits[gpu] < own[gpu])) {
      allot_store(&own[gpu], limits[gpu]);
    }
  }
}

uint32_t mps_multiprocessors(int gpu) {
  return allot_mps_multiprocessors(&driver.machine, driver.machine.slot, gpu);
}
