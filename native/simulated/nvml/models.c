// SPDX-License-Identifier: Apache-2.0
// What a model has and has not, where the description does not say it in so many words.
#include "simulated/nvml/library.h"

bool nvml_is_geforce(const nvml_gpu *gpu) {
  return gpu->description->brand == NVML_BRAND_GEFORCE ||
         gpu->description->brand == NVML_BRAND_GEFORCE_RTX;
}

// GDDR boards have buses of up to 512 bits, a single HBM stack has 1024.
bool nvml_has_hbm(const nvml_gpu *gpu) {
  return gpu->description->memory_bus_width >= 1024;
}

bool nvml_is_at_least(const nvml_gpu *gpu, unsigned int architecture) {
  return gpu->description->nvml_architecture >= architecture;
}

bool nvml_can_mig(const nvml_gpu *gpu) {
  return gpu->description->mig_slots > 0;
}

bool nvml_counts_ecc(const nvml_gpu *gpu) {
  return gpu->description->ecc_supported != 0 && gpu->description->ecc_enabled != 0;
}

bool nvml_retires_pages(const nvml_gpu *gpu) {
  return nvml_counts_ecc(gpu) && !nvml_is_at_least(gpu, NVML_DEVICE_ARCH_AMPERE);
}

bool nvml_remaps_rows(const nvml_gpu *gpu) {
  return gpu->description->ecc_supported != 0 && !nvml_is_geforce(gpu) &&
         nvml_is_at_least(gpu, NVML_DEVICE_ARCH_AMPERE);
}
