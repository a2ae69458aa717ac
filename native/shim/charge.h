// SPDX-License-Identifier: Apache-2.0
// Charging device memory to the share: reserve, then ask the driver, then keep or give back.
#ifndef ALLOTMENT_SHIM_CHARGE_H
#define ALLOTMENT_SHIM_CHARGE_H

#include "dead.h"
#include "process.h"

#define CHARGE_GRANULE (2 * MIB) /* the driver takes memory from a GPU in pages of this size */

// Reserves under the limit. False: refused; what pools and dead processes still held was given
// back first. Not with a pool's or graph's lock held.
bool charge_acquire(process *own, int device, uint64_t bytes);
// The same without waiting, and without counting a refusal: what dead processes hold is not waited
// for.
bool charge_now(process *own, int device, uint64_t bytes);
// The same without any attempt to make room.
bool charge_try(process *own, int device, uint64_t bytes);
// Counts a refusal that charge_try left out, unless there is room by now: then it reserves.
bool charge_last_try(process *own, int device, uint64_t bytes);
// For what the driver has taken already.
void charge_force(process *own, int device, uint64_t bytes);
void charge_release(process *own, int device, uint64_t bytes);
// From a reservation to what it turned out to be; a growth is not refused.
void charge_correct(process *own, int device, uint64_t reserved, uint64_t actual);

// A reserve that grows (process.h); with the lock that guards it, which is not held across the
// call.
//
// A call begins with so many bytes reserved, or in place (with none, and `bytes` is what it grows
// by should it find no room). False: it may not, beside another one that is under way.
bool growing_begin(process *own, int device, growing *reserve, uint64_t bytes);
bool growing_begin_in_place(growing *reserve, uint64_t bytes);
// What is reserved for the call that ends: of one in place, what others have reserved meanwhile.
uint64_t growing_end(growing *reserve, uint64_t bytes, bool in_place);
// Brings the charge to what is reserved as read; `ended` was reserved for a call that has ended.
void growing_settle(process *own, int device, growing *reserve, uint64_t read, uint64_t ended);

// What a call needs that holds a lock: it is waited for without the lock, and all is tried anew.
//
//   do { lock; if (reservation_try(...)) result = reservation_called(..., driver's call); unlock; }
//   while (reservation_goes_on(...));
//   reservation_end(...);
typedef struct reservation {
  process *own;
  int device;
  uint64_t bytes;   // reserved
  uint64_t wanted;  // more than that: it did not fit
  bool is_short;    // the driver had no memory
  patience left;
} reservation;
// With the lock. Does it have so many bytes?
bool reservation_try(reservation *needed, uint64_t bytes);
CUresult reservation_called(reservation *needed, CUresult result);
// The bytes are a record's from here on.
void reservation_keep(reservation *needed);
// Without the lock. Is it to be tried anew? Waits before it says yes.
bool reservation_goes_on(reservation *needed);
// Gives back what was not kept.
void reservation_end(reservation *needed);

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
