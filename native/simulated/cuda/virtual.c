// SPDX-License-Identifier: Apache-2.0
// Virtual memory management: reserved addresses, physical memory, and mapping one at the other.
//
// Physical memory is a part of this process's device-memory file until it is exported; then it gets
// a memory file of its own, whose descriptor is the shareable handle.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulated/cuda/virtual.h"

typedef struct reservation {
  CUdeviceptr base;
  uint64_t size;
  struct reservation *next;
} reservation;

static reservation *reservations;

static void *at(CUdeviceptr address) {
  return (void *)(uintptr_t)address;
}

// ---- addresses ---------------------------------------------------------------------------------

static CUdeviceptr reserve(uint64_t size, uint64_t alignment) {
  void *mapped =
      mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  CUdeviceptr first = (CUdeviceptr)(uintptr_t)mapped;
  CUdeviceptr base = (first + alignment - 1) & ~(alignment - 1);
  if (base > first) munmap(mapped, base - first);
  uint64_t behind = first + size + alignment - (base + size);
  if (behind > 0) munmap(at(base + size), behind);
  madvise(at(base), size, MADV_DONTFORK);
  return base;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
  ENTER();
  if (address == NULL || size == 0 || size % PHYSICAL_GRANULE != 0 || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if ((alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (alignment < PHYSICAL_GRANULE) alignment = PHYSICAL_GRANULE;
  reservation *made = malloc(sizeof *made);
  CUdeviceptr base = made != NULL ? reserve(size, alignment) : 0;
  if (base == 0) {
    free(made);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  LOCK();
  *made = (reservation){base, size, reservations};
  reservations = made;
  UNLOCK();
  *address = base;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  ENTER();
  LOCK();
  reservation **place = &reservations;
  while (*place != NULL && (*place)->base != address) place = &(*place)->next;
  reservation *gone = *place;
  const range *mapped = range_first(address);
  bool busy = mapped != NULL && mapped->base < address + size;
  bool right = gone != NULL && gone->size == size && !busy;
  if (right) {
    *place = gone->next;
    munmap(at(address), size);
    free(gone);
  }
  UNLOCK();
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_reserved(CUdeviceptr address, uint64_t size) {
  for (const reservation *one = reservations; one != NULL; one = one->next) {
    if (address - one->base < one->size && size <= one->size - (address - one->base)) return true;
  }
  return false;
}

// ---- physical memory ---------------------------------------------------------------------------

static CUresult check(const CUmemAllocationProp *wanted, int *gpu) {
  if (wanted == NULL || wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (((unsigned)wanted->requestedHandleTypes &
       ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  return driver_gpu(wanted->location.id, gpu);
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *wanted,
                                       CUmemAllocationGranularity_flags option) {
  int gpu;
  TRY(check(wanted, &gpu));
  if (granularity == NULL) return CUDA_ERROR_INVALID_VALUE;
  *granularity = PHYSICAL_GRANULE;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *wanted, unsigned long long flags) {
  int gpu;
  TRY(check(wanted, &gpu));
  if (handle == NULL || size == 0 || size % PHYSICAL_GRANULE != 0 || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (allot_gpu_take(&driver.machine, gpu, size)) {
    physical *made = object_new(OBJECT_PHYSICAL, sizeof(physical), NULL);
    CUdeviceptr home = made != NULL ? address_take(size, PHYSICAL_GRANULE) : 0;
    if (home != 0) {
      made->gpu = gpu;
      made->size = size;
      made->home = home;
      made->descriptor = -1;
      made->properties = *wanted;
      made->references = 1;
      *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
      result = CUDA_SUCCESS;
    } else {
      if (made != NULL) object_free(made);
      allot_gpu_give_back(&driver.machine, gpu, size);
    }
  }
  UNLOCK();
  return result;
}

physical *physical_of(CUmemGenericAllocationHandle handle) {
  void *object = (void *)(uintptr_t)handle;
  return object_valid(object, OBJECT_PHYSICAL) ? object : NULL;
}

void physical_drop_locked(physical *dropped) {
  if (--dropped->references > 0) return;
  if (dropped->descriptor >= 0) close(dropped->descriptor);
  if (dropped->home != 0) address_give_back(dropped->home, dropped->size, dropped->touched);
  if (!dropped->imported) allot_gpu_give_back(&driver.machine, dropped->gpu, dropped->size);
  object_free(dropped);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER();
  LOCK();
  physical *released = physical_of(handle);
  bool held = released != NULL && released->references > released->mappings;
  if (held) physical_drop_locked(released);
  if (released == NULL) held = multicast_release_locked(handle);
  UNLOCK();
  return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
  ENTER();
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  range *mapped = range_find((CUdeviceptr)(uintptr_t)address);
  bool found = mapped != NULL && mapped->kind == RANGE_MAPPED;
  if (found) {
    physical *retained = mapped->origin;
    retained->references++;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)retained;
  }
  UNLOCK();
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle) {
  ENTER();
  LOCK();
  const physical *asked = physical_of(handle);
  if (asked != NULL && properties != NULL) *properties = asked->properties;
  UNLOCK();
  return asked != NULL && properties != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- mapping -----------------------------------------------------------------------------------

// Where the physical memory's bytes are.
static bool file_of(const physical *asked, int *descriptor, uint64_t *offset) {
  *descriptor = asked->descriptor;
  *offset = 0;
  return asked->descriptor >= 0 || address_file(asked->home, descriptor, offset);
}

bool physical_map_at(CUdeviceptr address, uint64_t size, const physical *mapped, uint64_t from) {
  int descriptor;
  uint64_t offset;
  if (!file_of(mapped, &descriptor, &offset)) return false;
  void *made = mmap(at(address), size, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE | MAP_FIXED, descriptor, (off_t)(offset + from));
  if (made == MAP_FAILED) return false;
  madvise(made, size, MADV_DONTFORK);
  return true;
}

static CUresult map_locked(CUdeviceptr address, uint64_t size, uint64_t offset,
                           CUmemGenericAllocationHandle handle) {
  physical *mapped = physical_of(handle);
  if (mapped == NULL || offset > mapped->size || size > mapped->size - offset) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!is_reserved(address, size)) return CUDA_ERROR_INVALID_VALUE;
  const range *next = range_first(address);
  if (range_find(address) != NULL || (next != NULL && next->base < address + size)) {
    return CUDA_ERROR_INVALID_VALUE;  // something is mapped there
  }
  range *added = range_add(address, size, RANGE_MAPPED, mapped->gpu);
  if (added == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!physical_map_at(address, size, mapped, offset)) {
    range_remove(added);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  added->origin = mapped;
  added->offset = offset;
  mapped->references++;
  mapped->mappings++;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER();
  // The real driver takes no offset other than 0 either.
  if (size == 0 || size % PHYSICAL_GRANULE != 0 || address % PHYSICAL_GRANULE != 0 || offset != 0 ||
      flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  CUresult result = map_locked(address, size, offset, handle);
  UNLOCK();
  return result;
}

// Do whole mappings fill the stretch without a gap?
static bool is_mapped(CUdeviceptr address, uint64_t size) {
  CUdeviceptr end = address + size;
  for (CUdeviceptr place = address; place < end;) {
    const range *mapped = range_find(place);
    if (mapped == NULL || mapped->kind != RANGE_MAPPED || mapped->base != place) return false;
    place += mapped->size;
    if (place > end) return false;
  }
  return true;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  ENTER();
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  bool right = is_mapped(address, size);
  for (CUdeviceptr place = address; right && place < address + size;) {
    range *gone = range_find(place);
    physical *mapped = gone->origin;
    place += gone->size;
    mmap(at(gone->base), gone->size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    madvise(at(gone->base), gone->size, MADV_DONTFORK);
    mapped->touched = mapped->touched || gone->touched;
    mapped->mappings--;
    range_remove(gone);
    physical_drop_locked(mapped);
  }
  UNLOCK();
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *list,
                        size_t count) {
  ENTER();
  if (list == NULL || count == 0 || size == 0) return CUDA_ERROR_INVALID_VALUE;
  bool any = false;
  for (size_t i = 0; i < count; i++) {
    if (list[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
      int gpu;
      TRY(driver_gpu(list[i].location.id, &gpu));
    }
    any = any || list[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
  }
  LOCK();
  bool right = is_mapped(address, size);
  for (CUdeviceptr place = address; right && place < address + size;) {
    range *changed = range_find(place);
    changed->accessible = any;
    changed->flags = (uint32_t)list[0].flags;
    // Kernels may write from now on; they do not here, but another process's copies may.
    place += changed->size;
  }
  UNLOCK();
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                        CUdeviceptr address) {
  ENTER();
  if (flags == NULL || location == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  const range *asked = range_find(address);
  bool mapped = asked != NULL && asked->kind == RANGE_MAPPED;
  if (mapped) *flags = asked->accessible ? asked->flags : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  UNLOCK();
  return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t size,
                                       CUmemRangeHandleType type, unsigned long long flags) {
  ENTER();
  return CUDA_ERROR_NOT_SUPPORTED;  // no dma-buf without a kernel driver
}

// Memory for arrays that were made without: whole arrays only, which is what tiles come to here.
static CUresult map_array(const CUarrayMapInfo *wanted) {
  if (wanted->resourceType != CU_RESOURCE_TYPE_ARRAY) return CUDA_ERROR_NOT_SUPPORTED;
  array *into;
  TRY(array_of(wanted->resource.array, &into));
  if (!(into->flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (into->physical != NULL) {
    physical_drop_locked(into->physical);
    into->physical = NULL;
  }
  if (wanted->memOperationType == CU_MEM_OPERATION_TYPE_UNMAP) return CUDA_SUCCESS;
  physical *mapped = physical_of(wanted->memHandle.memHandle);
  if (mapped == NULL) return CUDA_ERROR_INVALID_VALUE;
  mapped->references++;
  into->physical = mapped;
  return CUDA_SUCCESS;
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream handle) {
  stream *target;
  TRY(stream_of(handle, &target));
  if (list == NULL || count == 0) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = CUDA_SUCCESS;
  LOCK();
  for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) result = map_array(&list[i]);
  UNLOCK();
  return result;
}
