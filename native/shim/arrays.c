// SPDX-License-Identifier: Apache-2.0
// Arrays and mipmapped arrays: the device's tiles of them, in units of 64 KiB.
//
// Sparse arrays and those with deferred mapping have no memory of their own; what is mapped into
// them was charged when it was made (virtual.c).
#include "array_size.h"
#include "charge.h"
#include "dead.h"
#include "driver.h"
#include "memory.h"
#include "virtual.h"

typedef struct array_request {
  target at;
  uint64_t bytes;
  bool charged;
} array_request;

static CUresult array_begin(array_request *request, const CUDA_ARRAY3D_DESCRIPTOR *shape,
                            unsigned levels) {
  *request = (array_request){.at.device = -1};
  CUresult refusal = target_current(&request->at);
  if (refusal != CUDA_SUCCESS || request->at.context == NULL) return refusal;
  request->bytes = array_bytes(shape, levels);
  if (request->bytes == 0) return CUDA_SUCCESS;
  request->charged = charge_acquire(request->at.own, request->at.device, request->bytes);
  return request->charged ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult array_end(array_request *request, CUresult result, record_space space,
                          const void *handle) {
  if (!request->charged) return result;
  process *own = request->at.own;
  if (result == CUDA_SUCCESS) {
    record added = {.space = (uint8_t)space,
                    .key = (uint64_t)(uintptr_t)handle,
                    .owner = (uint64_t)(uintptr_t)request->at.context,
                    .bytes = request->bytes,
                    .device = (int16_t)request->at.device};
    record displaced;
    bool was_displaced;
    if (records_put(&own->records, &added, &displaced, &was_displaced)) {
      if (was_displaced) charge_release(own, displaced.device, displaced.bytes);
      return result;
    }
    if (space == SPACE_ARRAY) {
      DRIVER(REAL(cuArrayDestroy)((CUarray)(uintptr_t)handle));
    } else {
      DRIVER(REAL(cuMipmappedArrayDestroy)((CUmipmappedArray)(uintptr_t)handle));
    }
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  charge_release(own, request->at.device, request->bytes);
  return result;
}

// The driver gets the shape that was read here: another thread may write it meanwhile.

static CUDA_ARRAY3D_DESCRIPTOR flat_shape(const CUDA_ARRAY_DESCRIPTOR *shape) {
  return (CUDA_ARRAY3D_DESCRIPTOR){.Width = shape->Width,
                                   .Height = shape->Height,
                                   .Format = shape->Format,
                                   .NumChannels = shape->NumChannels};
}

#define CREATE_ARRAY(handle, shape_of_it, call)                      \
  do {                                                               \
    UNCANCELLED;                                                     \
    array_request request;                                           \
    CUDA_ARRAY3D_DESCRIPTOR shape = shape_of_it;                     \
    CUresult result = array_begin(&request, &shape, 1);              \
    if (result != CUDA_SUCCESS) return result;                       \
    CUarray made = NULL;                                             \
    result = WITH_PATIENCE(request.at.own, request.at.device, call); \
    result = array_end(&request, result, SPACE_ARRAY, made);         \
    GIVE_RESULT(handle, made, result);                               \
    return result;                                                   \
  } while (0)

CUDA_WRAPPER(cuArrayCreate_v2, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR *shape)) {
  if (shape == NULL || !governed()) return UNGOVERNED(cuArrayCreate_v2)(array, shape);
  const CUDA_ARRAY_DESCRIPTOR read = *shape;
  CREATE_ARRAY(array, flat_shape(&read), REAL(cuArrayCreate_v2)(RESULT(array, made), &read));
}

CUDA_WRAPPER(cuArrayCreate, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR_v1 *shape)) {
  if (shape == NULL || !governed()) return UNGOVERNED(cuArrayCreate)(array, shape);
  const CUDA_ARRAY_DESCRIPTOR_v1 read = *shape;
  CREATE_ARRAY(array,
               ((CUDA_ARRAY3D_DESCRIPTOR){.Width = read.Width,
                                          .Height = read.Height,
                                          .Format = read.Format,
                                          .NumChannels = read.NumChannels}),
               REAL(cuArrayCreate)(RESULT(array, made), &read));
}

CUDA_WRAPPER(cuArray3DCreate_v2, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR *shape)) {
  if (shape == NULL || !governed()) return UNGOVERNED(cuArray3DCreate_v2)(array, shape);
  const CUDA_ARRAY3D_DESCRIPTOR read = *shape;
  CREATE_ARRAY(array, read, REAL(cuArray3DCreate_v2)(RESULT(array, made), &read));
}

CUDA_WRAPPER(cuArray3DCreate, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *shape)) {
  if (shape == NULL || !governed()) return UNGOVERNED(cuArray3DCreate)(array, shape);
  const CUDA_ARRAY3D_DESCRIPTOR_v1 read = *shape;
  CREATE_ARRAY(array,
               ((CUDA_ARRAY3D_DESCRIPTOR){.Width = read.Width,
                                          .Height = read.Height,
                                          .Depth = read.Depth,
                                          .Format = read.Format,
                                          .NumChannels = read.NumChannels,
                                          .Flags = read.Flags}),
               REAL(cuArray3DCreate)(RESULT(array, made), &read));
}

CUDA_WRAPPER(cuMipmappedArrayCreate, (CUmipmappedArray * mipmap,
                                      const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels)) {
  if (shape == NULL || !governed())
    return UNGOVERNED(cuMipmappedArrayCreate)(mipmap, shape, levels);
  UNCANCELLED;
  const CUDA_ARRAY3D_DESCRIPTOR read = *shape;
  array_request request;
  CUresult result = array_begin(&request, &read, levels);
  if (result != CUDA_SUCCESS) return result;
  CUmipmappedArray made = NULL;
  result = WITH_PATIENCE(request.at.own, request.at.device,
                         REAL(cuMipmappedArrayCreate)(RESULT(mipmap, made), &read, levels));
  result = array_end(&request, result, SPACE_MIPMAP, made);
  GIVE_RESULT(mipmap, made, result);
  return result;
}

// As with pointers, the record goes before the handle can be given out again.
#define DESTROY_ARRAY(handle, space, call)                       \
  do {                                                           \
    process *own = governed() ? process_state() : NULL;          \
    if (own == NULL) return call;                                \
    UNCANCELLED;                                                 \
    record gone;                                                 \
    uint64_t key = (uint64_t)(uintptr_t)(handle);                \
    bool known = records_take(&own->records, space, key, &gone); \
    CUresult result = DRIVER(call);                              \
    if (result == CUDA_SUCCESS) {                                \
      if (known) charge_release(own, gone.device, gone.bytes);   \
      virtual_array_gone(own, key);                              \
    } else if (known) {                                          \
      records_keep(&own->records, &gone);                        \
    }                                                            \
    return result;                                               \
  } while (0)

CUDA_WRAPPER(cuArrayDestroy, (CUarray array)) {
  DESTROY_ARRAY(array, SPACE_ARRAY, REAL(cuArrayDestroy)(array));
}

CUDA_WRAPPER(cuMipmappedArrayDestroy, (CUmipmappedArray mipmap)) {
  DESTROY_ARRAY(mipmap, SPACE_MIPMAP, REAL(cuMipmappedArrayDestroy)(mipmap));
}
