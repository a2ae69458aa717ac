// SPDX-License-Identifier: Apache-2.0
// Calls after which a stream waits for something else: other streams, the host, values in memory.
// The batch before them ends there, so that the wait is nobody's GPU time. Captures, and the end of
// streams, are here as well: they decide where marks may be set at all.
#include "compute.h"
#include "driver.h"
#include "extra_abi.h"
#include "streams.h"

static void interrupt(CUstream stream) {
  compute_state *all = compute_governed();
  if (LIKELY(all == NULL)) return;
  stream_state *of = stream_state_of(all, stream, false);
  marks_interrupt_joined(all, of, stream);
  if (of == NULL || !process_lock_within(&of->lock, INSIDE_NS)) return;
  batch_interrupt(of);
  process_unlock(&of->lock);
}

#define INTERRUPT_ONE(name, meant, parameters, arguments) \
  CUDA_WRAPPER(name, parameters) {                        \
    if (governed()) interrupt(meant);                     \
    return REAL(name) arguments;                          \
  }
#define INTERRUPT(name, parameters, arguments)       \
  INTERRUPT_ONE(name, stream, parameters, arguments) \
  INTERRUPT_ONE(name##_ptsz, per_thread(stream), parameters, arguments)

INTERRUPT(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags),
          (stream, event, flags))
INTERRUPT(cuStreamWaitValue32,
          (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags),
          (stream, address, value, flags))
INTERRUPT(cuStreamWaitValue32_v2,
          (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags),
          (stream, address, value, flags))
INTERRUPT(cuStreamWaitValue64,
          (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags),
          (stream, address, value, flags))
INTERRUPT(cuStreamWaitValue64_v2,
          (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags),
          (stream, address, value, flags))
INTERRUPT(cuStreamBatchMemOp,
          (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *operations,
           unsigned int flags),
          (stream, count, operations, flags))
INTERRUPT(cuStreamBatchMemOp_v2,
          (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *operations,
           unsigned int flags),
          (stream, count, operations, flags))
INTERRUPT(cuWaitExternalSemaphoresAsync,
          (const void *semaphores, const void *parameters, unsigned int count, CUstream stream),
          (semaphores, parameters, count, stream))
INTERRUPT(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *data),
          (stream, function, data))
INTERRUPT(cuLaunchHostFunc_v2, (CUstream stream, CUhostFn function, void *data, unsigned int mode),
          (stream, function, data, mode))
INTERRUPT(cuStreamAddCallback,
          (CUstream stream, CUstreamCallback callback, void *data, unsigned int flags),
          (stream, callback, data, flags))

// All streams of a context.
static void interrupt_all(CUcontext context) {
  compute_state *all = compute_governed();
  if (all != NULL) marks_interrupt_all(all, context);
}

CUDA_WRAPPER(cuCtxWaitEvent, (CUcontext context, CUevent event)) {
  if (governed()) interrupt_all(context);
  return REAL(cuCtxWaitEvent)(context, event);
}

CUDA_WRAPPER(cuGreenCtxWaitEvent, (CUgreenCtx green, CUevent event)) {
  CUcontext context = NULL;
  if (governed() && DRIVER(USED(cuCtxFromGreenCtx)(&context, green)) == CUDA_SUCCESS) {
    interrupt_all(context);
  }
  return REAL(cuGreenCtxWaitEvent)(green, event);
}

// ---- captures ----
//
// They are counted although nobody may ask for compute yet: somebody may before they end. While
// there is one, no batch is left open, so the keeper has nothing to mark.

bool capture_may_have(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  // An error: the legacy stream, which must not be touched while another one is recorded.
  return DRIVER(USED(cuStreamIsCapturing)(stream, &status)) != CUDA_SUCCESS ||
         status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static compute_state *state_of_share(void) {
  process *own = governed() ? process_known() : NULL;
  return own == NULL ? NULL : compute_state_of(own);
}

static void capture_begins(compute_state *all) {
  __atomic_add_fetch(&all->captures, 1, __ATOMIC_SEQ_CST);
  marks_settle_all(all);
}

static void capture_began(compute_state *all, CUstream stream, CUresult result) {
  stream_state *of = result == CUDA_SUCCESS ? stream_state_of(all, stream, true) : NULL;
  if (of != NULL) {
    __atomic_store_n(&of->is_captured, 1, __ATOMIC_RELAXED);
  } else {
    __atomic_sub_fetch(&all->captures, 1, __ATOMIC_SEQ_CST);
  }
}

static void capture_ended(compute_state *all, CUstream stream) {
  stream_state *of = stream_state_of(all, stream, false);
  if (of == NULL || __atomic_load_n(&of->is_captured, __ATOMIC_RELAXED) == 0) return;
  if (stream_is_capturing(stream)) return;  // the call was refused
  if (__atomic_exchange_n(&of->is_captured, 0, __ATOMIC_RELAXED) != 0) {
    __atomic_sub_fetch(&all->captures, 1, __ATOMIC_SEQ_CST);
  }
}

#define BEGIN_ONE(name, meant, parameters, arguments)   \
  CUDA_WRAPPER(name, parameters) {                      \
    compute_state *all = state_of_share();              \
    if (all == NULL) return UNGOVERNED(name) arguments; \
    UNCANCELLED;                                        \
    capture_begins(all);                                \
    CUresult result = DRIVER(REAL(name) arguments);     \
    capture_began(all, meant, result);                  \
    return result;                                      \
  }
#define BEGIN(name, parameters, arguments)       \
  BEGIN_ONE(name, stream, parameters, arguments) \
  BEGIN_ONE(name##_ptsz, per_thread(stream), parameters, arguments)

BEGIN(cuStreamBeginCapture, (CUstream stream), (stream))
BEGIN(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))
BEGIN(cuStreamBeginCaptureToGraph,
      (CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
       const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode),
      (stream, graph, dependencies, edges, count, mode))

BEGIN(cuStreamBeginRecaptureToGraph,
      (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback,
       void *data),
      (stream, mode, graph, callback, data))

// Work that is captured for a graphics API runs in that API's commands: it could not be measured,
// nor take turns.
#define REFUSE_CIG(name)                                          \
  CUDA_WRAPPER(name, (CUstream stream, void *parameters)) {       \
    if (!governed()) return UNGOVERNED(name)(stream, parameters); \
    return CUDA_ERROR_NOT_PERMITTED;                              \
  }

REFUSE_CIG(cuStreamBeginCaptureToCig)
REFUSE_CIG(cuStreamBeginCaptureToCig_ptsz)

// Other threads may be recording memory, which must not become an allocation without a charge.
#define ENDS_CAPTURES(own, result, call)  \
  do {                                    \
    process_lock(&(own)->capture_lock);   \
    (result) = DRIVER(call);              \
    process_unlock(&(own)->capture_lock); \
  } while (0)

#define END_ONE(name, meant)                                 \
  CUDA_WRAPPER(name, (CUstream stream, CUgraph * graph)) {   \
    process *own = governed() ? process_state() : NULL;      \
    if (own == NULL) return UNGOVERNED(name)(stream, graph); \
    compute_state *all = state_of_share();                   \
    UNCANCELLED;                                             \
    CUresult result;                                         \
    ENDS_CAPTURES(own, result, REAL(name)(stream, graph));   \
    if (all != NULL) capture_ended(all, meant);              \
    return result;                                           \
  }

END_ONE(cuStreamEndCapture, stream)
END_ONE(cuStreamEndCapture_ptsz, per_thread(stream))

// ---- the end of a stream ----

// Before the driver's call: right after it another thread may be given the handle. Should the
// driver refuse, the stream is met anew.
static void stream_ends(CUstream stream) {
  compute_state *all = state_of_share();
  if (all != NULL) stream_state_forget(all, stream);
}

#define DESTROY_STREAM(name)                            \
  CUDA_WRAPPER(name, (CUstream stream)) {               \
    stream_ends(stream);                                \
    process *own = governed() ? process_known() : NULL; \
    if (own == NULL) return REAL(name)(stream);         \
    UNCANCELLED;                                        \
    CUresult result;                                    \
    ENDS_CAPTURES(own, result, REAL(name)(stream));     \
    return result;                                      \
  }

DESTROY_STREAM(cuStreamDestroy)
DESTROY_STREAM(cuStreamDestroy_v2)
