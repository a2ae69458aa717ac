// SPDX-License-Identifier: Apache-2.0
// The simulated machine's operations: what libcuda.so.1 and libnvidia-ml.so.1 share.
//
// Errors are negative errno values. Times are CLOCK_MONOTONIC nanoseconds.
#ifndef ALLOTMENT_ENGINE_H
#define ALLOTMENT_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulated/engine/state.h"

typedef struct allot_handle {
  allot_machine *machine;
  int slot;        // own slot, -1: none
  void *keeper;    // mapping of the description that holds the slot's lock
  uint32_t *mine;  // 0 in a forked child, whose parent the slot belongs to
  uint32_t nodes;  // GPUs that the process can reach, one bit each
  char path[1024];
} allot_handle;

// ---- machine.c ----

// Maps the machine that the environment names, else the one at the default path. -ENOENT: there is
// none; -EINVAL: not a machine file, or damaged; -EPROTO: of another version.
int allot_machine_open(allot_handle *handle);
int allot_machine_open_at(allot_handle *handle, const char *path);
void allot_machine_close(allot_handle *handle);
uint64_t allot_now_ns(void);

// ---- nodes.c ----

#define ALLOT_ALL_NODES(count) ((uint32_t)((1ull << (count)) - 1))
// The GPUs that the environment lets the process reach, of some of them perhaps a MIG device alone.
uint32_t allot_nodes(const allot_handle *handle);
// A MIG device by its place, or a whole GPU.
bool allot_reaches(const allot_handle *handle, int place);
// Does the environment hold the process to some? Then it may not cut GPUs.
bool allot_is_tenant(void);

// ---- processes.c ----

// Takes a slot for the calling process, as ALLOT_PROCESS_*. -ENOSPC: all are taken. Not for two
// threads at once.
int allot_machine_attach(allot_handle *handle, unsigned kind);
// Has the calling process a slot by this handle? (A forked child has not.)
bool allot_machine_attached(const allot_handle *handle);
// Gives the slot back with all that it has (the end of a process does the same).
void allot_machine_detach(allot_handle *handle);
// Clears the slots of dead processes: their memory, their queued work, their locks. Returns how
// many.
int allot_machine_reap(allot_handle *handle);
// Clears this one slot if its owner is dead. True: it was dead and is cleared.
bool allot_machine_reap_slot(allot_handle *handle, int slot);
// Slots worth looking at: 0 up to this.
int allot_machine_high(const allot_handle *handle);
// Is the slot taken? Says nothing about whether its owner lives: reap first.
bool allot_machine_taken(const allot_handle *handle, int slot);
// Does the slot's owner live, as far as its lock tells?
bool allot_machine_lives(allot_handle *handle, int slot);
// The pid namespace of a /proc/<pid>/ns/pid, 0 if it cannot be read.
uint64_t allot_pid_namespace(const char *path);
// The process as it knows itself, by NSpid: in another namespace it has another number.
int allot_number_inside(int pid);

// ---- forks.c ----

// Between these no thread of the process forks.
void allot_forks_hold(void);
void allot_forks_release(void);

// ---- memory.c ----

// What the calling process can have of a GPU: its instance's memory, else the GPU's less what the
// driver keeps.
uint64_t allot_gpu_capacity(const allot_handle *handle, int gpu);
// Bytes in use there, resident managed memory among them.
uint64_t allot_gpu_used(const allot_handle *handle, int gpu);
uint64_t allot_process_used(const allot_handle *handle, int slot, int gpu);
// Takes bytes of a GPU's memory in one step across all processes, or says no. Dead processes'
// memory is reclaimed before a no. Calls of one process for one GPU must not overlap.
bool allot_gpu_take(allot_handle *handle, int gpu, uint64_t bytes);
void allot_gpu_give_back(allot_handle *handle, int gpu, uint64_t bytes);
// The same for another process's slot, which must be kept from doing so itself.
bool allot_slot_take(allot_handle *handle, int slot, int gpu, uint64_t bytes);
void allot_slot_give_back(allot_handle *handle, int slot, int gpu, uint64_t bytes);
// All that the slot has, of every GPU. For the slot's owner or reaper.
void allot_process_forget_memory(allot_handle *handle, int slot);

// ---- mig.c: what a GPU is cut into ----

// Keeps what the GPU is cut into as it is, and contexts from beginning on it. A number to unlock
// with, or a negative errno value.
int allot_mig_lock(const allot_handle *handle, int gpu);
void allot_mig_unlock(int lock, int gpu);
bool allot_mig_is_on(const allot_handle *handle, int gpu);
const allot_mig_profile *allot_mig_profile_of(const allot_handle *handle, int gpu, uint32_t place);
// The first slot of the GPU instance that covers a slot, -1: none does.
int allot_mig_around(const allot_handle *handle, int gpu, int slot);
// The compute instance at a place, NULL: there is none.
allot_compute_instance *allot_mig_compute(const allot_handle *handle, int place);
// The profile of the GPU instance around a compute instance's place.
const allot_mig_profile *allot_mig_profile_at(const allot_handle *handle, int place);
// "NVIDIA A100-SXM4-40GB MIG 1g.5gb", of the compute instance at a place.
void allot_mig_name(const allot_handle *handle, int place, char *name, size_t size);
// Its GPU instance's id << 8 | its own.
unsigned int allot_mig_ids(const allot_handle *handle, int place);
// The places of the GPU's MIG devices that the process can reach, by ids. Returns how many.
int allot_mig_list(const allot_handle *handle, int gpu, int places[ALLOT_MIG_SLOTS]);
// The place of a compute instance by its UUID, -1: there is none.
int allot_mig_find(const allot_handle *handle, const char *uuid);
// Where a compute instance's memory is counted.
int allot_mig_memory_place(const allot_handle *handle, int place);
// Has a living process a context on the slots from `from` up to, not with, `to`?
bool allot_mig_in_use(allot_handle *handle, int gpu, int from, int to);

int allot_place_gpu(int place);
// Where a process's kernels run, and where its memory is counted: its instance, else the GPU.
int allot_compute_place(const allot_handle *handle, int slot, int gpu);
int allot_memory_place(const allot_handle *handle, int slot, int gpu);
// Where the work runs that a point names.
int allot_point_place(const allot_handle *handle, allot_point point);
// What programs can have of a GPU or GPU instance.
uint64_t allot_place_capacity(const allot_handle *handle, int place);
// Bytes in use there, resident managed memory among them.
uint64_t allot_place_used(const allot_handle *handle, int place);
uint32_t allot_place_multiprocessors(const allot_handle *handle, int place);

// ---- managed.c: managed memory, which moves ----

// The caller's managed memory of a GPU becomes more or less by so many bytes.
void allot_managed_add(allot_handle *handle, int gpu, uint64_t bytes);
void allot_managed_remove(allot_handle *handle, int gpu, uint64_t bytes);
// All that the slot has. For the slot's owner or reaper.
void allot_managed_forget(allot_handle *handle, int slot, int gpu);
// Of all processes, on the GPU or GPU instance.
uint64_t allot_managed_resident(const allot_handle *handle, int place);
// Of all processes and GPUs: data that is in the host's memory.
uint64_t allot_managed_on_host(const allot_handle *handle);
// Other memory has precedence: moves out what no longer fits beside it.
void allot_managed_squeeze(allot_handle *handle, int place);
// Moves all that the slot has out, and returns how much that was. For a checkpoint.
uint64_t allot_managed_evict(allot_handle *handle, int slot, int gpu);

// ---- mps.c: clients of an MPS server, whose kernels share a turn ----

// Whose turn the kernels of a slot run in: its server's, else its own.
int allot_mps_leader(const allot_handle *handle, int slot);
bool allot_mps_is_client(const allot_handle *handle, int slot);
// Multiprocessors of the GPU that the slot's kernels may have together.
uint32_t allot_mps_multiprocessors(const allot_handle *handle, int slot, int gpu);
// From now on every call of the slot's process returns the error, and its work is over.
void allot_mps_end(allot_handle *handle, int slot, uint32_t error);
// The clients of a server whose slot is cleared fail, and their work with them.
void allot_mps_lose_server(allot_handle *handle, int slot);
// A fault of the slot on that GPU: it fails with the error, and so do the clients there of its
// server, which takes no new ones until they have ended.
void allot_mps_fault(allot_handle *handle, int slot, int gpu, uint32_t error);
// Is a server's fault still there? It is over when nobody lives whom it has ended.
bool allot_mps_is_faulty(allot_handle *handle, int server);

// ---- checkpoint.c ----

// The slot of a process by its number, as the caller sees it; -ESRCH.
int allot_checkpoint_find(allot_handle *handle, int pid);
unsigned allot_checkpoint_state(const allot_handle *handle, int slot);
// -EPERM: it is not in the state for that; -EBUSY: somebody else is at it. lock: -ETIMEDOUT (0: no
// limit of time); restore: -ENOMEM, and nothing has changed.
int allot_checkpoint_lock(allot_handle *handle, int slot, uint64_t timeout_ns);
int allot_checkpoint_save(allot_handle *handle, int slot);
int allot_checkpoint_restore(allot_handle *handle, int slot);
int allot_checkpoint_unlock(allot_handle *handle, int slot);
// Sleeps while the calling process is locked.
void allot_checkpoint_wait(const allot_handle *handle);
// Around every change of its memory by the owner: waits while the process is locked.
void allot_gate_enter(const allot_handle *handle);
void allot_gate_leave(const allot_handle *handle);
// For who clears a slot: nobody begins to work on it from now on. False: somebody is at work.
bool allot_checkpoint_bar(allot_handle *handle, int slot);

// ---- lock.c ----

// For a process with a slot, which must not hold another place's lock.
void allot_engine_lock(allot_handle *handle, int place);
void allot_engine_unlock(allot_handle *handle, int place);
// Frees the locks that a dead process held.
void allot_engine_break_locks(allot_handle *handle, int slot);

// ---- work.c ----

// Gives the caller's ring for a GPU its space on the disk. False: the disk is full.
bool allot_ring_prepare(allot_handle *handle, int gpu);
allot_ring *allot_ring_of(const allot_handle *handle, int slot, int gpu);
allot_work *allot_ring_work(allot_ring *ring, uint64_t number);
// The whole number of which `low` is the low half, for a number not above `near`.
uint64_t allot_whole_number(uint32_t low, uint64_t near);

bool allot_work_done(const allot_handle *handle, allot_point point);
// When a work of the caller's own ring ended, 0 if it has not or if that is no longer known. The
// caller keeps other threads from submitting to the ring meanwhile.
uint64_t allot_work_ended(const allot_handle *handle, allot_point point);
// A new work at the head of the caller's ring, to be filled in before allot_work_submit. NULL: the
// ring is full; wait for allot_work_oldest first. One thread of the process at a time and GPU.
allot_work *allot_work_new(allot_handle *handle, int gpu);
uint64_t allot_work_oldest(const allot_handle *handle, int gpu);
allot_point allot_work_submit(allot_handle *handle, int gpu);
// The owner's word that a HOST work is over.
void allot_work_finish_host(allot_handle *handle, allot_point point);
// Everything submitted by the slot is over. For its owner (a reset) or reaper.
void allot_work_cancel(allot_handle *handle, int slot, int gpu);
// Is all done that this work has to come after? *ready_ns: since when it could start.
bool allot_work_ready(const allot_handle *handle, allot_point point, uint64_t *ready_ns);

// ---- run.c ----

// The turn of each of several busy processes of a GPU.
uint64_t allot_slice_ns(const allot_handle *handle, int gpu);
// Nanoseconds that a copy engine takes.
uint64_t allot_copy_ns(const allot_handle *handle, int gpu, unsigned engine, uint64_t bytes);

// Brings the simulation of a GPU, or of one compute instance, to the present. A process without a
// slot becomes a monitor for it.
void allot_engine_advance(allot_handle *handle, int place);
// The whole GPU, and all that is cut from it.
void allot_gpu_advance(allot_handle *handle, int gpu);

// ---- wait.c ----

// Sleeps until the work is done.
void allot_engine_wait(allot_handle *handle, allot_point point);
// When to look again whether a HOST work may begin.
uint64_t allot_engine_ready_at(const allot_handle *handle, allot_point point);
void allot_sleep_until(uint64_t time_ns);
// Waits for as long as a fault says, in microseconds, and no longer than it stands.
void allot_wait_out(const uint32_t *fault_us);

// ---- history.c ----

void allot_history_add(allot_history *history, uint64_t from_ns, uint64_t to_ns);
// Busy nanoseconds within the last `window_ns` (at most 1 s) before `now_ns`.
uint64_t allot_history_busy(const allot_history *history, uint64_t now_ns, uint64_t window_ns);
// Percent of the last second in which the GPU computed, or copied. Brings the engine up to date.
unsigned allot_gpu_utilization(allot_handle *handle, int gpu);
unsigned allot_gpu_copy_utilization(allot_handle *handle, int gpu);
unsigned allot_process_utilization(allot_handle *handle, int slot, int gpu);

// Shared words are read and written only so.
#define allot_load(p) ALLOT_LOAD(p)
#define allot_store(p, v) ALLOT_STORE(p, v)

#endif
