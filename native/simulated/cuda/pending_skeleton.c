// SPDX-License-Identifier: Apache-2.0
// Stand-ins until pools, graphs, arrays and sharing are there.
#include "simulated/cuda/driver.h"
CUresult capture_forbids(context *c) {
  return CUDA_SUCCESS;
}
CUresult capture_forbids_waiting(stream *s) {
  return CUDA_SUCCESS;
}
CUresult capture_forbids_legacy(stream *s) {
  return CUDA_SUCCESS;
}
CUresult capture_unsupported(stream *s) {
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
void capture_abandon(stream *s) {}
CUresult capture_event_record(stream *t, event *e, unsigned f) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult capture_event_wait(stream *t, event *e, unsigned f) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult capture_host(stream *t, CUhostFn f, void *d) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult capture_copy(stream *t, const CUDA_MEMCPY3D *c) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult capture_fill(stream *t, const CUDA_MEMSET_NODE_PARAMS *c) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult capture_kernel(stream *t, const CUlaunchConfig *c, CUfunction h, function *l, void **p,
                        void **e) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
void pools_reset(int gpu) {}
void pools_release_surplus(int gpu) {}
CUresult pool_free_locked(range *freed, stream *after) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult graph_memory_free_locked(range *freed) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
void imported_free_locked(range *freed) {}
bool shared_event_make(event *made) {
  return false;
}
void shared_event_release(event *dying) {}
void shared_event_record(event *recorded, allot_point point) {}
allot_point shared_event_point(const event *asked) {
  return 0;
}
CUresult array_of(CUarray handle, array **found) {
  return CUDA_ERROR_INVALID_HANDLE;
}
size_t array_element_bytes(CUarray handle) {
  return 1;
}
