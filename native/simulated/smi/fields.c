// SPDX-License-Identifier: Apache-2.0
// Every value of a GPU under the name by which --query-gpu asks for it. The full report (report.c)
// uses the same values. A function returns false for what the GPU does not have.
#include <inttypes.h>
#include <stdint.h>
#include <string.h>

#include "simulated/smi/smi.h"

typedef struct answer {
  const smi_gpu *gpu;
  unsigned int number;  // the field's own
  char *text;
  size_t room;
} answer;

typedef bool getter(const answer *to);

struct smi_field {
  const char *names;  // by spaces; the first one is shown
  const char *unit;
  getter *get;
  unsigned int number;
};

#define PUT(...) (snprintf(to->text, to->room, __VA_ARGS__), true)
#define DEVICE (to->gpu->device)
#define MIB 20

// ---- calls with one number ----

#define NUMBER(name, call)                       \
  static bool name(const answer *to) {           \
    unsigned int value = 0;                      \
    if (nvml.call != NVML_SUCCESS) return false; \
    return PUT("%u", value);                     \
  }
#define SWITCH(name, call)                            \
  static bool name(const answer *to) {                \
    unsigned int value = 0;                           \
    if (nvml.call != NVML_SUCCESS) return false;      \
    return PUT("%s", value ? "Enabled" : "Disabled"); \
  }
#define WATTS(name, call)                                   \
  static bool name(const answer *to) {                      \
    unsigned int value = 0, other = 0;                      \
    (void)other;                                            \
    if (nvml.call != NVML_SUCCESS) return false;            \
    return PUT("%u.%02u", value / 1000, value % 1000 / 10); \
  }
#define TEXT(name, call)               \
  static bool name(const answer *to) { \
    return nvml.call == NVML_SUCCESS;  \
  }
// One of two numbers: field number 0 is the first.
#define PAIR(name, call)                                                       \
  static bool name(const answer *to) {                                         \
    unsigned int value[2] = {0};                                               \
    if (nvml.call(DEVICE, &value[0], &value[1]) != NVML_SUCCESS) return false; \
    return PUT("%u", value[to->number]);                                       \
  }
#define SWITCHES(name, call)                                                   \
  static bool name(const answer *to) {                                         \
    unsigned int value[2] = {0};                                               \
    if (nvml.call(DEVICE, &value[0], &value[1]) != NVML_SUCCESS) return false; \
    return PUT("%s", value[to->number] ? "Enabled" : "Disabled");              \
  }

TEXT(driver_version, nvmlSystemGetDriverVersion(to->text, (unsigned int)to->room))
TEXT(serial, nvmlDeviceGetSerial(DEVICE, to->text, (unsigned int)to->room))
TEXT(vbios, nvmlDeviceGetVbiosVersion(DEVICE, to->text, (unsigned int)to->room))
TEXT(part_number, nvmlDeviceGetBoardPartNumber(DEVICE, to->text, (unsigned int)to->room))
TEXT(image_version, nvmlDeviceGetInforomImageVersion(DEVICE, to->text, (unsigned int)to->room))
TEXT(inforom, nvmlDeviceGetInforomVersion(DEVICE, to->number, to->text, (unsigned int)to->room))
TEXT(gsp_version, nvmlDeviceGetGspFirmwareVersion(DEVICE, to->text))
NUMBER(minor_number, nvmlDeviceGetMinorNumber(DEVICE, &value))
NUMBER(module_id, nvmlDeviceGetModuleId(DEVICE, &value))
NUMBER(accounting_size, nvmlDeviceGetAccountingBufferSize(DEVICE, &value))
NUMBER(link_generation, nvmlDeviceGetCurrPcieLinkGeneration(DEVICE, &value))
NUMBER(link_generation_max, nvmlDeviceGetMaxPcieLinkGeneration(DEVICE, &value))
NUMBER(link_generation_gpu, nvmlDeviceGetGpuMaxPcieLinkGeneration(DEVICE, &value))
NUMBER(link_width, nvmlDeviceGetCurrPcieLinkWidth(DEVICE, &value))
NUMBER(link_width_max, nvmlDeviceGetMaxPcieLinkWidth(DEVICE, &value))
NUMBER(replays, nvmlDeviceGetPcieReplayCounter(DEVICE, &value))
NUMBER(throughput, nvmlDeviceGetPcieThroughput(DEVICE, to->number, &value))
NUMBER(fan, nvmlDeviceGetFanSpeed(DEVICE, &value))
NUMBER(temperature, nvmlDeviceGetTemperature(DEVICE, NVML_TEMPERATURE_GPU, &value))
NUMBER(threshold, nvmlDeviceGetTemperatureThreshold(DEVICE, to->number, &value))
NUMBER(clock_now, nvmlDeviceGetClockInfo(DEVICE, to->number, &value))
NUMBER(clock_max, nvmlDeviceGetMaxClockInfo(DEVICE, to->number, &value))
NUMBER(clock_wanted, nvmlDeviceGetApplicationsClock(DEVICE, to->number, &value))
NUMBER(clock_default, nvmlDeviceGetDefaultApplicationsClock(DEVICE, to->number, &value))
SWITCH(persistence, nvmlDeviceGetPersistenceMode(DEVICE, &value))
SWITCH(display_mode, nvmlDeviceGetDisplayMode(DEVICE, &value))
SWITCH(display_active, nvmlDeviceGetDisplayActive(DEVICE, &value))
SWITCH(accounting, nvmlDeviceGetAccountingMode(DEVICE, &value))
WATTS(power_draw, nvmlDeviceGetPowerUsage(DEVICE, &value))
WATTS(power_limit, nvmlDeviceGetPowerManagementLimit(DEVICE, &value))
WATTS(power_enforced, nvmlDeviceGetEnforcedPowerLimit(DEVICE, &value))
WATTS(power_default, nvmlDeviceGetPowerManagementDefaultLimit(DEVICE, &value))
WATTS(power_least, nvmlDeviceGetPowerManagementLimitConstraints(DEVICE, &value, &other))
WATTS(power_most, nvmlDeviceGetPowerManagementLimitConstraints(DEVICE, &other, &value))
PAIR(encoder, nvmlDeviceGetEncoderUtilization)
PAIR(decoder, nvmlDeviceGetDecoderUtilization)
PAIR(jpeg, nvmlDeviceGetJpgUtilization)
PAIR(ofa, nvmlDeviceGetOfaUtilization)
SWITCHES(ecc_mode, nvmlDeviceGetEccMode)
SWITCHES(gsp_mode, nvmlDeviceGetGspFirmwareMode)

// ---- the others ----

static bool timestamp(const answer *to) {
  smi_timestamp(to->text, to->room, "%Y/%m/%d %H:%M:%S.");
  return true;
}

static bool count(const answer *to) {
  unsigned int value = 0;
  nvml.nvmlDeviceGetCount_v2(&value);
  return PUT("%u", value);
}

static bool name(const answer *to) {
  return PUT("%s", to->gpu->name);
}

static bool uuid(const answer *to) {
  return PUT("%s", to->gpu->uuid);
}

static bool index_of(const answer *to) {
  return PUT("%u", to->gpu->index);
}

static bool none(const answer *to) {
  return PUT("None");
}

static bool absent(const answer *to) {
  return false;
}

static bool no(const answer *to) {
  return PUT("No");
}

static bool zero(const answer *to) {
  return PUT("0");
}

static bool brand(const answer *to) {
  unsigned int value = 0;
  if (nvml.nvmlDeviceGetBrand(DEVICE, &value) != NVML_SUCCESS) return false;
  switch (value) {
    case NVML_BRAND_TESLA:
      return PUT("Tesla");
    case NVML_BRAND_GEFORCE:
      return PUT("GeForce");
    case NVML_BRAND_GEFORCE_RTX:
      return PUT("GeForce RTX");
    case NVML_BRAND_NVIDIA:
      return PUT("NVIDIA");
    default:
      return PUT("Unknown");
  }
}

static bool architecture(const answer *to) {
  static const char *const names[] = {
      [NVML_DEVICE_ARCH_PASCAL] = "Pascal",      [NVML_DEVICE_ARCH_VOLTA] = "Volta",
      [NVML_DEVICE_ARCH_TURING] = "Turing",      [NVML_DEVICE_ARCH_AMPERE] = "Ampere",
      [NVML_DEVICE_ARCH_ADA] = "Ada Lovelace",   [NVML_DEVICE_ARCH_HOPPER] = "Hopper",
      [NVML_DEVICE_ARCH_BLACKWELL] = "Blackwell"};
  unsigned int value = 0;
  if (nvml.nvmlDeviceGetArchitecture(DEVICE, &value) != NVML_SUCCESS) return false;
  if (value >= sizeof names / sizeof names[0] || names[value] == NULL) return PUT("Unknown");
  return PUT("%s", names[value]);
}

static bool board_id(const answer *to) {
  unsigned int value = 0;
  if (nvml.nvmlDeviceGetBoardId(DEVICE, &value) != NVML_SUCCESS) return false;
  return PUT("0x%x", value);
}

enum { PCI_BUS_ID, PCI_DOMAIN, PCI_BUS, PCI_DEVICE, PCI_ID, PCI_SUBSYSTEM };

static bool pci(const answer *to) {
  nvmlPciInfo_t info = {0};
  if (nvml.nvmlDeviceGetPciInfo_v3(DEVICE, &info) != NVML_SUCCESS) return false;
  switch (to->number) {
    case PCI_BUS_ID:
      return PUT("%s", info.busId);
    case PCI_DOMAIN:
      return PUT("0x%04X", info.domain);
    case PCI_BUS:
      return PUT("0x%02X", info.bus);
    case PCI_DEVICE:
      return PUT("0x%02X", info.device);
    case PCI_ID:
      return PUT("0x%08X", info.pciDeviceId);
    default:
      return PUT("0x%08X", info.pciSubSystemId);
  }
}

static bool pci_class(const answer *to) {
  nvmlPciInfoExt_v1_t info = {.version = nvmlPciInfoExt_v1};
  if (nvml.nvmlDeviceGetPciInfoExt(DEVICE, &info) != NVML_SUCCESS) return false;
  return PUT("0x%X", to->number == 0 ? info.baseClass : info.subClass);
}

static bool pstate(const answer *to) {
  unsigned int value = 0;
  if (nvml.nvmlDeviceGetPerformanceState(DEVICE, &value) != NVML_SUCCESS) return false;
  return PUT("P%u", value);
}

static bool compute_mode(const answer *to) {
  static const char *const names[] = {"Default", "Exclusive_Thread", "Prohibited",
                                      "Exclusive_Process"};
  unsigned int value = 0;
  if (nvml.nvmlDeviceGetComputeMode(DEVICE, &value) != NVML_SUCCESS || value > 3) return false;
  return PUT("%s", names[value]);
}

static bool compute_capability(const answer *to) {
  int major = 0, minor = 0;
  if (nvml.nvmlDeviceGetCudaComputeCapability(DEVICE, &major, &minor) != NVML_SUCCESS) {
    return false;
  }
  return PUT("%d.%d", major, minor);
}

static bool multi_gpu(const answer *to) {
  unsigned int value = 0;
  if (nvml.nvmlDeviceGetMultiGpuBoard(DEVICE, &value) != NVML_SUCCESS) return false;
  return PUT("%s", value ? "Yes" : "No");
}

enum { MEMORY_TOTAL, MEMORY_RESERVED, MEMORY_USED, MEMORY_FREE };

static bool memory(const answer *to) {
  nvmlMemory_v2_t info = {.version = nvmlMemory_v2};
  if (nvml.nvmlDeviceGetMemoryInfo_v2(DEVICE, &info) != NVML_SUCCESS) return false;
  const unsigned long long values[] = {info.total, info.reserved, info.used, info.free};
  return PUT("%llu", values[to->number] >> MIB);
}

static bool bar1(const answer *to) {
  nvmlBAR1Memory_t info = {0};
  if (nvml.nvmlDeviceGetBAR1MemoryInfo(DEVICE, &info) != NVML_SUCCESS) return false;
  const unsigned long long values[] = {info.bar1Total, 0, info.bar1Used, info.bar1Free};
  return PUT("%llu", values[to->number] >> MIB);
}

static bool utilization(const answer *to) {
  nvmlUtilization_t rates = {0};
  if (nvml.nvmlDeviceGetUtilizationRates(DEVICE, &rates) != NVML_SUCCESS) return false;
  return PUT("%u", to->number == 0 ? rates.gpu : rates.memory);
}

static bool mig_mode(const answer *to) {
  if (!to->gpu->has_mig) return false;
  unsigned int value = to->number == 0 ? to->gpu->mig : to->gpu->mig_pending;
  return PUT("%s", value ? "Enabled" : "Disabled");
}

static bool margin(const answer *to) {
  nvmlMarginTemperature_v1_t info = {.version = nvmlMarginTemperature_v1};
  if (nvml.nvmlDeviceGetMarginTemperature(DEVICE, &info) != NVML_SUCCESS) return false;
  return PUT("%d", info.marginTemperature);
}

#define NVML_FI_DEV_MEMORY_TEMP 82

static bool memory_temperature(const answer *to) {
  nvmlFieldValue_t value = {.fieldId = NVML_FI_DEV_MEMORY_TEMP};
  if (nvml.nvmlDeviceGetFieldValues(DEVICE, 1, &value) != NVML_SUCCESS) return false;
  if (value.nvmlReturn != NVML_SUCCESS) return false;
  return PUT("%u", value.value.uiVal);
}

// Of an error counter: which errors, since when, and where. SMI_EVERYWHERE: in all.
#define ERRORS(type, counter, location) ((type) << 8 | (counter) << 4 | (location))
enum { SMI_EVERYWHERE = 0xF };

static bool errors(const answer *to) {
  unsigned int type = to->number >> 8, since = to->number >> 4 & 1, where = to->number & 0xF;
  unsigned long long value = 0;
  nvmlReturn_t result =
      where == SMI_EVERYWHERE
          ? nvml.nvmlDeviceGetTotalEccErrors(DEVICE, type, since, &value)
          : nvml.nvmlDeviceGetMemoryErrorCounter(DEVICE, type, since, where, &value);
  return result == NVML_SUCCESS && PUT("%llu", value);
}

static bool retired(const answer *to) {
  unsigned int value = 0;
  nvmlReturn_t result = nvml.nvmlDeviceGetRetiredPages(DEVICE, to->number, &value, NULL);
  bool has_them = result == NVML_SUCCESS || result == NVML_ERROR_INSUFFICIENT_SIZE;
  return has_them && PUT("%u", value);
}

static bool retired_pending(const answer *to) {
  unsigned int value = 0;
  if (nvml.nvmlDeviceGetRetiredPagesPendingStatus(DEVICE, &value) != NVML_SUCCESS) return false;
  return PUT("%s", value ? "Yes" : "No");
}

static bool remapped(const answer *to) {
  unsigned int rows[4] = {0};
  if (nvml.nvmlDeviceGetRemappedRows(DEVICE, &rows[0], &rows[1], &rows[2], &rows[3]) !=
      NVML_SUCCESS) {
    return false;
  }
  if (to->number < 2) return PUT("%u", rows[to->number]);
  return PUT("%s", rows[to->number] ? "Yes" : "No");
}

static bool reasons(const answer *to) {
  unsigned long long value = 0;
  nvmlReturn_t result = to->number == 0
                            ? nvml.nvmlDeviceGetSupportedClocksEventReasons(DEVICE, &value)
                            : nvml.nvmlDeviceGetCurrentClocksEventReasons(DEVICE, &value);
  return result == NVML_SUCCESS && PUT("0x%016llx", value);
}

static bool reason(const answer *to) {
  unsigned long long value = 0;
  if (nvml.nvmlDeviceGetCurrentClocksEventReasons(DEVICE, &value) != NVML_SUCCESS) return false;
  return PUT("%s", value & to->number ? "Active" : "Not Active");
}

#define COR NVML_MEMORY_ERROR_TYPE_CORRECTED
#define UNC NVML_MEMORY_ERROR_TYPE_UNCORRECTED
#define REASON(name, code)                                                    \
  {"clocks_event_reasons." name " clocks_throttle_reasons." name, "", reason, \
   NVML_CLOCKS_EVENT_REASON_##code}
#define ECC(place, code)                                                                         \
  {"ecc.errors.corrected.volatile." place, "", errors, ERRORS(COR, NVML_VOLATILE_ECC, code)},    \
      {"ecc.errors.corrected.aggregate." place, "", errors,                                      \
       ERRORS(COR, NVML_AGGREGATE_ECC, code)},                                                   \
      {"ecc.errors.uncorrected.volatile." place, "", errors,                                     \
       ERRORS(UNC, NVML_VOLATILE_ECC, code)},                                                    \
  {                                                                                              \
    "ecc.errors.uncorrected.aggregate." place, "", errors, ERRORS(UNC, NVML_AGGREGATE_ECC, code) \
  }

static const smi_field fields[] = {
    {"timestamp", "", timestamp, 0},
    {"driver_version", "", driver_version, 0},
    {"count", "", count, 0},
    {"name gpu_name", "", name, 0},
    {"serial gpu_serial", "", serial, 0},
    {"uuid gpu_uuid", "", uuid, 0},
    {"pci.bus_id gpu_bus_id", "", pci, PCI_BUS_ID},
    {"pci.domain", "", pci, PCI_DOMAIN},
    {"pci.bus", "", pci, PCI_BUS},
    {"pci.device", "", pci, PCI_DEVICE},
    {"pci.baseClass", "", pci_class, 0},
    {"pci.subClass", "", pci_class, 1},
    {"pci.device_id", "", pci, PCI_ID},
    {"pci.sub_device_id", "", pci, PCI_SUBSYSTEM},
    {"pcie.link.gen.current pcie.link.gen.gpucurrent", "", link_generation, 0},
    {"pcie.link.gen.max", "", link_generation_max, 0},
    {"pcie.link.gen.gpumax", "", link_generation_gpu, 0},
    {"pcie.link.gen.hostmax", "", absent, 0},
    {"pcie.link.width.current", "", link_width, 0},
    {"pcie.link.width.max", "", link_width_max, 0},
    {"index", "", index_of, 0},
    {"display_mode display_attached", "", display_mode, 0},
    {"display_active", "", display_active, 0},
    {"persistence_mode", "", persistence, 0},
    {"addressing_mode", "", none, 0},
    {"accounting.mode", "", accounting, 0},
    {"accounting.buffer_size", "", accounting_size, 0},
    {"driver_model.current", "", absent, 0},
    {"driver_model.pending", "", absent, 0},
    {"vbios_version", "", vbios, 0},
    {"inforom.img inforom.image", "", image_version, 0},
    {"inforom.oem", "", inforom, 0},
    {"inforom.ecc", "", inforom, 1},
    {"inforom.pwr inforom.power", "", inforom, 2},
    {"gom.current gpu_operation_mode.current", "", absent, 0},
    {"gom.pending gpu_operation_mode.pending", "", absent, 0},
    {"fan.speed", "%", fan, 0},
    {"pstate", "", pstate, 0},
    {"clocks_event_reasons.supported clocks_throttle_reasons.supported", "", reasons, 0},
    {"clocks_event_reasons.active clocks_throttle_reasons.active", "", reasons, 1},
    REASON("gpu_idle", GPU_IDLE),
    REASON("applications_clocks_setting", APPLICATIONS_CLOCKS),
    REASON("sw_power_cap", SW_POWER_CAP),
    REASON("hw_slowdown", HW_SLOWDOWN),
    REASON("hw_thermal_slowdown", HW_THERMAL),
    REASON("hw_power_brake_slowdown", HW_POWER_BRAKE),
    REASON("sw_thermal_slowdown", SW_THERMAL),
    REASON("sync_boost", SYNC_BOOST),
    {"memory.total", "MiB", memory, MEMORY_TOTAL},
    {"memory.reserved", "MiB", memory, MEMORY_RESERVED},
    {"memory.used", "MiB", memory, MEMORY_USED},
    {"memory.free", "MiB", memory, MEMORY_FREE},
    {"compute_mode", "", compute_mode, 0},
    {"compute_cap", "", compute_capability, 0},
    {"utilization.gpu", "%", utilization, 0},
    {"utilization.memory", "%", utilization, 1},
    {"utilization.encoder", "%", encoder, 0},
    {"utilization.decoder", "%", decoder, 0},
    {"utilization.jpeg", "%", jpeg, 0},
    {"utilization.ofa", "%", ofa, 0},
    {"encoder.stats.sessionCount", "", zero, 0},
    {"encoder.stats.averageFps", "", zero, 0},
    {"encoder.stats.averageLatency", "", zero, 0},
    {"ecc.mode.current", "", ecc_mode, 0},
    {"ecc.mode.pending", "", ecc_mode, 1},
    ECC("device_memory", NVML_MEMORY_LOCATION_DEVICE_MEMORY),
    ECC("dram", NVML_MEMORY_LOCATION_DEVICE_MEMORY),
    ECC("register_file", NVML_MEMORY_LOCATION_REGISTER_FILE),
    ECC("l1_cache", NVML_MEMORY_LOCATION_L1_CACHE),
    ECC("l2_cache", NVML_MEMORY_LOCATION_L2_CACHE),
    ECC("texture_memory", NVML_MEMORY_LOCATION_TEXTURE_MEMORY),
    ECC("cbu", NVML_MEMORY_LOCATION_CBU),
    ECC("sram", NVML_MEMORY_LOCATION_SRAM),
    ECC("total", SMI_EVERYWHERE),
    {"retired_pages.single_bit_ecc.count retired_pages.sbe", "", retired, 0},
    {"retired_pages.double_bit.count retired_pages.dbe", "", retired, 1},
    {"retired_pages.pending", "", retired_pending, 0},
    {"temperature.gpu", "", temperature, 0},
    {"temperature.gpu.tlimit", "", margin, 0},
    {"temperature.memory", "", memory_temperature, 0},
    {"power.draw power.draw.average power.draw.instant", "W", power_draw, 0},
    {"power.limit", "W", power_limit, 0},
    {"enforced.power.limit", "W", power_enforced, 0},
    {"power.default_limit", "W", power_default, 0},
    {"power.min_limit", "W", power_least, 0},
    {"power.max_limit", "W", power_most, 0},
    {"clocks.current.graphics clocks.gr", "MHz", clock_now, NVML_CLOCK_GRAPHICS},
    {"clocks.current.sm clocks.sm", "MHz", clock_now, NVML_CLOCK_SM},
    {"clocks.current.memory clocks.mem", "MHz", clock_now, NVML_CLOCK_MEM},
    {"clocks.current.video clocks.video", "MHz", clock_now, NVML_CLOCK_VIDEO},
    {"clocks.applications.graphics clocks.applications.gr", "MHz", clock_wanted,
     NVML_CLOCK_GRAPHICS},
    {"clocks.applications.memory clocks.applications.mem", "MHz", clock_wanted, NVML_CLOCK_MEM},
    {"clocks.default_applications.graphics clocks.default_applications.gr", "MHz", clock_default,
     NVML_CLOCK_GRAPHICS},
    {"clocks.default_applications.memory clocks.default_applications.mem", "MHz", clock_default,
     NVML_CLOCK_MEM},
    {"clocks.max.graphics clocks.max.gr", "MHz", clock_max, NVML_CLOCK_GRAPHICS},
    {"clocks.max.sm", "MHz", clock_max, NVML_CLOCK_SM},
    {"clocks.max.memory clocks.max.mem", "MHz", clock_max, NVML_CLOCK_MEM},
    {"mig.mode.current", "", mig_mode, 0},
    {"mig.mode.pending", "", mig_mode, 1},
    {"gsp.mode.current", "", gsp_mode, 0},
    {"gsp.mode.default", "", gsp_mode, 1},
};

// What the full report shows and no query can ask for.
static const smi_field report_fields[] = {
    {"board_id", "", board_id, 0},
    {"brand", "", brand, 0},
    {"architecture", "", architecture, 0},
    {"minor_number", "", minor_number, 0},
    {"multigpu_board", "", multi_gpu, 0},
    {"board_part_number", "", part_number, 0},
    {"module_id", "", module_id, 0},
    {"gsp_version", "", gsp_version, 0},
    {"none", "", none, 0},
    {"absent", "", absent, 0},
    {"no", "", no, 0},
    {"zero", "", zero, 0},
    {"replays", "", replays, 0},
    {"pcie.tx", "KB/s", throughput, NVML_PCIE_UTIL_TX_BYTES},
    {"pcie.rx", "KB/s", throughput, NVML_PCIE_UTIL_RX_BYTES},
    {"bar1.total", "MiB", bar1, MEMORY_TOTAL},
    {"bar1.used", "MiB", bar1, MEMORY_USED},
    {"bar1.free", "MiB", bar1, MEMORY_FREE},
    {"remapped.correctable", "", remapped, 0},
    {"remapped.uncorrectable", "", remapped, 1},
    {"remapped.pending", "", remapped, 2},
    {"remapped.failure", "", remapped, 3},
    {"threshold.shutdown", "C", threshold, NVML_TEMPERATURE_THRESHOLD_SHUTDOWN},
    {"threshold.slowdown", "C", threshold, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN},
    {"threshold.max", "C", threshold, NVML_TEMPERATURE_THRESHOLD_GPU_MAX},
    {"clocks.max.video", "MHz", clock_max, NVML_CLOCK_VIDEO},
};

enum {
  FIELDS = sizeof fields / sizeof fields[0],
  REPORT_FIELDS = sizeof report_fields / sizeof report_fields[0],
};

static bool has_name(const smi_field *field, const char *wanted, size_t length) {
  for (const char *at = field->names; *at != '\0'; at += strspn(at, " ")) {
    size_t own = strcspn(at, " ");
    if (own == length && strncmp(at, wanted, length) == 0) return true;
    at += own;
  }
  return false;
}

static const smi_field *find(const smi_field *from, int count_of, const char *wanted,
                             size_t length) {
  for (int i = 0; i < count_of; i++) {
    if (has_name(&from[i], wanted, length)) return &from[i];
  }
  return NULL;
}

const smi_field *smi_find_field(const char *wanted, size_t length) {
  return find(fields, FIELDS, wanted, length);
}

const smi_field *smi_report_field(const char *wanted) {
  const smi_field *found = find(report_fields, REPORT_FIELDS, wanted, strlen(wanted));
  return found != NULL ? found : smi_find_field(wanted, strlen(wanted));
}

const smi_field *smi_next_field(const smi_field *field) {
  const smi_field *next = field == NULL ? fields : field + 1;
  return next < fields + FIELDS ? next : NULL;
}

const char *smi_field_names(const smi_field *field) {
  return field->names;
}

const char *smi_field_unit(const smi_field *field) {
  return field->unit;
}

bool smi_value(const smi_field *field, const smi_gpu *gpu, char *text, size_t room) {
  answer to = {.gpu = gpu, .number = field->number, .text = text, .room = room};
  return gpu->problem == NVML_SUCCESS && field->get(&to);
}
