// SPDX-License-Identifier: Apache-2.0
#include "reason.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LONGEST 2048 /* a share's path, and room; pipes take as much at once */

// A pipe without a reader has an error, and a full one is not ready.
static bool is_ready(int descriptor) {
  struct pollfd asked = {.fd = descriptor, .events = POLLOUT};
  return poll(&asked, 1, 0) == 1 && asked.revents == POLLOUT;
}

static void put_line(const char *format, va_list arguments) {
  static const char head[] = "allotment: no CUDA in this program: ";
  char line[LONGEST];
  memcpy(line, head, sizeof head);
  size_t length = sizeof head - 1;
  int added = vsnprintf(line + length, LONGEST - length - 1, format, arguments);
  if (added < 0) return;
  length = strlen(line);
  line[length++] = '\n';
  if (write(STDERR_FILENO, line, length) < 0) return;  // there is no other place to report it
}

// A forked child writes no second line: it shares stderr with its parent.
void say_once(const char *format, ...) {
  static bool is_said;
  if (__atomic_exchange_n(&is_said, true, __ATOMIC_RELAXED)) return;
  int error = errno;
  va_list arguments;
  va_start(arguments, format);
  if (is_ready(STDERR_FILENO)) put_line(format, arguments);
  va_end(arguments);
  errno = error;
}

void say_unusable(const char *share, const char *what, int error) {
  switch (error) {
    case EACCES:
    case EPERM:
      say_once(
          "user %u must not use the %s of its share (%s); as root, start it with"
          " `allot run --user NAME`",
          (unsigned)geteuid(), what, share);
      break;
    case ENOENT:
      say_once("the %s of its share (%s) is gone; start it again with `allot run`", what, share);
      break;
    case EINVAL:
    case EPROTO:
      say_once(
          "the %s of its share (%s) is damaged or of another version; start it again with"
          " `allot run`",
          what, share);
      break;
    case ENOSPC:
      say_once("the %s of its share (%s) has no room for another process; end some", what, share);
      break;
    default:
      say_once("the %s of its share (%s): %s; see `allot doctor`", what, share, strerror(error));
  }
}
