// SPDX-License-Identifier: Apache-2.0
// This process in its share: what is lost in a fork, because the child has none of it.
//
// All of it lies in pages that the kernel wipes in a forked child. The child finds zeros: no locks
// held by threads that it does not have, no slot, no records; it attaches as a process of its own
// at its first call. Addresses of functions are the same in the child and live elsewhere.
#ifndef ALLOTMENT_SHIM_PROCESS_H
#define ALLOTMENT_SHIM_PROCESS_H

#include <pthread.h>

#include "cuda_abi.h"
#include "ledger.h"
#include "records.h"
#include "share.h"
#include "shim.h"

#define MAX_ORDINALS 64 /* CUDA's own bound on devices of a process */

// Where this process's memory of one device lies, in a share that may oversubscribe (residency.c).
typedef struct residency_state {
  uint32_t support;  // 0: not asked yet
  CUdevice ordinal;
  uint64_t set_bytes;     // managed
  uint64_t additions;     // how often it grew
  uint64_t move_ns;       // what the last move took; 0: nothing had to move
  uint64_t confirmed_ns;  // when all of it was last known to be on the device; 0: it is not
  uint64_t trust_ns;      // for how long after that it is taken to be there
  uint32_t was_slack;     // nobody was short of room then
} residency_state;

// Memory that the driver reserves for its own use, and lets grow in calls that may wait: for room
// in a stream's queue, or for work that waits for another thread. So no lock is held across them,
// and several may be under way.
typedef struct growing {
  uint64_t charged;    // the reserve as it was last read, or more
  uint64_t ahead;      // reserved for the growth of calls that are under way
  uint64_t uncovered;  // a call is under way that finds room in place; without it, it grows by this
  uint32_t calls;      // that are under way
  uint8_t is_mixed;    // several of them were, since there was none: who grew by what is not known
} growing;

// Calls come one after another, as long as none of them waits.
typedef struct call_turn {
  pthread_mutex_t lock;
  uint32_t is_long;  // the present call was waited for in vain
} call_turn;

// All that one CUDA device means here.
typedef struct device_state {
  // The ledger wants one operation of a process and device at a time.
  _Alignas(64) pthread_mutex_t charge_lock;
  uint64_t context_bytes;  // of what is charged: contexts, modules
  uint64_t gave_up_ns;     // when the driver was last out of memory for longer than dead.c waits

  _Alignas(64) pthread_mutex_t pool_lock;  // what is known of this device's pools
  call_turn pool_turn;                     // of calls that let them grow, or trim them

  // Under the process's graph_lock.
  CUdevice graph_ordinal;
  growing graphs;        // the reserve for graphs
  uint64_t last_graph;   // whose memory was placed last, while nothing was trimmed since
  uint64_t last_stream;  // in which it was launched

  residency_state residency;
} device_state;

#define MAX_POOLS 1024
#define POOL_UNCHARGED (-1) /* its memory is the host's, or charged to another process */

typedef struct pool_state {
  CUmemoryPool handle;     // NULL: it is gone, and a call under way has the place yet
  CUmemPoolProps made_as;  // zeros: the program did not make it
  int16_t device;          // that is charged; POOL_UNCHARGED: none
  uint8_t taken;           // the place is in use
  uint8_t is_ending;       // the program has destroyed it, but it reserves memory yet
  uint8_t is_destroyed;    // or the driver is destroying it: it is not asked about it any more
  uint8_t may_shrink;      // it reserves more than it uses
  uint64_t held;           // bytes that are not freed
  growing reserve;         // `charged` is at least `held`
  uint64_t freed_in;  // the stream where all was freed that was not waited for since; 0: nothing
  uint8_t freed_in_many;  // in several streams, rather
} pool_state;

// A device of one of the process's shares.
typedef struct joined_device {
  allot_ledger *ledger;
  int index;  // in that ledger
} joined_device;

typedef struct process {
  pthread_mutex_t library_lock;
  uint32_t load_tried[2];

  pthread_mutex_t attach_lock;
  uint32_t viewed, attached;
  uint32_t share_count, device_count;
  allot_ledger ledgers[MAX_SHARES];
  // By the process's own numbers of the devices of all its shares, which begin at 0.
  joined_device joined[ALLOT_MAX_DEVICES];
  const allot_device_policy *policies[ALLOT_MAX_DEVICES];
  uint32_t initialized;                     // cuInit has succeeded in this process
  uint32_t launches_block;                  // CUDA_LAUNCH_BLOCKING, as the driver has read it
  int16_t device_of_ordinal[MAX_ORDINALS];  // what process_device found

  device_state devices[ALLOT_MAX_DEVICES];
  record_table records;
  uint32_t piece_serial;

  pthread_mutex_t small_lock;         // small allocations, one at a time
  pthread_mutex_t context_lock;       // who creates and destroys contexts
  pthread_mutex_t limit_lock;         // who sets their limits, which may wait for their work
  CUcontext primaries[MAX_ORDINALS];  // charged primary contexts
  uint32_t retained[MAX_ORDINALS];    // how often each is, as far as is known
  pthread_mutex_t virtual_lock;       // handles and mappings change together
  uint64_t physical_serial;           // names VMM allocations and bindings of them
  uint64_t largest_mapping;           // bytes
  uint32_t sparse_mappings;           // VMM allocations that arrays hold
  pthread_mutex_t pool_table_lock;
  uint32_t pool_count;  // places of `pools` that were ever taken
  uint32_t pools_may_shrink;
  pthread_mutex_t graph_lock;
  call_turn graph_turn;
  pthread_mutex_t capture_lock;  // no capture of a stream ends
  uint32_t allocating_graphs;    // executable graphs with memory nodes
  uint32_t graph_devices;        // a bit for each where there was one
  pool_state pools[MAX_POOLS];

  pthread_mutex_t compute_lock;
  struct compute_state *compute;  // what takes turns (compute.h), once a launch has asked
} process;

// Never fails but when the process has no memory left; NULL then.
process *process_state(void);

// The same without making it: NULL while nothing was recorded yet.
extern process *process_pages;
static inline process *process_known(void) {
  return __atomic_load_n(&process_pages, __ATOMIC_ACQUIRE);
}

// The process with the ledgers mapped for reading (view) or with slots of its own (attach), or
// NULL: a ledger is not there, damaged, of another version, another user's, or full, or the shares
// cannot be had together; stderr then has the reason.
process *process_view(void);
process *process_attach(void);

// A device's figures in its share's ledger.
static inline allot_usage_device *process_usage(const process *own, int device) {
  const joined_device *joined = &own->joined[device];
  return &joined->ledger->usage->devices[joined->index];
}

// The slot of this process in the ledger of a device's share.
static inline allot_slot *process_slot(const process *own, int device) {
  const allot_ledger *ledger = own->joined[device].ledger;
  return &ledger->usage->slots[ledger->slot];
}

// The number of the device of that UUID, or -1.
int process_device_by_uuid(const process *own, const char *uuid);

// Takes something that a child must not inherit in the midst of it: forks wait meanwhile.
bool process_guarded(process *own, bool (*step)(process *own, void *context), void *context);

// The driver, and who opens files, may be where a thread is cancelled (pthread_cancel). It would
// keep its locks, and what it has reserved: between these it ends later. They can be nested.
void uncancelled_begin(void);
void uncancelled_end(void);
// Does this thread hold a lock of those below?
bool process_holds_lock(void);

// The same until the end of the block.
#define UNCANCELLED                                                          \
  __attribute__((cleanup(uncancelled_leave), unused)) char uncancelled_here; \
  uncancelled_begin()
static inline void uncancelled_leave(const char *unused) {
  uncancelled_end();
}

// A lock that is held over such calls.
void process_lock(pthread_mutex_t *lock);
bool process_trylock(pthread_mutex_t *lock);
// Gives up after this time: the holder may wait for what the calling thread does next.
bool process_lock_within(pthread_mutex_t *lock, uint64_t ns);
void process_unlock(pthread_mutex_t *lock);

// False: a call that has the turn takes long, and is not waited for.
bool turn_take(call_turn *turn);
void turn_give(call_turn *turn, bool taken);

// The number of a CUDA device, or why there is none: it is of no share of the process, or the
// driver does not know it (or not yet).
enum { DEVICE_OUTSIDE = -1, DEVICE_UNKNOWN = -2 };
int process_device(process *own, CUdevice ordinal);

#endif
