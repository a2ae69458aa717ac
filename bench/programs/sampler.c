// SPDX-License-Identifier: Apache-2.0
// Samples the truth: how long the simulated GPUs computed, by process, until stdin ends.
//
//   sampler MILLISECONDS DEVICES_FOLDER
//
// Asks the simulator for its own accounts, outside of any share, and so knows nothing of what the
// shim measures. Prints one JSON object at the end: for each sample its time,
// and for each GPU its busy nanoseconds, those of each process, and how often the lease of the
// GPU changed hands (DEVICES_FOLDER/UUID/seats, 0 where there is none).
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"
#include "lease.h"
#include "nvml_abi.h"
#include "simulated/nvml/times.h"

enum { MOST_GPUS = 16, MOST_PROCESSES = 1024 };

typedef nvmlReturn_t (*initialise_function)(void);
typedef nvmlReturn_t (*count_function)(unsigned int *);
typedef nvmlReturn_t (*handle_function)(unsigned int, nvmlDevice_t *);
typedef nvmlReturn_t (*uuid_function)(nvmlDevice_t, char *, unsigned int);

static __typeof__(allotSimulatedTimes) *ask;
static unsigned int gpus;
static char uuids[MOST_GPUS][96];
static FILE *output;
static char *written;
static size_t written_bytes;

static _Noreturn void give_up(const char *why) {
  fprintf(stderr, "sampler: %s\n", why);
  exit(3);
}

static void open_all(void) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (library == NULL) give_up(dlerror());
  initialise_function initialise = (initialise_function)dlsym(library, "nvmlInit_v2");
  count_function count = (count_function)dlsym(library, "nvmlDeviceGetCount_v2");
  handle_function handle = (handle_function)dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
  uuid_function name = (uuid_function)dlsym(library, "nvmlDeviceGetUUID");
  ask = (__typeof__(ask))dlsym(library, "allotSimulatedTimes");
  if (ask == NULL) give_up("these GPUs are not simulated");
  if (initialise() != NVML_SUCCESS || count(&gpus) != NVML_SUCCESS) give_up("no machine");
  if (gpus > MOST_GPUS) gpus = MOST_GPUS;
  for (unsigned int gpu = 0; gpu < gpus; gpu++) {
    nvmlDevice_t device;
    if (handle(gpu, &device) != NVML_SUCCESS ||
        name(device, uuids[gpu], sizeof uuids[gpu]) != NVML_SUCCESS)
      give_up("a GPU does not answer");
  }
}

static uint64_t leases_of(int folder, const char *name) {
  allot_seat_facts facts;
  uint64_t root;
  int descriptor = openat(folder, name, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return 0;
  bool done = pread(descriptor, &root, sizeof root, offsetof(allot_leases_file, root)) ==
              (ssize_t)sizeof root;
  off_t at = (off_t)(offsetof(allot_leases_file, buffers) +
                     sizeof(allot_seat_buffer) * (ALLOT_ROOT_BUFFER(root)));
  done = done && pread(descriptor, &facts, sizeof facts, at) == (ssize_t)sizeof facts;
  close(descriptor);
  return done ? facts.account.leases : 0;
}

// How many leases the shares that are there have had.
static uint64_t leases_on(unsigned int gpu, const char *folder) {
  char path[4200];
  uint64_t sum = 0;
  snprintf(path, sizeof path, "%s/%s/seats", folder, uuids[gpu]);
  DIR *seats = opendir(path);
  if (seats == NULL) return 0;
  for (struct dirent *one; (one = readdir(seats)) != NULL;) {
    if (one->d_name[0] != '.') sum += leases_of(dirfd(seats), one->d_name);
  }
  closedir(seats);
  return sum;
}

static void sample_gpu(unsigned int gpu, const char *folder) {
  static allot_simulated_time rows[MOST_PROCESSES];
  unsigned int count = MOST_PROCESSES;
  unsigned long long busy, now;
  if (ask(NULL, gpu, rows, &count, &busy, &now) != 0) give_up("no times");
  fprintf(output, "%s{\"time_ns\": %llu, \"busy_ns\": %llu, \"epoch\": %llu, \"processes\": {",
          gpu == 0 ? "" : ", ", now, busy, (unsigned long long)leases_on(gpu, folder));
  bool first = true;
  for (unsigned int row = 0; row < count; row++) {
    if (rows[row].busy_ns == 0) continue;
    fprintf(output, "%s\"%d\": %llu", first ? "" : ", ", rows[row].pid,
            (unsigned long long)rows[row].busy_ns);
    first = false;
  }
  fprintf(output, "}}");
}

int main(int count, char **arguments) {
  if (count != 3) {
    fprintf(stderr, "usage: sampler MILLISECONDS DEVICES_FOLDER\n");
    return 2;
  }
  int period_ms = atoi(arguments[1]);
  open_all();
  output = open_memstream(&written, &written_bytes);
  if (output == NULL) return 3;
  printf("ready\n");
  fflush(stdout);
  struct pollfd end = {.fd = STDIN_FILENO, .events = POLLIN};
  uint64_t next = now_ns(), number = 0;
  fprintf(output, "{\"samples\": [");
  do {
    fprintf(output, "%s{\"gpus\": [", number++ == 0 ? "" : ", ");
    for (unsigned int gpu = 0; gpu < gpus; gpu++) sample_gpu(gpu, arguments[2]);
    fprintf(output, "]}");
    next += (uint64_t)period_ms * 1000000u;
    uint64_t now = now_ns();
    if (next < now) next = now;
    // Whole milliseconds are near enough: a sample carries its own time.
    if (poll(&end, 1, (int)((next - now) / 1000000u)) != 0) break;
  } while (true);
  fprintf(output, "]}\n");
  fclose(output);
  fwrite(written, 1, written_bytes, stdout);
  return 0;
}
