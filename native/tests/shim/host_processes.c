// SPDX-License-Identifier: Apache-2.0
// Forks, execs, threads and closed descriptors: every process has its own slot, and keeps it.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "host.h"
#include "waiting.h"

extern char **environ;

static int slots_taken(void) {
  int taken = 0;
  clear_the_dead();
  for (int slot = 0; slot < ALLOT_MAX_SLOTS; slot++) {
    if (share.usage->slots[slot].state == ALLOT_SLOT_TAKEN) taken++;
  }
  return taken;
}

static void expect_child(pid_t child) {
  int status;
  EXPECT(waitpid(child, &status, 0) == child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) FAIL("the child ended with %x", status);
}

static void a_child_is_a_process_of_its_own(void) {
  CUdeviceptr pointer;
  EXPECT_EQUAL(slots_taken(), 0);
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    start_on(0);
    OK(cuMemAlloc_v2(&pointer, 10 * MIB));
    EXPECT_EQUAL(charged(0), context_cost() + 10 * MIB);
    EXPECT_EQUAL(slots_taken(), 1);
    _exit(0);
  }
  expect_child(child);
  EXPECT_EQUAL(charged(0), 0);
  EXPECT_EQUAL(slots_taken(), 0);
  AGREE();
}

static void a_child_of_an_initialised_process(void) {
  CUdeviceptr pointer, other;
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, 10 * MIB));
  uint64_t before = charged(0);
  pid_t child = fork();
  if (child == 0) {
    // The driver refuses a child that inherits it; nothing of the parent's is touched.
    GIVES(cuMemAlloc_v2(&other, MIB), CUDA_ERROR_NOT_INITIALIZED);
    GIVES(cuMemFree_v2(pointer), CUDA_ERROR_NOT_INITIALIZED);
    GIVES(cuMemAllocAsync(&other, MIB, NULL), CUDA_ERROR_NOT_INITIALIZED);
    EXPECT_EQUAL(charged(0), before);
    _exit(0);
  }
  expect_child(child);
  EXPECT_EQUAL(charged(0), before);
  OK(cuMemFree_v2(pointer));
  EXPECT_EQUAL(charged(0), context_cost());
  EXPECT_EQUAL(slots_taken(), 1);
}

static void *allocate_and_free(void *argument) {
  CUcontext context = argument;
  OK(cuCtxSetCurrent(context));
  unsigned seed = (unsigned)(uintptr_t)&context;
  CUdeviceptr mine[16] = {0};
  for (int i = 0; i < 2000; i++) {
    CUdeviceptr *one = &mine[rand_r(&seed) % 16];
    if (*one != 0) {
      OK(cuMemFree_v2(*one));
      *one = 0;
    } else {
      uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % (i % 3 == 0 ? 8 * MIB : 64 * KIB);
      int result = (int)cuMemAlloc_v2(one, bytes);
      if (result == CUDA_ERROR_OUT_OF_MEMORY) *one = 0;
      EXPECT(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
    }
  }
  for (int i = 0; i < 16; i++) {
    if (mine[i] != 0) OK(cuMemFree_v2(mine[i]));
  }
  return NULL;
}

#define THREADS 8

static void threads_at_once(void) {
  CUcontext context = start_on(0);
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) {
    OK(pthread_create(&threads[i], NULL, allocate_and_free, context));
  }
  for (int i = 0; i < THREADS; i++) OK(pthread_join(threads[i], NULL));
  EXPECT_EQUAL(charged(0), context_cost());
  AGREE();
}

static void *fork_again_and_again(void *unused) {
  for (int i = 0; i < 30; i++) {
    pid_t child = fork();
    if (child == 0) {
      CUdeviceptr pointer;
      cuMemFree_v2(12345);
      cuMemAlloc_v2(&pointer, 1);
      _exit(0);
    }
    expect_child(child);
  }
  return NULL;
}

// A child must not find a lock that another thread of its parent held.
static void forks_beside_busy_threads(void) {
  CUcontext context = start_on(0);
  pthread_t threads[3];
  OK(pthread_create(&threads[0], NULL, fork_again_and_again, NULL));
  OK(pthread_create(&threads[1], NULL, allocate_and_free, context));
  OK(pthread_create(&threads[2], NULL, allocate_and_free, context));
  for (int i = 0; i < 3; i++) OK(pthread_join(threads[i], NULL));
  EXPECT_EQUAL(charged(0), context_cost());
}

static void *initialise(void *unused) {
  CUcontext context;
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, 0));
  return context;
}

static void threads_start_together(void) {
  pthread_t threads[THREADS];
  void *contexts[THREADS];
  for (int i = 0; i < THREADS; i++) OK(pthread_create(&threads[i], NULL, initialise, NULL));
  for (int i = 0; i < THREADS; i++) OK(pthread_join(threads[i], &contexts[i]));
  for (int i = 1; i < THREADS; i++) EXPECT(contexts[i] == contexts[0]);
  EXPECT_EQUAL(charged(0), context_cost());
  EXPECT_EQUAL(slots_taken(), 1);
  AGREE();
}

static void descriptors_may_be_closed(void) {
  CUdeviceptr pointer;
  OK(cuInit(0));
  for (int descriptor = 3; descriptor < 1024; descriptor++) close(descriptor);
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, 10 * MIB));
  EXPECT_EQUAL(slots_taken(), 1);
  EXPECT(allot_ledger_slot_alive(&share, 0));
  EXPECT_EQUAL(charged(0), context_cost() + 10 * MIB);
}

static void no_descriptor_stays_open(void) {
  int lowest = dup(0);
  close(lowest);
  CUdeviceptr pointer;
  size_t free, total;
  start_on(0);
  int after_start = dup(0);
  close(after_start);
  OK(cuMemAlloc_v2(&pointer, 1));
  OK(cuMemGetInfo_v2(&free, &total));
  int after = dup(0);
  EXPECT_EQUAL(after, after_start);
}

static void spawned_programs_are_their_own(void) {
  start_on(0);
  uint64_t before = charged(0);
  char *arguments[] = {"/proc/self/exe", "allocates_and_stays", NULL};
  pid_t child;
  OK(posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, environ));
  expect_child(child);
  EXPECT_EQUAL(charged(0), before);
  pid_t second = vfork();
  if (second == 0) {
    execv("/proc/self/exe", arguments);
    _exit(9);
  }
  expect_child(second);
  EXPECT_EQUAL(charged(0), before);
  AGREE();
}

static void allocates_and_stays(void) {
  CUdeviceptr pointer;
  uint64_t before = charged(0);
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, 20 * MIB));
  EXPECT_EQUAL(charged(0), before + context_cost() + 20 * MIB);
}

// ---- forked in the midst of taking a slot ----

static bool is_armed, is_attaching, is_forked;

// Stands before libc's: where the slot's mapping is not yet kept out of children, the other thread
// has as long as it wants for a fork. It must have to wait.
int madvise(void *start, size_t bytes, int advice) {
  if (is_armed && advice == MADV_DONTFORK) {
    is_armed = false;
    announce(&is_attaching);
    if (await(&is_forked, 100)) FAIL("forked in the midst of an attach");
  }
  return (int)syscall(SYS_madvise, start, bytes, advice);
}

static void *fork_a_bystander(void *pipe_end) {
  EXPECT(await(&is_attaching, 10000));
  pid_t bystander = fork();
  if (bystander == 0) {
    for (int descriptor = 1; descriptor < 64; descriptor++) close(descriptor);
    alarm(20);
    pause();
    _exit(0);
  }
  announce(&is_forked);
  EXPECT(write(*(int *)pipe_end, &bystander, sizeof bystander) == sizeof bystander);
  return NULL;
}

static void a_bystander_does_not_keep_the_slot(void) {
  int ends[2];
  OK(pipe(ends));
  pid_t owner = fork();
  if (owner == 0) {
    pthread_t thread;
    OK(pthread_create(&thread, NULL, fork_a_bystander, &ends[1]));
    is_armed = true;
    CUdeviceptr pointer;
    start_on(0);
    OK(cuMemAlloc_v2(&pointer, 10 * MIB));
    OK(pthread_join(thread, NULL));
    EXPECT(!is_armed);
    EXPECT_EQUAL(slots_taken(), 1);
    kill(getpid(), SIGKILL);
  }
  pid_t bystander;
  close(ends[1]);
  EXPECT(read(ends[0], &bystander, sizeof bystander) == sizeof bystander);
  int status;
  EXPECT(waitpid(owner, &status, 0) == owner && WIFSIGNALED(status));
  int taken = slots_taken();
  uint64_t left = charged(0);
  OK(kill(bystander, SIGKILL));
  EXPECT_EQUAL(taken, 0);
  EXPECT_EQUAL(left, 0);
}

// ---- killed ----

static void allocate_for_ever(unsigned seed) {
  start_on(0);
  CUdeviceptr mine[32] = {0};
  for (;;) {
    CUdeviceptr *one = &mine[rand_r(&seed) % 32];
    if (*one != 0) {
      cuMemFree_v2(*one);
      *one = 0;
    } else if (cuMemAlloc_v2(one, 1 + (uint64_t)rand_r(&seed) % (16 * MIB)) != CUDA_SUCCESS) {
      *one = 0;
    }
  }
}

static void killed_processes_leave_nothing(void) {
  for (int round = 0; round < 5; round++) {
    pid_t children[6];
    for (int i = 0; i < 6; i++) {
      children[i] = fork();
      if (children[i] == 0) allocate_for_ever((unsigned)(round * 100 + i));
    }
    for (int i = 0; i < 20; i++) {
      usleep(2000);
      EXPECT(allot_ledger_used(&share, 0) <= limit_of(0));
      EXPECT(physical(0) <= limit_of(0));
    }
    for (int i = 0; i < 6; i++) kill(children[i], SIGKILL);
    for (int i = 0; i < 6; i++) waitpid(children[i], NULL, 0);
    EXPECT_EQUAL(charged(0), 0);
    EXPECT_EQUAL(slots_taken(), 0);
    AGREE();
  }
}

static void stopped_processes_block_nobody(void) {
  pid_t children[4];
  for (int i = 0; i < 4; i++) {
    children[i] = fork();
    if (children[i] == 0) allocate_for_ever((unsigned)i);
  }
  usleep(100000);
  for (int i = 0; i < 4; i++) kill(children[i], SIGSTOP);
  CUdeviceptr pointer;
  start_on(0);
  for (int i = 0; i < 100; i++) {
    if (cuMemAlloc_v2(&pointer, MIB) == CUDA_SUCCESS) OK(cuMemFree_v2(pointer));
  }
  for (int i = 0; i < 4; i++) kill(children[i], SIGKILL);
  for (int i = 0; i < 4; i++) waitpid(children[i], NULL, 0);
  EXPECT_EQUAL(charged(0), context_cost());
}

// ---- another program in the same process ----

static void takes_all_that_there_is(void) {
  CUdeviceptr pointer;
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, limit_of(0) - context_cost()));
  AGREE();
}

// The driver lists the process's number again, by the time that it is asked.
static void a_program_has_the_memory_of_the_one_before_it(void) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    CUdeviceptr pointer;
    start_on(0);
    OK(cuMemAlloc_v2(&pointer, limit_of(0) / 2));
    execl("/proc/self/exe", "host_processes", "takes_all_that_there_is", NULL);
    _exit(9);
  }
  expect_child(child);
}

// ---- a driver that frees the memory of the dead some time after their end ----

#define RELEASE_US 300000

static void memory_returns_when_the_driver_has_it_back(void) {
  uint64_t most = limit_of(0) - context_cost();
  simulation.machine->faults.release_us = RELEASE_US;
  be_killed_with(most);
  EXPECT_EQUAL(physical(0), limit_of(0));
  fflush(NULL);
  pid_t next = fork();
  if (next == 0) {
    CUdeviceptr pointer;
    start_on(0);
    EXPECT_EQUAL(physical(0), context_cost());
    OK(cuMemAlloc_v2(&pointer, most));
    _exit(0);
  }
  int status;
  while (waitpid(next, &status, WNOHANG) == 0) {
    EXPECT(physical(0) <= limit_of(0));
    EXPECT(allot_ledger_used(&share, 0) <= limit_of(0));
    usleep(1000);
  }
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void the_dead_are_reported_while_they_have_memory(void) {
  simulation.machine->faults.release_us = 600 * 1000000u;
  CUdeviceptr pointer;
  size_t free, total;
  be_killed_with(100 * MIB);
  start_on(0);
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(total - free, 2 * context_cost() + 100 * MIB);
  // More than the dead could give back: refused, without waiting for them.
  GIVES(cuMemAlloc_v2(&pointer, limit_of(0) - context_cost() + MIB), CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(total - free, 2 * context_cost() + 100 * MIB);
  simulation.machine->faults.release_us = 0;
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(total - free, context_cost());
}

// A process of no share has all of the GPU that is left, and has just been killed.
static void another_takes_the_rest(void) {
  simulation.machine->faults.release_us = RELEASE_US;
  pid_t child = keep_the_rest();
  kill(child, SIGKILL);
  int status;
  EXPECT(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  EXPECT_EQUAL(physical(0), allot_place_capacity(&simulation, 0));
}

static void the_driver_is_asked_again(void) {
  CUdeviceptr pointer;
  another_takes_the_rest();
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, 100 * MIB));
  EXPECT_EQUAL(physical(0), context_cost() + 100 * MIB);
}

static void the_driver_is_asked_again_for_a_graph(void) {
  CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
      .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
      .bytesize = 100 * MIB};
  CUgraph graph;
  CUgraphNode node, end;
  CUgraphExec made;
  start_on(0);
  OK(cuGraphCreate(&graph, 0));
  OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &parameters));
  OK(cuGraphAddMemFreeNode(&end, graph, &node, 1, parameters.dptr));
  OK(cuGraphInstantiateWithFlags(&made, graph, 0));
  another_takes_the_rest();
  OK(cuGraphLaunch(made, NULL));
  EXPECT_EQUAL(physical(0), context_cost() + 100 * MIB);
  OK(cuGraphExecDestroy(made));
  OK(cuGraphDestroy(graph));
}

static void the_driver_is_asked_again_for_stacks(void) {
  size_t before;
  start_on(0);
  OK(cuCtxGetLimit(&before, CU_LIMIT_STACK_SIZE));
  another_takes_the_rest();
  OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2 * before));
  EXPECT(physical(0) > context_cost());
}

// ---- frees beside an allocation that waits for memory ----

static const CUmemAllocationProp on_device = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                              .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static CUmemGenericAllocationHandle handles[2];
static CUdeviceptr pieces[2];
static CUcontext contexts[2];

static CUresult create_handle(int number) {
  return cuMemCreate(&handles[number], 100 * MIB, &on_device, 0);
}

static CUresult release_handle(int number) {
  return cuMemRelease(handles[number]);
}

static CUresult allocate_piece(int number) {
  return cuMemAllocAsync(&pieces[number], 100 * MIB, (CUstream)0x2);
}

static CUresult free_piece(int number) {
  OK(cuMemFreeAsync(pieces[number], NULL));
  return cuCtxSynchronize();
}

static CUresult create_context(int number) {
  return cuCtxCreate_v2(&contexts[number], 0, 0);
}

static CUresult destroy_context(int number) {
  return cuCtxDestroy_v2(contexts[number]);
}

static CUresult (*take_number)(int number);

static CUresult take_second(void) {
  return take_number(1);
}

// What one thread frees is what the other one waits for.
static void expect_no_wait(CUcontext context, CUresult (*take)(int), CUresult (*give)(int)) {
  waiting_call second;
  OK(take(0));
  pid_t other = keep_the_rest();
  take_number = take;
  begin_waiting_call(&second, context, take_second);
  OK(give(0));
  end_waiting_call(&second);
  OK(give(1));
  kill(other, SIGKILL);
  waitpid(other, NULL, 0);
  OK(cuCtxSetCurrent(context));
}

static void a_free_goes_on_beside_an_allocation_that_waits(void) {
  CUcontext context = start_on(0);
  expect_no_wait(context, create_handle, release_handle);
  expect_no_wait(context, allocate_piece, free_piece);
  expect_no_wait(context, create_context, destroy_context);
  EXPECT_EQUAL(charged(0), context_cost());
  AGREE();
}

static const test_case cases[] = {
    {"takes_all_that_there_is", takes_all_that_there_is},
    {"a_program_has_the_memory_of_the_one_before_it",
     a_program_has_the_memory_of_the_one_before_it},
    {"a_free_goes_on_beside_an_allocation_that_waits",
     a_free_goes_on_beside_an_allocation_that_waits},
    {"memory_returns_when_the_driver_has_it_back", memory_returns_when_the_driver_has_it_back},
    {"the_dead_are_reported_while_they_have_memory", the_dead_are_reported_while_they_have_memory},
    {"the_driver_is_asked_again", the_driver_is_asked_again},
    {"the_driver_is_asked_again_for_a_graph", the_driver_is_asked_again_for_a_graph},
    {"the_driver_is_asked_again_for_stacks", the_driver_is_asked_again_for_stacks},
    {"a_child_is_a_process_of_its_own", a_child_is_a_process_of_its_own},
    {"a_child_of_an_initialised_process", a_child_of_an_initialised_process},
    {"threads_at_once", threads_at_once},
    {"forks_beside_busy_threads", forks_beside_busy_threads},
    {"threads_start_together", threads_start_together},
    {"descriptors_may_be_closed", descriptors_may_be_closed},
    {"no_descriptor_stays_open", no_descriptor_stays_open},
    {"spawned_programs_are_their_own", spawned_programs_are_their_own},
    {"allocates_and_stays", allocates_and_stays},
    {"a_bystander_does_not_keep_the_slot", a_bystander_does_not_keep_the_slot},
    {"killed_processes_leave_nothing", killed_processes_leave_nothing},
    {"stopped_processes_block_nobody", stopped_processes_block_nobody},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
