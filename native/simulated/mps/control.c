// SPDX-License-Identifier: Apache-2.0
// nvidia-cuda-mps-control of a simulated machine: starts the control daemon (-d, -f), or passes
// commands on to it: those of standard input, by protocol 3 the one of its arguments. Under the
// name of the server it is that.
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

// Gives a command. The answer begins with the daemon's protocol and what the program's exit status
// is to be; *protocol is 0 where no daemon answers. Returns that status.
static int talk(const char *pipes, const char *line, int *protocol) {
  *protocol = 0;
  int descriptor = mps_connect(pipes, MPS_PRIVILEGED);
  if (descriptor < 0) return 1;
  send(descriptor, line, strlen(line), MSG_NOSIGNAL);
  shutdown(descriptor, SHUT_WR);
  char buffer[4096], head[2];
  ssize_t got = recv(descriptor, head, sizeof head, MSG_WAITALL);
  bool is_done = got == (ssize_t)sizeof head && head[1] == '0';
  if (got == (ssize_t)sizeof head) *protocol = head[0] - '0';
  FILE *out = is_done ? stdout : stderr;
  while (got > 0 && (got = recv(descriptor, buffer, sizeof buffer, 0)) > 0) {
    fwrite(buffer, 1, (size_t)got, out);
  }
  fflush(out);
  close(descriptor);
  return is_done ? 0 : 1;
}

static int command(const char *pipes, const char *line) {
  int protocol, status = talk(pipes, line, &protocol);
  if (protocol == 0) fputs("Cannot find MPS control daemon process\n", stderr);
  return status;
}

static int pass_commands(const char *pipes) {
  char *line = NULL;
  size_t room = 0;
  int status = 0;
  while (status == 0 && getline(&line, &room, stdin) > 0) {
    if (strspn(line, " \t\n") != strlen(line)) status = command(pipes, line);
  }
  free(line);
  return status;
}

static int pass_module_command(const char *pipes, int count, char **words) {
  char line[1024];
  size_t length = 0;
  for (int i = 0; i < count && length < sizeof line; i++) {
    length += (size_t)snprintf(line + length, sizeof line - length, "%s%s",
                               i > 0 ? MPS_SEPARATOR : "", words[i]);
  }
  return command(pipes, line);
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

// Protocol 3 came with driver 615 (docs.nvidia.com/deploy/mps, MPS v3 interface).
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

static int show_options(void) {
  puts("Usage: nvidia-cuda-mps-control [-d | -f]");
  return 0;
}

typedef struct options {
  bool starts, background, helps, quits, serves_all_users;
  int protocol;
  int words;  // where the first word of a command is
} options;

static bool is_either(const char *word, const char *brief, const char *full) {
  return strcmp(word, brief) == 0 || strcmp(word, full) == 0;
}

// Returns the first argument that is not understood, 0: all are.
static int read_options(int argc, char **argv, options *given) {
  bool is_new = has_protocol_3();
  const char *said = getenv(MPS_PROTOCOL_ENV);
  int i = 1;
  given->protocol = 2;
  for (; i < argc && argv[i][0] == '-'; i++) {
    if (is_either(argv[i], "-d", "--daemon")) {
      given->starts = given->background = true;
    } else if (is_either(argv[i], "-f", "--foreground")) {
      given->starts = true;
    } else if (is_either(argv[i], "-h", "--help")) {
      given->helps = true;
    } else if (strcmp(argv[i], "-multiuser-server") == 0) {
      given->serves_all_users = true;
    } else if (is_new && is_either(argv[i], "-m", "--multiuser")) {
      given->serves_all_users = true;
    } else if (is_new && is_either(argv[i], "-q", "--quit")) {
      given->quits = true;
    } else if (is_new && is_either(argv[i], "-p", "--protocol") && i + 1 < argc) {
      given->protocol = atoi(argv[++i]);
    } else {
      return i;
    }
  }
  if (is_new && said != NULL) given->protocol = atoi(said);
  given->words = i;
  return 0;
}

static int do_protocol_3(const char *pipes, const options *given, int argc, char **argv) {
  static char quit[] = "quit";
  if (given->helps) return show_modules();
  if (given->quits) return pass_module_command(pipes, 1, (char *[]){quit});
  if (given->words == argc) return show_modules();
  return pass_module_command(pipes, argc - given->words, argv + given->words);
}

int main(int argc, char **argv) {
  const char *name = strrchr(argv[0], '/');
  if (strcmp(name != NULL ? name + 1 : argv[0], "nvidia-cuda-mps-server") == 0) {
    return mps_server_main(argc, argv);
  }
  mps_daemon *own = &daemon_state;
  snprintf(own->pipes, sizeof own->pipes, "%s", folder(MPS_PIPE_ENV, MPS_PIPE_DEFAULT));
  snprintf(own->logs, sizeof own->logs, "%s", folder(MPS_LOG_ENV, MPS_LOG_DEFAULT));
  options given = {0};
  int wrong = read_options(argc, argv, &given);
  int running = 0;
  // Of a daemon that runs goes before whatever is asked for. To say nothing is no command.
  if (!given.starts) talk(own->pipes, "", &running);
  if (running != 0) given.protocol = running;
  if (wrong == 0 && given.protocol != 3 && given.words < argc) wrong = given.words;
  if (wrong != 0) {
    fprintf(stderr, "nvidia-cuda-mps-control: unknown option %s\n", argv[wrong]);
    return 1;
  }
  if (!given.starts && given.protocol == 3) return do_protocol_3(own->pipes, &given, argc, argv);
  if (given.helps) return show_options();
  if (!given.starts) return pass_commands(own->pipes);
  own->protocol = given.protocol;
  own->serves_all_users = given.serves_all_users;
  int status = prepare(own);
  if (status == 0 && given.background) status = go_to_background();
  return status != 0 ? status : mps_daemon_run(own);
}
