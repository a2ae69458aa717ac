// SPDX-License-Identifier: Apache-2.0
// Power, temperature, fans.
#include "simulated/nvml/library.h"

NVML_GETTER(nvmlDeviceGetPowerUsage, unsigned int, true, nvml_power_mw(&gpu))
NVML_GETTER(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, true, NVML_FEATURE_ENABLED)
NVML_GETTER(nvmlDeviceGetPowerManagementLimit, unsigned int, true, gpu.description->power_limit_mw)
NVML_GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, true,
            gpu.description->power_limit_mw)
NVML_GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, true, gpu.description->power_limit_mw)
NVML_GETTER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long,
            nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_VOLTA), nvml_energy_mj(&gpu))

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device,
                                                                      unsigned int *least,
                                                                      unsigned int *most) {
  NVML_ENTER(device, least != NULL && most != NULL);
  *least = gpu.description->power_limit_min_mw;
  *most = gpu.description->power_limit_max_mw;
  return NVML_SUCCESS;
}

// ---- temperature -------------------------------------------------------------------------------

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device,
                                                  nvmlTemperatureSensors_t sensor,
                                                  unsigned int *temperature) {
  NVML_ENTER(device, temperature != NULL && sensor == NVML_TEMPERATURE_GPU);
  *temperature = nvml_temperature_c(&gpu);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device,
                                                   nvmlTemperature_v1_t *temperature) {
  NVML_ENTER(device, temperature != NULL);
  if (temperature->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  if (temperature->sensorType != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
  temperature->temperature = (int)nvml_temperature_c(&gpu);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device,
                                                        nvmlMarginTemperature_v1_t *margin) {
  NVML_ENTER(device, margin != NULL);
  if (margin->version != nvmlMarginTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  if (!nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_ADA)) return NVML_ERROR_NOT_SUPPORTED;
  margin->marginTemperature =
      (int)gpu.description->temperature_slowdown_c - (int)nvml_temperature_c(&gpu);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device,
                                                           nvmlTemperatureThresholds_t threshold,
                                                           unsigned int *temperature) {
  NVML_ENTER(device, temperature != NULL && threshold < NVML_TEMPERATURE_THRESHOLD_COUNT);
  switch (threshold) {
    case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN:
      *temperature = gpu.description->temperature_shutdown_c;
      return NVML_SUCCESS;
    case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN:
      *temperature = gpu.description->temperature_slowdown_c;
      return NVML_SUCCESS;
    case NVML_TEMPERATURE_THRESHOLD_GPU_MAX:
      *temperature = gpu.description->temperature_slowdown_c - 4;
      return NVML_SUCCESS;
    case NVML_TEMPERATURE_THRESHOLD_MEM_MAX:
      if (!nvml_has_hbm(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
      *temperature = 95;
      return NVML_SUCCESS;
    default:  // acoustic and GPS thresholds: notebooks
      return NVML_ERROR_NOT_SUPPORTED;
  }
}

// ---- fans --------------------------------------------------------------------------------------

enum { LEAST_FAN_PERCENT = 30, FULL_FAN_RPM = 3000 };

static unsigned int fan_percent(const nvml_gpu *gpu) {
  return nvml_has_contexts(gpu) ? LEAST_FAN_PERCENT + nvml_gpu_percent(gpu) / 2 : 0;
}

NVML_GETTER(nvmlDeviceGetFanSpeed, unsigned int, gpu.description->fan_count > 0, fan_percent(&gpu))
NVML_GETTER(nvmlDeviceGetNumFans, unsigned int, gpu.description->fan_count > 0,
            gpu.description->fan_count)

static nvmlReturn_t fan_figure(nvmlDevice_t device, unsigned int fan, unsigned int *value,
                               unsigned int of_percent) {
  NVML_ENTER(device, value != NULL);
  if (gpu.description->fan_count == 0) return NVML_ERROR_NOT_SUPPORTED;
  if (fan >= gpu.description->fan_count) return NVML_ERROR_INVALID_ARGUMENT;
  *value = fan_percent(&gpu) * of_percent / 100;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned int fan,
                                                  unsigned int *speed) {
  return fan_figure(device, fan, speed, 100);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTargetFanSpeed(nvmlDevice_t device, unsigned int fan,
                                                     unsigned int *speed) {
  return fan_figure(device, fan, speed, 100);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFanSpeedRPM(nvmlDevice_t device,
                                                  nvmlFanSpeedInfo_v1_t *info) {
  NVML_READY(info != NULL);
  if (info->version != nvmlFanSpeedInfo_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  return fan_figure(device, info->fan, &info->speed, FULL_FAN_RPM);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFanControlPolicy_v2(nvmlDevice_t device, unsigned int fan,
                                                          unsigned int *policy) {
  return fan_figure(device, fan, policy, 0);  // 0: by temperature
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMinMaxFanSpeed(nvmlDevice_t device, unsigned int *least,
                                                     unsigned int *most) {
  NVML_ENTER(device, least != NULL && most != NULL);
  if (gpu.description->fan_count == 0) return NVML_ERROR_NOT_SUPPORTED;
  *least = LEAST_FAN_PERCENT;
  *most = 100;
  return NVML_SUCCESS;
}
