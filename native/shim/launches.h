// SPDX-License-Identifier: Apache-2.0
// What a launch goes through, around the driver's call.
#ifndef ALLOTMENT_SHIM_LAUNCHES_H
#define ALLOTMENT_SHIM_LAUNCHES_H

#include "compute.h"

typedef struct launch_pass {
  stream_state *stream;  // NULL: it is neither held back nor measured
  batch_launch launch;
  bool is_late;  // the program's exit has begun; `meant` is its stream then
  CUstream meant;
} launch_pass;

// Waits for the launch's turn and marks its beginning. `is_part`: of a launch on several devices,
// which is measured by itself. Not CUDA_SUCCESS: what to return instead of launching.
CUresult launch_begin(launch_pass *pass, CUstream stream, uint64_t key, bool is_part);
void launch_end(launch_pass *pass, CUresult result);

#endif
