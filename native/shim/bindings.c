// SPDX-License-Identifier: Apache-2.0
// Memory that is bound to a multicast object or to a logical endpoint. It stays allocated when its
// handles and mappings are gone, so the binding holds it until it is undone.
//
// An object that ends with bindings in it may live on in other processes, and so may the memory:
// its charge stays until this process ends.
#include "driver.h"
#include "extra_abi.h"
#include "memory.h"
#include "virtual.h"

// What is bound of an object, in granules: a part of one counts in full.
#define RANGE_BITS 32

static uint64_t range_of(uint64_t offset, uint64_t size) {
  uint64_t first = offset / CHARGE_GRANULE;
  uint64_t count = (offset % CHARGE_GRANULE + size + CHARGE_GRANULE - 1) / CHARGE_GRANULE;
  return first << RANGE_BITS | (count > UINT32_MAX ? UINT32_MAX : count);
}

// Whole: of what is unbound in part, the driver keeps the memory for the rest.
static bool is_within(uint64_t range, uint64_t offset, uint64_t size) {
  uint64_t first = (range >> RANGE_BITS) * CHARGE_GRANULE;
  uint64_t bytes = (range & UINT32_MAX) * CHARGE_GRANULE;
  return first >= offset && bytes <= size && first - offset <= size - bytes;
}

// With virtual_lock held, as everything here.
static void hold(process *own, uint64_t object, uint64_t range, uint64_t id) {
  record physical;
  if (!records_find(&own->records, SPACE_PHYSICAL, id, &physical)) return;
  record binding = {.space = SPACE_BINDING,
                    .key = ++own->physical_serial,
                    .owner = object,
                    .bytes = range,
                    .count = (uint32_t)id,
                    .device = physical.device};
  virtual_hold(own, id);
  // Without a record it is held until the process ends.
  if (id <= UINT32_MAX) records_keep(&own->records, &binding);
}

static void handle_bound(process *own, uint64_t object, uint64_t offset, uint64_t size,
                         CUmemGenericAllocationHandle memory) {
  record name;
  if (records_find(&own->records, SPACE_HANDLE, memory, &name)) {
    hold(own, object, range_of(offset, size), name.owner);
  }
}

static void address_bound(process *own, uint64_t object, uint64_t offset, uint64_t address,
                          uint64_t size) {
  record mapping;
  if (plain_exported(own, address)) return;
  for (uint64_t at = address; at - address < size;) {
    bool known = virtual_mapping_of(own, at, &mapping);
    uint64_t next = known ? mapping.key + mapping.bytes : round_up(at + 1, CHARGE_GRANULE);
    uint64_t bytes = next - address < size ? next - at : size - (at - address);
    if (known) hold(own, object, range_of(offset + (at - address), bytes), mapping.owner);
    at = next;
  }
}

#define SWEPT 32

typedef struct binding_sweep {
  uint64_t object, offset, size;
  int device;
  uint64_t ids[SWEPT];
  unsigned count;
} binding_sweep;

static bool is_unbound(const record *seen, void *context) {
  binding_sweep *sweep = context;
  if (seen->space != SPACE_BINDING || seen->owner != sweep->object ||
      seen->device != sweep->device || !is_within(seen->bytes, sweep->offset, sweep->size) ||
      sweep->count == SWEPT) {
    return false;
  }
  sweep->ids[sweep->count++] = seen->count;
  return true;
}

static void unbound(process *own, uint64_t object, CUdevice ordinal, uint64_t offset,
                    uint64_t size) {
  binding_sweep sweep = {
      .object = object, .offset = offset, .size = size, .device = process_device(own, ordinal)};
  do {
    sweep.count = 0;
    records_sweep(&own->records, is_unbound, &sweep);
    for (unsigned i = 0; i < sweep.count; i++) virtual_let_go(own, sweep.ids[i]);
  } while (sweep.count == SWEPT);
}

// Handles of objects are addresses, endpoints small numbers: `object` tells them apart.
#define CHANGE_BINDING(call, change)                                            \
  do {                                                                          \
    process *own = governed() ? process_state() : NULL;                         \
    if (own == NULL) return driver_refuses() ? CUDA_ERROR_NOT_PERMITTED : call; \
    process_lock(&own->virtual_lock);                                           \
    CUresult result = DRIVER(call);                                             \
    if (result == CUDA_SUCCESS) change;                                         \
    process_unlock(&own->virtual_lock);                                         \
    return result;                                                              \
  } while (0)

CUDA_WRAPPER(cuMulticastBindMem, (CUmemGenericAllocationHandle object, size_t offset,
                                  CUmemGenericAllocationHandle memory, size_t from, size_t size,
                                  unsigned long long flags)) {
  CHANGE_BINDING(REAL(cuMulticastBindMem)(object, offset, memory, from, size, flags),
                 handle_bound(own, object, offset, size, memory));
}

CUDA_WRAPPER(cuMulticastBindMem_v2, (CUmemGenericAllocationHandle object, CUdevice device,
                                     size_t offset, CUmemGenericAllocationHandle memory,
                                     size_t from, size_t size, unsigned long long flags)) {
  CHANGE_BINDING(REAL(cuMulticastBindMem_v2)(object, device, offset, memory, from, size, flags),
                 handle_bound(own, object, offset, size, memory));
}

CUDA_WRAPPER(cuMulticastBindAddr, (CUmemGenericAllocationHandle object, size_t offset,
                                   CUdeviceptr address, size_t size, unsigned long long flags)) {
  CHANGE_BINDING(REAL(cuMulticastBindAddr)(object, offset, address, size, flags),
                 address_bound(own, object, offset, address, size));
}

CUDA_WRAPPER(cuMulticastBindAddr_v2,
             (CUmemGenericAllocationHandle object, CUdevice device, size_t offset,
              CUdeviceptr address, size_t size, unsigned long long flags)) {
  CHANGE_BINDING(REAL(cuMulticastBindAddr_v2)(object, device, offset, address, size, flags),
                 address_bound(own, object, offset, address, size));
}

CUDA_WRAPPER(cuMulticastUnbind,
             (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t size)) {
  CHANGE_BINDING(REAL(cuMulticastUnbind)(object, device, offset, size),
                 unbound(own, object, device, offset, size));
}

CUDA_WRAPPER(cuLogicalEndpointBindMem, (uint32_t endpoint, CUdevice device, uint64_t offset,
                                        CUmemGenericAllocationHandle memory, uint64_t from,
                                        uint64_t size, unsigned long long flags)) {
  CHANGE_BINDING(
      REAL(cuLogicalEndpointBindMem)(endpoint, device, offset, memory, from, size, flags),
      handle_bound(own, endpoint, offset, size, memory));
}

CUDA_WRAPPER(cuLogicalEndpointBindAddr, (uint32_t endpoint, CUdevice device, uint64_t offset,
                                         void *address, uint64_t size, unsigned long long flags)) {
  CHANGE_BINDING(REAL(cuLogicalEndpointBindAddr)(endpoint, device, offset, address, size, flags),
                 address_bound(own, endpoint, offset, (uint64_t)(uintptr_t)address, size));
}

CUDA_WRAPPER(cuLogicalEndpointUnbind,
             (uint32_t endpoint, CUdevice device, uint64_t offset, uint64_t size)) {
  CHANGE_BINDING(REAL(cuLogicalEndpointUnbind)(endpoint, device, offset, size),
                 unbound(own, endpoint, device, offset, size));
}
