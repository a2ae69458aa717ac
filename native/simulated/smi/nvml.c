// SPDX-License-Identifier: Apache-2.0
// Loads libnvidia-ml.so.1: as every program does, by its name; else the one beside this program.
#include <dlfcn.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "simulated/smi/smi.h"

#define LIBRARY "libnvidia-ml.so.1"

smi_functions nvml;

static void *load_beside(void) {
  char path[PATH_MAX + sizeof LIBRARY];
  ssize_t length = readlink("/proc/self/exe", path, PATH_MAX);
  if (length <= 0) return NULL;
  path[length] = '\0';
  char *name = strrchr(path, '/') + 1;
  memcpy(name, LIBRARY, sizeof LIBRARY);
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

// Returns the name of a missing function, NULL: none.
static const char *resolve(void *library) {
#define X(name, arguments) \
  if ((*(void **)&nvml.name = dlsym(library, #name)) == NULL) return #name;
  SMI_FUNCTIONS
  X(nvmlErrorString, )
  X(allotSimulatedReset, )
  X(allotSimulatedSetTimeslice, )
#undef X
  return NULL;
}

int smi_failed(nvmlReturn_t result) {
  return result == NVML_ERROR_UNKNOWN ? 255 : (int)result;
}

int smi_start(void) {
  void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) library = load_beside();
  if (library == NULL) {
    fputs("NVIDIA-SMI couldn't find " LIBRARY
          " library in your system. This is the nvidia-smi of"
          " simulated GPUs: run it in a share of them, or after `allot env`.\n",
          stderr);
    return NVML_ERROR_LIBRARY_NOT_FOUND;
  }
  const char *missing = resolve(library);
  if (missing != NULL) {
    fprintf(stderr,
            "This nvidia-smi is for simulated GPUs, and " LIBRARY
            " is another driver's (it has no"
            " %s).\n",
            missing);
    return NVML_ERROR_FUNCTION_NOT_FOUND;
  }
  nvmlReturn_t result = nvml.nvmlInit_v2();
  if (result == NVML_SUCCESS) return 0;
  if (result == NVML_ERROR_DRIVER_NOT_LOADED) {
    puts(
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure"
        " that the latest NVIDIA driver is installed and running.\n");
  } else {
    printf("Failed to initialize NVML: %s\n", nvml.nvmlErrorString(result));
  }
  return smi_failed(result);
}
