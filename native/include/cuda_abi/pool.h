// SPDX-License-Identifier: Apache-2.0
// Stream-ordered allocation, memory pools and what graphs hold.
#ifndef ALLOTMENT_CUDA_ABI_POOL_H
#define ALLOTMENT_CUDA_ABI_POOL_H

#include "memory.h"

typedef struct CUmemPoolHandle_st *CUmemoryPool;

typedef enum CUmemPool_attribute {
  CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
  CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC = 2,
  CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
  CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
  CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
  CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
  CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
  CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8,
  CU_MEMPOOL_ATTR_ALLOCATION_TYPE = 9,
  CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES = 10,
  CU_MEMPOOL_ATTR_LOCATION_ID = 11,
  CU_MEMPOOL_ATTR_LOCATION_TYPE = 12,
  CU_MEMPOOL_ATTR_MAX_POOL_SIZE = 13,
  CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED = 14,
  CU_MEMPOOL_ATTR_LOCALITY_DOMAIN_ID = 15,
} CUmemPool_attribute;

typedef enum CUmemLocationType {
  CU_MEM_LOCATION_TYPE_INVALID = 0,
  CU_MEM_LOCATION_TYPE_NONE = 0,
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_LOCATION_TYPE_HOST = 2,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
  CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4,
  CU_MEM_LOCATION_TYPE_INVISIBLE = 5,
  CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN = 6,
  CU_MEM_LOCATION_TYPE_MAX = 0x7fffffff,
} CUmemLocationType;

typedef struct CUmemLocation {
  CUmemLocationType type;
  union {
    int id;
    struct {
      unsigned char deviceId;
      unsigned char localityDomainId;
    } localized;
  };
} CUmemLocation;
typedef CUmemLocation CUmemLocation_v1;

typedef enum CUmemAccess_flags {
  CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
  CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
  CU_MEM_ACCESS_FLAGS_PROT_MAX = 0x7fffffff,
} CUmemAccess_flags;

typedef struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
} CUmemAccessDesc;
typedef CUmemAccessDesc CUmemAccessDesc_v1;

typedef enum CUmemAllocationType {
  CU_MEM_ALLOCATION_TYPE_INVALID = 0,
  CU_MEM_ALLOCATION_TYPE_PINNED = 1,
  CU_MEM_ALLOCATION_TYPE_MANAGED = 2,
  CU_MEM_ALLOCATION_TYPE_MAX = 0x7fffffff,
} CUmemAllocationType;

typedef enum CUmemAllocationHandleType {
  CU_MEM_HANDLE_TYPE_NONE = 0,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_HANDLE_TYPE_WIN32 = 2,
  CU_MEM_HANDLE_TYPE_WIN32_KMT = 4,
  CU_MEM_HANDLE_TYPE_FABRIC = 8,
  CU_MEM_HANDLE_TYPE_MAX = 0x7fffffff,
} CUmemAllocationHandleType;

typedef struct CUmemPoolProps {
  CUmemAllocationType allocType;
  CUmemAllocationHandleType handleTypes;
  CUmemLocation location;
  void *win32SecurityAttributes;
  size_t maxSize;
  unsigned short usage;
  unsigned char gpuDirectRDMACapable;
  unsigned char reserved[53];
} CUmemPoolProps;
typedef CUmemPoolProps CUmemPoolProps_v1;

typedef struct CUmemPoolPtrExportData {
  unsigned char reserved[64];
} CUmemPoolPtrExportData;
typedef CUmemPoolPtrExportData CUmemPoolPtrExportData_v1;

typedef enum CUgraphMem_attribute {
  CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT = 0,
  CU_GRAPH_MEM_ATTR_USED_MEM_HIGH = 1,
  CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT = 2,
  CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH = 3,
} CUgraphMem_attribute;

CU_ENTRY(cuDeviceSetMemPool, (CUdevice device, CUmemoryPool pool));
CU_ENTRY(cuDeviceGetMemPool, (CUmemoryPool * pool, CUdevice device));
CU_ENTRY(cuDeviceGetDefaultMemPool, (CUmemoryPool * pool, CUdevice device));
CU_ENTRY(cuMemPoolTrimTo, (CUmemoryPool pool, size_t min_bytes_to_keep));
CU_ENTRY(cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attr, void *value));
CU_ENTRY(cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attr, void *value));
CU_ENTRY(cuMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *map, size_t count));
CU_ENTRY(cuMemPoolGetAccess,
         (CUmemAccess_flags * flags, CUmemoryPool mem_pool, CUmemLocation *location));
CU_ENTRY(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *pool_props));
CU_ENTRY(cuMemPoolDestroy, (CUmemoryPool pool));
CU_ENTRY(cuMemGetDefaultMemPool,
         (CUmemoryPool * pool, CUmemLocation *location, CUmemAllocationType type));
CU_ENTRY(cuMemGetMemPool, (CUmemoryPool * pool, CUmemLocation *location, CUmemAllocationType type));
CU_ENTRY(cuMemSetMemPool, (CUmemLocation * location, CUmemAllocationType type, CUmemoryPool pool));
CU_ENTRY(cuMemPoolExportToShareableHandle,
         (void *handle, CUmemoryPool pool, CUmemAllocationHandleType handle_type,
          unsigned long long flags));
CU_ENTRY(cuMemPoolImportFromShareableHandle,
         (CUmemoryPool * pool, void *handle, CUmemAllocationHandleType handle_type,
          unsigned long long flags));
CU_ENTRY(cuMemPoolExportPointer, (CUmemPoolPtrExportData * share_data, CUdeviceptr ptr));
CU_ENTRY(cuMemPoolImportPointer,
         (CUdeviceptr * ptr, CUmemoryPool pool, CUmemPoolPtrExportData *share_data));
CU_ENTRY(cuDeviceGraphMemTrim, (CUdevice device));
CU_ENTRY(cuDeviceGetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attr, void *value));
CU_ENTRY(cuDeviceSetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attr, void *value));
CU_ENTRY_PTSZ(cuMemFreeAsync, (CUdeviceptr pointer, CUstream stream));
CU_ENTRY_PTSZ(cuMemAllocAsync, (CUdeviceptr * pointer, size_t bytes, CUstream stream));
CU_ENTRY_PTSZ(cuMemAllocFromPoolAsync,
              (CUdeviceptr * pointer, size_t bytes, CUmemoryPool pool, CUstream stream));

#endif
