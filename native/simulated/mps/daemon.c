// SPDX-License-Identifier: Apache-2.0
// What the control daemon does: it lets clients in, starts a server for them, and hears commands.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "simulated/mps/daemon.h"

#define PERIOD_MS 50 /* how often it looks whether servers and clients live */

int visible_devices(const allot_machine_description *description, uint32_t nodes,
                    int gpus[ALLOT_MACHINE_GPUS]);

void mps_log(const mps_daemon *own, const char *file, const char *format, ...) {
  char path[4200], when[32];
  snprintf(path, sizeof path, "%s/%s", own->logs, file);
  FILE *log = fopen(path, "ae");
  if (log == NULL) return;
  struct timespec now;
  struct tm local;
  clock_gettime(CLOCK_REALTIME, &now);
  localtime_r(&now.tv_sec, &local);
  strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &local);
  fprintf(log, "[%s.%03ld Control %5d] ", when, now.tv_nsec / 1000000, (int)getpid());
  va_list arguments;
  va_start(arguments, format);
  vfprintf(log, format, arguments);
  va_end(arguments);
  fputc('\n', log);
  fclose(log);
}

// ---- clients -----------------------------------------------------------------------------------

static void answer(const mps_daemon *own, int descriptor, CUresult result) {
  mps_answer said = {.result = result, .gpus = own->gpus};
  send(descriptor, &said, sizeof said, MSG_NOSIGNAL);
  close(descriptor);
}

// The server that may serve the user. *busy: another user's has clients, and has to end first.
static mps_server *server_for(mps_daemon *own, uid_t user, bool *busy) {
  int slots[ALLOT_MACHINE_PROCESSES];
  uid_t owner = own->serves_all_users ? geteuid() : user;
  *busy = false;
  for (int i = 0; i < MPS_SERVERS; i++) {
    if (own->servers[i].pid != 0 && own->servers[i].user == owner) return &own->servers[i];
  }
  for (int i = 0; i < MPS_SERVERS; i++) {
    mps_server *other = &own->servers[i];
    if (other->pid == 0) continue;
    if (mps_clients(own, other, slots) > 0) {
      *busy = true;
      return NULL;
    }
    mps_server_stop(own, other);
  }
  return mps_server_start(own, owner);
}

static CUresult admit(mps_daemon *own, mps_server *server, const mps_question *asked) {
  int slots[ALLOT_MACHINE_PROCESSES];
  if (allot_mps_is_faulty(&own->machine, server->slot)) return CUDA_ERROR_MPS_SERVER_NOT_READY;
  if (mps_clients(own, server, slots) >= mps_client_limit(own)) {
    return CUDA_ERROR_MPS_MAX_CLIENTS_REACHED;
  }
  double most = server->settings.percentage;
  uint32_t cap = most >= 1 && most < 100 ? (uint32_t)most : 100;
  allot_process *process = &own->machine.machine->processes[asked->slot];
  process->mps.percentage = asked->percentage < cap ? asked->percentage : cap;
  process->mps.priority =
      asked->priority > server->settings.priority ? asked->priority : server->settings.priority;
  memcpy(process->mps.memory_limit, server->settings.memory_limit,
         sizeof process->mps.memory_limit);
  allot_store(&process->mps.server, (uint32_t)server->slot + 1);
  mps_log(own, "server.log", "Server %d: new client %d connected", (int)server->pid, process->pid);
  return CUDA_SUCCESS;
}

// True: it was answered.
static bool serve(mps_daemon *own, const mps_waiter *client) {
  if (client->asked.machine != own->machine_inode ||
      client->asked.slot >= ALLOT_MACHINE_PROCESSES || own->quits) {
    answer(own, client->descriptor, CUDA_ERROR_MPS_CONNECTION_FAILED);
    return true;
  }
  bool busy;
  mps_server *server = server_for(own, client->user, &busy);
  if (busy) return false;
  answer(own, client->descriptor,
         server != NULL ? admit(own, server, &client->asked) : CUDA_ERROR_MPS_SERVER_NOT_READY);
  return true;
}

static void serve_waiting(mps_daemon *own) {
  int kept = 0;
  for (int i = 0; i < own->waiting_count; i++) {
    char none;
    ssize_t got = recv(own->waiting[i].descriptor, &none, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got == 0) {
      close(own->waiting[i].descriptor);
    } else if (!serve(own, &own->waiting[i])) {
      own->waiting[kept++] = own->waiting[i];
    }
  }
  own->waiting_count = kept;
}

// Somebody who says nothing holds nobody else up for longer than this.
static void be_brief(int descriptor) {
  struct timeval patience = {.tv_sec = 3};
  setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

static void hear_client(mps_daemon *own) {
  mps_waiter client = {.descriptor = accept4(own->control, NULL, NULL, SOCK_CLOEXEC)};
  if (client.descriptor < 0) return;
  struct ucred peer;
  socklen_t size = sizeof peer;
  be_brief(client.descriptor);
  if (getsockopt(client.descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
      recv(client.descriptor, &client.asked, sizeof client.asked, MSG_WAITALL) !=
          (ssize_t)sizeof client.asked) {
    close(client.descriptor);
    return;
  }
  client.user = peer.uid;
  if (serve(own, &client)) return;
  if (own->waiting_count == MPS_WAITING) {
    answer(own, client.descriptor, CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED);
  } else {
    mps_log(own, "control.log", "User %u waits for another user's server", (unsigned)peer.uid);
    own->waiting[own->waiting_count++] = client;
  }
}

// ---- commands ----------------------------------------------------------------------------------

static void hear_command(mps_daemon *own) {
  int descriptor = accept4(own->privileged, NULL, NULL, SOCK_CLOEXEC);
  if (descriptor < 0) return;
  be_brief(descriptor);
  char line[1024];
  size_t length = 0;
  ssize_t got;
  while (length < sizeof line - 1 &&
         (got = recv(descriptor, line + length, sizeof line - 1 - length, 0)) > 0) {
    length += (size_t)got;
  }
  line[length] = '\0';
  char *text = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  if (out != NULL) {
    mps_command(own, line, out);
    fclose(out);
    for (size_t sent = 0; sent < size;) {
      ssize_t done = send(descriptor, text + sent, size - sent, MSG_NOSIGNAL);
      if (done <= 0) break;
      sent += (size_t)done;
    }
    free(text);
  }
  close(descriptor);
}

// ---- its life ----------------------------------------------------------------------------------

static bool has_ended(mps_daemon *own) {
  if (!own->quits) return false;
  int slots[ALLOT_MACHINE_PROCESSES], clients = 0;
  for (int i = 0; i < MPS_SERVERS; i++) {
    if (own->servers[i].pid != 0) clients += mps_clients(own, &own->servers[i], slots);
  }
  return clients == 0 || allot_now_ns() >= own->quits_ns;
}

static void write_pid(int pipes) {
  int descriptor =
      openat(pipes, "nvidia-cuda-mps-control.pid", O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor < 0) return;
  dprintf(descriptor, "%d\n", (int)getpid());
  close(descriptor);
}

static void ignore(int number) {}

// CUDA_VISIBLE_DEVICES of a daemon names GPUs, or one MIG device (MIG user guide, "CUDA MPS with
// MIG": a daemon, and a pipe directory, for each).
static void see_devices(mps_daemon *own) {
  const char *named = getenv("CUDA_VISIBLE_DEVICES");
  if (named == NULL || strncmp(named, "MIG-", 4) != 0) {
    own->gpu_count =
        visible_devices(&own->machine.machine->description, own->machine.nodes, own->order);
    return;
  }
  int place = allot_mig_find(&own->machine, named);
  if (place < 0) return;
  own->place = place;
  own->order[0] = allot_place_gpu(place);
  own->gpu_count = 1;
}

int mps_daemon_run(mps_daemon *own) {
  // Only to wake up: the end of a server.
  sigaction(SIGCHLD, &(struct sigaction){.sa_handler = ignore}, NULL);
  own->settings.percentage = 100;
  see_devices(own);
  for (int i = 0; i < own->gpu_count; i++) own->gpus |= 1u << own->order[i];
  int pipes = open(own->pipes, O_PATH | O_DIRECTORY | O_CLOEXEC);
  write_pid(pipes);
  mps_log(own, "control.log", "Starting control daemon using socket %s/%s", own->pipes,
          MPS_CONTROL);
  while (!has_ended(own)) {
    struct pollfd heard[] = {{own->privileged, POLLIN, 0}, {own->control, POLLIN, 0}};
    poll(heard, 2, PERIOD_MS);
    mps_servers_bury(own);
    if (heard[0].revents & POLLIN) hear_command(own);
    serve_waiting(own);
    if (heard[1].revents & POLLIN) hear_client(own);
  }
  for (int i = 0; i < MPS_SERVERS; i++) {
    if (own->servers[i].pid != 0) mps_server_stop(own, &own->servers[i]);
  }
  unlinkat(pipes, MPS_CONTROL, 0);
  unlinkat(pipes, MPS_PRIVILEGED, 0);
  unlinkat(pipes, "nvidia-cuda-mps-control.pid", 0);
  mps_log(own, "control.log", "Exit");
  allot_machine_close(&own->machine);
  return 0;
}
