// SPDX-License-Identifier: Apache-2.0
// The ledger of one share: the contract between the agent, the command line and the shim.
//
// Two files in the share's directory, both mapped by every process of the share:
//
//   policy   what is allowed. Written by the agent alone; mounted read-only into a container.
//   usage    what is used. Written by the share's processes (a claim, never the authority on
//   limits).
//
// docs/designs/ledger.md tells the protocol and why it is exact under kill -9 and SIGSTOP at any
// instruction. Python reads these structures through offsets that are generated from this file
// (src/allotment/ledger/layout.py); a test compares both.
#ifndef ALLOTMENT_LEDGER_H
#define ALLOTMENT_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "counter.h"

#define ALLOT_POLICY_MAGIC 0x59434c4f50544c41ull /* "ALTPOLCY" */
#define ALLOT_USAGE_MAGIC 0x4547415355544c41ull  /* "ALTUSAGE" */
#define ALLOT_LEDGER_VERSION 2u
#define ALLOT_MAX_DEVICES 16
// Keeps a share under 1 MiB, which is allocated in full: no SIGBUS on a full disk later.
#define ALLOT_MAX_SLOTS 768
#define ALLOT_UUID_BYTES 48 /* "GPU-..." or "MIG-...", NUL-terminated */
#define ALLOT_NAME_BYTES 64

// ---- policy ----

typedef struct allot_device_policy {
  char uuid[ALLOT_UUID_BYTES];
  uint64_t memory_limit;  // bytes; changes live
  uint64_t
      context_bytes;  // what a first context on this device is expected to cost, bytes; 0: unknown
  // Its turns on the device (lease.h): the files contract-<index> and seat-<index> beside this
  // one, and the share's seat in them. Serial 0: the share takes no turns.
  uint64_t seat_serial;
  uint32_t seat;
  uint32_t flags;  // ALLOT_DEVICE_*
  uint64_t reserved[2];
} allot_device_policy;

// Allocations may live in host memory: the device may be promised to more shares than it holds.
#define ALLOT_DEVICE_OVERSUBSCRIBED 1u
// The share's programs must be clients of MPS there.
#define ALLOT_DEVICE_MPS 2u

typedef struct allot_policy {
  uint64_t magic;
  uint32_t version;
  uint32_t device_count;
  uint64_t generation;  // raised after every change of a limit
  char share_id[ALLOT_NAME_BYTES];
  char share_name[ALLOT_NAME_BYTES];
  allot_device_policy devices[ALLOT_MAX_DEVICES];
} allot_policy;

// ---- usage ----

typedef struct allot_slot_device {
  allot_part part;   // what the slot has of the device: bytes
  uint64_t context;  // of these: bytes of contexts, modules and other driver-owned memory
  uint64_t peak;
} allot_slot_device;

typedef struct allot_slot {
  uint32_t state;       // ALLOT_SLOT_*
  int32_t pid;          // as seen inside the share (getpid of the owner)
  uint64_t start_time;  // field 22 of /proc/self/stat: clock ticks after boot
  uint32_t attaches;    // how often the slot was taken, to tell two owners apart
  // The pid namespace in which the driver listed the process under `pid`, as the inode of
  // /proc/self/ns/pid. 0: it did not, or no look at its list was possible.
  uint32_t listed_namespace;
  uint64_t refusals;               // allocations refused because of the limit
  char command[ALLOT_NAME_BYTES];  // start of /proc/self/cmdline, blanks for NULs
  // Compute, over all devices (informative).
  uint64_t gpu_ns;     // GPU time charged
  uint64_t held_ns;    // time that launches were held back, added up over threads
  uint64_t throttled;  // launches held back
  // Bit i: it has managed memory of device i. Bit 32 + i: all of that lies on the host, as the
  // share is suspended. Of a LEAVING slot: when its owner's end was last confirmed not to have
  // freed its memory yet, in nanoseconds of CLOCK_BOOTTIME.
  uint64_t movable;
  allot_slot_device devices[ALLOT_MAX_DEVICES];
} allot_slot;

// LEAVING: its owner has ended, and the driver may still have what it used.
enum { ALLOT_SLOT_FREE = 0, ALLOT_SLOT_TAKEN = 1, ALLOT_SLOT_LEAVING = 2 };

// Where the driver's list cannot tell, a dead owner's memory counts as freed after this time.
#define ALLOT_LEAVING_NS 3000000000ull

// Waits for a lease, counted by length: bucket i holds those under ALLOT_WAIT_FIRST_NS << i, the
// last all others.
#define ALLOT_WAIT_BUCKETS 16
#define ALLOT_WAIT_FIRST_NS 100000ull

typedef struct allot_usage_device {
  allot_counter total;  // bytes; a part's mark is its slot's index
  uint64_t peak;
  uint64_t refusals;
  // Compute since the share was made, over all its processes. Each is only ever added to.
  uint64_t gpu_ns;       // measured GPU time of kernels and graphs
  uint64_t copy_ns;      // measured time of copies and memsets, on the copy engines
  uint64_t held_ns;      // time that launches were held back, added up over threads
  uint64_t throttled;    // launches held back
  uint64_t moved_bytes;  // oversubscribed memory brought to the device
  uint64_t host_bytes;   // of the allocations, how much may live in host memory now
  uint64_t lease_waits[ALLOT_WAIT_BUCKETS];
  uint64_t lease_wait_ns;  // their sum
  uint64_t launches;       // of kernels and graphs, once they have ended
  uint64_t reserved[4];
} allot_usage_device;

typedef struct allot_usage {
  uint64_t magic;
  uint32_t version;
  uint32_t slot_count;  // ALLOT_MAX_SLOTS
  uint32_t high_slot;   // slots at and above this index were never taken
  uint32_t padding;
  uint64_t reserved[5];
  allot_usage_device devices[ALLOT_MAX_DEVICES];
  allot_slot slots[ALLOT_MAX_SLOTS];
} allot_usage;

// A slot belongs to the process that holds an open-file-description write lock on byte
// ALLOT_SLOT_LOCK_BASE + index of the usage file (beyond its end: the byte need not exist). The
// mapping keeps the description alive after its descriptor is closed, so a program that closes all
// its descriptors keeps its slot; MADV_DONTFORK keeps it out of children.
#define ALLOT_SLOT_LOCK_BASE 0x40000000ll

// ---- operations (ledger.c; linked into the shim, and into liballotment-ledger.so for Python) ----

#ifdef ALLOT_LEDGER_EXPORT
#pragma GCC visibility push(default)
#endif

typedef struct allot_ledger {
  const allot_policy *policy;
  allot_usage *usage;
  int slot;        // own slot, or -1 when only looking
  void *slot_map;  // keeps the description that holds the slot's lock
  char directory[1024];
} allot_ledger;

// Errors are negative errno values: -EINVAL (not a ledger, or damaged), -EPROTO (another version),
// -ENOSPC (no slot is free), or what open/mmap gave.

// Creates both files, complete, in directory `directory` (which exists). Fails if one exists.
int allot_ledger_create(const char *directory, const allot_policy *policy);
// Maps both files. `policy` is mapped read-only, `usage` read-write when it may be, else read-only.
int allot_ledger_open(allot_ledger *ledger, const char *directory);
void allot_ledger_close(allot_ledger *ledger);
// Takes a slot for the calling process, one without memory that the driver may still hold. Not for
// two threads at once.
int allot_ledger_attach(allot_ledger *ledger);

// Reserves `bytes` of device `device` under its limit in one step across all processes of the
// share. True: reserved. False: it would pass the limit, which is counted.
// Callers serialise themselves per device within one process.
bool allot_ledger_reserve(allot_ledger *ledger, int device, uint64_t bytes);
// As reserve, without looking at the limit: for what the driver has already taken.
void allot_ledger_charge(allot_ledger *ledger, int device, uint64_t bytes);
// Gives back. Never below zero: at most what this slot has.
void allot_ledger_release(allot_ledger *ledger, int device, uint64_t bytes);
// Of the slot's use, how much belongs to contexts (informative).
void allot_ledger_set_context(allot_ledger *ledger, int device, uint64_t bytes);

uint64_t allot_ledger_used(const allot_ledger *ledger, int device);  // all processes
uint64_t allot_ledger_limit(const allot_ledger *ledger, int device);
uint64_t allot_ledger_slot_used(const allot_ledger *ledger, int slot, int device);
// Does the driver still hold what the slot's dead owner had of a device?
typedef enum allot_held { ALLOT_HELD_NOT, ALLOT_HELD_STILL, ALLOT_HELD_UNKNOWN } allot_held;
typedef allot_held allot_held_check(void *context, const allot_slot *slot, int device);

typedef struct allot_reaped {
  int cleared;  // slots, or a negative errno
  int leaving;  // slots of dead owners that were left, with their use
} allot_reaped;

// Reclaims what dead owners left and the driver has freed. `check` NULL: the caller cannot ask it.
allot_reaped allot_ledger_reap(allot_ledger *ledger, allot_held_check *check, void *context);
// The same for a caller who has seen that the driver holds no dead process's memory. It asked at
// `asked_ns` (CLOCK_BOOTTIME): slots that were marked as LEAVING later are left. 0: it cannot ask.
// Returns how many slots were cleared, or a negative errno.
int allot_ledger_clear(allot_ledger *ledger, uint64_t asked_ns);
// Is the slot's owner alive? (lock test; no side effect)
bool allot_ledger_slot_alive(const allot_ledger *ledger, int slot);
// Sets a limit: 0, or -EBUSY when more than `bytes` is used and `force` is false (then the limit is
// unchanged and *used tells the use). From the return on, no reservation can succeed under the old
// limit.
int allot_ledger_set_limit(const char *directory, int device, uint64_t bytes, bool force,
                           uint64_t *used);

#ifdef ALLOT_LEDGER_EXPORT
#pragma GCC visibility pop
#endif

#endif
