// SPDX-License-Identifier: Apache-2.0
// Virtual memory management: addresses, physical handles and mappings.
#ifndef ALLOTMENT_CUDA_ABI_VIRTUAL_H
#define ALLOTMENT_CUDA_ABI_VIRTUAL_H

#include "pool.h"

#define CU_MEM_CREATE_USAGE_TILE_POOL 0x1

typedef enum CUmemAllocationCompType {
  CU_MEM_ALLOCATION_COMP_NONE = 0,
  CU_MEM_ALLOCATION_COMP_GENERIC = 1,
} CUmemAllocationCompType;

typedef enum CUmemRangeHandleType {
  CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
  CU_MEM_RANGE_HANDLE_TYPE_MAX = 0x7fffffff,
} CUmemRangeHandleType;

typedef unsigned long long CUmemGenericAllocationHandle_v1;

typedef CUmemGenericAllocationHandle_v1 CUmemGenericAllocationHandle;

typedef struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;
typedef CUmemAllocationProp CUmemAllocationProp_v1;

typedef enum CUmemAllocationGranularity_flags {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
} CUmemAllocationGranularity_flags;

typedef enum CUresourcetype {
  CU_RESOURCE_TYPE_ARRAY = 0,
  CU_RESOURCE_TYPE_MIPMAPPED_ARRAY = 1,
  CU_RESOURCE_TYPE_LINEAR = 2,
  CU_RESOURCE_TYPE_PITCH2D = 3,
} CUresourcetype;

typedef struct CUmipmappedArray_st *CUmipmappedArray;

typedef struct CUarray_st *CUarray;

typedef enum CUarraySparseSubresourceType {
  CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL = 0,
  CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL = 1,
} CUarraySparseSubresourceType;

typedef enum CUmemOperationType {
  CU_MEM_OPERATION_TYPE_MAP = 1,
  CU_MEM_OPERATION_TYPE_UNMAP = 2,
} CUmemOperationType;

typedef enum CUmemHandleType {
  CU_MEM_HANDLE_TYPE_GENERIC = 0,
} CUmemHandleType;

typedef struct CUarrayMapInfo {
  CUresourcetype resourceType;
  union {
    CUmipmappedArray mipmap;
    CUarray array;
  } resource;
  CUarraySparseSubresourceType subresourceType;
  union {
    struct {
      unsigned int level;
      unsigned int layer;
      unsigned int offsetX;
      unsigned int offsetY;
      unsigned int offsetZ;
      unsigned int extentWidth;
      unsigned int extentHeight;
      unsigned int extentDepth;
    } sparseLevel;
    struct {
      unsigned int layer;
      unsigned long long offset;
      unsigned long long size;
    } miptail;
  } subresource;
  CUmemOperationType memOperationType;
  CUmemHandleType memHandleType;
  union {
    CUmemGenericAllocationHandle memHandle;
  } memHandle;
  unsigned long long offset;
  unsigned int deviceBitMask;
  unsigned int flags;
  unsigned int reserved[2];
} CUarrayMapInfo;
typedef CUarrayMapInfo CUarrayMapInfo_v1;

typedef struct CUmulticastObjectProp {
  unsigned int numDevices;
  size_t size;
  unsigned long long handleTypes;
  unsigned long long flags;
} CUmulticastObjectProp;

CU_ENTRY(cuMemGetHandleForAddressRange,
         (void *handle, CUdeviceptr pointer, size_t size, CUmemRangeHandleType handle_type,
          unsigned long long flags));
CU_ENTRY(cuMemAddressReserve, (CUdeviceptr * ptr, size_t size, size_t alignment, CUdeviceptr addr,
                               unsigned long long flags));
CU_ENTRY(cuMemAddressFree, (CUdeviceptr ptr, size_t size));
CU_ENTRY(cuMemCreate, (CUmemGenericAllocationHandle * handle, size_t size,
                       const CUmemAllocationProp *prop, unsigned long long flags));
CU_ENTRY(cuMemRelease, (CUmemGenericAllocationHandle handle));
CU_ENTRY(cuMemMap, (CUdeviceptr ptr, size_t size, size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags));
CU_ENTRY(cuMemUnmap, (CUdeviceptr ptr, size_t size));
CU_ENTRY(cuMemSetAccess, (CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count));
CU_ENTRY(cuMemGetAccess,
         (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr));
CU_ENTRY(cuMulticastCreate,
         (CUmemGenericAllocationHandle * mc_handle, const CUmulticastObjectProp *prop));
CU_ENTRY(cuMulticastAddDevice, (CUmemGenericAllocationHandle mc_handle, CUdevice dev));
CU_ENTRY(cuMulticastBindMem, (CUmemGenericAllocationHandle mc_handle, size_t mc_offset,
                              CUmemGenericAllocationHandle mem_handle, size_t mem_offset,
                              size_t size, unsigned long long flags));
CU_ENTRY(cuMulticastBindMem_v2, (CUmemGenericAllocationHandle mc_handle, CUdevice dev,
                                 size_t mc_offset, CUmemGenericAllocationHandle mem_handle,
                                 size_t mem_offset, size_t size, unsigned long long flags));
CU_ENTRY(cuMulticastBindAddr, (CUmemGenericAllocationHandle mc_handle, size_t mc_offset,
                               CUdeviceptr memptr, size_t size, unsigned long long flags));
CU_ENTRY(cuMulticastBindAddr_v2,
         (CUmemGenericAllocationHandle mc_handle, CUdevice dev, size_t mc_offset,
          CUdeviceptr memptr, size_t size, unsigned long long flags));
CU_ENTRY(cuMulticastUnbind,
         (CUmemGenericAllocationHandle mc_handle, CUdevice dev, size_t mc_offset, size_t size));
CU_ENTRY(cuMemExportToShareableHandle,
         (void *shareable_handle, CUmemGenericAllocationHandle handle,
          CUmemAllocationHandleType handle_type, unsigned long long flags));
CU_ENTRY(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle * handle, void *os_handle,
                                          CUmemAllocationHandleType sh_handle_type));
CU_ENTRY(cuMemGetAllocationGranularity, (size_t *granularity, const CUmemAllocationProp *prop,
                                         CUmemAllocationGranularity_flags option));
CU_ENTRY(cuMemGetAllocationPropertiesFromHandle,
         (CUmemAllocationProp * prop, CUmemGenericAllocationHandle handle));
CU_ENTRY(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void *addr));
CU_ENTRY_PTSZ(cuMemMapArrayAsync,
              (CUarrayMapInfo * map_info_list, unsigned int count, CUstream stream));

#endif
