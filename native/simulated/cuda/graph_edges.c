// SPDX-License-Identifier: Apache-2.0
// Which nodes a graph has, and which depend on which.
#include "simulated/cuda/graphs.h"

// Lists are asked for twice: first how long they are, then for as many as there is room for.
typedef struct listing {
  CUgraphNode *nodes, *others;
  CUgraphEdgeData *edges;
  size_t room, count;
} listing;

static void list(listing *into, node *one, node *other, const CUgraphEdgeData *edge) {
  if (into->count < into->room) {
    if (into->nodes != NULL) into->nodes[into->count] = (CUgraphNode)one;
    if (into->others != NULL) into->others[into->count] = (CUgraphNode)other;
    if (into->edges != NULL) into->edges[into->count] = edge != NULL ? *edge : (CUgraphEdgeData){0};
  }
  into->count++;
}

static CUresult finish(listing *done, size_t *count) {
  // What the caller has room for beyond the list is set to nothing.
  for (size_t i = done->count; done->nodes != NULL && i < done->room; i++) done->nodes[i] = NULL;
  for (size_t i = done->count; done->others != NULL && i < done->room; i++) done->others[i] = NULL;
  bool only_length = done->nodes == NULL && done->others == NULL;
  *count = only_length || done->count < done->room ? done->count : done->room;
  return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
  graph *asked;
  TRY(graph_of(handle, &asked));
  if (count == NULL) return CUDA_ERROR_INVALID_VALUE;
  listing all = {.nodes = nodes, .room = nodes != NULL ? *count : 0};
  for (size_t i = 0; i < asked->count; i++) list(&all, asked->nodes[i], NULL, NULL);
  return finish(&all, count);
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
  graph *asked;
  TRY(graph_of(handle, &asked));
  if (count == NULL) return CUDA_ERROR_INVALID_VALUE;
  listing roots = {.nodes = nodes, .room = nodes != NULL ? *count : 0};
  for (size_t i = 0; i < asked->count; i++) {
    if (asked->nodes[i]->before_count == 0) list(&roots, asked->nodes[i], NULL, NULL);
  }
  return finish(&roots, count);
}

CUresult cuGraphGetEdges_v2(CUgraph handle, CUgraphNode *from, CUgraphNode *to,
                            CUgraphEdgeData *edges, size_t *count) {
  graph *asked;
  TRY(graph_of(handle, &asked));
  if (count == NULL || (from == NULL) != (to == NULL)) return CUDA_ERROR_INVALID_VALUE;
  listing all = {.nodes = from, .others = to, .edges = edges, .room = from != NULL ? *count : 0};
  for (size_t i = 0; i < asked->count; i++) {
    node *later = asked->nodes[i];
    for (size_t j = 0; j < later->before_count; j++) {
      list(&all, later->before[j], later, &later->edges[j]);
    }
  }
  return finish(&all, count);
}

CUresult cuGraphGetEdges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, size_t *count) {
  return cuGraphGetEdges_v2(handle, from, to, NULL, count);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode *nodes,
                                       CUgraphEdgeData *edges, size_t *count) {
  node *asked;
  TRY(node_of(handle, &asked));
  if (count == NULL) return CUDA_ERROR_INVALID_VALUE;
  listing before = {.nodes = nodes, .edges = edges, .room = nodes != NULL ? *count : 0};
  for (size_t i = 0; i < asked->before_count; i++) {
    list(&before, asked->before[i], NULL, &asked->edges[i]);
  }
  return finish(&before, count);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode handle, CUgraphNode *nodes, size_t *count) {
  return cuGraphNodeGetDependencies_v2(handle, nodes, NULL, count);
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode handle, CUgraphNode *nodes,
                                         CUgraphEdgeData *edges, size_t *count) {
  node *asked;
  TRY(node_of(handle, &asked));
  if (count == NULL) return CUDA_ERROR_INVALID_VALUE;
  listing after = {.nodes = nodes, .edges = edges, .room = nodes != NULL ? *count : 0};
  const graph *owner = asked->owner;
  for (size_t i = 0; i < owner->count; i++) {
    node *later = owner->nodes[i];
    for (size_t j = 0; j < later->before_count; j++) {
      if (later->before[j] == asked) list(&after, later, NULL, &later->edges[j]);
    }
  }
  return finish(&after, count);
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode handle, CUgraphNode *nodes, size_t *count) {
  return cuGraphNodeGetDependentNodes_v2(handle, nodes, NULL, count);
}

static CUresult pair(const graph *in, CUgraphNode from, CUgraphNode to, node **earlier,
                     node **later) {
  TRY(node_of(from, earlier));
  TRY(node_of(to, later));
  bool right = (*earlier)->owner == in && (*later)->owner == in && *earlier != *later;
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphAddDependencies_v2(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *edges, size_t count) {
  graph *changed;
  TRY(graph_of(handle, &changed));
  if (count > 0 && (from == NULL || to == NULL)) return CUDA_ERROR_INVALID_VALUE;
  node *earlier, *later;
  for (size_t i = 0; i < count; i++) TRY(pair(changed, from[i], to[i], &earlier, &later));
  for (size_t i = 0; i < count; i++) {
    TRY(pair(changed, from[i], to[i], &earlier, &later));
    TRY(node_depend(later, earlier, edges != NULL ? &edges[i] : NULL));
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to,
                                size_t count) {
  return cuGraphAddDependencies_v2(handle, from, to, NULL, count);
}

static CUresult remove_edge(node *later, const node *earlier) {
  for (size_t i = 0; i < later->before_count; i++) {
    if (later->before[i] != earlier) continue;
    later->before_count--;
    later->before[i] = later->before[later->before_count];
    later->edges[i] = later->edges[later->before_count];
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphRemoveDependencies_v2(CUgraph handle, const CUgraphNode *from,
                                      const CUgraphNode *to, const CUgraphEdgeData *edges,
                                      size_t count) {
  graph *changed;
  TRY(graph_of(handle, &changed));
  if (count > 0 && (from == NULL || to == NULL)) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    node *earlier, *later;
    TRY(pair(changed, from[i], to[i], &earlier, &later));
    TRY(remove_edge(later, earlier));
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to,
                                   size_t count) {
  return cuGraphRemoveDependencies_v2(handle, from, to, NULL, count);
}

// ---- questions about nodes ---------------------------------------------------------------------

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType *type) {
  node *asked;
  TRY(node_of(handle, &asked));
  if (type == NULL) return CUDA_ERROR_INVALID_VALUE;
  *type = asked->content.type;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetContainingGraph(CUgraphNode handle, CUgraph *owner) {
  node *asked;
  TRY(node_of(handle, &asked));
  if (owner == NULL) return CUDA_ERROR_INVALID_VALUE;
  *owner = (CUgraph)asked->owner;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetLocalId(CUgraphNode handle, unsigned int *id) {
  node *asked;
  TRY(node_of(handle, &asked));
  if (id == NULL) return CUDA_ERROR_INVALID_VALUE;
  *id = asked->local_id;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetToolsId(CUgraphNode handle, unsigned long long *id) {
  node *asked;
  TRY(node_of(handle, &asked));
  if (id == NULL) return CUDA_ERROR_INVALID_VALUE;
  *id = (unsigned long long)asked->owner->id << 32 | asked->local_id;
  return CUDA_SUCCESS;
}
