// SPDX-License-Identifier: Apache-2.0
// Memory that graphs allocate. Its addresses belong to the nodes; the bytes come from a reserve of
// the device, which grows when graphs need more at once and shrinks when it is trimmed.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/graphs.h"

#define GRANULE (2 * MIB)

CUresult graph_memory_new(int gpu, uint64_t size, graph_memory **made) {
  graph_memory *added = calloc(1, sizeof *added);
  if (added == NULL || size > UINT64_MAX / 4) {
    free(added);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *added = (graph_memory){
      .size = size, .charged = (size + GRANULE - 1) & ~(GRANULE - 1), .gpu = gpu, .references = 1};
  LOCK();
  added->address = address_take(added->charged, GRANULE);
  UNLOCK();
  if (added->address == 0) {
    free(added);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *made = added;
  return CUDA_SUCCESS;
}

static void drop_if_unused(graph_memory *dropped) {
  if (dropped->references > 0 || dropped->live) return;
  address_give_back(dropped->address, dropped->charged, true);
  free(dropped);
}

// Memory that is live outlasts its graphs, until it is freed.
void graph_memory_drop(graph_memory *dropped) {
  LOCK();
  dropped->references--;
  drop_if_unused(dropped);
  UNLOCK();
}

graph_memory *graph_memory_at(const graph *in, CUdeviceptr address) {
  for (size_t i = 0; i < in->count; i++) {
    const node *one = in->nodes[i];
    if (one->content.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && one->memory->address == address) {
      return one->memory;
    }
  }
  return NULL;
}

static void end_locked(graph_memory *ended) {
  range *gone = range_find(ended->address);
  if (gone != NULL && gone->origin == ended) range_remove(gone);
  ended->live = false;
  driver.devices[ended->gpu].graph_used -= ended->charged;
}

CUresult graph_memory_free_locked(range *freed) {
  graph_memory *ended = freed->origin;
  end_locked(ended);
  drop_if_unused(ended);
  return CUDA_SUCCESS;
}

void graph_memory_begin(graph_memory *begun) {
  LOCK();
  if (!begun->live) {
    range *added = range_add(begun->address, begun->size, RANGE_GRAPH, begun->gpu);
    if (added != NULL) {
      added->origin = begun;
      added->accessible = true;
      added->touched = true;  // what an earlier launch wrote is still there
    }
    begun->live = true;
    device *own = &driver.devices[begun->gpu];
    own->graph_used += begun->charged;
    if (own->graph_used > own->graph_used_high) own->graph_used_high = own->graph_used;
  }
  UNLOCK();
}

// ---- room for a launch -------------------------------------------------------------------------

typedef struct forecast {
  int gpu;  // of the memory, wherever the graph runs
  uint64_t used, peak;
  bool wrong;  // something is allocated that is live already
} forecast;

// Walks through the launch as it will happen.
static void foresee(forecast *ahead, const graph *launched, bool frees_first) {
  for (size_t i = 0; i < launched->count; i++) {
    const node *next = launched->order[i];
    if (next->child != NULL) foresee(ahead, next->child, frees_first);
    if (next->memory == NULL || next->memory->gpu != ahead->gpu) continue;
    if (next->content.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
      if (next->memory->live && !frees_first) ahead->wrong = true;
      ahead->used += next->memory->charged;
      if (ahead->used > ahead->peak) ahead->peak = ahead->used;
    } else {
      ahead->used -= next->memory->charged < ahead->used ? next->memory->charged : ahead->used;
    }
  }
}

// The GPUs whose memory the graph allocates or frees, a bit for each.
static uint32_t gpus_of(const graph *asked) {
  uint32_t gpus = 0;
  for (size_t i = 0; i < asked->count; i++) {
    const node *one = asked->nodes[i];
    if (one->memory != NULL) gpus |= 1u << one->memory->gpu;
    if (one->child != NULL) gpus |= gpus_of(one->child);
  }
  return gpus;
}

static void free_live(const graph *launched) {
  for (size_t i = 0; i < launched->count; i++) {
    const node *one = launched->nodes[i];
    if (one->child != NULL) free_live(one->child);
    if (one->content.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && one->memory->live) {
      end_locked(one->memory);
    }
  }
}

static CUresult reserve(device *own, int gpu, uint64_t wanted) {
  if (wanted <= own->graph_reserved) return CUDA_SUCCESS;
  uint64_t growth = wanted - own->graph_reserved;
  if (!allot_gpu_take(&driver.machine, gpu, growth)) return CUDA_ERROR_OUT_OF_MEMORY;
  own->graph_reserved = wanted;
  if (wanted > own->graph_reserved_high) own->graph_reserved_high = wanted;
  return CUDA_SUCCESS;
}

CUresult graph_memory_prepare(const graph *launched, bool frees_first) {
  uint32_t gpus = gpus_of(launched);
  if (gpus == 0) return CUDA_SUCCESS;
  LOCK();
  if (frees_first) free_live(launched);
  CUresult result = CUDA_SUCCESS;
  for (int gpu = 0; gpu < ALLOT_MACHINE_GPUS && result == CUDA_SUCCESS; gpu++) {
    if ((gpus & 1u << gpu) == 0) continue;
    device *own = &driver.devices[gpu];
    forecast ahead = {.gpu = gpu, .used = own->graph_used, .peak = own->graph_used};
    foresee(&ahead, launched, frees_first);
    result = ahead.wrong ? CUDA_ERROR_INVALID_VALUE : reserve(own, gpu, ahead.peak);
  }
  UNLOCK();
  return result;
}

void graph_memory_reset(int gpu) {
  for (range *at = range_first(0), *next; at != NULL; at = next) {
    next = range_first(at->base + 1);
    if (at->kind == RANGE_GRAPH && at->gpu == gpu) graph_memory_free_locked(at);
  }
  device *own = &driver.devices[gpu];
  allot_gpu_give_back(&driver.machine, gpu, own->graph_reserved);
  own->graph_reserved = 0;
}

// ---- entry points ------------------------------------------------------------------------------

CUresult cuDeviceGraphMemTrim(CUdevice device_ordinal) {
  int gpu;
  TRY(driver_gpu(device_ordinal, &gpu));
  // Graphs under way still need what they were given.
  context_drain(gpu, NULL);
  LOCK();
  device *own = &driver.devices[gpu];
  allot_gpu_give_back(&driver.machine, gpu, own->graph_reserved - own->graph_used);
  own->graph_reserved = own->graph_used;
  UNLOCK();
  return CUDA_SUCCESS;
}

static uint64_t *attribute_of(device *own, CUgraphMem_attribute attribute) {
  switch (attribute) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
      return &own->graph_used;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
      return &own->graph_used_high;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT:
      return &own->graph_reserved;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
      return &own->graph_reserved_high;
  }
  return NULL;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device_ordinal, CUgraphMem_attribute attribute,
                                      void *value) {
  int gpu;
  TRY(driver_gpu(device_ordinal, &gpu));
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  const uint64_t *bytes = attribute_of(&driver.devices[gpu], attribute);
  if (bytes != NULL) memcpy(value, bytes, sizeof *bytes);
  UNLOCK();
  return bytes != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Only high-water marks can be set, and only back.
CUresult cuDeviceSetGraphMemAttribute(CUdevice device_ordinal, CUgraphMem_attribute attribute,
                                      void *value) {
  int gpu;
  TRY(driver_gpu(device_ordinal, &gpu));
  uint64_t wanted;
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  memcpy(&wanted, value, sizeof wanted);
  if (wanted != 0) return CUDA_ERROR_INVALID_VALUE;
  device *own = &driver.devices[gpu];
  LOCK();
  if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) own->graph_used_high = own->graph_used;
  if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) {
    own->graph_reserved_high = own->graph_reserved;
  }
  UNLOCK();
  bool high = attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH ||
              attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
  return high ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
