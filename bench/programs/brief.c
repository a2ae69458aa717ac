// SPDX-License-Identifier: Apache-2.0
// Short processes, one after the other: each runs one kernel, waits for it and ends as programs do.
//
//   brief KERNEL_NS SECONDS
//
// The first of the processes, which starts the others, does not touch a GPU. Starts when stdin
// ends. Prints one JSON object: how many processes ended, and what the share's ledger says that
// they used.
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lanes.h"

extern char **environ;

static int run_one(uint64_t kernel_ns) {
  open_device();
  WRAPPED(cuStreamCreate);
  WRAPPED(cuStreamSynchronize);
  CUstream stream;
  need(wrapped_cuStreamCreate(&stream, 1), "cuStreamCreate");
  launch_whole(spin_function(), whole_grid(), &kernel_ns, stream);
  need(wrapped_cuStreamSynchronize(stream), "cuStreamSynchronize");
  return 0;
}

static void start_one(char **arguments) {
  char *command[] = {arguments[0], arguments[1], NULL};
  pid_t child;
  int status;
  if (posix_spawn(&child, arguments[0], NULL, NULL, command, environ) != 0) exit(3);
  if (waitpid(child, &status, 0) != child || status != 0) exit(3);
}

int main(int count, char **arguments) {
  if (count == 2) return run_one(strtoull(arguments[1], NULL, 10));
  if (count != 3) {
    fprintf(stderr, "usage: brief KERNEL_NS SECONDS\n");
    return 2;
  }
  uint64_t length_ns = (uint64_t)(strtod(arguments[2], NULL) * 1e9), ended = 0;
  wait_for_start();
  uint64_t begun_ns = now_ns();
  for (; now_ns() < begun_ns + length_ns; ended++) start_one(arguments);
  printf(
      "{\"pid\": %d, \"begun_ns\": %llu, \"ended_ns\": %llu, \"processes\": %llu, "
      "\"charged_ns\": %llu}\n",
      (int)getpid(), (unsigned long long)begun_ns, (unsigned long long)now_ns(),
      (unsigned long long)ended, (unsigned long long)charged_ns());
  fflush(stdout);
  return 0;
}
