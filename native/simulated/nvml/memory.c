// SPDX-License-Identifier: Apache-2.0
// How much memory a device has and how much of it is in use.
#include "simulated/nvml/library.h"

// Of a GPU with MIG on: by those who use what is cut from it.
static unsigned long long used_by_processes(const nvml_gpu *gpu) {
  // What the dead left is nobody's: it is free, as soon as somebody looks.
  allot_machine_reap(gpu->engine);
  if (nvml_is_mig_device(gpu)) {
    return allot_place_used(gpu->engine, ALLOT_CUT(gpu->index, nvml_cut_around(gpu)));
  }
  unsigned long long used = allot_place_used(gpu->engine, gpu->index);
  for (int slot = 0; slot < ALLOT_MIG_SLOTS; slot++) {
    if (!allot_load(&nvml_cut(gpu, slot)->there)) continue;
    used += allot_place_used(gpu->engine, ALLOT_CUT(gpu->index, slot));
  }
  return used;
}

// What there is of memory, and how much of that the driver keeps.
static unsigned long long total_of(const nvml_gpu *gpu, unsigned long long *reserved) {
  bool is_mig = nvml_is_mig_device(gpu);
  *reserved = is_mig ? 0 : gpu->description->memory_reserved;
  if (!is_mig) return gpu->description->memory_total;
  return nvml_cut_profile(gpu, nvml_cut_around(gpu))->memory_bytes;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
  NVML_ENTER_ANY(device, memory != NULL);
  unsigned long long reserved, total = total_of(&gpu, &reserved);
  unsigned long long used = used_by_processes(&gpu) + reserved;
  *memory = (nvmlMemory_t){.total = total, .free = total - used, .used = used};
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
  NVML_ENTER_ANY(device, memory != NULL);
  if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  unsigned long long used = used_by_processes(&gpu), reserved;
  memory->total = total_of(&gpu, &reserved);
  memory->reserved = reserved;
  memory->used = used;
  memory->free = memory->total - reserved - used;
  return NVML_SUCCESS;
}

// A context maps two megabytes of the device for the host to write to.
static unsigned long long bar1_used(const nvml_gpu *gpu) {
  unsigned long long contexts = 0;
  for (int slot = 0; slot < allot_machine_high(gpu->engine); slot++) {
    if (!allot_machine_taken(gpu->engine, slot)) continue;
    contexts += allot_load(&gpu->engine->machine->processes[slot].gpus[gpu->index].contexts);
  }
  unsigned long long used = (1 + 2 * contexts) << 20;
  return used < gpu->description->bar1_total ? used : gpu->description->bar1_total;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device,
                                                     nvmlBAR1Memory_t *memory) {
  NVML_ENTER(device, memory != NULL);
  unsigned long long used = bar1_used(&gpu);
  *memory = (nvmlBAR1Memory_t){.bar1Total = gpu.description->bar1_total,
                               .bar1Free = gpu.description->bar1_total - used,
                               .bar1Used = used};
  return NVML_SUCCESS;
}
