// SPDX-License-Identifier: Apache-2.0
// Asks the driver's own NVML, outside of any share, how much memory of device 0 is used, until
// stdin ends. Prints the most that it saw beyond what was used at first, and how often it asked.
#include <dlfcn.h>
#include <poll.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "nvml_abi.h"

typedef nvmlReturn_t (*initialise_function)(void);
typedef nvmlReturn_t (*handle_function)(unsigned int, nvmlDevice_t *);
typedef nvmlReturn_t (*memory_function)(nvmlDevice_t, nvmlMemory_t *);

int main(void) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 3;
  }
  initialise_function initialise = (initialise_function)dlsym(library, "nvmlInit_v2");
  handle_function handle = (handle_function)dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
  memory_function ask = (memory_function)dlsym(library, "nvmlDeviceGetMemoryInfo");
  nvmlDevice_t device;
  nvmlMemory_t memory;
  if (initialise() != NVML_SUCCESS || handle(0, &device) != NVML_SUCCESS ||
      ask(device, &memory) != NVML_SUCCESS) {
    fprintf(stderr, "NVML does not answer\n");
    return 3;
  }
  unsigned long long first = memory.used, highest = memory.used, asked = 0;
  printf("ready\n");
  fflush(stdout);
  struct pollfd end = {.fd = STDIN_FILENO, .events = POLLIN};
  const struct timespec pause = {.tv_nsec = 20000};
  while (poll(&end, 1, 0) == 0) {
    if (ask(device, &memory) != NVML_SUCCESS) return 3;
    if (memory.used > highest) highest = memory.used;
    asked++;
    nanosleep(&pause, NULL);
  }
  printf("{\"highest\": %llu, \"samples\": %llu}\n", highest - first, asked);
  return 0;
}
