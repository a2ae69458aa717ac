// SPDX-License-Identifier: Apache-2.0
// What changes in a simulated machine, in the machine file after description and faults.
//
// A file of zeros behind description and faults is a machine that has just been switched on. The
// file is sparse, but what is touched has its space on the disk first, since a full disk would else
// end the program by SIGBUS: all before the rings when the file is made, a ring when its process
// comes to use its GPU. docs/designs/simulated-gpus.md has the reasons for the forms chosen here.
//
// Two kinds of change are told apart. Memory in use changes without any lock, by one 16-byte
// compare-and-swap per operation, as in the ledger. The engine (who runs when) changes under the
// GPU's lock, by steps of one word each, so that a holder that dies leaves a state the next one
// can go on from.
#ifndef ALLOTMENT_STATE_H
#define ALLOTMENT_STATE_H

#include <stdint.h>

#include "counter.h"
#include "simulated/machine.h"

// ---- work --------------------------------------------------------------------------------------

#define ALLOT_RING_WORKS 1024u /* works of one process on one GPU that are not yet overwritten */

// Names one work of the machine: slot, GPU and number within their ring. Numbers of a ring start at
// 1 and go on when a slot changes hands, so a point is never reused. 0: none.
typedef uint64_t allot_point;
#define ALLOT_POINT(slot, gpu, number) \
  ((uint64_t)(slot) << 55 | (uint64_t)(gpu) << 51 | (uint64_t)(number))
#define ALLOT_POINT_SLOT(point) ((int)((point) >> 55))
#define ALLOT_POINT_GPU(point) ((int)((point) >> 51 & 15))
#define ALLOT_POINT_NUMBER(point) ((point) & ((1ull << 51) - 1))

enum {
  ALLOT_WORK_MARK = 0,    // takes no time: an event, the end of a stream's past
  ALLOT_WORK_KERNEL = 1,  // takes compute time
  ALLOT_WORK_COPY = 2,    // takes time on one copy engine
  ALLOT_WORK_WAIT = 3,    // done when `target` is
  ALLOT_WORK_HOST = 4,    // done when the owner's callback thread says so
};

enum { ALLOT_COPY_H2D = 0, ALLOT_COPY_D2H = 1, ALLOT_COPY_D2D = 2, ALLOT_COPY_ENGINES = 3 };

// A work's state and its one time, in one word so that every change is one store.
// WAITING: nanoseconds of work left. RUNNING: when it ends. DONE: when it ended.
enum { ALLOT_WAITING = 0, ALLOT_RUNNING = 1, ALLOT_DONE = 2 };
#define ALLOT_PROGRESS(state, time_ns) ((uint64_t)(state) << 62 | (uint64_t)(time_ns))
#define ALLOT_PROGRESS_STATE(word) ((unsigned)((word) >> 62))
#define ALLOT_PROGRESS_TIME(word) ((word) & ((1ull << 62) - 1))

enum {
  // Waits for every earlier work of a blocking stream: what the legacy default stream does.
  ALLOT_WORK_BARRIER = 1,
  ALLOT_WORK_BLOCKING = 2,  // belongs to a blocking stream
  ALLOT_WORK_LEGACY = 4,    // belongs to the legacy default stream
  // COPY: moves the process's managed memory; how much, and for how long, is known when it begins.
  ALLOT_WORK_MANAGED = 8,
};

typedef struct allot_work {
  uint64_t progress;
  uint64_t submitted_ns;
  uint32_t previous;  // low half of the number of the stream's work before this one
  uint32_t after;     // low half of another number of this ring that must be done first
  uint32_t context;   // the owner's id of the context
  uint8_t kind;
  uint8_t engine;  // COPY: which
  uint8_t flags;
  int8_t priority;
  allot_point target;    // WAIT; of MANAGED: bytes to be resident when it has begun, plus 1
  uint64_t duration_ns;  // as submitted
  uint64_t bytes;        // COPY: how many
  uint32_t sms;          // KERNEL: how many multiprocessors it takes
  uint32_t next;         // low half of the number of the stream's work behind this one, 0: none yet
} allot_work;

// Written by its one process (head, works) and by whoever holds the GPU's lock (tail, progress).
typedef struct allot_ring {
  _Alignas(64) uint64_t head;  // the number of the next work less one: works 1..head were submitted
  uint64_t last_break;  // the newest work that does not follow the one numbered just before it
  _Alignas(64) uint64_t tail;  // works 1..tail are done
  // The front: works that are not done and whose stream's work before them is, low halves of their
  // numbers, ascending. Made anew by whoever brings the GPU to the present, and of no meaning else.
  uint64_t seen;  // works up to here have been looked at for it
  uint32_t front_count;
  uint32_t front[ALLOT_RING_WORKS];
  _Alignas(64) allot_work works[ALLOT_RING_WORKS];  // work n is works[n % ALLOT_RING_WORKS]
} allot_ring;

// ---- how busy ----------------------------------------------------------------------------------

// Busy time in cells of 2^24 ns (16.8 ms), the last 64 of them. A cell says of which 2^24 ns it
// tells: number << 25 | busy nanoseconds.
#define ALLOT_HISTORY_CELLS 64
#define ALLOT_HISTORY_CELL_BITS 24
typedef struct allot_history {
  uint64_t cells[ALLOT_HISTORY_CELLS];
} allot_history;

// ---- processes ---------------------------------------------------------------------------------

typedef struct allot_process_gpu {
  allot_part memory;       // bytes in use
  uint64_t busy_ns;        // compute time had since the process began
  uint64_t busy_since_ns;  // when what computes of it now began to, without a gap
  uint64_t copy_busy_ns;
  uint64_t memory_peak;  // bytes
  uint32_t contexts;     // CUDA contexts; NVML lists processes that have one
  uint32_t has_ring;     // the slot's ring for the GPU has its space on the disk, and keeps it
  // Managed memory, in bytes: all of it, what of that holds data, and what of that is on the GPU.
  // `resident` counts beside `memory`. Changed under the GPU's lock.
  uint64_t managed, populated, resident;
  uint64_t managed_used_ns;  // when a kernel last used it, or a prefetch brought it
  uint64_t saved;            // of a checkpointed process: what of `memory` it takes again
  // The place of its compute instance, and of the GPU instance around it. 0: the whole GPU. Stays
  // as it is from the taking of the slot on.
  uint32_t compute_place, memory_place;
  allot_history compute;
} allot_process_gpu;

enum { ALLOT_PROCESS_FREE = 0, ALLOT_PROCESS_TAKEN = 1 };
enum {
  ALLOT_PROCESS_COMPUTE = 0,
  ALLOT_PROCESS_MONITOR = 1,     // has a slot only to hold the engine's lock by
  ALLOT_PROCESS_MPS_SERVER = 2,  // runs no work of its own: its clients' is run as one process's
};

// What MPS is to a process: written by the control daemon, and by whoever clears a server's slot.
typedef struct allot_mps {
  uint32_t server;      // of a client: slot + 1 of its server, 0: it is no client
  uint32_t percentage;  // of a client: of each GPU's multiprocessors, 1 to 100
  uint32_t priority;    // of a client: 0, or 1: below normal
  uint32_t faulty;      // of a server: a bit for each GPU that a client's fault has stopped
  uint64_t memory_limit[ALLOT_MACHINE_GPUS];  // of a client, in bytes; 0: none
} allot_mps;

// What is being done to a process from outside (checkpoint.c). As CUprocessState has them.
enum {
  ALLOT_CHECKPOINT_RUNNING = 0,
  ALLOT_CHECKPOINT_LOCKED = 1,
  ALLOT_CHECKPOINT_SAVED = 2,
  ALLOT_CHECKPOINT_FAILED = 3,  // it has ended
  ALLOT_CHECKPOINT_SAVING = 4,
  ALLOT_CHECKPOINT_RESTORING = 5,
};

typedef struct allot_process {
  uint32_t state;
  int32_t pid;            // getpid of the owner
  uint64_t start_time;    // field 22 of /proc/<pid>/stat: clock ticks after boot
  uint64_t attached_ns;   // CLOCK_MONOTONIC
  uint64_t attaches;      // how often the slot was taken
  uint32_t kind;          // ALLOT_PROCESS_COMPUTE or ALLOT_PROCESS_MONITOR
  uint32_t gate;          // how many threads of the owner are changing its memory
  uint64_t checkpoint;    // ALLOT_CHECKPOINT_* | slot + 1 of who is at work on it << 32
  char command[88];       // start of /proc/<pid>/cmdline, blanks for NULs
  uint64_t namespace_id;  // whose number `pid` is: the inode of /proc/<pid>/ns/pid, 0: not known
  uint32_t failed;        // CUresult that every call of its returns from now on, 0: none
  uint32_t spare;
  uint64_t ended_ns;  // when another process first saw that the owner had ended, 0: not yet
  allot_mps mps;
  allot_process_gpu gpus[ALLOT_MACHINE_GPUS];
} allot_process;

// A slot belongs to the process that holds an open-file-description write lock on byte
// ALLOT_PROCESS_LOCK_BASE + index of the machine file, which lies beyond its end.
#define ALLOT_PROCESS_LOCK_BASE (1ll << 40)

// ---- GPUs --------------------------------------------------------------------------------------

typedef struct allot_gpu_engine {
  _Alignas(64) allot_counter memory;  // bytes in use; a part's mark is its slot + 1
  _Alignas(64) uint32_t lock;         // 0: free, else the holder's slot + 1 | waiters bit
  uint32_t spare;
  uint64_t now_ns;         // the simulation is right up to here (CLOCK_MONOTONIC)
  uint64_t slice_end_ns;   // when the holder's turn ends
  uint32_t holder;         // slot + 1 of the process (of MPS: server) whose turn it is, 0: nobody's
  uint32_t compute_mode;   // nvmlComputeMode_t
  uint64_t room_since_ns;  // when a kernel last made room: what is free now was so since then
  uint64_t busy_since_ns;  // when what computes now began to, without a gap
  uint64_t stalled_until_ns;  // the holder's kernels wait for managed memory until then
  uint64_t copy_free_ns[ALLOT_COPY_ENGINES];
  uint64_t checked_ns;  // when the owners of work were last seen to be alive
  uint64_t active[ALLOT_MACHINE_PROCESSES / 64];   // a bit for each slot that may have work
  uint64_t managed[ALLOT_MACHINE_PROCESSES / 64];  // and for each that may have managed memory
  uint64_t busy_ns, copy_busy_ns;                  // since the machine began
  uint64_t energy_reset_mj;                        // energy used before the last reset
  allot_history compute, copies;
} allot_gpu_engine;

// ---- events shared among processes -------------------------------------------------------------

#define ALLOT_SHARED_EVENTS 1024
typedef struct allot_shared_event {
  uint64_t state;  // 0: free, else references << 32 | serial
  allot_point recorded;
  uint32_t owner;  // slot + 1 of the process that made it, which takes it along when it ends
  uint32_t spare;
} allot_shared_event;

// ---- the whole file ----------------------------------------------------------------------------

// Where kernels run and memory is counted: a whole GPU has the place of its number, and what can be
// cut from it the places from ALLOT_FIRST_CUT on. A GPU instance counts the memory of its compute
// instances at its own place; each of these computes at its own.
#define ALLOT_FIRST_CUT ALLOT_MACHINE_GPUS
#define ALLOT_MACHINE_PLACES (ALLOT_MACHINE_GPUS * (1 + ALLOT_MIG_SLOTS))
#define ALLOT_CUT(gpu, slot) (ALLOT_FIRST_CUT + (gpu) * ALLOT_MIG_SLOTS + (slot))

typedef struct allot_machine {
  allot_machine_description description;
  allot_machine_faults faults;
  allot_machine_mig mig;
  _Alignas(4096) allot_gpu_engine engines[ALLOT_MACHINE_PLACES];
  _Alignas(64) uint32_t high_process;  // slots at and above were never taken
  uint32_t event_serial;
  uint64_t memory_serial;  // names pieces of memory that processes hand to each other
  allot_shared_event events[ALLOT_SHARED_EVENTS];
  _Alignas(64) allot_process processes[ALLOT_MACHINE_PROCESSES];
  // Not to be touched, not even read, unless allot_process_gpu's `has_ring` says so.
  _Alignas(4096) allot_ring rings[ALLOT_MACHINE_PROCESSES][ALLOT_MACHINE_GPUS];
} allot_machine;

// More than is used, so that files outlive small changes of the structures.
#define ALLOT_MACHINE_FILE_BYTES (640ull << 20)

#endif
