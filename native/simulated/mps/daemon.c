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
  mps_answer said = {.result = result, .gpus = own->gpus, .protocol = (uint32_t)own->protocol};
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
  return mps_server_start(own, owner, own->gpus);
}

static CUresult refusal(mps_daemon *own, const mps_server *server) {
  int slots[ALLOT_MACHINE_PROCESSES];
  if (allot_mps_is_faulty(&own->machine, server->slot)) return CUDA_ERROR_MPS_SERVER_NOT_READY;
  if (mps_clients(own, server, slots) >= mps_client_limit(own)) {
    return CUDA_ERROR_MPS_MAX_CLIENTS_REACHED;
  }
  return CUDA_SUCCESS;
}

static void let_in(mps_daemon *own, const mps_server *server, const allot_mps *terms, int slot) {
  allot_process *process = &own->machine.machine->processes[slot];
  char file[MPS_NAME + 16];
  process->mps.percentage = terms->percentage;
  process->mps.priority = terms->priority;
  memcpy(process->mps.memory_limit, terms->memory_limit, sizeof process->mps.memory_limit);
  allot_store(&process->mps.server, (uint32_t)server->slot + 1);
  snprintf(file, sizeof file, "%s%sserver.log", server->name, server->name[0] != '\0' ? "/" : "");
  mps_log(own, file, "Server %d: new client %d connected", (int)server->pid, process->pid);
}

static uint32_t whole(double percentage) {
  return percentage >= 1 && percentage < 100 ? (uint32_t)percentage : 100;
}

static CUresult admit(mps_daemon *own, const mps_server *server, const mps_question *asked) {
  CUresult why = refusal(own, server);
  if (why != CUDA_SUCCESS) return why;
  const mps_settings *settings = &server->settings;
  uint32_t cap = whole(settings->percentage);
  allot_mps terms = {
      .percentage = asked->percentage < cap ? asked->percentage : cap,
      .priority = asked->priority > settings->priority ? asked->priority : settings->priority};
  memcpy(terms.memory_limit, settings->memory_limit, sizeof terms.memory_limit);
  let_in(own, server, &terms, (int)asked->slot);
  return CUDA_SUCCESS;
}

// A namespace's percentage goes before the program's, and its priority holds for who has set none.
static CUresult admit_to(mps_daemon *own, mps_server *server, int place, const mps_waiter *client) {
  if (!own->serves_all_users && client->user != server->user) return CUDA_ERROR_NOT_PERMITTED;
  CUresult why = refusal(own, server);
  if (why != CUDA_SUCCESS) return why;
  const mps_settings *settings = &server->namespaces[place].settings;
  const mps_question *asked = &client->asked;
  allot_mps terms = {
      .percentage = settings->percentage != 0 ? whole(settings->percentage) : asked->percentage,
      .priority = asked->has_priority ? asked->priority : settings->priority};
  memcpy(terms.memory_limit, settings->memory_limit, sizeof terms.memory_limit);
  own->namespaces[asked->slot] = (uint8_t)place;
  let_in(own, server, &terms, (int)asked->slot);
  return CUDA_SUCCESS;
}

static bool is_valid(const mps_daemon *own, const mps_question *asked) {
  return asked->machine == own->machine_inode && asked->slot < ALLOT_MACHINE_PROCESSES &&
         !own->quits;
}

// True: it was answered.
static bool serve(mps_daemon *own, const mps_waiter *client) {
  if (!is_valid(own, &client->asked)) {
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

// False: nobody is there, or who is says nothing.
static bool hear(int listener, mps_waiter *client) {
  client->descriptor = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
  if (client->descriptor < 0) return false;
  struct ucred peer;
  socklen_t size = sizeof peer;
  be_brief(client->descriptor);
  if (getsockopt(client->descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
      recv(client->descriptor, &client->asked, sizeof client->asked, MSG_WAITALL) !=
          (ssize_t)sizeof client->asked) {
    close(client->descriptor);
    return false;
  }
  client->user = peer.uid;
  return true;
}

static void hear_client(mps_daemon *own) {
  mps_waiter client;
  if (!hear(own->control, &client) || serve(own, &client)) return;
  if (own->waiting_count == MPS_WAITING) {
    answer(own, client.descriptor, CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED);
  } else {
    mps_log(own, "control.log", "User %u waits for another user's server", (unsigned)client.user);
    own->waiting[own->waiting_count++] = client;
  }
}

// A client of protocol 3, at the socket of a namespace. Without a server it is the one of its user.
static void hear_member(mps_daemon *own, int listener, mps_server *server, int place) {
  mps_waiter client;
  if (!hear(listener, &client)) return;
  if (!is_valid(own, &client.asked)) {
    answer(own, client.descriptor, CUDA_ERROR_MPS_CONNECTION_FAILED);
    return;
  }
  if (server == NULL) server = mps_server_of_user(own, client.user);
  answer(own, client.descriptor,
         server != NULL ? admit_to(own, server, place, &client) : CUDA_ERROR_MPS_SERVER_NOT_READY);
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
    char head[2] = {(char)('0' + own->protocol), '0'};
    if (own->protocol != 3) {
      mps_command(own, line, out);
    } else if (length > 0 && mps_module_command(own, line, out) != 0) {
      head[1] = '1';
    }
    fclose(out);
    send(descriptor, head, sizeof head, MSG_NOSIGNAL);
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

// ---- protocol 2 ------------------------------------------------------------------------------

static void serve_once(mps_daemon *own) {
  struct pollfd heard[] = {{own->privileged, POLLIN, 0}, {own->control, POLLIN, 0}};
  poll(heard, 2, PERIOD_MS);
  mps_servers_bury(own);
  if (heard[0].revents & POLLIN) hear_command(own);
  serve_waiting(own);
  if (heard[1].revents & POLLIN) hear_client(own);
}

// ---- protocol 3 ------------------------------------------------------------------------------

typedef struct sockets {
  int count;
  struct pollfd heard[2 + MPS_SERVERS * (1 + MPS_NAMESPACES)];
  struct {
    mps_server *server;
    int place;
  } of[2 + MPS_SERVERS * (1 + MPS_NAMESPACES)];
} sockets;

static void add(sockets *all, int descriptor, mps_server *server, int place) {
  all->heard[all->count] = (struct pollfd){descriptor, POLLIN, 0};
  all->of[all->count].server = server;
  all->of[all->count++].place = place;
}

static void collect(mps_daemon *own, sockets *all) {
  all->count = 0;
  add(all, own->privileged, NULL, 0);
  add(all, own->control, NULL, 0);
  for (int i = 0; i < MPS_SERVERS; i++) {
    mps_server *server = &own->servers[i];
    if (server->pid == 0) continue;
    add(all, server->control, server, 0);
    for (int place = 0; place < MPS_NAMESPACES; place++) {
      if (server->namespaces[place].name[0] != '\0') {
        add(all, server->namespaces[place].control, server, place);
      }
    }
  }
}

// A command goes last: what it removes has been heard.
static void serve_groups_once(mps_daemon *own) {
  static sockets all;
  collect(own, &all);
  poll(all.heard, (nfds_t)all.count, PERIOD_MS);
  for (int i = 1; i < all.count; i++) {
    if (!(all.heard[i].revents & POLLIN)) continue;
    hear_member(own, all.heard[i].fd, all.of[i].server, all.of[i].place);
  }
  if (all.heard[0].revents & POLLIN) hear_command(own);
  mps_servers_bury(own);
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
    if (own->protocol == 3) {
      serve_groups_once(own);
    } else {
      serve_once(own);
    }
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
