// SPDX-License-Identifier: Apache-2.0
// A process is locked, put aside, brought back and let go on by another one; and what becomes of it
// when either of them dies meanwhile.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4
// sanitizers: plain address,undefined
#include <signal.h>
#include <sys/mman.h>

#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

#define BYTES (256 * MIB)

typedef struct shared {
  uint64_t turns;      // kernels that the target has seen the end of
  uint64_t queued_ns;  // how long the one takes that it queued last
  uint64_t kernel_ns;  // how long the next one is to take
  uint32_t ready, stop;
} shared;

static shared *with;
static allot_handle machine;

static uint64_t used(void) {
  assert(allot_machine_reap(&machine) >= 0);
  return allot_gpu_used(&machine, 0);
}

// Has memory with something in it, and computes until it is told to stop.
static void work(void) {
  begin(0);
  CUfunction spin = load_spin();
  CUdeviceptr memory, more;
  unsigned char seen = 0;
  OK(cuMemAlloc_v2(&memory, BYTES));
  OK(cuMemsetD8_v2(memory + BYTES - 1, 42, 1));
  OK(cuCtxSynchronize());
  allot_store(&with->ready, 1u);
  while (!allot_load(&with->stop)) {
    uint64_t kernel_ns = allot_load(&with->kernel_ns);
    spin_for(spin, kernel_ns, NULL);
    allot_store(&with->queued_ns, kernel_ns);
    OK(cuCtxSynchronize());
    OK(cuMemAlloc_v2(&more, 4 * MIB));
    OK(cuMemFree_v2(more));
    __atomic_fetch_add(&with->turns, 1, __ATOMIC_SEQ_CST);
  }
  OK(cuMemcpyDtoH_v2(&seen, memory + BYTES - 1, 1));
  _exit(seen == 42 ? 0 : 1);
}

static pid_t start(void) {
  *with = (shared){.kernel_ns = MILLISECOND};
  pid_t child = fork();
  assert(child >= 0);
  if (child == 0) work();
  while (!allot_load(&with->ready)) usleep(1000);
  return child;
}

static int slot_of(pid_t pid) {
  for (int slot = 0; slot < allot_machine_high(&machine); slot++) {
    if (machine.machine->processes[slot].pid == pid) return slot;
  }
  abort();
}

static CUprocessState state_of(pid_t pid) {
  CUprocessState state;
  OK(cuCheckpointProcessGetState(pid, &state));
  return state;
}

static void expect_progress(void) {
  uint64_t before = allot_load(&with->turns);
  for (int i = 0; i < 60000 && allot_load(&with->turns) < before + 3; i++) usleep(1000);
  assert(allot_load(&with->turns) >= before + 3);
}

static void expect_rest(void) {
  // The turn that was over before the lock may be counted at any time after it.
  uint64_t before = allot_load(&with->turns);
  usleep(150000);
  assert(allot_load(&with->turns) <= before + 1);
}

static void expect_at_least(uint64_t began, uint64_t bytes, uint32_t mib_per_s) {
  uint64_t wanted = bytes * 1000 / mib_per_s * 1000000 / MIB;
  assert(allot_now_ns() - began >= wanted);
}

static void there_and_back(void) {
  const allot_gpu_description *gpu = &machine.machine->description.gpus[0];
  pid_t pid = start();
  assert(state_of(pid) == CU_PROCESS_STATE_RUNNING);
  FAILS(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessCheckpoint(pid, NULL));
  FAILS(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessRestore(pid, NULL));
  FAILS(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(pid, NULL));
  OK(cuCheckpointProcessLock(pid, NULL));
  assert(state_of(pid) == CU_PROCESS_STATE_LOCKED);
  FAILS(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessLock(pid, NULL));
  expect_rest();
  uint64_t had = used(), began = allot_now_ns();
  assert(had >= BYTES + gpu->context_bytes);
  OK(cuCheckpointProcessCheckpoint(pid, NULL));
  expect_at_least(began, had, gpu->d2h_mib_per_s);
  assert(state_of(pid) == CU_PROCESS_STATE_CHECKPOINTED);
  assert(used() == 0);
  expect_rest();
  // Somebody else has the memory meanwhile.
  uint64_t all = allot_gpu_capacity(&machine, 0);
  assert(allot_gpu_take(&machine, 0, all - had + 1));
  FAILS(CUDA_ERROR_OUT_OF_MEMORY, cuCheckpointProcessRestore(pid, NULL));
  assert(state_of(pid) == CU_PROCESS_STATE_CHECKPOINTED);
  allot_gpu_give_back(&machine, 0, UINT64_MAX);
  assert(used() == 0);
  began = allot_now_ns();
  CUcheckpointRestoreArgs args = {0};
  OK(cuCheckpointProcessRestore(pid, &args));
  expect_at_least(began, had, gpu->h2d_mib_per_s);
  assert(state_of(pid) == CU_PROCESS_STATE_LOCKED);
  assert(used() == had);
  expect_rest();
  OK(cuCheckpointProcessUnlock(pid, NULL));
  expect_progress();
  allot_store(&with->stop, 1u);
  expect_success(pid);
  assert(used() == 0);
}

static void locking_waits_for_kernels_up_to_a_time(void) {
  pid_t pid = start();
  const uint64_t long_ns = 3000 * MILLISECOND;
  allot_store(&with->kernel_ns, long_ns);
  while (allot_load(&with->queued_ns) != long_ns) usleep(1000);
  allot_store(&with->kernel_ns, MILLISECOND);  // the next one
  CUcheckpointLockArgs args = {.timeoutMs = 20};
  FAILS(CUDA_ERROR_NOT_READY, cuCheckpointProcessLock(pid, &args));
  assert(state_of(pid) == CU_PROCESS_STATE_RUNNING);
  args = (CUcheckpointLockArgs){.reserved0 = 1};
  FAILS(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessLock(pid, &args));
  OK(cuCheckpointProcessLock(pid, NULL));
  const allot_ring *ring = allot_ring_of(&machine, slot_of(pid), 0);
  assert(allot_load(&ring->head) == allot_load(&ring->tail));
  OK(cuCheckpointProcessUnlock(pid, NULL));
  allot_store(&with->stop, 1u);
  expect_success(pid);
}

// A child that does something to the target, and ends.
static void in_a_child(void (*act)(pid_t), pid_t pid) {
  pid_t child = fork();
  assert(child >= 0);
  if (child == 0) {
    act(pid);
    _exit(0);
  }
  int status;
  assert(waitpid(child, &status, 0) == child);
}

static void lock_it(pid_t pid) {
  OK(cuCheckpointProcessLock(pid, NULL));
}

static void save_it_until_killed(pid_t pid) {
  // Ends this process while the memory is on its way out.
  pid_t saver = getpid();
  if (fork() == 0) {
    while (allot_checkpoint_state(&machine, slot_of(pid)) != ALLOT_CHECKPOINT_SAVING) {
      if (getppid() != saver) _exit(0);  // it was over too soon
      usleep(100);
    }
    kill(saver, SIGKILL);
    _exit(0);
  }
  cuCheckpointProcessCheckpoint(pid, NULL);
}

static void a_dead_locker_leaves_it_locked(void) {
  pid_t pid = start();
  in_a_child(lock_it, pid);
  assert(state_of(pid) == CU_PROCESS_STATE_LOCKED);
  expect_rest();
  uint64_t had = used();
  in_a_child(save_it_until_killed, pid);
  while (state_of(pid) == CU_PROCESS_STATE_CHECKPOINTED) {
    OK(cuCheckpointProcessRestore(pid, NULL));
    in_a_child(save_it_until_killed, pid);
  }
  assert(state_of(pid) == CU_PROCESS_STATE_CHECKPOINTING);
  OK(cuCheckpointProcessCheckpoint(pid, NULL));  // goes on where the other ended
  assert(state_of(pid) == CU_PROCESS_STATE_CHECKPOINTED && used() == 0);
  OK(cuCheckpointProcessRestore(pid, NULL));
  assert(used() == had);
  OK(cuCheckpointProcessUnlock(pid, NULL));
  expect_progress();
  allot_store(&with->stop, 1u);
  expect_success(pid);
}

static void killed_ones_leave_nothing(void) {
  for (int step = 0; step < 3; step++) {
    pid_t pid = start();
    OK(cuCheckpointProcessLock(pid, NULL));
    if (step > 0) OK(cuCheckpointProcessCheckpoint(pid, NULL));
    if (step > 1) OK(cuCheckpointProcessRestore(pid, NULL));
    kill(pid, SIGKILL);
    int status;
    assert(waitpid(pid, &status, 0) == pid);
    assert(used() == 0);
    CUprocessState state;
    FAILS(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessGetState(pid, &state));
  }
  // Whoever has the place next is not locked.
  pid_t pid = start();
  assert(state_of(pid) == CU_PROCESS_STATE_RUNNING);
  expect_progress();
  allot_store(&with->stop, 1u);
  expect_success(pid);
}

static void old_drivers_cannot(void) {
  int tid = 0;
  CUprocessState state;
  pid_t pid = start();
  OK(cuCheckpointProcessGetRestoreThreadId(pid, &tid));
  assert(tid == pid);
  machine.machine->description.cuda_version = 12070;
  FAILS(CUDA_ERROR_NOT_SUPPORTED, cuCheckpointProcessGetState(pid, &state));
  FAILS(CUDA_ERROR_NOT_SUPPORTED, cuCheckpointProcessLock(pid, NULL));
  machine.machine->description.cuda_version = 13000;
  FAILS(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessGetState(1, &state));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessLock(-1, NULL));
  allot_store(&with->stop, 1u);
  expect_success(pid);
}

int main(void) {
  with = mmap(NULL, sizeof *with, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert(with != MAP_FAILED);
  assert(allot_machine_open(&machine) == 0);
  assert(allot_machine_attach(&machine, ALLOT_PROCESS_MONITOR) == 0);
  there_and_back();
  locking_waits_for_kernels_up_to_a_time();
  a_dead_locker_leaves_it_locked();
  killed_ones_leave_nothing();
  old_drivers_cannot();
  return 0;
}
