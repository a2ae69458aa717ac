// SPDX-License-Identifier: Apache-2.0
// The control daemon from inside.
#ifndef ALLOTMENT_MPS_DAEMON_H
#define ALLOTMENT_MPS_DAEMON_H

#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>

#include "simulated/engine/engine.h"
#include "simulated/mps/protocol.h"

#define MPS_SERVERS 16
#define MPS_WAITING 256
#define MPS_NAMESPACES 64    /* of a server */
#define MPS_NAME 65          /* bytes of a name, with its end */
#define MPS_SEPARATOR "\x1f" /* between the words of a command of protocol 3 */

typedef struct mps_settings {
  double percentage;                          // of a namespace: 0: none
  uint64_t memory_limit[ALLOT_MACHINE_GPUS];  // bytes, 0: none
  uint32_t priority;
} mps_settings;

// A group of a server's clients, by the socket that they came through (protocol 3).
typedef struct mps_namespace {
  char name[MPS_NAME];  // empty: this place is free
  mps_settings settings;
  int control;
} mps_namespace;

typedef struct mps_server {
  pid_t pid;  // 0: this place is free
  uid_t user;
  int slot;
  uint32_t gpus;
  mps_settings settings;  // protocol 2: the daemon's, as they were when it began
  char name[MPS_NAME];    // protocol 3
  int control;            // protocol 3: of the first namespace too, which is `default`
  mps_namespace namespaces[MPS_NAMESPACES];
} mps_server;

// Who has asked and has no answer: another user's server has to end first.
typedef struct mps_waiter {
  int descriptor;
  uid_t user;
  mps_question asked;
} mps_waiter;

typedef struct mps_daemon {
  allot_handle machine;
  uint64_t machine_inode;
  char pipes[4096], logs[4096];
  int protocol;  // 2 or 3
  int lock, control, privileged;
  uint32_t gpus;                             // a bit for each that it serves
  int place;                                 // of the MIG device that it serves alone; 0: GPUs
  int order[ALLOT_MACHINE_GPUS], gpu_count;  // as CUDA_VISIBLE_DEVICES has them
  bool serves_all_users;                     // -multiuser-server
  mps_settings settings;
  mps_server servers[MPS_SERVERS];
  mps_waiter waiting[MPS_WAITING];
  int waiting_count;
  uint8_t namespaces[ALLOT_MACHINE_PROCESSES];  // of a client, by its slot: its place at its server
  bool quits;
  uint64_t quits_ns;  // by force then; UINT64_MAX: never
} mps_daemon;

// daemon.c. Serves until it is told to quit, and returns the exit status.
int mps_daemon_run(mps_daemon *own);
void mps_log(const mps_daemon *own, const char *file, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// servers.c
int mps_server_main(int argc, char **argv);
mps_server *mps_server_start(mps_daemon *own, uid_t user, uint32_t gpus);
mps_server *mps_server_of(mps_daemon *own, pid_t pid);
void mps_servers_bury(mps_daemon *own);
void mps_server_stop(mps_daemon *own, mps_server *server);
// The slots of a server's clients, dead ones cleared. Returns how many.
int mps_clients(mps_daemon *own, const mps_server *server, int slots[ALLOT_MACHINE_PROCESSES]);
int mps_client_limit(const mps_daemon *own);

// namespaces.c: what protocol 3 adds. NULL: there is none, or none could be made.
mps_server *mps_server_named(mps_daemon *own, const char *name);
mps_server *mps_server_create(mps_daemon *own, const char *name, uid_t user, uint32_t gpus);
// For a client that names no server.
mps_server *mps_server_of_user(mps_daemon *own, uid_t user);
void mps_server_shut(mps_daemon *own, mps_server *server);
mps_namespace *mps_namespace_named(mps_server *server, const char *name);
mps_namespace *mps_namespace_create(mps_daemon *own, mps_server *server, const char *name);
void mps_namespace_delete(mps_daemon *own, mps_server *server, mps_namespace *group);
bool mps_name_is_valid(const char *name);

// module_commands.c: does one command of protocol 3. Returns the program's exit status.
int mps_module_command(mps_daemon *own, char *line, FILE *out);

// commands.c: does one command of protocol 2, and writes what is to be printed.
void mps_command(mps_daemon *own, char *line, FILE *out);

#endif
