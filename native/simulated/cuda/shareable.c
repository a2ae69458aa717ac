// SPDX-License-Identifier: Apache-2.0
// Physical memory as a shareable handle.
//
// It is a part of this process's device-memory file until it is exported; then it gets a memory
// file of its own, whose descriptor is the handle.
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "simulated/cuda/virtual.h"

static void *at(CUdeviceptr address) {
  return (void *)(uintptr_t)address;
}

// Moves the bytes to a memory file of their own, under the mappings' feet.
static bool move_to_own_file(physical *moved) {
  char name[120];
  handoff_name(name, sizeof name, "physical", moved->gpu, moved->size);
  int descriptor = memfd_file(name);
  if (descriptor < 0) return false;
  if (ftruncate(descriptor, (off_t)moved->size) != 0) {
    close(descriptor);
    return false;
  }
  bool touched = moved->touched;
  for (range *one = range_first(0); one != NULL; one = range_first(one->base + 1)) {
    if (one->kind == RANGE_MAPPED && one->origin == moved) touched = touched || one->touched;
  }
  for (uint64_t done = 0; touched && done < moved->size;) {
    ssize_t written = pwrite(descriptor, at(moved->home + done), moved->size - done, (off_t)done);
    if (written <= 0) {
      close(descriptor);
      return false;
    }
    done += (uint64_t)written;
  }
  moved->descriptor = descriptor;
  for (range *one = range_first(0); one != NULL; one = range_first(one->base + 1)) {
    if (one->kind == RANGE_MAPPED && one->origin == moved) {
      physical_map_at(one->base, one->size, moved, one->offset);
    }
  }
  address_give_back(moved->home, moved->size, touched);
  moved->home = 0;
  return true;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  ENTER();
  if (shareable == NULL || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  LOCK();
  physical *exported = physical_of(handle);
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (exported != NULL && (exported->properties.requestedHandleTypes & type) != 0) {
    result = CUDA_ERROR_OPERATING_SYSTEM;
    if (exported->descriptor >= 0 || move_to_own_file(exported)) {
      int given = dup(exported->descriptor);
      if (given >= 0) {
        memcpy(shareable, &given, sizeof given);
        result = CUDA_SUCCESS;
      }
    }
  }
  UNLOCK();
  return result;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
  ENTER();
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  int given = (int)(intptr_t)shareable, gpu;
  uint64_t size;
  if (!handoff_read_name(given, "physical", &gpu, &size)) return CUDA_ERROR_INVALID_VALUE;
  int ordinal = driver_ordinal(gpu);
  if (ordinal < 0) return CUDA_ERROR_INVALID_DEVICE;
  int own = handoff_keep(given);
  if (own < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  LOCK();
  physical *made = object_new(OBJECT_PHYSICAL, sizeof(physical), NULL);
  if (made != NULL) {
    made->gpu = gpu;
    made->size = size;
    made->descriptor = own;
    made->imported = true;
    made->references = 1;
    made->properties =
        (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                              .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal}};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
  }
  UNLOCK();
  if (made == NULL) close(own);
  return made != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
