// SPDX-License-Identifier: Apache-2.0
// Checkpoints of other processes, by their numbers. None of these calls needs cuInit, nor waits
// while the caller itself is locked.
#include <errno.h>
#include <string.h>

#include "simulated/cuda/driver.h"

#define FIRST_VERSION 12080

// The calling process's slot, as its own driver has it or, before cuInit, one for this alone.
static CUresult machine(allot_handle **found) {
  static allot_handle own;
  LOCK();
  int error = 0;
  if (driver.initialised && allot_machine_attached(&driver.machine)) {
    *found = &driver.machine;
  } else {
    if (own.machine == NULL) error = allot_machine_open(&own);
    if (error == 0 && !allot_machine_attached(&own)) {
      error = allot_machine_attach(&own, ALLOT_PROCESS_MONITOR);
    }
    *found = &own;
  }
  UNLOCK();
  if (error != 0) return CUDA_ERROR_NOT_INITIALIZED;
  uint32_t version = (*found)->machine->description.cuda_version;
  return version != 0 && version < FIRST_VERSION ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

static CUresult find(int pid, allot_handle **on, int *slot) {
  TRY(machine(on));
  *slot = allot_checkpoint_find(*on, pid);
  return *slot >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult of_errno(int error) {
  switch (error) {
    case 0:
      return CUDA_SUCCESS;
    case -EPERM:
    case -EBUSY:
      return CUDA_ERROR_ILLEGAL_STATE;
    case -ETIMEDOUT:
      return CUDA_ERROR_NOT_READY;
    case -ENOMEM:
      return CUDA_ERROR_OUT_OF_MEMORY;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

static bool is_zero(const void *bytes, size_t size) {
  const unsigned char *at = bytes;
  for (size_t i = 0; i < size; i++) {
    if (at[i] != 0) return false;
  }
  return true;
}

CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
  allot_handle *on;
  int slot;
  TRY(find(pid, &on, &slot));
  if (tid == NULL) return CUDA_ERROR_INVALID_VALUE;
  *tid = pid;  // no thread of its own restores a process here
  return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state) {
  allot_handle *on;
  int slot;
  TRY(find(pid, &on, &slot));
  if (state == NULL) return CUDA_ERROR_INVALID_VALUE;
  *state = (CUprocessState)allot_checkpoint_state(on, slot);
  return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
  allot_handle *on;
  int slot;
  TRY(find(pid, &on, &slot));
  if (args != NULL && (args->reserved0 != 0 || !is_zero(args->reserved1, sizeof args->reserved1))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  uint64_t timeout_ns = args != NULL ? args->timeoutMs * 1000000ull : 0;
  return of_errno(allot_checkpoint_lock(on, slot, timeout_ns));
}

CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
  allot_handle *on;
  int slot;
  TRY(find(pid, &on, &slot));
  if (args != NULL && args->customStorageInfo_out != NULL) return CUDA_ERROR_NOT_SUPPORTED;
  if (args != NULL && !is_zero(args->reserved, sizeof args->reserved)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return of_errno(allot_checkpoint_save(on, slot));
}

// A GPU may stand for itself only: nothing moves to another one here.
static CUresult check_pairs(const CUcheckpointRestoreArgs *args) {
  if (args->gpuPairsCount > 0 && args->gpuPairs == NULL) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < args->gpuPairsCount; i++) {
    const CUcheckpointGpuPair *pair = &args->gpuPairs[i];
    if (memcmp(&pair->oldUuid, &pair->newUuid, sizeof pair->oldUuid) != 0) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  if (args->customStorageInfo_out != NULL) return CUDA_ERROR_NOT_SUPPORTED;
  return is_zero(args->reserved, sizeof args->reserved) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
  allot_handle *on;
  int slot;
  TRY(find(pid, &on, &slot));
  if (args != NULL) TRY(check_pairs(args));
  return of_errno(allot_checkpoint_restore(on, slot));
}

CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
  allot_handle *on;
  int slot;
  TRY(find(pid, &on, &slot));
  if (args != NULL && !is_zero(args->reserved, sizeof args->reserved)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return of_errno(allot_checkpoint_unlock(on, slot));
}
