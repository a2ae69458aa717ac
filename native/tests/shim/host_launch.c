// SPDX-License-Identifier: Apache-2.0
// Launching under a limit: nothing stays stuck, whoever waits for whom.
//
// `host_launch run SECONDS NANOSECONDS` keeps the device as busy as it may, prints "ready", and
// then every 100 ms how many nanoseconds of kernels it has had.
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "cancel.h"
#include "compute_host.h"
#include "lease.h"

static CUcontext context;
static CUfunction function;
static CUstream stream;

static void begin(void) {
  context = start_on(0);
  function = spin_function();
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
}

static void wait_for(const int *flag) {
  while (__atomic_load_n(flag, __ATOMIC_SEQ_CST) == 0) pause_ns(100 * US);
}

// ---- waiting for each other ----

static int told;

static void wait_until_told(void *unused) {
  wait_for(&told);
}

// Of work that takes a moment, and is let through bit by bit.
static void expect_soon(uint64_t begun_ns) {
  if (now_ns() - begun_ns > 15000 * MS) FAIL("it was stuck for too long");
}

// The GPU waits for the host, which is held back because the GPU does not get on.
static void a_callback_waits_for_a_launch(void) {
  begin();
  uint64_t begun = now_ns();
  OK(cuLaunchHostFunc(stream, wait_until_told, NULL));
  for (int i = 0; i < 25; i++) spin(function, MS, stream);
  __atomic_store_n(&told, 1, __ATOMIC_SEQ_CST);
  OK(cuStreamSynchronize(stream));
  expect_soon(begun);
  expect_near(settled(&share.usage->devices[0].gpu_ns), truth_ns(), 40, "after the wait");
}

static void a_callback_waits_for_another_stream(void) {
  CUstream other;
  begin();
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  uint64_t begun = now_ns();
  OK(cuLaunchHostFunc(stream, wait_until_told, NULL));
  for (int i = 0; i < 5; i++) spin(function, 4 * MS, stream);
  for (int i = 0; i < 10; i++) spin(function, MS, other);
  OK(cuStreamSynchronize(other));
  __atomic_store_n(&told, 1, __ATOMIC_SEQ_CST);
  OK(cuStreamSynchronize(stream));
  expect_soon(begun);
}

static void *launch_behind_a_callback(void *unused) {
  OK(cuCtxSetCurrent(context));
  OK(cuLaunchHostFunc(stream, wait_until_told, NULL));
  spin(function, MS, stream);
  return NULL;
}

// A launch that is inside the driver waits for what another thread does next.
static void no_call_waits_for_another_threads_launch(void) {
  pthread_t launcher;
  CUstream other;
  CUevent event;
  CUgraph graph;
  if (getenv("CUDA_LAUNCH_BLOCKING") == NULL) {
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    execl("/proc/self/exe", "host_launch", __func__, NULL);
  }
  begin();
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
  OK(pthread_create(&launcher, NULL, launch_behind_a_callback, NULL));
  pause_ns(100 * MS);
  uint64_t begun = now_ns();
  OK(cuEventRecord(event, other));
  OK(cuEventSynchronize(event));
  OK(cuStreamBeginCapture_v2(other, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  OK(cuStreamEndCapture(other, &graph));
  OK(cuGraphDestroy(graph));
  OK(cuStreamWaitEvent(stream, event, 0));
  expect_soon(begun);
  __atomic_store_n(&told, 1, __ATOMIC_SEQ_CST);
  OK(pthread_join(launcher, NULL));
}

static CUcontext ending;

static void work_until_told(void) {
  CUstream inside;
  OK(cuCtxSetCurrent(ending));
  OK(cuStreamCreate(&inside, CU_STREAM_NON_BLOCKING));
  OK(cuLaunchHostFunc(inside, wait_until_told, NULL));
}

static void *destroy_behind_a_callback(void *unused) {
  work_until_told();
  OK(cuCtxDestroy_v2(ending));
  return NULL;
}

static void *release_behind_a_callback(void *unused) {
  OK(cuCtxDestroy_v2(ending));
  OK(cuDevicePrimaryCtxRetain(&ending, 0));
  work_until_told();
  OK(cuDevicePrimaryCtxRelease_v2(0));
  return NULL;
}

static void *limit_behind_a_callback(void *unused) {
  work_until_told();
  OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2048));
  return NULL;
}

// The primary context is left to others.
static void begin_in_own_context(void) {
  OK(cuInit(0));
  OK(cuCtxCreate_v2(&context, 0, 0));
  function = spin_function();
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
}

// A call waits for a context's work, and that for what another thread does next.
static void go_on_beside(void *(*call)(void *unused)) {
  pthread_t caller;
  CUcontext other;
  begin_in_own_context();
  spin(function, MS, stream);
  OK(cuCtxCreate_v2(&ending, 0, 0));
  OK(cuCtxSetCurrent(context));
  OK(pthread_create(&caller, NULL, call, NULL));
  pause_ns(100 * MS);
  uint64_t begun = now_ns();
  for (int i = 0; i < 50; i++) spin(function, MS, stream);
  OK(cuStreamSynchronize(stream));
  OK(cuCtxCreate_v2(&other, 0, 0));
  OK(cuCtxDestroy_v2(other));
  OK(cuDevicePrimaryCtxRetain(&other, 0));
  OK(cuDevicePrimaryCtxRelease_v2(0));
  expect_soon(begun);
  __atomic_store_n(&told, 1, __ATOMIC_SEQ_CST);
  OK(pthread_join(caller, NULL));
}

static void no_call_waits_for_another_threads_context(void) {
  go_on_beside(destroy_behind_a_callback);
}

static void no_call_waits_for_another_threads_release(void) {
  go_on_beside(release_behind_a_callback);
}

static void no_call_waits_for_another_threads_limit(void) {
  go_on_beside(limit_behind_a_callback);
}

// As the messages of a neighbour do.
static void *wake_the_keeper(void *unused) {
  char path[1200];
  snprintf(path, sizeof path, "%s/seat-0", share.directory);
  int descriptor = open(path, O_RDWR | O_CLOEXEC);
  allot_leases_file *file =
      mmap(NULL, sizeof *file, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  EXPECT(file != MAP_FAILED);
  close(descriptor);
  uint32_t *word = &file->heads[0].wake;
  while (__atomic_load_n(&told, __ATOMIC_SEQ_CST) == 0) {
    __atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    pause_ns(300 * US);
  }
  return NULL;
}

// A launch that is held back is let through when nothing gets on, and not only when what is queued
// was expected to end.
static void a_callback_waits_behind_a_long_kernel(void) {
  pthread_t waker;
  begin();
  spin(function, 2000 * MS, stream);  // all later ones are expected to take so long
  OK(cuStreamSynchronize(stream));
  settled(&share.usage->devices[0].gpu_ns);
  OK(cuLaunchHostFunc(stream, wait_until_told, NULL));
  spin(function, MS, stream);
  OK(pthread_create(&waker, NULL, wake_the_keeper, NULL));
  uint64_t begun = now_ns();
  spin(function, MS, stream);
  uint64_t waited = now_ns() - begun;
  __atomic_store_n(&told, 1, __ATOMIC_SEQ_CST);
  OK(pthread_join(waker, NULL));
  OK(cuStreamSynchronize(stream));
  if (waited > 1000 * MS) FAIL("let through after %u ms", (unsigned)(waited / MS));
}

static void *launch_later(void *flag) {
  OK(cuCtxSetCurrent(context));
  for (int i = 0; i < 200; i++) spin(function, 200 * US, stream);
  __atomic_store_n((int *)flag, 1, __ATOMIC_SEQ_CST);
  return NULL;
}

// ---- threads ----

typedef struct worker {
  pthread_t thread;
  int number;
} worker;

// As programs do that have other things to do meanwhile: no call tells that they wait.
static void wait_by_asking(CUstream asked) {
  CUresult result;
  while ((result = cuStreamQuery(asked)) == CUDA_ERROR_NOT_READY) pause_ns(50 * US);
  OK(result);
}

static void *work(void *of) {
  const worker *own = of;
  CUstream mine = (CUstream)0x2;
  OK(cuCtxSetCurrent(context));
  if (own->number % 3 == 1) OK(cuStreamCreate(&mine, CU_STREAM_NON_BLOCKING));
  if (own->number % 3 == 2) mine = stream;
  for (int i = 0; i < 150; i++) {
    spin(function, 50 * US + (uint64_t)own->number * 10 * US, mine);
    if (i % 50 == 49) wait_by_asking(mine);
  }
  wait_by_asking(mine);
  return NULL;
}

static void eight_threads(void) {
  worker workers[8];
  begin();
  for (int i = 0; i < 8; i++) {
    workers[i].number = i;
    OK(pthread_create(&workers[i].thread, NULL, work, &workers[i]));
  }
  for (int i = 0; i < 8; i++) OK(pthread_join(workers[i].thread, NULL));
  OK(cuCtxSynchronize());
  expect_near(settled(&share.usage->devices[0].gpu_ns), truth_ns(), 40, "eight threads");
}

// A thread that is cancelled while it is held back, or launches, leaves nothing locked.
static void cancelled_threads(void) {
  begin();
  for (int round = 0; round < 20; round++) {
    pthread_t thread;
    int flag = 0;
    OK(pthread_create(&thread, NULL, launch_later, &flag));
    pause_ns(3 * MS);
    pthread_cancel(thread);
    OK(pthread_join(thread, NULL));
    spin(function, 100 * US, stream);
  }
  OK(cuStreamSynchronize(stream));
}

static void *launch_while_cancelled(void *unused) {
  (void)unused;
  OK(cuCtxSetCurrent(context));
  pthread_cancel(pthread_self());
  spin(function, 100 * US, stream);
  return NULL;
}

// The process's first launch opens files, where a thread may be cancelled.
static void a_cancelled_thread_launches_first(void) {
  pthread_t thread;
  begin();
  OK(pthread_create(&thread, NULL, launch_while_cancelled, NULL));
  OK(pthread_join(thread, NULL));
  spin(function, 100 * US, stream);
  OK(cuStreamSynchronize(stream));
}

static CUgraphExec graph_of_kernels;
static CUdeviceptr filled;

static void launch_kernel(void) {
  spin(function, 20 * US, stream);
}

static void launch_graph(void) {
  OK(cuGraphLaunch(graph_of_kernels, stream));
}

static void launch_on_devices(void) {
  spin_on_devices(function, 20 * US, stream);
}

static void fill(void) {
  OK(cuMemsetD8Async(filled, 1, MIB, stream));
}

// What tells others that this process has work on the GPU.
static const uint32_t *busy_word(void) {
  char path[2048];
  snprintf(path, sizeof path, "%s/seat-0", getenv("ALLOTMENT_SHARE"));
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  EXPECT(descriptor >= 0);
  const allot_leases_file *file = mmap(NULL, sizeof *file, PROT_READ, MAP_SHARED, descriptor, 0);
  EXPECT(file != MAP_FAILED);
  close(descriptor);
  for (unsigned place = 0; place < ALLOT_OWN_PLACES; place++) {
    if (file->heads[place].pid == getpid()) return &file->heads[place].busy;
  }
  FAIL("it has no place");
}

// A launch that was counted and never ended would keep the turn for ever.
static void cancelled_at_each_place(void) {
  static void (*const calls[])(void) = {launch_kernel, launch_graph, launch_on_devices, fill};
  CUgraph graph;
  begin();
  OK(cuMemAlloc_v2(&filled, MIB));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  launch_kernel();
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphInstantiateWithFlags(&graph_of_kernels, graph, 0));
  OK(cuGraphDestroy(graph));
  launch_kernel();
  const uint32_t *busy = busy_word();
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    bool has_ended = true;
    for (unsigned place = 1; has_ended; place++) {
      has_ended = ends_at(place, context, calls[i]);
      launch_kernel();
      OK(cuStreamSynchronize(stream));
    }
    while (__atomic_load_n(busy, __ATOMIC_SEQ_CST) != 0) pause_ns(MS);
  }
}

// ---- a clock of its own ----

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

static void in_another_time(void) {
  int descriptor = open("/dev/null", O_WRONLY | O_CLOEXEC);
  EXPECT(dup2(descriptor, 1) == 1 && dup2(descriptor, 2) == 2);
  execl("/proc/self/exe", "host_launch", "run", "0.1", "1000", NULL);
  _exit(1);
}

// Needs Linux 5.6, and root. A launch is refused, which ends the program by an error.
static void another_clock_takes_no_turns(void) {
  static const char offset[] = "monotonic 3600 0";
  if (unshare(CLONE_NEWTIME) != 0) return;
  int descriptor = open("/proc/self/timens_offsets", O_WRONLY | O_CLOEXEC), status = 0;
  EXPECT(write(descriptor, offset, sizeof offset - 1) == sizeof offset - 1);
  pid_t child = fork();
  if (child == 0) in_another_time();
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) != 0);
  EXPECT_EQUAL(gpu_ns(), 0);
}

// ---- a clock that is put back ----

// Stand before libc's: the machine's clock is put back by an hour as soon as a wait has begun.
#if !IS_SLOW
int pthread_mutex_timedlock(pthread_mutex_t *lock, const struct timespec *until) {
  static int (*real)(pthread_mutex_t *, const struct timespec *);
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec later = {.tv_sec = until->tv_sec + 3600, .tv_nsec = until->tv_nsec};
  return real(lock, &later);
}
#endif

// ---- a launch that waits for memory ----

typedef struct pair {
  int neighbour_is_ready, launches;
  uint64_t longest_ns;
  pid_t keeper;  // of the rest of the memory
} pair;

// Computes while the other one waits, and then sees to it that there is memory.
static void compute_beside(pair *both) {
  begin();
  spin(function, 200 * US, stream);
  OK(cuStreamSynchronize(stream));
  __atomic_store_n(&both->neighbour_is_ready, 1, __ATOMIC_SEQ_CST);
  wait_for(&both->launches);
  pause_ns(20 * MS);
  for (int i = 0; i < 5; i++) {
    uint64_t begun = now_ns();
    spin(function, 200 * US, stream);
    OK(cuStreamSynchronize(stream));
    uint64_t took = now_ns() - begun;
    if (took > both->longest_ns) both->longest_ns = took;
  }
  kill(both->keeper, SIGKILL);
  exit(0);
}

static CUgraphExec allocating_graph(uint64_t bytes) {
  CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
      .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
      .bytesize = bytes};
  CUgraph graph;
  CUgraphNode node, end;
  CUgraphExec made;
  OK(cuGraphCreate(&graph, 0));
  OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &parameters));
  OK(cuGraphAddMemFreeNode(&end, graph, &node, 1, parameters.dptr));
  OK(cuGraphInstantiateWithFlags(&made, graph, 0));
  OK(cuGraphDestroy(graph));
  return made;
}

// If it kept the turn, that would be taken from it after a second.
static void others_compute_while_a_launch_waits_for_memory(void) {
  pair *both = mmap(NULL, sizeof *both, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT(both != MAP_FAILED);
  fflush(NULL);
  pid_t neighbour = fork();
  if (neighbour == 0) compute_beside(both);
  wait_for(&both->neighbour_is_ready);
  begin();
  spin(function, 200 * US, stream);
  CUgraphExec graph = allocating_graph(100 * MIB);
  OK(cuStreamSynchronize(stream));
  both->keeper = keep_the_rest();
  __atomic_store_n(&both->launches, 1, __ATOMIC_SEQ_CST);
  OK(cuGraphLaunch(graph, stream));
  int status;
  EXPECT(waitpid(neighbour, &status, 0) == neighbour && status == 0);
  uint64_t longest = both->longest_ns;
  if (longest > 500 * MS) FAIL("it waited for %llu ns", (unsigned long long)longest);
  OK(cuStreamSynchronize(stream));
  OK(cuGraphExecDestroy(graph));
}

// ---- fork and exit ----

static void forks_while_launching(void) {
  pthread_t thread;
  int done = 0;
  begin();
  OK(pthread_create(&thread, NULL, launch_later, &done));
  for (int round = 0; round < 20; round++) {
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
      // No keeper, no driver: only what a driver says to a child.
      uint64_t ns = MS;
      void *parameters[] = {&ns};
      CUresult result = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
      _exit(result != CUDA_SUCCESS && thread_count() == 1 ? 0 : 1);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child);
    if (status != 0) FAIL("a child ended with %d", status);
    pause_ns(2 * MS);
  }
  OK(pthread_join(thread, NULL));
  OK(cuStreamSynchronize(stream));
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  for (int i = 0; i < 50; i++) spin(function, 200 * US, stream);
  OK(cuStreamSynchronize(stream));
  expect_near(settled(&share.usage->devices[0].gpu_ns) - charged, truth_ns() - truth, 25, "after");
}

static void launch_at_exit(void) {
  for (int i = 0; i < 20; i++) spin(function, 100 * US, stream);
  OK(cuStreamSynchronize(stream));
}

// Registered before the keeper's own, so it runs after the keeper has stopped.
static void exits_with_work_queued(void) {
  begin();
  OK(atexit(launch_at_exit));
  for (int i = 0; i < 30; i++) spin(function, 500 * US, stream);
}

// ---- without turns ----

static void without_turns_there_is_no_thread(void) {
  int of_a_sanitizer = thread_count() - 1;
  begin();
  for (int i = 0; i < 100; i++) spin(function, 20 * US, stream);
  CUdeviceptr memory;
  OK(cuMemAlloc_v2(&memory, MIB));
  OK(cuMemsetD8Async(memory, 1, MIB, stream));
  OK(cuStreamSynchronize(stream));
  EXPECT_EQUAL(thread_count(), 1 + of_a_sanitizer);
  EXPECT_EQUAL(gpu_ns(), 0);
  EXPECT_EQUAL(copy_ns(), 0);
}

// ---- a load for others ----

static int run_load(double seconds, uint64_t ns) {
  begin();
  puts("ready");
  fflush(stdout);
  uint64_t end = now_ns() + (uint64_t)(seconds * 1e9), report = now_ns() + 100 * MS;
  uint64_t first = truth_ns();
  while (now_ns() < end) {
    spin(function, ns, stream);
    if (now_ns() < report) continue;
    printf("%llu %llu\n", (unsigned long long)now_ns(), (unsigned long long)(truth_ns() - first));
    fflush(stdout);
    report += 100 * MS;
  }
  return 0;
}

static const test_case cases[] = {
    {"a_callback_waits_for_a_launch", a_callback_waits_for_a_launch},
    {"a_callback_waits_for_another_stream", a_callback_waits_for_another_stream},
    {"a_callback_waits_behind_a_long_kernel", a_callback_waits_behind_a_long_kernel},
    {"no_call_waits_for_another_threads_launch", no_call_waits_for_another_threads_launch},
    {"no_call_waits_for_another_threads_context", no_call_waits_for_another_threads_context},
    {"no_call_waits_for_another_threads_release", no_call_waits_for_another_threads_release},
    {"no_call_waits_for_another_threads_limit", no_call_waits_for_another_threads_limit},
    {"another_clock_takes_no_turns", another_clock_takes_no_turns},
    {"eight_threads", eight_threads},
    {"cancelled_threads", cancelled_threads},
    {"cancelled_at_each_place", cancelled_at_each_place},
    {"others_compute_while_a_launch_waits_for_memory",
     others_compute_while_a_launch_waits_for_memory},
    {"a_cancelled_thread_launches_first", a_cancelled_thread_launches_first},
    {"forks_while_launching", forks_while_launching},
    {"exits_with_work_queued", exits_with_work_queued},
    {"without_turns_there_is_no_thread", without_turns_there_is_no_thread},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  if (argc == 4 && strcmp(argv[1], "run") == 0) {
    look_at_share();
    return run_load(strtod(argv[2], NULL), strtoull(argv[3], NULL, 10));
  }
  return run_case(cases, argc, argv);
}
