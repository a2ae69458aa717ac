// SPDX-License-Identifier: Apache-2.0
// Who takes turns: a process's view of the files, its place among those of its share, and the
// places of processes that have ended.
#include "lease_places.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mapping.h"
#include "neighbours.h"
#include "slots.h"

// ---- locks of places ----

static int64_t byte_of(const allot_leases *leases, int place) {
  return leases->lock_base + place;
}

// What a dead owner's work took that it could not charge itself. Its work ended with it, soon after
// its last sign of life.
static uint64_t left_by_dead(const allot_leases *leases, int place) {
  const allot_place_head *head = &leases->file->heads[place];
  uint64_t since_ns = allot_lease_uncharged_since(head);
  if (load(&head->busy) == 0 || since_ns == 0) return 0;
  return since(load(&head->beat_ns), since_ns);
}

// Frees the place if its owner is dead. Under its lock, or it might be a newcomer's by then.
bool lease_free_if_dead(allot_leases *leases, int descriptor, int place, uint64_t now_ns) {
  LEASE_STEP("reaping");
  if (allot_slot_try(descriptor, byte_of(leases, place)) != 1) return false;
  LEASE_STEP("found dead");
  allot_event ended = {.kind = ALLOT_EVENT_LEAVE,
                       .place = place,
                       .used_ns = left_by_dead(leases, place),
                       .now_ns = now_ns};
  // Charged once, whatever becomes of this process.
  store(&leases->file->heads[place].busy, 0u);
  lease_settle(leases, &ended, 1);
  store(&leases->file->heads[place].pid, 0);
  allot_slot_release(descriptor, byte_of(leases, place));
  return true;
}

// Frees the places of this share's dead processes.
void lease_reap(allot_leases *leases, uint64_t now_ns) {
  allot_lease_state state;
  lease_read_state(leases, &state);
  int descriptor = open(leases->lock_path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return;
  for (int place = 0; place < (int)ALLOT_OWN_PLACES; place++) {
    if (place == leases->place || state.places[place].state == ALLOT_PLACE_FREE) continue;
    lease_free_if_dead(leases, descriptor, place, now_ns);
  }
  close(descriptor);
  neighbours_look_for_dead(leases);
}

// ---- files ----

static int check_heads(const allot_contract *contract, const allot_leases_file *file) {
  if (contract->magic != ALLOT_CONTRACT_MAGIC || file->magic != ALLOT_SEAT_MAGIC) return -EINVAL;
  if (contract->version != ALLOT_CONTRACT_VERSION || file->version != ALLOT_SEAT_VERSION) {
    return -EPROTO;
  }
  return 0;
}

int allot_leases_open(allot_leases *leases, const allot_leases_paths *paths, int seat,
                      uint64_t serial) {
  *leases = (allot_leases){
      .seat = seat,
      .serial = serial,
      .place = -1,
      .lock_base = ALLOT_PLACE_LOCK_BASE + (int64_t)ALLOT_OWN_PLACES * paths->device};
  if (seat < 0 || seat >= (int)ALLOT_SEATS) return -EINVAL;
  if (strlen(paths->seats) >= sizeof leases->seats_path) return -ENAMETOOLONG;
  if (strlen(paths->lock) >= sizeof leases->lock_path) return -ENAMETOOLONG;
  void *contract = NULL, *file = NULL;
  int error = allot_map_file(paths->contract, sizeof(allot_contract), O_RDONLY, &contract);
  if (error != 0) return error;
  error = allot_map_file(paths->own, sizeof(allot_leases_file), O_RDWR, &file);
  if (error == 0) {
    error = check_heads(contract, file);
    if (error != 0) munmap(file, sizeof(allot_leases_file));
  }
  if (error != 0) {
    munmap(contract, sizeof(allot_contract));
    return error;
  }
  leases->contract = contract;
  leases->file = file;
  strcpy(leases->seats_path, paths->seats);
  strcpy(leases->lock_path, paths->lock);
  strcpy(leases->own_path, paths->own);
  lease_keep_seat(leases, 0);
  return 0;
}

void allot_leases_close(allot_leases *leases) {
  allot_leases_leave(leases);
  if (leases->contract != NULL) {
    munmap((void *)(uintptr_t)leases->contract, sizeof(allot_contract));
  }
  if (leases->file != NULL) munmap(leases->file, sizeof(allot_leases_file));
  neighbours_close(leases);
  *leases = (allot_leases){.place = -1};
}

// ---- places ----

// The place's states get their space now: a full disk is an error here, and no SIGBUS later.
static int prepare_place(allot_leases *leases, int place) {
  int descriptor = allot_open(leases->own_path, O_RDWR);
  if (descriptor < 0) return descriptor;
  off_t at =
      (off_t)(offsetof(allot_leases_file, buffers) + sizeof(allot_seat_buffer) * 2 * (size_t)place);
  int error = -posix_fallocate(descriptor, at, (off_t)(2 * sizeof(allot_seat_buffer)));
  // A sandbox that forbids asking is no full disk.
  if (error != -ENOSPC && error != -EDQUOT && error != -EFBIG && error != -EIO) {
    error = allot_slot_show(descriptor, ALLOT_LIFE_LOCK_BASE + place);
  }
  if (error == 0) error = allot_slot_keep(descriptor, &leases->life_map);
  close(descriptor);
  return error;
}

static void take_place(allot_leases *leases, int place) {
  leases->place = place;
  allot_place_head *head = &leases->file->heads[place];
  store(&head->pid, (int32_t)getpid());
  uint64_t now = now_ns(), left = left_by_dead(leases, place);
  allot_lease_beat(leases, false, now);
  allot_lease_tell_running(leases, 0);
  LEASE_STEP("seated");
  // Whatever a dead owner of the place had ends with this.
  allot_event events[2] = {
      {.kind = ALLOT_EVENT_LEAVE, .place = place, .used_ns = left, .now_ns = now},
      {.kind = ALLOT_EVENT_JOIN, .place = place, .seat = leases->seat, .now_ns = now},
  };
  lease_settle(leases, events, 2);
  // Most of all after the machine was started again.
  lease_reap(leases, now);
}

static void unlock_place(allot_leases *leases) {
  if (leases->place_map != NULL) munmap(leases->place_map, 1);
  if (leases->life_map != NULL) munmap(leases->life_map, 1);
  leases->place_map = leases->life_map = NULL;
}

int allot_leases_join(allot_leases *leases) {
  if (leases->place >= 0) return 0;
  int descriptor = allot_open(leases->lock_path, O_RDWR);
  if (descriptor < 0) return descriptor;
  int place =
      allot_slot_claim(descriptor, leases->lock_base, (int)ALLOT_OWN_PLACES, &leases->place_map);
  close(descriptor);
  int error = place < 0 ? place : prepare_place(leases, place);
  if (error != 0) {
    unlock_place(leases);
    return error;
  }
  take_place(leases, place);
  return 0;
}

void allot_leases_leave(allot_leases *leases) {
  if (leases->place < 0) return;
  allot_event event = {.kind = ALLOT_EVENT_LEAVE, .place = leases->place, .now_ns = now_ns()};
  lease_settle(leases, &event, 1);
  int place = leases->place;
  leases->place = -1;
  store(&leases->file->heads[place].pid, 0);
  unlock_place(leases);
}

// ---- how long this process waits ----

bool lease_was_stopped(const allot_leases *leases, uint64_t now_ns) {
  return now_ns > leases->promised_ns + 2 * OVERRUN_NS;
}

void lease_note_wanted(allot_leases *leases, const allot_lease_state *state, uint64_t now_ns) {
  bool waits = leases->place >= 0 && state->places[leases->place].state == ALLOT_PLACE_WAITING;
  if (!waits) {
    leases->wanted_ns = 0;
  } else if (leases->wanted_ns == 0 || lease_was_stopped(leases, now_ns)) {
    leases->wanted_ns = now_ns;
  }
}
