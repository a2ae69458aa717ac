// SPDX-License-Identifier: Apache-2.0
// The entry points that copy. Each says which kinds of memory it goes between.
#include "simulated/cuda/driver.h"

#define HOST CU_MEMORYTYPE_HOST
#define DEVICE CU_MEMORYTYPE_DEVICE
#define ANY CU_MEMORYTYPE_UNIFIED
#define NUMBER(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

// A waiting copy, in its two forms: on the legacy stream, and on the thread's own.
#define WAITING(name, parameters, ...)            \
  CUresult name parameters {                      \
    ENTER();                                      \
    CUDA_MEMCPY3D copy = __VA_ARGS__;             \
    return copy_now(CU_STREAM_LEGACY, &copy);     \
  }                                               \
  CUresult name##_ptds parameters {               \
    ENTER();                                      \
    CUDA_MEMCPY3D copy = __VA_ARGS__;             \
    return copy_now(CU_STREAM_PER_THREAD, &copy); \
  }

// A copy in stream order, whose null stream is the legacy one or the thread's own.
#define IN_ORDER(name, parameters, ...)                                       \
  CUresult name parameters {                                                  \
    ENTER();                                                                  \
    CUDA_MEMCPY3D copy = __VA_ARGS__;                                         \
    return copy_async(stream, &copy);                                         \
  }                                                                           \
  CUresult name##_ptsz parameters {                                           \
    ENTER();                                                                  \
    CUDA_MEMCPY3D copy = __VA_ARGS__;                                         \
    return copy_async(stream != NULL ? stream : CU_STREAM_PER_THREAD, &copy); \
  }

WAITING(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes),
        copy_linear(DEVICE, to, HOST, NUMBER(from), bytes))
WAITING(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes),
        copy_linear(HOST, NUMBER(to), DEVICE, from, bytes))
WAITING(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes),
        copy_linear(DEVICE, to, DEVICE, from, bytes))
WAITING(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes),
        copy_linear(ANY, to, ANY, from, bytes))
WAITING(cuMemcpyPeer,
        (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
         size_t bytes),
        copy_linear(DEVICE, to, DEVICE, from, bytes))

IN_ORDER(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
         copy_linear(DEVICE, to, HOST, NUMBER(from), bytes))
IN_ORDER(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream),
         copy_linear(HOST, NUMBER(to), DEVICE, from, bytes))
IN_ORDER(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
         copy_linear(DEVICE, to, DEVICE, from, bytes))
IN_ORDER(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
         copy_linear(ANY, to, ANY, from, bytes))
IN_ORDER(cuMemcpyPeerAsync,
         (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
          size_t bytes, CUstream stream),
         copy_linear(DEVICE, to, DEVICE, from, bytes))
IN_ORDER(cuMemcpyWithAttributesAsync,
         (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUmemcpyAttributes *attributes,
          CUstream stream),
         copy_linear(ANY, to, ANY, from, bytes))

// ---- arrays ------------------------------------------------------------------------------------

static CUDA_MEMCPY3D into_array(CUarray to, size_t offset, CUmemorytype type, CUdeviceptr from,
                                size_t bytes) {
  CUDA_MEMCPY3D copy = copy_linear(DEVICE, 0, type, from, bytes);
  copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  copy.dstArray = to;
  copy.dstXInBytes = offset;
  return copy;
}

static CUDA_MEMCPY3D out_of_array(CUmemorytype type, CUdeviceptr to, CUarray from, size_t offset,
                                  size_t bytes) {
  CUDA_MEMCPY3D copy = copy_linear(type, to, DEVICE, 0, bytes);
  copy.srcMemoryType = CU_MEMORYTYPE_ARRAY;
  copy.srcArray = from;
  copy.srcXInBytes = offset;
  return copy;
}

static CUDA_MEMCPY3D between_arrays(CUarray to, size_t to_offset, CUarray from, size_t from_offset,
                                    size_t bytes) {
  CUDA_MEMCPY3D copy = out_of_array(DEVICE, 0, from, from_offset, bytes);
  copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  copy.dstArray = to;
  copy.dstXInBytes = to_offset;
  return copy;
}

WAITING(cuMemcpyDtoA_v2, (CUarray to, size_t offset, CUdeviceptr from, size_t bytes),
        into_array(to, offset, DEVICE, from, bytes))
WAITING(cuMemcpyAtoD_v2, (CUdeviceptr to, CUarray from, size_t offset, size_t bytes),
        out_of_array(DEVICE, to, from, offset, bytes))
WAITING(cuMemcpyHtoA_v2, (CUarray to, size_t offset, const void *from, size_t bytes),
        into_array(to, offset, HOST, NUMBER(from), bytes))
WAITING(cuMemcpyAtoH_v2, (void *to, CUarray from, size_t offset, size_t bytes),
        out_of_array(HOST, NUMBER(to), from, offset, bytes))
WAITING(cuMemcpyAtoA_v2,
        (CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t bytes),
        between_arrays(to, to_offset, from, from_offset, bytes))
IN_ORDER(cuMemcpyHtoAAsync_v2,
         (CUarray to, size_t offset, const void *from, size_t bytes, CUstream stream),
         into_array(to, offset, HOST, NUMBER(from), bytes))
IN_ORDER(cuMemcpyAtoHAsync_v2,
         (void *to, CUarray from, size_t offset, size_t bytes, CUstream stream),
         out_of_array(HOST, NUMBER(to), from, offset, bytes))

// ---- planes and volumes ------------------------------------------------------------------------

static const CUDA_MEMCPY2D no_plane;
static const CUDA_MEMCPY3D no_volume;
static const CUDA_MEMCPY3D_PEER no_peers;

// A description that is not there is one of no known memory, which is refused.
WAITING(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *plane), copy_plane(plane != NULL ? plane : &no_plane))
WAITING(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *plane),
        copy_plane(plane != NULL ? plane : &no_plane))
WAITING(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *volume), *(volume != NULL ? volume : &no_volume))
WAITING(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *volume),
        copy_between_peers(volume != NULL ? volume : &no_peers))
IN_ORDER(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *plane, CUstream stream),
         copy_plane(plane != NULL ? plane : &no_plane))
IN_ORDER(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *volume, CUstream stream),
         *(volume != NULL ? volume : &no_volume))
IN_ORDER(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *volume, CUstream stream),
         copy_between_peers(volume != NULL ? volume : &no_peers))

static CUDA_MEMCPY3D of_operation(const CUDA_MEMCPY3D_BATCH_OP *operation) {
  CUDA_MEMCPY3D copy = {.Height = operation->extent.height, .Depth = operation->extent.depth};
  size_t element = 1;
  const CUmemcpy3DOperand *from = &operation->src, *to = &operation->dst;
  if (from->type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
    element = array_element_bytes(from->op.array.array);
    copy.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.srcArray = from->op.array.array;
    copy.srcXInBytes = from->op.array.offset.x * element;
    copy.srcY = from->op.array.offset.y;
    copy.srcZ = from->op.array.offset.z;
  } else {
    copy.srcMemoryType = ANY;
    copy.srcDevice = from->op.ptr.ptr;
  }
  if (to->type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
    element = array_element_bytes(to->op.array.array);
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.dstArray = to->op.array.array;
    copy.dstXInBytes = to->op.array.offset.x * element;
    copy.dstY = to->op.array.offset.y;
    copy.dstZ = to->op.array.offset.z;
  } else {
    copy.dstMemoryType = ANY;
    copy.dstDevice = to->op.ptr.ptr;
  }
  copy.WidthInBytes = operation->extent.width * element;
  if (from->type != CU_MEMCPY_OPERAND_TYPE_ARRAY) {
    copy.srcPitch = from->op.ptr.rowLength * element;
    copy.srcHeight = from->op.ptr.layerHeight;
  }
  if (to->type != CU_MEMCPY_OPERAND_TYPE_ARRAY) {
    copy.dstPitch = to->op.ptr.rowLength * element;
    copy.dstHeight = to->op.ptr.layerHeight;
  }
  return copy;
}

IN_ORDER(cuMemcpy3DWithAttributesAsync,
         (CUDA_MEMCPY3D_BATCH_OP * operation, unsigned long long flags, CUstream stream),
         operation != NULL ? of_operation(operation) : no_volume)

// ---- batches -----------------------------------------------------------------------------------

static CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                      size_t *failed, CUstream stream) {
  ENTER();
  if (to == NULL || from == NULL || sizes == NULL || count == 0) return CUDA_ERROR_INVALID_VALUE;
  // Batches have to name a stream.
  if (stream == NULL || stream == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    CUDA_MEMCPY3D copy = copy_linear(ANY, to[i], ANY, from[i], sizes[i]);
    CUresult result = copy_async(stream, &copy);
    if (result == CUDA_SUCCESS) continue;
    if (failed != NULL) *failed = i;
    return result;
  }
  return CUDA_SUCCESS;
}

static CUresult batch_of_volumes(size_t count, CUDA_MEMCPY3D_BATCH_OP *operations, size_t *failed,
                                 CUstream stream) {
  ENTER();
  if (operations == NULL || count == 0) return CUDA_ERROR_INVALID_VALUE;
  if (stream == NULL || stream == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    CUDA_MEMCPY3D copy = of_operation(&operations[i]);
    CUresult result = copy_async(stream, &copy);
    if (result == CUDA_SUCCESS) continue;
    if (failed != NULL) *failed = i;
    return result;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *attribute_indices,
                            size_t attribute_count, size_t *failed, CUstream stream) {
  return batch(to, from, sizes, count, failed, stream);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attributes, size_t *attribute_indices,
                               size_t attribute_count, CUstream stream) {
  return batch(to, from, sizes, count, NULL, stream);
}

CUresult cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP *operations, size_t *failed,
                              unsigned long long flags, CUstream stream) {
  return batch_of_volumes(count, operations, failed, stream);
}

CUresult cuMemcpy3DBatchAsync_v2(size_t count, CUDA_MEMCPY3D_BATCH_OP *operations,
                                 unsigned long long flags, CUstream stream) {
  return batch_of_volumes(count, operations, NULL, stream);
}
