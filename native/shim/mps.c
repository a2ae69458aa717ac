// SPDX-License-Identifier: Apache-2.0
// The driver makes a program a client of MPS in cuInit if a control daemon is there at that moment.
// If there is none, because it has just ended and the next one has not started yet, the program is
// no client, has all of the GPU's multiprocessors until it ends, and is not told.
#include "mps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "reason.h"

#define PIPE_VARIABLE "CUDA_MPS_PIPE_DIRECTORY"
#define STEP_MS 10
#define PATIENCE_S 60 /* the supervisor tries to restart the daemon at least every 30 s */

static bool is_of_mps(const process *own) {
  for (uint32_t i = 0; i < own->device_count; i++) {
    if ((own->policies[i]->flags & ALLOT_DEVICE_MPS) != 0) return true;
  }
  return false;
}

// A socket's file stays when its owner ends. The kind of this socket differs from the daemon's, so
// that the kernel says whether there is an owner and the daemon does not notice.
static bool has_daemon(int folder) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/control", folder);
  struct stat status;
  if (stat(address.sun_path, &status) != 0) return false;
  int probe = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (probe < 0 || !S_ISSOCK(status.st_mode)) {
    if (probe >= 0) close(probe);
    return true;  // cannot tell: the driver will
  }
  bool is_there =
      connect(probe, (struct sockaddr *)&address, sizeof address) != 0 && errno == EPROTOTYPE;
  close(probe);
  return is_there;
}

// By path each time: the daemon may make its folder anew.
static bool is_missing(const char *pipes) {
  UNCANCELLED;  // no descriptor stays open
  int folder = open(pipes, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return errno != EMFILE && errno != ENFILE;
  bool missing = !has_daemon(folder);
  close(folder);
  return missing;
}

static int64_t seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

CUresult mps_wait_for_daemon(const process *own) {
  if (!is_of_mps(own)) return CUDA_SUCCESS;
  // A process has one pipe directory, and through it no devices but its daemon's.
  if (own->share_count > 1) {
    say_once(
        "one of its %u shares is of mode mps: an mps share cannot be combined with another share;"
        " use one container for each",
        (unsigned)own->share_count);
    return CUDA_ERROR_DEVICE_UNAVAILABLE;
  }
  const char *pipes = getenv(PIPE_VARIABLE);
  if (pipes == NULL || *pipes == '\0') {
    say_once(PIPE_VARIABLE " is not set; do not clear it");
    return CUDA_ERROR_DEVICE_UNAVAILABLE;
  }
  int error = errno;
  CUresult result = CUDA_SUCCESS;
  int64_t since = seconds();
  while (is_missing(pipes)) {
    if (seconds() - since > PATIENCE_S) {
      say_once("no MPS control daemon in " PIPE_VARIABLE
               " (%s) for %d s; keep what `allot run` has"
               " set, and see `allot doctor`",
               pipes, PATIENCE_S);
      result = CUDA_ERROR_MPS_CONNECTION_FAILED;
      break;
    }
    nanosleep(&(struct timespec){.tv_nsec = STEP_MS * 1000000}, NULL);
  }
  errno = error;
  return result;
}
