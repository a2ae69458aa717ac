// SPDX-License-Identifier: Apache-2.0
// nvidia-smi of a simulated machine: the options, and what they ask for. Output and exit statuses
// are as in nvidia-smi(1), for the programs that read them; each screen for people says that the
// GPUs are simulated.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated/smi/smi.h"

typedef struct options {
  const char *gpus, *format, *query_gpus, *query_processes, *sections, *output;
  bool lists, reports, xml;
  unsigned long pause_ms;
  smi_changes changes;
} options;

int smi_refuse(const char *option) {
  printf("Invalid combination of input arguments (%s). Please run 'nvidia-smi -h' for help.\n",
         option);
  return SMI_INVALID;
}

// Options with a value: as `-i 0`, `--id=0` and `--id 0`.
static const struct {
  const char *brief, *full;
  size_t into;
} values[] = {
    {"-i", "--id", offsetof(options, gpus)},
    {"-d", "--display", offsetof(options, sections)},
    {"-f", "--filename", offsetof(options, output)},
    {"", "--format", offsetof(options, format)},
    {"", "--query-gpu", offsetof(options, query_gpus)},
    {"", "--query-compute-apps", offsetof(options, query_processes)},
    {"-c", "--compute-mode", offsetof(options, changes.compute_mode)},
    {"-pm", "--persistence-mode", offsetof(options, changes.persistence)},
    {"-mig", "--multi-instance-gpu", offsetof(options, changes.mig)},
};

static const struct {
  const char *brief, *full;
  size_t into;
} flags[] = {
    {"-L", "--list-gpus", offsetof(options, lists)},
    {"-q", "--query", offsetof(options, reports)},
    {"-x", "--xml-format", offsetof(options, xml)},
    {"-r", "--gpu-reset", offsetof(options, changes.reset)},
};

static bool is_either(const char *word, const char *brief, const char *full) {
  return (*brief != '\0' && strcmp(word, brief) == 0) || strcmp(word, full) == 0;
}

// The value of an option at `words`, which takes *taken of them; NULL: it is another option.
static const char *value_of(int count, char **words, const char *brief, const char *full,
                            int *taken) {
  size_t length = strlen(full);
  *taken = 1;
  if (strncmp(words[0], full, length) == 0 && words[0][length] == '=') return words[0] + length + 1;
  *taken = 2;
  return count > 1 && is_either(words[0], brief, full) ? words[1] : NULL;
}

// How many words the option at `words` has, 0: it is not understood.
static int read_option(int count, char **words, options *given) {
  int taken;
  for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
    const char *value = value_of(count, words, values[i].brief, values[i].full, &taken);
    if (value == NULL) continue;
    *(const char **)((char *)given + values[i].into) = value;
    return taken;
  }
  for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
    if (!is_either(words[0], flags[i].brief, flags[i].full)) continue;
    *(bool *)((char *)given + flags[i].into) = true;
    return 1;
  }
  const char *value = value_of(count, words, "-l", "--loop", &taken);
  if (value != NULL) {
    given->pause_ms = strtoul(value, NULL, 10) * 1000;
    return given->pause_ms > 0 ? taken : 0;
  }
  value = value_of(count, words, "-lms", "--loop-ms", &taken);
  if (value == NULL) return 0;
  given->pause_ms = strtoul(value, NULL, 10);
  return given->pause_ms > 0 ? taken : 0;
}

static int show_help(void) {
  puts(
      "NVIDIA System Management Interface of simulated GPUs, by Allotment\n\n"
      "nvidia-smi [OPTION]...\n\n"
      "  -L, --list-gpus                 the GPUs and MIG devices with their UUIDs\n"
      "  -i, --id=GPUS                   only these: indices, UUIDs, bus ids or serial numbers\n"
      "  -q, --query                     the full report\n"
      "  -x, --xml-format                with -q: as XML\n"
      "  -d, --display=SECTIONS          with -q: only these (MEMORY,UTILIZATION,ECC,TEMPERATURE,\n"
      "                                  POWER,CLOCK,COMPUTE,PIDS,PERFORMANCE,PAGE_RETIREMENT,\n"
      "                                  ROW_REMAPPER,ACCOUNTING,ENCODER_STATS,FBC_STATS)\n"
      "  --query-gpu=FIELDS              values of GPUs (--help-query-gpu lists the fields)\n"
      "  --query-compute-apps=FIELDS     values of processes (--help-query-compute-apps)\n"
      "  --format=csv[,noheader][,nounits]\n"
      "  -f, --filename=FILE             write there\n"
      "  -l, --loop=SECONDS  -lms, --loop-ms=MILLISECONDS\n"
      "  -c, --compute-mode=MODE         0 DEFAULT, 2 PROHIBITED, 3 EXCLUSIVE_PROCESS\n"
      "  -pm, --persistence-mode=0|1     -mig, --multi-instance-gpu=0|1\n"
      "  -r, --gpu-reset\n\n"
      "nvidia-smi mig -h                 MIG profiles and instances\n"
      "nvidia-smi dmon -h, pmon -h       GPUs and processes, line by line\n"
      "nvidia-smi compute-policy [-i GPUS] --set-timeslice=default|short|medium|long");
  return 0;
}

static int show_version(void) {
  char driver[80] = "N/A", library[80] = "N/A";
  int cuda = 0, status = smi_start();
  if (status != 0) return status;
  nvml.nvmlSystemGetDriverVersion(driver, sizeof driver);
  nvml.nvmlSystemGetNVMLVersion(library, sizeof library);
  nvml.nvmlSystemGetCudaDriverVersion(&cuda);
  const char *number = strchr(library, '.');
  printf(
      "NVIDIA-SMI version  : %s (simulated, by Allotment)\nNVML version        : %s\n"
      "DRIVER version      : %s\nCUDA Version        : %d.%d\n",
      driver, number != NULL ? number + 1 : library, driver, cuda / 1000, cuda % 1000 / 10);
  return 0;
}

static bool changes_something(const smi_changes *changes) {
  return changes->compute_mode != NULL || changes->persistence != NULL || changes->mig != NULL ||
         changes->reset;
}

static int show(const options *given, const smi_list *list, bool is_first) {
  if (given->query_gpus != NULL) {
    return smi_show_query(list, SMI_QUERY_GPUS, given->query_gpus, given->format, is_first);
  }
  if (given->query_processes != NULL) {
    return smi_show_query(list, SMI_QUERY_PROCESSES, given->query_processes, given->format,
                          is_first);
  }
  if (given->lists) return smi_show_list(list);
  if (given->reports) return smi_show_report(list, given->sections, given->xml);
  return smi_show_table(list);
}

static int run(const options *given) {
  static smi_list list;
  int status = smi_start();
  if (status == 0) status = smi_list_gpus(given->gpus, &list);
  if (status == 0 && changes_something(&given->changes)) {
    return smi_change(&list, &given->changes);
  }
  if (status == 0) status = show(given, &list, true);
  while (given->pause_ms > 0 && (status == 0 || status == NVML_ERROR_GPU_IS_LOST)) {
    fflush(stdout);
    usleep((useconds_t)given->pause_ms * 1000);
    status = smi_list_gpus(given->gpus, &list);
    if (status == 0) status = show(given, &list, false);
  }
  return status;
}

static const struct {
  const char *name;
  int (*command)(int count, char **words);
} commands[] = {
    {"mig", smi_mig},
    {"dmon", smi_monitor_devices},
    {"pmon", smi_monitor_processes},
    {"compute-policy", smi_compute_policy},
};

int main(int argc, char **argv) {
  options given = {0};
  for (size_t i = 0; argc > 1 && i < sizeof commands / sizeof commands[0]; i++) {
    if (strcmp(argv[1], commands[i].name) == 0) return commands[i].command(argc - 2, argv + 2);
  }
  for (int i = 1; i < argc;) {
    if (is_either(argv[i], "-h", "--help")) return show_help();
    if (strcmp(argv[i], "--version") == 0) return show_version();
    if (strcmp(argv[i], "--help-query-gpu") == 0) return smi_help_query(SMI_QUERY_GPUS);
    if (strcmp(argv[i], "--help-query-compute-apps") == 0) {
      return smi_help_query(SMI_QUERY_PROCESSES);
    }
    int taken = read_option(argc - i, argv + i, &given);
    if (taken == 0) return smi_refuse(argv[i]);
    i += taken;
  }
  if (given.xml && !given.reports) return smi_refuse("-x without -q");
  if (given.output != NULL && freopen(given.output, "w", stdout) == NULL) {
    fprintf(stderr, "Unable to open %s for writing\n", given.output);
    return SMI_INVALID;
  }
  return run(&given);
}
