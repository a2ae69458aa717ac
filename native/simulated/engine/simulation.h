// SPDX-License-Identifier: Apache-2.0
// One bringing of a GPU to the present, from inside: what run.c, turns.c and managed.c share.
//
// All of it under the GPU's lock. Every change is one store of one word (`now_ns` first, then what
// follows from it), so a process that is killed in here leaves a state from which the next goes on
// with the same outcome.
#ifndef ALLOTMENT_SIMULATION_H
#define ALLOTMENT_SIMULATION_H

#include "simulated/engine/engine.h"

// More kernels than this never run at once, whatever the model says.
#define ALLOT_TURN_KERNELS 128

typedef struct candidate {
  allot_work *kernel;
  int slot;
  uint64_t number;
  uint64_t ready_ns;
  bool begun;  // it was put aside before
} candidate;

// What the processes of a turn have on the GPU, or could have now: one process, or all clients of
// an MPS server.
typedef struct turn {
  uint32_t running, running_sms;
  uint64_t first_end_ns;  // of the running ones
  uint32_t waiting;
  candidate candidates[ALLOT_TURN_KERNELS];       // ready, in the order in which they are to begin
  uint32_t own_running[ALLOT_MACHINE_PROCESSES];  // of each slot
  uint32_t own_sms[ALLOT_MACHINE_PROCESSES];
  uint64_t
      computing[ALLOT_MACHINE_PROCESSES / 64];  // a bit for each slot that has a running kernel
} turn;

typedef uint64_t places[(ALLOT_MACHINE_PLACES + 63) / 64];

typedef struct simulation {
  allot_handle *handle;
  allot_gpu_engine *engine;
  int place, gpu;  // of a compute instance: that of its GPU
  uint32_t sm_count, most_kernels;
  uint64_t slice_ns;
  uint64_t next_ns;  // the first moment after now at which a work changes by itself
  places others;     // a bit for each place that a WAIT here depends on
  uint64_t begun[ALLOT_MACHINE_PROCESSES / 64];  // a bit for each slot whose ring's front is right
  turn turn;                                     // the holder's
} simulation;

// ---- front.c ----

// Brings the front of the slot's ring to its head: new works join it whose streams have come to
// them.
void front_extend(simulation *run, int slot);
// The work at that place is done: it leaves, and what is behind it in its stream may join, behind
// that place. Returns false if the work is not done.
bool front_pass(allot_ring *ring, uint32_t at);
uint64_t front_number(const allot_ring *ring, uint32_t at);

// ---- turns.c ----

void turn_begin(turn *begun);
void turn_add_running(const simulation *run, turn *of, int slot, const allot_work *kernel,
                      uint64_t end_ns);
void turn_add_ready(simulation *run, turn *of, const candidate *added);
// Puts the holder's kernels aside if it is another one, and gives the leader the GPU.
void turn_give(simulation *run, int leader);
// Starts as many of the candidates as have room. Returns when the first kernel ends: not after now
// if it began and ended while nobody looked.
uint64_t turn_run(simulation *run);
// Busy time of the GPU, and of each process that has a kernel running.
void turn_account(simulation *run, uint64_t from_ns, uint64_t to_ns);

// ---- managed.c ----

// Before a kernel of the slot: brings in what it lacks, which may stall the process's kernels.
void managed_bring(simulation *run, int slot);
// Decides what a prefetch moves, does so, and sets the work's duration.
void managed_prefetch(simulation *run, int slot, allot_work *work);

#endif
