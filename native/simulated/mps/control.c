// SPDX-License-Identifier: Apache-2.0
// nvidia-cuda-mps-control of a simulated machine: starts the control daemon (-d, -f), or passes the
// commands of standard input on to it. Under the name of the server it is that.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated/mps/daemon.h"

static mps_daemon daemon_state;

static const char *folder(const char *variable, const char *otherwise) {
  const char *named = getenv(variable);
  return named != NULL && *named != '\0' ? named : otherwise;
}

static int talk(const char *pipes, const char *line) {
  int descriptor = mps_connect(pipes, MPS_PRIVILEGED);
  if (descriptor < 0) {
    fputs("Cannot find MPS control daemon process\n", stderr);
    return 1;
  }
  send(descriptor, line, strlen(line), MSG_NOSIGNAL);
  shutdown(descriptor, SHUT_WR);
  char buffer[4096];
  ssize_t got;
  while ((got = recv(descriptor, buffer, sizeof buffer, 0)) > 0) {
    fwrite(buffer, 1, (size_t)got, stdout);
  }
  fflush(stdout);
  close(descriptor);
  return 0;
}

static int pass_commands(const char *pipes) {
  char *line = NULL;
  size_t room = 0;
  int status = 0;
  while (status == 0 && getline(&line, &room, stdin) > 0) {
    if (strspn(line, " \t\n") != strlen(line)) status = talk(pipes, line);
  }
  free(line);
  return status;
}

static int refuse(const char *what, int error) {
  fprintf(stderr, "nvidia-cuda-mps-control: %s: %s\n", what, strerror(error));
  return 1;
}

// Takes the pipe directory, so that there is one daemon of it. Returns the exit status.
static int prepare(mps_daemon *own) {
  int error = allot_machine_open(&own->machine);
  if (error != 0) return refuse("no simulated machine", -error);
  struct stat status;
  if (stat(own->machine.path, &status) == 0) own->machine_inode = status.st_ino;
  if (mkdir(own->pipes, 0777) != 0 && errno != EEXIST) return refuse(own->pipes, errno);
  mkdir(own->logs, 0777);  // without one there is no log
  int pipes = open(own->pipes, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (pipes < 0) return refuse(own->pipes, errno);
  own->lock = openat(pipes, "control_lock", O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  close(pipes);
  if (own->lock < 0) return refuse(own->pipes, errno);
  if (flock(own->lock, LOCK_EX | LOCK_NB) != 0) {
    fputs("An instance of this daemon is already running\n", stderr);
    return 1;
  }
  own->control = mps_listen(own->pipes, MPS_CONTROL, 0666);
  own->privileged = mps_listen(own->pipes, MPS_PRIVILEGED, 0600);
  if (own->control < 0 || own->privileged < 0) return refuse(own->pipes, EACCES);
  return 0;
}

static int go_to_background(void) {
  pid_t child = fork();
  if (child < 0) return refuse("fork", errno);
  if (child > 0) _exit(0);
  setsid();
  int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int standard = 0; standard <= 2; standard++) dup2(null, standard);
  return 0;
}

// Protocol 3 came with driver 615 (docs.nvidia.com/deploy/mps, MPS v3 interface). What there is of
// it here is its list of modules, by which it is told from older programs.
static bool has_protocol_3(void) {
  allot_handle machine;
  if (allot_machine_open(&machine) != 0) return false;
  bool is_new = atoi(machine.machine->description.driver_version) >= 615;
  allot_machine_close(&machine);
  return is_new;
}

static int show_modules(void) {
  puts("Usage: nvidia-cuda-mps-control <module> <verb> [arguments]");
  puts("Modules: server namespace client device sm-partition feature memacct context-share");
  return 0;
}

int main(int argc, char **argv) {
  const char *name = strrchr(argv[0], '/');
  if (strcmp(name != NULL ? name + 1 : argv[0], "nvidia-cuda-mps-server") == 0) {
    return mps_server_main(argc, argv);
  }
  mps_daemon *own = &daemon_state;
  snprintf(own->pipes, sizeof own->pipes, "%s", folder(MPS_PIPE_ENV, MPS_PIPE_DEFAULT));
  snprintf(own->logs, sizeof own->logs, "%s", folder(MPS_LOG_ENV, MPS_LOG_DEFAULT));
  bool starts = false, background = false, helps = false;
  int protocol = 2;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "-d") == 0) {
      starts = background = true;
    } else if (strcmp(argv[i], "-f") == 0) {
      starts = true;
    } else if (strcmp(argv[i], "-multiuser-server") == 0) {
      own->serves_all_users = true;
    } else if (strcmp(argv[i], "-h") == 0) {
      helps = true;
    } else if (strcmp(argv[i], "-p") == 0 && i + 1 < argc && has_protocol_3()) {
      protocol = atoi(argv[++i]);
    } else {
      fprintf(stderr, "nvidia-cuda-mps-control: unknown option %s\n", argv[i]);
      return 1;
    }
  }
  if (protocol == 3) {
    if (helps) return show_modules();
    fputs("nvidia-cuda-mps-control: protocol 3 is not simulated\n", stderr);
    return 1;
  }
  if (!starts) return pass_commands(own->pipes);
  int status = prepare(own);
  if (status == 0 && background) status = go_to_background();
  return status != 0 ? status : mps_daemon_run(own);
}
