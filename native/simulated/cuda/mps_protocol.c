// SPDX-License-Identifier: Apache-2.0
// Sockets and amounts, as clients and the control daemon have them alike.
#include "simulated/mps/protocol.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

uint64_t mps_amount(const char *text, size_t length) {
  uint64_t value = 0;
  size_t at = 0;
  for (; at < length && text[at] >= '0' && text[at] <= '9'; at++) {
    if (value > UINT64_MAX >> 36) return 0;
    value = value * 10 + (uint64_t)(text[at] - '0');
  }
  if (at == 0 || length - at != 1) return 0;
  switch (text[at]) {
    case 'G':
    case 'g':
      return value << 30;
    case 'M':
    case 'm':
      return value << 20;
    case 'K':
    case 'k':
      return value << 10;
    default:
      return 0;
  }
}

// A path in a socket's address has 107 bytes at most; one through a descriptor is short.
static int address_of(const char *folder, const char *name, struct sockaddr_un *address) {
  int descriptor = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return -errno;
  *address = (struct sockaddr_un){.sun_family = AF_UNIX};
  snprintf(address->sun_path, sizeof address->sun_path, "/proc/self/fd/%d/%s", descriptor, name);
  return descriptor;
}

int mps_connect(const char *folder, const char *name) {
  struct sockaddr_un address;
  int descriptor = address_of(folder, name, &address);
  if (descriptor < 0) return descriptor;
  int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int error = made < 0 ? -errno : 0;
  if (error == 0 && connect(made, (struct sockaddr *)&address, sizeof address) != 0) {
    error = -errno;
    close(made);
  }
  close(descriptor);
  return error != 0 ? error : made;
}

int mps_listen(const char *folder, const char *name, unsigned mode) {
  struct sockaddr_un address;
  int descriptor = address_of(folder, name, &address);
  if (descriptor < 0) return descriptor;
  unlink(address.sun_path);
  int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  int error = made < 0 ? -errno : 0;
  if (error == 0 && (bind(made, (struct sockaddr *)&address, sizeof address) != 0 ||
                     chmod(address.sun_path, (mode_t)mode) != 0 || listen(made, 128) != 0)) {
    error = -errno;
    close(made);
  }
  close(descriptor);
  return error != 0 ? error : made;
}
