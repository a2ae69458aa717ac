// SPDX-License-Identifier: Apache-2.0
// Devices: counting them, naming them, and what connects them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

CUresult cuDeviceGetCount(int *count) {
  ENTER();
  if (count == NULL) return CUDA_ERROR_INVALID_VALUE;
  *count = driver.device_count;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER();
  if (device == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (ordinal < 0 || ordinal >= driver.device_count) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  if (name == NULL || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  snprintf(name, (size_t)length, "%s", driver_description(gpu)->name);
  return CUDA_SUCCESS;
}

static int hex_digit(char letter) {
  if (letter >= '0' && letter <= '9') return letter - '0';
  if (letter >= 'a' && letter <= 'f') return letter - 'a' + 10;
  if (letter >= 'A' && letter <= 'F') return letter - 'A' + 10;
  return -1;
}

// Behind "GPU-" or "MIG-".
static void read_uuid(const char *text, CUuuid *uuid) {
  memset(uuid, 0, sizeof *uuid);
  int digits = 0;
  for (const char *at = text + 4; *at != '\0' && digits < 32; at++) {
    int digit = hex_digit(*at);
    if (digit < 0) continue;
    int byte = (unsigned char)uuid->bytes[digits / 2] << 4 | digit;
    uuid->bytes[digits / 2] = (char)byte;
    digits++;
  }
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  if (uuid == NULL) return CUDA_ERROR_INVALID_VALUE;
  read_uuid(driver_description(gpu)->uuid, uuid);
  return CUDA_SUCCESS;
}

// Of a MIG device: the whole GPU's.
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  if (uuid == NULL) return CUDA_ERROR_INVALID_VALUE;
  read_uuid(driver.machine.machine->description.gpus[gpu].uuid, uuid);
  return CUDA_SUCCESS;
}

// LUIDs exist on Windows only.
CUresult cuDeviceGetLuid(char *luid, unsigned int *node_mask, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  if (bytes == NULL) return CUDA_ERROR_INVALID_VALUE;
  *bytes = allot_gpu_capacity(&driver.machine, gpu);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
  size_t all;
  if (bytes == NULL) return CUDA_ERROR_INVALID_VALUE;
  TRY(cuDeviceTotalMem_v2(&all, device));
  *bytes = all > UINT32_MAX ? UINT32_MAX : (unsigned int)all;
  return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  if (major == NULL || minor == NULL) return CUDA_ERROR_INVALID_VALUE;
  *major = (int)driver_description(gpu)->compute_major;
  *minor = (int)driver_description(gpu)->compute_minor;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  if (properties == NULL) return CUDA_ERROR_INVALID_VALUE;
  const allot_gpu_description *own = driver_description(gpu);
  *properties = (CUdevprop){
      .maxThreadsPerBlock = (int)own->max_threads_per_block,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {0x7fffffff, 65535, 65535},
      .sharedMemPerBlock = (int)own->shared_per_block,
      .totalConstantMemory = 65536,
      .SIMDWidth = (int)own->warp_size,
      .memPitch = 0x7fffffff,
      .regsPerBlock = 65536,
      .clockRate = (int)own->sm_clock_max_mhz * 1000,
      .textureAlign = 512,
  };
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  if (id == NULL || length < 13) return CUDA_ERROR_INVALID_VALUE;
  const allot_gpu_description *own = driver_description(gpu);
  snprintf(id, (size_t)length, "%04X:%02X:%02X.%X", own->pci_domain, own->pci_bus, own->pci_device,
           own->pci_function);
  return CUDA_SUCCESS;
}

// "domain:bus:device.function", without the function, or "bus:device.function".
static bool parse_pci(const char *text, unsigned place[4]) {
  place[0] = place[3] = 0;
  int used = 0;
  if (sscanf(text, "%x:%x:%x.%x%n", &place[0], &place[1], &place[2], &place[3], &used) == 4 &&
      text[used] == '\0') {
    return true;
  }
  place[3] = 0;
  if (sscanf(text, "%x:%x:%x%n", &place[0], &place[1], &place[2], &used) == 3 &&
      text[used] == '\0') {
    return true;
  }
  place[0] = 0;
  return sscanf(text, "%x:%x.%x%n", &place[1], &place[2], &place[3], &used) == 3 &&
         text[used] == '\0';
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
  ENTER();
  unsigned place[4];
  if (device == NULL || id == NULL || !parse_pci(id, place)) return CUDA_ERROR_INVALID_VALUE;
  for (int ordinal = 0; ordinal < driver.device_count; ordinal++) {
    const allot_gpu_description *own = driver_description(driver.gpus[ordinal]);
    if (own->pci_domain == place[0] && own->pci_bus == place[1] && own->pci_device == place[2] &&
        own->pci_function == place[3]) {
      *device = ordinal;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

// ---- peers -------------------------------------------------------------------------------------

static bool linked_by_nvlink(int gpu, int peer) {
  const allot_gpu_description *own = driver_description(gpu), *other = driver_description(peer);
  bool own_switch = false, other_switch = false;
  for (uint32_t link = 0; link < own->nvlink_count && link < 18; link++) {
    if (own->nvlink_peer[link] == peer) return true;
    if (own->nvlink_peer[link] == -2) own_switch = true;
  }
  for (uint32_t link = 0; link < other->nvlink_count && link < 18; link++) {
    if (other->nvlink_peer[link] == -2) other_switch = true;
  }
  return own_switch && other_switch;
}

// Over PCIe between cards of one architecture; consumer cards have had it taken away.
static bool reach_each_other(int gpu, int peer) {
  if (linked_by_nvlink(gpu, peer)) return true;
  const allot_gpu_description *own = driver_description(gpu), *other = driver_description(peer);
  if (strstr(own->name, "GeForce") != NULL || strstr(other->name, "GeForce") != NULL) return false;
  return own->compute_major == other->compute_major && own->compute_minor == other->compute_minor;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  int gpu, other;
  TRY(driver_gpu(device, &gpu));
  TRY(driver_gpu(peer, &other));
  if (can == NULL) return CUDA_ERROR_INVALID_VALUE;
  *can = device != peer && reach_each_other(gpu, other);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice device,
                                 CUdevice peer) {
  int gpu, other;
  TRY(driver_gpu(device, &gpu));
  TRY(driver_gpu(peer, &other));
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (device == peer) return CUDA_ERROR_INVALID_DEVICE;
  bool reach = reach_each_other(gpu, other), nvlink = linked_by_nvlink(gpu, other);
  switch (attribute) {
    case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
      *value = reach && !nvlink;  // 0 is the fastest
      return CUDA_SUCCESS;
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED:
      *value = reach;
      return CUDA_SUCCESS;
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
      *value = nvlink;
      return CUDA_SUCCESS;
    case CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED:
      *value = 0;
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult peer_context(CUcontext handle, context *own, context **peer) {
  if (!object_valid(handle, OBJECT_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
  *peer = (context *)handle;
  if (own->gpu == (*peer)->gpu || !reach_each_other(own->gpu, (*peer)->gpu)) {
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) {
  ENTER_CONTEXT(current);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  context *peer;
  CUresult result = peer_context(handle, current, &peer);
  if (result == CUDA_SUCCESS && (current->peers & 1u << peer->ordinal)) {
    result = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  }
  if (result == CUDA_SUCCESS) current->peers |= 1u << peer->ordinal;
  UNLOCK();
  return result;
}

CUresult cuCtxDisablePeerAccess(CUcontext handle) {
  ENTER_CONTEXT(current);
  LOCK();
  context *peer = (context *)handle;
  CUresult result = CUDA_SUCCESS;
  if (!object_valid(handle, OBJECT_CONTEXT)) {
    result = CUDA_ERROR_INVALID_CONTEXT;
  } else if (!(current->peers & 1u << peer->ordinal)) {
    result = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  } else {
    current->peers &= ~(1u << peer->ordinal);
  }
  UNLOCK();
  return result;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
                                    CUflushGPUDirectRDMAWritesScope scope) {
  ENTER_CONTEXT(current);
  return CUDA_SUCCESS;
}
