// SPDX-License-Identifier: Apache-2.0
// Plain, pitched, managed and host memory; pointer attributes.
#ifndef ALLOTMENT_CUDA_ABI_MEMORY_H
#define ALLOTMENT_CUDA_ABI_MEMORY_H

#include "stream.h"

#define CU_MEMHOSTALLOC_PORTABLE 0x01
#define CU_MEMHOSTALLOC_DEVICEMAP 0x02
#define CU_MEMHOSTALLOC_WRITECOMBINED 0x04
#define CU_MEMHOSTREGISTER_PORTABLE 0x01
#define CU_MEMHOSTREGISTER_DEVICEMAP 0x02
#define CU_MEMHOSTREGISTER_IOMEMORY 0x04
#define CU_MEMHOSTREGISTER_READ_ONLY 0x08

typedef enum CUmemAttach_flags {
  CU_MEM_ATTACH_GLOBAL = 1,
  CU_MEM_ATTACH_HOST = 2,
  CU_MEM_ATTACH_SINGLE = 4,
} CUmemAttach_flags;

typedef enum CUmemorytype {
  CU_MEMORYTYPE_HOST = 1,
  CU_MEMORYTYPE_DEVICE = 2,
  CU_MEMORYTYPE_ARRAY = 3,
  CU_MEMORYTYPE_UNIFIED = 4,
} CUmemorytype;

typedef enum CUpointer_attribute {
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
  CU_POINTER_ATTRIBUTE_P2P_TOKENS = 5,
  CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
  CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
  CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
  CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
  CU_POINTER_ATTRIBUTE_MAPPED = 13,
  CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
  CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
  CU_POINTER_ATTRIBUTE_ACCESS_FLAGS = 16,
  CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17,
  CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
  CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19,
  CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID = 20,
  CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE = 21,
  CU_POINTER_ATTRIBUTE_LOCALITY_DOMAIN_ORDINAL = 22,
} CUpointer_attribute;

CU_ENTRY(cuMemGetInfo_v2, (size_t *free, size_t *total));
CU_ENTRY(cuMemAlloc_v2, (CUdeviceptr * pointer, size_t bytes));
CU_ENTRY(cuMemAllocPitch_v2, (CUdeviceptr * pointer, size_t *pitch, size_t width_in_bytes,
                              size_t height, unsigned int element_size_bytes));
CU_ENTRY(cuMemFree_v2, (CUdeviceptr pointer));
CU_ENTRY(cuMemGetAddressRange_v2, (CUdeviceptr * pbase, size_t *psize, CUdeviceptr pointer));
CU_ENTRY(cuMemAllocHost_v2, (void **pp, size_t bytes));
CU_ENTRY(cuMemFreeHost, (void *p));
CU_ENTRY(cuMemHostAlloc, (void **pp, size_t bytes, unsigned int flags));
CU_ENTRY(cuMemHostGetDevicePointer_v2, (CUdeviceptr * pdptr, void *p, unsigned int flags));
CU_ENTRY(cuMemHostGetFlags, (unsigned int *flags, void *p));
CU_ENTRY(cuMemAllocManaged, (CUdeviceptr * pointer, size_t bytes, unsigned int flags));
CU_ENTRY(cuMemHostRegister_v2, (void *p, size_t bytes, unsigned int flags));
CU_ENTRY(cuMemHostUnregister, (void *p));
CU_ENTRY(cuPointerGetAttribute, (void *data, CUpointer_attribute attribute, CUdeviceptr ptr));
CU_ENTRY(cuPointerSetAttribute,
         (const void *value, CUpointer_attribute attribute, CUdeviceptr ptr));
CU_ENTRY(cuPointerGetAttributes, (unsigned int num_attributes, CUpointer_attribute *attributes,
                                  void **data, CUdeviceptr ptr));
CU_ENTRY(cuMemHostRegister, (void *p, size_t bytes, unsigned int flags));
CU_ENTRY(cuMemGetInfo, (unsigned int *free, unsigned int *total));
CU_ENTRY(cuMemAlloc, (CUdeviceptr_v1 * pointer, unsigned int bytes));
CU_ENTRY(cuMemAllocPitch,
         (CUdeviceptr_v1 * pointer, unsigned int *pitch, unsigned int width_in_bytes,
          unsigned int height, unsigned int element_size_bytes));
CU_ENTRY(cuMemFree, (CUdeviceptr_v1 pointer));
CU_ENTRY(cuMemGetAddressRange,
         (CUdeviceptr_v1 * pbase, unsigned int *psize, CUdeviceptr_v1 pointer));
CU_ENTRY(cuMemAllocHost, (void **pp, unsigned int bytes));
CU_ENTRY(cuMemHostGetDevicePointer, (CUdeviceptr_v1 * pdptr, void *p, unsigned int flags));

#endif
