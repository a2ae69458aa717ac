// SPDX-License-Identifier: Apache-2.0
// What changes a GPU: its compute mode, persistence mode, MIG mode and time slice, and a reset.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "simulated/smi/smi.h"

// The place of a word among names, by number or name; -1: none.
static int choice(const char *word, const char *const *names, int count) {
  for (int i = 0; i < count; i++) {
    char number[8];
    snprintf(number, sizeof number, "%d", i);
    if (names[i] != NULL && (strcmp(word, number) == 0 || strcasecmp(word, names[i]) == 0))
      return i;
  }
  return -1;
}

static int invalid(const char *word, const char *option) {
  printf("\"%s\" is not a valid value of %s. Please run 'nvidia-smi -h' for help.\n", word, option);
  return SMI_INVALID;
}

static int failed(const char *what, const smi_gpu *gpu, nvmlReturn_t result) {
  printf("Unable to %s for GPU %s: %s\n", what, gpu->bus_id, nvml.nvmlErrorString(result));
  return smi_failed(result);
}

static int set_compute_mode(const smi_gpu *gpu, const char *word) {
  static const char *const names[] = {"DEFAULT", NULL, "PROHIBITED", "EXCLUSIVE_PROCESS"};
  int mode = choice(word, names, 4);
  if (mode < 0) return invalid(word, "--compute-mode");
  nvmlReturn_t result = nvml.nvmlDeviceSetComputeMode(gpu->device, (unsigned int)mode);
  if (result != NVML_SUCCESS) return failed("set the compute mode", gpu, result);
  printf("Set compute mode to %s for GPU %s.\n", names[mode], gpu->bus_id);
  return 0;
}

static int set_persistence(const smi_gpu *gpu, const char *word) {
  static const char *const names[] = {"DISABLED", "ENABLED"};
  int mode = choice(word, names, 2);
  if (mode < 0) return invalid(word, "--persistence-mode");
  nvmlReturn_t result = nvml.nvmlDeviceSetPersistenceMode(gpu->device, (unsigned int)mode);
  if (result != NVML_SUCCESS) return failed("set persistence mode", gpu, result);
  printf("%s persistence mode for GPU %s.\n", mode ? "Enabled" : "Disabled", gpu->bus_id);
  return 0;
}

static int set_mig(const smi_gpu *gpu, const char *word) {
  static const char *const names[] = {"DISABLED", "ENABLED"};
  int mode = choice(word, names, 2);
  if (mode < 0) return invalid(word, "--multi-instance-gpu");
  nvmlReturn_t activation = NVML_SUCCESS;
  nvmlReturn_t result = nvml.nvmlDeviceSetMigMode(gpu->device, (unsigned int)mode, &activation);
  if (result != NVML_SUCCESS) return failed("set MIG mode", gpu, result);
  const char *verb = mode ? "enable" : "disable";
  if (activation != NVML_SUCCESS) {
    printf("Warning: MIG mode is in pending %s state for GPU %s:%s\n", verb, gpu->bus_id,
           nvml.nvmlErrorString(activation));
  }
  printf("%sd MIG Mode for GPU %s\n", mode ? "Enable" : "Disable", gpu->bus_id);
  return 0;
}

// The machine's own functions number GPUs as their device nodes are numbered.
static int reset_gpu(const smi_gpu *gpu) {
  int error = nvml.allotSimulatedReset(NULL, gpu->minor);
  if (error == 0) {
    printf("GPU %s was successfully reset.\n", gpu->bus_id);
    return 0;
  }
  if (error == -EBUSY) {
    printf("GPU %s is currently in use by one or more other processes.\n", gpu->bus_id);
    return smi_failed(NVML_ERROR_IN_USE);
  }
  printf("GPU %s could not be reset: %s\n", gpu->bus_id, strerror(-error));
  return error == -EACCES ? SMI_NO_PERMISSION : 255;
}

int smi_change(const smi_list *list, const smi_changes *changes) {
  int status = 0;
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    int done = 0;
    if (gpu->problem != NVML_SUCCESS) {
      smi_report_problem(gpu, stdout);
      done = smi_failed(gpu->problem);
    }
    if (done == 0 && changes->compute_mode != NULL) {
      done = set_compute_mode(gpu, changes->compute_mode);
    }
    if (done == 0 && changes->persistence != NULL)
      done = set_persistence(gpu, changes->persistence);
    if (done == 0 && changes->mig != NULL) done = set_mig(gpu, changes->mig);
    if (done == 0 && changes->reset) done = reset_gpu(gpu);
    if (done != 0) status = done;
  }
  puts(status == 0 ? "All done." : "Terminating early due to previous errors.");
  return status;
}

int smi_compute_policy(int count, char **words) {
  static const char *const names[] = {"DEFAULT", "SHORT", "MEDIUM", "LONG"};
  const char *gpus = NULL, *length = NULL;
  for (int i = 0; i < count; i++) {
    const char *word = words[i];
    bool has_value = i + 1 < count;
    if ((strcmp(word, "-i") == 0 || strcmp(word, "--id") == 0) && has_value) {
      gpus = words[++i];
    } else if (strncmp(word, "--set-timeslice=", 16) == 0) {
      length = word + 16;
    } else if (strcmp(word, "--set-timeslice") == 0 && has_value) {
      length = words[++i];
    } else {
      return smi_refuse(word);
    }
  }
  if (length == NULL) {
    puts("Usage: nvidia-smi compute-policy [-i GPUS] --set-timeslice=default|short|medium|long");
    return SMI_INVALID;
  }
  int chosen = choice(length, names, 4);
  if (chosen < 0) return invalid(length, "--set-timeslice");
  static smi_list list;
  int status = smi_start();
  if (status == 0) status = smi_list_gpus(gpus, &list);
  for (unsigned int i = 0; status == 0 && i < list.count; i++) {
    const smi_gpu *gpu = &list.gpus[i];
    int error = nvml.allotSimulatedSetTimeslice(NULL, gpu->minor, (unsigned int)chosen);
    if (error != 0) {
      printf("Failed to set timeslice policy for GPU %s: %s\n", gpu->bus_id, strerror(-error));
      return error == -EACCES ? SMI_NO_PERMISSION : 255;
    }
    printf("Successfully set timeslice policy with value %s for GPU %s\n", names[chosen],
           gpu->uuid);
  }
  return status;
}
