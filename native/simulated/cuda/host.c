// SPDX-License-Identifier: Apache-2.0
// Page-locked memory of the host: allocated here, or the program's own and registered.
#include <sys/mman.h>
#include <unistd.h>

#include "simulated/cuda/driver.h"

#define ALLOCATE_FLAGS \
  (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED)
#define REGISTER_FLAGS                                                                        \
  (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_IOMEMORY | \
   CU_MEMHOSTREGISTER_READ_ONLY)

static size_t whole_pages(size_t size) {
  return (size + 4095) & ~(size_t)4095;
}

CUresult cuMemHostAlloc(void **memory, size_t size, unsigned int flags) {
  ENTER_CONTEXT(current);
  if (memory == NULL || size == 0 || (flags & ~(unsigned)ALLOCATE_FLAGS) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (size > SIZE_MAX / 2) return CUDA_ERROR_OUT_OF_MEMORY;
  void *made =
      mmap(NULL, whole_pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  LOCK();
  range *added = range_add((CUdeviceptr)(uintptr_t)made, size, RANGE_HOST, -1);
  if (added != NULL) {
    added->flags = flags | CU_MEMHOSTALLOC_DEVICEMAP;
    added->owner = current;
    added->accessible = true;
  }
  UNLOCK();
  if (added == NULL) {
    munmap(made, whole_pages(size));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *memory = made;
  return CUDA_SUCCESS;
}

CUresult cuMemAllocHost_v2(void **memory, size_t size) {
  return cuMemHostAlloc(memory, size, 0);
}

CUresult cuMemAllocHost(void **memory, unsigned int size) {
  return cuMemHostAlloc(memory, size, 0);
}

void host_free_locked(range *freed) {
  if (freed->kind == RANGE_HOST) munmap((void *)(uintptr_t)freed->base, whole_pages(freed->size));
}

static range *host_range(const void *memory) {
  range *found = range_find((CUdeviceptr)(uintptr_t)memory);
  return found != NULL && found->gpu < 0 ? found : NULL;
}

CUresult cuMemFreeHost(void *memory) {
  ENTER_CONTEXT(current);
  if (memory == NULL) return CUDA_SUCCESS;
  context_drain(current->gpu, current);
  LOCK();
  range *freed = host_range(memory);
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (freed != NULL && freed->kind == RANGE_HOST && freed->base == (uintptr_t)memory) {
    result = memory_free_locked(freed);
  }
  UNLOCK();
  return result;
}

CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned int flags) {
  ENTER_CONTEXT(current);
  if (memory == NULL || size == 0 || (flags & ~(unsigned)REGISTER_FLAGS) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  CUdeviceptr base = (CUdeviceptr)(uintptr_t)memory;
  const range *after = range_first(base);
  bool taken = range_find(base) != NULL || (after != NULL && after->base - base < size);
  range *added = taken ? NULL : range_add(base, size, RANGE_REGISTERED, -1);
  if (added != NULL) {
    added->flags = flags;
    added->owner = current;
    added->accessible = true;
  }
  UNLOCK();
  if (taken) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  return added != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostRegister(void *memory, size_t size, unsigned int flags) {
  return cuMemHostRegister_v2(memory, size, flags);
}

CUresult cuMemHostUnregister(void *memory) {
  ENTER_CONTEXT(current);
  LOCK();
  range *gone = host_range(memory);
  CUresult result = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  if (gone != NULL && gone->kind == RANGE_REGISTERED && gone->base == (uintptr_t)memory) {
    result = memory_free_locked(gone);
  }
  UNLOCK();
  return result;
}

// Addresses are the same on both sides.
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned int flags) {
  ENTER_CONTEXT(current);
  if (address == NULL || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  bool known = host_range(memory) != NULL;
  UNLOCK();
  if (!known) return CUDA_ERROR_INVALID_VALUE;
  *address = (CUdeviceptr)(uintptr_t)memory;
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *memory) {
  ENTER_CONTEXT(current);
  if (flags == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  const range *found = host_range(memory);
  if (found != NULL) *flags = found->flags;
  UNLOCK();
  return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
