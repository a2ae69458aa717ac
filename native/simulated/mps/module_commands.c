// SPDX-License-Identifier: Apache-2.0
// The commands of protocol version 3 (docs.nvidia.com/deploy/mps, "MPS v3 Interface"): a module, a
// verb, up to three names, and options. Partitions of multiprocessors, features and configuration
// files are not simulated.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated/mps/daemon.h"

#define NAMES 3
#define COLUMNS 7
#define CELL 4300 /* bytes: a pipe directory is the longest */

typedef struct arguments {
  int count;  // of names
  const char *names[NAMES];
  const char *server, *format, *uid, *devices, *memory, *percentage, *priority;
  bool by_force;
} arguments;

typedef char cells[COLUMNS][CELL];

static int fail(FILE *out, const char *what, const char *name) {
  fprintf(out, "Error: %s%s%s\n", what, name != NULL ? ": " : "", name != NULL ? name : "");
  return 1;
}

// ---- what is printed ---------------------------------------------------------------------------

static bool is_csv(const arguments *given) {
  return given->format != NULL && strncmp(given->format, "csv", 3) == 0;
}

static void show_row(const arguments *given, int columns, cells row, FILE *out) {
  for (int i = 0; i < columns; i++) {
    const char *value = row[i][0] != '\0' ? row[i] : "-";
    if (is_csv(given)) {
      fprintf(out, "%s%s", i > 0 ? "," : "", value);
    } else {
      fprintf(out, "%-16s ", value);
    }
  }
  fputc('\n', out);
}

static void show_header(const arguments *given, int columns, const char *const names[], FILE *out) {
  static cells row;
  if (given->format != NULL && strstr(given->format, "noheader") != NULL) return;
  for (int i = 0; i < columns; i++) snprintf(row[i], CELL, "%s", names[i]);
  show_row(given, columns, row, out);
}

static int show_field(const char *field, int columns, const char *const names[], cells row,
                      FILE *out) {
  for (int i = 0; i < columns; i++) {
    if (strcmp(names[i], field) == 0) {
      fprintf(out, "%s\n", row[i][0] != '\0' ? row[i] : "-");
      return 0;
    }
  }
  return fail(out, "unknown field", field);
}

static void write_amount(uint64_t bytes, char *cell) {
  static const char units[] = "KMG";
  int unit = -1;
  while (unit < 2 && bytes != 0 && bytes % 1024 == 0) {
    bytes /= 1024;
    unit++;
  }
  if (bytes != 0 && unit >= 0) {
    snprintf(cell, CELL, "%llu%c", (unsigned long long)bytes, units[unit]);
  }
}

static uint64_t limit_of(const mps_daemon *own, const mps_settings *settings) {
  return own->gpu_count > 0 ? settings->memory_limit[own->order[0]] : 0;
}

static const char *status_of(mps_daemon *own, const mps_server *server) {
  return allot_mps_is_faulty(&own->machine, server->slot) ? "Fault" : "Ready";
}

static const char *const server_columns[] = {
    "name", "uid", "pid", "status", "pipe-directory", "allowed-devices", "context-ids"};

static void fill_server(mps_daemon *own, const mps_server *server, cells row) {
  memset(row, 0, sizeof(cells));
  snprintf(row[0], CELL, "%s", server->name);
  snprintf(row[1], CELL, "%u", (unsigned)server->user);
  snprintf(row[2], CELL, "%d", (int)server->pid);
  snprintf(row[3], CELL, "%s", status_of(own, server));
  snprintf(row[4], CELL, "%s/%s", own->pipes, server->name);
  for (int i = 0; i < own->gpu_count; i++) {
    if (!(server->gpus >> own->order[i] & 1)) continue;
    size_t at = strlen(row[5]);
    snprintf(row[5] + at, CELL - at, "%s%s", at > 0 ? " " : "",
             own->machine.machine->description.gpus[own->order[i]].uuid);
  }
}

static const char *const namespace_columns[] = {"name",
                                                "server",
                                                "server-status",
                                                "pinned-memory-limit",
                                                "active-thread-percentage",
                                                "client-priority",
                                                "pipe-directory"};

static void fill_namespace(mps_daemon *own, const mps_server *server, const mps_namespace *group,
                           cells row) {
  memset(row, 0, sizeof(cells));
  snprintf(row[0], CELL, "%s", group->name);
  snprintf(row[1], CELL, "%s", server->name);
  snprintf(row[2], CELL, "%s", status_of(own, server));
  write_amount(limit_of(own, &group->settings), row[3]);
  if (group->settings.percentage != 0) snprintf(row[4], CELL, "%g", group->settings.percentage);
  snprintf(row[5], CELL, "%u", group->settings.priority);
  snprintf(row[6], CELL, "%s/%s/%s", own->pipes, server->name, group->name);
}

// ---- limits ------------------------------------------------------------------------------------

static int set_limits(mps_daemon *own, mps_settings *settings, const arguments *given, FILE *out) {
  mps_settings wanted = *settings;
  if (given->memory == NULL && given->percentage == NULL && given->priority == NULL) {
    return fail(out, "nothing to set", NULL);
  }
  if (given->memory != NULL) {
    uint64_t bytes = mps_amount(given->memory, strlen(given->memory));
    if (bytes == 0) return fail(out, "invalid limit of memory", given->memory);
    for (int i = 0; i < own->gpu_count; i++) wanted.memory_limit[own->order[i]] = bytes;
  }
  if (given->percentage != NULL) {
    char *end;
    long value = strtol(given->percentage, &end, 10);  // whole percents, as documented
    if (*end != '\0' || value < 1 || value > 100) {
      return fail(out, "invalid percentage", given->percentage);
    }
    wanted.percentage = (double)value;
  }
  if (given->priority != NULL) {
    if (strcmp(given->priority, "0") != 0 && strcmp(given->priority, "1") != 0) {
      return fail(out, "invalid priority", given->priority);
    }
    wanted.priority = given->priority[0] == '1';
  }
  *settings = wanted;
  return 0;
}

// ---- servers -----------------------------------------------------------------------------------

static uint32_t named_gpus(const mps_daemon *own, const char *list) {
  uint32_t gpus = 0;
  for (int i = 0; i < own->gpu_count; i++) {
    const char *uuid = own->machine.machine->description.gpus[own->order[i]].uuid;
    char number[16];
    snprintf(number, sizeof number, "%d", i);
    for (const char *at = list; *at != '\0';) {
      size_t length = strcspn(at, ",");
      bool is_it = (strlen(uuid) == length && memcmp(uuid, at, length) == 0) ||
                   (strlen(number) == length && memcmp(number, at, length) == 0);
      if (is_it) gpus |= 1u << own->order[i];
      at += length;
      if (*at == ',') at++;
    }
  }
  return gpus;
}

static int server_create(mps_daemon *own, const arguments *given, FILE *out) {
  uid_t user = given->uid != NULL ? (uid_t)strtoul(given->uid, NULL, 10) : geteuid();
  char name[MPS_NAME];
  snprintf(name, sizeof name, "uid_%u", (unsigned)user);
  if (given->count > 0) snprintf(name, sizeof name, "%s", given->names[0]);
  if (given->count == 0 && given->uid == NULL) return fail(out, "a name or --uid is needed", NULL);
  if (given->count > 0 && !mps_name_is_valid(given->names[0])) {
    return fail(out, "invalid name", given->names[0]);
  }
  if (own->serves_all_users && user != 0) return fail(out, "only --uid=0 is allowed", NULL);
  if (mps_server_named(own, name) != NULL) return fail(out, "there is a server", name);
  uint32_t gpus = given->devices != NULL ? named_gpus(own, given->devices) : own->gpus;
  if (gpus == 0) return 0;  // as the real one: it is taken, and the server ends without a word
  if (mps_server_create(own, name, user, gpus) == NULL) return fail(out, "no server", name);
  return 0;
}

static mps_server *asked_server(mps_daemon *own, const char *name, FILE *out) {
  mps_server *found = name != NULL ? mps_server_named(own, name) : NULL;
  if (found == NULL) fail(out, "no such server", name);
  return found;
}

static int server_delete(mps_daemon *own, const arguments *given, FILE *out) {
  mps_server *server = asked_server(own, given->names[0], out);
  int slots[ALLOT_MACHINE_PROCESSES];
  if (server == NULL) return 1;
  if (!given->by_force && mps_clients(own, server, slots) > 0) {
    return fail(out, "it has clients", server->name);
  }
  mps_server_stop(own, server);
  return 0;
}

static int server_list(mps_daemon *own, const arguments *given, FILE *out) {
  static cells row;
  if (given->count > 0 && asked_server(own, given->names[0], out) == NULL) return 1;
  show_header(given, COLUMNS, server_columns, out);
  for (int i = 0; i < MPS_SERVERS; i++) {
    const mps_server *server = &own->servers[i];
    if (server->pid == 0) continue;
    if (given->count > 0 && strcmp(server->name, given->names[0]) != 0) continue;
    fill_server(own, server, row);
    show_row(given, COLUMNS, row, out);
  }
  return 0;
}

static int server_set(mps_daemon *own, const arguments *given, FILE *out) {
  mps_server *server = asked_server(own, given->names[0], out);
  return server != NULL ? set_limits(own, &server->namespaces[0].settings, given, out) : 1;
}

// ---- namespaces --------------------------------------------------------------------------------

static int clients_of(mps_daemon *own, const mps_server *server, const mps_namespace *group) {
  int slots[ALLOT_MACHINE_PROCESSES], found = 0;
  int count = mps_clients(own, server, slots);
  for (int i = 0; i < count; i++) {
    if (&server->namespaces[own->namespaces[slots[i]]] == group) found++;
  }
  return found;
}

static mps_namespace *asked_namespace(mps_server *server, const char *name, FILE *out) {
  bool is_named = name != NULL && *name != '\0';
  mps_namespace *found = is_named ? mps_namespace_named(server, name) : NULL;
  if (found == NULL) fail(out, "no such namespace", name);
  return found;
}

static int namespace_create(mps_daemon *own, const arguments *given, FILE *out) {
  mps_server *server = asked_server(own, given->server, out);
  if (server == NULL) return 1;
  const char *name = given->count > 0 ? given->names[0] : "";
  if (!mps_name_is_valid(name)) return fail(out, "invalid name", name);
  if (mps_namespace_named(server, name) != NULL) return fail(out, "there is a namespace", name);
  if (mps_namespace_create(own, server, name) == NULL) return fail(out, "no namespace", name);
  return 0;
}

static int namespace_delete(mps_daemon *own, const arguments *given, FILE *out) {
  mps_server *server = asked_server(own, given->server, out);
  mps_namespace *group = server != NULL ? asked_namespace(server, given->names[0], out) : NULL;
  if (group == NULL) return 1;
  if (group == server->namespaces) return fail(out, "it cannot be deleted", group->name);
  if (!given->by_force && clients_of(own, server, group) > 0) {
    return fail(out, "it has clients", group->name);
  }
  mps_namespace_delete(own, server, group);
  return 0;
}

static int namespace_list(mps_daemon *own, const arguments *given, FILE *out) {
  static cells row;
  show_header(given, COLUMNS, namespace_columns, out);
  for (int i = 0; i < MPS_SERVERS * MPS_NAMESPACES; i++) {
    const mps_server *server = &own->servers[i / MPS_NAMESPACES];
    const mps_namespace *group = &server->namespaces[i % MPS_NAMESPACES];
    if (server->pid == 0 || group->name[0] == '\0') continue;
    if (given->server != NULL && strcmp(server->name, given->server) != 0) continue;
    if (given->count > 0 && strcmp(group->name, given->names[0]) != 0) continue;
    fill_namespace(own, server, group, row);
    show_row(given, COLUMNS, row, out);
  }
  return 0;
}

static int namespace_set(mps_daemon *own, const arguments *given, FILE *out) {
  mps_server *server = asked_server(own, given->server, out);
  mps_namespace *group = server != NULL ? asked_namespace(server, given->names[0], out) : NULL;
  return group != NULL ? set_limits(own, &group->settings, given, out) : 1;
}

static int namespace_get(mps_daemon *own, const arguments *given, FILE *out) {
  static cells row;
  if (given->count != 3) return fail(out, "a name, a server and a field are needed", NULL);
  mps_server *server = asked_server(own, given->names[1], out);
  mps_namespace *group = server != NULL ? asked_namespace(server, given->names[0], out) : NULL;
  if (group == NULL) return 1;
  fill_namespace(own, server, group, row);
  return show_field(given->names[2], COLUMNS, namespace_columns, row, out);
}

// ---- clients -----------------------------------------------------------------------------------

static const char *const client_columns[] = {"pid", "server", "device", "namespace", "cmd"};

static int client_list(mps_daemon *own, const arguments *given, FILE *out) {
  static cells row;
  if (given->server != NULL && asked_server(own, given->server, out) == NULL) return 1;
  show_header(given, 5, client_columns, out);
  for (int i = 0; i < MPS_SERVERS; i++) {
    const mps_server *server = &own->servers[i];
    int slots[ALLOT_MACHINE_PROCESSES];
    if (server->pid == 0) continue;
    if (given->server != NULL && strcmp(server->name, given->server) != 0) continue;
    int count = mps_clients(own, server, slots);
    for (int client = 0; client < count; client++) {
      const allot_process *process = &own->machine.machine->processes[slots[client]];
      memset(row, 0, sizeof row);
      snprintf(row[0], CELL, "%d", process->pid);
      snprintf(row[1], CELL, "%s", server->name);
      snprintf(row[2], CELL, "%d", 0);
      snprintf(row[3], CELL, "%s", server->namespaces[own->namespaces[slots[client]]].name);
      snprintf(row[4], CELL, "%s", process->command);
      show_row(given, 5, row, out);
    }
  }
  return 0;
}

static int quit(mps_daemon *own, const arguments *given, FILE *out) {
  own->quits = true;
  own->quits_ns = 0;
  return 0;
}

// ---- which -------------------------------------------------------------------------------------

static const struct {
  const char *module, *verb;
  int (*act)(mps_daemon *own, const arguments *given, FILE *out);
} commands[] = {
    {"server", "create", server_create},
    {"server", "delete", server_delete},
    {"server", "list", server_list},
    {"server", "set", server_set},
    {"namespace", "create", namespace_create},
    {"namespace", "delete", namespace_delete},
    {"namespace", "list", namespace_list},
    {"namespace", "set", namespace_set},
    {"namespace", "get", namespace_get},
    {"client", "list", client_list},
    {"quit", "", quit},
};

// Takes one word. False: it is no option of any command.
static bool take(arguments *given, const char *word) {
  const struct {
    const char *name;
    const char **value;
  } options[] = {
      {"server", &given->server},
      {"format", &given->format},
      {"uid", &given->uid},
      {"allowed-devices", &given->devices},
      {"pinned-memory-limit", &given->memory},
      {"active-thread-percentage", &given->percentage},
      {"client-priority", &given->priority},
  };
  const char *name = strncmp(word, "--", 2) == 0 ? word + 2 : word;
  const char *value = strchr(name, '=');
  for (size_t i = 0; value != NULL && i < sizeof options / sizeof *options; i++) {
    size_t length = strlen(options[i].name);
    if (length != (size_t)(value - name) || memcmp(options[i].name, name, length) != 0) continue;
    *options[i].value = value + 1;
    return true;
  }
  if (strcmp(word, "--force") == 0) return given->by_force = true;
  if (name != word || value != NULL || given->count == NAMES) return false;
  given->names[given->count++] = word;
  return true;
}

int mps_module_command(mps_daemon *own, char *line, FILE *out) {
  arguments given = {0};
  char *rest = NULL;
  const char *module = strtok_r(line, MPS_SEPARATOR, &rest);
  const char *verb = module != NULL ? strtok_r(NULL, MPS_SEPARATOR, &rest) : NULL;
  for (const char *word; verb != NULL && (word = strtok_r(NULL, MPS_SEPARATOR, &rest)) != NULL;) {
    if (!take(&given, word)) return fail(out, "unknown argument", word);
  }
  for (size_t i = 0; module != NULL && i < sizeof commands / sizeof *commands; i++) {
    bool is_it = strcmp(commands[i].module, module) == 0 &&
                 strcmp(commands[i].verb, verb != NULL ? verb : "") == 0;
    if (is_it) return commands[i].act(own, &given, out);
  }
  return fail(out, "unknown command", module);
}
