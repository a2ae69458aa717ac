// SPDX-License-Identifier: Apache-2.0
// Charging device memory to the share: reserve, then ask the driver, then keep or give back.
#ifndef ALLOTMENT_SHIM_CHARGE_H
#define ALLOTMENT_SHIM_CHARGE_H

#include "process.h"

#define CHARGE_GRANULE (2 * MIB) /* the driver takes memory from a GPU in pages of this size */

// Reserves under the limit. False: refused; what pools and dead processes still held was given
// back first. Not with a pool's or graph's lock held.
bool charge_acquire(process *own, int device, uint64_t bytes);
// The same without any attempt to make room, and without counting a refusal.
bool charge_try(process *own, int device, uint64_t bytes);
// Counts a refusal that charge_try left out, unless there is room by now: then it reserves.
bool charge_last_try(process *own, int device, uint64_t bytes);
// For what the driver has taken already.
void charge_force(process *own, int device, uint64_t bytes);
void charge_release(process *own, int device, uint64_t bytes);
// From a reservation to what it turned out to be; a growth is not refused.
void charge_correct(process *own, int device, uint64_t reserved, uint64_t actual);

// Says of `bytes` of what is charged that they are (or, negative, no longer are) a context's.
void charge_note_context(process *own, int device, int64_t bytes);

// Where a call's memory would come from.
typedef struct target {
  process *own;
  CUcontext context;
  CUdevice ordinal;
  int device;
} target;

// Fills in the calling thread's current context and its device. Not CUDA_SUCCESS: the share cannot
// be charged, and that is what to return. With no context current, `context` is NULL and the driver
// has to say what it says to that.
CUresult target_current(target *found);
CUresult target_device(target *found, CUdevice ordinal);

#endif
