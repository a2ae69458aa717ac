// SPDX-License-Identifier: Apache-2.0
// Launching kernels, in all of CUDA's ways.
#include "launches.h"

#include "driver.h"
#include "extra_abi.h"
#include "reason.h"
#include "streams.h"

// ---- a launch's turn ----
//
// With the stream's lock held: no thread is cancelled meanwhile, since what is counted as queued is
// to end.

static launch_request request_of(const stream_state *of, const batch_launch *launch) {
  return (launch_request){
      .expected_ns = launch->expected_ns, .now_ns = launch->began_ns, .free_ns = &of->free_ns};
}

static bool enter(stream_state *of, batch_launch *launch) {
  launch_request asked = request_of(of, launch);
  if (LIKELY(batch_prepare(of, launch))) return admission_join(of->at, &asked);
  launch->is_counted = admission_enter(of->at, &asked);
  return launch->is_counted;
}

// Other threads may use the stream meanwhile, and wait for it.
static bool wait_for_turn(stream_state *of, batch_launch *launch) {
  launch_request asked = request_of(of, launch);
  uncancelled_begin();
  process_unlock(&of->lock);
  launch->is_counted = admission_wait(of->at, &asked);
  process_lock(&of->lock);
  uncancelled_end();
  launch->began_ns = clock_ns();
  if (launch->is_counted) batch_prepare(of, launch);
  return launch->is_counted;
}

// The keeper has stopped, as the program's exit has begun.
static CUresult begin_late(launch_pass *pass, stream_state *of, CUstream stream, bool is_part) {
  pass->is_late = !is_part && keeper_begin_late(of->at);
  pass->meant = stream;
  if (pass->is_late) pass->stream = of;
  return CUDA_SUCCESS;
}

// What cannot be noted cannot be measured, and must not run.
static CUresult refuse_unnoted(void) {
  say_once("no memory of its own is left, which turns need; see `ulimit -v`");
  return CUDA_ERROR_SYSTEM_NOT_READY;
}

CUresult launch_begin(launch_pass *pass, CUstream stream, uint64_t key, bool is_part) {
  pass->stream = NULL;
  pass->is_late = false;
  compute_state *all = compute_governed();
  if (LIKELY(all == NULL)) {
    return UNLIKELY(compute_is_unknown()) ? refuse_unnoted() : CUDA_SUCCESS;
  }
  if (compute_is_recorded(all, stream)) return CUDA_SUCCESS;
  stream_state *of = stream_state_of(all, stream, true);
  if (UNLIKELY(of == NULL)) {
    // There was no memory to note the stream.
    return stream_takes_turns(all, stream) ? refuse_unnoted() : CUDA_SUCCESS;
  }
  if (!compute_is_governed(of->at)) return CUDA_SUCCESS;
  if (UNLIKELY(!compute_join(of->at))) return CUDA_ERROR_SYSTEM_NOT_READY;
  if (UNLIKELY(keeper_is_stopped(all))) return begin_late(pass, of, stream, is_part);
  // What this one waits for in the legacy stream, those that it joins wait for too.
  if ((uintptr_t)of->stream == 1 && __atomic_load_n(&of->marks->joined, __ATOMIC_RELAXED) != 0) {
    marks_interrupt_joined(all, of, stream);
  }
  estimate *what = estimate_of(&all->estimates, key);
  pass->launch = (batch_launch){
      .what = what, .expected_ns = estimate_ns(what), .alone = estimate_is_due(what) || is_part};
  process_lock(&of->lock);
  pass->launch.began_ns = clock_ns();
  if (UNLIKELY(!enter(of, &pass->launch)) && !wait_for_turn(of, &pass->launch)) {
    process_unlock(&of->lock);
    return keeper_is_stopped(all) ? begin_late(pass, of, stream, is_part) : CUDA_SUCCESS;
  }
  estimate_count(what);
  batch_before(of, &pass->launch);
  pass->stream = of;
  return CUDA_SUCCESS;
}

void launch_end(launch_pass *pass, CUresult result) {
  stream_state *of = pass->stream;
  if (LIKELY(of == NULL)) return;
  if (UNLIKELY(pass->is_late)) {
    keeper_end_late(of->at, pass->meant, result == CUDA_SUCCESS);
    return;
  }
  batch_after(of, &pass->launch, result == CUDA_SUCCESS);
  process_unlock(&of->lock);
}

#define LAUNCH(meant, key, call)                              \
  do {                                                        \
    launch_pass pass;                                         \
    CUresult result = launch_begin(&pass, meant, key, false); \
    if (UNLIKELY(result != CUDA_SUCCESS)) return result;      \
    if (LIKELY(pass.stream == NULL)) return call;             \
    result = DRIVER(call);                                    \
    launch_end(&pass, result);                                \
    return result;                                            \
  } while (0)

static uint64_t key_of(CUfunction function, uint64_t x, uint64_t y, uint64_t z) {
  return estimate_key(function, x ^ y << 24 ^ z << 44);
}

// ---- with a configuration in arguments ----

#define LAUNCH_KERNEL(name, stream_meant)                                                          \
  CUDA_WRAPPER(name, (CUfunction function, unsigned int grid_dim_x, unsigned int grid_dim_y,       \
                      unsigned int grid_dim_z, unsigned int block_dim_x, unsigned int block_dim_y, \
                      unsigned int block_dim_z, unsigned int shared_mem_bytes, CUstream stream,    \
                      void **kernel_params, void **extra)) {                                       \
    if (!governed()) {                                                                             \
      return UNGOVERNED(name)(function, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x,           \
                              block_dim_y, block_dim_z, shared_mem_bytes, stream, kernel_params,   \
                              extra);                                                              \
    }                                                                                              \
    LAUNCH(stream_meant, key_of(function, grid_dim_x, grid_dim_y, grid_dim_z),                     \
           REAL(name)(function, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x, block_dim_y,      \
                      block_dim_z, shared_mem_bytes, stream, kernel_params, extra));               \
  }

LAUNCH_KERNEL(cuLaunchKernel, stream)
LAUNCH_KERNEL(cuLaunchKernel_ptsz, per_thread(stream))

#define LAUNCH_COOPERATIVE(name, stream_meant)                                                     \
  CUDA_WRAPPER(name, (CUfunction function, unsigned int grid_dim_x, unsigned int grid_dim_y,       \
                      unsigned int grid_dim_z, unsigned int block_dim_x, unsigned int block_dim_y, \
                      unsigned int block_dim_z, unsigned int shared_mem_bytes, CUstream stream,    \
                      void **kernel_params)) {                                                     \
    if (!governed()) {                                                                             \
      return UNGOVERNED(name)(function, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x,           \
                              block_dim_y, block_dim_z, shared_mem_bytes, stream, kernel_params);  \
    }                                                                                              \
    LAUNCH(stream_meant, key_of(function, grid_dim_x, grid_dim_y, grid_dim_z),                     \
           REAL(name)(function, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x, block_dim_y,      \
                      block_dim_z, shared_mem_bytes, stream, kernel_params));                      \
  }

LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, stream)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, per_thread(stream))

#define LAUNCH_CONFIGURED(name, stream_meant)                                                    \
  CUDA_WRAPPER(name, (const CUlaunchConfig *config, CUfunction function, void **kernel_params,   \
                      void **extra)) {                                                           \
    if (config == NULL || !governed()) {                                                         \
      return UNGOVERNED(name)(config, function, kernel_params, extra);                           \
    }                                                                                            \
    LAUNCH(stream_meant, key_of(function, config->gridDimX, config->gridDimY, config->gridDimZ), \
           REAL(name)(config, function, kernel_params, extra));                                  \
  }

LAUNCH_CONFIGURED(cuLaunchKernelEx, config->hStream)
LAUNCH_CONFIGURED(cuLaunchKernelEx_ptsz, per_thread(config->hStream))

// ---- the forms of CUDA 2, which take their configuration from the function ----

CUDA_WRAPPER(cuLaunch, (CUfunction function)) {
  if (!governed()) return UNGOVERNED(cuLaunch)(function);
  LAUNCH(STREAM_LEGACY, key_of(function, 1, 1, 1), REAL(cuLaunch)(function));
}

CUDA_WRAPPER(cuLaunchGrid, (CUfunction function, int width, int height)) {
  if (!governed()) return UNGOVERNED(cuLaunchGrid)(function, width, height);
  LAUNCH(STREAM_LEGACY, key_of(function, (unsigned)width, (unsigned)height, 1),
         REAL(cuLaunchGrid)(function, width, height));
}

CUDA_WRAPPER(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream)) {
  if (!governed()) return UNGOVERNED(cuLaunchGridAsync)(function, width, height, stream);
  LAUNCH(stream, key_of(function, (unsigned)width, (unsigned)height, 1),
         REAL(cuLaunchGridAsync)(function, width, height, stream));
}

// ---- one kernel on several devices ----
//
// Each part waits for its turn and is marked by itself. No stream's lock is held across the call,
// as two such launches could name the same streams in different orders.

#define MOST_PARTS ALLOT_MAX_DEVICES

static void suspend_part(const launch_pass *pass) {
  if (pass->stream == NULL) return;
  uncancelled_begin();
  process_unlock(&pass->stream->lock);
}

static void end_part(launch_pass *pass, CUresult result) {
  if (pass->stream == NULL) return;
  process_lock(&pass->stream->lock);
  uncancelled_end();
  launch_end(pass, result);
}

CUDA_WRAPPER(cuLaunchCooperativeKernelMultiDevice,
             (CUDA_LAUNCH_PARAMS * list, unsigned int count, unsigned int flags)) {
  if (list == NULL || count > MOST_PARTS || !governed()) {
    return UNGOVERNED(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
  }
  launch_pass passes[MOST_PARTS];
  CUresult result = CUDA_SUCCESS;
  unsigned begun = 0;
  for (; begun < count && result == CUDA_SUCCESS; begun++) {
    const CUDA_LAUNCH_PARAMS *part = &list[begun];
    uint64_t key = key_of(part->function, part->gridDimX, part->gridDimY, part->gridDimZ);
    result = launch_begin(&passes[begun], part->hStream, key, true);
    suspend_part(&passes[begun]);
  }
  if (result == CUDA_SUCCESS) {
    result = DRIVER(REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags));
  }
  for (unsigned i = 0; i < begun; i++) end_part(&passes[i], result);
  return result;
}
