// SPDX-License-Identifier: Apache-2.0
// Times launches in pairs, bare and wrapped, as calls.c does, but of kernels that take their time;
// and counts the launches on whose way a system call was made.
//
//   launches KERNEL_NS BURST PAIRS
//
// Each sample is a burst of so many launches on an idle stream, timed until the last of them has
// returned and until the last kernel's end is seen, through the same of the two ways. A third way
// is what a program of its own accord would have to do to measure its kernels: the bare driver's
// launches between the bare driver's event records, as many as the shim's batches have. The count
// of system calls is the kernel's own (PR_SET_SYSCALL_USER_DISPATCH, Linux 5.11, x86-64); -1 where
// there is no such thing. Starts when stdin ends.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "lanes.h"

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#define PR_SYS_DISPATCH_ON 1
#define PR_SYS_DISPATCH_OFF 0
#endif

static volatile char dispatch;  // 0: system calls pass, 1: they come to `trap`
static long trapped;

#if defined(__x86_64__)
static void trap(int number, siginfo_t *info, void *opaque) {
  dispatch = 0;
  trapped++;
  greg_t *registers = ((ucontext_t *)opaque)->uc_mcontext.gregs;
  register long r10 __asm__("r10") = registers[REG_R10];
  register long r8 __asm__("r8") = registers[REG_R8];
  register long r9 __asm__("r9") = registers[REG_R9];
  long result;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"((long)info->si_syscall), "D"(registers[REG_RDI]), "S"(registers[REG_RSI]),
                     "d"(registers[REG_RDX]), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  registers[REG_RAX] = result;
}

static bool count_system_calls(void) {
  struct sigaction action = {.sa_sigaction = trap, .sa_flags = SA_SIGINFO};
  sigaction(SIGSYS, &action, NULL);
  return prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, 0, 0, &dispatch) == 0;
}
#else
static bool count_system_calls(void) {
  return false;
}
#endif

static uint64_t kernel_ns;
static int burst;
static CUfunction function;
static unsigned int grid;
static CUstream stream;
static CUevent over;

// One of the two ways to the driver.
typedef struct {
  __typeof__(cuLaunchKernel) *launch;
  __typeof__(cuEventRecord) *record;
  __typeof__(cuEventSynchronize) *wait;
  bool is_marked;  // between event records, one behind each MARKED_NS of kernels
} way;

typedef struct {
  int64_t *launched, *ended;
} times;

// As long as the shim's batches are.
#define MARKED_NS 1000000u
#define MOST_MARKS 64
static CUevent marks[MOST_MARKS];
static int next_mark;

static void set_mark(const way *through) {
  need(through->record(marks[next_mark], stream), "cuEventRecord");
  next_mark = (next_mark + 1) % MOST_MARKS;
}

static void launch_one(const way *through) {
  void *parameters[] = {&kernel_ns};
  need(through->launch(function, grid, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL),
       "cuLaunchKernel");
}

static void wait_for_burst(const way *through) {
  need(through->record(over, stream), "cuEventRecord");
  need(through->wait(over), "cuEventSynchronize");
}

static void time_burst(const way *through, times into, size_t index) {
  uint64_t start = now_ns();
  uint64_t unmarked_ns = 0;
  if (through->is_marked) set_mark(through);
  for (int each = 0; each < burst; each++) {
    launch_one(through);
    unmarked_ns += kernel_ns;
    if (!through->is_marked || (unmarked_ns < MARKED_NS && each + 1 < burst)) continue;
    set_mark(through);
    unmarked_ns = 0;
  }
  into.launched[index] = (int64_t)(now_ns() - start);
  wait_for_burst(through);
  into.ended[index] = (int64_t)(now_ns() - start);
}

static times room_for(size_t pairs) {
  times made = {.launched = calloc(pairs, sizeof(int64_t)),
                .ended = calloc(pairs, sizeof(int64_t))};
  if (made.launched == NULL || made.ended == NULL) exit(3);
  return made;
}

int main(int count, char **arguments) {
  if (count != 4) {
    fprintf(stderr, "usage: launches KERNEL_NS BURST PAIRS\n");
    return 2;
  }
  kernel_ns = strtoull(arguments[1], NULL, 10);
  burst = atoi(arguments[2]);
  size_t pairs = strtoul(arguments[3], NULL, 10);
  if (burst < 1) return 2;
  times bare = room_for(pairs), wrapped = room_for(pairs), by_hand = room_for(pairs);
  open_device();
  WRAPPED(cuStreamCreate);
  WRAPPED(cuEventRecord);
  WRAPPED(cuEventSynchronize);
  WRAPPED(cuLaunchKernel);
  BARE(cuLaunchKernel);
  BARE(cuEventRecord);
  BARE(cuEventSynchronize);
  const way driver = {bare_cuLaunchKernel, bare_cuEventRecord, bare_cuEventSynchronize, false};
  const way marked = {bare_cuLaunchKernel, bare_cuEventRecord, bare_cuEventSynchronize, true};
  const way shim = {wrapped_cuLaunchKernel, wrapped_cuEventRecord, wrapped_cuEventSynchronize,
                    false};
  enum { WAYS = 3 };
  const way *ways[WAYS] = {&driver, &shim, &marked};
  const times *of_ways[WAYS] = {&bare, &wrapped, &by_hand};
  function = spin_function();
  grid = whole_grid();
  need(wrapped_cuStreamCreate(&stream, 1), "cuStreamCreate");
  over = blocking_event();
  WRAPPED(cuEventCreate);
  for (int each = 0; each < MOST_MARKS; each++)
    need(wrapped_cuEventCreate(&marks[each], CU_EVENT_DEFAULT), "cuEventCreate");
  wait_for_start();
  for (size_t index = 0; index < pairs; index++)
    for (size_t turn = 0; turn < WAYS; turn++) {
      size_t each = (index + (index & 1 ? turn : WAYS - turn)) % WAYS;
      time_burst(ways[each], *of_ways[each], index);
    }
  long with_calls = 0, launches = 0;
  bool is_long = kernel_ns * (uint64_t)burst > 1000000u;
  bool counting = count_system_calls();
  for (size_t index = 0; counting && index < pairs; index++) {
    for (int each = 0; each < burst; each++) {
      long before = trapped;
      dispatch = 1;
      launch_one(&shim);
      dispatch = 0;
      launches++;
      with_calls += trapped != before;
    }
    wait_for_burst(&shim);
    // As much past the shim, as above, so that no ceiling of 90 is in the way of long bursts.
    for (int each = 0; is_long && each < burst; each++) launch_one(&driver);
    if (is_long) wait_for_burst(&driver);
  }
  if (counting) prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_OFF, 0, 0, 0);
  print_pairs("launch", bare.launched, wrapped.launched, pairs, burst);
  print_pairs("launch and wait", bare.ended, wrapped.ended, pairs, 1);
  print_pairs("launch between event records", bare.launched, by_hand.launched, pairs, burst);
  printf("{\"launches\": %ld, \"with_system_calls\": %ld}\n", launches, counting ? with_calls : -1);
  return 0;
}
