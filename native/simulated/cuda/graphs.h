// SPDX-License-Identifier: Apache-2.0
// Graphs from inside, for the files that build, change, capture and launch them.
#ifndef ALLOTMENT_CUDA_GRAPHS_H
#define ALLOTMENT_CUDA_GRAPHS_H

#include "simulated/cuda/driver.h"

typedef struct graph graph;
typedef struct node node;

// Memory of one allocation node: its address stays, its bytes come and go with launches.
typedef struct graph_memory {
  CUdeviceptr address;
  uint64_t size, charged;
  int gpu;
  unsigned references;  // nodes of graphs and of executable graphs
  bool live;            // allocated and not yet freed
} graph_memory;

// What a kernel node keeps of its arguments: the first, as far as it can be known.
typedef struct arguments {
  void *pointers[64];
  uint64_t first, rest[64];
} arguments;

struct node {
  object head;  // parent: the graph
  graph *owner;
  unsigned local_id;
  size_t index;  // among the graph's nodes
  CUgraphNodeParams content;
  uint64_t duration_ns;                // KERNEL
  uint32_t sms;                        // KERNEL: how many multiprocessors it takes
  arguments *arguments;                // KERNEL
  graph *child;                        // GRAPH
  graph_memory *memory;                // MEM_ALLOC, MEM_FREE
  CUlaunchAttributeValue *attributes;  // KERNEL: by id, NULL if none was set
  node **before;                       // what it depends on
  CUgraphEdgeData *edges;
  size_t before_count, before_room;
  uint64_t original_id;  // of the node that this is a clone of
  bool enabled;
};

struct graph {
  object head;
  unsigned id;
  node **nodes;
  size_t count, room;
  unsigned last_local_id;
  bool is_child;
  node **order;  // executable: the nodes, each behind what it depends on
  struct user **users;
  size_t user_count;
};

typedef struct exec {
  object head;
  unsigned id;
  graph *graph;  // a clone of its own
  int gpu;
  uint64_t flags;
} exec;

typedef struct dependencies {
  node **nodes;
  const CUgraphEdgeData *edges;  // NULL: plain
  size_t count;
} dependencies;

// graphs.c
CUresult graph_of(CUgraph handle, graph **found);
CUresult node_of(CUgraphNode handle, node **found);
graph *graph_new(void);
void graph_free(graph *dying);
CUresult graph_clone(const graph *from, graph **cloned);
node *graph_find_clone(const graph *in, const node *original);
CUresult node_new(graph *into, CUgraphNodeType type, const dependencies *before, node **made);
void node_free(node *dying);
CUresult node_depend(node *later, node *earlier, const CUgraphEdgeData *edge);
// Puts every node behind those it depends on; CUDA_ERROR_INVALID_VALUE if they go in a circle.
CUresult graph_sort(graph *sorted);

// nodes.c: fills a node in from the caller's parameters, whatever its type.
CUresult node_fill(node *filled, const CUgraphNodeParams *content);
CUresult node_copy_arguments(node *to, const node *from);
CUresult node_add(graph *into, const dependencies *before, CUgraphNodeParams *content, node **made);
CUgraphNodeParams node_kernel(const CUlaunchConfig *config, CUfunction handle, void **parameters,
                              void **extra);

// graph_memory.c
CUresult graph_memory_new(int gpu, uint64_t size, graph_memory **made);
void graph_memory_drop(graph_memory *dropped);
graph_memory *graph_memory_at(const graph *in, CUdeviceptr address);
// Makes room for what launching the graph allocates on top of what is live.
CUresult graph_memory_prepare(const graph *launched, bool frees_first);
void graph_memory_begin(graph_memory *begun);
void graph_memory_end(graph_memory *ended);

// exec.c
CUresult exec_of(CUgraphExec handle, exec **found);
CUresult exec_make(const graph *from, uint64_t flags, exec **made);
CUresult exec_sort(exec *changed);  // after nodes of it were exchanged
// May the graph take the place of this one in an executable graph?
bool exec_may_exchange(const graph *own, const graph *wanted);
CUresult exec_launch(exec *launched, stream *target);

// users.c
void users_copy(const graph *from, graph *to);
void users_drop(graph *dying);

#endif
