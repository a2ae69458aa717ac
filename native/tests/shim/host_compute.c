// SPDX-License-Identifier: Apache-2.0
// What is measured: every way to launch, graphs, captures, copies, gaps, contexts that go.
//
// The share may use the whole device here, so nothing is held back for long. Each case compares the
// share's figures with what the simulated GPU has really run.
#include <pthread.h>
#include <sys/resource.h>

#include "compute_host.h"
#include "shim/extra_abi.h"

#define PER_THREAD ((CUstream)0x2)

static CUfunction function;
static CUstream stream;

static void begin(void) {
  start_on(0);
  function = spin_function();
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
}

// What the call added to the share's account is what it added to the GPU's.
static void measure(const char *what, void (*launch)(uint64_t ns), uint64_t percent) {
  uint64_t charged_before = settled(&share.usage->devices[0].gpu_ns), truth_before = truth_ns();
  launch(2 * MS);
  OK(cuCtxSynchronize());
  uint64_t truth = truth_ns() - truth_before;
  if (truth < 2 * MS) FAIL("%s: nothing ran", what);
  expect_near(settled(&share.usage->devices[0].gpu_ns) - charged_before, truth, percent, what);
}

// ---- every form ----

static CUlaunchConfig config_of(CUstream on) {
  return (CUlaunchConfig){.gridDimX = 1,
                          .gridDimY = 1,
                          .gridDimZ = 1,
                          .blockDimX = 32,
                          .blockDimY = 1,
                          .blockDimZ = 1,
                          .hStream = on};
}

#define FORM(name, call)                       \
  static void name(uint64_t ns) {              \
    void *parameters[] = {&ns};                \
    CUlaunchConfig config = config_of(stream); \
    (void)config;                              \
    for (int i = 0; i < 5; i++) OK(call);      \
  }
#define ONE_BLOCK function, 1, 1, 1, 32, 1, 1, 0
FORM(legacy, cuLaunchKernel(ONE_BLOCK, NULL, parameters, NULL))
FORM(named, cuLaunchKernel(ONE_BLOCK, stream, parameters, NULL))
FORM(own_thread, cuLaunchKernel(ONE_BLOCK, PER_THREAD, parameters, NULL))
FORM(own_thread_variant, cuLaunchKernel_ptsz(ONE_BLOCK, NULL, parameters, NULL))
FORM(configured, cuLaunchKernelEx(&config, function, parameters, NULL))
FORM(configured_variant, cuLaunchKernelEx_ptsz(&config, function, parameters, NULL))
FORM(cooperative, cuLaunchCooperativeKernel(ONE_BLOCK, stream, parameters))
FORM(cooperative_variant, cuLaunchCooperativeKernel_ptsz(ONE_BLOCK, NULL, parameters))

static void many_devices(uint64_t ns) {
  spin_on_devices(function, ns, stream);
}

static void every_form_is_measured(void) {
  begin();
  measure("legacy stream", legacy, 15);
  measure("stream", named, 15);
  measure("per-thread stream", own_thread, 15);
  measure("cuLaunchKernel_ptsz", own_thread_variant, 15);
  measure("cuLaunchKernelEx", configured, 15);
  measure("cuLaunchKernelEx_ptsz", configured_variant, 15);
  measure("cuLaunchCooperativeKernel", cooperative, 15);
  measure("cuLaunchCooperativeKernel_ptsz", cooperative_variant, 15);
  measure("cuLaunchCooperativeKernelMultiDevice", many_devices, 15);
}

// ---- lengths ----

static void kernels_of_every_length(void) {
  static const uint64_t lengths[] = {5 * US, 20 * US, 90 * US, 200 * US, 2 * MS, 20 * MS};
  begin();
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
    if (IS_SLOW && lengths[i] < 20 * US) continue;
    uint64_t count = 100 * MS / lengths[i];
    if (count > 2000) count = 2000;
    for (uint64_t n = 0; n < count; n++) spin(function, lengths[i], stream);
    OK(cuStreamSynchronize(stream));
    char what[64];
    snprintf(what, sizeof what, "kernels of %llu ns", (unsigned long long)lengths[i]);
    expect_near(settled(&share.usage->devices[0].gpu_ns) - charged, truth_ns() - truth,
                lengths[i] < 50 * US ? 30 : 10, what);
  }
}

static void streams_overlap(void) {
  CUstream streams[4];
  begin();
  for (int i = 0; i < 4; i++) OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
  uint64_t truth = truth_ns(), launches = figure(&share.usage->devices[0].launches);
  uint64_t ns = 300 * US;
  void *parameters[] = {&ns};
  for (int n = 0; n < 400; n++) {
    // Of one block, so that they run at the same time: that time counts once.
    OK(cuLaunchKernel(ONE_BLOCK, streams[n % 4], parameters, NULL));
  }
  OK(cuCtxSynchronize());
  expect_near(settled(&share.usage->devices[0].gpu_ns), truth_ns() - truth, 15, "4 streams");
  EXPECT_EQUAL(figure(&share.usage->devices[0].launches), launches + 400);
}

// Each of them is measured before the long one is, and there are many.
static void short_kernels_hide_no_long_one(void) {
  CUstream other;
  begin();
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  uint64_t truth = truth_ns(), long_ns = 300 * MS, short_ns = 20 * US;
  void *parameters[] = {&long_ns};
  OK(cuLaunchKernel(ONE_BLOCK, stream, parameters, NULL));
  parameters[0] = &short_ns;
  for (int n = 0; n < 150; n++) {
    OK(cuLaunchKernel(ONE_BLOCK, other, parameters, NULL));
    OK(cuStreamSynchronize(other));
    pause_ns(MS);
  }
  OK(cuStreamSynchronize(stream));
  expect_near(settled(&share.usage->devices[0].gpu_ns), truth_ns() - truth, 10, "a long kernel");
}

// Between launches that come one by one the GPU is idle, and nobody pays for it.
static void gaps_are_not_charged(void) {
  begin();
  uint64_t truth = truth_ns();
  for (int n = 0; n < 100; n++) {
    spin(function, 100 * US, stream);
    pause_ns(2 * MS);
  }
  OK(cuStreamSynchronize(stream));
  // Of 210 ms; a machine under load adds some.
  expect_near(settled(&share.usage->devices[0].gpu_ns), truth_ns() - truth, 60, "gaps");
}

// ---- graphs ----

static CUgraph captured(int kernels, uint64_t ns) {
  CUgraph graph;
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  for (int i = 0; i < kernels; i++) spin(function, ns, stream);
  OK(cuStreamEndCapture(stream, &graph));
  return graph;
}

static void graphs_count_by_what_they_took(void) {
  begin();
  CUgraph graph = captured(1000, 20 * US);
  CUgraphExec made;
  OK(cuGraphInstantiateWithFlags(&made, graph, 0));
  uint64_t truth = truth_ns(), launches = figure(&share.usage->devices[0].launches);
  for (int i = 0; i < 5; i++) OK(cuGraphLaunch(made, stream));
  OK(cuStreamSynchronize(stream));
  for (int i = 0; i < 5; i++) OK(cuGraphLaunch_ptsz(made, NULL));
  OK(cuCtxSynchronize());
  uint64_t really = truth_ns() - truth;
  EXPECT(really >= 190 * MS);
  OK(cuGraphExecDestroy(made));
  OK(cuGraphDestroy(graph));
  expect_near(settled(&share.usage->devices[0].gpu_ns), really, 3, "graphs");
  EXPECT_EQUAL(figure(&share.usage->devices[0].launches), launches + 10);
}

// A graph that is captured once more has the nodes that it had, and its launches wait for no turn.
static void graphs_captured_again_are_left_alone(void) {
  begin();
  spin(function, MS, stream);  // the keeper is there
  CUgraph graph = captured(50, MS), again;
  uint64_t throttled = figure(&share.usage->devices[0].throttled);
  for (int round = 0; round < 10; round++) {
    size_t nodes = 0;
    OK(cuStreamBeginRecaptureToGraph(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, graph, NULL, NULL));
    for (int i = 0; i < 50; i++) spin(function, MS, stream);
    pause_ns(2 * MS);
    OK(cuStreamEndCapture(stream, &again));
    EXPECT(again == graph);
    OK(cuGraphGetNodes(graph, NULL, &nodes));
    EXPECT_EQUAL(nodes, 50);
  }
  OK(cuGraphDestroy(graph));
  OK(cuCtxSynchronize());
  EXPECT_EQUAL(figure(&share.usage->devices[0].throttled), throttled);
  // One kernel ran.
  EXPECT(settled(&share.usage->devices[0].gpu_ns) < 100 * MS);
}

static void captures_are_left_alone(void) {
  begin();
  spin(function, MS, stream);  // the keeper is there
  CUstream other;
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  uint64_t ns = 10 * US;
  void *parameters[] = {&ns};
  for (int i = 0; i < 20; i++) OK(cuLaunchKernel(ONE_BLOCK, other, parameters, NULL));
  for (int i = 0; i < 5; i++) spin(function, MS, stream);
  OK(cuStreamSynchronize(stream));
  settled(&share.usage->devices[0].gpu_ns);
  // Not held back either: a second of kernels would be.
  uint64_t throttled = figure(&share.usage->devices[0].throttled);
  for (int round = 0; round < 20; round++) {
    CUgraph graph;
    size_t nodes = 0;
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    for (int i = 0; i < 50; i++) {
      spin(function, MS, stream);
      OK(cuLaunchKernel(ONE_BLOCK, other, parameters, NULL));  // measured as ever
    }
    pause_ns(MS);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphGetNodes(graph, NULL, &nodes));
    EXPECT_EQUAL(nodes, 50);
    OK(cuGraphDestroy(graph));
  }
  if (figure(&share.usage->devices[0].throttled) > throttled + 5) FAIL("captures were held back");
  OK(cuCtxSynchronize());
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns);
  expect_near(charged, truth_ns(), 30, "beside captures");
  // A stream that joins a capture by an event is captured as well.
  CUgraph graph;
  CUevent fork, join;
  size_t nodes = 0;
  OK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
  OK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  OK(cuEventRecord(fork, stream));
  OK(cuStreamWaitEvent(other, fork, 0));
  for (int i = 0; i < 10; i++) spin(function, MS, other);
  OK(cuEventRecord(join, other));
  OK(cuStreamWaitEvent(stream, join, 0));
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphGetNodes(graph, NULL, &nodes));
  EXPECT_EQUAL(nodes, 10);
  OK(cuGraphDestroy(graph));
  // A capture that fails does not keep later launches from being measured.
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT(cuStreamSynchronize(stream) != CUDA_SUCCESS);
  EXPECT(cuStreamEndCapture(stream, &graph) != CUDA_SUCCESS);
  charged = settled(&share.usage->devices[0].gpu_ns);
  uint64_t truth = truth_ns();
  for (int i = 0; i < 50; i++) spin(function, MS, stream);
  OK(cuStreamSynchronize(stream));
  expect_near(settled(&share.usage->devices[0].gpu_ns) - charged, truth_ns() - truth, 15, "after");
}

// ---- copies ----

static void copies_have_their_own_account(void) {
  begin();
  CUdeviceptr memory;
  void *host;
  OK(cuMemAlloc_v2(&memory, 256 * MIB));
  OK(cuMemAllocHost_v2(&host, 256 * MIB));
  for (int i = 0; i < 5; i++) {
    for (int n = 0; n < 10; n++) spin(function, 100 * US, stream);
    OK(cuMemcpyHtoDAsync_v2(memory, host, 256 * MIB, stream));
    for (int n = 0; n < 10; n++) spin(function, 100 * US, stream);
    OK(cuMemcpyDtoHAsync_v2(host, memory, 256 * MIB, stream));
  }
  OK(cuStreamSynchronize(stream));
  OK(cuMemcpyHtoD_v2(memory, host, 64 * MIB));
  OK(cuMemcpy_ptds(memory, memory + 64 * MIB, 64 * MIB));
  OK(cuMemsetD8Async(memory, 1, 256 * MIB, stream));
  OK(cuMemsetD32_v2(memory, 1, 64 * MIB / 4));
  OK(cuCtxSynchronize());
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns);
  uint64_t copied = settled(&share.usage->devices[0].copy_ns);
  // Kernels alone: 10 ms, and what fills take if they count as kernels on this device.
  if (charged < 9 * MS || (!IS_SLOW && charged > 14 * MS))
    FAIL("charged %llu ns", (unsigned long long)charged);
  // 2.5 GiB over a bus of some 25 GB/s.
  if (copied < 60 * MS) FAIL("copied %llu ns", (unsigned long long)copied);
}

// The form is measured as a copy. One that were not would run beside the share's limits.
#define COPIES(name, ...)                                        \
  do {                                                           \
    uint64_t before = settled(&share.usage->devices[0].copy_ns); \
    OK(name(__VA_ARGS__));                                       \
    OK(cuCtxSynchronize());                                      \
    for (int tries = 0; copy_ns() == before; tries++) {          \
      if (tries == 1000) FAIL(#name " is not measured");         \
      pause_ns(5 * MS);                                          \
    }                                                            \
  } while (0)
#define COPIES_DEFAULT(name, ...) \
  COPIES(name, __VA_ARGS__);      \
  COPIES(name##_ptds, __VA_ARGS__)
#define COPIES_IN_STREAM(name, ...)  \
  COPIES(name, __VA_ARGS__, stream); \
  COPIES(name##_ptsz, __VA_ARGS__, stream)

static void every_form_of_copy_is_measured(void) {
  const size_t size = 8 * MIB, half = size / 2, width = 1024, height = half / width;
  begin();
  CUcontext context;
  CUdeviceptr memory;
  void *host;
  OK(cuCtxGetCurrent(&context));
  OK(cuMemAlloc_v2(&memory, size));
  OK(cuMemAllocHost_v2(&host, size));
  CUdeviceptr second = memory + half;
  COPIES_DEFAULT(cuMemcpy, memory, second, half);
  COPIES_DEFAULT(cuMemcpyDtoD_v2, memory, second, half);
  COPIES_DEFAULT(cuMemcpyDtoH_v2, host, memory, half);
  COPIES_DEFAULT(cuMemcpyHtoD_v2, memory, host, half);
  COPIES_DEFAULT(cuMemcpyPeer, memory, context, second, context, half);
  COPIES_IN_STREAM(cuMemcpyAsync, memory, second, half);
  COPIES_IN_STREAM(cuMemcpyDtoDAsync_v2, memory, second, half);
  COPIES_IN_STREAM(cuMemcpyDtoHAsync_v2, host, memory, half);
  COPIES_IN_STREAM(cuMemcpyHtoDAsync_v2, memory, host, half);
  COPIES_IN_STREAM(cuMemcpyPeerAsync, memory, context, second, context, half);
  COPIES_DEFAULT(cuMemsetD8_v2, memory, 1, half);
  COPIES_DEFAULT(cuMemsetD16_v2, memory, 1, half / 2);
  COPIES_DEFAULT(cuMemsetD32_v2, memory, 1, half / 4);
  COPIES_DEFAULT(cuMemsetD2D8_v2, memory, width, 1, width, height);
  COPIES_DEFAULT(cuMemsetD2D16_v2, memory, width, 1, width / 2, height);
  COPIES_DEFAULT(cuMemsetD2D32_v2, memory, width, 1, width / 4, height);
  COPIES_IN_STREAM(cuMemsetD8Async, memory, 1, half);
  COPIES_IN_STREAM(cuMemsetD16Async, memory, 1, half / 2);
  COPIES_IN_STREAM(cuMemsetD32Async, memory, 1, half / 4);
  COPIES_IN_STREAM(cuMemsetD2D8Async, memory, width, 1, width, height);
  COPIES_IN_STREAM(cuMemsetD2D16Async, memory, width, 1, width / 2, height);
  COPIES_IN_STREAM(cuMemsetD2D32Async, memory, width, 1, width / 4, height);
}

static void pause_a_little(void *unused) {
  pause_ns(5 * MS);
}

// A stream that waits for another one's host function does not compute meanwhile.
static void waiting_streams_are_not_charged(void) {
  begin();
  CUstream other;
  CUevent over;
  OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&over, CU_EVENT_DISABLE_TIMING));
  uint64_t truth = truth_ns();
  for (int i = 0; i < 20; i++) {
    for (int n = 0; n < 5; n++) spin(function, 20 * US, stream);
    OK(cuLaunchHostFunc(other, pause_a_little, NULL));
    OK(cuEventRecord(over, other));
    OK(cuStreamWaitEvent(stream, over, 0));
    for (int n = 0; n < 5; n++) spin(function, 20 * US, stream);
  }
  OK(cuStreamSynchronize(stream));
  // 4 ms of kernels in 100 ms of waiting.
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns);
  if (charged > (truth_ns() - truth) * (IS_SLOW ? 8 : 3)) {
    FAIL("charged %llu ns", (unsigned long long)charged);
  }
}

// ---- what the program sees stays right ----

static void the_programs_own_events_are_right(void) {
  begin();
  CUevent first, second;
  OK(cuEventCreate(&first, CU_EVENT_DEFAULT));
  OK(cuEventCreate(&second, CU_EVENT_DEFAULT));
  for (int i = 0; i < 20; i++) spin(function, MS, stream);
  OK(cuEventRecord(first, stream));
  for (int i = 0; i < 10; i++) spin(function, MS, stream);
  OK(cuEventRecord(second, stream));
  OK(cuEventSynchronize(second));
  float ms = 0;
  OK(cuEventElapsedTime(&ms, first, second));
  if (ms < 9.9f || ms > 14.0f) FAIL("10 ms took %f", (double)ms);
}

static long wakes(void) {
  struct rusage used;
  EXPECT(getrusage(RUSAGE_SELF, &used) == 0);
  return used.ru_nvcsw;
}

static void refused_launches_leave_nothing(void) {
  begin();
  spin(function, MS, stream);
  uint64_t ns = MS;
  void *parameters[] = {&ns};
  for (int i = 0; i < 2000; i++) {
    EXPECT(cuLaunchKernel(function, 0, 1, 1, 1, 1, 1, 0, stream, parameters, NULL) != 0);
    EXPECT(cuLaunchKernel(function, 1, 1, 1, 2048, 1, 1, 0, stream, parameters, NULL) != 0);
    EXPECT(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, (CUstream)&ns, parameters, NULL) != 0);
    EXPECT(cuLaunchGrid(function, 1, 1) != 0);
    EXPECT(cuLaunchGridAsync(function, 1, 1, stream) != 0);
    EXPECT(cuLaunch(function) != 0);
  }
  for (int i = 0; i < 50; i++) spin(function, 100 * US, stream);
  OK(cuStreamSynchronize(stream));
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  // A program that was itself not scheduled between two launches left gaps, and one under
  // ThreadSanitizer leaves them by itself.
  if (charged > truth * (IS_SLOW ? 8 : 2))
    FAIL("charged %.3f ms, really %.3f ms", charged / 1e6, truth / 1e6);
  if (charged < truth * 3 / 4) FAIL("charged %.3f ms, really %.3f ms", charged / 1e6, truth / 1e6);
  // Had they stayed in the queue, the keeper would look after them for ever.
  long woken = 0;
  for (int round = 0; round < 20; round++) {
    long before = wakes();
    pause_ns(250 * MS);
    if ((woken = wakes() - before) < 10) return;
  }
  FAIL("%ld wakes in 250 ms: work that is none is waited for", woken);
}

// ---- streams and contexts that go ----

static void a_thousand_streams(void) {
  static CUstream streams[1000];
  begin();
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < 1000; i++) {
      OK(cuStreamCreate(&streams[i], i % 2 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
    }
    for (int n = 0; n < 3; n++) {
      for (int i = 0; i < 1000; i++) spin(function, 20 * US, streams[i]);
    }
    for (int i = 0; i < 1000; i++) OK(cuStreamDestroy_v2(streams[i]));
  }
  OK(cuCtxSynchronize());
  expect_near(settled(&share.usage->devices[0].gpu_ns), truth_ns(), 60, "1000 streams");
}

// A share that comes back waits for all that is queued.
static void long_kernels_of_many_streams_queue_little(void) {
  enum { STREAMS = 64 };
  CUstream streams[STREAMS];
  begin();
  for (int i = 0; i < STREAMS; i++) OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 3; i++) {
    spin(function, 20 * MS, stream);
    OK(cuStreamSynchronize(stream));
  }
  const uint64_t before = truth_ns();
  for (uint64_t i = 0; i < STREAMS; i++) {
    spin(function, 20 * MS, streams[i]);
    const uint64_t queued_ns = (i + 1) * 20 * MS - (truth_ns() - before);
    if (queued_ns > 300 * MS) FAIL("%.0f ms are queued", (double)queued_ns / 1e6);
  }
  OK(cuCtxSynchronize());
}

static void contexts_go_with_work_queued(void) {
  for (int round = 0; round < 5; round++) {
    begin();
    for (int i = 0; i < 30; i++) spin(function, 100 * US, i % 2 ? stream : NULL);
    if (round % 2) pause_ns(2 * MS);
    OK(cuDevicePrimaryCtxReset_v2(0));
    CUcontext context;
    OK(cuCtxCreate_v2(&context, 0, 0));
    function = spin_function();
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 30; i++) spin(function, 100 * US, stream);
    OK(cuCtxDestroy_v2(context));
  }
  begin();
  uint64_t charged = settled(&share.usage->devices[0].gpu_ns), truth = truth_ns();
  for (int i = 0; i < 100; i++) spin(function, 200 * US, stream);
  OK(cuCtxSynchronize());
  expect_near(settled(&share.usage->devices[0].gpu_ns) - charged, truth_ns() - truth, 20, "after");
}

// The driver reads it once; the program may change its environment afterwards.
static void begin_blocking(const char *name) {
  if (getenv("CUDA_LAUNCH_BLOCKING") == NULL) {
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    execl("/proc/self/exe", "host_compute", name, NULL);
  }
  begin();
  unsetenv("CUDA_LAUNCH_BLOCKING");
}

static void *launch_endless(void *context) {
  OK(cuCtxSetCurrent(context));
  spin(function, 3600000 * MS, stream);
  return NULL;
}

// Ends the program while it runs.
static void expect_a_charge_meanwhile(void) {
  pthread_t thread;
  CUcontext context;
  uint64_t begun = now_ns();
  OK(cuCtxGetCurrent(&context));
  OK(pthread_create(&thread, NULL, launch_endless, context));
  OK(pthread_detach(thread));
  while (gpu_ns() < 50 * MS) {
    if (now_ns() - begun > 10000 * MS) FAIL("charged %.3f ms", (double)gpu_ns() / 1e6);
    pause_ns(MS);
  }
  uint64_t charged = gpu_ns();
  EXPECT(charged <= now_ns() - begun);
  _exit(0);
}

static void a_kernel_is_charged_before_it_ends(void) {
  begin();
  expect_a_charge_meanwhile();
}

static void a_launch_that_blocks_is_charged_before_it_ends(void) {
  begin_blocking(__func__);
  expect_a_charge_meanwhile();
}

static void launches_that_block_are_charged(void) {
  begin_blocking(__func__);
  uint64_t truth = truth_ns();
  for (int i = 0; i < 3; i++) spin(function, 100 * MS, stream);
  expect_near(settled(&share.usage->devices[0].gpu_ns), truth_ns() - truth, 10, "that block");
}

// The driver tells nothing of it any more: each call has the fault's error.
static void what_ran_until_a_fault_is_charged(void) {
  static const char source[] =
      ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry allot_trap()\n{ ret; }\n";
  CUmodule module;
  CUfunction trap;
  begin();
  OK(cuModuleLoadData(&module, source));
  OK(cuModuleGetFunction(&trap, module, "allot_trap"));
  spin(function, 2000 * MS, stream);
  pause_ns(300 * MS);
  OK(cuLaunchKernel(trap, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
  GIVES(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  uint64_t had = settled(&share.usage->devices[0].gpu_ns);
  if (had < 290 * MS) FAIL("charged %.3f ms of 300 ms", (double)had / 1e6);
}

static void two_contexts_at_once(void) {
  begin();
  CUcontext other, first;
  OK(cuCtxGetCurrent(&first));
  OK(cuCtxCreate_v2(&other, 0, 0));
  CUfunction theirs = spin_function();
  for (int i = 0; i < 100; i++) {
    OK(cuCtxSetCurrent(other));
    spin(theirs, 100 * US, NULL);
    OK(cuCtxSetCurrent(first));
    spin(function, 100 * US, i % 2 ? stream : NULL);
  }
  OK(cuCtxSynchronize());
  OK(cuCtxSetCurrent(other));
  OK(cuCtxSynchronize());
  expect_near(settled(&share.usage->devices[0].gpu_ns), truth_ns(), 40, "two contexts");
}

static const test_case cases[] = {
    {"every_form_is_measured", every_form_is_measured},
    {"kernels_of_every_length", kernels_of_every_length},
    {"streams_overlap", streams_overlap},
    {"short_kernels_hide_no_long_one", short_kernels_hide_no_long_one},
    {"gaps_are_not_charged", gaps_are_not_charged},
    {"graphs_count_by_what_they_took", graphs_count_by_what_they_took},
    {"captures_are_left_alone", captures_are_left_alone},
    {"graphs_captured_again_are_left_alone", graphs_captured_again_are_left_alone},
    {"copies_have_their_own_account", copies_have_their_own_account},
    {"every_form_of_copy_is_measured", every_form_of_copy_is_measured},
    {"waiting_streams_are_not_charged", waiting_streams_are_not_charged},
    {"the_programs_own_events_are_right", the_programs_own_events_are_right},
    {"refused_launches_leave_nothing", refused_launches_leave_nothing},
    {"a_thousand_streams", a_thousand_streams},
    {"long_kernels_of_many_streams_queue_little", long_kernels_of_many_streams_queue_little},
    {"contexts_go_with_work_queued", contexts_go_with_work_queued},
    {"a_kernel_is_charged_before_it_ends", a_kernel_is_charged_before_it_ends},
    {"a_launch_that_blocks_is_charged_before_it_ends",
     a_launch_that_blocks_is_charged_before_it_ends},
    {"launches_that_block_are_charged", launches_that_block_are_charged},
    {"what_ran_until_a_fault_is_charged", what_ran_until_a_fault_is_charged},
    {"two_contexts_at_once", two_contexts_at_once},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
