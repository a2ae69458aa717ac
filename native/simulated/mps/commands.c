// SPDX-License-Identifier: Apache-2.0
// The commands of protocol version 2 (docs.nvidia.com/deploy/mps, nvidia-cuda-mps-control(1)).
//
// As there, values are taken as they come: a percentage of 0 or 1000 is kept, and means no limit.
#include <stdlib.h>
#include <string.h>

#include "cuda_abi.h"
#include "simulated/mps/daemon.h"

#define WORDS 6

typedef struct arguments {
  int count;
  const char *words[WORDS];
} arguments;

static pid_t number_of(const char *text) {
  return text != NULL ? (pid_t)atoi(text) : 0;
}

// The server that a command names; says so where there is none.
static mps_server *named_server(mps_daemon *own, const char *text, FILE *out) {
  mps_server *found = mps_server_of(own, number_of(text));
  if (found == NULL) fprintf(out, "Server %s not found\n", text != NULL ? text : "");
  return found;
}

static int named_gpu(const mps_daemon *own, const char *text, FILE *out) {
  for (int i = 0; text != NULL && i < own->gpu_count; i++) {
    const char *uuid = own->machine.machine->description.gpus[own->order[i]].uuid;
    char *end;
    long number = strtol(text, &end, 10);
    if (strcmp(uuid, text) == 0 || (*text != '\0' && *end == '\0' && number == i)) {
      return own->order[i];
    }
  }
  fprintf(out, "Invalid device %s\n", text != NULL ? text : "");
  return -1;
}

static void get_server_list(mps_daemon *own, const arguments *given, FILE *out) {
  for (int i = 0; i < MPS_SERVERS; i++) {
    if (own->servers[i].pid != 0) fprintf(out, "%d\n", (int)own->servers[i].pid);
  }
}

static void get_server_status(mps_daemon *own, const arguments *given, FILE *out) {
  const mps_server *server = named_server(own, given->words[1], out);
  if (server == NULL) return;
  fputs(allot_mps_is_faulty(&own->machine, server->slot) ? "FAULT\n" : "ACTIVE\n", out);
}

static void start_server(mps_daemon *own, const arguments *given, FILE *out) {
  bool is_asked = given->count == 3 && strcmp(given->words[1], "-uid") == 0;
  if (!is_asked) {
    fputs("Usage: start_server -uid <UID>\n", out);
    return;
  }
  uid_t user = (uid_t)number_of(given->words[2]);
  for (int i = 0; i < MPS_SERVERS; i++) {
    if (own->servers[i].pid != 0 && own->servers[i].user == user) return;
  }
  if (mps_server_start(own, user, own->gpus) == NULL) fputs("Failed to start server\n", out);
}

static void shutdown_server(mps_daemon *own, const arguments *given, FILE *out) {
  mps_server *server = named_server(own, given->words[1], out);
  int slots[ALLOT_MACHINE_PROCESSES];
  if (server == NULL) return;
  bool by_force = given->count > 2 && strcmp(given->words[2], "-f") == 0;
  if (by_force || mps_clients(own, server, slots) == 0) {
    mps_server_stop(own, server);
  } else {
    fputs("Server has clients\n", out);
  }
}

static void get_client_list(mps_daemon *own, const arguments *given, FILE *out) {
  const mps_server *server = named_server(own, given->words[1], out);
  int slots[ALLOT_MACHINE_PROCESSES];
  int count = server != NULL ? mps_clients(own, server, slots) : 0;
  for (int i = 0; i < count; i++) {
    fprintf(out, "%d\n", own->machine.machine->processes[slots[i]].pid);
  }
}

static void get_device_client_list(mps_daemon *own, const arguments *given, FILE *out) {
  const mps_server *server = named_server(own, given->words[1], out);
  int slots[ALLOT_MACHINE_PROCESSES];
  int count = server != NULL ? mps_clients(own, server, slots) : 0;
  for (int i = 0; server != NULL && i < own->gpu_count; i++) {
    int gpu = own->order[i];
    fprintf(out, "%s:", own->machine.machine->description.gpus[gpu].uuid);
    for (int client = 0; client < count; client++) {
      const allot_process *process = &own->machine.machine->processes[slots[client]];
      if (allot_load(&process->gpus[gpu].contexts) != 0) fprintf(out, " %d", process->pid);
    }
    fputc('\n', out);
  }
}

static void ps(mps_daemon *own, const arguments *given, FILE *out) {
  fputs("PID       ID    SERVER    DEVICE             NAMESPACE      COMMAND\n", out);
  for (int i = 0; i < MPS_SERVERS; i++) {
    int slots[ALLOT_MACHINE_PROCESSES];
    if (own->servers[i].pid == 0) continue;
    int count = mps_clients(own, &own->servers[i], slots);
    for (int client = 0; client < count; client++) {
      const allot_process *process = &own->machine.machine->processes[slots[client]];
      for (int at = 0; at < own->gpu_count; at++) {
        int gpu = own->order[at];
        if (allot_load(&process->gpus[gpu].contexts) == 0) continue;
        fprintf(out, "%-9d %-5d %-9d %.12s       %-14llu %s\n", process->pid, slots[client],
                (int)own->servers[i].pid, own->machine.machine->description.gpus[gpu].uuid,
                (unsigned long long)process->namespace_id, process->command);
      }
    }
  }
}

static void terminate_client(mps_daemon *own, const arguments *given, FILE *out) {
  const mps_server *server = named_server(own, given->words[1], out);
  int slots[ALLOT_MACHINE_PROCESSES];
  int count = server != NULL ? mps_clients(own, server, slots) : 0;
  pid_t wanted = given->count > 2 ? number_of(given->words[2]) : 0;
  for (int i = 0; i < count; i++) {
    if (own->machine.machine->processes[slots[i]].pid != wanted) continue;
    allot_mps_end(&own->machine, slots[i], CUDA_ERROR_MPS_CLIENT_TERMINATED);
    return;
  }
  if (server != NULL) fputs("Client not found\n", out);
}

// ---- limits ------------------------------------------------------------------------------------

static double percentage_of(const char *text) {
  return text != NULL ? atof(text) : 0;
}

static void get_default_percentage(mps_daemon *own, const arguments *given, FILE *out) {
  fprintf(out, "%.1f\n", own->settings.percentage);
}

static void set_default_percentage(mps_daemon *own, const arguments *given, FILE *out) {
  own->settings.percentage = percentage_of(given->words[1]);
  fprintf(out, "%.1f\n", own->settings.percentage);
}

static void get_percentage(mps_daemon *own, const arguments *given, FILE *out) {
  const mps_server *server = named_server(own, given->words[1], out);
  if (server != NULL) fprintf(out, "%.1f\n", server->settings.percentage);
}

static void set_percentage(mps_daemon *own, const arguments *given, FILE *out) {
  mps_server *server = named_server(own, given->words[1], out);
  if (server == NULL) return;
  server->settings.percentage = percentage_of(given->words[2]);
  fprintf(out, "%.1f\n", server->settings.percentage);
}

static void show_limit(uint64_t bytes, FILE *out) {
  if (bytes == 0) {
    fputs("No limit set\n", out);
  } else {
    fprintf(out, "%lluM\n", (unsigned long long)(bytes >> 20));
  }
}

static void set_limit(uint64_t *limit, const char *text, FILE *out) {
  *limit = text != NULL ? mps_amount(text, strlen(text)) : 0;
  show_limit(*limit, out);
}

static void get_default_limit(mps_daemon *own, const arguments *given, FILE *out) {
  int gpu = named_gpu(own, given->words[1], out);
  if (gpu >= 0) show_limit(own->settings.memory_limit[gpu], out);
}

static void set_default_limit(mps_daemon *own, const arguments *given, FILE *out) {
  int gpu = named_gpu(own, given->words[1], out);
  if (gpu >= 0) set_limit(&own->settings.memory_limit[gpu], given->words[2], out);
}

static void set_server_limit(mps_daemon *own, const arguments *given, FILE *out) {
  mps_server *server = named_server(own, given->words[1], out);
  int gpu = server != NULL ? named_gpu(own, given->words[2], out) : -1;
  if (gpu >= 0) set_limit(&server->settings.memory_limit[gpu], given->words[3], out);
}

static void get_server_limit(mps_daemon *own, const arguments *given, FILE *out) {
  const mps_server *server = named_server(own, given->words[1], out);
  int gpu = server != NULL ? named_gpu(own, given->words[2], out) : -1;
  if (gpu >= 0) show_limit(server->settings.memory_limit[gpu], out);
}

static void set_default_priority(mps_daemon *own, const arguments *given, FILE *out) {
  own->settings.priority = number_of(given->words[1]) > 0;
}

static void get_default_priority(mps_daemon *own, const arguments *given, FILE *out) {
  fprintf(out, "%u\n", own->settings.priority);
}

static void device_query(mps_daemon *own, const arguments *given, FILE *out) {
  fputs("Ordinal   UUID                                      Name\n", out);
  for (int i = 0; i < own->gpu_count; i++) {
    const allot_gpu_description *gpu = &own->machine.machine->description.gpus[own->order[i]];
    fprintf(out, "%-9d %-41s %s\n", i, gpu->uuid, gpu->name);
  }
}

static void quit(mps_daemon *own, const arguments *given, FILE *out) {
  own->quits = true;
  own->quits_ns = UINT64_MAX;
  if (given->count > 2 && strcmp(given->words[1], "-t") == 0) {
    own->quits_ns = allot_now_ns() + (uint64_t)number_of(given->words[2]) * 1000000000u;
  }
}

static const struct {
  const char *name;
  void (*act)(mps_daemon *own, const arguments *given, FILE *out);
} commands[] = {
    {"get_server_list", get_server_list},
    {"get_server_status", get_server_status},
    {"start_server", start_server},
    {"shutdown_server", shutdown_server},
    {"get_client_list", get_client_list},
    {"get_device_client_list", get_device_client_list},
    {"ps", ps},
    {"terminate_client", terminate_client},
    {"get_default_active_thread_percentage", get_default_percentage},
    {"set_default_active_thread_percentage", set_default_percentage},
    {"get_active_thread_percentage", get_percentage},
    {"set_active_thread_percentage", set_percentage},
    {"get_default_device_pinned_mem_limit", get_default_limit},
    {"set_default_device_pinned_mem_limit", set_default_limit},
    {"get_device_pinned_mem_limit", get_server_limit},
    {"set_device_pinned_mem_limit", set_server_limit},
    {"get_default_client_priority", get_default_priority},
    {"set_default_client_priority", set_default_priority},
    {"device_query", device_query},
    {"quit", quit},
};

void mps_command(mps_daemon *own, char *line, FILE *out) {
  arguments given = {0};
  char *rest = NULL;
  for (char *word = strtok_r(line, " \t\r\n", &rest); word != NULL && given.count < WORDS;
       word = strtok_r(NULL, " \t\r\n", &rest)) {
    given.words[given.count++] = word;
  }
  if (given.count == 0) return;
  for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
    if (strcmp(commands[i].name, given.words[0]) == 0) {
      commands[i].act(own, &given, out);
      return;
    }
  }
  fprintf(out, "Unknown command: %s\n", given.words[0]);
}
