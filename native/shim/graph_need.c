// SPDX-License-Identifier: Apache-2.0
// Reads a graph's memory nodes, those of its child graphs included.
//
// The driver lets an allocation take the place of one that was freed before it in every order of
// execution. In a graph whose nodes form one chain, as capturing one stream makes it, that is any
// that was freed earlier in the chain; of other graphs nothing is assumed.
#include "graph_need.h"

#include <stdlib.h>
#include <string.h>

#include "charge.h"
#include "driver.h"
#include "pools.h"

#define DEEPEST_CHILD 64
// More than any device has: a graph that is not understood, or that allocates memory of an unknown
// kind, is refused.
#define NOT_UNDERSTOOD_BYTES (UINT64_MAX / 4)

typedef struct piece {
  CUdeviceptr pointer;
  uint64_t bytes;
  int device;
} piece;

typedef struct reader {
  process *own;
  graph_need *need;
  uint64_t live[ALLOT_MAX_DEVICES];
  piece *pieces;
  size_t count, capacity;
  bool is_chain;  // so far
} reader;

static uint64_t sum_of(uint64_t a, uint64_t b) {
  return a + b < a ? UINT64_MAX : a + b;
}

static void remember(reader *in, CUdeviceptr pointer, uint64_t bytes, int device) {
  if (in->count == in->capacity) {
    size_t larger = in->capacity == 0 ? 64 : in->capacity * 2;
    piece *moved = realloc(in->pieces, larger * sizeof *moved);
    if (moved == NULL) return;  // its end will not be noticed
    in->pieces = moved;
    in->capacity = larger;
  }
  in->pieces[in->count++] = (piece){pointer, bytes, device};
}

static void add(reader *in, int device, CUdevice ordinal, uint64_t bytes) {
  graph_need *need = in->need;
  need->most[device] = sum_of(need->most[device], bytes);
  in->live[device] = sum_of(in->live[device], bytes);
  if (in->live[device] > need->least[device]) need->least[device] = in->live[device];
  need->ordinals[device] = ordinal;
  need->devices |= 1u << device;
}

static void not_understood(reader *in) {
  CUdevice ordinal = 0;
  DRIVER(USED(cuCtxGetDevice)(&ordinal));
  add(in, 0, ordinal, NOT_UNDERSTOOD_BYTES);
}

static void read_allocation(reader *in, CUgraphNode node) {
  CUDA_MEM_ALLOC_NODE_PARAMS parameters;
  if (DRIVER(USED(cuGraphMemAllocNodeGetParams)(node, &parameters)) != CUDA_SUCCESS) {
    not_understood(in);
    return;
  }
  const CUmemLocation *location = &parameters.poolProps.location;
  int device = pool_device(in->own, location, parameters.poolProps.allocType);
  if (device == POOL_UNCHARGED) return;
  if (device < 0) {
    not_understood(in);
    return;
  }
  CUdevice ordinal = location->id;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) DRIVER(USED(cuCtxGetDevice)(&ordinal));
  uint64_t bytes = round_up(parameters.bytesize, CHARGE_GRANULE);
  add(in, device, ordinal, bytes);
  remember(in, parameters.dptr, bytes, device);
}

static void read_free(reader *in, CUgraphNode node) {
  CUdeviceptr pointer;
  if (DRIVER(USED(cuGraphMemFreeNodeGetParams)(node, &pointer)) != CUDA_SUCCESS) return;
  for (size_t i = in->count; i-- > 0;) {
    if (in->pieces[i].pointer != pointer) continue;
    in->live[in->pieces[i].device] -= in->pieces[i].bytes;
    in->pieces[i] = in->pieces[--in->count];
    return;
  }
}

// ---- the order of the nodes ----

// Nodes by address, so that long edge lists are looked up quickly.
typedef struct place {
  CUgraphNode node;
  size_t index;
} place;

static int by_address(const void *one, const void *other) {
  uintptr_t a = (uintptr_t)((const place *)one)->node, b = (uintptr_t)((const place *)other)->node;
  return a < b ? -1 : a > b;
}

static size_t index_of(const place *places, size_t count, CUgraphNode node) {
  place wanted = {.node = node};
  const place *found = bsearch(&wanted, places, count, sizeof wanted, by_address);
  return found == NULL ? count : found->index;
}

typedef struct chain {
  CUgraphNode *from, *to, *ordered;
  place *places;
  size_t *next;
  bool *has_previous;
} chain;

static bool read_edges(CUgraph graph, const CUgraphNode *nodes, size_t count, chain *links) {
  size_t edges = count - 1;
  if (edges > 0 &&
      DRIVER(USED(cuGraphGetEdges)(graph, links->from, links->to, &edges)) != CUDA_SUCCESS) {
    return false;
  }
  for (size_t i = 0; i < count; i++) {
    links->places[i] = (place){nodes[i], i};
    links->next[i] = count;
  }
  qsort(links->places, count, sizeof(place), by_address);
  for (size_t i = 0; i < edges; i++) {
    size_t from = index_of(links->places, count, links->from[i]);
    size_t to = index_of(links->places, count, links->to[i]);
    if (from == count || to == count) return false;
    if (links->next[from] != count || links->has_previous[to]) return false;
    links->next[from] = to;
    links->has_previous[to] = true;
  }
  return true;
}

// Follows the edges from the one node that nothing comes before. False: that does not reach all.
static bool follow(const CUgraphNode *nodes, size_t count, chain *links) {
  size_t at = 0, reached = 0;
  while (at < count && links->has_previous[at]) at++;
  for (; at < count && reached < count; at = links->next[at]) {
    links->ordered[reached++] = nodes[at];
  }
  return reached == count && at == count;
}

// Puts the nodes in the order of a chain; false: they are none.
static bool order_chain(CUgraph graph, CUgraphNode *nodes, size_t count) {
  size_t edges = 0;
  if (DRIVER(USED(cuGraphGetEdges)(graph, NULL, NULL, &edges)) != CUDA_SUCCESS ||
      edges != count - 1) {
    return false;
  }
  chain links = {.from = malloc(count * sizeof(CUgraphNode)),
                 .to = malloc(count * sizeof(CUgraphNode)),
                 .ordered = malloc(count * sizeof(CUgraphNode)),
                 .places = malloc(count * sizeof(place)),
                 .next = malloc(count * sizeof(size_t)),
                 .has_previous = calloc(count, sizeof(bool))};
  bool is_chain = links.from != NULL && links.to != NULL && links.ordered != NULL &&
                  links.places != NULL && links.next != NULL && links.has_previous != NULL &&
                  read_edges(graph, nodes, count, &links) && follow(nodes, count, &links);
  for (size_t i = 0; is_chain && i < count; i++) nodes[i] = links.ordered[i];
  free(links.from);
  free(links.to);
  free(links.ordered);
  free(links.places);
  free(links.next);
  free(links.has_previous);
  return is_chain;
}

// ---- whole graphs ----

static void read_graph(reader *in, CUgraph graph, int depth);

// Types that came later may allocate. Bodies of conditional nodes cannot.
#define NEWEST_TYPE CU_GRAPH_NODE_TYPE_FABRIC_CPY_BATCH

static CUgraphNodeType type_of(CUgraphNode node) {
  CUgraphNodeType type = NEWEST_TYPE + 1;
  return DRIVER(USED(cuGraphNodeGetType)(node, &type)) == CUDA_SUCCESS ? type : NEWEST_TYPE + 1;
}

static void read_node(reader *in, CUgraphNode node, int depth) {
  CUgraphNodeType type = type_of(node);
  CUgraph child;
  if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) read_allocation(in, node);
  if (type == CU_GRAPH_NODE_TYPE_MEM_FREE) read_free(in, node);
  if (type > NEWEST_TYPE) not_understood(in);
  if (type != CU_GRAPH_NODE_TYPE_GRAPH) return;
  if (depth + 1 < DEEPEST_CHILD &&
      DRIVER(USED(cuGraphChildGraphNodeGetGraph)(node, &child)) == CUDA_SUCCESS) {
    read_graph(in, child, depth + 1);
  } else {
    not_understood(in);
  }
}

static bool has_memory_nodes(const CUgraphNode *nodes, size_t count) {
  for (size_t i = 0; i < count; i++) {
    CUgraphNodeType type = type_of(nodes[i]);
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || type == CU_GRAPH_NODE_TYPE_GRAPH) return true;
    if (type > NEWEST_TYPE) return true;
  }
  return false;
}

static void read_graph(reader *in, CUgraph graph, int depth) {
  size_t count = 0;
  // The driver has an error of its own for what is no graph.
  if (DRIVER(USED(cuGraphGetNodes)(graph, NULL, &count)) != CUDA_SUCCESS || count == 0) return;
  CUgraphNode *nodes = malloc(count * sizeof *nodes);
  if (nodes == NULL || DRIVER(USED(cuGraphGetNodes)(graph, nodes, &count)) != CUDA_SUCCESS) {
    not_understood(in);
    count = 0;
  }
  // Most graphs allocate nothing: they cost one look at each node.
  if (count > 0 && has_memory_nodes(nodes, count)) {
    if (!order_chain(graph, nodes, count)) in->is_chain = false;
    for (size_t i = 0; i < count; i++) read_node(in, nodes[i], depth);
  }
  free(nodes);
}

void graph_need_of(process *own, CUgraph graph, graph_need *need) {
  *need = (graph_need){.devices = 0};
  reader in = {.own = own, .need = need, .is_chain = true};
  read_graph(&in, graph, 0);
  free(in.pieces);
  for (int device = 0; device < ALLOT_MAX_DEVICES && !in.is_chain; device++) {
    need->least[device] = need->most[device];
  }
}

bool graph_need_same(const graph_need *one, const graph_need *other) {
  return one->devices == other->devices && memcmp(one->most, other->most, sizeof one->most) == 0 &&
         memcmp(one->least, other->least, sizeof one->least) == 0 &&
         memcmp(one->ordinals, other->ordinals, sizeof one->ordinals) == 0;
}
