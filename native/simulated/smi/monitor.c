// SPDX-License-Identifier: Apache-2.0
// dmon and pmon: a line for each GPU or process, again and again.
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "simulated/smi/smi.h"

typedef struct column {
  char group;  // the letter of -s
  const char *name, *unit;
  const char *field;  // of fields.c; of pmon: see put_process
} column;

static const column device_columns[] = {
    {'p', "pwr", "W", "power.draw"},
    {'p', "gtemp", "C", "temperature.gpu"},
    {'p', "mtemp", "C", "temperature.memory"},
    {'u', "sm", "%", "utilization.gpu"},
    {'u', "mem", "%", "utilization.memory"},
    {'u', "enc", "%", "utilization.encoder"},
    {'u', "dec", "%", "utilization.decoder"},
    {'u', "jpg", "%", "utilization.jpeg"},
    {'u', "ofa", "%", "utilization.ofa"},
    {'c', "mclk", "MHz", "clocks.mem"},
    {'c', "pclk", "MHz", "clocks.sm"},
    {'m', "fb", "MB", "memory.used"},
    {'m', "bar1", "MB", "bar1.used"},
    {'e', "sbecc", "errs", "ecc.errors.corrected.volatile.total"},
    {'e', "dbecc", "errs", "ecc.errors.uncorrected.volatile.total"},
    {'t', "rxpci", "MB/s", "pcie.rx"},
    {'t', "txpci", "MB/s", "pcie.tx"},
};

static const column process_columns[] = {
    {'u', "sm", "%", NULL},  {'u', "mem", "%", NULL}, {'u', "enc", "%", NULL},
    {'u', "dec", "%", NULL}, {'u', "jpg", "%", NULL}, {'u', "ofa", "%", NULL},
    {'m', "fb", "MB", NULL},
};

enum {
  DEVICE_COLUMNS = sizeof device_columns / sizeof device_columns[0],
  PROCESS_COLUMNS = sizeof process_columns / sizeof process_columns[0],
};

typedef struct options {
  const char *gpus, *groups;
  bool has_date, has_time;
  unsigned long rounds, pause_s;
} options;

static int read_options(int count, char **words, options *given) {
  for (int i = 0; i < count; i += 2) {
    const char *value = i + 1 < count ? words[i + 1] : NULL;
    if (value == NULL || words[i][0] != '-' || words[i][2] != '\0') return smi_refuse(words[i]);
    switch (words[i][1]) {
      case 'i':
        given->gpus = value;
        break;
      case 's':
        given->groups = value;
        break;
      case 'c':
        given->rounds = strtoul(value, NULL, 10);
        break;
      case 'd':
        given->pause_s = strtoul(value, NULL, 10);
        break;
      case 'o':
        given->has_date = strchr(value, 'D') != NULL;
        given->has_time = strchr(value, 'T') != NULL;
        break;
      default:
        return smi_refuse(words[i]);
    }
  }
  return 0;
}

static void put_stamp(const options *given) {
  char text[32];
  if (given->has_date) {
    smi_timestamp(text, sizeof text, " %Y%m%d  ");
    fputs(text, stdout);
  }
  if (given->has_time) {
    smi_timestamp(text, sizeof text, " %H:%M:%S ");
    fputs(text, stdout);
  }
}

static void put_head(const options *given, const column *columns, int count, bool units) {
  putchar('#');
  if (given->has_date) fputs(units ? "YYYYMMDD  " : "Date      ", stdout);
  if (given->has_time) fputs(units ? "HH:MM:SS  " : "Time      ", stdout);
  fputs(units ? " Idx " : " gpu ", stdout);
  if (columns == process_columns) {
    fputs(units ? "          #    C/G  " : "        pid   type  ", stdout);
  }
  for (int i = 0; i < count; i++) {
    if (strchr(given->groups, columns[i].group) == NULL) continue;
    printf(" %5s ", units ? columns[i].unit : columns[i].name);
  }
  puts(columns != process_columns ? "" : units ? "   name" : "   command");
}

static void put_gpu(const options *given, const smi_gpu *gpu) {
  put_stamp(given);
  printf("  %3u ", gpu->index);
  for (int i = 0; i < DEVICE_COLUMNS; i++) {
    const column *each = &device_columns[i];
    char value[64];
    if (strchr(given->groups, each->group) == NULL) continue;
    if (smi_value(smi_report_field(each->field), gpu, value, sizeof value)) {
      unsigned long whole = strtoul(value, NULL, 10);
      printf(" %5lu ", each->group == 't' ? whole / 1000 : whole);
    } else {
      printf(" %5s ", "-");
    }
  }
  putchar('\n');
}

static const nvmlProcessUtilizationSample_t *sample_of(
    unsigned int pid, const nvmlProcessUtilizationSample_t *samples, unsigned int count) {
  for (unsigned int i = 0; i < count; i++) {
    if (samples[i].pid == pid) return &samples[i];
  }
  return NULL;
}

static const char *base_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash != NULL ? slash + 1 : path;
}

static void put_process(const options *given, const smi_gpu *gpu, const smi_process *process,
                        const nvmlProcessUtilizationSample_t *sample) {
  // Only the part of the multiprocessors and of the memory is known of a process.
  const bool known[] = {true, true, false, false, false, false, true};
  const unsigned long long numbers[] = {
      sample != NULL ? sample->smUtil : 0, sample != NULL ? sample->memUtil : 0, 0, 0, 0, 0,
      process->info.usedGpuMemory >> 20};
  put_stamp(given);
  printf("  %3u  %10u %6s  ", gpu->index, process->info.pid, process->type);
  for (int i = 0; i < PROCESS_COLUMNS; i++) {
    if (strchr(given->groups, process_columns[i].group) == NULL) continue;
    bool has_it = known[i] && (process_columns[i].group == 'm' || sample != NULL);
    if (has_it) {
      printf(" %5llu ", numbers[i]);
    } else {
      printf(" %5s ", "-");
    }
  }
  printf("   %s\n", base_name(process->name));
}

static void put_processes(const options *given, const smi_gpu *gpu) {
  static smi_process processes[SMI_PROCESSES];
  static nvmlProcessUtilizationSample_t samples[SMI_PROCESSES];
  unsigned int found = SMI_PROCESSES, count = smi_processes(gpu, processes);
  if (nvml.nvmlDeviceGetProcessUtilization(gpu->device, samples, &found, 0) != NVML_SUCCESS) {
    found = 0;
  }
  for (unsigned int i = 0; i < count; i++) {
    put_process(given, gpu, &processes[i], sample_of(processes[i].info.pid, samples, found));
  }
  if (count > 0) return;
  put_stamp(given);
  printf("  %3u  %10s %6s  ", gpu->index, "-", "-");
  for (int i = 0; i < PROCESS_COLUMNS; i++) {
    if (strchr(given->groups, process_columns[i].group) != NULL) printf(" %5s ", "-");
  }
  puts("   -");
}

static int show_help(const char *name, const char *groups) {
  printf(
      "Usage: nvidia-smi %s [-i GPUS] [-s %s] [-c COUNT] [-d SECONDS] [-o D|T], of simulated"
      " GPUs\n",
      name, groups);
  return 0;
}

static int watch(int count, char **words, const char *groups, bool of_processes) {
  options given = {.groups = groups, .pause_s = 1};
  if (count > 0 && (strcmp(words[0], "-h") == 0 || strcmp(words[0], "--help") == 0)) {
    return show_help(of_processes ? "pmon" : "dmon", of_processes ? "um" : "pucmet");
  }
  static smi_list list;
  int status = read_options(count, words, &given);
  if (status == 0) status = smi_start();
  const column *columns = of_processes ? process_columns : device_columns;
  int width = of_processes ? PROCESS_COLUMNS : DEVICE_COLUMNS;
  for (unsigned long round = 0; status == 0; round++) {
    if (round % 20 == 0) {
      put_head(&given, columns, width, false);
      put_head(&given, columns, width, true);
    }
    status = smi_list_gpus(given.gpus, &list);
    for (unsigned int i = 0; status == 0 && i < list.count; i++) {
      const smi_gpu *gpu = &list.gpus[i];
      if (gpu->problem != NVML_SUCCESS) {
        smi_report_problem(gpu, stdout);
      } else if (of_processes) {
        put_processes(&given, gpu);
      } else {
        put_gpu(&given, gpu);
      }
    }
    fflush(stdout);
    if (round + 1 == given.rounds) break;
    sleep((unsigned int)(given.pause_s > 0 ? given.pause_s : 1));
  }
  return status;
}

int smi_monitor_devices(int count, char **words) {
  return watch(count, words, "puc", false);
}

int smi_monitor_processes(int count, char **words) {
  return watch(count, words, "u", true);
}
