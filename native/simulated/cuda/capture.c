// SPDX-License-Identifier: Apache-2.0
// What happens to work and waits while streams are being captured.
#include "simulated/cuda/capture.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t captures_lock = PTHREAD_MUTEX_INITIALIZER;
static capture *captures;
static unsigned capture_count;
static uint64_t last_capture_id;

// What this thread lets itself do while others capture.
static __thread CUstreamCaptureMode own_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static uint64_t thread_id(void) {
  return (uint64_t)syscall(SYS_gettid);
}

bool capture_any(void) {
  return __atomic_load_n(&capture_count, __ATOMIC_ACQUIRE) > 0;
}

capture *capture_by_id(uint64_t id) {
  pthread_mutex_lock(&captures_lock);
  capture *found = captures;
  while (found != NULL && found->id != id) found = found->next;
  pthread_mutex_unlock(&captures_lock);
  return found;
}

void capture_invalidate(capture *failed) {
  failed->invalid = true;
}

// ---- who takes part ----------------------------------------------------------------------------

CUresult capture_set_tips(stream *target, node *const *tips, size_t count) {
  node **copy = malloc((count + 1) * sizeof *copy);
  if (copy == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  if (count > 0) memcpy(copy, tips, count * sizeof *copy);
  free(target->tips);
  target->tips = copy;
  target->tip_count = count;
  return CUDA_SUCCESS;
}

CUresult capture_add_tips(stream *target, node *const *tips, size_t count) {
  node **joined = malloc((target->tip_count + count + 1) * sizeof *joined);
  if (joined == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  size_t total = 0;
  for (size_t i = 0; i < target->tip_count; i++) joined[total++] = target->tips[i];
  for (size_t i = 0; i < count; i++) {
    bool known = false;
    for (size_t j = 0; j < total && !known; j++) known = joined[j] == tips[i];
    if (!known) joined[total++] = tips[i];
  }
  free(target->tips);
  target->tips = joined;
  target->tip_count = total;
  return CUDA_SUCCESS;
}

CUresult capture_join(stream *joined, capture *into) {
  stream **more = realloc(into->streams, (into->stream_count + 1) * sizeof *more);
  if (more == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  into->streams = more;
  into->streams[into->stream_count++] = joined;
  joined->capture = into;
  return CUDA_SUCCESS;
}

static void leave(stream *left) {
  left->capture = NULL;
  free(left->tips);
  left->tips = NULL;
  left->tip_count = 0;
}

void capture_abandon(stream *dying) {
  capture *own = dying->capture;
  if (own == NULL) return;
  capture_invalidate(own);
  for (size_t i = 0; i < own->stream_count; i++) {
    if (own->streams[i] == dying) own->streams[i] = own->streams[--own->stream_count];
  }
  leave(dying);
}

void capture_forget_event(event *forgotten) {
  free(forgotten->captured);
  forgotten->captured = NULL;
  forgotten->captured_count = 0;
}

// ---- beginning and ending ----------------------------------------------------------------------

static CUresult begin(stream *origin, graph *into, CUstreamCaptureMode mode) {
  if (origin->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (origin->capture != NULL) return CUDA_ERROR_ILLEGAL_STATE;
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  capture *made = calloc(1, sizeof *made);
  graph *own = into == NULL && made != NULL ? graph_new() : into;
  if (own == NULL) {
    free(made);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  made->graph = own;
  made->own_graph = into == NULL;
  made->mode = mode;
  made->thread = thread_id();
  made->origin = origin;
  made->first_local_id = own->last_local_id;
  pthread_mutex_lock(&captures_lock);
  made->id = ++last_capture_id;
  made->next = captures;
  captures = made;
  __atomic_add_fetch(&capture_count, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&captures_lock);
  return capture_join(origin, made);
}

// Every node that was captured and that nothing depends on must be a tip of the origin.
static bool all_joined(const capture *ended) {
  const graph *own = ended->graph;
  bool *needed = calloc(own->count + 1, sizeof *needed);
  if (needed == NULL) return false;
  for (size_t i = 0; i < own->count; i++) {
    for (size_t j = 0; j < own->nodes[i]->before_count; j++) {
      needed[own->nodes[i]->before[j]->index] = true;
    }
  }
  for (size_t i = 0; i < ended->origin->tip_count; i++) {
    needed[ended->origin->tips[i]->index] = true;
  }
  bool joined = true;
  for (size_t i = 0; i < own->count; i++) {
    if (own->nodes[i]->local_id > ended->first_local_id && !needed[i]) joined = false;
  }
  free(needed);
  return joined;
}

static void finish(capture *ended) {
  pthread_mutex_lock(&captures_lock);
  capture **at = &captures;
  while (*at != ended) at = &(*at)->next;
  *at = ended->next;
  __atomic_sub_fetch(&capture_count, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&captures_lock);
  for (size_t i = 0; i < ended->stream_count; i++) leave(ended->streams[i]);
  free(ended->streams);
  free(ended);
}

static CUresult end(stream *origin, CUgraph *handle) {
  capture *ended = origin->capture;
  if (ended == NULL) return CUDA_ERROR_ILLEGAL_STATE;
  if (ended->origin != origin) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (ended->mode != CU_STREAM_CAPTURE_MODE_RELAXED && ended->thread != thread_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  CUresult result = CUDA_SUCCESS;
  if (ended->invalid) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (ended->wanted_nodes != 0 && ended->wanted_nodes != ended->graph->count) {
    result = CUDA_ERROR_GRAPH_RECAPTURE_FAILURE;
  } else if (!all_joined(ended)) {
    result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  }
  graph *own = ended->graph;
  bool drops = result != CUDA_SUCCESS && ended->own_graph;
  finish(ended);
  if (drops) graph_free(own);
  *handle = result == CUDA_SUCCESS ? (CUgraph)own : NULL;
  return result;
}

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  stream *origin;
  TRY(stream_of(handle, &origin));
  return begin(origin, NULL, mode);
}

CUresult cuStreamBeginCapture(CUstream handle) {
  return cuStreamBeginCapture_v2(handle, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph into, const CUgraphNode *before,
                                     const CUgraphEdgeData *edges, size_t count,
                                     CUstreamCaptureMode mode) {
  stream *origin;
  graph *wanted;
  TRY(stream_of(handle, &origin));
  TRY(graph_of(into, &wanted));
  if (before == NULL && count > 0) return CUDA_ERROR_INVALID_VALUE;
  TRY(begin(origin, wanted, mode));
  return capture_set_tips(origin, (node *const *)(uintptr_t)before, count);
}

static bool has_memory_nodes(const graph *read) {
  for (size_t i = 0; i < read->count; i++) {
    if (read->nodes[i]->memory != NULL) return true;
  }
  return false;
}

// The nodes are made anew, where a driver keeps them; only their number is compared. The callback
// is for differences of parameters, which this driver does not look for.
CUresult cuStreamBeginRecaptureToGraph(CUstream handle, CUstreamCaptureMode mode, CUgraph into,
                                       CUgraphRecaptureCallback callback, void *data) {
  stream *origin;
  graph *wanted;
  TRY(stream_of(handle, &origin));
  TRY(graph_of(into, &wanted));
  if (wanted->count == 0) return CUDA_ERROR_INVALID_VALUE;
  if (has_memory_nodes(wanted)) return CUDA_ERROR_NOT_SUPPORTED;
  size_t count = wanted->count;
  TRY(begin(origin, wanted, mode));
  while (wanted->count > 0) node_free(wanted->nodes[wanted->count - 1]);
  origin->capture->wanted_nodes = count;
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *captured) {
  stream *origin;
  TRY(stream_of(handle, &origin));
  if (captured == NULL) return CUDA_ERROR_INVALID_VALUE;
  return end(origin, captured);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  if (mode == NULL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  CUstreamCaptureMode before = own_mode;
  own_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

// ---- what captures do not allow ----------------------------------------------------------------

// May this thread not do what could disturb the capture?
static bool forbids(const capture *other, uint64_t self) {
  if (own_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  if (other->mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  if (other->thread == self) return true;
  return own_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && other->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult capture_forbids(context *current) {
  if (!capture_any()) return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  uint64_t self = thread_id();
  pthread_mutex_lock(&captures_lock);
  for (capture *other = captures; other != NULL; other = other->next) {
    if (!forbids(other, self)) continue;
    capture_invalidate(other);
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  pthread_mutex_unlock(&captures_lock);
  return result;
}

CUresult capture_unsupported(stream *target) {
  capture_invalidate(target->capture);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult capture_forbids_waiting(stream *waited) {
  return waited->capture != NULL ? capture_unsupported(waited) : CUDA_SUCCESS;
}

CUresult capture_forbids_legacy(stream *target) {
  if (!target->legacy || !capture_any()) return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&captures_lock);
  for (capture *other = captures; other != NULL; other = other->next) {
    for (size_t i = 0; i < other->stream_count; i++) {
      const stream *captured = other->streams[i];
      if (captured->owner != target->owner || (captured->flags & CU_STREAM_NON_BLOCKING)) continue;
      capture_invalidate(other);
      result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  pthread_mutex_unlock(&captures_lock);
  return result;
}

// ---- what becomes a node -----------------------------------------------------------------------

static CUresult record(stream *target, CUgraphNodeParams *content) {
  capture *into = target->capture;
  if (into->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  dependencies before = {target->tips, NULL, target->tip_count};
  node *made;
  CUresult result = node_add(into->graph, &before, content, &made);
  if (result != CUDA_SUCCESS) {
    capture_invalidate(into);
    return result;
  }
  return capture_set_tips(target, &made, 1);
}

CUresult capture_kernel(stream *target, const CUlaunchConfig *config, CUfunction handle,
                        function *launched, void **parameters, void **extra) {
  CUgraphNodeParams content = node_kernel(config, handle, parameters, extra);
  return record(target, &content);
}

CUresult capture_host(stream *target, CUhostFn called, void *data) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_HOST,
                               .host = {.fn = called, .userData = data}};
  return record(target, &content);
}

CUresult capture_copy(stream *target, const CUDA_MEMCPY3D *copy) {
  CUgraphNodeParams content = {
      .type = CU_GRAPH_NODE_TYPE_MEMCPY,
      .memcpy = {.copyCtx = (CUcontext)target->owner, .copyParams = *copy}};
  return record(target, &content);
}

CUresult capture_fill(stream *target, const CUDA_MEMSET_NODE_PARAMS *fill) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_MEMSET,
                               .memset = {.dst = fill->dst,
                                          .pitch = fill->pitch,
                                          .value = fill->value,
                                          .elementSize = fill->elementSize,
                                          .width = fill->width,
                                          .height = fill->height,
                                          .ctx = (CUcontext)target->owner}};
  return record(target, &content);
}

CUresult capture_child(stream *target, CUgraph child) {
  CUgraphNodeParams content = {
      .type = CU_GRAPH_NODE_TYPE_GRAPH,
      .graph = {.graph = child, .ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE}};
  return record(target, &content);
}

CUresult capture_allocate(stream *target, struct pool *from, uint64_t size, CUdeviceptr *address) {
  CUgraphNodeParams content = {
      .type = CU_GRAPH_NODE_TYPE_MEM_ALLOC,
      .alloc = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE,
                                           .id = target->owner->ordinal}},
                .bytesize = size}};
  TRY(record(target, &content));
  *address = content.alloc.dptr;
  return CUDA_SUCCESS;
}

CUresult capture_free(stream *target, CUdeviceptr address) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .free = {.dptr = address}};
  return record(target, &content);
}

// ---- events ------------------------------------------------------------------------------------

CUresult capture_event_record(stream *target, event *recorded, unsigned flags) {
  if (flags & CU_EVENT_RECORD_EXTERNAL) {
    CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                                 .eventRecord = {.event = (CUevent)recorded}};
    return record(target, &content);
  }
  if (target->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  node **tips = malloc((target->tip_count + 1) * sizeof *tips);
  if (tips == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  if (target->tip_count > 0) memcpy(tips, target->tips, target->tip_count * sizeof *tips);
  capture_forget_event(recorded);
  recorded->captured = tips;
  recorded->captured_count = target->tip_count;
  recorded->capture_id = target->capture->id;
  return CUDA_SUCCESS;
}

static CUresult wait_for_outside(stream *target, event *waited, unsigned flags) {
  if (flags & CU_EVENT_WAIT_EXTERNAL) {
    CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                                 .eventWait = {.event = (CUevent)waited}};
    return record(target, &content);
  }
  if (waited->point == 0) return CUDA_SUCCESS;  // never recorded: nothing to wait for
  capture_invalidate(target->capture);
  return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
}

CUresult capture_event_wait(stream *target, event *waited, unsigned flags) {
  if (waited->captured == NULL) return wait_for_outside(target, waited, flags);
  capture *other = capture_by_id(waited->capture_id);
  if (other == NULL) return CUDA_ERROR_CAPTURED_EVENT;
  if (target->capture == NULL) {
    if (target->legacy) {
      capture_invalidate(other);
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    TRY(capture_join(target, other));
  } else if (target->capture != other) {
    capture_invalidate(target->capture);
    capture_invalidate(other);
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  return capture_add_tips(target, waited->captured, waited->captured_count);
}
