// SPDX-License-Identifier: Apache-2.0
// What the leases' tests have in common: a fresh device in a temporary folder, processes of its
// shares, and a check that aborts.
#ifndef ALLOTMENT_LEASE_TEST_H
#define ALLOTMENT_LEASE_TEST_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../lease.h"

#define CHECK(condition, ...)                                                              \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "%s:%d: process %d: %s:", __FILE__, __LINE__, getpid(), #condition); \
      fprintf(stderr, " " __VA_ARGS__);                                                    \
      fprintf(stderr, "\n");                                                               \
      exit(1);                                                                             \
    }                                                                                      \
  } while (0)

#define MS 1000000ull
#define ANYTHING_GOES \
  ALLOT_TERMS(0, ALLOT_WHOLE, 100, ALLOT_CLASS_NORMAL, ALLOT_TERMS_TAKEN | ALLOT_TERMS_GOVERNED)

static char device[64];
static char contract_path[80], seats_path[80], lock_path[80];

__attribute__((unused)) static void path_of_seat(uint64_t serial, char path[128]) {
  snprintf(path, 128, "%s/%llu", seats_path, (unsigned long long)serial);
}

// As in a share's folder: it stays when the seat is given back.
__attribute__((unused)) static void own_path_of_seat(uint64_t serial, char path[128]) {
  snprintf(path, 128, "%s/own-%llu", device, (unsigned long long)serial);
}

static void remove_files(const char *folder) {
  DIR *all = opendir(folder);
  CHECK(all != NULL);
  for (struct dirent *one; (one = readdir(all)) != NULL;) {
    if (one->d_name[0] != '.') unlinkat(dirfd(all), one->d_name, 0);
  }
  closedir(all);
}

__attribute__((unused)) static void remove_device(void) {
  remove_files(seats_path);
  rmdir(seats_path);
  remove_files(device);
  rmdir(device);
}

__attribute__((unused)) static void make_device(void) {
  strcpy(device, "/tmp/allotment-lease-XXXXXX");
  CHECK(mkdtemp(device) != NULL);
  snprintf(contract_path, sizeof contract_path, "%s/contract", device);
  snprintf(seats_path, sizeof seats_path, "%s/seats", device);
  snprintf(lock_path, sizeof lock_path, "%s/lock", device);
  int error = allot_contract_create(device, "GPU-0");
  CHECK(error == 0, "%d", error);
  int descriptor = open(lock_path, O_RDWR | O_CREAT | O_EXCL, 0600);
  CHECK(descriptor >= 0);
  close(descriptor);
}

static uint64_t serials[ALLOT_SEATS];  // of the seats that take_seat() took

__attribute__((unused)) static int take_seat(uint64_t terms) {
  uint64_t serial = 0;
  int seat = allot_contract_take(device, "share", terms, &serial);
  CHECK(seat >= 0 && seat < (int)ALLOT_SEATS, "%d", seat);
  CHECK(serial != 0);
  serials[seat] = serial;
  char path[128], own[128];
  path_of_seat(serial, path);
  own_path_of_seat(serial, own);
  CHECK(link(path, own) == 0);
  return seat;
}

// Shares have different files for their locks: here the seats are as devices of one share.
__attribute__((unused)) static int try_to_open(allot_leases *leases, int seat, uint64_t serial) {
  char own[128];
  own_path_of_seat(serial, own);
  const allot_leases_paths paths = {contract_path, seats_path, own, lock_path, seat};
  return allot_leases_open(leases, &paths, seat, serial);
}

__attribute__((unused)) static void open_seat(allot_leases *leases, int seat) {
  int error = try_to_open(leases, seat, serials[seat]);
  CHECK(error == 0, "%d", error);
}

__attribute__((unused)) static void join_seat(allot_leases *leases, int seat) {
  open_seat(leases, seat);
  int error = allot_leases_join(leases);
  CHECK(error == 0, "%d", error);
  CHECK(leases->place >= 0 && leases->place < (int)ALLOT_OWN_PLACES);
}

__attribute__((unused)) static uint64_t monotonic_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

// Memory that a process and its later children have in common.
__attribute__((unused)) static void *make_shared(size_t size) {
  void *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(made != MAP_FAILED);
  return made;
}

// A child that ends, even if it is stopped, when a check of its parent fails.
__attribute__((unused)) static pid_t fork_child(void) {
  pid_t parent = getpid(), child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
  }
  return child;
}

__attribute__((unused)) static void wait_for(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", (unsigned)status);
}

// What holds in every state that any process may see, whoever died or is stopped.
__attribute__((unused)) static void check_state(allot_leases *leases) {
  static allot_lease_state state;
  allot_leases_read(leases, &state);
  int holding = -1;
  uint32_t waiting = 0, taken = 0;
  for (int place = 0; place < (int)ALLOT_PLACES; place++) {
    const allot_place_state *seen = &state.places[place];
    CHECK(seen->state <= ALLOT_PLACE_HOLDING, "place %d: state %u", place, seen->state);
    if (seen->state == ALLOT_PLACE_FREE) continue;
    taken++;
    CHECK(seen->seat < ALLOT_SEATS, "place %d: seat %u", place, seen->seat);
    if (seen->state == ALLOT_PLACE_WAITING) waiting++;
    if (seen->state == ALLOT_PLACE_HOLDING) {
      CHECK(holding == -1, "places %d and %d hold", holding, place);
      holding = place;
    }
  }
  CHECK(state.holder == holding, "holder %d, but %d holds", state.holder, holding);
  CHECK(state.waiting == waiting, "%u wait, but %u are counted", waiting, state.waiting);
  CHECK(state.places_taken == taken, "%u taken, but %u are counted", taken, state.places_taken);
  CHECK(state.next == -1 || (state.next >= 0 && state.next < (int)ALLOT_PLACES &&
                             state.places[state.next].state == ALLOT_PLACE_WAITING),
        "next %d does not wait", state.next);
}

#endif
