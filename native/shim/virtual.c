// SPDX-License-Identifier: Apache-2.0
// Virtual memory management. An allocation is charged at cuMemCreate and given back when nothing
// holds it: no handle (cuMemRetainAllocationHandle makes more of them), no mapping, no array.
//
// Handles and mappings that are not known are of memory that came from elsewhere
// (cuMemImportFromShareableHandle): whoever made it has the charge. So that it always has one,
// what was exported is not given back before its maker ends.
#include "virtual.h"

#include "charge.h"
#include "dead.h"
#include "driver.h"
#include "memory.h"

// ---- what holds an allocation, counted; with virtual_lock held ----

static bool add_holder(record *physical, bool exists, void *context) {
  if (exists) physical->count++;
  return exists;
}

void virtual_hold(process *own, uint64_t id) {
  records_change(&own->records, SPACE_PHYSICAL, id, add_holder, NULL);
}

static bool remove_holder(record *physical, bool exists, void *context) {
  record *gone = context;
  if (!exists) return false;
  if (--physical->count > 0) return true;
  *gone = *physical;
  return false;
}

void virtual_let_go(process *own, uint64_t id) {
  record gone = {.bytes = 0};
  records_change(&own->records, SPACE_PHYSICAL, id, remove_holder, &gone);
  if (gone.bytes != 0) charge_release(own, gone.device, gone.bytes);
}

// What was exported lives on in descriptors and imports, here and in other processes, and nobody
// tells when the last of them is gone.
static bool keep_charged(record *physical, bool exists, void *context) {
  if (exists) physical->bytes = 0;  // nothing to give back, whatever lets go of it
  return exists;
}

static void exported(process *own, uint64_t id) {
  records_change(&own->records, SPACE_PHYSICAL, id, keep_charged, NULL);
}

// ---- handles ----

#define NO_DEVICE (-1)      /* the host's, or what the driver refuses */
#define UNKNOWN_DEVICE (-2) /* of a place that came after this shim, or that has no number */

static bool is_understood(CUmemAllocationType type) {
  // Without a type the driver has its own error.
  return type == CU_MEM_ALLOCATION_TYPE_PINNED || type == CU_MEM_ALLOCATION_TYPE_INVALID;
}

static CUdevice ordinal_of(const CUmemAllocationProp *properties) {
  CUdevice ordinal = NO_DEVICE;
  switch (properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      ordinal = properties->location.id;
      break;
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN:
      ordinal = properties->location.localized.deviceId;
      break;
    case CU_MEM_LOCATION_TYPE_NONE:
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return is_understood(properties->type) ? NO_DEVICE : UNKNOWN_DEVICE;
    default:
      return UNKNOWN_DEVICE;
  }
  return ordinal < 0 ? NO_DEVICE : ordinal;
}

static bool name_created(process *own, CUmemGenericAllocationHandle handle, uint64_t bytes,
                         int device) {
  uint64_t id = ++own->physical_serial;
  record physical = {
      .space = SPACE_PHYSICAL, .key = id, .bytes = bytes, .count = 1, .device = (int16_t)device};
  record name = {.space = SPACE_HANDLE, .key = handle, .owner = id, .count = 1};
  if (records_keep(&own->records, &physical) && records_keep(&own->records, &name)) return true;
  records_take(&own->records, SPACE_PHYSICAL, id, &physical);
  DRIVER(REAL(cuMemRelease)(handle));
  return false;
}

static CUresult create(const target *at, CUmemGenericAllocationHandle *handle, size_t size,
                       const CUmemAllocationProp *properties, unsigned long long flags) {
  UNCANCELLED;
  process *own = at->own;
  uint64_t bytes = round_up(size, CHARGE_GRANULE);
  reservation needed = {.own = own, .device = at->device};
  CUmemGenericAllocationHandle made = 0;
  CUresult result;
  do {
    process_lock(&own->virtual_lock);
    result = CUDA_ERROR_OUT_OF_MEMORY;
    if (reservation_try(&needed, bytes)) {
      result =
          reservation_called(&needed, DRIVER(REAL(cuMemCreate)(&made, size, properties, flags)));
    }
    if (result == CUDA_SUCCESS && !name_created(own, made, bytes, at->device)) {
      result = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (result == CUDA_SUCCESS) {
      reservation_keep(&needed);
    }
    process_unlock(&own->virtual_lock);
  } while (reservation_goes_on(&needed));
  reservation_end(&needed);
  GIVE_RESULT(handle, made, result);
  return result;
}

CUDA_WRAPPER(cuMemCreate, (CUmemGenericAllocationHandle * handle, size_t size,
                           const CUmemAllocationProp *properties, unsigned long long flags)) {
  if (properties == NULL || size == 0 || handle == NULL || !governed()) {
    return UNGOVERNED(cuMemCreate)(handle, size, properties, flags);
  }
  // Another thread may write them meanwhile.
  const CUmemAllocationProp read = *properties;
  CUdevice ordinal = ordinal_of(&read);
  if (ordinal == NO_DEVICE) return REAL(cuMemCreate)(handle, size, &read, flags);
  if (ordinal == UNKNOWN_DEVICE) return CUDA_ERROR_OUT_OF_MEMORY;
  target at;
  CUresult refusal = target_device(&at, ordinal);
  return refusal != CUDA_SUCCESS ? refusal : create(&at, handle, size, &read, flags);
}

static bool drop_reference(record *name, bool exists, void *context) {
  uint64_t *id = context;
  if (!exists) return false;
  *id = name->owner;
  return --name->count > 0;
}

CUDA_WRAPPER(cuMemRelease, (CUmemGenericAllocationHandle handle)) {
  process *own = governed() ? process_state() : NULL;
  if (own == NULL) return REAL(cuMemRelease)(handle);
  uint64_t id = 0;
  process_lock(&own->virtual_lock);
  CUresult result = DRIVER(REAL(cuMemRelease)(handle));
  if (result == CUDA_SUCCESS) {
    records_change(&own->records, SPACE_HANDLE, handle, drop_reference, &id);
    if (id != 0) virtual_let_go(own, id);
  }
  process_unlock(&own->virtual_lock);
  return result;
}

CUDA_WRAPPER(cuMemExportToShareableHandle,
             (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
              unsigned long long flags)) {
  process *own = governed() ? process_state() : NULL;
  if (own == NULL) return UNGOVERNED(cuMemExportToShareableHandle)(shareable, handle, type, flags);
  record name;
  process_lock(&own->virtual_lock);
  CUresult result = DRIVER(REAL(cuMemExportToShareableHandle)(shareable, handle, type, flags));
  if (result == CUDA_SUCCESS && records_find(&own->records, SPACE_HANDLE, handle, &name)) {
    exported(own, name.owner);
  }
  process_unlock(&own->virtual_lock);
  return result;
}

// Mappings begin at multiples of the granule.
bool virtual_mapping_of(process *own, uint64_t address, record *mapping) {
  uint64_t start = address & ~(CHARGE_GRANULE - 1);
  for (uint64_t back = 0; back <= own->largest_mapping && back <= start; back += CHARGE_GRANULE) {
    if (records_find(&own->records, SPACE_MAPPING, start - back, mapping)) {
      return address - mapping->key < mapping->bytes;
    }
  }
  return false;
}

static bool add_reference(record *name, bool exists, void *context) {
  const uint64_t *id = context;
  if (!exists) name->owner = *id;
  name->count++;
  return true;
}

CUDA_WRAPPER(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void *address)) {
  process *own = governed() ? process_state() : NULL;
  if (own == NULL) return UNGOVERNED(cuMemRetainAllocationHandle)(handle, address);
  record mapping;
  CUmemGenericAllocationHandle retained = 0;
  process_lock(&own->virtual_lock);
  CUresult result = DRIVER(REAL(cuMemRetainAllocationHandle)(RESULT(handle, retained), address));
  if (result == CUDA_SUCCESS && virtual_mapping_of(own, (uint64_t)(uintptr_t)address, &mapping)) {
    // Without memory for the record the allocation stays charged: too much rather than too little.
    records_change(&own->records, SPACE_HANDLE, retained, add_reference, &mapping.owner);
    virtual_hold(own, mapping.owner);
  }
  process_unlock(&own->virtual_lock);
  GIVE_RESULT(handle, retained, result);
  return result;
}

// ---- mappings ----

CUDA_WRAPPER(cuMemMap, (CUdeviceptr address, size_t size, size_t offset,
                        CUmemGenericAllocationHandle handle, unsigned long long flags)) {
  process *own = governed() ? process_state() : NULL;
  if (own == NULL) return UNGOVERNED(cuMemMap)(address, size, offset, handle, flags);
  record name;
  process_lock(&own->virtual_lock);
  CUresult result = DRIVER(REAL(cuMemMap)(address, size, offset, handle, flags));
  if (result == CUDA_SUCCESS && records_find(&own->records, SPACE_HANDLE, handle, &name)) {
    record mapping = {.space = SPACE_MAPPING, .key = address, .bytes = size, .owner = name.owner};
    if (size > own->largest_mapping) own->largest_mapping = size;
    records_keep(&own->records, &mapping);
    virtual_hold(own, name.owner);
  }
  process_unlock(&own->virtual_lock);
  return result;
}

CUDA_WRAPPER(cuMemUnmap, (CUdeviceptr address, size_t size)) {
  process *own = governed() ? process_state() : NULL;
  if (own == NULL) return REAL(cuMemUnmap)(address, size);
  process_lock(&own->virtual_lock);
  CUresult result = DRIVER(REAL(cuMemUnmap)(address, size));
  record mapping;
  for (uint64_t at = 0; result == CUDA_SUCCESS && at < size;) {
    bool known = records_take(&own->records, SPACE_MAPPING, address + at, &mapping);
    if (known) virtual_let_go(own, mapping.owner);
    at += known ? mapping.bytes : CHARGE_GRANULE;
  }
  process_unlock(&own->virtual_lock);
  return result;
}

static void range_exported(process *own, uint64_t address, uint64_t size) {
  record mapping;
  for (uint64_t at = address; at - address < size;) {
    bool known = virtual_mapping_of(own, at, &mapping);
    if (known) exported(own, mapping.owner);
    at = known ? mapping.key + mapping.bytes : (at & ~(CHARGE_GRANULE - 1)) + CHARGE_GRANULE;
  }
}

// A DMA buffer of mapped or of plain memory.
CUDA_WRAPPER(cuMemGetHandleForAddressRange, (void *handle, CUdeviceptr address, size_t size,
                                             CUmemRangeHandleType type, unsigned long long flags)) {
  process *own = governed() ? process_state() : NULL;
  if (own == NULL)
    return UNGOVERNED(cuMemGetHandleForAddressRange)(handle, address, size, type, flags);
  process_lock(&own->virtual_lock);
  CUresult result = DRIVER(REAL(cuMemGetHandleForAddressRange)(handle, address, size, type, flags));
  if (result == CUDA_SUCCESS && !plain_exported(own, address)) range_exported(own, address, size);
  process_unlock(&own->virtual_lock);
  return result;
}

// ---- sparse arrays ----
//
// An allocation that was mapped into an array counts as held by it until the array is destroyed. An
// earlier unmapping is not followed: which allocation a tile had, the call does not say.

static void note_sparse(process *own, const CUarrayMapInfo *info) {
  record name;
  if (info->memOperationType != CU_MEM_OPERATION_TYPE_MAP ||
      !records_find(&own->records, SPACE_HANDLE, info->memHandle.memHandle, &name)) {
    return;
  }
  uint64_t array = (uint64_t)(uintptr_t)(info->resourceType == CU_RESOURCE_TYPE_ARRAY
                                             ? (void *)info->resource.array
                                             : (void *)info->resource.mipmap);
  uint64_t key = array * UINT64_C(0x9e3779b97f4a7c15) ^ name.owner;
  record held = {.space = SPACE_SPARSE, .key = key, .owner = array, .bytes = name.owner};
  record before;
  if (records_find(&own->records, SPACE_SPARSE, key, &before)) return;
  virtual_hold(own, name.owner);
  // Without a record it is held until the process ends.
  if (!records_keep(&own->records, &held)) return;
  __atomic_add_fetch(&own->sparse_mappings, 1, __ATOMIC_RELAXED);
}

typedef CUresult map_call(CUarrayMapInfo *list, unsigned count, CUstream stream);

// One after another: of a list that a driver refuses, it does not tell how much it has read and
// mapped.
static CUresult map_arrays(CUarrayMapInfo *list, unsigned count, CUstream stream, map_call *call) {
  UNCANCELLED;
  process *own = governed() ? process_state() : NULL;
  if (own == NULL && driver_refuses()) return CUDA_ERROR_NOT_PERMITTED;
  if (list == NULL || count == 0 || own == NULL) return DRIVER(call(list, count, stream));
  CUresult result = CUDA_SUCCESS;
  for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
    result = DRIVER(call(&list[i], 1, stream));
    if (result != CUDA_SUCCESS) break;
    process_lock(&own->virtual_lock);
    note_sparse(own, &list[i]);
    process_unlock(&own->virtual_lock);
  }
  return result;
}

CUDA_WRAPPER(cuMemMapArrayAsync, (CUarrayMapInfo * list, unsigned int count, CUstream stream)) {
  return map_arrays(list, count, stream, REAL(cuMemMapArrayAsync));
}

CUDA_WRAPPER(cuMemMapArrayAsync_ptsz,
             (CUarrayMapInfo * list, unsigned int count, CUstream stream)) {
  return map_arrays(list, count, stream, REAL(cuMemMapArrayAsync_ptsz));
}

#define SWEPT 32

typedef struct array_sweep {
  uint64_t array;
  uint64_t ids[SWEPT];
  unsigned count;
} array_sweep;

static bool is_of_array(const record *seen, void *context) {
  array_sweep *sweep = context;
  if (seen->space != SPACE_SPARSE || seen->owner != sweep->array || sweep->count == SWEPT) {
    return false;
  }
  sweep->ids[sweep->count++] = seen->bytes;
  return true;
}

void virtual_array_gone(process *own, uint64_t array) {
  if (__atomic_load_n(&own->sparse_mappings, __ATOMIC_RELAXED) == 0) return;
  array_sweep sweep = {.array = array};
  process_lock(&own->virtual_lock);
  do {
    sweep.count = 0;
    records_sweep(&own->records, is_of_array, &sweep);
    for (unsigned i = 0; i < sweep.count; i++) virtual_let_go(own, sweep.ids[i]);
    __atomic_sub_fetch(&own->sparse_mappings, sweep.count, __ATOMIC_RELAXED);
  } while (sweep.count == SWEPT);
  process_unlock(&own->virtual_lock);
}
