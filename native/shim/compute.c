// SPDX-License-Identifier: Apache-2.0
// This process's part in the turns of its share's devices: opened when the first launch asks.
#include "compute.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "reason.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

_Alignas(64) char compute_nothing[64];
#define NOTHING ((compute_state *)(void *)compute_nothing)

_Static_assert(ALLOT_SLOT_LOCK_BASE + ALLOT_MAX_SLOTS <= ALLOT_PLACE_LOCK_BASE,
               "no slot and place of a share have the same byte");

static bool open_device(compute_state *all, int device) {
  compute_device *at = &all->devices[device];
  const allot_device_policy *policy = all->own->policies[device];
  const joined_device *joined = &all->own->joined[device];
  at->all = all;
  at->device = device;
  at->leases.place = -1;
  if (policy->seat_serial == 0) return false;
  char contract[1100], seats[1100], own[1100], lock[1100];
  const char *directory = joined->ledger->directory;
  snprintf(contract, sizeof contract, "%s/contract-%d", directory, joined->index);
  snprintf(seats, sizeof seats, "%s/seats-%d", directory, joined->index);
  snprintf(own, sizeof own, "%s/seat-%d", directory, joined->index);
  snprintf(lock, sizeof lock, "%s/usage", directory);
  const allot_leases_paths paths = {contract, seats, own, lock, joined->index};
  int error = allot_leases_open(&at->leases, &paths, (int)policy->seat, policy->seat_serial);
  // Turns that are promised and cannot be taken: nothing may run there.
  if (error != 0) {
    at->place = PLACE_REFUSED;
    say_unusable(directory, "file of turns", -error);
  }
  at->has_turns = 1;
  return true;
}

bool compute_launches_block(void) {
  const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
  return blocking != NULL && atoi(blocking) != 0;
}

static compute_state *make_state(process *own) {
  void *made =
      mmap(NULL, sizeof(compute_state), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return NULL;
  madvise(made, sizeof(compute_state), MADV_WIPEONFORK);
  compute_state *all = made;
  all->own = own;
  all->device_count = (int)own->device_count;
  all->marks.launches_block = own->launches_block != 0 || compute_launches_block();
  for (int device = 0; device < all->device_count; device++) {
    if (open_device(all, device)) all->has_turns = 1;
  }
  if (all->has_turns != 0) return all;
  munmap(made, sizeof(compute_state));
  return NOTHING;
}

compute_state *compute_state_open(process *own) {
  if (process_attach() == NULL) return NULL;
  int error = errno;
  process_lock(&own->compute_lock);
  compute_state *made = own->compute;
  if (made == NULL) {
    made = make_state(own);
    __atomic_store_n(&own->compute, made, __ATOMIC_RELEASE);
  }
  process_unlock(&own->compute_lock);
  errno = error;
  return made;
}

#define RESUME_STEP_NS 10000000L

void compute_await_resume(process *own, int device) {
  compute_state *all = device < 0 ? NULL : compute_state_of(own);
  const compute_device *at = all == NULL ? NULL : &all->devices[device];
  if (at == NULL || at->has_turns == 0 || at->leases.contract == NULL) return;
  while (compute_is_suspended(at)) {
    nanosleep(&(struct timespec){.tv_nsec = RESUME_STEP_NS}, NULL);
  }
}

// Turns are taken by the machine's clock: times by another one would renew a ceiling's budget at
// each change between two processes of the share. False also where the kernel has no such file.
static bool has_own_clock(void) {
  char text[128] = "";
  int descriptor = open("/proc/self/timens_offsets", O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  ssize_t size = read(descriptor, text, sizeof text - 1);
  close(descriptor);
  if (size <= 0) return false;
  text[strcspn(text, "\n")] = '\0';  // after the offset of the monotonic clock
  return strpbrk(text, "123456789") != NULL;
}

static bool take_place(process *own, void *context) {
  compute_device *at = context;
  if (has_own_clock()) {
    say_once("its clock is not the machine's, by a time namespace, so it cannot take turns");
    return false;
  }
  int error = allot_leases_join(&at->leases);
  if (error != 0) {
    say_unusable(at->all->own->joined[at->device].ledger->directory, "file of turns", -error);
  }
  return error == 0;
}

static bool join_locked(compute_device *at) {
  if (at->place == PLACE_NONE) {
    at->waiting_since_ns = 0;
    bool taken = process_guarded(at->all->own, take_place, at);
    // All places may be taken now, and one of them free at the next launch.
    if (taken) __atomic_store_n(&at->place, PLACE_TAKEN, __ATOMIC_RELEASE);
  }
  return at->place == PLACE_TAKEN;
}

bool compute_take_place(compute_device *at) {
  int error = errno;
  process_lock(&at->all->start_lock);
  bool joined = join_locked(at) && keeper_start(at->all);
  process_unlock(&at->all->start_lock);
  errno = error;
  return joined;
}

// ---- the end of contexts ----

static compute_state *state_if_any(process *own) {
  compute_state *all = __atomic_load_n(&own->compute, __ATOMIC_ACQUIRE);
  return all == NOTHING ? NULL : all;
}

// The state may be opened by another thread between the two.
void compute_pause(process *own, CUcontext leaving) {
  compute_state *all = state_if_any(own);
  if (all == NULL) return;
  // First: the keeper goes on while a thread that sets a mark is waited for.
  if (leaving != NULL) stream_states_leave_context(all, leaving);
  for (int device = 0; device < all->device_count; device++) {
    pthread_mutex_lock(&all->devices[device].marks_lock);
  }
  all->is_paused = 1;
}

void compute_resume(process *own, CUcontext gone) {
  compute_state *all = state_if_any(own);
  if (all == NULL || all->is_paused == 0) return;
  stream_states_left_context(all, gone);
  all->is_paused = 0;
  for (int device = all->device_count - 1; device >= 0; device--) {
    pthread_mutex_unlock(&all->devices[device].marks_lock);
  }
}
