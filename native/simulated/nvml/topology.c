// SPDX-License-Identifier: Apache-2.0
// How near devices are to each other, to processors and to memory.
//
// Two neighbours hang on one PCIe switch; GPUs of one NUMA node on one processor. A simulated NUMA
// node has its part of this machine's processors, whatever nodes the machine really has.
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated/nvml/library.h"

static const allot_machine_description *machine(void) {
  return &nvml_engine()->machine->description;
}

static nvmlGpuTopologyLevel_t level_between(const nvml_gpu *one, const nvml_gpu *other) {
  if (one->index == other->index) return NVML_TOPOLOGY_INTERNAL;
  if (one->description->numa_node != other->description->numa_node) return NVML_TOPOLOGY_SYSTEM;
  return one->index / 2 == other->index / 2 ? NVML_TOPOLOGY_SINGLE : NVML_TOPOLOGY_NODE;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other,
                                                             nvmlGpuTopologyLevel_t *level) {
  nvml_gpu second;
  NVML_ENTER(one, level != NULL);
  nvmlReturn_t result = nvml_enter(other, &second);
  if (result != NVML_SUCCESS) return result;
  *level = level_between(&gpu, &second);
  return NVML_SUCCESS;
}

// Gives the devices of the set (one bit each), or only their number if there is no room.
static nvmlReturn_t give_devices(unsigned int set, unsigned int *count, nvmlDevice_t *devices) {
  unsigned int found = (unsigned int)__builtin_popcount(set);
  if (devices == NULL || *count < found) {
    bool asked_for_count = *count == 0;
    *count = found;
    return asked_for_count ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
  }
  *count = found;
  for (int i = 0, at = 0; i < ALLOT_MACHINE_GPUS; i++) {
    if ((set >> i & 1) != 0) devices[at++] = nvml_device(i);
  }
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device,
                                                          nvmlGpuTopologyLevel_t level,
                                                          unsigned int *count,
                                                          nvmlDevice_t *devices) {
  NVML_ENTER(device, count != NULL && level <= NVML_TOPOLOGY_SYSTEM);
  unsigned int set = 0;
  for (unsigned int i = 0; i < machine()->gpu_count; i++) {
    nvml_gpu other;
    if ((int)i == gpu.index || nvml_find(nvml_device((int)i), &other) != NVML_SUCCESS) continue;
    if (level_between(&gpu, &other) == level) set |= 1u << i;
  }
  return give_devices(set, count, devices);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other,
                                                nvmlGpuP2PCapsIndex_t index,
                                                nvmlGpuP2PStatus_t *status) {
  nvml_gpu second;
  NVML_ENTER(one, status != NULL && index < NVML_P2P_CAPS_INDEX_UNKNOWN);
  nvmlReturn_t result = nvml_enter(other, &second);
  if (result != NVML_SUCCESS) return result;
  if (gpu.index == second.index) return NVML_ERROR_INVALID_ARGUMENT;
  bool linked = nvml_are_linked(&gpu, &second);
  bool alike = strcmp(gpu.description->name, second.description->name) == 0;
  bool over_pci = alike && !nvml_is_geforce(&gpu);
  bool can = index == NVML_P2P_CAPS_INDEX_NVLINK    ? linked
             : index == NVML_P2P_CAPS_INDEX_PCI     ? over_pci
             : index == NVML_P2P_CAPS_INDEX_ATOMICS ? linked
                                                    : linked || over_pci;
  *status = can ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
  return NVML_SUCCESS;
}

// ---- processors and memory ---------------------------------------------------------------------

static unsigned int node_count(void) {
  unsigned int count = 1;
  for (unsigned int i = 0; i < machine()->gpu_count; i++) {
    int node = machine()->gpus[i].numa_node;
    if (node >= 0 && (unsigned int)node >= count) count = (unsigned int)node + 1;
  }
  return count;
}

// Processors first..first+count-1 are the node's; with more nodes than processors they share.
static void processors_of(int node, unsigned int *first, unsigned int *count) {
  long configured = sysconf(_SC_NPROCESSORS_CONF);
  unsigned int all = configured > 0 ? (unsigned int)configured : 1;
  unsigned int each = all / node_count();
  if (node < 0 || each == 0) {
    *first = 0;
    *count = all;
    return;
  }
  *first = (unsigned int)node * each;
  *count = (unsigned int)node + 1 == node_count() ? all - *first : each;
}

#define WORD_BITS (8u * (unsigned int)sizeof(unsigned long))

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int size,
                                                             unsigned long *set,
                                                             nvmlAffinityScope_t scope) {
  NVML_ENTER(device, set != NULL && size > 0 && scope <= NVML_AFFINITY_SCOPE_SOCKET);
  unsigned int first, count;
  processors_of(gpu.description->numa_node, &first, &count);
  memset(set, 0, size * sizeof *set);
  for (unsigned int cpu = first; cpu < first + count && cpu / WORD_BITS < size; cpu++) {
    set[cpu / WORD_BITS] |= 1ul << cpu % WORD_BITS;
  }
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int size,
                                                  unsigned long *set) {
  return nvmlDeviceGetCpuAffinityWithinScope(device, size, set, NVML_AFFINITY_SCOPE_NODE);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size,
                                                     unsigned long *set,
                                                     nvmlAffinityScope_t scope) {
  NVML_ENTER(device, set != NULL && size > 0 && scope <= NVML_AFFINITY_SCOPE_SOCKET);
  int node = gpu.description->numa_node;
  memset(set, 0, size * sizeof *set);
  if (node >= 0 && (unsigned int)node / WORD_BITS < size) {
    set[(unsigned int)node / WORD_BITS] |= 1ul << (unsigned int)node % WORD_BITS;
  }
  return NVML_SUCCESS;
}

static nvmlReturn_t set_affinity(unsigned int first, unsigned int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (unsigned int cpu = first; cpu < first + count && cpu < CPU_SETSIZE; cpu++) {
    CPU_SET(cpu, &set);
  }
  return sched_setaffinity(0, sizeof set, &set) == 0 ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceSetCpuAffinity(nvmlDevice_t device) {
  NVML_ENTER(device, true);
  unsigned int first, count;
  processors_of(gpu.description->numa_node, &first, &count);
  return set_affinity(first, count);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceClearCpuAffinity(nvmlDevice_t device) {
  NVML_ENTER(device, true);
  unsigned int first, count;
  processors_of(-1, &first, &count);
  return set_affinity(first, count);
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count,
                                                     nvmlDevice_t *devices) {
  NVML_READY(count != NULL);
  unsigned int set = 0;
  for (unsigned int i = 0; i < machine()->gpu_count; i++) {
    unsigned int first, processors;
    if (!nvml_has_node((int)i)) continue;
    processors_of(machine()->gpus[i].numa_node, &first, &processors);
    if (cpu >= first && cpu < first + processors) set |= 1u << i;
  }
  return give_devices(set, count, devices);
}

// The node that the device's own memory is: only where the processor addresses it (GH200).
NVML_GETTER(nvmlDeviceGetNumaNodeId, unsigned int, gpu.description->integrated != 0,
            node_count() + (unsigned int)gpu.index)

typedef struct addressing_mode {
  unsigned int version;
  unsigned int value;
} addressing_mode;

// Who translates the device's addresses of host memory: the processor (ATS) or the kernel (HMM).
NVML_EXPORT nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, addressing_mode *mode) {
  NVML_ENTER(device, mode != NULL);
  if (mode->version != NVML_VERSION_OF(addressing_mode, 1)) {
    return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  }
  if (!nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_TURING)) return NVML_ERROR_NOT_SUPPORTED;
  mode->value = gpu.description->integrated != 0 ? 2 : 1;
  return NVML_SUCCESS;
}
