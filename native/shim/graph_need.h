// SPDX-License-Identifier: Apache-2.0
// What launching a graph may take of the share's devices.
#ifndef ALLOTMENT_SHIM_GRAPH_NEED_H
#define ALLOTMENT_SHIM_GRAPH_NEED_H

#include "process.h"

// By the policy's devices.
typedef struct graph_need {
  uint64_t most[ALLOT_MAX_DEVICES];   // bytes, if no allocation takes the place of another
  uint64_t least[ALLOT_MAX_DEVICES];  // bytes, if each takes the place of what was freed before it
  CUdevice ordinals[ALLOT_MAX_DEVICES];
  uint32_t devices;  // a bit for each that is not zero

  uint64_t reserved[ALLOT_MAX_DEVICES];  // for one call, by graphs.c
} graph_need;

void graph_need_of(process *own, CUgraph graph, graph_need *need);
bool graph_need_same(const graph_need *one, const graph_need *other);

#endif
