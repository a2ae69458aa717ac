// SPDX-License-Identifier: Apache-2.0
// Clocks, performance states and what holds them down.
#include "simulated/nvml/library.h"

enum { CLOCK_STEP_MHZ = 15, LEAST_SM_MHZ = 210, IDLE_GDDR_MHZ = 405 };

NVML_EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type,
                                                unsigned int *clock) {
  NVML_ENTER(device, clock != NULL && type < NVML_CLOCK_COUNT);
  *clock = nvml_clock_mhz(&gpu, type);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type,
                                                   unsigned int *clock) {
  NVML_ENTER(device, clock != NULL && type < NVML_CLOCK_COUNT);
  *clock = nvml_max_clock_mhz(&gpu, type);
  return NVML_SUCCESS;
}

// Applications clocks are a matter of datacenter boards.
static nvmlReturn_t applications_clock(const nvml_gpu *gpu, nvmlClockType_t type,
                                       unsigned int *clock) {
  if (nvml_is_geforce(gpu)) return NVML_ERROR_NOT_SUPPORTED;
  switch (type) {
    case NVML_CLOCK_GRAPHICS:
    case NVML_CLOCK_SM:
      *clock = gpu->description->sm_clock_mhz;
      return NVML_SUCCESS;
    case NVML_CLOCK_MEM:
      *clock = gpu->description->memory_clock_mhz;
      return NVML_SUCCESS;
    default:
      return NVML_ERROR_NOT_SUPPORTED;
  }
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t type,
                                                        unsigned int *clock) {
  NVML_ENTER(device, clock != NULL && type < NVML_CLOCK_COUNT);
  return applications_clock(&gpu, type, clock);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device,
                                                               nvmlClockType_t type,
                                                               unsigned int *clock) {
  NVML_ENTER(device, clock != NULL && type < NVML_CLOCK_COUNT);
  return applications_clock(&gpu, type, clock);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device,
                                                            nvmlClockType_t type,
                                                            unsigned int *clock) {
  NVML_ENTER(device, clock != NULL && type < NVML_CLOCK_COUNT);
  if (nvml_is_geforce(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  *clock = nvml_max_clock_mhz(&gpu, type);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type,
                                            nvmlClockId_t id, unsigned int *clock) {
  NVML_ENTER(device, clock != NULL && type < NVML_CLOCK_COUNT && id < NVML_CLOCK_ID_COUNT);
  switch (id) {
    case NVML_CLOCK_ID_CURRENT:
      *clock = nvml_clock_mhz(&gpu, type);
      return NVML_SUCCESS;
    case NVML_CLOCK_ID_CUSTOMER_BOOST_MAX:
      if (nvml_is_geforce(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
      *clock = nvml_max_clock_mhz(&gpu, type);
      return NVML_SUCCESS;
    default:
      return applications_clock(&gpu, type, clock);
  }
}

static nvmlReturn_t give_clocks(unsigned int highest, unsigned int step, unsigned int available,
                                unsigned int *count, unsigned int *clocks) {
  bool enough = *count >= available && clocks != NULL;
  *count = available;
  if (!enough) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned int i = 0; i < available; i++) clocks[i] = highest - i * step;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device,
                                                            unsigned int *count,
                                                            unsigned int *clocks) {
  NVML_ENTER(device, count != NULL);
  unsigned int highest = gpu.description->memory_clock_max_mhz;
  if (nvml_has_hbm(&gpu)) return give_clocks(highest, 0, 1, count, clocks);
  return give_clocks(highest, highest - IDLE_GDDR_MHZ, 2, count, clocks);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device,
                                                              unsigned int memory_clock,
                                                              unsigned int *count,
                                                              unsigned int *clocks) {
  NVML_ENTER(device, count != NULL);
  bool rests = !nvml_has_hbm(&gpu) && memory_clock == IDLE_GDDR_MHZ;
  if (!rests && memory_clock != gpu.description->memory_clock_max_mhz) return NVML_ERROR_NOT_FOUND;
  unsigned int highest = rests ? 2 * LEAST_SM_MHZ : gpu.description->sm_clock_max_mhz;
  unsigned int available = (highest - LEAST_SM_MHZ) / CLOCK_STEP_MHZ + 1;
  return give_clocks(highest, CLOCK_STEP_MHZ, available, count, clocks);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMinMaxClockOfPState(nvmlDevice_t device, nvmlClockType_t type,
                                                          nvmlPstates_t state, unsigned int *least,
                                                          unsigned int *most) {
  NVML_ENTER(device, least != NULL && most != NULL && type < NVML_CLOCK_COUNT);
  if (state != NVML_PSTATE_0) return NVML_ERROR_NOT_SUPPORTED;
  *most = nvml_max_clock_mhz(&gpu, type);
  *least = type == NVML_CLOCK_MEM ? *most : LEAST_SM_MHZ;
  return NVML_SUCCESS;
}

// ---- states ------------------------------------------------------------------------------------

static nvmlPstates_t performance_state(const nvml_gpu *gpu) {
  return nvml_has_hbm(gpu) || nvml_has_contexts(gpu) ? NVML_PSTATE_0 : NVML_PSTATE_8;
}

NVML_GETTER(nvmlDeviceGetPerformanceState, nvmlPstates_t, true, performance_state(&gpu))
NVML_GETTER(nvmlDeviceGetPowerState, nvmlPstates_t, true, performance_state(&gpu))

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSupportedPerformanceStates(nvmlDevice_t device,
                                                                 nvmlPstates_t *states,
                                                                 unsigned int size) {
  NVML_ENTER(device, states != NULL);
  unsigned int room = size / (unsigned int)sizeof *states;
  unsigned int needed = nvml_has_hbm(&gpu) ? 1 : 2;
  if (room < needed) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned int i = 0; i < room; i++) states[i] = NVML_PSTATE_UNKNOWN;
  states[0] = NVML_PSTATE_0;
  if (needed == 2) states[1] = NVML_PSTATE_8;
  return NVML_SUCCESS;
}

static unsigned long long event_reasons(const nvml_gpu *gpu) {
  bool idle = nvml_gpu_percent(gpu) == 0 && !nvml_has_contexts(gpu);
  return idle ? NVML_CLOCKS_EVENT_REASON_GPU_IDLE : NVML_CLOCKS_EVENT_REASON_NONE;
}

// All reasons that exist; what the hardware of GeForce boards cannot tell is not among theirs.
static unsigned long long supported_reasons(const nvml_gpu *gpu) {
  unsigned long long all = 0x1FF;
  return nvml_is_geforce(gpu) ? all & ~(unsigned long long)NVML_CLOCKS_EVENT_REASON_SYNC_BOOST
                              : all;
}

NVML_GETTER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, true, event_reasons(&gpu))
NVML_GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, true,
            event_reasons(&gpu))
NVML_GETTER(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, true,
            supported_reasons(&gpu))
NVML_GETTER(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, true,
            supported_reasons(&gpu))
NVML_GETTER(nvmlDeviceGetAdaptiveClockInfoStatus, unsigned int, true, 0)
