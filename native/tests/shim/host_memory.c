// SPDX-License-Identifier: Apache-2.0
// Every way to get device memory: charged once, as much as the GPU has less of, and given back.
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>

#include "host.h"

#define CONTEXT context_cost()

static void starts_with_a_context(void) {
  EXPECT_EQUAL(charged(0), 0);
  CUcontext context = start_on(0);
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  CUcontext again;
  OK(cuDevicePrimaryCtxRetain(&again, 0));
  EXPECT(again == context);
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuDevicePrimaryCtxRelease_v2(0));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuDevicePrimaryCtxRelease_v2(0));
  EXPECT_EQUAL(charged(0), 0);
  AGREE();
}

static void explicit_contexts(void) {
  OK(cuInit(0));
  CUcontext contexts[3];
  OK(cuCtxCreate_v2(&contexts[0], 0, 0));
  OK(cuCtxCreate_v4(&contexts[1], NULL, 0, 0));
  OK(cuCtxCreate(&contexts[2], 0, 0));
  EXPECT_EQUAL(charged(0), 3 * CONTEXT);
  AGREE();
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 10 * MIB));
  OK(cuMemAlloc_v2(&pointer, 10));
  AGREE();
  // With the context goes what was allocated in it.
  OK(cuCtxDestroy_v2(contexts[2]));
  EXPECT_EQUAL(charged(0), 2 * CONTEXT);
  AGREE();
  OK(cuCtxDestroy(contexts[0]));
  OK(cuCtxDestroy_v2(contexts[1]));
  EXPECT_EQUAL(charged(0), 0);
  AGREE();
}

static uint32_t contexts_there(void) {
  uint32_t count = 0;
  for (int i = 0; i < ALLOT_MACHINE_PROCESSES; i++) {
    const allot_process *process = &simulation.machine->processes[i];
    if (process->pid == getpid()) {
      count += __atomic_load_n(&process->gpus[0].contexts, __ATOMIC_ACQUIRE);
    }
  }
  return count;
}

#define ROUNDS 40

static pthread_barrier_t round_ends;

// As soon as the driver has made another context, while its cost may be measured.
static void *allocate_beside_each_context(void *context) {
  CUdeviceptr pointer;
  // On a busy machine, too, if that is allowed.
  pthread_setschedparam(pthread_self(), SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
  OK(cuCtxSetCurrent(context));
  for (int i = 0; i < ROUNDS; i++) {
    while (contexts_there() < 2) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    OK(cuMemAlloc_v2(&pointer, GIB));
    pthread_barrier_wait(&round_ends);  // it was made
    pthread_barrier_wait(&round_ends);  // and has gone
    OK(cuMemFree_v2(pointer));
  }
  return NULL;
}

static void contexts_cost_the_same_beside_threads_that_allocate(void) {
  CUcontext context = start_on(0);
  pthread_t other;
  OK(pthread_barrier_init(&round_ends, NULL, 2));
  OK(pthread_create(&other, NULL, allocate_beside_each_context, context));
  for (int i = 0; i < ROUNDS; i++) {
    OK(cuCtxCreate_v2(&context, 0, 0));
    pthread_barrier_wait(&round_ends);
    AGREE();
    OK(cuCtxDestroy_v2(context));
    pthread_barrier_wait(&round_ends);
  }
  OK(pthread_join(other, NULL));
  AGREE();
}

static void reset_gives_everything_back(void) {
  start_on(0);
  CUdeviceptr pointer;
  for (int i = 0; i < 20; i++) OK(cuMemAlloc_v2(&pointer, (uint64_t)(i * i) * 33333 + 1));
  OK(cuMemAllocAsync(&pointer, 50 * MIB, NULL));
  OK(cuMemAllocManaged(&pointer, 5 * MIB, CU_MEM_ATTACH_GLOBAL));
  OK(cuMemPrefetchAsync(pointer, 5 * MIB, 0, NULL));
  OK(cuCtxSynchronize());
  AGREE();
  OK(cuDevicePrimaryCtxReset_v2(0));
  AGREE();
  EXPECT_EQUAL(charged(0), 0);
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, 100));
  AGREE();
}

static void plain(void) {
  start_on(0);
  CUdeviceptr pointers[4];
  OK(cuMemAlloc_v2(&pointers[0], MIB));
  EXPECT_EQUAL(charged(0), CONTEXT + GRANULE);
  OK(cuMemAlloc_v2(&pointers[1], 2 * MIB + 1));
  EXPECT_EQUAL(charged(0), CONTEXT + 3 * GRANULE);
  OK(cuMemAlloc_v2(&pointers[2], 100 * MIB));
  AGREE();
  GIVES(cuMemAlloc_v2(&pointers[3], 0), CUDA_ERROR_INVALID_VALUE);
  AGREE();
  for (int i = 0; i < 3; i++) OK(cuMemFree_v2(pointers[i]));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  // Freed twice, or never allocated: the driver's own error, and nothing changes.
  GIVES(cuMemFree_v2(pointers[0]), CUDA_ERROR_INVALID_VALUE);
  GIVES(cuMemFree_v2(12345), CUDA_ERROR_INVALID_VALUE);
  OK(cuMemFree_v2(0));
  OK(cuMemAlloc_v2(&pointers[0], 10 * MIB));
  GIVES(cuMemFree_v2(pointers[0] + 512), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQUAL(charged(0), CONTEXT + 10 * MIB);
  OK(cuMemFree_v2(pointers[0]));
  AGREE();
}

#define SMALLS 3000

static void small_ones_share_blocks(void) {
  start_on(0);
  static CUdeviceptr pointers[SMALLS];
  unsigned seed = 7;
  for (int i = 0; i < SMALLS; i++) {
    OK(cuMemAlloc_v2(&pointers[i], 1 + (uint64_t)rand_r(&seed) % (100 * KIB)));
    if (i % 100 == 0) AGREE();
  }
  for (int i = 0; i < SMALLS; i += 2) {
    OK(cuMemFree_v2(pointers[i]));
    if (i % 100 == 0) AGREE();
  }
  for (int i = 0; i < SMALLS; i += 2) OK(cuMemAlloc_v2(&pointers[i], 7 * KIB));
  AGREE();
  for (int i = 0; i < SMALLS; i++) OK(cuMemFree_v2(pointers[i]));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void pitched(void) {
  start_on(0);
  CUdeviceptr pointer, small;
  size_t pitch;
  OK(cuMemAllocPitch_v2(&pointer, &pitch, 1000, 5000, 4));
  EXPECT_EQUAL(charged(0), CONTEXT + 6 * MIB);
  OK(cuMemAllocPitch_v2(&small, &pitch, 10, 10, 4));
  AGREE();
  OK(cuMemFree_v2(pointer));
  OK(cuMemFree_v2(small));
  GIVES(cuMemAllocPitch_v2(&pointer, &pitch, 1000, 5000, 5), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void managed(void) {
  start_on(0);
  CUdeviceptr pointer;
  OK(cuMemAllocManaged(&pointer, 3 * MIB, CU_MEM_ATTACH_GLOBAL));
  EXPECT_EQUAL(charged(0), CONTEXT + 4 * MIB);
  // It may all be on the device, and takes nothing of it before.
  EXPECT_EQUAL(physical(0), CONTEXT);
  OK(cuMemPrefetchAsync(pointer, 3 * MIB, 0, NULL));
  OK(cuCtxSynchronize());
  AGREE();
  GIVES(cuMemAllocManaged(&pointer, 3 * MIB, 77), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQUAL(charged(0), CONTEXT + 4 * MIB);
  OK(cuMemFree_v2(pointer));
  EXPECT_EQUAL(charged(0), CONTEXT);
}

// As HAMi-core's test of managed memory does, in a share that has no room for 2 MiB for each.
static void small_managed_pieces_share_a_block(void) {
  start_on(0);
  CUdeviceptr pieces[1024], plain;
  OK(cuMemAlloc_v2(&plain, 512));
  EXPECT_EQUAL(charged(0), CONTEXT + 2 * MIB);
  for (int i = 0; i < 1024; i++) OK(cuMemAllocManaged(&pieces[i], 2, CU_MEM_ATTACH_GLOBAL));
  EXPECT_EQUAL(charged(0), CONTEXT + 4 * MIB);
  OK(cuMemPrefetchAsync(pieces[0], 2, 0, NULL));
  OK(cuCtxSynchronize());
  EXPECT(physical(0) <= charged(0));
  for (int i = 0; i < 1024; i++) {
    int is_managed = 0;
    OK(cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, pieces[i]));
    EXPECT(is_managed);
    OK(cuMemFree_v2(pieces[i]));
  }
  EXPECT_EQUAL(charged(0), CONTEXT + 2 * MIB);
  // At the limit, a piece that fits into no block is refused, whatever gap a plain block has.
  CUdeviceptr rest;
  OK(cuMemAlloc_v2(&rest, limit_of(0) - CONTEXT - 2 * MIB));
  GIVES(cuMemAllocManaged(&pieces[0], 2, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemFree_v2(rest));
  OK(cuMemFree_v2(plain));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void host_memory_is_free(void) {
  start_on(0);
  void *memory;
  OK(cuMemAllocHost_v2(&memory, 100 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuMemFreeHost(memory));
}

// ---- limits ----

// Takes granules until refused; returns how many there were.
static uint64_t fill(CUdeviceptr *pointers, uint64_t most) {
  uint64_t count = 0;
  while (count < most && cuMemAlloc_v2(&pointers[count], GRANULE) == CUDA_SUCCESS) count++;
  return count;
}

#define MOST 8192
static CUdeviceptr pointers[MOST];

static void the_last_granule_can_be_had(void) {
  start_on(0);
  uint64_t count = fill(pointers, MOST);
  EXPECT_EQUAL(count, (limit_of(0) - CONTEXT) / GRANULE);
  EXPECT(limit_of(0) - charged(0) < GRANULE);
  AGREE();
  CUdeviceptr more;
  GIVES(cuMemAlloc_v2(&more, GRANULE), CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(cuMemAlloc_v2(&more, UINT64_MAX), CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(cuMemAlloc_v2(&more, UINT64_MAX - MIB), CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(cuMemAllocManaged(&more, GRANULE, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(cuMemAllocAsync(&more, 1, NULL), CUDA_ERROR_OUT_OF_MEMORY);
  CUcontext context;
  GIVES(cuCtxCreate_v2(&context, 0, 0), CUDA_ERROR_OUT_OF_MEMORY);
  size_t pitch;
  GIVES(cuMemAllocPitch_v2(&more, &pitch, 65536, 1000, 4), CUDA_ERROR_OUT_OF_MEMORY);
  size_t free, total;
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT(free < GRANULE);
  AGREE();
  OK(cuMemFree_v2(pointers[count / 2]));
  OK(cuMemAlloc_v2(&pointers[count / 2], GRANULE));
  GIVES(cuMemAlloc_v2(&more, GRANULE), CUDA_ERROR_OUT_OF_MEMORY);
  for (uint64_t i = 0; i < count; i++) OK(cuMemFree_v2(pointers[i]));
  EXPECT_EQUAL(charged(0), CONTEXT);
}

// A block that is there can be used to the last unit, with nothing left under the limit.
static void a_blocks_own_room_can_be_used(void) {
  start_on(0);
  CUdeviceptr small[4096], more;
  OK(cuMemAlloc_v2(&small[0], 512));
  fill(pointers, MOST);
  AGREE();
  for (int i = 1; i < 4096; i++) OK(cuMemAlloc_v2(&small[i], 512));
  GIVES(cuMemAlloc_v2(&more, 1), CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
  OK(cuMemFree_v2(small[7]));
  OK(cuMemFree_v2(small[100]));
  GIVES(cuMemAlloc_v2(&more, 513), CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemAlloc_v2(&more, 512));
  OK(cuMemAlloc_v2(&more, 1));
  GIVES(cuMemAlloc_v2(&more, 1), CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
}

static void limits_change_live(void) {
  const char *directory = getenv("ALLOTMENT_SHARE");
  start_on(0);
  CUdeviceptr pointer;
  size_t free, total;
  uint64_t old = limit_of(0), used;
  OK(cuMemAlloc_v2(&pointer, 100 * MIB));
  EXPECT_EQUAL(allot_ledger_set_limit(directory, 0, charged(0), false, &used), 0);
  GIVES(cuMemAlloc_v2(&pointer, 1), CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(total, charged(0));
  EXPECT_EQUAL(free, 0);
  EXPECT_EQUAL(allot_ledger_set_limit(directory, 0, 50 * MIB, true, &used), 0);
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(total, 50 * MIB);
  EXPECT_EQUAL(free, 0);
  EXPECT_EQUAL(allot_ledger_set_limit(directory, 0, old, false, &used), 0);
  OK(cuMemAlloc_v2(&pointer, 100 * MIB));
  AGREE();
}

static void reports(void) {
  start_on(0);
  CUdeviceptr pointer;
  OK(cuMemAlloc_v2(&pointer, 64 * MIB));
  OK(cuMemAlloc_v2(&pointer, 64));
  size_t free, total, whole;
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(total, limit_of(0));
  EXPECT_EQUAL(free, limit_of(0) - charged(0));
  OK(cuDeviceTotalMem_v2(&whole, 0));
  EXPECT_EQUAL(whole, total);
  unsigned narrow_free, narrow_total;
  OK(cuMemGetInfo(&narrow_free, &narrow_total));
  EXPECT_EQUAL(narrow_total, total > UINT32_MAX ? UINT32_MAX : total);
  OK(cuDeviceTotalMem(&narrow_total, 0));
  EXPECT_EQUAL(narrow_total, total > UINT32_MAX ? UINT32_MAX : total);
  GIVES(cuDeviceTotalMem_v2(&whole, 7), CUDA_ERROR_INVALID_DEVICE);
}

static void errors_stay_the_drivers(void) {
  CUdeviceptr pointer;
  size_t free, total;
  CUcontext context;
  GIVES(cuMemAlloc_v2(&pointer, 1), CUDA_ERROR_NOT_INITIALIZED);
  GIVES(cuMemGetInfo_v2(&free, &total), CUDA_ERROR_NOT_INITIALIZED);
  GIVES(cuDevicePrimaryCtxRetain(&context, 0), CUDA_ERROR_NOT_INITIALIZED);
  GIVES(cuCtxCreate_v2(&context, 0, 0), CUDA_ERROR_NOT_INITIALIZED);
  OK(cuInit(0));
  GIVES(cuMemAlloc_v2(&pointer, 1), CUDA_ERROR_INVALID_CONTEXT);
  GIVES(cuMemGetInfo_v2(&free, &total), CUDA_ERROR_INVALID_CONTEXT);
  GIVES(cuDevicePrimaryCtxRetain(&context, 99), CUDA_ERROR_INVALID_DEVICE);
  GIVES(cuCtxCreate_v2(&context, 0, -1), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQUAL(charged(0), 0);
}

static void device_heap_is_charged(void) {
  start_on(0);
  OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 4 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 108 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT + 100 * MIB);
  OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 18 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT + 10 * MIB);
  GIVES(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 1000 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQUAL(charged(0), CONTEXT + 10 * MIB);
  OK(cuDevicePrimaryCtxRelease_v2(0));
  EXPECT_EQUAL(charged(0), 0);
}

static uint64_t attribute(CUdevice_attribute wanted) {
  int value;
  OK(cuDeviceGetAttribute(&value, wanted, 0));
  return (uint64_t)value;
}

// Every thread that the device can hold has one.
static void stacks_are_charged(void) {
  start_on(0);
  uint64_t threads = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) *
                     attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 512));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4 * KIB));
  EXPECT_EQUAL(charged(0), CONTEXT + threads * 3 * KIB);
  AGREE();
  GIVES(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 512 * KIB), CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
  OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2 * KIB));
  EXPECT_EQUAL(charged(0), CONTEXT + threads * KIB);
  AGREE();
  OK(cuDevicePrimaryCtxReset_v2(0));
  AGREE();
}

static void what_the_device_runtime_sets_aside_is_charged(void) {
  start_on(0);
  OK(cuCtxSetLimit(CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 4));
  EXPECT_EQUAL(charged(0), CONTEXT + 300 * MIB);
  OK(cuCtxSetLimit(CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 4096));
  EXPECT_EQUAL(charged(0), CONTEXT + 332 * MIB);
  GIVES(cuCtxSetLimit(CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 1000), CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuCtxSetLimit(CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 1));
  EXPECT_EQUAL(charged(0), CONTEXT + 32 * MIB);
}

static void limits_of_unknown_cost_are_refused(void) {
  start_on(0);
  GIVES(cuCtxSetLimit(CU_LIMIT_PER_BLOCK_MEMORY_SIZE, GIB), CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(cuCtxSetLimit(CU_LIMIT_MAX, 1), CUDA_ERROR_UNSUPPORTED_LIMIT);
  OK(cuCtxSetLimit(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 128));
  EXPECT_EQUAL(charged(0), CONTEXT);
}

// ---- another's reservation for a moment ----

static allot_ledger other;
static uint64_t held_for_a_moment;

// Stands before libc's: the other gives back while this one waits.
int nanosleep(const struct timespec *time, struct timespec *left) {
  if (held_for_a_moment != 0) allot_ledger_release(&other, 0, held_for_a_moment);
  held_for_a_moment = 0;
  return (int)syscall(SYS_nanosleep, time, left);
}

static void momentary_reservations_are_outlasted(void) {
  start_on(0);
  OK(allot_ledger_open(&other, share.directory));
  OK(allot_ledger_attach(&other));
  CUdeviceptr pointer;
  uint64_t rest = limit_of(0) - charged(0);
  EXPECT(allot_ledger_reserve(&other, 0, rest));
  GIVES(cuMemAlloc_v2(&pointer, 10 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
  held_for_a_moment = rest;
  OK(cuMemAlloc_v2(&pointer, 10 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT + 10 * MIB);
  allot_ledger_close(&other);
}

static const test_case cases[] = {
    {"starts_with_a_context", starts_with_a_context},
    {"explicit_contexts", explicit_contexts},
    {"contexts_cost_the_same_beside_threads_that_allocate",
     contexts_cost_the_same_beside_threads_that_allocate},
    {"reset_gives_everything_back", reset_gives_everything_back},
    {"plain", plain},
    {"small_ones_share_blocks", small_ones_share_blocks},
    {"pitched", pitched},
    {"managed", managed},
    {"small_managed_pieces_share_a_block", small_managed_pieces_share_a_block},
    {"host_memory_is_free", host_memory_is_free},
    {"the_last_granule_can_be_had", the_last_granule_can_be_had},
    {"a_blocks_own_room_can_be_used", a_blocks_own_room_can_be_used},
    {"limits_change_live", limits_change_live},
    {"reports", reports},
    {"errors_stay_the_drivers", errors_stay_the_drivers},
    {"device_heap_is_charged", device_heap_is_charged},
    {"stacks_are_charged", stacks_are_charged},
    {"what_the_device_runtime_sets_aside_is_charged",
     what_the_device_runtime_sets_aside_is_charged},
    {"limits_of_unknown_cost_are_refused", limits_of_unknown_cost_are_refused},
    {"momentary_reservations_are_outlasted", momentary_reservations_are_outlasted},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
