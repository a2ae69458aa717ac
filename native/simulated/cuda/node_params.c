// SPDX-License-Identifier: Apache-2.0
// Reading and changing what nodes do, in graphs and in executable graphs.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/graphs.h"

static CUresult node_as(CUgraphNode handle, CUgraphNodeType type, node **found) {
  TRY(node_of(handle, found));
  return (*found)->content.type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Refused changes leave the node as it was.
static CUresult set(node *changed, const CUgraphNodeParams *content) {
  if (changed->content.type != content->type) return CUDA_ERROR_INVALID_VALUE;
  if (content->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
      content->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return node_fill(changed, content);
}

static CUresult set_in_exec(CUgraphExec handle, CUgraphNode original,
                            const CUgraphNodeParams *content) {
  exec *changed;
  node *named;
  TRY(exec_of(handle, &changed));
  TRY(node_of(original, &named));
  node *own = graph_find_clone(changed->graph, named);
  if (own == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (own->child != NULL && content->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    graph *wanted;
    TRY(graph_of(content->graph.graph, &wanted));
    if (!exec_may_exchange(own->child, wanted)) return CUDA_ERROR_INVALID_VALUE;
  }
  return set(own, content);
}

CUresult cuGraphNodeGetParams(CUgraphNode handle, CUgraphNodeParams *content) {
  node *asked;
  TRY(node_of(handle, &asked));
  if (content == NULL) return CUDA_ERROR_INVALID_VALUE;
  *content = asked->content;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeSetParams(CUgraphNode handle, CUgraphNodeParams *content) {
  node *changed;
  TRY(node_of(handle, &changed));
  return content != NULL ? set(changed, content) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphNodeSetParams_v2(CUgraphNode handle, CUgraphNodeParams *content) {
  return cuGraphNodeSetParams(handle, content);
}

CUresult cuGraphExecNodeSetParams(CUgraphExec handle, CUgraphNode original,
                                  CUgraphNodeParams *content) {
  return content != NULL ? set_in_exec(handle, original, content) : CUDA_ERROR_INVALID_VALUE;
}

// ---- kernels -----------------------------------------------------------------------------------

static CUgraphNodeParams with_kernel(const CUDA_KERNEL_NODE_PARAMS *wanted) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
  memcpy(&content.kernel, wanted, sizeof content.kernel);
  return content;
}

static CUDA_KERNEL_NODE_PARAMS from_first_form(const CUDA_KERNEL_NODE_PARAMS_v1 *old) {
  CUDA_KERNEL_NODE_PARAMS wanted = {0};
  _Static_assert(offsetof(CUDA_KERNEL_NODE_PARAMS, kern) >= sizeof *old,
                 "the first form begins it");
  memcpy(&wanted, old, sizeof *old);
  return wanted;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *wanted) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_KERNEL, &asked));
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  memcpy(wanted, &asked->content.kernel, sizeof *wanted);
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS_v1 *wanted) {
  CUDA_KERNEL_NODE_PARAMS whole;
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  TRY(cuGraphKernelNodeGetParams_v2(handle, &whole));
  memcpy(wanted, &whole, sizeof *wanted);
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = with_kernel(wanted);
  return cuGraphNodeSetParams(handle, &content);
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS_v1 *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUDA_KERNEL_NODE_PARAMS whole = from_first_form(wanted);
  return cuGraphKernelNodeSetParams_v2(handle, &whole);
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec handle, CUgraphNode original,
                                           const CUDA_KERNEL_NODE_PARAMS *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = with_kernel(wanted);
  return set_in_exec(handle, original, &content);
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec handle, CUgraphNode original,
                                        const CUDA_KERNEL_NODE_PARAMS_v1 *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUDA_KERNEL_NODE_PARAMS whole = from_first_form(wanted);
  return cuGraphExecKernelNodeSetParams_v2(handle, original, &whole);
}

static bool known_attribute(CUlaunchAttributeID attribute) {
  return (int)attribute > 0 && attribute < CU_LAUNCH_ATTRIBUTE_MAX;
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUlaunchAttributeID attribute,
                                       CUlaunchAttributeValue *value) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_KERNEL, &asked));
  if (value == NULL || !known_attribute(attribute)) return CUDA_ERROR_INVALID_VALUE;
  memset(value, 0, sizeof *value);
  if (asked->attributes != NULL) *value = asked->attributes[attribute];
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUlaunchAttributeID attribute,
                                       const CUlaunchAttributeValue *value) {
  node *changed;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_KERNEL, &changed));
  if (value == NULL || !known_attribute(attribute)) return CUDA_ERROR_INVALID_VALUE;
  if (changed->attributes == NULL) {
    changed->attributes = calloc(CU_LAUNCH_ATTRIBUTE_MAX, sizeof *changed->attributes);
  }
  if (changed->attributes == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  changed->attributes[attribute] = *value;
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
  node *target, *source;
  TRY(node_as(to, CU_GRAPH_NODE_TYPE_KERNEL, &target));
  TRY(node_as(from, CU_GRAPH_NODE_TYPE_KERNEL, &source));
  for (int i = 1; source->attributes != NULL && i < CU_LAUNCH_ATTRIBUTE_MAX; i++) {
    TRY(cuGraphKernelNodeSetAttribute(to, (CUlaunchAttributeID)i, &source->attributes[i]));
  }
  return CUDA_SUCCESS;
}

// ---- copies and fills --------------------------------------------------------------------------

static CUgraphNodeParams with_copy(const CUDA_MEMCPY3D *copy, CUcontext owner) {
  return (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_MEMCPY,
                             .memcpy = {.copyCtx = owner, .copyParams = *copy}};
}

static CUgraphNodeParams with_fill(const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext owner) {
  return (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_MEMSET,
                             .memset = {.dst = fill->dst,
                                        .pitch = fill->pitch,
                                        .value = fill->value,
                                        .elementSize = fill->elementSize,
                                        .width = fill->width,
                                        .height = fill->height,
                                        .ctx = owner}};
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D *copy) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_MEMCPY, &asked));
  if (copy == NULL) return CUDA_ERROR_INVALID_VALUE;
  *copy = asked->content.memcpy.copyParams;
  return CUDA_SUCCESS;
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode handle, const CUDA_MEMCPY3D *copy) {
  node *changed;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_MEMCPY, &changed));
  if (copy == NULL) return CUDA_ERROR_INVALID_VALUE;
  changed->content.memcpy.copyParams = *copy;
  return CUDA_SUCCESS;
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec handle, CUgraphNode original,
                                        const CUDA_MEMCPY3D *copy, CUcontext owner) {
  if (copy == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = with_copy(copy, owner);
  return set_in_exec(handle, original, &content);
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS *fill) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_MEMSET, &asked));
  if (fill == NULL) return CUDA_ERROR_INVALID_VALUE;
  memcpy(fill, &asked->content.memset, sizeof *fill);
  return CUDA_SUCCESS;
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode handle, const CUDA_MEMSET_NODE_PARAMS *fill) {
  node *changed;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_MEMSET, &changed));
  if (fill == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = with_fill(fill, changed->content.memset.ctx);
  return set(changed, &content);
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec handle, CUgraphNode original,
                                        const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext owner) {
  if (fill == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = with_fill(fill, owner);
  return set_in_exec(handle, original, &content);
}

// ---- functions on the host, child graphs, events, memory ---------------------------------------

CUresult cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS *wanted) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_HOST, &asked));
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  *wanted = (CUDA_HOST_NODE_PARAMS){asked->content.host.fn, asked->content.host.userData};
  return CUDA_SUCCESS;
}

static CUgraphNodeParams with_host(const CUDA_HOST_NODE_PARAMS *wanted) {
  return (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_HOST,
                             .host = {.fn = wanted->fn, .userData = wanted->userData}};
}

CUresult cuGraphHostNodeSetParams(CUgraphNode handle, const CUDA_HOST_NODE_PARAMS *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = with_host(wanted);
  return cuGraphNodeSetParams(handle, &content);
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec handle, CUgraphNode original,
                                      const CUDA_HOST_NODE_PARAMS *wanted) {
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUgraphNodeParams content = with_host(wanted);
  return set_in_exec(handle, original, &content);
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph *child) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_GRAPH, &asked));
  if (child == NULL) return CUDA_ERROR_INVALID_VALUE;
  *child = (CUgraph)asked->child;
  return CUDA_SUCCESS;
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec handle, CUgraphNode original,
                                            CUgraph child) {
  CUgraphNodeParams content = {
      .type = CU_GRAPH_NODE_TYPE_GRAPH,
      .graph = {.graph = child, .ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE}};
  exec *changed;
  TRY(exec_of(handle, &changed));
  TRY(set_in_exec(handle, original, &content));
  return exec_sort(changed);
}

CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode handle, CUevent *recorded) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD, &asked));
  if (recorded == NULL) return CUDA_ERROR_INVALID_VALUE;
  *recorded = asked->content.eventRecord.event;
  return CUDA_SUCCESS;
}

CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode handle, CUevent *waited) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_WAIT_EVENT, &asked));
  if (waited == NULL) return CUDA_ERROR_INVALID_VALUE;
  *waited = asked->content.eventWait.event;
  return CUDA_SUCCESS;
}

CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode handle, CUevent recorded) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                               .eventRecord = {.event = recorded}};
  return cuGraphNodeSetParams(handle, &content);
}

CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode handle, CUevent waited) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                               .eventWait = {.event = waited}};
  return cuGraphNodeSetParams(handle, &content);
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec handle, CUgraphNode original,
                                            CUevent recorded) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                               .eventRecord = {.event = recorded}};
  return set_in_exec(handle, original, &content);
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec handle, CUgraphNode original,
                                          CUevent waited) {
  CUgraphNodeParams content = {.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                               .eventWait = {.event = waited}};
  return set_in_exec(handle, original, &content);
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS *wanted) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_MEM_ALLOC, &asked));
  if (wanted == NULL) return CUDA_ERROR_INVALID_VALUE;
  memcpy(wanted, &asked->content.alloc, sizeof *wanted);
  return CUDA_SUCCESS;
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr *address) {
  node *asked;
  TRY(node_as(handle, CU_GRAPH_NODE_TYPE_MEM_FREE, &asked));
  if (address == NULL) return CUDA_ERROR_INVALID_VALUE;
  *address = asked->content.free.dptr;
  return CUDA_SUCCESS;
}
