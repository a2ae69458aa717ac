// SPDX-License-Identifier: Apache-2.0
// Times the life of a program in pairs: in a plain environment, and with variables added.
//
//   start PAIRS PROGRAM [NAME=VALUE]...
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "driver.h"

static int64_t life_ns(char *program, char **environment) {
  char *arguments[] = {program, NULL};
  pid_t child;
  int status;
  uint64_t start = now_ns();
  if (posix_spawn(&child, program, NULL, NULL, arguments, environment) != 0 ||
      waitpid(child, &status, 0) != child || status != 0) {
    fprintf(stderr, "%s: did not run\n", program);
    exit(3);
  }
  return (int64_t)(now_ns() - start);
}

int main(int count, char **arguments) {
  if (count < 3) {
    fprintf(stderr, "usage: start PAIRS PROGRAM [NAME=VALUE]...\n");
    return 2;
  }
  size_t pairs = strtoul(arguments[1], NULL, 10);
  char *plain[] = {"PATH=/usr/bin:/bin", NULL};
  char **added = arguments + 3;  // main's arguments end with NULL, as an environment does
  int64_t *bare = calloc(pairs, sizeof *bare), *wrapped = calloc(pairs, sizeof *wrapped);
  if (bare == NULL || wrapped == NULL) return 3;
  for (size_t index = 0; index < pairs; index++)
    for (size_t turn = 0; turn < 2; turn++) {
      bool is_bare = (index ^ turn) & 1;
      int64_t nanoseconds = life_ns(arguments[2], is_bare ? plain : added);
      (is_bare ? bare : wrapped)[index] = nanoseconds;
    }
  print_pairs("start", bare, wrapped, pairs, 1);
  return 0;
}
