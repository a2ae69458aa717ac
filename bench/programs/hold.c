// SPDX-License-Identifier: Apache-2.0
// Takes memory and waits to be killed.
//
//   hold BYTES [busy]      prints "ready"; with `busy` it allocates and frees for ever meanwhile
//   hold 0 watch           for each line on stdin: the nanoseconds until cuMemGetInfo says that all
//                          but this process's context is free, and the free bytes that it says
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

static size_t free_bytes(void) {
  static __typeof__(cuMemGetInfo_v2) *ask;
  if (ask == NULL) ask = (__typeof__(cuMemGetInfo_v2) *)find_wrapped("cuMemGetInfo_v2");
  size_t available, total;
  need(ask(&available, &total), "cuMemGetInfo");
  return available;
}

static void watch(size_t expected) {
  const struct timespec pause = {.tv_nsec = 200000};
  char line[16];
  while (fgets(line, sizeof line, stdin) != NULL) {
    uint64_t start = now_ns();
    while (free_bytes() != expected && now_ns() - start < 5000000000u) nanosleep(&pause, NULL);
    printf("{\"nanoseconds\": %llu, \"free\": %zu, \"expected\": %zu}\n",
           (unsigned long long)(now_ns() - start), free_bytes(), expected);
    fflush(stdout);
  }
}

int main(int count, char **arguments) {
  if (count < 2) {
    fprintf(stderr, "usage: hold BYTES [busy|watch]\n");
    return 2;
  }
  const char *doing = count > 2 ? arguments[2] : "";
  open_device();
  WRAPPED(cuMemAlloc_v2);
  WRAPPED(cuMemFree_v2);
  CUdeviceptr address;
  size_t bytes = strtoul(arguments[1], NULL, 10);
  if (bytes > 0) need(wrapped_cuMemAlloc_v2(&address, bytes), "cuMemAlloc");
  size_t expected = free_bytes();
  printf("ready\n");
  fflush(stdout);
  if (strcmp(doing, "watch") == 0) {
    watch(expected);
    return 0;
  }
  const struct timespec pause = {.tv_nsec = 100000};
  while (strcmp(doing, "busy") == 0) {
    need(wrapped_cuMemAlloc_v2(&address, 4u << 20), "cuMemAlloc");
    need(wrapped_cuMemFree_v2(address), "cuMemFree");
    nanosleep(&pause, NULL);
  }
  while (1) sleep(3600);
}
