// SPDX-License-Identifier: Apache-2.0
// Arrays and mipmapped arrays. Rows of texels in device memory, as large as the tiles of a real GPU
// would make them: 64 bytes wide, 8 rows high, in units of 64 KiB.
#include <string.h>

#include "simulated/cuda/driver.h"
#include "simulated/cuda/virtual.h"

#define TILE_BYTES 64u
#define TILE_ROWS 8u
#define UNIT (64 * KIB)
#define WITHOUT_MEMORY (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)
#define LAYERS (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)

typedef struct mipmap {
  object head;
  context *owner;
  CUdeviceptr base;
  uint64_t bytes;
  unsigned levels;
  array *first;  // levels in order, by array.next_level
  CUDA_ARRAY3D_DESCRIPTOR shape;
} mipmap;

static size_t element_bytes(CUarray_format format, unsigned channels) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 2ul * channels;
    default:
      return 4ul * channels;
  }
}

static size_t round_up(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

static size_t at_least_one(size_t value) {
  return value > 0 ? value : 1;
}

static CUresult check(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
  if (shape == NULL || shape->Width == 0) return CUDA_ERROR_INVALID_VALUE;
  if (shape->NumChannels != 1 && shape->NumChannels != 2 && shape->NumChannels != 4) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (shape->Width > 1u << 28 || shape->Height > 1u << 17 || shape->Depth > 1u << 15) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

static CUDA_ARRAY3D_DESCRIPTOR level_shape(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned level) {
  CUDA_ARRAY3D_DESCRIPTOR smaller = *shape;
  bool layered = (shape->Flags & LAYERS) != 0;
  smaller.Width = at_least_one(shape->Width >> level);
  if (shape->Height > 0) smaller.Height = at_least_one(shape->Height >> level);
  if (shape->Depth > 0 && !layered) smaller.Depth = at_least_one(shape->Depth >> level);
  return smaller;
}

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
  size_t row =
      round_up(shape->Width * element_bytes(shape->Format, shape->NumChannels), TILE_BYTES);
  size_t rows = shape->Height > 1 ? round_up(shape->Height, TILE_ROWS) : 1;
  return (uint64_t)row * rows * at_least_one(shape->Depth);
}

static uint64_t all_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels) {
  uint64_t sum = 0;
  for (unsigned level = 0; level < levels; level++) {
    CUDA_ARRAY3D_DESCRIPTOR smaller = level_shape(shape, level);
    sum += level_bytes(&smaller);
  }
  return round_up(sum, UNIT);
}

// Memory for one array or all levels of a mipmapped one. 0 with success: it has none of its own.
static CUresult take_memory(context *owner, const CUDA_ARRAY3D_DESCRIPTOR *shape, uint64_t bytes,
                            CUdeviceptr *base) {
  *base = 0;
  if (shape->Flags & WITHOUT_MEMORY) return CUDA_SUCCESS;
  if (!allot_gpu_take(&driver.machine, owner->gpu, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *base = address_take(bytes, 0);
  range *added = *base != 0 ? range_add(*base, bytes, RANGE_ARRAY, owner->gpu) : NULL;
  if (added == NULL) {
    if (*base != 0) address_give_back(*base, bytes, false);
    allot_gpu_give_back(&driver.machine, owner->gpu, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  added->charged = bytes;
  added->accessible = true;
  return CUDA_SUCCESS;
}

static void give_memory_back(CUdeviceptr base) {
  range *gone = base != 0 ? range_find(base) : NULL;
  if (gone == NULL) return;
  address_give_back(gone->base, gone->size, gone->touched);
  allot_gpu_give_back(&driver.machine, gone->gpu, gone->charged);
  range_remove(gone);
}

static array *new_array(context *owner, const CUDA_ARRAY3D_DESCRIPTOR *shape, CUdeviceptr base,
                        void *parent) {
  array *made = object_new(OBJECT_ARRAY, sizeof(array), parent);
  if (made == NULL) return NULL;
  made->owner = owner;
  made->base = base;
  made->width = shape->Width;
  made->height = shape->Height;
  made->depth = shape->Depth;
  made->format = shape->Format;
  made->channels = shape->NumChannels;
  made->flags = shape->Flags;
  made->pitch =
      round_up(shape->Width * element_bytes(shape->Format, shape->NumChannels), TILE_BYTES);
  return made;
}

static CUresult create(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
  ENTER_CONTEXT(current);
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  TRY(check(shape));
  TRY(capture_forbids(current));
  CUdeviceptr base;
  LOCK();
  CUresult result = take_memory(current, shape, all_bytes(shape, 1), &base);
  if (result == CUDA_SUCCESS) {
    array *made = new_array(current, shape, base, current);
    *handle = (CUarray)made;
    if (made == NULL) {
      give_memory_back(base);
      result = CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  UNLOCK();
  return result;
}

CUresult cuArray3DCreate_v2(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
  return create(handle, shape);
}

CUresult cuArrayCreate_v2(CUarray *handle, const CUDA_ARRAY_DESCRIPTOR *shape) {
  ENTER();
  if (shape == NULL) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY3D_DESCRIPTOR volume = {.Width = shape->Width,
                                    .Height = shape->Height,
                                    .Format = shape->Format,
                                    .NumChannels = shape->NumChannels};
  return create(handle, &volume);
}

CUresult array_of(CUarray handle, array **found) {
  if (!object_valid(handle, OBJECT_ARRAY)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (array *)handle;
  return CUDA_SUCCESS;
}

size_t array_element_bytes(CUarray handle) {
  array *asked;
  if (array_of(handle, &asked) != CUDA_SUCCESS) return 1;
  return element_bytes(asked->format, asked->channels);
}

void array_destroy_locked(array *dying) {
  if (dying->physical != NULL) physical_drop_locked(dying->physical);
  give_memory_back(dying->base);
  object_free(dying);
}

CUresult cuArrayDestroy(CUarray handle) {
  ENTER();
  array *dying;
  TRY(array_of(handle, &dying));
  if (dying->mipmap != NULL) return CUDA_ERROR_INVALID_HANDLE;
  context_drain(dying->owner->gpu, dying->owner);
  LOCK();
  array_destroy_locked(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *shape, CUarray handle) {
  ENTER();
  array *asked;
  TRY(array_of(handle, &asked));
  if (shape == NULL) return CUDA_ERROR_INVALID_VALUE;
  *shape = (CUDA_ARRAY3D_DESCRIPTOR){.Width = asked->width,
                                     .Height = asked->height,
                                     .Depth = asked->depth,
                                     .Format = asked->format,
                                     .NumChannels = asked->channels,
                                     .Flags = asked->flags};
  return CUDA_SUCCESS;
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *shape, CUarray handle) {
  CUDA_ARRAY3D_DESCRIPTOR volume;
  TRY(cuArray3DGetDescriptor_v2(&volume, handle));
  if (shape == NULL) return CUDA_ERROR_INVALID_VALUE;
  *shape = (CUDA_ARRAY_DESCRIPTOR){.Width = volume.Width,
                                   .Height = volume.Height,
                                   .Format = volume.Format,
                                   .NumChannels = volume.NumChannels};
  return CUDA_SUCCESS;
}

CUresult cuArrayGetPlane(CUarray *plane, CUarray handle, unsigned int index) {
  ENTER();
  array *asked;
  TRY(array_of(handle, &asked));
  return CUDA_ERROR_INVALID_VALUE;  // none of the formats here has planes
}

static CUresult requirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *wanted, unsigned flags,
                             uint64_t bytes) {
  if (wanted == NULL || !(flags & WITHOUT_MEMORY)) return CUDA_ERROR_INVALID_VALUE;
  *wanted =
      (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = round_up(bytes, 2 * MIB), .alignment = 2 * MIB};
  return CUDA_SUCCESS;
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *wanted, CUarray handle,
                                      CUdevice device) {
  ENTER();
  array *asked;
  TRY(array_of(handle, &asked));
  CUDA_ARRAY3D_DESCRIPTOR shape;
  TRY(cuArray3DGetDescriptor_v2(&shape, handle));
  return requirements(wanted, asked->flags, all_bytes(&shape, 1));
}

// ---- mipmapped ---------------------------------------------------------------------------------

static bool make_levels(mipmap *made) {
  CUdeviceptr at = made->base;
  array **last = &made->first;
  for (unsigned level = 0; level < made->levels; level++) {
    CUDA_ARRAY3D_DESCRIPTOR smaller = level_shape(&made->shape, level);
    array *own = new_array(made->owner, &smaller, at, made);
    if (own == NULL) return false;
    own->mipmap = made;
    *last = own;
    last = &own->next_level;
    if (at != 0) at += level_bytes(&smaller);
  }
  return true;
}

void mipmap_destroy_locked(mipmap *dying) {
  while (dying->head.children != NULL) object_free(dying->head.children);
  give_memory_back(dying->base);
  object_free(dying);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *handle, const CUDA_ARRAY3D_DESCRIPTOR *shape,
                                unsigned int levels) {
  ENTER_CONTEXT(current);
  if (handle == NULL || levels == 0) return CUDA_ERROR_INVALID_VALUE;
  TRY(check(shape));
  TRY(capture_forbids(current));
  size_t longest = shape->Width > shape->Height ? shape->Width : shape->Height;
  unsigned most = 1;
  while (longest >> most > 0) most++;
  if (levels > most) levels = most;
  LOCK();
  mipmap *made = object_new(OBJECT_MIPMAP, sizeof(mipmap), current);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (made != NULL) {
    made->owner = current;
    made->levels = levels;
    made->shape = *shape;
    made->bytes = all_bytes(shape, levels);
    result = take_memory(current, shape, made->bytes, &made->base);
    if (result == CUDA_SUCCESS && !make_levels(made)) result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) mipmap_destroy_locked(made);
  }
  UNLOCK();
  if (result == CUDA_SUCCESS) *handle = (CUmipmappedArray)made;
  return result;
}

static CUresult mipmap_of(CUmipmappedArray handle, mipmap **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_MIPMAP)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (mipmap *)handle;
  return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetLevel(CUarray *handle, CUmipmappedArray from, unsigned int level) {
  mipmap *asked;
  TRY(mipmap_of(from, &asked));
  if (handle == NULL || level >= asked->levels) return CUDA_ERROR_INVALID_VALUE;
  array *own = asked->first;
  for (unsigned i = 0; i < level; i++) own = own->next_level;
  *handle = (CUarray)own;
  return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray handle) {
  mipmap *dying;
  TRY(mipmap_of(handle, &dying));
  context_drain(dying->owner->gpu, dying->owner);
  LOCK();
  mipmap_destroy_locked(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *wanted,
                                               CUmipmappedArray handle, CUdevice device) {
  mipmap *asked;
  TRY(mipmap_of(handle, &asked));
  return requirements(wanted, asked->shape.Flags, asked->bytes);
}
