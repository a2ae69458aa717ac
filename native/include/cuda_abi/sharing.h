// SPDX-License-Identifier: Apache-2.0
// Memory and events that come from elsewhere: IPC and external memory.
#ifndef ALLOTMENT_CUDA_ABI_SHARING_H
#define ALLOTMENT_CUDA_ABI_SHARING_H

#include "copy.h"

#define CUDA_EXTERNAL_MEMORY_DEDICATED 0x1

typedef enum CUipcMem_flags {
  CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
} CUipcMem_flags;

typedef struct CUipcEventHandle {
  char reserved[64];
} CUipcEventHandle;
typedef CUipcEventHandle CUipcEventHandle_v1;

typedef struct CUipcMemHandle {
  char reserved[64];
} CUipcMemHandle;
typedef CUipcMemHandle CUipcMemHandle_v1;

typedef struct CUextMemory_st *CUexternalMemory;

typedef enum CUexternalMemoryHandleType {
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD = 1,
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_WIN32 = 2,
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_WIN32_KMT = 3,
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP = 4,
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_RESOURCE = 5,
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D11_RESOURCE = 6,
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D11_RESOURCE_KMT = 7,
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_NVSCIBUF = 8,
  CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD = 9,
} CUexternalMemoryHandleType;

typedef struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
  CUexternalMemoryHandleType type;
  union {
    int fd;
    struct {
      void *handle;
      const void *name;
    } win32;
    const void *nvSciBufObject;
  } handle;
  unsigned long long size;
  unsigned int flags;
  unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_HANDLE_DESC;
typedef CUDA_EXTERNAL_MEMORY_HANDLE_DESC CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1;

typedef struct CUDA_EXTERNAL_MEMORY_BUFFER_DESC {
  unsigned long long offset;
  unsigned long long size;
  unsigned int flags;
  unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_BUFFER_DESC;
typedef CUDA_EXTERNAL_MEMORY_BUFFER_DESC CUDA_EXTERNAL_MEMORY_BUFFER_DESC_v1;

typedef struct CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC {
  unsigned long long offset;
  CUDA_ARRAY3D_DESCRIPTOR arrayDesc;
  unsigned int numLevels;
  unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC;
typedef CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_v1;

CU_ENTRY(cuIpcGetEventHandle, (CUipcEventHandle * handle, CUevent event));
CU_ENTRY(cuIpcOpenEventHandle, (CUevent * event, CUipcEventHandle handle));
CU_ENTRY(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr pointer));
CU_ENTRY(cuIpcOpenMemHandle_v2, (CUdeviceptr * pdptr, CUipcMemHandle handle, unsigned int flags));
CU_ENTRY(cuIpcCloseMemHandle, (CUdeviceptr pointer));
CU_ENTRY(cuImportExternalMemory,
         (CUexternalMemory * ext_mem, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *mem_handle_desc));
CU_ENTRY(cuExternalMemoryGetMappedBuffer, (CUdeviceptr * pointer, CUexternalMemory ext_mem,
                                           const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *buffer_desc));
CU_ENTRY(cuExternalMemoryGetMappedMipmappedArray,
         (CUmipmappedArray * mipmap, CUexternalMemory ext_mem,
          const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *mipmap_desc));
CU_ENTRY(cuDestroyExternalMemory, (CUexternalMemory ext_mem));
CU_ENTRY(cuIpcOpenMemHandle, (CUdeviceptr * pdptr, CUipcMemHandle handle, unsigned int flags));

#endif
