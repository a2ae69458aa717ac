// SPDX-License-Identifier: Apache-2.0
// MPS servers: one process for each user, which is on the GPUs for all clients of that user.
//
// A server runs nothing here: the engine gives its clients' kernels a turn in its name. It ends
// with its daemon, and its clients lose what they have when its slot is cleared.
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simulated/mps/daemon.h"

#define SERVER_BYTES (28ull << 20) /* of each GPU: what a server without clients has on an A100 */

// Arguments: the GPUs as bits, the daemon's pid, and the place of a MIG device.
int mps_server_main(int argc, char **argv) {
  if (argc != 4) return 1;
  uint32_t gpus = (uint32_t)strtoul(argv[1], NULL, 10);
  int place = atoi(argv[3]);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != (pid_t)atoi(argv[2])) return 1;
  allot_handle machine;
  if (allot_machine_open(&machine) != 0) return 1;
  if (allot_machine_attach(&machine, ALLOT_PROCESS_MPS_SERVER) != 0) return 1;
  for (int gpu = 0; gpu < ALLOT_MACHINE_GPUS; gpu++) {
    if (!(gpus >> gpu & 1)) continue;
    if (place > 0) {
      allot_process_gpu *part = &machine.machine->processes[machine.slot].gpus[gpu];
      allot_store(&part->memory_place, (uint32_t)allot_mig_memory_place(&machine, place));
      allot_store(&part->compute_place, (uint32_t)place);
    }
    if (!allot_gpu_take(&machine, gpu, SERVER_BYTES)) return 1;
    allot_store(&machine.machine->processes[machine.slot].gpus[gpu].contexts, 1u);
  }
  int slot = machine.slot;
  if (write(STDOUT_FILENO, &slot, sizeof slot) != (ssize_t)sizeof slot) return 1;
  close(STDOUT_FILENO);
  for (;;) pause();
}

static pid_t spawn(const mps_daemon *own, uid_t user, uint32_t bits, int *answers) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  char gpus[16], parent[16], place[16];
  snprintf(gpus, sizeof gpus, "%u", bits);
  snprintf(parent, sizeof parent, "%d", (int)getpid());
  snprintf(place, sizeof place, "%d", own->place);
  pid_t child = fork();
  if (child == 0) {
    char name[] = "nvidia-cuda-mps-server";
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    if (user != geteuid() && setuid(user) != 0) _exit(1);
    execv("/proc/self/exe", (char *[]){name, gpus, parent, place, NULL});
    _exit(1);
  }
  close(ends[1]);
  *answers = ends[0];
  if (child < 0) close(ends[0]);
  return child;
}

mps_server *mps_server_start(mps_daemon *own, uid_t user, uint32_t gpus) {
  mps_server *made = NULL;
  for (int i = 0; i < MPS_SERVERS && made == NULL; i++) {
    if (own->servers[i].pid == 0) made = &own->servers[i];
  }
  if (made == NULL) return NULL;
  int answers, slot = -1;
  pid_t pid = spawn(own, user, gpus, &answers);
  if (pid < 0) return NULL;
  ssize_t got;
  do {
    got = read(answers, &slot, sizeof slot);
  } while (got < 0 && errno == EINTR);  // another server may end meanwhile: SIGCHLD
  close(answers);
  if (got != (ssize_t)sizeof slot) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    mps_log(own, "control.log", "Server for user %u failed to start", (unsigned)user);
    return NULL;
  }
  *made = (mps_server){.pid = pid,
                       .user = user,
                       .slot = slot,
                       .gpus = gpus,
                       .settings = own->settings,
                       .control = -1};
  mps_log(own, "control.log", "Starting new server %d for user %u", (int)pid, (unsigned)user);
  return made;
}

mps_server *mps_server_of(mps_daemon *own, pid_t pid) {
  for (int i = 0; i < MPS_SERVERS; i++) {
    if (pid > 0 && own->servers[i].pid == pid) return &own->servers[i];
  }
  return NULL;
}

static void forget(mps_daemon *own, mps_server *server) {
  mps_log(own, "control.log", "Server %d exited", (int)server->pid);
  allot_machine_reap_slot(&own->machine, server->slot);
  mps_server_shut(own, server);
  server->pid = 0;
}

void mps_servers_bury(mps_daemon *own) {
  pid_t pid;
  while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) {
    mps_server *server = mps_server_of(own, pid);
    if (server != NULL) forget(own, server);
  }
}

void mps_server_stop(mps_daemon *own, mps_server *server) {
  kill(server->pid, SIGKILL);
  waitpid(server->pid, NULL, 0);
  forget(own, server);
}

int mps_clients(mps_daemon *own, const mps_server *server, int slots[ALLOT_MACHINE_PROCESSES]) {
  allot_machine_reap(&own->machine);
  int count = 0;
  for (int slot = 0; slot < allot_machine_high(&own->machine); slot++) {
    if (slot == server->slot || !allot_machine_taken(&own->machine, slot)) continue;
    if (allot_mps_leader(&own->machine, slot) == server->slot) slots[count++] = slot;
  }
  return count;
}

// docs.nvidia.com/deploy/mps: 48 since Volta, 60 since CUDA 13.1.
int mps_client_limit(const mps_daemon *own) {
  uint32_t version = own->machine.machine->description.cuda_version;
  return version >= 13010 ? 60 : 48;
}
