// SPDX-License-Identifier: Apache-2.0
// Samples the truth: how long the simulated GPUs computed, by process, until stdin ends.
//
//   sampler MILLISECONDS DEVICES_FOLDER
//
// Reads the simulator's own accounts from the machine file, outside of any share, and so knows
// nothing of what the shim measures. Prints one JSON object at the end: for each sample its time,
// and for each GPU its busy nanoseconds, those of each process, and how often the lease of the
// GPU changed hands (DEVICES_FOLDER/UUID/leases, 0 where there is none).
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
#include "simulated/engine/state.h"

typedef nvmlReturn_t (*initialise_function)(void);
typedef nvmlReturn_t (*handle_function)(unsigned int, nvmlDevice_t *);
typedef nvmlReturn_t (*utilization_function)(nvmlDevice_t, nvmlUtilization_t *);

static const allot_machine *machine;
static const allot_leases_file *leases[ALLOT_MACHINE_GPUS];
static nvmlDevice_t handles[ALLOT_MACHINE_GPUS];
static utilization_function ask;
static FILE *output;
static char *written;
static size_t written_bytes;

static const void *map(const char *path, size_t least) {
  struct stat status;
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return NULL;
  const void *start = MAP_FAILED;
  if (fstat(descriptor, &status) == 0 && (size_t)status.st_size >= least)
    start = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, descriptor, 0);
  close(descriptor);
  return start == MAP_FAILED ? NULL : start;
}

static void open_all(void) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  const char *path = getenv(ALLOT_MACHINE_ENV);
  machine = map(path == NULL ? ALLOT_MACHINE_DEFAULT_PATH : path, sizeof *machine);
  if (library == NULL || machine == NULL) {
    fprintf(stderr, "no simulated machine here\n");
    exit(3);
  }
  initialise_function initialise = (initialise_function)dlsym(library, "nvmlInit_v2");
  handle_function handle = (handle_function)dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
  ask = (utilization_function)dlsym(library, "nvmlDeviceGetUtilizationRates");
  if (initialise() != NVML_SUCCESS) exit(3);
  for (unsigned int gpu = 0; gpu < machine->description.gpu_count; gpu++)
    if (handle(gpu, &handles[gpu]) != NVML_SUCCESS) exit(3);
}

static uint64_t epoch_of(unsigned int gpu, const char *folder) {
  char path[4200];
  if (leases[gpu] == NULL) {
    snprintf(path, sizeof path, "%s/%s/leases", folder, machine->description.gpus[gpu].uuid);
    leases[gpu] = map(path, offsetof(allot_leases_file, states));
    if (leases[gpu] == NULL) return 0;
  }
  uint64_t root = __atomic_load_n(&leases[gpu]->root, __ATOMIC_SEQ_CST);
  if (ALLOT_ROOT_BUFFER(root) >= ALLOT_PLACES * 2) return 0;
  return __atomic_load_n(&leases[gpu]->states[ALLOT_ROOT_BUFFER(root)].epoch, __ATOMIC_SEQ_CST);
}

static void sample_gpu(unsigned int gpu, const char *folder) {
  nvmlUtilization_t unused;
  // Whoever asks brings the simulation to the present.
  ask(handles[gpu], &unused);
  fprintf(output, "%s{\"busy_ns\": %llu, \"epoch\": %llu, \"processes\": {", gpu == 0 ? "" : ", ",
          (unsigned long long)__atomic_load_n(&machine->engines[gpu].busy_ns, __ATOMIC_SEQ_CST),
          (unsigned long long)epoch_of(gpu, folder));
  unsigned int high = __atomic_load_n(&machine->high_process, __ATOMIC_SEQ_CST);
  bool first = true;
  for (unsigned int slot = 0; slot < high && slot < ALLOT_MACHINE_PROCESSES; slot++) {
    const allot_process *process = &machine->processes[slot];
    uint64_t busy = __atomic_load_n(&process->gpus[gpu].busy_ns, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&process->state, __ATOMIC_SEQ_CST) != ALLOT_PROCESS_TAKEN || busy == 0)
      continue;
    fprintf(output, "%s\"%d\": %llu", first ? "" : ", ", process->pid, (unsigned long long)busy);
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
    fprintf(output, "%s{\"time_ns\": %llu, \"gpus\": [", number++ == 0 ? "" : ", ",
            (unsigned long long)now_ns());
    for (unsigned int gpu = 0; gpu < machine->description.gpu_count; gpu++)
      sample_gpu(gpu, arguments[2]);
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
