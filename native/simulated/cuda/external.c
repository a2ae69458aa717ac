// SPDX-License-Identifier: Apache-2.0
// External memory: made by another programming interface, known here by a file descriptor. It is
// never charged to whoever imports it.
#include <sys/stat.h>
#include <unistd.h>

#include "simulated/cuda/virtual.h"

typedef struct external {
  object head;
  int descriptor;
  uint64_t size;
  int gpu;
} external;

// The call takes the descriptor over, as long as it succeeds.
CUresult cuImportExternalMemory(CUexternalMemory *handle,
                                const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *wanted) {
  ENTER_CONTEXT(current);
  if (handle == NULL || wanted == NULL || wanted->size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (wanted->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD) return CUDA_ERROR_NOT_SUPPORTED;
  struct stat status;
  if (fstat(wanted->handle.fd, &status) != 0 || (uint64_t)status.st_size < wanted->size) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  external *made = object_new(OBJECT_EXTERNAL, sizeof(external), NULL);
  if (made != NULL) {
    made->descriptor = wanted->handle.fd;
    made->size = wanted->size;
    made->gpu = current->gpu;
  }
  UNLOCK();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUexternalMemory)made;
  return CUDA_SUCCESS;
}

static CUresult external_of(CUexternalMemory handle, external **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_EXTERNAL)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (external *)handle;
  return CUDA_SUCCESS;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *address, CUexternalMemory handle,
                                         const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *wanted) {
  external *from;
  TRY(external_of(handle, &from));
  if (address == NULL || wanted == NULL || wanted->flags != 0 || wanted->size == 0 ||
      wanted->offset > from->size || wanted->size > from->size - wanted->offset) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  const range *mapped =
      handoff_map_locked(from->descriptor, wanted->offset, wanted->size, from->gpu, RANGE_EXTERNAL);
  if (mapped != NULL) *address = mapped->base;
  UNLOCK();
  return mapped != NULL ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}

CUresult cuExternalMemoryGetMappedMipmappedArray(
    CUmipmappedArray *mipmap, CUexternalMemory handle,
    const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *wanted) {
  external *from;
  TRY(external_of(handle, &from));
  return CUDA_ERROR_NOT_SUPPORTED;
}

// What is mapped stays until it is freed.
CUresult cuDestroyExternalMemory(CUexternalMemory handle) {
  external *dying;
  TRY(external_of(handle, &dying));
  LOCK();
  close(dying->descriptor);
  object_free(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}
