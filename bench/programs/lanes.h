// SPDX-License-Identifier: Apache-2.0
// What the load generators of the compute bench share: kernels that fill the whole device, and
// lanes (streams with a bounded queue) to launch them in, as a training loop has them.
#ifndef ALLOTMENT_BENCH_LANES_H
#define ALLOTMENT_BENCH_LANES_H

#include <stdbool.h>

#include "driver.h"

enum { MOST_DURATIONS = 8, MOST_DEPTH = 64 };

// Kernels by their durations, of which each has the same part of the time.
typedef struct {
  uint64_t ns[MOST_DURATIONS];
  CUfunction functions[MOST_DURATIONS];
  int count;
  uint64_t random;
} durations;

typedef struct {
  CUstream stream;
  CUevent events[MOST_DEPTH];        // one after each batch that is not yet known to be over
  uint64_t batch_ns[MOST_DEPTH];     // its kernels' durations, added up
  uint32_t batch_count[MOST_DEPTH];  // how many kernels it has
  CUgraphExec graphs[2];             // NULL: kernels one by one
  uint64_t issued, finished;         // batches
  int depth;                         // batches outstanding at most
} lane;

// "20000,200000" nanoseconds; ends the program when it is none.
durations parse_durations(const char *text);
// One function for each of them, as different kernels of a program are; or the same for all.
void load_functions(durations *into, bool one);
// One of them at random.
int draw_kernel(durations *from);

void sleep_until(uint64_t time_ns);
// What the ledger says that the share used of its first device, 0 outside of one.
uint64_t charged_ns(void);

// A grid of this many blocks of 1024 threads fills every multiprocessor of device 0.
unsigned int whole_grid(void);
void launch_whole(CUfunction function, unsigned int grid, uint64_t *ns, CUstream stream);

// An event whose wait sleeps. Without timing, as frameworks make them.
CUevent blocking_event(void);
// A lane on `stream` (NULL: a new non-blocking one) for batches of about `batch_ns`, of which
// `depth` may be outstanding. `nodes` > 0: each batch is a graph of that many kernels of `node_ns`.
void open_lane(lane *opened, CUstream stream, int depth, CUfunction function, unsigned int grid,
               int nodes, uint64_t node_ns);
// Launches a batch. The lane must have room.
void issue_batch(lane *into, unsigned int grid, durations *from, uint64_t batch_ns, int nodes);
bool lane_is_full(const lane *looked_at);
// Waits for the oldest batch; its kernels' durations added up.
uint64_t finish_batch(lane *waited_for, uint32_t *kernels);

#endif
