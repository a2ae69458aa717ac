// SPDX-License-Identifier: Apache-2.0
// Utilisation of a device and its engines, and the samples behind it.
#include <string.h>

#include "simulated/nvml/library.h"

#define SAMPLE_US 166667u /* six samples a second */
#define SAMPLE_NS (SAMPLE_US * 1000ull)
#define SAMPLES 6u

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device,
                                                       nvmlUtilization_t *utilization) {
  NVML_ENTER(device, utilization != NULL);
  if (nvml_mig_is_on(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  utilization->gpu = nvml_gpu_percent(&gpu);
  utilization->memory = nvml_memory_percent(&gpu);
  return NVML_SUCCESS;
}

// Fixed-function engines, which nothing here uses.
static nvmlReturn_t unused_engine(nvmlDevice_t device, unsigned int first_architecture,
                                  unsigned int *percent, unsigned int *period_us) {
  NVML_ENTER(device, percent != NULL && period_us != NULL);
  if (!nvml_is_at_least(&gpu, first_architecture)) return NVML_ERROR_NOT_SUPPORTED;
  *percent = 0;
  *period_us = SAMPLE_US;
  return NVML_SUCCESS;
}

#define UNUSED_ENGINE(name, first_architecture)                             \
  NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *percent, \
                                unsigned int *period_us) {                  \
    return unused_engine(device, first_architecture, percent, period_us);   \
  }

UNUSED_ENGINE(nvmlDeviceGetEncoderUtilization, 0)
UNUSED_ENGINE(nvmlDeviceGetDecoderUtilization, 0)
UNUSED_ENGINE(nvmlDeviceGetJpgUtilization, NVML_DEVICE_ARCH_AMPERE)
UNUSED_ENGINE(nvmlDeviceGetOfaUtilization, NVML_DEVICE_ARCH_TURING)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetEncoderCapacity(nvmlDevice_t device, unsigned int codec,
                                                      unsigned int *capacity) {
  NVML_ENTER(device, capacity != NULL && codec <= 2);
  if (gpu.description->encoder_supported == 0) return NVML_ERROR_NOT_SUPPORTED;
  if (codec == 2 && !nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_ADA)) return NVML_ERROR_NOT_SUPPORTED;
  *capacity = 100;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetEncoderStats(nvmlDevice_t device, unsigned int *sessions,
                                                   unsigned int *fps, unsigned int *latency) {
  NVML_ENTER(device, sessions != NULL && fps != NULL && latency != NULL);
  *sessions = *fps = *latency = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetEncoderSessions(nvmlDevice_t device, unsigned int *count,
                                                      nvmlEncoderSessionInfo_t *sessions) {
  NVML_ENTER(device, count != NULL);
  *count = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFBCStats(nvmlDevice_t device, nvmlFBCStats_t *stats) {
  NVML_ENTER(device, stats != NULL);
  *stats = (nvmlFBCStats_t){0};
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFBCSessions(nvmlDevice_t device, unsigned int *count,
                                                  void *sessions) {
  NVML_ENTER(device, count != NULL);
  *count = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device,
                                                         nvmlGpuDynamicPstatesInfo_t *info) {
  NVML_ENTER(device, info != NULL);
  memset(info, 0, sizeof *info);
  unsigned int percents[] = {nvml_gpu_percent(&gpu), nvml_memory_percent(&gpu), 0, 0};
  for (unsigned int i = 0; i < sizeof percents / sizeof percents[0]; i++) {
    info->utilization[i].bIsPresent = 1;
    info->utilization[i].percentage = percents[i];
  }
  return NVML_SUCCESS;
}

// ---- samples -----------------------------------------------------------------------------------

static unsigned int busy_percent(const allot_history *history, uint64_t end_ns) {
  return (unsigned int)(allot_history_busy(history, end_ns, SAMPLE_NS) * 100 / SAMPLE_NS);
}

static bool sample_at(const nvml_gpu *gpu, nvmlSamplingType_t type, uint64_t end_ns,
                      unsigned int *value) {
  const allot_gpu_engine *engine = &gpu->engine->machine->engines[gpu->index];
  const allot_gpu_description *d = gpu->description;
  unsigned int busy = busy_percent(&engine->compute, end_ns);
  switch (type) {
    case NVML_TOTAL_POWER_SAMPLES:
      *value = d->power_idle_mw + (d->power_limit_mw - d->power_idle_mw) / 100 * busy * 9 / 10;
      return true;
    case NVML_GPU_UTILIZATION_SAMPLES:
      *value = busy;
      return true;
    case NVML_MEMORY_UTILIZATION_SAMPLES:
      *value = busy_percent(&engine->copies, end_ns);
      return true;
    case NVML_ENC_UTILIZATION_SAMPLES:
    case NVML_DEC_UTILIZATION_SAMPLES:
      *value = 0;
      return true;
    case NVML_PROCESSOR_CLK_SAMPLES:
      *value = nvml_clock_mhz(gpu, NVML_CLOCK_SM);
      return true;
    case NVML_MEMORY_CLK_SAMPLES:
      *value = nvml_clock_mhz(gpu, NVML_CLOCK_MEM);
      return true;
    default:
      return false;
  }
}

// Samples end at whole multiples of their period, so that every caller sees the same ones.
NVML_EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
                                              unsigned long long last_seen,
                                              nvmlValueType_t *value_type, unsigned int *count,
                                              nvmlSample_t *samples) {
  NVML_ENTER(device, count != NULL && value_type != NULL && type < NVML_SAMPLING_TYPES);
  unsigned int value;
  uint64_t now_ns = allot_now_ns();
  if (!sample_at(&gpu, type, now_ns, &value)) return NVML_ERROR_NOT_SUPPORTED;
  *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
  if (samples == NULL) {
    *count = SAMPLES;
    return NVML_SUCCESS;
  }
  nvml_advance(&gpu);
  unsigned long long epoch_us = nvml_time_us() - now_ns / 1000u;
  uint64_t newest_ns = now_ns / SAMPLE_NS * SAMPLE_NS;
  unsigned int given = 0;
  for (unsigned int i = SAMPLES; i-- > 0 && given < *count;) {
    uint64_t end_ns = newest_ns - i * SAMPLE_NS;
    unsigned long long stamp = epoch_us + end_ns / 1000u;
    if (stamp <= last_seen + SAMPLE_US / 2) continue;  // both clocks are read, one after the other
    sample_at(&gpu, type, end_ns, &value);
    samples[given++] = (nvmlSample_t){.timeStamp = stamp, .sampleValue.uiVal = value};
  }
  *count = given;
  return given > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

// How long clocks were held down, and why: never here.
NVML_EXPORT nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, unsigned int policy,
                                                      nvmlViolationTime_t *time) {
  NVML_ENTER(device, time != NULL && policy <= 11);
  *time = (nvmlViolationTime_t){.referenceTime = allot_now_ns() / 1000u};
  return NVML_SUCCESS;
}
