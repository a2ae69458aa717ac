// SPDX-License-Identifier: Apache-2.0
// A capture under way: streams whose launches become nodes of a graph.
#ifndef ALLOTMENT_CUDA_CAPTURE_H
#define ALLOTMENT_CUDA_CAPTURE_H

#include "simulated/cuda/graphs.h"

typedef struct capture {
  uint64_t id;
  graph *graph;
  bool own_graph;  // made by this capture, not handed in
  bool invalid;
  CUstreamCaptureMode mode;
  uint64_t thread;  // that began it
  stream *origin;
  unsigned first_local_id;  // nodes above it were captured
  size_t wanted_nodes;      // of a graph that is captured again, 0: it is not
  stream **streams;         // all that take part
  size_t stream_count;
  struct capture *next;
} capture;

// Is any capture under way? Cheap, for the paths of every launch.
bool capture_any(void);
capture *capture_by_id(uint64_t id);
CUresult capture_join(stream *joined, capture *into);
CUresult capture_set_tips(stream *target, node *const *tips, size_t count);
CUresult capture_add_tips(stream *target, node *const *tips, size_t count);
void capture_invalidate(capture *failed);

#endif
