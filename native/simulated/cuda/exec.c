// SPDX-License-Identifier: Apache-2.0
// Executable graphs: instantiated, changed, launched.
//
// A launch goes through the nodes in an order that respects their dependencies and submits their
// work to the stream; kernels next to each other that take as many multiprocessors become one
// work, so that a large graph costs little more than a small one.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/graphs.h"

static unsigned last_exec_id;

#define KNOWN_FLAGS                                                                            \
  ((uint64_t)(CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |                                \
              CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH | \
              CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY))

CUresult exec_of(CUgraphExec handle, exec **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_EXEC)) return CUDA_ERROR_INVALID_VALUE;
  *found = (exec *)handle;
  return CUDA_SUCCESS;
}

// ---- instantiating -----------------------------------------------------------------------------

static CUresult sort_all(graph *sorted) {
  TRY(graph_sort(sorted));
  for (size_t i = 0; i < sorted->count; i++) {
    if (sorted->nodes[i]->child != NULL) TRY(sort_all(sorted->nodes[i]->child));
  }
  return CUDA_SUCCESS;
}

CUresult exec_sort(exec *changed) {
  return sort_all(changed->graph);
}

CUresult exec_make(const graph *from, uint64_t flags, exec **made) {
  if ((flags & ~KNOWN_FLAGS) != 0) return CUDA_ERROR_INVALID_VALUE;
  graph *own;
  TRY(graph_clone(from, &own));
  CUresult result = sort_all(own);
  LOCK();
  exec *added = result == CUDA_SUCCESS ? object_new(OBJECT_EXEC, sizeof(exec), NULL) : NULL;
  UNLOCK();
  if (added == NULL) {
    graph_free(own);
    return result != CUDA_SUCCESS ? result : CUDA_ERROR_OUT_OF_MEMORY;
  }
  added->id = ++last_exec_id;
  added->graph = own;
  added->flags = flags;
  *made = added;
  return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *handle, CUgraph from, uint64_t flags) {
  graph *wanted;
  TRY(graph_of(from, &wanted));
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  exec *made;
  TRY(exec_make(wanted, flags, &made));
  *handle = (CUgraphExec)made;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph from, unsigned long long flags) {
  return instantiate(handle, from, flags);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *handle, CUgraph from,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *wanted) {
  ENTER();
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  wanted->hErrNode_out = NULL;
  CUresult result = instantiate(handle, from, wanted->flags);
  wanted->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS
                       : result == CUDA_ERROR_INVALID_VALUE
                           ? CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
                           : CUDA_GRAPH_INSTANTIATE_ERROR;
  TRY(result);
  bool uploads = (wanted->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
  return uploads ? cuGraphUpload(*handle, wanted->hUploadStream) : CUDA_SUCCESS;
}

static CUresult instantiate_with_log(CUgraphExec *handle, CUgraph from, CUgraphNode *wrong,
                                     char *log, size_t size) {
  if (wrong != NULL) *wrong = NULL;
  if (log != NULL && size > 0) *log = '\0';
  return instantiate(handle, from, 0);
}

CUresult cuGraphInstantiate(CUgraphExec *handle, CUgraph from, CUgraphNode *wrong, char *log,
                            size_t size) {
  return instantiate_with_log(handle, from, wrong, log, size);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *handle, CUgraph from, CUgraphNode *wrong, char *log,
                               size_t size) {
  return instantiate_with_log(handle, from, wrong, log, size);
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  exec *dying;
  TRY(exec_of(handle, &dying));
  graph_free(dying->graph);
  LOCK();
  object_free(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuGraphExecGetFlags(CUgraphExec handle, uint64_t *flags) {
  exec *asked;
  TRY(exec_of(handle, &asked));
  if (flags == NULL) return CUDA_ERROR_INVALID_VALUE;
  *flags = asked->flags;
  return CUDA_SUCCESS;
}

CUresult cuGraphExecGetId(CUgraphExec handle, unsigned int *id) {
  exec *asked;
  TRY(exec_of(handle, &asked));
  if (id == NULL) return CUDA_ERROR_INVALID_VALUE;
  *id = asked->id;
  return CUDA_SUCCESS;
}

// ---- launching ---------------------------------------------------------------------------------

typedef struct launch {
  stream *target;
  uint64_t compute_ns;  // of kernels not yet submitted
  uint32_t sms;         // what each of them takes
  bool any_kernel;
} launch;

static void flush(launch *under_way) {
  if (!under_way->any_kernel) return;
  submit(under_way->target, &(submission){.kind = ALLOT_WORK_KERNEL,
                                          .sms = under_way->sms,
                                          .duration_ns = under_way->compute_ns});
  under_way->compute_ns = 0;
  under_way->any_kernel = false;
}

static CUresult run_all(launch *under_way, const graph *launched);

static CUresult free_memory(const node *next) {
  CUresult result = CUDA_SUCCESS;
  LOCK();
  range *freed = range_find(next->content.free.dptr);
  if (freed != NULL && freed->kind == RANGE_GRAPH && freed->base == next->content.free.dptr) {
    result = graph_memory_free_locked(freed);
  } else {
    result = CUDA_ERROR_INVALID_VALUE;
  }
  UNLOCK();
  return result;
}

static CUresult wait_for_event(launch *under_way, CUevent handle) {
  flush(under_way);
  if (!object_valid(handle, OBJECT_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  const event *waited = (event *)handle;
  if (allot_work_done(&driver.machine, waited->point)) return CUDA_SUCCESS;
  submit(under_way->target, &(submission){.kind = ALLOT_WORK_WAIT, .target = waited->point});
  return CUDA_SUCCESS;
}

static CUresult run_node(launch *under_way, const node *next) {
  switch (next->content.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      if (next->sms != under_way->sms) flush(under_way);
      under_way->sms = next->sms;
      under_way->compute_ns += next->duration_ns;
      under_way->any_kernel = true;
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      flush(under_way);
      return copy_on(under_way->target, &next->content.memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      CUDA_MEMSET_NODE_PARAMS fill;
      memcpy(&fill, &next->content.memset, sizeof fill);
      flush(under_way);
      return fill_on(under_way->target, &fill);
    }
    case CU_GRAPH_NODE_TYPE_HOST:
      flush(under_way);
      return callback_submit(under_way->target, next->content.host.fn, next->content.host.userData);
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return run_all(under_way, next->child);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: {
      flush(under_way);
      CUevent recorded = next->content.eventRecord.event;
      if (!object_valid(recorded, OBJECT_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
      return event_record((event *)recorded, under_way->target);
    }
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return wait_for_event(under_way, next->content.eventWait.event);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
      graph_memory_begin(next->memory);
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return free_memory(next);
    default:
      return CUDA_SUCCESS;
  }
}

static CUresult run_all(launch *under_way, const graph *launched) {
  for (size_t i = 0; i < launched->count; i++) {
    if (launched->order[i]->enabled) TRY(run_node(under_way, launched->order[i]));
  }
  return CUDA_SUCCESS;
}

CUresult exec_launch(exec *launched, stream *target) {
  bool frees_first = (launched->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0;
  TRY(graph_memory_prepare(launched->graph, frees_first));
  launch under_way = {.target = target};
  CUresult result = run_all(&under_way, launched->graph);
  flush(&under_way);
  return result;
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  exec *launched;
  stream *target;
  TRY(exec_of(handle, &launched));
  TRY(stream_of(stream_handle, &target));
  if (target->capture != NULL) return capture_child(target, (CUgraph)launched->graph);
  TRY(capture_forbids_legacy(target));
  return exec_launch(launched, target);
}

// Uploading places the graph's memory ahead of its first launch.
CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
  exec *uploaded;
  stream *target;
  TRY(exec_of(handle, &uploaded));
  TRY(stream_of(stream_handle, &target));
  if (target->capture != NULL) return capture_unsupported(target);
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeSetEnabled(CUgraphExec handle, CUgraphNode original, unsigned int enabled) {
  exec *changed;
  node *named;
  TRY(exec_of(handle, &changed));
  TRY(node_of(original, &named));
  node *own = graph_find_clone(changed->graph, named);
  if (own == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeType type = own->content.type;
  if (type != CU_GRAPH_NODE_TYPE_KERNEL && type != CU_GRAPH_NODE_TYPE_MEMCPY &&
      type != CU_GRAPH_NODE_TYPE_MEMSET) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  own->enabled = enabled != 0;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec handle, CUgraphNode original, unsigned int *enabled) {
  exec *asked;
  node *named;
  TRY(exec_of(handle, &asked));
  TRY(node_of(original, &named));
  const node *own = graph_find_clone(asked->graph, named);
  if (own == NULL || enabled == NULL) return CUDA_ERROR_INVALID_VALUE;
  *enabled = own->enabled;
  return CUDA_SUCCESS;
}

// ---- updating as a whole -----------------------------------------------------------------------

static bool same_dependencies(const node *one, const node *other) {
  if (one->before_count != other->before_count) return false;
  for (size_t i = 0; i < one->before_count; i++) {
    bool found = false;
    for (size_t j = 0; j < other->before_count && !found; j++) {
      found = one->before[i]->index == other->before[j]->index;
    }
    if (!found) return false;
  }
  return true;
}

static CUgraphExecUpdateResult compare(const graph *own, const graph *wanted, node **wrong) {
  *wrong = NULL;
  if (own->count != wanted->count) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  for (size_t i = 0; i < own->count; i++) {
    *wrong = wanted->nodes[i];
    if (own->nodes[i]->content.type != wanted->nodes[i]->content.type) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    }
    if (!same_dependencies(own->nodes[i], wanted->nodes[i])) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    if (own->nodes[i]->memory != wanted->nodes[i]->memory) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    }
    if (own->nodes[i]->child == NULL) continue;
    node *deeper;
    CUgraphExecUpdateResult result =
        compare(own->nodes[i]->child, wanted->nodes[i]->child, &deeper);
    if (result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return result;
  }
  *wrong = NULL;
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

bool exec_may_exchange(const graph *own, const graph *wanted) {
  node *wrong;
  return compare(own, wanted, &wrong) == CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph wanted_handle,
                              CUgraphExecUpdateResultInfo *info) {
  exec *changed;
  graph *wanted, *own;
  TRY(exec_of(handle, &changed));
  TRY(graph_of(wanted_handle, &wanted));
  if (info == NULL) return CUDA_ERROR_INVALID_VALUE;
  node *wrong;
  *info = (CUgraphExecUpdateResultInfo){.result = compare(changed->graph, wanted, &wrong)};
  info->errorNode = (CUgraphNode)wrong;
  if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  TRY(graph_clone(wanted, &own));
  CUresult result = sort_all(own);
  if (result != CUDA_SUCCESS) {
    graph_free(own);
    return result;
  }
  // Changes are asked for by the nodes of the graph that was instantiated, in their places.
  for (size_t i = 0; i < own->count; i++) {
    own->nodes[i]->original_id = changed->graph->nodes[i]->original_id;
  }
  graph_free(changed->graph);
  changed->graph = own;
  return CUDA_SUCCESS;
}

CUresult cuGraphExecUpdate(CUgraphExec handle, CUgraph wanted, CUgraphNode *wrong,
                           CUgraphExecUpdateResult *result) {
  CUgraphExecUpdateResultInfo info;
  CUresult done = cuGraphExecUpdate_v2(handle, wanted, &info);
  if (done != CUDA_SUCCESS && done != CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) return done;
  if (wrong != NULL) *wrong = info.errorNode;
  if (result != NULL) *result = info.result;
  return done;
}
