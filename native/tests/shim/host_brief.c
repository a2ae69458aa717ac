// SPDX-License-Identifier: Apache-2.0
// Work that ends with its process or its context, and work with gaps: for the tests of what shares
// get when no program runs for long.
//
//   host_brief exit NANOSECONDS          one kernel, waited for, and out by exit
//   host_brief _exit NANOSECONDS         the same without exit handlers, once the end was seen
//   host_brief contexts COUNT NANOSECONDS   as many contexts, one kernel in each
//   host_brief gaps SECONDS NANOSECONDS GAP kernels that are waited for, and a gap after each
//   host_brief behind SECONDS NANOSECONDS WAIT kernels that are queued behind a wait of the host
//   host_brief ahead SECONDS NANOSECONDS WAIT  the same, without waiting for one before the next
//   host_brief pile SECONDS NANOSECONDS WAIT   as many kernels as are let in behind one wait
//   host_brief late SECONDS NANOSECONDS 0   kernels that are waited for, in an exit handler
//   host_brief refused SECONDS NANOSECONDS WAIT   a kernel, and launches that the driver refuses
//   host_brief inside SECONDS NANOSECONDS WAIT  launches that stay inside the driver, for so long
//   each host_brief burst COUNT NANOSECONDS IDLE  after idling, a kernel in each of so many streams
//
// Prints how many nanoseconds of kernels it has run, and in how many.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "compute_host.h"
#include "lease.h"

static uint64_t run_in(CUfunction function, uint64_t ns, CUstream stream) {
  spin(function, ns, stream);
  OK(cuStreamSynchronize(stream));
  return ns;
}

static uint64_t run_one(CUfunction function, uint64_t ns) {
  return run_in(function, ns, NULL);
}

static uint64_t run_contexts(int count, uint64_t ns) {
  for (int i = 0; i < count; i++) {
    CUcontext context;
    OK(cuCtxCreate_v2(&context, 0, 0));
    spin(spin_function(), ns, NULL);
    OK(cuCtxDestroy_v2(context));
  }
  return ns * (uint64_t)count;
}

static uint64_t run_gaps(double seconds, uint64_t ns, uint64_t gap_ns) {
  CUfunction function = spin_function();
  uint64_t end = now_ns() + (uint64_t)(seconds * 1e9), had = 0;
  while (now_ns() < end) {
    had += run_one(function, ns);
    pause_ns(gap_ns);
  }
  return had;
}

// ---- behind a wait of the host ----

static uint64_t wait_ns;

static void wait_on_host(void *unused) {
  (void)unused;
  pause_ns(wait_ns);
}

static uint64_t run_behind(double seconds, uint64_t ns, bool runs_ahead) {
  CUfunction function = spin_function();
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  uint64_t end = now_ns() + (uint64_t)(seconds * 1e9), had = 0;
  while (now_ns() < end) {
    OK(cuLaunchHostFunc(stream, wait_on_host, NULL));
    spin(function, ns, stream);
    if (had == 0) puts("ready");
    fflush(stdout);
    if (!runs_ahead) OK(cuStreamSynchronize(stream));
    had += ns;
  }
  return had;
}

static double late_seconds;
static uint64_t late_kernel_ns;
static CUfunction late_function;
static CUstream late_stream;

static void run_late(void) {
  uint64_t before = truth_ns(), begun = now_ns(), end = begun + (uint64_t)(late_seconds * 1e9);
  puts("late");
  fflush(stdout);
  while (now_ns() < end) run_in(late_function, late_kernel_ns, late_stream);
  printf("%llu %llu\n", (unsigned long long)(truth_ns() - before),
         (unsigned long long)(now_ns() - begun));
}

// The handler was registered before anything was launched, so it runs after the shim's own.
static uint64_t prepare_late(void) {
  late_function = spin_function();
  OK(cuStreamCreate(&late_stream, CU_STREAM_NON_BLOCKING));
  return run_in(late_function, late_kernel_ns, late_stream);
}

static uint64_t run_pile(uint64_t ns) {
  CUfunction function = spin_function();
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 3; i++) run_in(function, ns, stream);
  uint64_t end = now_ns() + wait_ns, had = 0;
  OK(cuLaunchHostFunc(stream, wait_on_host, NULL));
  for (; now_ns() < end; had += ns) spin(function, ns, stream);
  return had;
}

// ---- launches that stay inside the driver ----

#define QUEUE 1024 /* works that the driver queues */

// One more fits behind the wait, which is the mark before the next launch: the launch then waits
// inside the driver.
static void fill_queue(CUstream stream, CUevent event) {
  OK(cuLaunchHostFunc(stream, wait_on_host, NULL));
  for (int i = 1; i < QUEUE - 1; i++) OK(cuEventRecord(event, stream));
}

static uint64_t run_inside(double seconds, uint64_t ns) {
  CUfunction function = spin_function();
  CUstream waits, stream;
  CUevent event;
  OK(cuStreamCreate(&waits, CU_STREAM_NON_BLOCKING));
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&event, 0));
  run_in(function, ns, stream);
  uint64_t end = now_ns() + (uint64_t)(seconds * 1e9), had = 0;
  while (now_ns() < end) {
    fill_queue(waits, event);
    uint64_t called = now_ns();
    had += run_in(function, ns, stream);
    EXPECT(now_ns() - called > wait_ns / 2);
    OK(cuStreamSynchronize(waits));
    puts("ready");
    fflush(stdout);
  }
  return had;
}

// ---- launches that fail ----

static uint64_t run_refused(double seconds, uint64_t ns) {
  CUfunction function = spin_function();
  void *parameters[] = {&ns};
  uint64_t end = now_ns() + (uint64_t)(seconds * 1e9);
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  run_in(function, ns, stream);
  while (now_ns() < end) {
    EXPECT(cuLaunchKernel(function, 1, 1, 1, 4096, 1, 1, 0, stream, parameters, NULL) != 0);
    if (wait_ns > 0) pause_ns(wait_ns);
  }
  return ns;
}

// ---- a burst after idling ----

#define MOST_STREAMS 64

// What it has within two seconds.
static uint64_t run_burst(int count, uint64_t ns, uint64_t idle_ns) {
  CUfunction function = spin_function();
  CUstream streams[MOST_STREAMS];
  EXPECT(count <= MOST_STREAMS);
  for (int i = 0; i < count; i++) OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
  run_in(function, ns, streams[0]);
  pause_ns(1000 * MS);  // it has paid for that
  spin_on_devices(function, 100 * US, streams[0]);
  OK(cuStreamSynchronize(streams[0]));
  pause_ns(idle_ns);
  uint64_t before = truth_ns(), end = now_ns() + 2000 * MS;
  for (int i = 0; i < count && now_ns() < end; i++) spin(function, ns, streams[i]);
  if (now_ns() < end) pause_ns(end - now_ns());
  return truth_ns() - before;
}

// At once when the keeper says that nothing of this process runs: earlier, what is charged would
// depend on when it last looked.
static void leave_unhandled(void) {
  char path[4096];
  snprintf(path, sizeof path, "%s/seat-0", share.directory);
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  const allot_leases_file *file = mmap(NULL, sizeof *file, PROT_READ, MAP_SHARED, descriptor, 0);
  EXPECT(descriptor >= 0 && file != MAP_FAILED);
  int own = 0;
  while (own < (int)ALLOT_OWN_PLACES && file->heads[own].pid != getpid()) own++;
  EXPECT(own < (int)ALLOT_OWN_PLACES);
  while (__atomic_load_n(&file->heads[own].busy, __ATOMIC_SEQ_CST) != 0) {
  }
  _exit(0);
}

int main(int argc, char **argv) {
  look_at_share();
  if (argc == 5 && strcmp(argv[1], "late") == 0) {
    late_seconds = strtod(argv[2], NULL);
    late_kernel_ns = strtoull(argv[3], NULL, 10);
    OK(atexit(run_late));
  }
  start_on(0);
  uint64_t begun = now_ns(), had = 0;
  if (argc == 3) had = run_one(spin_function(), strtoull(argv[2], NULL, 10));
  if (argc == 4) had = run_contexts(atoi(argv[2]), strtoull(argv[3], NULL, 10));
  bool runs_ahead = strcmp(argv[1], "ahead") == 0;
  if (argc == 5) wait_ns = strtoull(argv[4], NULL, 10);
  if (late_seconds > 0) {
    had = prepare_late();
  } else if (argc == 5 && strcmp(argv[1], "pile") == 0) {
    had = run_pile(strtoull(argv[3], NULL, 10));
  } else if (argc == 5 && strcmp(argv[1], "refused") == 0) {
    had = run_refused(strtod(argv[2], NULL), strtoull(argv[3], NULL, 10));
  } else if (argc == 5 && (runs_ahead || strcmp(argv[1], "behind") == 0)) {
    had = run_behind(strtod(argv[2], NULL), strtoull(argv[3], NULL, 10), runs_ahead);
  } else if (argc == 5 && strcmp(argv[1], "inside") == 0) {
    had = run_inside(strtod(argv[2], NULL), strtoull(argv[3], NULL, 10));
  } else if (argc == 5 && strcmp(argv[1], "burst") == 0) {
    had = run_burst(atoi(argv[2]), strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
  } else if (argc == 5) {
    had = run_gaps(strtod(argv[2], NULL), strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
  }
  printf("%llu %llu\n", (unsigned long long)had, (unsigned long long)(now_ns() - begun));
  fflush(stdout);
  if (strcmp(argv[1], "_exit") == 0) leave_unhandled();
  return 0;
}
