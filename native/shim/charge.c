// SPDX-License-Identifier: Apache-2.0
// One place where the ledger's use changes.
#include "charge.h"

#include <time.h>

#include "dead.h"
#include "driver.h"
#include "graphs.h"
#include "pools.h"

static bool fits(const process *own, int device, uint64_t bytes) {
  const joined_device *joined = &own->joined[device];
  uint64_t limit = allot_ledger_limit(joined->ledger, joined->index);
  uint64_t used = allot_ledger_used(joined->ledger, joined->index);
  return used <= limit && bytes <= limit - used;
}

static bool reserve(process *own, int device, uint64_t bytes) {
  pthread_mutex_t *lock = &own->devices[device].charge_lock;
  pthread_mutex_lock(lock);
  const joined_device *joined = &own->joined[device];
  bool reserved = allot_ledger_reserve(joined->ledger, joined->index, bytes);
  pthread_mutex_unlock(lock);
  return reserved;
}

bool charge_try(process *own, int device, uint64_t bytes) {
  return fits(own, device, bytes) && reserve(own, device, bytes);
}

// Other processes and threads hold reservations for moments that turn out not to be needed (a pool
// that does not grow after all): a refusal must not depend on having met one.
static bool outlast_moments(process *own, int device, uint64_t bytes) {
  static const long pauses_us[] = {10, 40, 150, 400};
  for (size_t i = 0; i < sizeof pauses_us / sizeof *pauses_us; i++) {
    nanosleep(&(struct timespec){.tv_nsec = pauses_us[i] * 1000}, NULL);
    if (charge_try(own, device, bytes)) return true;
  }
  return false;
}

// A program that is killed and started again finds its memory taken until the driver has freed it.
static bool outlast_the_dead(process *own, int device, uint64_t bytes) {
  patience left = patience_begin(DEAD_PATIENCE_NS);
  while (dead_could_give(own, device, bytes)) {
    if (charge_try(own, device, bytes)) return true;
    if (!patience_step(&left)) return false;
  }
  return charge_try(own, device, bytes);
}

bool charge_last_try(process *own, int device, uint64_t bytes) {
  if (charge_try(own, device, bytes)) return true;
  const joined_device *joined = &own->joined[device];
  if (bytes <= allot_ledger_limit(joined->ledger, joined->index)) {
    if (outlast_the_dead(own, device, bytes)) return true;
    if (outlast_moments(own, device, bytes)) return true;
  }
  return reserve(own, device, bytes);  // counts the refusal
}

bool charge_now(process *own, int device, uint64_t bytes) {
  if (LIKELY(charge_try(own, device, bytes))) return true;
  pools_settle(own, device);
  graphs_settle(own, device);
  return charge_try(own, device, bytes);
}

bool charge_acquire(process *own, int device, uint64_t bytes) {
  return LIKELY(charge_now(own, device, bytes)) || charge_last_try(own, device, bytes);
}

bool reservation_try(reservation *needed, uint64_t bytes) {
  if (bytes <= needed->bytes) return true;
  if (!charge_now(needed->own, needed->device, bytes - needed->bytes)) {
    needed->wanted = bytes;
    return false;
  }
  needed->bytes = bytes;
  return true;
}

CUresult reservation_called(reservation *needed, CUresult result) {
  needed->is_short = result == CUDA_ERROR_OUT_OF_MEMORY;
  return result;
}

void reservation_keep(reservation *needed) {
  needed->bytes = 0;
}

bool reservation_goes_on(reservation *needed) {
  const uint64_t wanted = needed->wanted;
  const bool was_short = needed->is_short;
  needed->wanted = 0;
  needed->is_short = false;
  if (wanted > needed->bytes) {
    if (!charge_acquire(needed->own, needed->device, wanted - needed->bytes)) return false;
    needed->bytes = wanted;
    return true;
  }
  return was_short && dead_may_be_freed(needed->own, needed->device, &needed->left);
}

void reservation_end(reservation *needed) {
  charge_release(needed->own, needed->device, needed->bytes);
  needed->bytes = 0;
}

void charge_force(process *own, int device, uint64_t bytes) {
  pthread_mutex_t *lock = &own->devices[device].charge_lock;
  pthread_mutex_lock(lock);
  allot_ledger_charge(own->joined[device].ledger, own->joined[device].index, bytes);
  pthread_mutex_unlock(lock);
}

void charge_release(process *own, int device, uint64_t bytes) {
  if (bytes == 0) return;
  pthread_mutex_t *lock = &own->devices[device].charge_lock;
  pthread_mutex_lock(lock);
  allot_ledger_release(own->joined[device].ledger, own->joined[device].index, bytes);
  pthread_mutex_unlock(lock);
}

void charge_correct(process *own, int device, uint64_t reserved, uint64_t actual) {
  if (actual > reserved) charge_force(own, device, actual - reserved);
  if (actual < reserved) charge_release(own, device, reserved - actual);
}

// Another thread may take the room of a call that is under way.
static bool cover(process *own, int device, growing *reserve) {
  if (LIKELY(reserve->uncovered == 0)) return true;
  if (!charge_try(own, device, reserve->uncovered)) return false;
  reserve->ahead += reserve->uncovered;
  reserve->uncovered = 0;
  return true;
}

static void count_call(growing *reserve) {
  if (reserve->calls++ != 0) reserve->is_mixed = 1;
}

bool growing_begin(process *own, int device, growing *reserve, uint64_t bytes) {
  if (!cover(own, device, reserve)) return false;
  reserve->ahead += bytes;
  count_call(reserve);
  return true;
}

bool growing_begin_in_place(growing *reserve, uint64_t bytes) {
  if (reserve->calls != 0) return false;
  reserve->uncovered = bytes;
  count_call(reserve);
  return true;
}

uint64_t growing_end(growing *reserve, uint64_t bytes, bool in_place) {
  bool is_uncovered = in_place && reserve->uncovered != 0;
  reserve->calls--;
  if (is_uncovered) reserve->uncovered = 0;
  return is_uncovered ? 0 : bytes;
}

// What was read has in it what calls that are under way have taken, of what is reserved for them:
// until they end, no more than all that was reserved is charged for both.
void growing_settle(process *own, int device, growing *reserve, uint64_t read, uint64_t ended) {
  uint64_t all = reserve->charged + reserve->ahead, wanted;
  reserve->ahead -= ended;
  wanted = read + reserve->ahead;
  if (wanted > all) wanted = read > all ? read : all;
  charge_correct(own, device, all, wanted);
  __atomic_store_n(&reserve->charged, wanted - reserve->ahead, __ATOMIC_RELAXED);
}

void charge_note_context(process *own, int device, int64_t bytes) {
  device_state *state = &own->devices[device];
  pthread_mutex_lock(&state->charge_lock);
  state->context_bytes += (uint64_t)bytes;
  const joined_device *joined = &own->joined[device];
  allot_ledger_set_context(joined->ledger, joined->index, state->context_bytes);
  pthread_mutex_unlock(&state->charge_lock);
}

// What the driver says to a device that it does not know.
static CUresult unknown_device(CUdevice ordinal) {
  int count;
  CUresult result = DRIVER(USED(cuDeviceGetCount)(&count));
  if (result != CUDA_SUCCESS) return result;
  return ordinal < 0 || ordinal >= count ? CUDA_ERROR_INVALID_DEVICE
                                         : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

CUresult target_device(target *found, CUdevice ordinal) {
  found->own = process_attach();
  if (found->own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  found->ordinal = ordinal;
  found->device = process_device(found->own, ordinal);
  if (found->device == DEVICE_UNKNOWN) return unknown_device(ordinal);
  return found->device < 0 ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_SUCCESS;
}

CUresult target_current(target *found) {
  *found = (target){.device = -1};
  CUcontext context = NULL;
  CUdevice ordinal;
  CUresult result = DRIVER(USED(cuCtxGetCurrent)(&context));
  if (result != CUDA_SUCCESS || context == NULL) return result;
  // A context that another thread has destroyed may be there again when the driver is called.
  result = DRIVER(USED(cuCtxGetDevice)(&ordinal));
  if (result != CUDA_SUCCESS) return result;
  found->context = context;
  return target_device(found, ordinal);
}
