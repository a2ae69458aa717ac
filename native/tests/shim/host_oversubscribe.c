// SPDX-License-Identifier: Apache-2.0
// Memory of a share that may live on the host: charged as any other, in place of plain memory, and
// more of it than the device has.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "cancel.h"
#include "lease.h"
#include "waiting.h"

#define CONTEXT context_cost()

static bool is_managed(CUdeviceptr pointer) {
  unsigned int managed = 7;
  OK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer));
  return managed != 0;
}

static uint64_t host_bytes(void) {
  return __atomic_load_n(&share.usage->devices[0].host_bytes, __ATOMIC_SEQ_CST);
}

static void plain_memory_is_managed(void) {
  start_on(0);
  CUdeviceptr large, small, odd;
  OK(cuMemAlloc_v2(&large, 10 * MIB));
  EXPECT(is_managed(large));
  EXPECT_EQUAL(charged(0), CONTEXT + 10 * MIB);
  EXPECT_EQUAL(host_bytes(), 10 * MIB);
  // Nothing was used on the device yet.
  EXPECT_EQUAL(physical(0), CONTEXT);
  OK(cuMemsetD8_v2(large, 7, 10 * MIB));
  OK(cuCtxSynchronize());
  AGREE();
  // Its size is what was asked for, its charge is in whole granules.
  CUdeviceptr base;
  size_t size;
  OK(cuMemAlloc_v2(&odd, 3 * MIB + 12345));
  OK(cuMemGetAddressRange_v2(&base, &size, odd));
  EXPECT_EQUAL(size, 3 * MIB + 12345);
  EXPECT_EQUAL(charged(0), CONTEXT + 14 * MIB);
  OK(cuMemFree_v2(odd));
  // Small ones share blocks, which stay on the device.
  OK(cuMemAlloc_v2(&small, 1000));
  EXPECT(!is_managed(small));
  EXPECT_EQUAL(charged(0), CONTEXT + 12 * MIB);
  AGREE();
  unsigned char there[4] = {0};
  OK(cuMemcpyDtoH_v2(there, large + 100, sizeof there));
  EXPECT(there[0] == 7 && there[3] == 7);
  OK(cuMemFree_v2(large));
  OK(cuMemFree_v2(small));
  EXPECT_EQUAL(charged(0), CONTEXT);
  EXPECT_EQUAL(host_bytes(), 0);
  AGREE();
  GIVES(cuMemFree_v2(large), CUDA_ERROR_INVALID_VALUE);
  GIVES(cuMemAlloc_v2(&large, 0), CUDA_ERROR_INVALID_VALUE);
  GIVES(cuMemAlloc_v2(NULL, 10 * MIB), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQUAL(charged(0), CONTEXT);
}

static void pitched_memory_is_managed(void) {
  start_on(0);
  CUdeviceptr pointer;
  size_t pitch;
  OK(cuMemAllocPitch_v2(&pointer, &pitch, 1000, 5000, 4));
  EXPECT(is_managed(pointer));
  EXPECT_EQUAL(pitch, 1024);
  EXPECT_EQUAL(charged(0), CONTEXT + 6 * MIB);
  OK(cuMemFree_v2(pointer));
  OK(cuMemAllocPitch_v2(&pointer, &pitch, 512, 5000, 16));
  EXPECT_EQUAL(pitch, 512);
  OK(cuMemFree_v2(pointer));
  GIVES(cuMemAllocPitch_v2(&pointer, &pitch, 1000, 5000, 5), CUDA_ERROR_INVALID_VALUE);
  GIVES(cuMemAllocPitch_v2(&pointer, NULL, 1000, 5000, 4), CUDA_ERROR_INVALID_VALUE);
  GIVES(cuMemAllocPitch_v2(&pointer, &pitch, 0, 5000, 4), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQUAL(charged(0), CONTEXT);
  EXPECT_EQUAL(host_bytes(), 0);
}

static void what_cannot_move_stays(void) {
  start_on(0);
  CUdeviceptr pooled, own;
  OK(cuMemAllocAsync(&pooled, 5 * MIB, NULL));
  EXPECT(!is_managed(pooled));
  CUDA_ARRAY_DESCRIPTOR description = {1024, 1024, CU_AD_FORMAT_FLOAT, 4};
  CUarray array;
  OK(cuArrayCreate_v2(&array, &description));
  EXPECT_EQUAL(host_bytes(), 0);
  AGREE();
  // What the program made managed by itself moves as it did before, and may be on the host.
  OK(cuMemAllocManaged(&own, 5 * MIB, CU_MEM_ATTACH_GLOBAL));
  EXPECT_EQUAL(host_bytes(), 6 * MIB);
  EXPECT_EQUAL(charged(0), physical(0) + 6 * MIB);
  OK(cuMemFreeAsync(pooled, NULL));
  OK(cuArrayDestroy(array));
  OK(cuMemFree_v2(own));
  EXPECT_EQUAL(host_bytes(), 0);
}

// The limit is more than the device has.
static void more_than_the_device(void) {
  start_on(0);
  uint64_t capacity = simulation.machine->description.gpus[0].memory_total;
  uint64_t limit = limit_of(0);
  EXPECT(limit > 2 * capacity);
  size_t free, total;
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(total, limit);
  EXPECT_EQUAL(free, limit - CONTEXT);
  CUdeviceptr pointers[64], more;
  unsigned count = 0;
  while (count < 64 && cuMemAlloc_v2(&pointers[count], GIB) == CUDA_SUCCESS) {
    OK(cuMemsetD8_v2(pointers[count] + GIB - 1, (unsigned char)count, 1));
    OK(cuMemPrefetchAsync(pointers[count], GIB, 0, NULL));
    count++;
  }
  EXPECT_EQUAL(count, (limit - CONTEXT) / GIB);
  OK(cuCtxSynchronize());
  GIVES(cuMemAlloc_v2(&more, GIB), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQUAL(charged(0), CONTEXT + count * GIB);
  EXPECT(physical(0) <= capacity);
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(free, limit - charged(0));
  for (unsigned i = 0; i < count; i++) {
    unsigned char there = 255;
    OK(cuMemcpyDtoH_v2(&there, pointers[i] + GIB - 1, 1));
    EXPECT_EQUAL(there, i);
  }
  for (unsigned i = 0; i < count; i++) OK(cuMemFree_v2(pointers[i]));
  EXPECT_EQUAL(charged(0), CONTEXT);
  EXPECT_EQUAL(host_bytes(), 0);
  AGREE();
}

static void goes_with_its_context(void) {
  start_on(0);
  CUcontext other;
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 4 * MIB));
  OK(cuCtxCreate_v2(&other, 0, 0));
  OK(cuMemAlloc_v2(&pointer, 20 * MIB));
  EXPECT_EQUAL(host_bytes(), 24 * MIB);
  OK(cuCtxDestroy_v2(other));
  EXPECT_EQUAL(host_bytes(), 4 * MIB);
  EXPECT_EQUAL(charged(0), CONTEXT + 4 * MIB);
  OK(cuDevicePrimaryCtxReset_v2(0));
  EXPECT_EQUAL(host_bytes(), 0);
  EXPECT_EQUAL(charged(0), 0);
}

static void in_child(void (*run)(void), int ends_by) {
  pid_t child = fork();
  if (child == 0) {
    run();
    exit(0);
  }
  int status;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT_EQUAL(WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status), ends_by);
}

static void take_and_end(void) {
  CUdeviceptr pointer;
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, 30 * MIB));
}

static void take_and_die(void) {
  take_and_end();
  kill(getpid(), SIGKILL);
}

static void what_the_dead_had_is_forgotten(void) {
  in_child(take_and_end, 0);
  EXPECT_EQUAL(charged(0), 0);
  EXPECT_EQUAL(host_bytes(), 0);
  in_child(take_and_die, SIGKILL);
  EXPECT_EQUAL(charged(0), 0);
  // The first that comes after the last begins at zero, and others leave his figure alone.
  int ready[2], end[2];
  OK(pipe(ready));
  OK(pipe(end));
  pid_t child = fork();
  if (child == 0) {
    take_and_end();
    char byte = 0;
    close(end[1]);
    EXPECT(write(ready[1], &byte, 1) == 1 && read(end[0], &byte, 1) == 0);
    exit(0);
  }
  char byte;
  EXPECT(read(ready[0], &byte, 1) == 1);
  EXPECT_EQUAL(host_bytes(), 30 * MIB);
  in_child(take_and_end, 0);
  EXPECT_EQUAL(host_bytes(), 30 * MIB);
  close(end[1]);
  EXPECT(waitpid(child, NULL, 0) == child);
  EXPECT_EQUAL(host_bytes(), 0);
}

static void *come_and_go(void *context) {
  unsigned seed = (unsigned)(uintptr_t)context;
  OK(cuCtxSetCurrent(NULL));
  CUcontext primary;
  OK(cuDevicePrimaryCtxRetain(&primary, 0));
  OK(cuCtxSetCurrent(primary));
  CUdeviceptr held[8] = {0};
  for (int i = 0; i < 300; i++) {
    CUdeviceptr *one = &held[rand_r(&seed) % 8];
    if (*one != 0) OK(cuMemFree_v2(*one));
    *one = 0;
    CUresult result = cuMemAlloc_v2(one, (size_t)rand_r(&seed) % (40 * MIB) + 1);
    EXPECT(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
    if (result != CUDA_SUCCESS) *one = 0;
  }
  for (int i = 0; i < 8; i++) OK(cuMemFree_v2(held[i]));
  OK(cuDevicePrimaryCtxRelease_v2(0));
  return NULL;
}

static void threads(void) {
  start_on(0);
  pthread_t workers[4];
  for (uintptr_t i = 0; i < 4; i++) {
    OK(pthread_create(&workers[i], NULL, come_and_go, (void *)(i + 1)));
  }
  for (int i = 0; i < 4; i++) OK(pthread_join(workers[i], NULL));
  EXPECT_EQUAL(charged(0), CONTEXT);
  EXPECT_EQUAL(host_bytes(), 0);
  AGREE();
}

// ---- with turns ----

static const char *const text =
    ".version 7.0\n.target sm_60\n.address_size 64\n"
    ".visible .entry allot_spin(.param .u64 nanoseconds) { ret; }\n";

static CUfunction spin_kernel(void) {
  CUmodule module;
  CUfunction kernel;
  OK(cuModuleLoadData(&module, text));
  OK(cuModuleGetFunction(&kernel, module, "allot_spin"));
  return kernel;
}

static void spin(CUfunction kernel, uint64_t nanoseconds) {
  void *arguments[] = {&nanoseconds};
  OK(cuLaunchKernel(kernel, 40, 1, 1, 1024, 1, 1, 0, NULL, arguments, NULL));
  OK(cuCtxSynchronize());
}

static uint64_t moved_bytes(void) {
  return __atomic_load_n(&share.usage->devices[0].moved_bytes, __ATOMIC_SEQ_CST);
}

#define SET (700 * MIB) /* of a device with 1 GiB */

static void work_on_a_set(void) {
  CUdeviceptr pointers[7];
  start_on(0);
  CUfunction kernel = spin_kernel();
  for (int i = 0; i < 7; i++) OK(cuMemAlloc_v2(&pointers[i], SET / 7));
  for (int i = 0; i < 400; i++) {
    spin(kernel, 1000000);
    // Contents, contexts and sets change while memory moves.
    if (i % 100 == 50) {
      OK(cuMemFree_v2(pointers[3]));
      OK(cuMemAlloc_v2(&pointers[3], SET / 7));
      CUcontext other;
      OK(cuCtxCreate_v2(&other, 0, 0));
      OK(cuCtxDestroy_v2(other));
    }
  }
}

static void sets_take_turns(void) {
  pid_t children[2];
  for (int i = 0; i < 2; i++) {
    children[i] = fork();
    if (children[i] == 0) {
      work_on_a_set();
      exit(0);
    }
  }
  for (int i = 0; i < 2; i++) {
    int status;
    EXPECT(waitpid(children[i], &status, 0) == children[i]);
    EXPECT_EQUAL(status, 0);
  }
  EXPECT(moved_bytes() > SET / 2);
  // Each turn brings a set in; turns of the quantum would have been eighty.
  EXPECT(moved_bytes() < 20 * SET);
  EXPECT_EQUAL(charged(0), 0);
  EXPECT_EQUAL(host_bytes(), 0);
}

// ---- suspended ----

static uint64_t *terms_of_the_share(void) {
  char path[2048];
  const char *directory = getenv("ALLOTMENT_SHARE");
  snprintf(path, sizeof path, "%s/contract-0", directory);
  int descriptor = open(path, O_RDWR);
  EXPECT(descriptor >= 0);
  allot_contract *contract =
      mmap(NULL, sizeof *contract, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  EXPECT(contract != MAP_FAILED);
  close(descriptor);
  return &contract->seats[share.policy->devices[0].seat].terms;
}

static uint64_t movable(void) {
  uint64_t all = 0;
  for (unsigned slot = 0; slot < share.usage->high_slot; slot++) {
    all |= __atomic_load_n(&share.usage->slots[slot].movable, __ATOMIC_SEQ_CST);
  }
  return all;
}

static void wait_for_movable(uint64_t wanted) {
  for (int i = 0; i < 20000 && movable() != wanted; i++) usleep(1000);
  EXPECT_EQUAL(movable(), wanted);
}

#define HAS_SET UINT64_C(1)
#define EVICTED (UINT64_C(1) << 32)

static uint32_t launched, created;

static void *launch_once(void *context) {
  CUcontext primary;
  OK(cuDevicePrimaryCtxRetain(&primary, 0));
  OK(cuCtxSetCurrent(primary));
  spin((CUfunction)context, 1000);
  __atomic_store_n(&launched, 1, __ATOMIC_SEQ_CST);
  OK(cuDevicePrimaryCtxRelease_v2(0));
  return NULL;
}

static void *create_context(void *unused) {
  CUcontext context;
  OK(cuCtxCreate_v2(&context, 0, 0));
  __atomic_store_n(&created, 1, __ATOMIC_SEQ_CST);
  OK(cuCtxDestroy_v2(context));
  return NULL;
}

static void a_suspended_set_is_on_the_host(void) {
  uint64_t *terms = terms_of_the_share();
  start_on(0);
  CUfunction kernel = spin_kernel();
  CUdeviceptr pointer, more;
  EXPECT_EQUAL(movable(), 0);
  OK(cuMemAlloc_v2(&pointer, 100 * MIB));
  EXPECT_EQUAL(movable(), HAS_SET);
  OK(cuMemPrefetchAsync(pointer, 100 * MIB, 0, NULL));
  OK(cuCtxSynchronize());
  EXPECT_EQUAL(physical(0), CONTEXT + 100 * MIB);
  // Although it never launched anything.
  __atomic_or_fetch(terms, ALLOT_TERMS_SUSPENDED, __ATOMIC_SEQ_CST);
  wait_for_movable(HAS_SET | EVICTED);
  EXPECT_EQUAL(physical(0), CONTEXT);
  // What is allocated then is moved as well.
  OK(cuMemAlloc_v2(&more, 50 * MIB));
  wait_for_movable(HAS_SET | EVICTED);
  // A launch waits, and so does a context.
  pthread_t launcher, creator;
  OK(pthread_create(&launcher, NULL, launch_once, kernel));
  OK(pthread_create(&creator, NULL, create_context, NULL));
  usleep(100000);
  EXPECT_EQUAL(__atomic_load_n(&launched, __ATOMIC_SEQ_CST), 0);
  EXPECT_EQUAL(__atomic_load_n(&created, __ATOMIC_SEQ_CST), 0);
  EXPECT_EQUAL(physical(0), CONTEXT);
  __atomic_and_fetch(terms, ~ALLOT_TERMS_SUSPENDED, __ATOMIC_SEQ_CST);
  OK(pthread_join(launcher, NULL));
  OK(pthread_join(creator, NULL));
  EXPECT_EQUAL(movable(), HAS_SET);
  AGREE();
  OK(cuMemFree_v2(pointer));
  OK(cuMemFree_v2(more));
  EXPECT_EQUAL(movable(), 0);
}

static uint32_t rounds_are_done;

static void *create_contexts(void *unused) {
  while (__atomic_load_n(&rounds_are_done, __ATOMIC_SEQ_CST) == 0) {
    CUcontext context;
    if (cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS) OK(cuCtxDestroy_v2(context));
  }
  return NULL;
}

// Nothing is moved while another thread makes a context, and the launch goes on all the same. Its
// set is not on the host any more: the next suspension would leave it where it is.
static void a_set_is_used_while_contexts_are_made(void) {
  uint64_t *terms = terms_of_the_share();
  start_on(0);
  CUfunction kernel = spin_kernel();
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 100 * MIB));
  pthread_t creators[2];
  for (int i = 0; i < 2; i++) OK(pthread_create(&creators[i], NULL, create_contexts, NULL));
  for (int round = 0; round < 20; round++) {
    __atomic_or_fetch(terms, ALLOT_TERMS_SUSPENDED, __ATOMIC_SEQ_CST);
    wait_for_movable(HAS_SET | EVICTED);
    __atomic_and_fetch(terms, ~ALLOT_TERMS_SUSPENDED, __ATOMIC_SEQ_CST);
    spin(kernel, 1000);
    EXPECT_EQUAL(movable(), HAS_SET);
  }
  __atomic_store_n(&rounds_are_done, 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < 2; i++) OK(pthread_join(creators[i], NULL));
  OK(cuMemFree_v2(pointer));
}

static CUcontext another;

static CUresult make_context(void) {
  return cuCtxCreate_v2(&another, 0, 0);
}

static CUresult hold_primary(void) {
  CUcontext primary;
  return cuDevicePrimaryCtxRetain(&primary, 0);
}

// The memory that it gets at last is promised to others by then.
static void expect_no_context_while_suspended(CUcontext current, CUresult (*call)(void)) {
  uint64_t *terms = terms_of_the_share();
  pid_t other = keep_the_rest();
  waiting_call held;
  begin_waiting_call(&held, current, call);
  __atomic_or_fetch(terms, ALLOT_TERMS_SUSPENDED, __ATOMIC_SEQ_CST);
  kill(other, SIGKILL);
  waitpid(other, NULL, 0);
  const uint64_t before = physical(0);
  announce(&held.may_go_on);
  usleep(200000);
  EXPECT_EQUAL(physical(0), before);
  __atomic_and_fetch(terms, ~ALLOT_TERMS_SUSPENDED, __ATOMIC_SEQ_CST);
  end_waiting_call(&held);
  EXPECT_EQUAL(physical(0), before + CONTEXT);
}

static void suspended_while_a_context_waits_for_memory(void) {
  CUcontext context = start_on(0);
  expect_no_context_while_suspended(context, make_context);
  OK(cuDevicePrimaryCtxReset_v2(0));
  expect_no_context_while_suspended(NULL, hold_primary);
}

// ---- cancelled ----

static CUdeviceptr made;

static void allocate(void) {
  cuMemAlloc_v2(&made, 4 * MIB);
}

static void drop(void) {
  cuMemFree_v2(made);
}

static void forget(void) {
  if (made != 0) cuMemFree_v2(made);
  made = 0;
}

static void cancelled_while_managed(void) {
  static const cancelled_call calls[] = {{"cuMemAlloc", NULL, allocate, forget},
                                         {"cuMemFree", allocate, drop, forget}};
  CUcontext context = start_on(0);
  for (int i = 0; i < 2; i++) expect_whole(&calls[i], context);
  EXPECT_EQUAL(host_bytes(), 0);
}

static const test_case cases[] = {
    {"cancelled_while_managed", cancelled_while_managed},
    {"plain_memory_is_managed", plain_memory_is_managed},
    {"pitched_memory_is_managed", pitched_memory_is_managed},
    {"what_cannot_move_stays", what_cannot_move_stays},
    {"more_than_the_device", more_than_the_device},
    {"goes_with_its_context", goes_with_its_context},
    {"what_the_dead_had_is_forgotten", what_the_dead_had_is_forgotten},
    {"threads", threads},
    {"sets_take_turns", sets_take_turns},
    {"a_suspended_set_is_on_the_host", a_suspended_set_is_on_the_host},
    {"a_set_is_used_while_contexts_are_made", a_set_is_used_while_contexts_are_made},
    {"suspended_while_a_context_waits_for_memory", suspended_while_a_context_waits_for_memory},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
