// SPDX-License-Identifier: Apache-2.0
// Field values: one call for many figures, each with its own result. What DCGM asks for.
#include "simulated/nvml/field_ids.h"
#include "simulated/nvml/library.h"

enum { TO_SWITCH = -2, C2C_LINKS = 10, C2C_LINK_MIB_PER_S = 42000 };

// The answer to one field.
typedef struct answer {
  nvmlValueType_t type;
  nvmlValue_t value;
} answer;

typedef nvmlReturn_t (*responder)(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                                  answer *out);

static nvmlReturn_t give_uint(answer *out, unsigned int value) {
  *out = (answer){.type = NVML_VALUE_TYPE_UNSIGNED_INT, .value.uiVal = value};
  return NVML_SUCCESS;
}

static nvmlReturn_t give_long(answer *out, unsigned long long value) {
  *out = (answer){.type = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, .value.ullVal = value};
  return NVML_SUCCESS;
}

static nvmlReturn_t give_int(answer *out, int value) {
  *out = (answer){.type = NVML_VALUE_TYPE_SIGNED_INT, .value.siVal = value};
  return NVML_SUCCESS;
}

// ---- memory errors -----------------------------------------------------------------------------

static nvmlReturn_t ecc_mode(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                             answer *out) {
  if (gpu->description->ecc_supported == 0) return NVML_ERROR_NOT_SUPPORTED;
  return give_uint(out, gpu->description->ecc_enabled != 0);
}

static nvmlReturn_t ecc_count(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                              answer *out) {
  if (!nvml_counts_ecc(gpu)) return NVML_ERROR_NOT_SUPPORTED;
  switch (id) {
    case FI_ECC_SBE_VOL_TOTAL:
    case FI_ECC_SBE_VOL_DEV:
      return give_long(out, nvml_ecc_count(gpu, 0, NVML_VOLATILE_ECC));
    case FI_ECC_DBE_VOL_TOTAL:
    case FI_ECC_DBE_VOL_DEV:
      return give_long(out, nvml_ecc_count(gpu, 1, NVML_VOLATILE_ECC));
    case FI_ECC_SBE_AGG_TOTAL:
    case FI_ECC_SBE_AGG_DEV:
      return give_long(out, nvml_ecc_count(gpu, 0, NVML_AGGREGATE_ECC));
    case FI_ECC_DBE_AGG_TOTAL:
    case FI_ECC_DBE_AGG_DEV:
      return give_long(out, nvml_ecc_count(gpu, 1, NVML_AGGREGATE_ECC));
    default:  // caches and registers
      return give_long(out, 0);
  }
}

static nvmlReturn_t retired(const nvml_gpu *gpu, unsigned int id, unsigned int scope, answer *out) {
  if (!nvml_retires_pages(gpu)) return NVML_ERROR_NOT_SUPPORTED;
  if (id == FI_RETIRED_SBE) return give_long(out, allot_load(&gpu->faults->retired_pages_sbe));
  if (id == FI_RETIRED_DBE) return give_long(out, allot_load(&gpu->faults->retired_pages_dbe));
  return give_uint(out, 0);  // pending
}

static nvmlReturn_t remapped(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                             answer *out) {
  if (!nvml_remaps_rows(gpu)) return NVML_ERROR_NOT_SUPPORTED;
  switch (id) {
    case FI_REMAPPED_COR:
      return give_uint(out, allot_load(&gpu->faults->remapped_rows_correctable));
    case FI_REMAPPED_UNC:
      return give_uint(out, allot_load(&gpu->faults->remapped_rows_uncorrectable));
    default:  // pending, failure
      return give_uint(out, 0);
  }
}

// ---- links -------------------------------------------------------------------------------------

static nvmlReturn_t link_counter(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                                 answer *out) {
  if (gpu->description->nvlink_count == 0) return NVML_ERROR_NOT_SUPPORTED;
  return give_long(out, 0);
}

static nvmlReturn_t speed_of(const nvml_gpu *gpu, unsigned int link, answer *out) {
  if (link >= gpu->description->nvlink_count) return NVML_ERROR_NOT_SUPPORTED;
  return give_uint(out, nvml_link_is_active(gpu, link) ? nvml_link_mbps(gpu) : 0);
}

static nvmlReturn_t link_speed(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                               answer *out) {
  switch (id) {
    case FI_NVLINK_SPEED_COMMON:
      return speed_of(gpu, 0, out);
    case FI_NVLINK_GET_SPEED:
      return speed_of(gpu, scope, out);
    default:
      return speed_of(
          gpu, id >= FI_NVLINK_SPEED_L6 ? id - FI_NVLINK_SPEED_L6 + 6 : id - FI_NVLINK_SPEED_L0,
          out);
  }
}

static nvmlReturn_t link_fact(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                              answer *out) {
  if (scope >= gpu->description->nvlink_count) return NVML_ERROR_NOT_SUPPORTED;
  if (id == FI_NVLINK_GET_STATE) return give_uint(out, nvml_link_is_active(gpu, scope));
  return give_uint(out, gpu->description->nvlink_version);
}

static nvmlReturn_t link_count(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                               answer *out) {
  if (gpu->description->nvlink_count == 0) return NVML_ERROR_NOT_SUPPORTED;
  unsigned int count = 0;
  for (unsigned int link = 0; link < gpu->description->nvlink_count; link++) {
    bool counts = id == FI_NVLINK_LINK_COUNT || gpu->description->nvlink_peer[link] == TO_SWITCH;
    if (counts) count++;
  }
  return give_uint(out, count);
}

static nvmlReturn_t c2c(const nvml_gpu *gpu, unsigned int id, unsigned int scope, answer *out) {
  bool coherent = gpu->description->integrated != 0;
  if (id == FI_C2C_LINK_COUNT) return give_uint(out, coherent ? C2C_LINKS : 0);
  if (!coherent || scope >= C2C_LINKS) return NVML_ERROR_NOT_SUPPORTED;
  return give_uint(out, id == FI_C2C_LINK_STATUS ? 1 : C2C_LINK_MIB_PER_S);
}

static nvmlReturn_t pcie_bytes(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                               answer *out) {
  nvml_advance(gpu);
  unsigned long long busy_us =
      allot_load(&gpu->engine->machine->engines[gpu->index].copy_busy_ns) / 1000u;
  unsigned long long rate =
      id == FI_PCIE_TX_BYTES ? gpu->description->d2h_mib_per_s : gpu->description->h2d_mib_per_s;
  return give_long(out, busy_us * rate / 1000u * 1024u / 1000u * 1024u / 2u);
}

// ---- power, temperature, the rest --------------------------------------------------------------

static nvmlReturn_t power(const nvml_gpu *gpu, unsigned int id, unsigned int scope, answer *out) {
  if (scope > 1) return NVML_ERROR_NOT_SUPPORTED;  // 0: GPU, 1: module
  switch (id) {
    case FI_POWER_AVERAGE:
    case FI_POWER_INSTANT:
      return give_uint(out, nvml_power_mw(gpu));
    case FI_POWER_MIN_LIMIT:
      return give_uint(out, gpu->description->power_limit_min_mw);
    case FI_POWER_MAX_LIMIT:
      return give_uint(out, gpu->description->power_limit_max_mw);
    default:
      return give_uint(out, gpu->description->power_limit_mw);
  }
}

static nvmlReturn_t energy(const nvml_gpu *gpu, unsigned int id, unsigned int scope, answer *out) {
  if (!nvml_is_at_least(gpu, NVML_DEVICE_ARCH_VOLTA)) return NVML_ERROR_NOT_SUPPORTED;
  return give_long(out, nvml_energy_mj(gpu));
}

static nvmlReturn_t temperature(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                                answer *out) {
  if (id == FI_GPU_TEMP) return give_uint(out, nvml_temperature_c(gpu));
  bool has_sensor = nvml_has_hbm(gpu) && nvml_is_at_least(gpu, NVML_DEVICE_ARCH_VOLTA);
  return has_sensor ? give_uint(out, nvml_memory_temperature_c(gpu)) : NVML_ERROR_NOT_SUPPORTED;
}

// Degrees below the slowdown: negative ones are beyond it.
static nvmlReturn_t temperature_limit(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                                      answer *out) {
  if (!nvml_is_at_least(gpu, NVML_DEVICE_ARCH_ADA)) return NVML_ERROR_NOT_SUPPORTED;
  const allot_gpu_description *d = gpu->description;
  switch (id) {
    case FI_TLIMIT_SHUTDOWN:
      return give_int(out, (int)d->temperature_slowdown_c - (int)d->temperature_shutdown_c);
    case FI_TLIMIT_SLOWDOWN:
      return give_int(out, -2);
    case FI_TLIMIT_MEM_MAX:
      return nvml_has_hbm(gpu) ? give_int(out, 0) : NVML_ERROR_NOT_SUPPORTED;
    default:
      return give_int(out, 0);
  }
}

static nvmlReturn_t zero(const nvml_gpu *gpu, unsigned int id, unsigned int scope, answer *out) {
  return give_uint(out, 0);
}

static nvmlReturn_t zero_long(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                              answer *out) {
  return give_long(out, 0);
}

static nvmlReturn_t mig_fact(const nvml_gpu *gpu, unsigned int id, unsigned int scope,
                             answer *out) {
  bool can = nvml_can_mig(gpu);
  return give_uint(out, can && nvml_is_at_least(gpu, NVML_DEVICE_ARCH_HOPPER));
}

// ---- which field is whose ----------------------------------------------------------------------

static const struct {
  unsigned int first, last;
  responder respond;
} responders[] = {
    {FI_ECC_CURRENT, FI_ECC_PENDING, ecc_mode},
    {FI_ECC_SBE_VOL_TOTAL, FI_ECC_LAST_DETAIL, ecc_count},
    {FI_RETIRED_SBE, FI_RETIRED_PENDING, retired},
    {FI_NVLINK_FIRST_COUNTER, FI_NVLINK_LAST_COUNTER, link_counter},
    {FI_PERF_POLICY_FIRST, FI_PERF_POLICY_LAST, zero_long},
    {FI_MEMORY_TEMP, FI_MEMORY_TEMP, temperature},
    {FI_TOTAL_ENERGY, FI_TOTAL_ENERGY, energy},
    {FI_NVLINK_SPEED_L0, FI_NVLINK_SPEED_COMMON, link_speed},
    {FI_NVLINK_LINK_COUNT, FI_NVLINK_LINK_COUNT, link_count},
    {FI_RETIRED_PENDING_SBE, FI_RETIRED_PENDING_DBE, retired},
    {FI_PCIE_REPLAY, FI_PCIE_REPLAY_ROLLOVER, zero},
    {FI_NVLINK_FIRST_MORE_COUNTER, FI_NVLINK_LAST_MORE_COUNTER, link_counter},
    {FI_NVLINK_SPEED_L6, FI_NVLINK_SPEED_L11, link_speed},
    {FI_NVLINK_THROUGHPUT_FIRST, FI_NVLINK_THROUGHPUT_LAST, link_counter},
    {FI_REMAPPED_COR, FI_REMAPPED_FAILURE, remapped},
    {FI_NVSWITCH_LINK_COUNT, FI_NVSWITCH_LINK_COUNT, link_count},
    {FI_NVLINK_ECC_FIRST, FI_NVLINK_ERROR_LAST, link_counter},
    {FI_NVLINK_GET_SPEED, FI_NVLINK_GET_SPEED, link_speed},
    {FI_NVLINK_GET_STATE, FI_NVLINK_GET_VERSION, link_fact},
    {FI_C2C_LINK_COUNT, FI_C2C_LINK_MAX_BW, c2c},
    {FI_PCIE_COUNT_FIRST, FI_PCIE_COUNT_LAST, zero},
    {FI_RESETLESS_MIG, FI_RESETLESS_MIG, mig_fact},
    {FI_POWER_AVERAGE, FI_POWER_CURRENT_LIMIT, power},
    {FI_ENERGY, FI_ENERGY, energy},
    {FI_POWER_REQUESTED_LIMIT, FI_POWER_REQUESTED_LIMIT, power},
    {FI_TLIMIT_SHUTDOWN, FI_TLIMIT_GPU_MAX, temperature_limit},
    {FI_PCIE_TX_BYTES, FI_PCIE_RX_BYTES, pcie_bytes},
    {FI_MIG_INDEPENDENT_QUERY, FI_MIG_INDEPENDENT_QUERY, mig_fact},
    {FI_RESET_STATUS, FI_DRAIN_AND_RESET_STATUS, zero},
    {FI_RECOVERY_ACTION, FI_RECOVERY_ACTION, zero},
    {FI_EVENT_REASON_FIRST, FI_EVENT_REASON_LAST, zero_long},
    {FI_GPU_TEMP, FI_GPU_TEMP, temperature},
};

static nvmlReturn_t respond(const nvml_gpu *gpu, unsigned int id, unsigned int scope, answer *out) {
  if (id == 0 || id >= FI_MAX) return NVML_ERROR_INVALID_ARGUMENT;
  for (size_t i = 0; i < sizeof responders / sizeof responders[0]; i++) {
    if (id >= responders[i].first && id <= responders[i].last) {
      return responders[i].respond(gpu, id, scope, out);
    }
  }
  return NVML_ERROR_NOT_SUPPORTED;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count,
                                                  nvmlFieldValue_t *values) {
  NVML_ENTER(device, values != NULL && count > 0);
  for (int i = 0; i < count; i++) {
    nvmlFieldValue_t *field = &values[i];
    answer out = {0};
    field->nvmlReturn = respond(&gpu, field->fieldId, field->scopeId, &out);
    field->timestamp = (long long)nvml_time_us();
    field->latencyUsec = 0;
    if (field->nvmlReturn != NVML_SUCCESS) continue;
    field->valueType = out.type;
    field->value = out.value;
  }
  return NVML_SUCCESS;
}

// Counters that a caller may set back: none here.
NVML_EXPORT nvmlReturn_t nvmlDeviceClearFieldValues(nvmlDevice_t device, int count,
                                                    nvmlFieldValue_t *values) {
  NVML_ENTER(device, values != NULL && count > 0);
  for (int i = 0; i < count; i++) values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
  return NVML_SUCCESS;
}
