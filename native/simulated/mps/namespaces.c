// SPDX-License-Identifier: Apache-2.0
// Named servers and their namespaces (docs.nvidia.com/deploy/mps, "MPS v3 Namespaces"): each has a
// folder below the pipe directory with a socket `control`, and a client's limits are those of the
// namespace whose socket it came through.
//
// A daemon that is killed leaves the folders behind; the next one takes them over.
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated/mps/daemon.h"

#define FOLDER (sizeof((mps_daemon *)0)->pipes + 2 * MPS_NAME + 2)

bool mps_name_is_valid(const char *name) {
  size_t length = strlen(name);
  return length > 0 && length < MPS_NAME &&
         strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == length;
}

static void folder_of(const mps_daemon *own, const mps_server *server, const char *name,
                      char folder[FOLDER]) {
  snprintf(folder, FOLDER, name != NULL ? "%s/%s/%s" : "%s/%s", own->pipes, server->name, name);
}

static int listen_in(const char *folder) {
  if (mkdir(folder, 0755) != 0 && errno != EEXIST) return -errno;
  return mps_listen(folder, MPS_CONTROL, 0666);
}

static void remove_folder(const char *folder) {
  char path[FOLDER + sizeof MPS_CONTROL];
  snprintf(path, sizeof path, "%s/%s", folder, MPS_CONTROL);
  unlink(path);
  rmdir(folder);
}

mps_server *mps_server_named(mps_daemon *own, const char *name) {
  for (int i = 0; i < MPS_SERVERS; i++) {
    mps_server *server = &own->servers[i];
    if (server->pid != 0 && strcmp(server->name, name) == 0) return server;
  }
  return NULL;
}

mps_server *mps_server_create(mps_daemon *own, const char *name, uid_t user, uint32_t gpus) {
  mps_server *made = mps_server_start(own, user, gpus);
  if (made == NULL) return NULL;
  char folder[FOLDER];
  snprintf(made->name, sizeof made->name, "%s", name);
  snprintf(folder, sizeof folder, "%s/%s", own->logs, name);
  mkdir(folder, 0755);  // without one there is no log
  folder_of(own, made, NULL, folder);
  made->control = listen_in(folder);
  if (made->control >= 0 && mps_namespace_create(own, made, "default") != NULL) return made;
  mps_server_stop(own, made);
  return NULL;
}

mps_server *mps_server_of_user(mps_daemon *own, uid_t user) {
  uid_t owner = own->serves_all_users ? geteuid() : user;
  for (int i = 0; i < MPS_SERVERS; i++) {
    if (own->servers[i].pid != 0 && own->servers[i].user == owner) return &own->servers[i];
  }
  char name[MPS_NAME];
  snprintf(name, sizeof name, "uid_%u", (unsigned)owner);
  return mps_server_create(own, name, owner, own->gpus);
}

void mps_server_shut(mps_daemon *own, mps_server *server) {
  if (server->name[0] == '\0') return;  // protocol 2 has no folders
  for (int i = 0; i < MPS_NAMESPACES; i++) {
    if (server->namespaces[i].name[0] != '\0') {
      mps_namespace_delete(own, server, &server->namespaces[i]);
    }
  }
  char folder[FOLDER];
  folder_of(own, server, NULL, folder);
  if (server->control >= 0) close(server->control);
  server->control = -1;
  remove_folder(folder);
  server->name[0] = '\0';
}

mps_namespace *mps_namespace_named(mps_server *server, const char *name) {
  for (int i = 0; i < MPS_NAMESPACES; i++) {
    if (strcmp(server->namespaces[i].name, name) == 0) return &server->namespaces[i];
  }
  return NULL;
}

mps_namespace *mps_namespace_create(mps_daemon *own, mps_server *server, const char *name) {
  mps_namespace *made = mps_namespace_named(server, "");
  if (made == NULL) return NULL;
  char folder[FOLDER];
  folder_of(own, server, name, folder);
  int control = listen_in(folder);
  if (control < 0) return NULL;
  *made = (mps_namespace){.control = control};
  snprintf(made->name, sizeof made->name, "%s", name);
  return made;
}

void mps_namespace_delete(mps_daemon *own, mps_server *server, mps_namespace *group) {
  char folder[FOLDER];
  folder_of(own, server, group->name, folder);
  close(group->control);
  remove_folder(folder);
  group->name[0] = '\0';
}
