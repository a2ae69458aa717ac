// SPDX-License-Identifier: Apache-2.0
// Addresses of device memory.
//
// The addresses are real: a region is one sparse memory file, mapped whole, whose pages come into
// being when something is written. So 80 GB can be allocated on a laptop, data really moves, and
// another process can map the same bytes from the file. Children do not inherit the mapping, as
// they do not inherit a GPU's memory.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "simulated/cuda/driver.h"

#ifndef MADV_REMOVE
#define MADV_REMOVE 9
#endif

#define GIB (1024ull * MIB)
// Sanitizers and 47-bit addresses leave room for a few of these; one holds the largest GPU.
#define REGION_BYTES (256 * GIB)
#define SMALLEST_REGION (GIB / 4)
#define REGIONS 32
#define GRANULE (2 * MIB)

typedef struct gap {
  CUdeviceptr base;
  uint64_t size;
} gap;

typedef struct region {
  CUdeviceptr base;
  uint64_t size;
  int descriptor;
  gap *gaps;  // what is free, by address
  size_t gap_count, gap_room;
} region;

static region regions[REGIONS];
static int region_count;

static int make_file(uint64_t size) {
  int descriptor = memfd_file("allotment-device-memory");
  if (descriptor < 0) return -1;
  if (ftruncate(descriptor, (off_t)size) != 0) {
    close(descriptor);
    return -1;
  }
  return descriptor;
}

static bool map_region(region *made, uint64_t size) {
  struct rlimit files;
  // A limit on file sizes would kill the program with a signal.
  if (getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < size) return false;
  int descriptor = make_file(size);
  if (descriptor < 0) return false;
  // Room to align the base to the granule.
  void *reserved =
      mmap(NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    close(descriptor);
    return false;
  }
  uintptr_t base = ((uintptr_t)reserved + GRANULE - 1) & ~(uintptr_t)(GRANULE - 1);
  void *mapped = mmap((void *)base, size, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE | MAP_FIXED, descriptor, 0);
  if (mapped == MAP_FAILED) {
    munmap(reserved, size + GRANULE);
    close(descriptor);
    return false;
  }
  madvise(reserved, size + GRANULE, MADV_DONTFORK);
  *made = (region){.base = (CUdeviceptr)base, .size = size, .descriptor = descriptor};
  return true;
}

static bool add_gap(region *in, size_t at, gap added) {
  if (in->gap_count == in->gap_room) {
    size_t room = in->gap_room > 0 ? in->gap_room * 2 : 64;
    gap *larger = realloc(in->gaps, room * sizeof *larger);
    if (larger == NULL) return false;
    in->gaps = larger;
    in->gap_room = room;
  }
  memmove(&in->gaps[at + 1], &in->gaps[at], (in->gap_count - at) * sizeof *in->gaps);
  in->gaps[at] = added;
  in->gap_count++;
  return true;
}

static void drop_gap(region *in, size_t at) {
  in->gap_count--;
  memmove(&in->gaps[at], &in->gaps[at + 1], (in->gap_count - at) * sizeof *in->gaps);
}

static bool add_region(uint64_t at_least) {
  if (region_count == REGIONS) return false;
  region *made = &regions[region_count];
  uint64_t size = REGION_BYTES;
  if (size < at_least) size = at_least;
  while (!map_region(made, size)) {
    // Where the program's own address space is limited, be content with less.
    size /= 4;
    if (size < SMALLEST_REGION || size < at_least) return false;
  }
  if (!add_gap(made, 0, (gap){made->base, size})) return false;
  region_count++;
  return true;
}

static CUdeviceptr take_from(region *in, uint64_t size, uint64_t alignment) {
  for (size_t at = 0; at < in->gap_count; at++) {
    gap *found = &in->gaps[at];
    uint64_t base = (found->base + alignment - 1) & ~(alignment - 1);
    uint64_t skipped = base - found->base;
    if (skipped > found->size || found->size - skipped < size) continue;
    gap rest = {base + size, found->size - skipped - size};
    if (skipped > 0) {
      if (rest.size > 0 && !add_gap(in, at + 1, rest)) return 0;
      in->gaps[at].size = skipped;
    } else if (rest.size > 0) {
      *found = rest;
    } else {
      drop_gap(in, at);
    }
    return base;
  }
  return 0;
}

CUdeviceptr address_take(uint64_t size, uint64_t alignment) {
  if (alignment < GRANULE) alignment = GRANULE;
  if (size > UINT64_MAX / 4) return 0;
  size = (size + GRANULE - 1) & ~(GRANULE - 1);
  for (int at = 0; at < region_count; at++) {
    CUdeviceptr taken = take_from(&regions[at], size, alignment);
    if (taken != 0) return taken;
  }
  if (!add_region(size + alignment)) return 0;
  return take_from(&regions[region_count - 1], size, alignment);
}

static region *region_of(CUdeviceptr address) {
  for (int at = 0; at < region_count; at++) {
    if (address - regions[at].base < regions[at].size) return &regions[at];
  }
  return NULL;
}

void address_give_back(CUdeviceptr address, uint64_t size, bool touched) {
  region *in = region_of(address);
  if (in == NULL) return;
  size = (size + GRANULE - 1) & ~(GRANULE - 1);
  if (touched) madvise((void *)(uintptr_t)address, size, MADV_REMOVE);
  size_t at = 0, end = in->gap_count;
  while (at < end) {
    size_t middle = (at + end) / 2;
    if (in->gaps[middle].base < address) {
      at = middle + 1;
    } else {
      end = middle;
    }
  }
  bool joins_before = at > 0 && in->gaps[at - 1].base + in->gaps[at - 1].size == address;
  bool joins_after = at < in->gap_count && address + size == in->gaps[at].base;
  if (joins_before && joins_after) {
    in->gaps[at - 1].size += size + in->gaps[at].size;
    drop_gap(in, at);
  } else if (joins_before) {
    in->gaps[at - 1].size += size;
  } else if (joins_after) {
    in->gaps[at].base = address;
    in->gaps[at].size += size;
  } else {
    add_gap(in, at, (gap){address, size});
  }
}

bool address_file(CUdeviceptr address, int *descriptor, uint64_t *offset) {
  region *in = region_of(address);
  if (in == NULL) return false;
  *descriptor = in->descriptor;
  *offset = address - in->base;
  return true;
}
