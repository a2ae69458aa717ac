// SPDX-License-Identifier: Apache-2.0
// Graphs as such: nodes, what depends on what, clones.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/graphs.h"

static unsigned last_graph_id;

CUresult graph_of(CUgraph handle, graph **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_GRAPH)) return CUDA_ERROR_INVALID_VALUE;
  *found = (graph *)handle;
  return CUDA_SUCCESS;
}

CUresult node_of(CUgraphNode handle, node **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_NODE)) return CUDA_ERROR_INVALID_VALUE;
  *found = (node *)handle;
  return CUDA_SUCCESS;
}

graph *graph_new(void) {
  LOCK();
  graph *made = object_new(OBJECT_GRAPH, sizeof(graph), NULL);
  if (made != NULL) made->id = ++last_graph_id;
  UNLOCK();
  return made;
}

void graph_free(graph *dying) {
  while (dying->count > 0) node_free(dying->nodes[dying->count - 1]);
  users_drop(dying);
  free(dying->nodes);
  free(dying->order);
  LOCK();
  object_free(dying);
  UNLOCK();
}

static bool append(graph *into, node *added) {
  if (into->count == into->room) {
    size_t room = into->room > 0 ? into->room * 2 : 16;
    node **more = realloc(into->nodes, room * sizeof *more);
    if (more == NULL) return false;
    into->nodes = more;
    into->room = room;
  }
  added->index = into->count;
  into->nodes[into->count++] = added;
  return true;
}

CUresult node_depend(node *later, node *earlier, const CUgraphEdgeData *edge) {
  if (later->owner != earlier->owner || later == earlier) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < later->before_count; i++) {
    if (later->before[i] == earlier) return CUDA_ERROR_INVALID_VALUE;
  }
  if (later->before_count == later->before_room) {
    size_t room = later->before_room > 0 ? later->before_room * 2 : 4;
    node **more = realloc(later->before, room * sizeof *more);
    if (more == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    later->before = more;
    CUgraphEdgeData *edges = realloc(later->edges, room * sizeof *edges);
    if (edges == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    later->edges = edges;
    later->before_room = room;
  }
  later->before[later->before_count] = earlier;
  later->edges[later->before_count++] = edge != NULL ? *edge : (CUgraphEdgeData){0};
  return CUDA_SUCCESS;
}

static void forget_dependency(node *later, const node *earlier) {
  for (size_t i = 0; i < later->before_count; i++) {
    if (later->before[i] != earlier) continue;
    later->before_count--;
    later->before[i] = later->before[later->before_count];
    later->edges[i] = later->edges[later->before_count];
    return;
  }
}

CUresult node_new(graph *into, CUgraphNodeType type, const dependencies *before, node **made) {
  for (size_t i = 0; i < before->count; i++) {
    if (!object_valid(before->nodes[i], OBJECT_NODE) || before->nodes[i]->owner != into) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  LOCK();
  node *added = object_new(OBJECT_NODE, sizeof(node), NULL);
  UNLOCK();
  if (added == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  added->owner = into;
  added->content.type = type;
  added->enabled = true;
  added->local_id = ++into->last_local_id;
  if (!append(into, added)) {
    LOCK();
    object_free(added);
    UNLOCK();
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  CUresult result = CUDA_SUCCESS;
  for (size_t i = 0; i < before->count && result == CUDA_SUCCESS; i++) {
    const CUgraphEdgeData *edge = before->edges != NULL ? &before->edges[i] : NULL;
    result = node_depend(added, before->nodes[i], edge);
  }
  if (result != CUDA_SUCCESS) {
    node_free(added);
    return result;
  }
  *made = added;
  return CUDA_SUCCESS;
}

void node_free(node *dying) {
  graph *owner = dying->owner;
  for (size_t i = dying->index + 1; i < owner->count; i++) {
    owner->nodes[i - 1] = owner->nodes[i];
    owner->nodes[i - 1]->index = i - 1;
  }
  owner->count--;
  for (size_t i = 0; i < owner->count; i++) forget_dependency(owner->nodes[i], dying);
  if (dying->child != NULL) graph_free(dying->child);
  if (dying->memory != NULL) graph_memory_drop(dying->memory);
  free(dying->arguments);
  free(dying->attributes);
  free(dying->before);
  free(dying->edges);
  LOCK();
  object_free(dying);
  UNLOCK();
}

CUresult graph_sort(graph *sorted) {
  size_t count = sorted->count, placed = 0;
  free(sorted->order);
  sorted->order = malloc((count + 1) * sizeof *sorted->order);
  bool *done = calloc(count + 1, sizeof *done);
  if (sorted->order == NULL || done == NULL) {
    free(done);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  // Nodes are mostly in order already, so few rounds suffice.
  for (bool progress = true; progress && placed < count;) {
    progress = false;
    for (size_t i = 0; i < count; i++) {
      if (done[i]) continue;
      const node *next = sorted->nodes[i];
      bool ready = true;
      for (size_t j = 0; j < next->before_count && ready; j++) {
        ready = done[next->before[j]->index];
      }
      if (!ready) continue;
      done[i] = progress = true;
      sorted->order[placed++] = sorted->nodes[i];
    }
  }
  free(done);
  return placed == count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- clones ------------------------------------------------------------------------------------

static CUresult clone_node(graph *into, const node *from) {
  node *made;
  TRY(node_new(into, from->content.type, &(dependencies){0}, &made));
  made->content = from->content;
  made->duration_ns = from->duration_ns;
  made->sms = from->sms;
  made->enabled = from->enabled;
  made->original_id = from->head.id;
  made->local_id = from->local_id;
  if (from->arguments != NULL) TRY(node_copy_arguments(made, from));
  if (from->attributes != NULL) {
    size_t size = CU_LAUNCH_ATTRIBUTE_MAX * sizeof *made->attributes;
    made->attributes = malloc(size);
    if (made->attributes == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(made->attributes, from->attributes, size);
  }
  if (from->memory != NULL) {
    made->memory = from->memory;
    made->memory->references++;
  }
  if (from->child == NULL) return CUDA_SUCCESS;
  TRY(graph_clone(from->child, &made->child));
  made->child->is_child = true;
  made->content.graph.graph = (CUgraph)made->child;
  return CUDA_SUCCESS;
}

static CUresult clone_into(const graph *from, graph *to) {
  for (size_t i = 0; i < from->count; i++) TRY(clone_node(to, from->nodes[i]));
  for (size_t i = 0; i < from->count; i++) {
    const node *original = from->nodes[i];
    for (size_t j = 0; j < original->before_count; j++) {
      TRY(node_depend(to->nodes[i], to->nodes[original->before[j]->index], &original->edges[j]));
    }
  }
  to->last_local_id = from->last_local_id;
  users_copy(from, to);
  return CUDA_SUCCESS;
}

CUresult graph_clone(const graph *from, graph **cloned) {
  graph *made = graph_new();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = clone_into(from, made);
  if (result != CUDA_SUCCESS) {
    graph_free(made);
    return result;
  }
  *cloned = made;
  return CUDA_SUCCESS;
}

node *graph_find_clone(const graph *in, const node *original) {
  if (original->index < in->count && in->nodes[original->index]->original_id == original->head.id) {
    return in->nodes[original->index];
  }
  for (size_t i = 0; i < in->count; i++) {
    if (in->nodes[i]->original_id == original->head.id) return in->nodes[i];
    // A node of a child graph has its clone in the clone of that child.
    node *deeper =
        in->nodes[i]->child != NULL ? graph_find_clone(in->nodes[i]->child, original) : NULL;
    if (deeper != NULL) return deeper;
  }
  return NULL;
}

static bool has_memory_nodes(const graph *asked) {
  for (size_t i = 0; i < asked->count; i++) {
    if (asked->nodes[i]->memory != NULL) return true;
  }
  return false;
}

// ---- entry points ------------------------------------------------------------------------------

CUresult cuGraphCreate(CUgraph *handle, unsigned int flags) {
  ENTER();
  if (handle == NULL || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  graph *made = graph_new();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUgraph)made;
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle) {
  graph *dying;
  TRY(graph_of(handle, &dying));
  if (dying->is_child) return CUDA_ERROR_INVALID_VALUE;
  graph_free(dying);
  return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph *handle, CUgraph from) {
  graph *original, *made;
  TRY(graph_of(from, &original));
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (has_memory_nodes(original)) return CUDA_ERROR_NOT_SUPPORTED;
  TRY(graph_clone(original, &made));
  *handle = (CUgraph)made;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeFindInClone(CUgraphNode *handle, CUgraphNode original_handle,
                                CUgraph clone_handle) {
  node *original;
  graph *clone;
  TRY(node_of(original_handle, &original));
  TRY(graph_of(clone_handle, &clone));
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  node *found = graph_find_clone(clone, original);
  if (found == NULL) return CUDA_ERROR_INVALID_VALUE;
  *handle = (CUgraphNode)found;
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroyNode(CUgraphNode handle) {
  node *dying;
  TRY(node_of(handle, &dying));
  if (dying->memory != NULL) return CUDA_ERROR_NOT_SUPPORTED;
  node_free(dying);
  return CUDA_SUCCESS;
}

CUresult cuGraphGetId(CUgraph handle, unsigned int *id) {
  graph *asked;
  TRY(graph_of(handle, &asked));
  if (id == NULL) return CUDA_ERROR_INVALID_VALUE;
  *id = asked->id;
  return CUDA_SUCCESS;
}

CUresult cuGraphDebugDotPrint(CUgraph handle, const char *path, unsigned int flags) {
  graph *asked;
  TRY(graph_of(handle, &asked));
  return path != NULL ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}
