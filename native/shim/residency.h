// SPDX-License-Identifier: Apache-2.0
// Memory beyond the GPU: where the allocations of an oversubscribed share lie.
//
// Such a share's plain allocations are managed memory, charged to its limit like any other. Its
// processes move their set to the device when they gain the lease, so that kernels do not fetch it
// page by page; the driver puts it aside when others need the room.
// docs/designs/oversubscription.md has the reasons.
#ifndef ALLOTMENT_SHIM_RESIDENCY_H
#define ALLOTMENT_SHIM_RESIDENCY_H

#include "process.h"

// ---- for those who take turns ----
//
// `device` is the policy's index. Called by any thread; the two that move memory take their time
// (as long as the memory needs over PCIe), so no lock that a launch on another device needs is to
// be held. They wait for no work of the program, and never take a lock that somebody may hold while
// he waits for a lease.

// Does the share's memory on this device move? Two loads; false for all other shares.
bool residency_active(const process *own, int device);

// Called every few milliseconds while memory comes in, with the time since it began: to show that
// the holder lives, and to make the lease longer. False: the lease is lost, and the rest may stay.
typedef bool residency_tick(void *context, uint64_t took_ns);

// This process has the lease: brings its set to the device and waits until it is there. Returns how
// long that took in nanoseconds, for allot_lease_charge's move_ns; 0 where nothing had to move.
uint64_t residency_gained(process *own, int device, residency_tick *tick, void *context);

// The share is suspended and nothing of this process runs on the device: moves its set to the host,
// waits until it is there, and says so in the process's slot (allot_slot.movable). Cheap when that
// is done.
void residency_evict(process *own, int device);

// For how long a holder without work keeps the lease all the same: as long as moving took last
// time, so that a short pause does not cost two moves. 0 where everything fits.
uint64_t residency_linger_ns(const process *own, int device);

// ---- for those who allocate ----

// May memory of this share lie elsewhere than on the device? Then the device's free memory says
// nothing about what can be allocated.
bool residency_possible(const process *own, int device);

// Does plain memory of this device become managed? False as well where the driver cannot move it.
bool residency_wanted(process *own, int device, CUdevice ordinal);

// Managed memory was recorded or given back, also in shares that do not oversubscribe: drivers do
// not checkpoint it.
void residency_added(process *own, int device, uint64_t bytes);
void residency_removed(process *own, int device, uint64_t bytes);

// In a SPACE_POINTER record of KIND_PLAIN, `count` says whether and how it moves: whose managed
// memory it is, and how much less than `bytes` the allocation has (under one granule).
enum { MANAGED_NOT = 0, MANAGED_BY_SHIM = 1, MANAGED_BY_PROGRAM = 2 };
static inline uint32_t managed_mark(uint32_t whose, uint64_t charged, uint64_t bytes) {
  return whose | (uint32_t)(charged - bytes) << 2;
}
static inline uint32_t managed_whose(const record *seen) {
  bool may = seen->space == SPACE_POINTER && seen->kind == KIND_PLAIN && seen->bytes != 0;
  return may ? seen->count & 3 : MANAGED_NOT;
}
static inline uint64_t managed_bytes(const record *seen) {
  return seen->bytes - (seen->count >> 2);
}

#endif
