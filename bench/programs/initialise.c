// SPDX-License-Identifier: Apache-2.0
// Times what a program does first: loads the driver and calls cuInit. Prints the nanoseconds of
// both. Starts when stdin ends.
#include <dlfcn.h>
#include <stdio.h>

#include "driver.h"

int main(void) {
  wait_for_start();
  uint64_t start = now_ns();
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 3;
  }
  __typeof__(cuInit) *initialise = (__typeof__(cuInit) *)dlsym(library, "cuInit");
  uint64_t loaded = now_ns();
  need(initialise(0), "cuInit");
  uint64_t initialised = now_ns();
  printf("{\"load\": %llu, \"initialise\": %llu}\n", (unsigned long long)(loaded - start),
         (unsigned long long)(initialised - loaded));
  return 0;
}
