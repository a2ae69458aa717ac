// SPDX-License-Identifier: Apache-2.0
// GPUs keep arrays in tiles, 64 bytes wide and 8 rows high, and take memory for them in units of
// 64 KiB. The driver does not tell the size of an array with memory of its own.
#include "array_size.h"

#define TILE_BYTES 64
#define TILE_ROWS 8
#define ARRAY_UNIT (64 * KIB)

// Bits of one element of one channel.
static unsigned channel_bits(CUarray_format format) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return 8;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 16;
    default:
      return 32;  // what block-compressed and planar formats have less is not worth a table
  }
}

static uint64_t level_bytes(uint64_t row_bytes, uint64_t rows, uint64_t layers) {
  uint64_t tiled_rows = rows > 1 ? round_up(rows, TILE_ROWS) : rows;
  return multiply(multiply(round_up(row_bytes, TILE_BYTES), tiled_rows), layers);
}

static uint64_t at_least_one(uint64_t count) {
  return count == 0 ? 1 : count;
}

static uint64_t halved(uint64_t count, unsigned level) {
  return level >= 64 ? 1 : at_least_one(count >> level);
}

uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels) {
  if ((shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) != 0) return 0;
  uint64_t element = (uint64_t)channel_bits(shape->Format) / 8 * at_least_one(shape->NumChannels);
  bool is_layered = (shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
  uint64_t total = 0;
  for (unsigned level = 0; level < at_least_one(levels); level++) {
    uint64_t layers = is_layered ? at_least_one(shape->Depth) : halved(shape->Depth, level);
    uint64_t bytes = level_bytes(multiply(halved(shape->Width, level), element),
                                 halved(shape->Height, level), layers);
    total = total + bytes < total ? UINT64_MAX : total + bytes;
    // A one-element level is the smallest there is.
    if (level > 40) break;
  }
  return round_up(total, ARRAY_UNIT);
}
