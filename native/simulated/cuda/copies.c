// SPDX-License-Identifier: Apache-2.0
// How a copy is carried out. Every form of copy becomes a CUDA_MEMCPY3D first.
//
// The bytes move when the copy is submitted, its time passes on a copy engine. Only behind
// functions on the host that have still to run do the bytes wait for their turn too (callbacks.c).
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

// One side of a copy as addresses of this process, which device addresses are too.
typedef struct side {
  unsigned char *base;
  size_t pitch, slice;  // bytes from row to row, and from slice to slice
  bool device;
  range *memory;  // NULL: of the host, and not page-locked
} side;

typedef struct transfer {
  side from, to;
  size_t width, height, depth;
} transfer;

static bool bad_product(size_t one, size_t other, size_t *product) {
  return __builtin_mul_overflow(one, other, product) || *product > SIZE_MAX / 2;
}

// Bytes from the first to the last that the side's rows span.
static CUresult span(const transfer *moved, const side *own, size_t *bytes) {
  size_t slices, rows;
  if (bad_product(own->slice, moved->depth - 1, &slices)) return CUDA_ERROR_INVALID_VALUE;
  if (bad_product(own->pitch, moved->height - 1, &rows)) return CUDA_ERROR_INVALID_VALUE;
  *bytes = slices + rows + moved->width;
  return CUDA_SUCCESS;
}

// The side at an address, which `must_be_device` says has to be memory of a device or page-locked.
static CUresult at_address(const transfer *moved, side *own, CUdeviceptr base, size_t offset,
                           bool must_be_device) {
  own->base = (unsigned char *)(uintptr_t)base + offset;
  size_t bytes;
  TRY(span(moved, own, &bytes));
  own->memory = range_find(base + offset);
  if (own->memory == NULL && !must_be_device)
    return base != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  TRY(memory_check(base + offset, bytes, &own->memory));
  own->device = own->memory->gpu >= 0;
  return CUDA_SUCCESS;
}

static CUresult at_array(const transfer *moved, side *own, CUarray handle, size_t x, size_t y,
                         size_t z) {
  array *from;
  TRY(array_of(handle, &from));
  own->pitch = from->pitch;
  own->slice = from->pitch * (from->height > 0 ? from->height : 1);
  if (x + moved->width > from->pitch || y + moved->height > (from->height > 0 ? from->height : 1) ||
      z + moved->depth > (from->depth > 0 ? from->depth : 1)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return at_address(moved, own, from->base, x + y * own->pitch + z * own->slice, true);
}

static CUresult resolve_from(transfer *moved, const CUDA_MEMCPY3D *copy) {
  side *own = &moved->from;
  own->pitch = copy->srcPitch != 0 ? copy->srcPitch : copy->WidthInBytes;
  own->slice = own->pitch * (copy->srcHeight != 0 ? copy->srcHeight : copy->Height);
  size_t offset = copy->srcXInBytes + copy->srcY * own->pitch + copy->srcZ * own->slice;
  switch (copy->srcMemoryType) {
    case CU_MEMORYTYPE_HOST:
      return at_address(moved, own, (CUdeviceptr)(uintptr_t)copy->srcHost, offset, false);
    case CU_MEMORYTYPE_DEVICE:
      return at_address(moved, own, copy->srcDevice, offset, true);
    case CU_MEMORYTYPE_UNIFIED:
      return at_address(moved, own, copy->srcDevice, offset, false);
    case CU_MEMORYTYPE_ARRAY:
      return at_array(moved, own, copy->srcArray, copy->srcXInBytes, copy->srcY, copy->srcZ);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult resolve_to(transfer *moved, const CUDA_MEMCPY3D *copy) {
  side *own = &moved->to;
  own->pitch = copy->dstPitch != 0 ? copy->dstPitch : copy->WidthInBytes;
  own->slice = own->pitch * (copy->dstHeight != 0 ? copy->dstHeight : copy->Height);
  size_t offset = copy->dstXInBytes + copy->dstY * own->pitch + copy->dstZ * own->slice;
  switch (copy->dstMemoryType) {
    case CU_MEMORYTYPE_HOST:
      return at_address(moved, own, (CUdeviceptr)(uintptr_t)copy->dstHost, offset, false);
    case CU_MEMORYTYPE_DEVICE:
      return at_address(moved, own, copy->dstDevice, offset, true);
    case CU_MEMORYTYPE_UNIFIED:
      return at_address(moved, own, copy->dstDevice, offset, false);
    case CU_MEMORYTYPE_ARRAY:
      return at_array(moved, own, copy->dstArray, copy->dstXInBytes, copy->dstY, copy->dstZ);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult resolve(const CUDA_MEMCPY3D *copy, transfer *moved) {
  *moved = (transfer){.width = copy->WidthInBytes, .height = copy->Height, .depth = copy->Depth};
  if ((copy->srcPitch != 0 && copy->srcPitch < copy->WidthInBytes && copy->Height > 1) ||
      (copy->dstPitch != 0 && copy->dstPitch < copy->WidthInBytes && copy->Height > 1)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  CUresult result = resolve_from(moved, copy);
  if (result == CUDA_SUCCESS) result = resolve_to(moved, copy);
  if (result == CUDA_SUCCESS && moved->to.memory != NULL) moved->to.memory->touched = true;
  UNLOCK();
  return result;
}

static void move_bytes(const transfer *moved) {
  for (size_t z = 0; z < moved->depth; z++) {
    for (size_t y = 0; y < moved->height; y++) {
      memmove(moved->to.base + z * moved->to.slice + y * moved->to.pitch,
              moved->from.base + z * moved->from.slice + y * moved->from.pitch, moved->width);
    }
  }
}

static void move_later(void *data) {
  move_bytes(data);
  free(data);
}

static unsigned engine_of(const transfer *moved) {
  if (moved->from.device) return moved->to.device ? ALLOT_COPY_D2D : ALLOT_COPY_D2H;
  return moved->to.device ? ALLOT_COPY_H2D : ALLOT_COPY_D2D;
}

// Rows without gaps between them are one row.
static void flatten(transfer *moved) {
  bool rows_touch = moved->from.pitch == moved->width && moved->to.pitch == moved->width;
  if (moved->height > 1 && rows_touch && moved->depth == 1) {
    moved->width *= moved->height;
    moved->height = 1;
  }
}

CUresult copy_check(const CUDA_MEMCPY3D *copy) {
  if (copy->WidthInBytes == 0 || copy->Height == 0 || copy->Depth == 0) return CUDA_SUCCESS;
  transfer moved;
  return resolve(copy, &moved);
}

CUresult copy_on(stream *target, const CUDA_MEMCPY3D *copy) {
  if (copy->WidthInBytes == 0 || copy->Height == 0 || copy->Depth == 0) return CUDA_SUCCESS;
  transfer moved;
  TRY(resolve(copy, &moved));
  uint64_t bytes = (uint64_t)moved.width * moved.height * moved.depth;
  flatten(&moved);
  if (callbacks_pending()) {
    transfer *later = malloc(sizeof *later);
    if (later == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    *later = moved;
    TRY(callback_submit(target, move_later, later));
    return stream_submit_copy(target, engine_of(&moved), bytes);
  }
  // The time on the engine begins now, however long this machine takes to move the bytes.
  TRY(stream_submit_copy(target, engine_of(&moved), bytes));
  move_bytes(&moved);
  return CUDA_SUCCESS;
}

CUresult copy_async(CUstream handle, const CUDA_MEMCPY3D *copy) {
  stream *target;
  TRY(stream_of(handle, &target));
  if (target->capture != NULL) return capture_copy(target, copy);
  TRY(capture_forbids_legacy(target));
  return copy_on(target, copy);
}

CUresult copy_now(CUstream handle, const CUDA_MEMCPY3D *copy) {
  stream *target;
  TRY(stream_of(handle, &target));
  TRY(capture_forbids(target->owner));
  TRY(copy_on(target, copy));
  return stream_synchronize(target);
}

CUDA_MEMCPY3D copy_linear(CUmemorytype to_type, CUdeviceptr to, CUmemorytype from_type,
                          CUdeviceptr from, size_t bytes) {
  CUDA_MEMCPY3D copy = {.WidthInBytes = bytes, .Height = 1, .Depth = 1};
  copy.srcMemoryType = from_type;
  copy.srcDevice = from;
  copy.srcHost = (const void *)(uintptr_t)from;
  copy.dstMemoryType = to_type;
  copy.dstDevice = to;
  copy.dstHost = (void *)(uintptr_t)to;
  return copy;
}

CUDA_MEMCPY3D copy_plane(const CUDA_MEMCPY2D *plane) {
  return (CUDA_MEMCPY3D){.srcXInBytes = plane->srcXInBytes,
                         .srcY = plane->srcY,
                         .srcMemoryType = plane->srcMemoryType,
                         .srcHost = plane->srcHost,
                         .srcDevice = plane->srcDevice,
                         .srcArray = plane->srcArray,
                         .srcPitch = plane->srcPitch,
                         .dstXInBytes = plane->dstXInBytes,
                         .dstY = plane->dstY,
                         .dstMemoryType = plane->dstMemoryType,
                         .dstHost = plane->dstHost,
                         .dstDevice = plane->dstDevice,
                         .dstArray = plane->dstArray,
                         .dstPitch = plane->dstPitch,
                         .WidthInBytes = plane->WidthInBytes,
                         .Height = plane->Height,
                         .Depth = 1};
}

CUDA_MEMCPY3D copy_between_peers(const CUDA_MEMCPY3D_PEER *peers) {
  return (CUDA_MEMCPY3D){.srcXInBytes = peers->srcXInBytes,
                         .srcY = peers->srcY,
                         .srcZ = peers->srcZ,
                         .srcMemoryType = peers->srcMemoryType,
                         .srcHost = peers->srcHost,
                         .srcDevice = peers->srcDevice,
                         .srcArray = peers->srcArray,
                         .srcPitch = peers->srcPitch,
                         .srcHeight = peers->srcHeight,
                         .dstXInBytes = peers->dstXInBytes,
                         .dstY = peers->dstY,
                         .dstZ = peers->dstZ,
                         .dstMemoryType = peers->dstMemoryType,
                         .dstHost = peers->dstHost,
                         .dstDevice = peers->dstDevice,
                         .dstArray = peers->dstArray,
                         .dstPitch = peers->dstPitch,
                         .dstHeight = peers->dstHeight,
                         .WidthInBytes = peers->WidthInBytes,
                         .Height = peers->Height,
                         .Depth = peers->Depth};
}
