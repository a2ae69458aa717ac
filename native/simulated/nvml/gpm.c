// SPDX-License-Identifier: Apache-2.0
// GPM: metrics between two samples, on Hopper and later. A sample has the time in which kernels ran
// so far, so its metrics are exact for any interval.
#include <stdlib.h>

#include "simulated/nvml/library.h"

struct nvmlGpmSample_st {
  uint64_t now_ns, busy_ns;
  int gpu;
};

typedef struct nvmlGpmSample_st *nvmlGpmSample_t;

typedef struct gpm_metric {
  unsigned int metricId;
  nvmlReturn_t nvmlReturn;
  double value;
  struct {
    const char *shortName, *longName, *unit;
  } metricInfo;
} gpm_metric;

typedef struct gpm_metrics {
  unsigned int version, numMetrics;
  nvmlGpmSample_t sample1, sample2;
  gpm_metric metrics[];
} gpm_metrics;

typedef struct gpm_support {
  unsigned int version, isSupportedDevice;
} gpm_support;

enum {
  GRAPHICS_UTIL = 1,
  SM_UTIL = 2,
  DRAM_BW_UTIL = 10,
  VERSION = 1,
};

static bool has_gpm(const nvml_gpu *gpu) {
  return nvml_is_at_least(gpu, NVML_DEVICE_ARCH_HOPPER);
}

NVML_EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, gpm_support *support) {
  NVML_ENTER(device, support != NULL);
  if (support->version != VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  support->isSupportedDevice = has_gpm(&gpu);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
  NVML_READY(sample != NULL);
  *sample = calloc(1, sizeof **sample);
  return *sample != NULL ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

NVML_EXPORT nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
  NVML_READY(sample != NULL);
  free(sample);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample) {
  NVML_ENTER(device, sample != NULL);
  if (!has_gpm(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  nvml_advance(&gpu);
  const allot_gpu_engine *engine = &gpu.engine->machine->engines[gpu.index];
  *sample = (struct nvmlGpmSample_st){.now_ns = allot_load(&engine->now_ns),
                                      .busy_ns = allot_load(&engine->busy_ns),
                                      .gpu = gpu.index};
  return NVML_SUCCESS;
}

static void fill(gpm_metric *metric, double busy_percent) {
  metric->nvmlReturn = NVML_SUCCESS;
  metric->value = busy_percent;
  metric->metricInfo.unit = "%";
  switch (metric->metricId) {
    case GRAPHICS_UTIL:
      metric->metricInfo.shortName = "graphics_util";
      metric->metricInfo.longName = "Graphics Util";
      break;
    case SM_UTIL:
      metric->metricInfo.shortName = "sm_util";
      metric->metricInfo.longName = "SM Util";
      break;
    case DRAM_BW_UTIL:
      metric->value = busy_percent * nvml_memory_per_gpu_percent() / 100;
      metric->metricInfo.shortName = "dram_bw_util";
      metric->metricInfo.longName = "DRAM BW Util";
      break;
    default:
      metric->value = 0;
      metric->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
  }
}

NVML_EXPORT nvmlReturn_t nvmlGpmMetricsGet(gpm_metrics *asked) {
  NVML_READY(asked != NULL && asked->sample1 != NULL && asked->sample2 != NULL);
  if (asked->version != VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  const struct nvmlGpmSample_st *one = asked->sample1, *other = asked->sample2;
  if (one->gpu != other->gpu || other->now_ns <= one->now_ns) return NVML_ERROR_INVALID_ARGUMENT;
  double busy = (double)(other->busy_ns - one->busy_ns);
  double percent = 100 * busy / (double)(other->now_ns - one->now_ns);
  for (unsigned int i = 0; i < asked->numMetrics; i++) fill(&asked->metrics[i], percent);
  return NVML_SUCCESS;
}
