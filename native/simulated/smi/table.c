// SPDX-License-Identifier: Apache-2.0
// The table that nvidia-smi shows without options, and the list of -L.
#include <string.h>

#include "simulated/smi/smi.h"

#define LINE(left, middle, right) "+" left "+" middle "+" right "+"
#define D9 "---------"
#define D22 D9 D9 "----"
#define D24 D9 D9 "------"
#define D41 D22 D9 D9 "-"
#define D89 D41 D24 D24
#define RULE LINE(D41, D24, D22)
#define WHOLE "+" D89 "+"

static const char *value(const char *field, const smi_gpu *gpu, const char *unit, char *text,
                         size_t room) {
  if (!smi_value(smi_report_field(field), gpu, text, room)) return "N/A";
  size_t length = strlen(text);
  snprintf(text + length, room - length, "%s", unit);
  return text;
}

// Watts are shown without their fraction.
static const char *watts(const char *field, const smi_gpu *gpu, char *text, size_t room) {
  if (!smi_value(smi_report_field(field), gpu, text, room)) return "N/A";
  char *point = strchr(text, '.');
  if (point != NULL) memcpy(point, "W", 2);
  return text;
}

static const char *on_or_off(const char *field, const smi_gpu *gpu, char *text, size_t room) {
  const char *found = value(field, gpu, "", text, room);
  return strcmp(found, "Enabled") == 0 ? "On" : strcmp(found, "Disabled") == 0 ? "Off" : found;
}

static const char *compute_mode(const smi_gpu *gpu, char *text, size_t room) {
  const char *found = value("compute_mode", gpu, "", text, room);
  if (strcmp(found, "Exclusive_Process") == 0) return "E. Process";
  return strcmp(found, "Exclusive_Thread") == 0 ? "E. Thread" : found;
}

static void put_lost_gpu(const smi_gpu *gpu) {
  printf(
      "| %3u  ERR!                      ERR! |     ERR!            ERR!   |                 ERR! "
      "|\n",
      gpu->index);
  printf("| ERR!  ERR! ERR!            ERR! / ERR! | %22.22s | %20s |\n",
         nvml.nvmlErrorString(gpu->problem), "ERR!");
}

static void put_gpu(const smi_gpu *gpu) {
  char one[96], two[96], three[96], four[96], five[96], memory[192], power[192];
  printf("| %3u  %-30.30s%4s | %18.18s %3s | %20s |\n", gpu->index, gpu->name,
         on_or_off("persistence_mode", gpu, one, sizeof one), gpu->bus_id,
         on_or_off("display_active", gpu, two, sizeof two),
         gpu->mig ? "On"
                  : value("ecc.errors.uncorrected.volatile.total", gpu, "", three, sizeof three));
  snprintf(memory, sizeof memory, "%s / %s", value("memory.used", gpu, "MiB", one, sizeof one),
           value("memory.total", gpu, "MiB", two, sizeof two));
  snprintf(power, sizeof power, "%s / %s", watts("power.draw", gpu, one, sizeof one),
           watts("power.limit", gpu, two, sizeof two));
  printf("| %3s %5s %4s %24s | %22s | %6s %13s |\n", value("fan.speed", gpu, "%", one, sizeof one),
         value("temperature.gpu", gpu, "C", two, sizeof two),
         value("pstate", gpu, "", three, sizeof three), power, memory,
         gpu->mig ? "N/A" : value("utilization.gpu", gpu, "%", four, sizeof four),
         compute_mode(gpu, five, sizeof five));
  printf("| %39s | %22s | %20s |\n", "", "",
         value("mig.mode.current", gpu, gpu->mig == gpu->mig_pending ? "" : "*", one, sizeof one));
}

// ---- MIG devices ----

static void put_mig_device(const smi_gpu *gpu, nvmlDevice_t device, unsigned int number) {
  unsigned int gpu_instance = 0, compute_instance = 0;
  nvmlDeviceAttributes_t own = {0};
  nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
  nvmlBAR1Memory_t bar1 = {0};
  char used[64];
  nvml.nvmlDeviceGetGpuInstanceId(device, &gpu_instance);
  nvml.nvmlDeviceGetComputeInstanceId(device, &compute_instance);
  nvml.nvmlDeviceGetAttributes_v2(device, &own);
  nvml.nvmlDeviceGetMemoryInfo_v2(device, &memory);
  snprintf(used, sizeof used, "%lluMiB / %lluMiB", memory.used >> 20, memory.total >> 20);
  printf("| %2u %4u %3u %3u  | %32s | %3u %5d |%3u %3u %4u %4u %4u |\n", gpu->index, gpu_instance,
         compute_instance, number, used, own.multiprocessorCount, 0, own.sharedCopyEngineCount,
         own.sharedEncoderCount, own.sharedDecoderCount, own.sharedOfaCount, own.sharedJpegCount);
  bool has_bar1 = nvml.nvmlDeviceGetBAR1MemoryInfo(device, &bar1) == NVML_SUCCESS;
  snprintf(used, sizeof used, has_bar1 ? "%lluMiB / %lluMiB" : "N/A", bar1.bar1Used >> 20,
           bar1.bar1Total >> 20);
  printf("| %16s | %32s | %9s | %21s |\n", "", used, "", "");
  puts(
      "+------------------+----------------------------------+-----------+-----------------------"
      "+");
}

static void put_mig_devices(const smi_list *list) {
  bool begun = false;
  for (unsigned int i = 0; i < list->count; i++) {
    nvmlDevice_t devices[SMI_MIG_DEVICES];
    const smi_gpu *gpu = &list->gpus[i];
    if (gpu->problem != NVML_SUCCESS || gpu->mig == 0) continue;
    if (!begun) {
      puts(WHOLE
           "\n"
           "| MIG devices:                                                                         "
           "   |\n"
           "+------------------+----------------------------------+-----------+--------------------"
           "---+\n"
           "| GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared      "
           "   |\n"
           "|      ID  ID  Dev |                       BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  "
           "JPG |\n"
           "|                  |                                  |        ECC|                    "
           "   |\n"
           "|==================+==================================+===========+===================="
           "===|");
    }
    begun = true;
    unsigned int count = smi_mig_devices(gpu, devices);
    for (unsigned int k = 0; k < count; k++) put_mig_device(gpu, devices[k], k);
    if (count == 0) {
      puts(
          "|  No MIG devices found                                                                 "
          "  |\n" WHOLE);
    }
  }
  if (begun) putchar('\n');
}

// ---- processes ----

// The end of a long path is shown, as nvidia-smi does.
static void put_process(const smi_gpu *gpu, const smi_process *process) {
  char gi[16], ci[16], name[39];
  size_t length = strlen(process->name);
  if (length < sizeof name) {
    snprintf(name, sizeof name, "%s", process->name);
  } else {
    snprintf(name, sizeof name, "...%s", process->name + length - (sizeof name - 4));
  }
  printf("| %4u   %3s  %3s %10u %6s   %-38s %8lluMiB |\n", gpu->index,
         smi_instance(process->info.gpuInstanceId, gi, sizeof gi),
         smi_instance(process->info.computeInstanceId, ci, sizeof ci), process->info.pid,
         process->type, name, process->info.usedGpuMemory >> 20);
}

static void put_processes(const smi_list *list) {
  static smi_process processes[SMI_PROCESSES];
  puts(WHOLE
       "\n"
       "| Processes:                                                                              "
       "|\n"
       "|  GPU   GI   CI        PID   Type   Process name                              GPU Memory "
       "|\n"
       "|        ID   ID                                                               Usage      "
       "|\n"
       "|========================================================================================="
       "|");
  unsigned int shown = 0;
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    unsigned int count = gpu->problem == NVML_SUCCESS ? smi_processes(gpu, processes) : 0;
    for (unsigned int p = 0; p < count; p++) put_process(gpu, &processes[p]);
    shown += count;
  }
  if (shown == 0) {
    puts(
        "|  No running processes found                                                             "
        "|");
  }
  puts(WHOLE);
}

int smi_show_table(const smi_list *list) {
  char now[64], driver[80] = "N/A", cuda[16] = "N/A";
  int version = 0, status = 0;
  smi_timestamp(now, sizeof now, "%a %b %e %H:%M:%S %Y");
  nvml.nvmlSystemGetDriverVersion(driver, sizeof driver);
  if (nvml.nvmlSystemGetCudaDriverVersion(&version) == NVML_SUCCESS) {
    snprintf(cuda, sizeof cuda, "%d.%d", version / 1000, version % 1000 / 10);
  }
  printf("%s       (simulated GPUs, by Allotment)\n" WHOLE "\n", now);
  printf("| NVIDIA-SMI %-22.22s Driver Version: %-14.14s CUDA Version: %-8s |\n", driver, driver,
         cuda);
  puts("|" D41 "+" D24 "+" D22
       "|\n"
       "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC "
       "|\n"
       "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. "
       "|\n"
       "|                                         |                        |               MIG M. "
       "|\n"
       "|=========================================+========================+======================"
       "|");
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    if (gpu->problem != NVML_SUCCESS) {
      put_lost_gpu(gpu);
      status = smi_failed(gpu->problem);
    } else {
      put_gpu(gpu);
    }
    puts(RULE);
  }
  printf("%*s\n", (int)sizeof WHOLE - 1, "");
  put_mig_devices(list);
  put_processes(list);
  return status;
}

static void list_mig_devices(const smi_gpu *gpu) {
  nvmlDevice_t devices[SMI_MIG_DEVICES];
  unsigned int count = smi_mig_devices(gpu, devices);
  for (unsigned int i = 0; i < count; i++) {
    char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE] = "", uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE] = "";
    nvml.nvmlDeviceGetName(devices[i], name, sizeof name);
    nvml.nvmlDeviceGetUUID(devices[i], uuid, sizeof uuid);
    const char *profile = strstr(name, "MIG ");
    printf("  %-15s Device %2u: (UUID: %s)\n", profile != NULL ? profile : name, i, uuid);
  }
}

int smi_show_list(const smi_list *list) {
  int status = 0;
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    if (gpu->problem != NVML_SUCCESS) {
      smi_report_problem(gpu, stdout);
      status = smi_failed(gpu->problem);
      continue;
    }
    printf("GPU %u: %s (UUID: %s)\n", gpu->index, gpu->name, gpu->uuid);
    list_mig_devices(gpu);
  }
  return status;
}
