// SPDX-License-Identifier: Apache-2.0
// The program runs while its thread is in the driver: a signal's handler that jumps out, or calls
// the driver itself, and functions that the driver calls back. What they call is charged or
// refused.
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#include "host.h"

static sigjmp_buf outside;
static __thread bool jumps;
static __thread void (*handler)(void);  // runs once, where the thread waits in the driver

// Stands before libc's. The simulated driver waits by it, without a lock.
long syscall(long number, ...) {
  static long (*real)(long, ...);
  long given[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) given[i] = va_arg(list, long);
  va_end(list);
  if (jumps && number == SYS_futex) {
    jumps = false;
    siglongjmp(outside, 1);
  }
  if (handler != NULL && number == SYS_futex) {
    void (*now)(void) = handler;
    handler = NULL;
    now();
  }
  // The driver's own threads come here as well.
  long (*known)(long, ...) = __atomic_load_n(&real, __ATOMIC_RELAXED);
  if (known == NULL) {
    *(void **)&known = dlsym(RTLD_NEXT, "syscall");
    __atomic_store_n(&real, known, __ATOMIC_RELAXED);
  }
  return known(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

static uint32_t may_go_on;

static void hold_stream(void *nothing) {
  (void)nothing;
  while (__atomic_load_n(&may_go_on, __ATOMIC_ACQUIRE) == 0) nanosleep(&(struct timespec){0}, NULL);
}

// Returns by a jump from the wait for the stream.
static void jump_out_of_a_free(void) {
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 10 * MIB));
  __atomic_store_n(&may_go_on, 0, __ATOMIC_RELEASE);
  OK(cuLaunchHostFunc(NULL, hold_stream, NULL));
  if (sigsetjmp(outside, 1) == 0) {
    jumps = true;
    cuMemFree_v2(pointer);
    FAIL("it did not wait");
  }
  __atomic_store_n(&may_go_on, 1, __ATOMIC_RELEASE);
}

static void allocate_charged(void) {
  const uint64_t before = charged(0);
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 20 * MIB));
  EXPECT_EQUAL(charged(0), before + 20 * MIB);
}

// Without AddressSanitizer's gaps between variables, which would keep what the jump left there.
static __attribute__((noinline, no_sanitize("address"))) void allocate_deep_down(void) {
  volatile char used[1 << 16];
  memset((void *)used, 1, sizeof used);
  allocate_charged();
  EXPECT(used[0] == 1);
}

static void jumped_out_at_the_same_depth(void) {
  start_on(0);
  jump_out_of_a_free();
  allocate_charged();
}

static void jumped_out_and_deeper(void) {
  start_on(0);
  jump_out_of_a_free();
  allocate_deep_down();
}

// The second call has the frame of the first, with what the jump left in it.
static void jumped_out_and_the_same_call_again(void) {
  CUdeviceptr pointers[2];
  start_on(0);
  const uint64_t before = charged(0);
  for (int i = 0; i < 2; i++) OK(cuMemAlloc_v2(&pointers[i], 10 * MIB));
  __atomic_store_n(&may_go_on, 0, __ATOMIC_RELEASE);
  OK(cuLaunchHostFunc(NULL, hold_stream, NULL));
  volatile bool has_jumped = false;
  if (sigsetjmp(outside, 1) != 0) {
    has_jumped = true;
    __atomic_store_n(&may_go_on, 1, __ATOMIC_RELEASE);
  }
  jumps = !has_jumped;
  OK(cuMemFree_v2(pointers[has_jumped ? 1 : 0]));
  EXPECT(has_jumped);
  EXPECT_EQUAL(charged(0), before + 10 * MIB);
}

// ---- calls from within the driver ----

static CUresult nested_result;
static CUdeviceptr nested_pointer;

static void allocate_in_driver(void) {
  nested_result = cuMemAlloc_v2(&nested_pointer, 10 * MIB);
  __atomic_store_n(&may_go_on, 1, __ATOMIC_RELEASE);
}

static void wait_with(void (*handled)(void)) {
  __atomic_store_n(&may_go_on, 0, __ATOMIC_RELEASE);
  OK(cuLaunchHostFunc(NULL, hold_stream, NULL));
  handler = handled;
}

static void an_allocation_in_a_wait_is_charged(void) {
  start_on(0);
  const uint64_t before = charged(0);
  wait_with(allocate_in_driver);
  OK(cuStreamSynchronize(NULL));
  EXPECT(handler == NULL);
  OK(nested_result);
  EXPECT_EQUAL(charged(0), before + 10 * MIB);
  AGREE();
  OK(cuMemFree_v2(nested_pointer));
  AGREE();
}

static void allocate_too_much_in_driver(void) {
  nested_result = cuMemAlloc_v2(&nested_pointer, limit_of(0));
  __atomic_store_n(&may_go_on, 1, __ATOMIC_RELEASE);
}

static void an_allocation_in_a_free_is_limited(void) {
  CUdeviceptr pointer;
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, 10 * MIB));
  wait_with(allocate_too_much_in_driver);
  OK(cuMemFree_v2(pointer));
  EXPECT(handler == NULL);
  EXPECT_EQUAL(nested_result, CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
}

static void allocate_from_pool_in_driver(void) {
  nested_result = cuMemAllocAsync(&nested_pointer, 10 * MIB, NULL);
  __atomic_store_n(&may_go_on, 1, __ATOMIC_RELEASE);
}

// It would wait for the lock that its own thread holds, where the stream's queue is full.
static void an_allocation_is_refused_under_a_lock(void) {
  CUdeviceptr pointer;
  CUevent event;
  start_on(0);
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  wait_with(NULL);
  for (unsigned i = 1; i < ALLOT_RING_WORKS; i++) OK(cuEventRecord(event, NULL));
  handler = allocate_from_pool_in_driver;
  OK(cuMemAllocAsync(&pointer, 10 * MIB, NULL));
  EXPECT(handler == NULL);
  EXPECT_EQUAL(nested_result, CUDA_ERROR_NOT_PERMITTED);
  AGREE();
}

// Compiled as a jump: the driver's own address is where it returns to.
static void allocate_in_destructor(void *unused) {
  (void)unused;
  cuMemAlloc_v2(&nested_pointer, 3 * GIB);
}

static void a_destructor_is_charged(void) {
  static const CUmemPoolProps OF_DEVICE = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
  start_on(0);
  for (int i = 0; i < 5; i++) {
    CUgraph graph;
    CUgraphNode node;
    CUgraphExec made;
    CUuserObject object;
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = OF_DEVICE, .bytesize = MIB};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory));
    OK(cuUserObjectCreate(&object, NULL, allocate_in_destructor, 1,
                          CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
    OK(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
    OK(cuGraphInstantiateWithFlags(&made, graph, 0));
    OK(cuGraphDestroy(graph));
    OK(cuGraphExecDestroy(made));
    EXPECT(physical(0) <= limit_of(0));
    AGREE();
  }
}

static const test_case cases[] = {
    {"an_allocation_in_a_wait_is_charged", an_allocation_in_a_wait_is_charged},
    {"an_allocation_in_a_free_is_limited", an_allocation_in_a_free_is_limited},
    {"an_allocation_is_refused_under_a_lock", an_allocation_is_refused_under_a_lock},
    {"a_destructor_is_charged", a_destructor_is_charged},
    {"jumped_out_at_the_same_depth", jumped_out_at_the_same_depth},
    {"jumped_out_and_deeper", jumped_out_and_deeper},
    {"jumped_out_and_the_same_call_again", jumped_out_and_the_same_call_again},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
