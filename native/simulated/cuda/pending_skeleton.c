// SPDX-License-Identifier: Apache-2.0
// Stand-ins until graphs are there.
#include "simulated/cuda/driver.h"
CUresult capture_forbids(context *c) { return CUDA_SUCCESS; }
CUresult capture_forbids_waiting(stream *s) { return CUDA_SUCCESS; }
CUresult capture_forbids_legacy(stream *s) { return CUDA_SUCCESS; }
CUresult capture_unsupported(stream *s) { return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; }
void capture_abandon(stream *s) {}
CUresult capture_event_record(stream *t, event *e, unsigned f) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult capture_event_wait(stream *t, event *e, unsigned f) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult capture_host(stream *t, CUhostFn f, void *d) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult capture_copy(stream *t, const CUDA_MEMCPY3D *c) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult capture_fill(stream *t, const CUDA_MEMSET_NODE_PARAMS *c) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult capture_kernel(stream *t, const CUlaunchConfig *c, CUfunction h, function *l, void **p, void **e) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult graph_memory_free_locked(range *freed) { return CUDA_ERROR_NOT_SUPPORTED; }
void graph_memory_reset(int gpu) {}
CUresult capture_allocate(stream *t, struct pool *f, uint64_t s, CUdeviceptr *a) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult capture_free(stream *t, CUdeviceptr a) { return CUDA_ERROR_NOT_SUPPORTED; }
