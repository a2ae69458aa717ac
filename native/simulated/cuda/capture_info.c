// SPDX-License-Identifier: Apache-2.0
// Asking about a capture under way, and changing what comes next in it.
#include "simulated/cuda/capture.h"

static CUstreamCaptureStatus status_of(const stream *asked) {
  if (asked->capture == NULL) return CU_STREAM_CAPTURE_STATUS_NONE;
  return asked->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                 : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

// Of the legacy stream there is no telling while a stream that it synchronises with is captured.
static CUresult ask(CUstream handle, stream **asked) {
  TRY(stream_of(handle, asked));
  return capture_any() ? capture_forbids_legacy(*asked) : CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
  stream *asked;
  TRY(ask(handle, &asked));
  if (status == NULL) return CUDA_ERROR_INVALID_VALUE;
  *status = status_of(asked);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id,
                                   CUgraph *into, const CUgraphNode **before,
                                   const CUgraphEdgeData **edges, size_t *count) {
  stream *asked;
  TRY(ask(handle, &asked));
  if (status == NULL) return CUDA_ERROR_INVALID_VALUE;
  *status = status_of(asked);
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  if (id != NULL) *id = asked->capture->id;
  if (into != NULL) *into = (CUgraph)asked->capture->graph;
  // Handles are pointers to nodes, so the stream's own list can be given out.
  if (before != NULL) *before = (const CUgraphNode *)(uintptr_t)asked->tips;
  if (edges != NULL) *edges = NULL;
  if (count != NULL) *count = asked->tip_count;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id,
                                   CUgraph *into, const CUgraphNode **before, size_t *count) {
  return cuStreamGetCaptureInfo_v3(handle, status, id, into, before, NULL, count);
}

CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id) {
  return cuStreamGetCaptureInfo_v3(handle, status, id, NULL, NULL, NULL, NULL);
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode *nodes,
                                              const CUgraphEdgeData *edges, size_t count,
                                              unsigned int flags) {
  stream *changed;
  TRY(stream_of(handle, &changed));
  if (nodes == NULL && count > 0) return CUDA_ERROR_INVALID_VALUE;
  if (changed->capture == NULL) return CUDA_ERROR_ILLEGAL_STATE;
  for (size_t i = 0; i < count; i++) {
    node *named;
    TRY(node_of(nodes[i], &named));
    if (named->owner != changed->capture->graph) return CUDA_ERROR_INVALID_VALUE;
  }
  node *const *tips = (node *const *)(uintptr_t)nodes;
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) return capture_set_tips(changed, tips, count);
  return flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES ? capture_add_tips(changed, tips, count)
                                                     : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode *nodes, size_t count,
                                           unsigned int flags) {
  return cuStreamUpdateCaptureDependencies_v2(handle, nodes, NULL, count, flags);
}
