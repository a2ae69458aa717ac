// SPDX-License-Identifier: Apache-2.0
// Filling memory. Every form becomes a CUDA_MEMSET_NODE_PARAMS first.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

static void fill_row(unsigned char *to, unsigned value, unsigned element, size_t count) {
  if (element == 1) {
    memset(to, (int)value, count);
    return;
  }
  for (size_t i = 0; i < count; i++) memcpy(to + i * element, &value, element);
}

static void fill_bytes(const CUDA_MEMSET_NODE_PARAMS *fill) {
  for (size_t y = 0; y < fill->height; y++) {
    fill_row((unsigned char *)(uintptr_t)fill->dst + y * fill->pitch, fill->value,
             fill->elementSize, fill->width);
  }
}

static void fill_later(void *data) {
  fill_bytes(data);
  free(data);
}

static CUresult check(const CUDA_MEMSET_NODE_PARAMS *fill, bool *zeros, int *managed) {
  unsigned element = fill->elementSize;
  if (element != 1 && element != 2 && element != 4) return CUDA_ERROR_INVALID_VALUE;
  if (fill->dst % element != 0) return CUDA_ERROR_INVALID_VALUE;
  size_t row, rows;
  if (__builtin_mul_overflow(fill->width, (size_t)element, &row)) return CUDA_ERROR_INVALID_VALUE;
  if (fill->height > 1 && fill->pitch < row) return CUDA_ERROR_INVALID_VALUE;
  if (__builtin_mul_overflow(fill->pitch, fill->height - 1, &rows)) return CUDA_ERROR_INVALID_VALUE;
  if (rows > SIZE_MAX / 2 || row > SIZE_MAX / 2) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  range *memory;
  CUresult result = memory_check(fill->dst, rows + row, &memory);
  if (result == CUDA_SUCCESS) {
    // Untouched memory is zeros already, and a page that is not written costs nothing.
    bool whole = memory->kind == RANGE_PLAIN || memory->kind == RANGE_GRAPH;
    *zeros = fill->value == 0 && whole && !memory->touched;
    memory->touched = memory->touched || !*zeros;
    *managed = range_is_managed(memory) ? memory->gpu : -1;
  }
  UNLOCK();
  return result;
}

CUresult fill_check(const CUDA_MEMSET_NODE_PARAMS *fill) {
  bool zeros;
  int managed;
  if (fill->width == 0 || fill->height == 0) return CUDA_SUCCESS;
  return check(fill, &zeros, &managed);
}

CUresult fill_on(stream *target, const CUDA_MEMSET_NODE_PARAMS *fill) {
  if (fill->width == 0 || fill->height == 0) return CUDA_SUCCESS;
  bool zeros = false;
  int managed = -1;
  TRY(check(fill, &zeros, &managed));
  if (!zeros && callbacks_pending()) {
    CUDA_MEMSET_NODE_PARAMS *later = malloc(sizeof *later);
    if (later == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    *later = *fill;
    TRY(callback_submit(target, fill_later, later));
    zeros = true;
  }
  // A fill is the GPU's work, as a kernel is: what it writes has to be there.
  if (managed == target->owner->gpu) {
    managed_submit(target, true, fill->width * fill->elementSize * fill->height);
  }
  TRY(stream_submit_copy(target, ALLOT_COPY_D2D, fill->width * fill->elementSize * fill->height));
  if (!zeros) fill_bytes(fill);
  return CUDA_SUCCESS;
}

static CUresult fill_async(CUstream handle, const CUDA_MEMSET_NODE_PARAMS *fill) {
  stream *target;
  TRY(stream_of(handle, &target));
  if (target->capture != NULL) return capture_fill(target, fill);
  TRY(capture_forbids_legacy(target));
  return fill_on(target, fill);
}

// The waiting forms wait for the host's memory only; the device's is filled in stream order.
static CUresult fill_now(CUstream handle, const CUDA_MEMSET_NODE_PARAMS *fill) {
  stream *target;
  TRY(stream_of(handle, &target));
  TRY(capture_forbids(target->owner));
  return fill_on(target, fill);
}

static CUDA_MEMSET_NODE_PARAMS plane(CUdeviceptr to, size_t pitch, unsigned value, unsigned element,
                                     size_t width, size_t height) {
  return (CUDA_MEMSET_NODE_PARAMS){.dst = to,
                                   .pitch = pitch,
                                   .value = value,
                                   .elementSize = element,
                                   .width = width,
                                   .height = height};
}

#define FILL(name, type, element)                                                        \
  CUresult name##_v2(CUdeviceptr to, type value, size_t count) {                         \
    CUDA_MEMSET_NODE_PARAMS fill = plane(to, 0, value, element, count, 1);               \
    return fill_now(CU_STREAM_LEGACY, &fill);                                            \
  }                                                                                      \
  CUresult name##_v2_ptds(CUdeviceptr to, type value, size_t count) {                    \
    CUDA_MEMSET_NODE_PARAMS fill = plane(to, 0, value, element, count, 1);               \
    return fill_now(CU_STREAM_PER_THREAD, &fill);                                        \
  }                                                                                      \
  CUresult name##Async(CUdeviceptr to, type value, size_t count, CUstream stream) {      \
    CUDA_MEMSET_NODE_PARAMS fill = plane(to, 0, value, element, count, 1);               \
    return fill_async(stream, &fill);                                                    \
  }                                                                                      \
  CUresult name##Async_ptsz(CUdeviceptr to, type value, size_t count, CUstream stream) { \
    CUDA_MEMSET_NODE_PARAMS fill = plane(to, 0, value, element, count, 1);               \
    return fill_async(stream != NULL ? stream : CU_STREAM_PER_THREAD, &fill);            \
  }

#define FILL_PLANE(name, type, element)                                                            \
  CUresult name##_v2(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height) {      \
    CUDA_MEMSET_NODE_PARAMS fill = plane(to, pitch, value, element, width, height);                \
    return fill_now(CU_STREAM_LEGACY, &fill);                                                      \
  }                                                                                                \
  CUresult name##_v2_ptds(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height) { \
    CUDA_MEMSET_NODE_PARAMS fill = plane(to, pitch, value, element, width, height);                \
    return fill_now(CU_STREAM_PER_THREAD, &fill);                                                  \
  }                                                                                                \
  CUresult name##Async(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height,      \
                       CUstream stream) {                                                          \
    CUDA_MEMSET_NODE_PARAMS fill = plane(to, pitch, value, element, width, height);                \
    return fill_async(stream, &fill);                                                              \
  }                                                                                                \
  CUresult name##Async_ptsz(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, \
                            CUstream stream) {                                                     \
    CUDA_MEMSET_NODE_PARAMS fill = plane(to, pitch, value, element, width, height);                \
    return fill_async(stream != NULL ? stream : CU_STREAM_PER_THREAD, &fill);                      \
  }

FILL(cuMemsetD8, unsigned char, 1)
FILL(cuMemsetD16, unsigned short, 2)
FILL(cuMemsetD32, unsigned int, 4)
FILL_PLANE(cuMemsetD2D8, unsigned char, 1)
FILL_PLANE(cuMemsetD2D16, unsigned short, 2)
FILL_PLANE(cuMemsetD2D32, unsigned int, 4)
