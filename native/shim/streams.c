// SPDX-License-Identifier: Apache-2.0
// Questions about streams, and the calls after which pools may have shrunk.
#include "streams.h"

#include "compute.h"
#include "driver.h"
#include "pools.h"

uint64_t stream_identity(CUstream stream) {
  if (stream == NULL) stream = STREAM_LEGACY;
  return (uint64_t)(uintptr_t)(stream == STREAM_PER_THREAD ? (void *)&driver_inside
                                                           : (void *)stream);
}

static CUresult device_of_context(process *own, CUcontext context, CUdevice *ordinal) {
  record known;
  if (records_find(&own->records, SPACE_CONTEXT, (uint64_t)(uintptr_t)context, &known)) {
    *ordinal = (CUdevice)known.count;
    return CUDA_SUCCESS;
  }
  CUresult result = DRIVER(USED(cuCtxPushCurrent_v2)(context));
  if (result != CUDA_SUCCESS) return result;
  result = DRIVER(USED(cuCtxGetDevice)(ordinal));
  DRIVER(USED(cuCtxPopCurrent_v2)(&context));
  return result;
}

CUresult target_stream(target *found, CUstream stream) {
  if (stream == NULL || stream == STREAM_LEGACY || stream == STREAM_PER_THREAD) {
    return target_current(found);
  }
  *found = (target){.device = -1};
  CUcontext context = NULL;
  // A stream that is not there may be there when the driver is called.
  CUresult result = DRIVER(USED(cuStreamGetCtx)(stream, &context));
  if (result != CUDA_SUCCESS) return result;
  found->own = process_attach();
  if (found->own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  CUdevice ordinal;
  result = device_of_context(found->own, context, &ordinal);
  if (result != CUDA_SUCCESS) return result;
  found->context = context;
  return target_device(found, ordinal);
}

bool stream_is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return DRIVER(USED(cuStreamIsCapturing)(stream, &status)) == CUDA_SUCCESS &&
         status != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool capture_hold(process *own, CUstream stream) {
  if (LIKELY(!stream_is_capturing(stream))) return false;
  process_lock(&own->capture_lock);
  if (stream_is_capturing(stream)) return true;
  process_unlock(&own->capture_lock);
  return false;
}

void capture_let_go(process *own) {
  process_unlock(&own->capture_lock);
}

bool context_is_capturing(void) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return DRIVER(USED(cuStreamIsCapturing)(STREAM_LEGACY, &status)) != CUDA_SUCCESS ||
         status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Pools let go of freed memory when work is waited for, and only this process can see it: other
// processes of the share wait for what is given back here. For programs without pools this is two
// loads.
static CUresult waited(CUresult result, uint64_t stream) {
  process *own = process_known();
  if (own != NULL && __atomic_load_n(&own->pools_may_shrink, __ATOMIC_RELAXED) != 0 && governed()) {
    pools_waited(own, stream);
  }
  return result;
}

// The program is about to wait: where its work ends is marked before, not when somebody looks.
static void waits_for(CUstream stream) {
  compute_state *all = governed() ? compute_governed() : NULL;
  if (all == NULL) return;
  if (stream == STREAM_LEGACY || stream == NULL) {
    marks_settle(all);
  } else {
    marks_settle_stream(all, stream);
  }
}

static void waits_for_all(void) {
  compute_state *all = governed() ? compute_governed() : NULL;
  if (all != NULL) marks_settle(all);
}

CUDA_WRAPPER(cuStreamSynchronize, (CUstream stream)) {
  waits_for(stream);
  return waited(REAL(cuStreamSynchronize)(stream), stream_identity(stream));
}

CUDA_WRAPPER(cuStreamSynchronize_ptsz, (CUstream stream)) {
  waits_for(per_thread(stream));
  return waited(REAL(cuStreamSynchronize_ptsz)(stream), stream_identity(per_thread(stream)));
}

CUDA_WRAPPER(cuEventSynchronize, (CUevent event)) {
  waits_for_all();
  return waited(REAL(cuEventSynchronize)(event), NO_STREAM);
}

CUDA_WRAPPER(cuCtxSynchronize, (void)) {
  waits_for_all();
  return waited(REAL(cuCtxSynchronize)(), EVERY_STREAM);
}

CUDA_WRAPPER(cuCtxSynchronize_v2, (CUcontext context)) {
  waits_for_all();
  return waited(REAL(cuCtxSynchronize_v2)(context), NO_STREAM);
}
