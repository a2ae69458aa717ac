// SPDX-License-Identifier: Apache-2.0
// Streams and contexts that come and go: nothing of them stays behind, and nobody touches one that
// is gone. Without memory nothing goes past the shim.
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "compute_host.h"

static CUcontext context;
static CUfunction function;

static void begin(void) {
  context = start_on(0);
  function = spin_function();
}

static void short_kernel(CUfunction launched, CUstream stream) {
  uint64_t ns = 2 * US;
  void *parameters[] = {&ns};
  OK(cuLaunchKernel(launched, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
}

static uint64_t resident_bytes(void) {
  FILE *file = fopen("/proc/self/statm", "r");
  unsigned long long size, resident;
  EXPECT(file != NULL);
  int read = fscanf(file, "%llu %llu", &size, &resident);
  EXPECT_EQUAL(read, 2);
  fclose(file);
  return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

// How many streams, events and the like the driver has made so far: it numbers them.
static uint64_t objects_made(void) {
  CUstream newest;
  unsigned long long id;
  OK(cuStreamCreate(&newest, CU_STREAM_NON_BLOCKING));
  OK(cuStreamGetId(newest, &id));
  OK(cuStreamDestroy_v2(newest));
  return id;
}

// ---- streams ----

#define GROUP 500

// Half of the groups go while they are idle, the others with work under way.
static void one_group(bool idle) {
  CUstream streams[GROUP];
  for (int i = 0; i < GROUP; i++) OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < GROUP; i++) short_kernel(function, streams[i]);
  if (idle) {
    OK(cuCtxSynchronize());
    settled(&share.usage->devices[0].gpu_ns);
  }
  for (int i = 0; i < GROUP; i++) OK(cuStreamDestroy_v2(streams[i]));
}

static void streams_leave_nothing_behind(void) {
  const int first = 4, all = IS_SLOW ? 12 : 40;
  begin();
  uint64_t bytes_at_first = 0, objects_at_first = 0;
  for (int group = 0; group < all; group++) {
    if (group == first) {
      OK(cuCtxSynchronize());
      bytes_at_first = resident_bytes();
      objects_at_first = objects_made();
    }
    one_group(group % 2 == 0);
  }
  uint64_t bytes = resident_bytes(), later = (uint64_t)(all - first) * GROUP;
  uint64_t objects = objects_made() - objects_at_first;
  bytes = bytes > bytes_at_first ? bytes - bytes_at_first : 0;
  // The streams themselves, and events that more of them at a time needed.
  if (objects > later + 4 * GROUP) {
    FAIL("%llu objects for %llu streams", (unsigned long long)objects, (unsigned long long)later);
  }
  if (!IS_SLOW && bytes > 48 * later) {
    FAIL("%llu bytes for %llu streams", (unsigned long long)bytes, (unsigned long long)later);
  }
}

// ---- streams that go while others look ----

static int over;

static void *come_and_go(void *unused) {
  CUstream stream;
  OK(cuCtxSetCurrent(context));
  for (int i = 0; i < (IS_SLOW ? 1500 : 5000); i++) {
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    short_kernel(function, stream);
    // About when the keeper ends what nobody adds to.
    if (i % 2) pause_ns((uint64_t)(i % 60) * US);
    OK(cuStreamDestroy_v2(stream));
  }
  return NULL;
}

// To wait for anything ends what is open in all streams of the context.
static void *wait_often(void *unused) {
  CUevent passed;
  OK(cuCtxSetCurrent(context));
  OK(cuEventCreate(&passed, CU_EVENT_DEFAULT));
  while (__atomic_load_n(&over, __ATOMIC_SEQ_CST) == 0) OK(cuEventSynchronize(passed));
  return NULL;
}

static void streams_go_while_others_look(void) {
  pthread_t goers[2], waiter;
  begin();
  for (int i = 0; i < 2; i++) OK(pthread_create(&goers[i], NULL, come_and_go, NULL));
  OK(pthread_create(&waiter, NULL, wait_often, NULL));
  for (int i = 0; i < 2; i++) OK(pthread_join(goers[i], NULL));
  __atomic_store_n(&over, 1, __ATOMIC_SEQ_CST);
  OK(pthread_join(waiter, NULL));
  OK(cuCtxSynchronize());
  // Nothing stays counted as queued: what follows is let in, and measured.
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  for (int i = 0; i < 50; i++) spin(function, 200 * US, NULL);
  OK(cuCtxSynchronize());
  expect_near(settled(&share.usage->devices[0].gpu_ns) - charged, truth_ns() - truth, 20, "after");
}

// ---- contexts ----

#define STREAMS 64

static void one_context(void) {
  CUcontext made;
  CUstream stream;
  OK(cuCtxCreate_v2(&made, 0, 0));
  CUfunction theirs = spin_function();
  for (int i = 0; i < STREAMS; i++) {
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    short_kernel(theirs, stream);
    OK(cuStreamSynchronize(stream));
  }
  OK(cuCtxDestroy_v2(made));
}

static void contexts_leave_nothing_behind(void) {
  const int first = 20, all = IS_SLOW ? 60 : 200;
  begin();
  uint64_t bytes_at_first = 0;
  for (int round = 0; round < all; round++) {
    if (round == first) bytes_at_first = resident_bytes();
    one_context();
  }
  uint64_t bytes = resident_bytes(), later = (uint64_t)(all - first);
  bytes = bytes > bytes_at_first ? bytes - bytes_at_first : 0;
  if (!IS_SLOW && bytes > later * STREAMS * 32) {
    FAIL("%llu bytes for %llu contexts", (unsigned long long)bytes, (unsigned long long)later);
  }
}

// A capture that begins ends what is open in the streams of all contexts.
static void *capture_often(void *unused) {
  CUstream stream;
  CUgraph graph;
  OK(cuCtxSetCurrent(context));
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  while (__atomic_load_n(&over, __ATOMIC_SEQ_CST) == 0) {
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphDestroy(graph));
  }
  return NULL;
}

static void contexts_go_while_others_look(void) {
  pthread_t capturer;
  begin();
  OK(pthread_create(&capturer, NULL, capture_often, NULL));
  for (int round = 0; round < (IS_SLOW ? 1500 : 3000); round++) {
    CUcontext made;
    CUstream streams[8];
    OK(cuCtxCreate_v2(&made, 0, 0));
    CUfunction theirs = spin_function();
    for (int i = 0; i < 8; i++) OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 8; i++) short_kernel(theirs, streams[i]);
    OK(cuCtxDestroy_v2(made));
  }
  __atomic_store_n(&over, 1, __ATOMIC_SEQ_CST);
  OK(pthread_join(capturer, NULL));
}

static void *hold_often(void *unused) {
  CUcontext held;
  while (__atomic_load_n(&over, __ATOMIC_SEQ_CST) == 0) {
    OK(cuDevicePrimaryCtxRetain(&held, 0));
    OK(cuDevicePrimaryCtxRelease_v2(0));
  }
  return NULL;
}

// Each release may be the last as far as the shim knows, and no kernel is left out for that. Their
// length is not what was expected, so a guess would be wrong.
static void others_hold_the_context_too(void) {
  enum { HOLDERS = 4, KERNELS = 800 };
  pthread_t holders[HOLDERS];
  CUstream stream;
  begin();
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 300; i++) spin(function, 20 * US, stream);
  OK(cuStreamSynchronize(stream));
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  for (int i = 0; i < HOLDERS; i++) OK(pthread_create(&holders[i], NULL, hold_often, NULL));
  for (int i = 0; i < KERNELS; i++) {
    spin(function, 2 * MS, stream);
    pause_ns(100 * US);
    OK(cuStreamSynchronize(stream));
  }
  __atomic_store_n(&over, 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < HOLDERS; i++) OK(pthread_join(holders[i], NULL));
  charged = settled(&share.usage->devices[0].gpu_ns) - charged;
  truth = truth_ns() - truth;
  if (charged + 5 * MS < truth) {
    FAIL("charged %.3f ms, really %.3f ms", (double)charged / 1e6, (double)truth / 1e6);
  }
}

// ---- contexts that begin with a wait ----

static void pause_for_long(void *unused) {
  pause_ns(300 * MS);
}

static void expect_charge(uint64_t charged, uint64_t truth, const char *what) {
  expect_near(settled(&share.usage->devices[0].gpu_ns) - charged, truth_ns() - truth, 15, what);
}

// Queued behind the wait.
static CUfunction begin_with_a_wait(CUstream *stream) {
  CUcontext made;
  OK(cuCtxCreate_v2(&made, 0, 0));
  CUfunction theirs = spin_function();
  OK(cuStreamCreate(stream, CU_STREAM_NON_BLOCKING));
  OK(cuLaunchHostFunc(*stream, pause_for_long, NULL));
  spin(theirs, MS, *stream);
  return theirs;
}

// What it runs is not taken for what another context ran while it waited.
static void a_context_that_begins_with_a_wait(void) {
  CUstream stream;
  begin();
  spin(function, MS, NULL);
  OK(cuCtxSynchronize());
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  CUfunction theirs = begin_with_a_wait(&stream);
  OK(cuCtxSetCurrent(context));
  for (int i = 0; i < 250; i++) spin(function, MS, NULL);
  OK(cuCtxSynchronize());
  OK(cuStreamSynchronize(stream));
  for (int i = 0; i < 250; i++) spin(theirs, MS, stream);
  OK(cuStreamSynchronize(stream));
  expect_charge(charged, truth, "two contexts");
}

// Nor are its kernels that got longer taken for short ones whose ends were marked late.
static void kernels_get_longer_after_a_wait(void) {
  CUstream stream;
  begin();
  CUfunction theirs = begin_with_a_wait(&stream);
  OK(cuStreamSynchronize(stream));
  for (int i = 0; i < 300; i++) spin(theirs, 20 * US, stream);
  OK(cuStreamSynchronize(stream));
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  for (int i = 0; i < 60; i++) {
    spin(theirs, 4 * MS, stream);
    pause_ns(100 * US);
    OK(cuStreamSynchronize(stream));
  }
  expect_charge(charged, truth, "kernels that got longer");
}

// ---- without memory ----

#if !IS_SLOW
static bool no_memory;
static size_t refused_bytes;  // 0: all

// Stands before libc's.
void *mmap(void *start, size_t bytes, int protection, int flags, int descriptor, off_t offset) {
  bool is_meant = refused_bytes == 0 || bytes == refused_bytes;
  if (no_memory && is_meant && (flags & MAP_ANONYMOUS) != 0) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return (void *)syscall(SYS_mmap, start, bytes, protection, flags, descriptor, offset);
}

#define RECORDS_BYTES ((size_t)512 * 32) /* of a shard's first records */

// What cannot be recorded is freed again.
static void without_memory_nothing_stays_allocated(void) {
  CUdeviceptr pointer;
  int refused = 0;
  begin();
  refused_bytes = RECORDS_BYTES;
  no_memory = true;
  for (int i = 0; i < 40; i++) refused += cuMemAlloc_v2(&pointer, MIB - 1) != CUDA_SUCCESS;
  no_memory = false;
  EXPECT(refused > 0);
  EXPECT(physical(0) <= charged(0));
}

static void without_memory_nothing_is_launched(void) {
  uint64_t ns = 5 * US;
  void *parameters[] = {&ns};
  CUstream stream;
  begin();
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  int ends[2], errors = dup(STDERR_FILENO);
  char told[256] = "";
  EXPECT(pipe(ends) == 0 && dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
  no_memory = true;
  CUresult result = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
  no_memory = false;
  EXPECT(dup2(errors, STDERR_FILENO) == STDERR_FILENO && close(ends[1]) == 0);
  EXPECT_EQUAL(result, CUDA_ERROR_SYSTEM_NOT_READY);
  EXPECT(read(ends[0], told, sizeof told - 1) > 0 && strstr(told, "see `ulimit -v`\n") != NULL);
  spin(function, ns, stream);
  // Streams that it cannot note: only the first launch prints the reason.
  no_memory = true;
  result = CUDA_SUCCESS;
  for (int i = 0; i < 2000 && result == CUDA_SUCCESS; i++) {
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    result = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
  }
  EXPECT_EQUAL(result, CUDA_ERROR_SYSTEM_NOT_READY);
  no_memory = false;
  spin(function, ns, stream);
  OK(cuCtxSynchronize());
}
#endif

// ---- streams that wait for each other ----

static void pause_a_little(void *unused) {
  pause_ns(5 * MS);
}

// 4 ms of kernels, and 100 ms of waiting.
static void expect_no_waits(uint64_t charged_before, uint64_t truth_before) {
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns) - charged_before;
  if (charged > (truth_ns() - truth_before) * (IS_SLOW ? 8 : 3)) {
    FAIL("charged %llu ns", (unsigned long long)charged);
  }
}

static CUstream make_joined(void) {
  CUstream joined;
  OK(cuStreamCreate(&joined, CU_STREAM_DEFAULT));
  for (int n = 0; n < 40; n++) spin(function, 20 * US, joined);
  OK(cuStreamSynchronize(joined));
  return joined;
}

// Other streams wait for what is put into the legacy stream, without a call of their own.
static void waits_for_the_legacy_stream_are_not_charged(void) {
  begin();
  CUstream joined = make_joined();
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  for (int i = 0; i < 20; i++) {
    for (int n = 0; n < 5; n++) spin(function, 20 * US, joined);
    OK(cuLaunchHostFunc(NULL, pause_a_little, NULL));
    for (int n = 0; n < 5; n++) spin(function, 20 * US, joined);
    OK(cuStreamSynchronize(joined));
  }
  expect_no_waits(charged, truth);
}

// All streams of the context wait by one call.
static void waits_of_a_whole_context_are_not_charged(void) {
  begin();
  CUstream waiting = make_joined(), other;
  CUevent over;
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&over, CU_EVENT_DISABLE_TIMING));
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  for (int i = 0; i < 20; i++) {
    for (int n = 0; n < 5; n++) spin(function, 20 * US, waiting);
    OK(cuLaunchHostFunc(other, pause_a_little, NULL));
    OK(cuEventRecord(over, other));
    OK(cuCtxWaitEvent(context, over));
    for (int n = 0; n < 5; n++) spin(function, 20 * US, waiting);
    OK(cuCtxSynchronize());
  }
  expect_no_waits(charged, truth);
}

// A kernel in the legacy stream waits for all others, and they wait for it.
static void waits_behind_a_kernel_of_the_legacy_stream_are_not_charged(void) {
  begin();
  CUstream joined = make_joined(), other = make_joined();
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  for (int i = 0; i < 20; i++) {
    for (int n = 0; n < 5; n++) spin(function, 20 * US, joined);
    OK(cuLaunchHostFunc(other, pause_a_little, NULL));
    spin(function, 20 * US, NULL);
    for (int n = 0; n < 4; n++) spin(function, 20 * US, joined);
    OK(cuCtxSynchronize());
  }
  expect_no_waits(charged, truth);
}

static const test_case cases[] = {
    {"streams_leave_nothing_behind", streams_leave_nothing_behind},
    {"streams_go_while_others_look", streams_go_while_others_look},
    {"contexts_leave_nothing_behind", contexts_leave_nothing_behind},
    {"contexts_go_while_others_look", contexts_go_while_others_look},
    {"others_hold_the_context_too", others_hold_the_context_too},
    {"a_context_that_begins_with_a_wait", a_context_that_begins_with_a_wait},
    {"kernels_get_longer_after_a_wait", kernels_get_longer_after_a_wait},
    {"waits_for_the_legacy_stream_are_not_charged", waits_for_the_legacy_stream_are_not_charged},
    {"waits_of_a_whole_context_are_not_charged", waits_of_a_whole_context_are_not_charged},
    {"waits_behind_a_kernel_of_the_legacy_stream_are_not_charged",
     waits_behind_a_kernel_of_the_legacy_stream_are_not_charged},
#if !IS_SLOW
    {"without_memory_nothing_stays_allocated", without_memory_nothing_stays_allocated},
    {"without_memory_nothing_is_launched", without_memory_nothing_is_launched},
#endif
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
