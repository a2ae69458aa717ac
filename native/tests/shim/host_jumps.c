// SPDX-License-Identifier: Apache-2.0
// A signal's handler jumps out of a call while the thread is in the driver: what the thread calls
// afterwards is charged.
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#include "host.h"

static sigjmp_buf outside;
static __thread bool jumps;

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
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "syscall");
  return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
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

static const test_case cases[] = {
    {"jumped_out_at_the_same_depth", jumped_out_at_the_same_depth},
    {"jumped_out_and_deeper", jumped_out_and_deeper},
    {"jumped_out_and_the_same_call_again", jumped_out_and_the_same_call_again},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
