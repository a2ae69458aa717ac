// SPDX-License-Identifier: Apache-2.0
// A program that wants all of the device it can get, as a training loop does: it keeps a few
// milliseconds of kernels queued and sleeps until the oldest are over.
//
//   load --kernels NS[,NS...] --seconds S
//        [--streams N | --threads N | --graph NODES]   one stream; N of them; N threads with their
//                                                      per-thread streams; graphs of so many
//                                                      kernels
//        [--phases A-B[,A-B...]]   works only then, in seconds after the start
//        [--work-ms N]             ends after N ms of kernels, however long that takes
//        [--fills-one-in N]        its kernels fill one Nth of the GPU, and not all of it
//        [--memory BYTES]          has so much memory
//        [--one-function]          kernels of several lengths are one function, called differently
//        [--progress]              tells by when it had run how much
//
// Starts when stdin ends; SIGTERM ends it early. Prints one JSON object: what it ran (kernels, and
// their durations added up), when its phases began, the times between one end of about a
// millisecond of its work and the next, and what the share's ledger says that it used.
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lanes.h"

enum { MOST_LANES = 16, MOST_PHASES = 32, MOST_GAPS = 1 << 16, MOST_STEPS = 1 << 12 };
#define STEP_NS 50000000ull
#define QUEUE_NS 5000000ull
#define BATCH_NS 1000000ull
#define WARM_NS 1000000000ull  // after which the longest gap is looked for

typedef struct {
  uint64_t from_ns, to_ns;
} phase;

static struct {
  durations kernels;
  double seconds;
  int streams, threads, nodes, fills_one_in;
  phase phases[MOST_PHASES];
  int phase_count;
  uint64_t work_ns, memory;
  bool progress, one_function;
} asked = {.streams = 1, .fills_one_in = 1, .seconds = 5};

static CUcontext context;
static unsigned int grid;
static uint64_t begun_ns, end_ns;
static uint64_t finished_ns, finished_kernels;  // atomic
static uint64_t wakes[MOST_PHASES];
static volatile sig_atomic_t told_to_stop;
// Only of the first thread's lanes.
static int64_t gaps[MOST_GAPS];
static size_t gap_count;
static uint64_t longest_ns, longest_at_ns;
// How much was finished by when: about every STEP_NS.
static struct {
  uint64_t at_ns, finished_ns;
} steps[MOST_STEPS];
static size_t step_count;

static void note_gap(uint64_t *last_ns) {
  uint64_t now = now_ns(), gap = now - *last_ns;
  *last_ns = now;
  if (gap_count < MOST_GAPS) gaps[gap_count++] = (int64_t)gap;
  if (step_count < MOST_STEPS &&
      (step_count == 0 || now >= steps[step_count - 1].at_ns + STEP_NS)) {
    steps[step_count].at_ns = now;
    steps[step_count++].finished_ns = __atomic_load_n(&finished_ns, __ATOMIC_RELAXED);
  }
  if (gap <= longest_ns || now - gap < begun_ns + WARM_NS) return;
  longest_ns = gap;
  longest_at_ns = now;
}

static void finish_one(lane *of, bool first, uint64_t *last_ns) {
  uint32_t kernels;
  uint64_t ns = finish_batch(of, &kernels);
  __atomic_fetch_add(&finished_ns, ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&finished_kernels, kernels, __ATOMIC_RELAXED);
  if (first) note_gap(last_ns);
}

static void hear(int number) {
  told_to_stop = 1;
}

static bool has_more(uint64_t to_ns) {
  if (told_to_stop) return false;
  if (asked.work_ns > 0) return __atomic_load_n(&finished_ns, __ATOMIC_RELAXED) < asked.work_ns;
  return now_ns() < to_ns;
}

static void work_through(lane *lanes, int count, bool first, durations *kernels, uint64_t to_ns) {
  uint64_t last_ns = now_ns();
  while (has_more(to_ns))
    for (int index = 0; index < count; index++) {
      if (lane_is_full(&lanes[index])) finish_one(&lanes[index], first, &last_ns);
      issue_batch(&lanes[index], grid, kernels, BATCH_NS, asked.nodes);
    }
  for (int index = 0; index < count; index++)
    while (lanes[index].finished < lanes[index].issued) finish_one(&lanes[index], first, &last_ns);
}

static void work(lane *lanes, int count, bool first) {
  durations kernels = asked.kernels;
  kernels.random += (uint64_t)(uintptr_t)lanes;
  for (int index = 0; index < asked.phase_count; index++) {
    sleep_until(begun_ns + asked.phases[index].from_ns);
    if (first) wakes[index] = now_ns();
    uint64_t to_ns = begun_ns + asked.phases[index].to_ns;
    work_through(lanes, count, first, &kernels, to_ns < end_ns ? to_ns : end_ns);
  }
}

static int depth_of(int lanes) {
  if (asked.nodes > 0) return 2;
  uint64_t longest = 0;
  for (int index = 0; index < asked.kernels.count; index++)
    if (asked.kernels.ns[index] > longest) longest = asked.kernels.ns[index];
  uint64_t batch = longest > BATCH_NS && asked.kernels.count == 1 ? longest : BATCH_NS;
  return (int)(QUEUE_NS / batch) / lanes;
}

static void *work_in_thread(void *number) {
  WRAPPED(cuCtxSetCurrent);
  need(wrapped_cuCtxSetCurrent(context), "cuCtxSetCurrent");
  lane own;
  open_lane(&own, CU_STREAM_PER_THREAD, depth_of(asked.threads), NULL, grid, 0, 0);
  work(&own, 1, number == NULL);
  return NULL;
}

static void work_in_threads(void) {
  pthread_t threads[MOST_LANES];
  for (int index = 0; index < asked.threads; index++)
    if (pthread_create(&threads[index], NULL, work_in_thread, (void *)(uintptr_t)index) != 0)
      exit(3);
  for (int index = 0; index < asked.threads; index++) pthread_join(threads[index], NULL);
}

static void read_phases(const char *text) {
  char *end;
  for (const char *at = text; asked.phase_count < MOST_PHASES; at = end + 1) {
    double from = strtod(at, &end), to = *end == '-' ? strtod(end + 1, &end) : 0;
    if (to <= from) break;
    asked.phases[asked.phase_count++] =
        (phase){.from_ns = (uint64_t)(from * 1e9), .to_ns = (uint64_t)(to * 1e9)};
    if (*end == '\0') return;
  }
  fprintf(stderr, "%s: not phases like 0-3,6-9\n", text);
  exit(2);
}

static void read_arguments(int count, char **arguments) {
  static const struct option options[] = {
      {"kernels", 1, NULL, 'k'},      {"seconds", 1, NULL, 's'},      {"streams", 1, NULL, 'n'},
      {"threads", 1, NULL, 't'},      {"graph", 1, NULL, 'g'},        {"phases", 1, NULL, 'p'},
      {"work-ms", 1, NULL, 'w'},      {"memory", 1, NULL, 'm'},       {"progress", 0, NULL, 'r'},
      {"one-function", 0, NULL, 'f'}, {"fills-one-in", 1, NULL, 'i'}, {NULL, 0, NULL, 0}};
  int option;
  while ((option = getopt_long(count, arguments, "", options, NULL)) != -1) {
    if (option == 'k') asked.kernels = parse_durations(optarg);
    if (option == 's') asked.seconds = strtod(optarg, NULL);
    if (option == 'n') asked.streams = (int)strtol(optarg, NULL, 10);
    if (option == 't') asked.threads = (int)strtol(optarg, NULL, 10);
    if (option == 'g') asked.nodes = (int)strtol(optarg, NULL, 10);
    if (option == 'p') read_phases(optarg);
    if (option == 'w') asked.work_ns = strtoull(optarg, NULL, 10) * 1000000u;
    if (option == 'm') asked.memory = strtoull(optarg, NULL, 10);
    if (option == 'i') asked.fills_one_in = (int)strtol(optarg, NULL, 10);
    if (option == 'f') asked.one_function = true;
    if (option == 'r') asked.progress = true;
    if (option == '?') exit(2);
  }
  if (asked.kernels.count == 0 || asked.fills_one_in < 1 || asked.streams > MOST_LANES ||
      asked.threads > MOST_LANES) {
    fprintf(stderr, "usage: load --kernels NS[,NS...] [--seconds S] [...]\n");
    exit(2);
  }
  if (asked.phase_count == 0)
    asked.phases[asked.phase_count++] = (phase){.to_ns = (uint64_t)(asked.seconds * 1e9)};
}

static void take_memory(void) {
  const uint64_t chunk = 64u << 20;
  WRAPPED(cuMemAlloc_v2);
  CUdeviceptr address;
  for (uint64_t left = asked.memory; left > 0; left -= left < chunk ? left : chunk)
    need(wrapped_cuMemAlloc_v2(&address, left < chunk ? left : chunk), "cuMemAlloc");
}

static void report(void) {
  printf(
      "{\"pid\": %d, \"begun_ns\": %llu, \"ended_ns\": %llu, \"kernels\": %llu, "
      "\"work_ns\": %llu, \"charged_ns\": %llu, \"gap_ns\": {\"p50\": %lld, \"p99\": %lld, "
      "\"max\": %llu, \"max_at_ns\": %llu}, \"wakes_ns\": [",
      (int)getpid(), (unsigned long long)begun_ns, (unsigned long long)now_ns(),
      (unsigned long long)finished_kernels, (unsigned long long)finished_ns,
      (unsigned long long)charged_ns(), (long long)percentile(gaps, gap_count, 0.5),
      (long long)percentile(gaps, gap_count, 0.99), (unsigned long long)longest_ns,
      (unsigned long long)longest_at_ns);
  for (int index = 0; index < asked.phase_count; index++)
    printf("%s%llu", index == 0 ? "" : ", ", (unsigned long long)wakes[index]);
  printf("], \"progress\": [");
  for (size_t index = 0; asked.progress && index < step_count; index++)
    printf("%s[%llu, %llu]", index == 0 ? "" : ", ", (unsigned long long)steps[index].at_ns,
           (unsigned long long)steps[index].finished_ns);
  printf("]}\n");
  fflush(stdout);
}

int main(int count, char **arguments) {
  WRAPPED(cuCtxGetCurrent);
  lane lanes[MOST_LANES];
  read_arguments(count, arguments);
  open_device();
  need(wrapped_cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  load_functions(&asked.kernels, asked.one_function);
  grid = whole_grid() / (unsigned int)asked.fills_one_in;
  take_memory();
  for (int index = 0; asked.threads == 0 && index < asked.streams; index++)
    open_lane(&lanes[index], NULL, depth_of(asked.streams), asked.kernels.functions[0], grid,
              asked.nodes, asked.kernels.ns[0]);
  struct sigaction stopping = {.sa_handler = hear, .sa_flags = SA_RESTART};
  sigaction(SIGTERM, &stopping, NULL);
  wait_for_start();
  begun_ns = now_ns();
  end_ns = begun_ns + (uint64_t)(asked.seconds * 1e9);
  if (asked.threads > 0) {
    work_in_threads();
  } else {
    work(lanes, asked.streams, true);
  }
  uint64_t ended_ns = now_ns();
  sleep_until(ended_ns + 30000000u);  // what measures in the background has its say
  report();
  sleep_until(ended_ns + 200000000u);  // the sampler sees the last of this process
  return 0;
}
