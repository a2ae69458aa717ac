// SPDX-License-Identifier: Apache-2.0
// Copies and fills.
#ifndef ALLOTMENT_CUDA_ABI_COPY_H
#define ALLOTMENT_CUDA_ABI_COPY_H

#include "array.h"

typedef enum CUmem_advise {
  CU_MEM_ADVISE_SET_READ_MOSTLY = 1,
  CU_MEM_ADVISE_UNSET_READ_MOSTLY = 2,
  CU_MEM_ADVISE_SET_PREFERRED_LOCATION = 3,
  CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION = 4,
  CU_MEM_ADVISE_SET_ACCESSED_BY = 5,
  CU_MEM_ADVISE_UNSET_ACCESSED_BY = 6,
} CUmem_advise;

typedef enum CUmem_range_attribute {
  CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY = 1,
  CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION = 2,
  CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY = 3,
  CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION = 4,
  CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE = 5,
  CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID = 6,
  CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE = 7,
  CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID = 8,
} CUmem_range_attribute;

typedef struct CUDA_MEMCPY2D_v1 {
  unsigned int srcXInBytes;
  unsigned int srcY;
  CUmemorytype srcMemoryType;
  const void *srcHost;
  CUdeviceptr_v1 srcDevice;
  CUarray srcArray;
  unsigned int srcPitch;
  unsigned int dstXInBytes;
  unsigned int dstY;
  CUmemorytype dstMemoryType;
  void *dstHost;
  CUdeviceptr_v1 dstDevice;
  CUarray dstArray;
  unsigned int dstPitch;
  unsigned int WidthInBytes;
  unsigned int Height;
} CUDA_MEMCPY2D_v1;

typedef struct CUDA_MEMCPY3D_v1 {
  unsigned int srcXInBytes;
  unsigned int srcY;
  unsigned int srcZ;
  unsigned int srcLOD;
  CUmemorytype srcMemoryType;
  const void *srcHost;
  CUdeviceptr_v1 srcDevice;
  CUarray srcArray;
  void *reserved0;
  unsigned int srcPitch;
  unsigned int srcHeight;
  unsigned int dstXInBytes;
  unsigned int dstY;
  unsigned int dstZ;
  unsigned int dstLOD;
  CUmemorytype dstMemoryType;
  void *dstHost;
  CUdeviceptr_v1 dstDevice;
  CUarray dstArray;
  void *reserved1;
  unsigned int dstPitch;
  unsigned int dstHeight;
  unsigned int WidthInBytes;
  unsigned int Height;
  unsigned int Depth;
} CUDA_MEMCPY3D_v1;

typedef struct CUDA_MEMCPY2D {
  size_t srcXInBytes;
  size_t srcY;
  CUmemorytype srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  CUarray srcArray;
  size_t srcPitch;
  size_t dstXInBytes;
  size_t dstY;
  CUmemorytype dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  CUarray dstArray;
  size_t dstPitch;
  size_t WidthInBytes;
  size_t Height;
} CUDA_MEMCPY2D;
typedef CUDA_MEMCPY2D CUDA_MEMCPY2D_v2;

typedef struct CUDA_MEMCPY3D {
  size_t srcXInBytes;
  size_t srcY;
  size_t srcZ;
  size_t srcLOD;
  CUmemorytype srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  CUarray srcArray;
  void *reserved0;
  size_t srcPitch;
  size_t srcHeight;
  size_t dstXInBytes;
  size_t dstY;
  size_t dstZ;
  size_t dstLOD;
  CUmemorytype dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  CUarray dstArray;
  void *reserved1;
  size_t dstPitch;
  size_t dstHeight;
  size_t WidthInBytes;
  size_t Height;
  size_t Depth;
} CUDA_MEMCPY3D;
typedef CUDA_MEMCPY3D CUDA_MEMCPY3D_v2;

typedef struct CUDA_MEMCPY3D_PEER {
  size_t srcXInBytes;
  size_t srcY;
  size_t srcZ;
  size_t srcLOD;
  CUmemorytype srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  CUarray srcArray;
  CUcontext srcContext;
  size_t srcPitch;
  size_t srcHeight;
  size_t dstXInBytes;
  size_t dstY;
  size_t dstZ;
  size_t dstLOD;
  CUmemorytype dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  CUarray dstArray;
  CUcontext dstContext;
  size_t dstPitch;
  size_t dstHeight;
  size_t WidthInBytes;
  size_t Height;
  size_t Depth;
} CUDA_MEMCPY3D_PEER;
typedef CUDA_MEMCPY3D_PEER CUDA_MEMCPY3D_PEER_v1;

typedef enum CUmemcpySrcAccessOrder {
  CU_MEMCPY_SRC_ACCESS_ORDER_INVALID = 0,
  CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
  CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL = 2,
  CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3,
  CU_MEMCPY_SRC_ACCESS_ORDER_MAX = 0x7fffffff,
} CUmemcpySrcAccessOrder;

typedef struct CUmemcpyAttributes {
  CUmemcpySrcAccessOrder srcAccessOrder;
  CUmemLocation srcLocHint;
  CUmemLocation dstLocHint;
  unsigned int flags;
} CUmemcpyAttributes;
typedef CUmemcpyAttributes CUmemcpyAttributes_v1;

typedef enum CUmemcpy3DOperandType {
  CU_MEMCPY_OPERAND_TYPE_POINTER = 1,
  CU_MEMCPY_OPERAND_TYPE_ARRAY = 2,
  CU_MEMCPY_OPERAND_TYPE_MAX = 0x7fffffff,
} CUmemcpy3DOperandType;

typedef struct CUoffset3D {
  size_t x;
  size_t y;
  size_t z;
} CUoffset3D;
typedef CUoffset3D CUoffset3D_v1;

typedef struct CUmemcpy3DOperand {
  CUmemcpy3DOperandType type;
  union {
    struct {
      CUdeviceptr ptr;
      size_t rowLength;
      size_t layerHeight;
      CUmemLocation locHint;
    } ptr;
    struct {
      CUarray array;
      CUoffset3D offset;
    } array;
  } op;
} CUmemcpy3DOperand;
typedef CUmemcpy3DOperand CUmemcpy3DOperand_v1;

typedef struct CUextent3D {
  size_t width;
  size_t height;
  size_t depth;
} CUextent3D;
typedef CUextent3D CUextent3D_v1;

typedef struct CUDA_MEMCPY3D_BATCH_OP {
  CUmemcpy3DOperand src;
  CUmemcpy3DOperand dst;
  CUextent3D extent;
  CUmemcpySrcAccessOrder srcAccessOrder;
  unsigned int flags;
} CUDA_MEMCPY3D_BATCH_OP;
typedef CUDA_MEMCPY3D_BATCH_OP CUDA_MEMCPY3D_BATCH_OP_v1;

CU_ENTRY(cuMemAdvise_v2,
         (CUdeviceptr pointer, size_t count, CUmem_advise advice, CUmemLocation location));
CU_ENTRY(cuMemRangeGetAttribute, (void *data, size_t data_size, CUmem_range_attribute attribute,
                                  CUdeviceptr pointer, size_t count));
CU_ENTRY(cuMemRangeGetAttributes,
         (void **data, size_t *data_sizes, CUmem_range_attribute *attributes, size_t num_attributes,
          CUdeviceptr pointer, size_t count));
CU_ENTRY(cuMemcpyHtoD, (CUdeviceptr_v1 dst_device, const void *src_host, unsigned int bytes));
CU_ENTRY(cuMemcpyDtoH, (void *dst_host, CUdeviceptr_v1 src_device, unsigned int bytes));
CU_ENTRY(cuMemcpyDtoD, (CUdeviceptr_v1 dst_device, CUdeviceptr_v1 src_device, unsigned int bytes));
CU_ENTRY(cuMemcpyDtoA, (CUarray dst_array, unsigned int dst_offset, CUdeviceptr_v1 src_device,
                        unsigned int bytes));
CU_ENTRY(cuMemcpyAtoD, (CUdeviceptr_v1 dst_device, CUarray src_array, unsigned int src_offset,
                        unsigned int bytes));
CU_ENTRY(cuMemcpyHtoA,
         (CUarray dst_array, unsigned int dst_offset, const void *src_host, unsigned int bytes));
CU_ENTRY(cuMemcpyAtoH,
         (void *dst_host, CUarray src_array, unsigned int src_offset, unsigned int bytes));
CU_ENTRY(cuMemcpyAtoA, (CUarray dst_array, unsigned int dst_offset, CUarray src_array,
                        unsigned int src_offset, unsigned int bytes));
CU_ENTRY(cuMemcpyHtoAAsync, (CUarray dst_array, unsigned int dst_offset, const void *src_host,
                             unsigned int bytes, CUstream stream));
CU_ENTRY(cuMemcpyAtoHAsync, (void *dst_host, CUarray src_array, unsigned int src_offset,
                             unsigned int bytes, CUstream stream));
CU_ENTRY(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *copy));
CU_ENTRY(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *copy));
CU_ENTRY(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *copy));
CU_ENTRY(cuMemcpyHtoDAsync,
         (CUdeviceptr_v1 dst_device, const void *src_host, unsigned int bytes, CUstream stream));
CU_ENTRY(cuMemcpyDtoHAsync,
         (void *dst_host, CUdeviceptr_v1 src_device, unsigned int bytes, CUstream stream));
CU_ENTRY(cuMemcpyDtoDAsync, (CUdeviceptr_v1 dst_device, CUdeviceptr_v1 src_device,
                             unsigned int bytes, CUstream stream));
CU_ENTRY(cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *copy, CUstream stream));
CU_ENTRY(cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *copy, CUstream stream));
CU_ENTRY(cuMemsetD8, (CUdeviceptr_v1 dst_device, unsigned char uc, unsigned int n));
CU_ENTRY(cuMemsetD16, (CUdeviceptr_v1 dst_device, unsigned short us, unsigned int n));
CU_ENTRY(cuMemsetD32, (CUdeviceptr_v1 dst_device, unsigned int ui, unsigned int n));
CU_ENTRY(cuMemsetD2D8, (CUdeviceptr_v1 dst_device, unsigned int dst_pitch, unsigned char uc,
                        unsigned int width, unsigned int height));
CU_ENTRY(cuMemsetD2D16, (CUdeviceptr_v1 dst_device, unsigned int dst_pitch, unsigned short us,
                         unsigned int width, unsigned int height));
CU_ENTRY(cuMemsetD2D32, (CUdeviceptr_v1 dst_device, unsigned int dst_pitch, unsigned int ui,
                         unsigned int width, unsigned int height));
CU_ENTRY_PTDS(cuMemcpyHtoD_v2, (CUdeviceptr dst_device, const void *src_host, size_t bytes));
CU_ENTRY_PTDS(cuMemcpyDtoH_v2, (void *dst_host, CUdeviceptr src_device, size_t bytes));
CU_ENTRY_PTDS(cuMemcpyDtoD_v2, (CUdeviceptr dst_device, CUdeviceptr src_device, size_t bytes));
CU_ENTRY_PTDS(cuMemcpyDtoA_v2,
              (CUarray dst_array, size_t dst_offset, CUdeviceptr src_device, size_t bytes));
CU_ENTRY_PTDS(cuMemcpyAtoD_v2,
              (CUdeviceptr dst_device, CUarray src_array, size_t src_offset, size_t bytes));
CU_ENTRY_PTDS(cuMemcpyHtoA_v2,
              (CUarray dst_array, size_t dst_offset, const void *src_host, size_t bytes));
CU_ENTRY_PTDS(cuMemcpyAtoH_v2,
              (void *dst_host, CUarray src_array, size_t src_offset, size_t bytes));
CU_ENTRY_PTDS(cuMemcpyAtoA_v2, (CUarray dst_array, size_t dst_offset, CUarray src_array,
                                size_t src_offset, size_t bytes));
CU_ENTRY_PTSZ(cuMemcpyHtoAAsync_v2, (CUarray dst_array, size_t dst_offset, const void *src_host,
                                     size_t bytes, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpyAtoHAsync_v2, (void *dst_host, CUarray src_array, size_t src_offset,
                                     size_t bytes, CUstream stream));
CU_ENTRY_PTDS(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *copy));
CU_ENTRY_PTDS(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *copy));
CU_ENTRY_PTDS(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *copy));
CU_ENTRY_PTSZ(cuMemcpyHtoDAsync_v2,
              (CUdeviceptr dst_device, const void *src_host, size_t bytes, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpyDtoHAsync_v2,
              (void *dst_host, CUdeviceptr src_device, size_t bytes, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpyDtoDAsync_v2,
              (CUdeviceptr dst_device, CUdeviceptr src_device, size_t bytes, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *copy, CUstream stream));
CU_ENTRY_PTDS(cuMemsetD8_v2, (CUdeviceptr dst_device, unsigned char uc, size_t n));
CU_ENTRY_PTDS(cuMemsetD16_v2, (CUdeviceptr dst_device, unsigned short us, size_t n));
CU_ENTRY_PTDS(cuMemsetD32_v2, (CUdeviceptr dst_device, unsigned int ui, size_t n));
CU_ENTRY_PTDS(cuMemsetD2D8_v2, (CUdeviceptr dst_device, size_t dst_pitch, unsigned char uc,
                                size_t width, size_t height));
CU_ENTRY_PTDS(cuMemsetD2D16_v2, (CUdeviceptr dst_device, size_t dst_pitch, unsigned short us,
                                 size_t width, size_t height));
CU_ENTRY_PTDS(cuMemsetD2D32_v2, (CUdeviceptr dst_device, size_t dst_pitch, unsigned int ui,
                                 size_t width, size_t height));
CU_ENTRY_PTDS(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t bytes));
CU_ENTRY_PTSZ(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream));
CU_ENTRY_PTDS(cuMemcpyPeer, (CUdeviceptr dst_device, CUcontext dst_context, CUdeviceptr src_device,
                             CUcontext src_context, size_t bytes));
CU_ENTRY_PTSZ(cuMemcpyPeerAsync,
              (CUdeviceptr dst_device, CUcontext dst_context, CUdeviceptr src_device,
               CUcontext src_context, size_t bytes, CUstream stream));
CU_ENTRY_PTDS(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *copy));
CU_ENTRY_PTSZ(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *copy, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpyBatchAsync, (CUdeviceptr * dsts, CUdeviceptr *srcs, size_t *sizes,
                                   size_t count, CUmemcpyAttributes *attrs, size_t *attrs_idxs,
                                   size_t num_attrs, size_t *fail_idx, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpy3DBatchAsync, (size_t num_ops, CUDA_MEMCPY3D_BATCH_OP *op_list,
                                     size_t *fail_idx, unsigned long long flags, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpyBatchAsync_v2,
              (CUdeviceptr * dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
               CUmemcpyAttributes *attrs, size_t *attrs_idxs, size_t num_attrs, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpy3DBatchAsync_v2, (size_t num_ops, CUDA_MEMCPY3D_BATCH_OP *op_list,
                                        unsigned long long flags, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpyWithAttributesAsync, (CUdeviceptr dst, CUdeviceptr src, size_t size,
                                            CUmemcpyAttributes *attr, CUstream stream));
CU_ENTRY_PTSZ(cuMemcpy3DWithAttributesAsync,
              (CUDA_MEMCPY3D_BATCH_OP * op, unsigned long long flags, CUstream stream));
CU_ENTRY_PTSZ(cuMemsetD8Async,
              (CUdeviceptr dst_device, unsigned char uc, size_t n, CUstream stream));
CU_ENTRY_PTSZ(cuMemsetD16Async,
              (CUdeviceptr dst_device, unsigned short us, size_t n, CUstream stream));
CU_ENTRY_PTSZ(cuMemsetD32Async,
              (CUdeviceptr dst_device, unsigned int ui, size_t n, CUstream stream));
CU_ENTRY_PTSZ(cuMemsetD2D8Async, (CUdeviceptr dst_device, size_t dst_pitch, unsigned char uc,
                                  size_t width, size_t height, CUstream stream));
CU_ENTRY_PTSZ(cuMemsetD2D16Async, (CUdeviceptr dst_device, size_t dst_pitch, unsigned short us,
                                   size_t width, size_t height, CUstream stream));
CU_ENTRY_PTSZ(cuMemsetD2D32Async, (CUdeviceptr dst_device, size_t dst_pitch, unsigned int ui,
                                   size_t width, size_t height, CUstream stream));
CU_ENTRY_PTSZ(cuMemPrefetchAsync,
              (CUdeviceptr pointer, size_t count, CUdevice dst_device, CUstream stream));
CU_ENTRY_PTSZ(cuMemPrefetchAsync_v2, (CUdeviceptr pointer, size_t count, CUmemLocation location,
                                      unsigned int flags, CUstream stream));
CU_ENTRY(cuMemAdvise, (CUdeviceptr pointer, size_t count, CUmem_advise advice, CUdevice device));
CU_ENTRY_PTSZ(cuMemPrefetchBatchAsync,
              (CUdeviceptr * dptrs, size_t *sizes, size_t count, CUmemLocation *prefetch_locs,
               size_t *prefetch_loc_idxs, size_t num_prefetch_locs, unsigned long long flags,
               CUstream stream));
CU_ENTRY_PTSZ(cuMemDiscardBatchAsync, (CUdeviceptr * dptrs, size_t *sizes, size_t count,
                                       unsigned long long flags, CUstream stream));
CU_ENTRY_PTSZ(cuMemDiscardAndPrefetchBatchAsync,
              (CUdeviceptr * dptrs, size_t *sizes, size_t count, CUmemLocation *prefetch_locs,
               size_t *prefetch_loc_idxs, size_t num_prefetch_locs, unsigned long long flags,
               CUstream stream));

#endif
