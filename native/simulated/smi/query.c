// SPDX-License-Identifier: Apache-2.0
// --query-gpu and --query-compute-apps: tables for programs to read.
#include <string.h>

#include "simulated/smi/smi.h"

enum { SMI_COLUMNS = 160 };

typedef struct style {
  bool heads, units;
} style;

static bool has_word(const char *words, const char *word) {
  size_t length = strlen(word);
  for (const char *at = words; at != NULL; at = strchr(at, ',')) {
    at += strspn(at, ", ");
    size_t own = strcspn(at, ", ");
    if (own == length && strncmp(at, word, length) == 0) return true;
  }
  return false;
}

static int read_style(const char *format, style *chosen) {
  if (format == NULL || !has_word(format, "csv")) {
    puts("Need to specify the format of the output with --format=csv[,noheader][,nounits].");
    return SMI_INVALID;
  }
  *chosen = (style){.heads = !has_word(format, "noheader"), .units = !has_word(format, "nounits")};
  return 0;
}

static int refuse_field(const char *name, size_t length, const char *help) {
  printf(
      "Field \"%.*s\" is not a valid field to query.\n\nFor a list of all fields: nvidia-smi"
      " --help-query-%s\n",
      (int)length, name, help);
  return SMI_INVALID;
}

// Calls `take` for each name; it returns false to stop.
static bool each_name(const char *names, bool take(const char *, size_t, void *), void *to) {
  for (const char *at = names; at != NULL; at = strchr(at, ',')) {
    at += strspn(at, ", ");
    if (!take(at, strcspn(at, ", "), to)) return false;
  }
  return true;
}

static void put_value(const char *value, const char *unit, const style *style, bool is_last) {
  fputs(value, stdout);
  if (*unit != '\0' && style->units) printf(" %s", unit);
  fputs(is_last ? "\n" : ", ", stdout);
}

static void put_head(const char *name, size_t length, const char *unit, const style *style,
                     bool is_last) {
  printf("%.*s", (int)length, name);
  if (*unit != '\0' && style->units) printf(" [%s]", unit);
  fputs(is_last ? "\n" : ", ", stdout);
}

// ---- GPUs ----

typedef struct columns {
  const smi_field *fields[SMI_COLUMNS];
  int count, status;
} columns;

static bool add_column(const char *name, size_t length, void *to) {
  columns *all = to;
  const smi_field *field = smi_find_field(name, length);
  if (field == NULL || all->count == SMI_COLUMNS) {
    all->status = refuse_field(name, length, "gpu");
    return false;
  }
  all->fields[all->count++] = field;
  return true;
}

static int show_gpus(const smi_list *list, const char *names, const style *style) {
  columns all = {.count = 0};
  if (!each_name(names, add_column, &all)) return all.status;
  for (int i = 0; style->heads && i < all.count; i++) {
    const char *name = smi_field_names(all.fields[i]);
    put_head(name, strcspn(name, " "), smi_field_unit(all.fields[i]), style, i == all.count - 1);
  }
  int status = 0;
  for (unsigned int g = 0; g < list->count; g++) {
    const smi_gpu *gpu = &list->gpus[g];
    if (gpu->problem != NVML_SUCCESS) {
      smi_report_problem(gpu, stdout);
      status = smi_failed(gpu->problem);
      continue;
    }
    for (int i = 0; i < all.count; i++) {
      char value[192];
      bool has_it = smi_value(all.fields[i], gpu, value, sizeof value);
      put_value(has_it ? value : "[N/A]", has_it ? smi_field_unit(all.fields[i]) : "", style,
                i == all.count - 1);
    }
  }
  return status;
}

// ---- processes ----

static const struct {
  const char *name, *unit;
} app_fields[] = {
    {"timestamp", ""},         {"gpu_name", ""},
    {"gpu_bus_id", ""},        {"gpu_serial", ""},
    {"gpu_uuid", ""},          {"pid", ""},
    {"process_name name", ""}, {"used_gpu_memory used_memory", "MiB"},
};

enum { PID = 5, PROCESS_NAME, USED_MEMORY, APP_FIELDS };

typedef struct app_columns {
  int fields[SMI_COLUMNS];
  int count, status;
} app_columns;

static bool add_app_column(const char *name, size_t length, void *to) {
  app_columns *all = to;
  for (int i = 0; i < APP_FIELDS && all->count < SMI_COLUMNS; i++) {
    const char *first = app_fields[i].name, *second = strchr(first, ' ');
    size_t own = strcspn(first, " ");
    if ((own == length && strncmp(first, name, length) == 0) ||
        (second != NULL && strlen(second + 1) == length &&
         strncmp(second + 1, name, length) == 0)) {
      all->fields[all->count++] = i;
      return true;
    }
  }
  all->status = refuse_field(name, length, "compute-apps");
  return false;
}

static void app_value(int field, const smi_gpu *gpu, const smi_process *process, char *text,
                      size_t room) {
  const char *name = app_fields[field].name;
  if (field == PID) {
    snprintf(text, room, "%u", process->info.pid);
  } else if (field == PROCESS_NAME) {
    snprintf(text, room, "%s", process->name);
  } else if (field == USED_MEMORY) {
    snprintf(text, room, "%llu", process->info.usedGpuMemory >> 20);
  } else if (!smi_value(smi_find_field(name, strlen(name)), gpu, text, room)) {
    snprintf(text, room, "[N/A]");
  }
}

static int show_processes(const smi_list *list, const char *names, const style *style) {
  static smi_process processes[SMI_PROCESSES];
  app_columns all = {.count = 0};
  if (!each_name(names, add_app_column, &all)) return all.status;
  for (int i = 0; style->heads && i < all.count; i++) {
    const char *name = app_fields[all.fields[i]].name;
    put_head(name, strcspn(name, " "), app_fields[all.fields[i]].unit, style, i == all.count - 1);
  }
  for (unsigned int g = 0; g < list->count; g++) {
    const smi_gpu *gpu = &list->gpus[g];
    unsigned int count = gpu->problem == NVML_SUCCESS ? smi_processes(gpu, processes) : 0;
    for (unsigned int p = 0; p < count; p++) {
      for (int i = 0; i < all.count; i++) {
        char value[256];
        app_value(all.fields[i], gpu, &processes[p], value, sizeof value);
        put_value(value, app_fields[all.fields[i]].unit, style, i == all.count - 1);
      }
    }
  }
  return 0;
}

int smi_show_query(const smi_list *list, smi_query what, const char *names, const char *format,
                   bool heads) {
  style chosen;
  int status = read_style(format, &chosen);
  if (status != 0) return status;
  chosen.heads &= heads;
  return what == SMI_QUERY_GPUS ? show_gpus(list, names, &chosen)
                                : show_processes(list, names, &chosen);
}

int smi_help_query(smi_query what) {
  puts("Fields, by their first name and the others that mean the same:\n");
  if (what == SMI_QUERY_PROCESSES) {
    for (int i = 0; i < APP_FIELDS; i++) puts(app_fields[i].name);
    return 0;
  }
  for (const smi_field *each = smi_next_field(NULL); each != NULL; each = smi_next_field(each)) {
    puts(smi_field_names(each));
  }
  return 0;
}
