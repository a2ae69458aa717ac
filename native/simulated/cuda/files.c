// SPDX-License-Identifier: Apache-2.0
// Memory files: bytes without a name in any folder, which other processes can be handed.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simulated/cuda/driver.h"

#define CLOSE_ON_EXEC 1u
// Programs expect their own files at the low numbers.
#define LOWEST 200

int memfd_file(const char *name) {
  // glibc has a name for this call only since 2.27.
  int descriptor = (int)syscall(SYS_memfd_create, name, CLOSE_ON_EXEC);
  if (descriptor < 0) return -1;
  int higher = fcntl(descriptor, F_DUPFD_CLOEXEC, LOWEST);
  if (higher < 0) return descriptor;
  close(descriptor);
  return higher;
}
