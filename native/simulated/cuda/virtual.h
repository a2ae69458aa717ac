// SPDX-License-Identifier: Apache-2.0
// Physical memory, and how memory is handed from process to process.
#ifndef ALLOTMENT_CUDA_VIRTUAL_H
#define ALLOTMENT_CUDA_VIRTUAL_H

#include "simulated/cuda/driver.h"

#define PHYSICAL_GRANULE (2 * MIB)

typedef struct physical {
  object head;
  int gpu;
  uint64_t size;
  CUdeviceptr home;     // where in the device-memory file it is; 0: it has a file of its own
  int descriptor;       // that file, -1: none
  unsigned references;  // handles and mappings
  unsigned mappings;
  bool imported;  // charged to the process that made it
  bool touched;
  CUmemAllocationProp properties;
} physical;

physical *physical_of(CUmemGenericAllocationHandle handle);
void physical_drop_locked(physical *dropped);
// Maps physical memory, from an offset in it on, at an address that is reserved.
bool physical_map_at(CUdeviceptr address, uint64_t size, const physical *mapped, uint64_t from);

// multicast.c: false if the handle is no multicast object's.
bool multicast_release_locked(CUmemGenericAllocationHandle handle);

// handoff.c. A memory file says in its name what it is, so that a bare descriptor can be
// understood.
void handoff_name(char *name, size_t size, const char *what, int gpu, uint64_t bytes);
bool handoff_read_name(int descriptor, const char *what, int *gpu, uint64_t *bytes);
int handoff_keep(int descriptor);  // a descriptor of our own for the same file
// Another process's file by that process's descriptor; -1: it is gone or not ours to see.
int handoff_open(int pid, int descriptor);
// Maps part of a file as memory of the GPU that was made elsewhere.
range *handoff_map_locked(int descriptor, uint64_t offset, uint64_t size, int gpu,
                          enum range_kind kind);

#endif
