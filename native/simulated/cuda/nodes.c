// SPDX-License-Identifier: Apache-2.0
// What nodes do: filling them in, and the entry point that adds a node of any type.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/graphs.h"
#include "simulated/cuda/pool.h"

// The first argument is known where it is a duration; the others have unknown sizes and are zeros.
static CUresult keep_arguments(node *filled, uint64_t first) {
  arguments *kept = calloc(1, sizeof *kept);
  if (kept == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  for (size_t i = 0; i < sizeof kept->pointers / sizeof *kept->pointers; i++) {
    kept->pointers[i] = i == 0 ? &kept->first : &kept->rest[i];
  }
  kept->first = first;
  free(filled->arguments);
  filled->arguments = kept;
  filled->content.kernel.kernelParams = kept->pointers;
  filled->content.kernel.extra = NULL;
  return CUDA_SUCCESS;
}

CUresult node_copy_arguments(node *to, const node *from) {
  return keep_arguments(to, from->arguments->first);
}

static CUresult fill_kernel(node *filled, const CUgraphNodeParams *content) {
  const CUDA_KERNEL_NODE_PARAMS_v3 *wanted = &content->kernel;
  function *launched;
  CUfunction handle = wanted->func != NULL ? wanted->func : (CUfunction)wanted->kern;
  TRY(function_of(handle, &launched));
  CUlaunchConfig config = {.gridDimX = wanted->gridDimX,
                           .gridDimY = wanted->gridDimY,
                           .gridDimZ = wanted->gridDimZ,
                           .blockDimX = wanted->blockDimX,
                           .blockDimY = wanted->blockDimY,
                           .blockDimZ = wanted->blockDimZ,
                           .sharedMemBytes = wanted->sharedMemBytes};
  TRY(launch_check(launched->module->owner, &config));
  // The parameters may be this node's own, as it gave them out.
  uint64_t duration_ns = function_duration_ns(launched, wanted->kernelParams, wanted->extra);
  filled->content = *content;
  filled->duration_ns = launch_ns(launched->module->owner, &config, duration_ns);
  filled->sms = launch_sms(launched->module->owner, &config);
  TRY(keep_arguments(filled, duration_ns));
  if (filled->content.kernel.ctx == NULL) {
    filled->content.kernel.ctx = (CUcontext)launched->module->owner;
  }
  return CUDA_SUCCESS;
}

static CUresult fill_child(node *filled, const CUgraphNodeParams *content) {
  graph *wanted, *own;
  TRY(graph_of(content->graph.graph, &wanted));
  if (content->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) {
    if (wanted->is_child || wanted == filled->owner) return CUDA_ERROR_INVALID_VALUE;
    own = wanted;
  } else {
    TRY(graph_clone(wanted, &own));
  }
  if (filled->child != NULL) graph_free(filled->child);
  own->is_child = true;
  filled->child = own;
  filled->content = *content;
  filled->content.graph.graph = (CUgraph)own;
  return CUDA_SUCCESS;
}

static CUresult fill_allocation(node *filled, const CUgraphNodeParams *content) {
  const CUDA_MEM_ALLOC_NODE_PARAMS_v2 *wanted = &content->alloc;
  if (wanted->bytesize == 0 || wanted->poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
      wanted->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      wanted->poolProps.handleTypes != CU_MEM_HANDLE_TYPE_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int gpu;
  TRY(driver_gpu(wanted->poolProps.location.id, &gpu));
  TRY(graph_memory_new(gpu, wanted->bytesize, &filled->memory));
  filled->content = *content;
  filled->content.alloc.dptr = filled->memory->address;
  // The list of who may reach the memory is the caller's to keep.
  filled->content.alloc.accessDescs = NULL;
  filled->content.alloc.accessDescCount = 0;
  return CUDA_SUCCESS;
}

static CUresult fill_free(node *filled, const CUgraphNodeParams *content) {
  graph_memory *freed = graph_memory_at(filled->owner, content->free.dptr);
  // Memory that another graph allocated may be freed here too; its range tells when it runs.
  if (freed != NULL) {
    filled->memory = freed;
    freed->references++;
  }
  filled->content = *content;
  return CUDA_SUCCESS;
}

static CUresult fill_event(node *filled, const CUgraphNodeParams *content, CUevent handle) {
  if (!object_valid(handle, OBJECT_EVENT)) return CUDA_ERROR_INVALID_VALUE;
  filled->content = *content;
  return CUDA_SUCCESS;
}

CUresult node_fill(node *filled, const CUgraphNodeParams *content) {
  switch (content->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return fill_kernel(filled, content);
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return fill_child(filled, content);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
      return fill_allocation(filled, content);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return fill_free(filled, content);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return fill_event(filled, content, content->eventRecord.event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return fill_event(filled, content, content->eventWait.event);
    case CU_GRAPH_NODE_TYPE_HOST:
      if (content->host.fn == NULL) return CUDA_ERROR_INVALID_VALUE;
      filled->content = *content;
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_EMPTY:
      filled->content = *content;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult node_add(graph *into, const dependencies *before, CUgraphNodeParams *content,
                  node **made) {
  node *added;
  TRY(node_new(into, content->type, before, &added));
  CUresult result = node_fill(added, content);
  if (result != CUDA_SUCCESS) {
    node_free(added);
    return result;
  }
  if (content->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
    content->alloc.dptr = added->content.alloc.dptr;
  if (content->type == CU_GRAPH_NODE_TYPE_GRAPH) content->graph = added->content.graph;
  *made = added;
  return CUDA_SUCCESS;
}

CUgraphNodeParams node_kernel(const CUlaunchConfig *config, CUfunction handle, void **parameters,
                              void **extra) {
  return (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_KERNEL,
                             .kernel = {.func = handle,
                                        .gridDimX = config->gridDimX,
                                        .gridDimY = config->gridDimY,
                                        .gridDimZ = config->gridDimZ,
                                        .blockDimX = config->blockDimX,
                                        .blockDimY = config->blockDimY,
                                        .blockDimZ = config->blockDimZ,
                                        .sharedMemBytes = config->sharedMemBytes,
                                        .kernelParams = parameters,
                                        .extra = extra}};
}

// ---- adding ------------------------------------------------------------------------------------

static CUresult add(CUgraphNode *handle, CUgraph into_handle, const CUgraphNode *before,
                    const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *content) {
  graph *into;
  TRY(graph_of(into_handle, &into));
  if (handle == NULL || content == NULL || (before == NULL && count > 0)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Handles are pointers to nodes, so the list can be read as it is.
  dependencies wanted = {(node **)(uintptr_t)before, edges, count};
  node *made;
  TRY(node_add(into, &wanted, content, &made));
  *handle = (CUgraphNode)made;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddNode_v2(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                           const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *content) {
  return add(handle, into, before, edges, count, content);
}

CUresult cuGraphAddNode_v3(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                           const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *content) {
  return add(handle, into, before, edges, count, content);
}

CUresult cuGraphAddNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before, size_t count,
                        CUgraphNodeParams *content) {
  return add(handle, into, before, NULL, count, content);
}

static CUDA_KERNEL_NODE_PARAMS_v3 from_old_kernel(const CUDA_KERNEL_NODE_PARAMS_v1 *old) {
  return (CUDA_KERNEL_NODE_PARAMS_v3){.func = old->func,
                                      .gridDimX = old->gridDimX,
                                      .gridDimY = old->gridDimY,
                                      .gridDimZ = old->gridDimZ,
                                      .blockDimX = old->blockDimX,
                                      .blockDimY = old->blockDimY,
                                      .blockDimZ = old->blockDimZ,
                                      .sharedMemBytes = old->sharedMemBytes,
                                      .kernelParams = old->kernelParams,
                                      .extra = old->extra};
}

static CUDA_KERNEL_NODE_PARAMS_v3 from_kernel(const CUDA_KERNEL_NODE_PARAMS *wanted) {
  CUDA_KERNEL_NODE_PARAMS_v3 same;
  _Static_assert(sizeof same == sizeof *wanted, "the third form only fixed the second's alignment");
  memcpy(&same, wanted, sizeof same);
  return same;
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                                 size_t count, const CUDA_KERNEL_NODE_PARAMS *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = from_kernel(wanted)};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddKernelNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                              size_t count, const CUDA_KERNEL_NODE_PARAMS_v1 *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_KERNEL,
                               .kernel = from_old_kernel(wanted)};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                              size_t count, const CUDA_MEMCPY3D *copy, CUcontext owner) {
  if (copy == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_MEMCPY,
                               .memcpy = {.copyCtx = owner, .copyParams = *copy}};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddMemsetNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                              size_t count, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext owner) {
  if (fill == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_MEMSET,
                               .memset = {.dst = fill->dst,
                                          .pitch = fill->pitch,
                                          .value = fill->value,
                                          .elementSize = fill->elementSize,
                                          .width = fill->width,
                                          .height = fill->height,
                                          .ctx = owner}};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddHostNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                            size_t count, const CUDA_HOST_NODE_PARAMS *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_HOST,
                               .host = {.fn = wanted->fn, .userData = wanted->userData}};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                                  size_t count, CUgraph child) {
  CUgraphNodeParams content = {
      .type = CU_GRAPH_NODE_TYPE_GRAPH,
      .graph = {.graph = child, .ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE}};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddEmptyNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                             size_t count) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_EMPTY};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddEventRecordNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                                   size_t count, CUevent recorded) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                               .eventRecord = {.event = recorded}};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddEventWaitNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                                 size_t count, CUevent waited) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                               .eventWait = {.event = waited}};
  return add(handle, into, before, NULL, count, &content);
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                                size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC,
                               .alloc = {.poolProps = wanted->poolProps,
                                         .accessDescs = wanted->accessDescs,
                                         .accessDescCount = wanted->accessDescCount,
                                         .bytesize = wanted->bytesize}};
  TRY(add(handle, into, before, NULL, count, &content));
  wanted->dptr = content.alloc.dptr;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *handle, CUgraph into, const CUgraphNode *before,
                               size_t count, CUdeviceptr address) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .free = {.dptr = address}};
  return add(handle, into, before, NULL, count, &content);
}
