// SPDX-License-Identifier: Apache-2.0
// See lanes.h.
#include "lanes.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "ledger.h"

enum { THREADS = 1024 };

durations parse_durations(const char *text) {
  durations parsed = {.random = now_ns()};
  char *end = NULL;
  for (const char *at = text; parsed.count < MOST_DURATIONS; at = end + 1) {
    parsed.ns[parsed.count++] = strtoull(at, &end, 10);
    if (end == at) break;
    if (*end == '\0') return parsed;
  }
  fprintf(stderr, "%s: not nanoseconds with commas between\n", text);
  exit(2);
}

void load_functions(durations *into, bool one) {
  for (int index = 0; index < into->count; index++)
    into->functions[index] = one && index > 0 ? into->functions[0] : spin_function();
}

int draw_kernel(durations *from) {
  if (from->count == 1) return 0;
  double sum = 0, seen = 0;
  for (int index = 0; index < from->count; index++) sum += 1.0 / (double)from->ns[index];
  double drawn = (double)(random_u64(&from->random) >> 11) / (double)(1ull << 53) * sum;
  for (int index = 0; index < from->count; index++) {
    seen += 1.0 / (double)from->ns[index];
    if (drawn < seen) return index;
  }
  return from->count - 1;
}

void sleep_until(uint64_t time_ns) {
  struct timespec until = {.tv_sec = (time_t)(time_ns / 1000000000u),
                           .tv_nsec = (long)(time_ns % 1000000000u)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

uint64_t charged_ns(void) {
  char path[4096];
  const char *share = getenv("ALLOTMENT_SHARE");
  snprintf(path, sizeof path, "%s/usage", share != NULL ? share : "/run/allotment/share");
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return 0;
  const allot_usage *usage = mmap(NULL, sizeof *usage, PROT_READ, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (usage == MAP_FAILED) return 0;
  return __atomic_load_n(&usage->devices[0].gpu_ns, __ATOMIC_SEQ_CST);
}

unsigned int whole_grid(void) {
  WRAPPED(cuDeviceGet);
  WRAPPED(cuDeviceGetAttribute);
  CUdevice device;
  int multiprocessors, threads;
  need(wrapped_cuDeviceGet(&device, 0), "cuDeviceGet");
  need(wrapped_cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                    device),
       "cuDeviceGetAttribute");
  need(wrapped_cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
                                    device),
       "cuDeviceGetAttribute");
  return (unsigned int)(multiprocessors * (threads / THREADS));
}

void launch_whole(CUfunction function, unsigned int grid, uint64_t *ns, CUstream stream) {
  static __typeof__(cuLaunchKernel) *launch;
  if (launch == NULL) launch = (__typeof__(cuLaunchKernel) *)find_wrapped("cuLaunchKernel");
  void *parameters[] = {ns};
  need(launch(function, grid, 1, 1, THREADS, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
}

CUevent blocking_event(void) {
  WRAPPED(cuEventCreate);
  CUevent event;
  need(wrapped_cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
       "cuEventCreate");
  return event;
}

static CUgraphExec chain(CUfunction function, unsigned int grid, int nodes, uint64_t node_ns) {
  WRAPPED(cuGraphCreate);
  WRAPPED(cuGraphAddKernelNode);
  WRAPPED(cuGraphInstantiateWithFlags);
  void *parameters[] = {&node_ns};
  CUDA_KERNEL_NODE_PARAMS_v1 kernel = {.func = function,
                                       .gridDimX = grid,
                                       .gridDimY = 1,
                                       .gridDimZ = 1,
                                       .blockDimX = THREADS,
                                       .blockDimY = 1,
                                       .blockDimZ = 1,
                                       .kernelParams = parameters};
  CUgraph graph;
  CUgraphNode node, previous = NULL;
  CUgraphExec executable;
  need(wrapped_cuGraphCreate(&graph, 0), "cuGraphCreate");
  for (int index = 0; index < nodes; index++) {
    need(wrapped_cuGraphAddKernelNode(&node, graph, index == 0 ? NULL : &previous,
                                      index == 0 ? 0 : 1, &kernel),
         "cuGraphAddKernelNode");
    previous = node;
  }
  need(wrapped_cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiate");
  return executable;
}

void open_lane(lane *opened, CUstream stream, int depth, CUfunction function, unsigned int grid,
               int nodes, uint64_t node_ns) {
  WRAPPED(cuStreamCreate);
  *opened = (lane){.stream = stream, .depth = depth};
  if (opened->depth > MOST_DEPTH) opened->depth = MOST_DEPTH;
  if (opened->depth < 2) opened->depth = 2;
  if (stream == NULL) need(wrapped_cuStreamCreate(&opened->stream, 1), "cuStreamCreate");
  for (int index = 0; index < opened->depth; index++) opened->events[index] = blocking_event();
  // Two, since launches of one executable graph wait for each other.
  for (int index = 0; nodes > 0 && index < 2; index++)
    opened->graphs[index] = chain(function, grid, nodes, node_ns);
}

void issue_batch(lane *into, unsigned int grid, durations *from, uint64_t batch_ns, int nodes) {
  static __typeof__(cuGraphLaunch) *launch_graph;
  static __typeof__(cuEventRecord) *record;
  if (record == NULL) {
    launch_graph = (__typeof__(cuGraphLaunch) *)find_wrapped("cuGraphLaunch");
    record = (__typeof__(cuEventRecord) *)find_wrapped("cuEventRecord");
  }
  uint64_t sum = 0;
  uint32_t kernels = 0;
  if (into->graphs[0] != NULL) {
    need(launch_graph(into->graphs[into->issued % 2], into->stream), "cuGraphLaunch");
    kernels = (uint32_t)nodes;
    sum = (uint64_t)nodes * from->ns[0];
  } else {
    do {
      int kernel = draw_kernel(from);
      launch_whole(from->functions[kernel], grid, &from->ns[kernel], into->stream);
      kernels++;
      sum += from->ns[kernel];
    } while (sum < batch_ns);
  }
  size_t place = into->issued++ % (uint64_t)into->depth;
  need(record(into->events[place], into->stream), "cuEventRecord");
  into->batch_ns[place] = sum;
  into->batch_count[place] = kernels;
}

bool lane_is_full(const lane *looked_at) {
  return looked_at->issued - looked_at->finished >= (uint64_t)looked_at->depth;
}

uint64_t finish_batch(lane *waited_for, uint32_t *kernels) {
  static __typeof__(cuEventSynchronize) *wait;
  if (wait == NULL) wait = (__typeof__(cuEventSynchronize) *)find_wrapped("cuEventSynchronize");
  size_t place = waited_for->finished++ % (uint64_t)waited_for->depth;
  need(wait(waited_for->events[place]), "cuEventSynchronize");
  *kernels = waited_for->batch_count[place];
  return waited_for->batch_ns[place];
}
