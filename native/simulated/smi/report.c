// SPDX-License-Identifier: Apache-2.0
// The full report of -q, as text or as XML: one list of rows for both.
#include <ctype.h>
#include <string.h>

#include "simulated/smi/smi.h"

typedef struct row {
  unsigned int depth;
  const char *label, *tag;
  const char *field;  // NULL: it begins a group
} row;

static const row rows[] = {
    {0, "Product Name", "product_name", "name"},
    {0, "Product Brand", "product_brand", "brand"},
    {0, "Product Architecture", "product_architecture", "architecture"},
    {0, "Display Mode", "display_mode", "display_mode"},
    {0, "Display Active", "display_active", "display_active"},
    {0, "Persistence Mode", "persistence_mode", "persistence_mode"},
    {0, "Addressing Mode", "addressing_mode", "addressing_mode"},
    {0, "MIG Mode", "mig_mode", NULL},
    {1, "Current", "current_mig", "mig.mode.current"},
    {1, "Pending", "pending_mig", "mig.mode.pending"},
    {0, "MIG Devices", "mig_devices", NULL},
    {0, "Accounting Mode", "accounting_mode", "accounting.mode"},
    {0, "Accounting Mode Buffer Size", "accounting_mode_buffer_size", "accounting.buffer_size"},
    {0, "Driver Model", "driver_model", NULL},
    {1, "Current", "current_dm", "driver_model.current"},
    {1, "Pending", "pending_dm", "driver_model.pending"},
    {0, "Serial Number", "serial", "serial"},
    {0, "GPU UUID", "uuid", "uuid"},
    {0, "Minor Number", "minor_number", "minor_number"},
    {0, "VBIOS Version", "vbios_version", "vbios_version"},
    {0, "MultiGPU Board", "multigpu_board", "multigpu_board"},
    {0, "Board ID", "board_id", "board_id"},
    {0, "Board Part Number", "board_part_number", "board_part_number"},
    {0, "GPU Part Number", "gpu_part_number", "absent"},
    {0, "FRU Part Number", "gpu_fru_part_number", "absent"},
    {0, "Module ID", "gpu_module_id", "module_id"},
    {0, "Inforom Version", "inforom_version", NULL},
    {1, "Image Version", "img_version", "inforom.img"},
    {1, "OEM Object", "oem_object", "inforom.oem"},
    {1, "ECC Object", "ecc_object", "inforom.ecc"},
    {1, "Power Management Object", "pwr_object", "inforom.pwr"},
    {0, "GPU Operation Mode", "gpu_operation_mode", NULL},
    {1, "Current", "current_gom", "gom.current"},
    {1, "Pending", "pending_gom", "gom.pending"},
    {0, "GSP Firmware Version", "gsp_firmware_version", "gsp_version"},
    {0, "GPU Virtualization Mode", "gpu_virtualization_mode", NULL},
    {1, "Virtualization Mode", "virtualization_mode", "none"},
    {1, "Host VGPU Mode", "host_vgpu_mode", "absent"},
    {0, "GPU Reset Status", "gpu_reset_status", NULL},
    {1, "Reset Required", "reset_required", "no"},
    {1, "Drain and Reset Recommended", "drain_and_reset_recommended", "no"},
    {0, "IBMNPU", "ibmnpu", NULL},
    {1, "Relaxed Ordering Mode", "relaxed_ordering_mode", "absent"},
    {0, "PCI", "pci", NULL},
    {1, "Bus", "pci_bus", "pci.bus"},
    {1, "Device", "pci_device", "pci.device"},
    {1, "Domain", "pci_domain", "pci.domain"},
    {1, "Base Classcode", "pci_base_class", "pci.baseClass"},
    {1, "Sub Classcode", "pci_sub_class", "pci.subClass"},
    {1, "Device Id", "pci_device_id", "pci.device_id"},
    {1, "Bus Id", "pci_bus_id", "pci.bus_id"},
    {1, "Sub System Id", "pci_sub_system_id", "pci.sub_device_id"},
    {1, "GPU Link Info", "pci_gpu_link_info", NULL},
    {2, "PCIe Generation", "pcie_gen", NULL},
    {3, "Max", "max_link_gen", "pcie.link.gen.max"},
    {3, "Current", "current_link_gen", "pcie.link.gen.current"},
    {3, "Device Current", "device_current_link_gen", "pcie.link.gen.current"},
    {3, "Device Max", "max_device_link_gen", "pcie.link.gen.gpumax"},
    {3, "Host Max", "max_host_link_gen", "pcie.link.gen.hostmax"},
    {2, "Link Width", "link_widths", NULL},
    {3, "Max", "max_link_width", "pcie.link.width.max"},
    {3, "Current", "current_link_width", "pcie.link.width.current"},
    {1, "Bridge Chip", "pci_bridge_chip", NULL},
    {2, "Type", "bridge_chip_type", "absent"},
    {2, "Firmware", "bridge_chip_fw", "absent"},
    {1, "Replays Since Reset", "replay_counter", "replays"},
    {1, "Replay Number Rollovers", "replay_rollover_counter", "zero"},
    {1, "Tx Throughput", "tx_util", "pcie.tx"},
    {1, "Rx Throughput", "rx_util", "pcie.rx"},
    {0, "Fan Speed", "fan_speed", "fan.speed"},
    {0, "Performance State", "performance_state", "pstate"},
    {0, "Clocks Event Reasons", "clocks_event_reasons", NULL},
    {1, "Idle", "clocks_event_reason_gpu_idle", "clocks_event_reasons.gpu_idle"},
    {1, "Applications Clocks Setting", "clocks_event_reason_applications_clocks_setting",
     "clocks_event_reasons.applications_clocks_setting"},
    {1, "SW Power Cap", "clocks_event_reason_sw_power_cap", "clocks_event_reasons.sw_power_cap"},
    {1, "HW Slowdown", "clocks_event_reason_hw_slowdown", "clocks_event_reasons.hw_slowdown"},
    {2, "HW Thermal Slowdown", "clocks_event_reason_hw_thermal_slowdown",
     "clocks_event_reasons.hw_thermal_slowdown"},
    {2, "HW Power Brake Slowdown", "clocks_event_reason_hw_power_brake_slowdown",
     "clocks_event_reasons.hw_power_brake_slowdown"},
    {1, "Sync Boost", "clocks_event_reason_sync_boost", "clocks_event_reasons.sync_boost"},
    {1, "SW Thermal Slowdown", "clocks_event_reason_sw_thermal_slowdown",
     "clocks_event_reasons.sw_thermal_slowdown"},
    {0, "FB Memory Usage", "fb_memory_usage", NULL},
    {1, "Total", "total", "memory.total"},
    {1, "Reserved", "reserved", "memory.reserved"},
    {1, "Used", "used", "memory.used"},
    {1, "Free", "free", "memory.free"},
    {0, "BAR1 Memory Usage", "bar1_memory_usage", NULL},
    {1, "Total", "total", "bar1.total"},
    {1, "Used", "used", "bar1.used"},
    {1, "Free", "free", "bar1.free"},
    {0, "Compute Mode", "compute_mode", "compute_mode"},
    {0, "Utilization", "utilization", NULL},
    {1, "GPU", "gpu_util", "utilization.gpu"},
    {1, "Memory", "memory_util", "utilization.memory"},
    {1, "Encoder", "encoder_util", "utilization.encoder"},
    {1, "Decoder", "decoder_util", "utilization.decoder"},
    {1, "JPEG", "jpeg_util", "utilization.jpeg"},
    {1, "OFA", "ofa_util", "utilization.ofa"},
    {0, "Encoder Stats", "encoder_stats", NULL},
    {1, "Active Sessions", "session_count", "encoder.stats.sessionCount"},
    {1, "Average FPS", "average_fps", "encoder.stats.averageFps"},
    {1, "Average Latency", "average_latency", "encoder.stats.averageLatency"},
    {0, "FBC Stats", "fbc_stats", NULL},
    {1, "Active Sessions", "session_count", "zero"},
    {1, "Average FPS", "average_fps", "zero"},
    {1, "Average Latency", "average_latency", "zero"},
    {0, "ECC Mode", "ecc_mode", NULL},
    {1, "Current", "current_ecc", "ecc.mode.current"},
    {1, "Pending", "pending_ecc", "ecc.mode.pending"},
    {0, "ECC Errors", "ecc_errors", NULL},
    {1, "Volatile", "volatile", NULL},
    {2, "SRAM Correctable", "sram_correctable", "ecc.errors.corrected.volatile.sram"},
    {2, "SRAM Uncorrectable", "sram_uncorrectable", "ecc.errors.uncorrected.volatile.sram"},
    {2, "DRAM Correctable", "dram_correctable", "ecc.errors.corrected.volatile.dram"},
    {2, "DRAM Uncorrectable", "dram_uncorrectable", "ecc.errors.uncorrected.volatile.dram"},
    {1, "Aggregate", "aggregate", NULL},
    {2, "SRAM Correctable", "sram_correctable", "ecc.errors.corrected.aggregate.sram"},
    {2, "SRAM Uncorrectable", "sram_uncorrectable", "ecc.errors.uncorrected.aggregate.sram"},
    {2, "DRAM Correctable", "dram_correctable", "ecc.errors.corrected.aggregate.dram"},
    {2, "DRAM Uncorrectable", "dram_uncorrectable", "ecc.errors.uncorrected.aggregate.dram"},
    {0, "Retired Pages", "retired_pages", NULL},
    {1, "Single Bit ECC", "multiple_single_bit_retirement", "retired_pages.sbe"},
    {1, "Double Bit ECC", "double_bit_retirement", "retired_pages.dbe"},
    {1, "Pending Page Blacklist", "pending_blacklist", "retired_pages.pending"},
    {0, "Remapped Rows", "remapped_rows", NULL},
    {1, "Correctable Error", "remapped_row_corr", "remapped.correctable"},
    {1, "Uncorrectable Error", "remapped_row_unc", "remapped.uncorrectable"},
    {1, "Pending", "remapped_row_pending", "remapped.pending"},
    {1, "Remapping Failure Occurred", "remapped_row_failure", "remapped.failure"},
    {0, "Temperature", "temperature", NULL},
    {1, "GPU Current Temp", "gpu_temp", "temperature.gpu"},
    {1, "GPU T.Limit Temp", "gpu_temp_tlimit", "temperature.gpu.tlimit"},
    {1, "GPU Shutdown Temp", "gpu_temp_max_threshold", "threshold.shutdown"},
    {1, "GPU Slowdown Temp", "gpu_temp_slow_threshold", "threshold.slowdown"},
    {1, "GPU Max Operating Temp", "gpu_temp_max_gpu_threshold", "threshold.max"},
    {1, "Memory Current Temp", "memory_temp", "temperature.memory"},
    {0, "GPU Power Readings", "gpu_power_readings", NULL},
    {1, "Power Draw", "power_draw", "power.draw"},
    {1, "Current Power Limit", "current_power_limit", "power.limit"},
    {1, "Requested Power Limit", "requested_power_limit", "enforced.power.limit"},
    {1, "Default Power Limit", "default_power_limit", "power.default_limit"},
    {1, "Min Power Limit", "min_power_limit", "power.min_limit"},
    {1, "Max Power Limit", "max_power_limit", "power.max_limit"},
    {0, "Clocks", "clocks", NULL},
    {1, "Graphics", "graphics_clock", "clocks.gr"},
    {1, "SM", "sm_clock", "clocks.sm"},
    {1, "Memory", "mem_clock", "clocks.mem"},
    {1, "Video", "video_clock", "clocks.video"},
    {0, "Applications Clocks", "applications_clocks", NULL},
    {1, "Graphics", "graphics_clock", "clocks.applications.gr"},
    {1, "Memory", "mem_clock", "clocks.applications.mem"},
    {0, "Default Applications Clocks", "default_applications_clocks", NULL},
    {1, "Graphics", "graphics_clock", "clocks.default_applications.gr"},
    {1, "Memory", "mem_clock", "clocks.default_applications.mem"},
    {0, "Max Clocks", "max_clocks", NULL},
    {1, "Graphics", "graphics_clock", "clocks.max.gr"},
    {1, "SM", "sm_clock", "clocks.max.sm"},
    {1, "Memory", "mem_clock", "clocks.max.mem"},
    {1, "Video", "video_clock", "clocks.max.video"},
    {0, "Processes", "processes", NULL},
};

enum { ROWS = sizeof rows / sizeof rows[0] };

// The sections of -d, each with the groups that it shows.
static const struct {
  const char *section;
  const char *tags[6];
} sections[] = {
    {"MEMORY", {"fb_memory_usage", "bar1_memory_usage"}},
    {"UTILIZATION", {"utilization", "encoder_stats", "fbc_stats"}},
    {"ECC", {"ecc_mode", "ecc_errors"}},
    {"TEMPERATURE", {"temperature"}},
    {"POWER", {"gpu_power_readings"}},
    {"CLOCK", {"clocks", "applications_clocks", "default_applications_clocks", "max_clocks"}},
    {"COMPUTE", {"compute_mode"}},
    {"PIDS", {"processes"}},
    {"PERFORMANCE", {"performance_state", "clocks_event_reasons"}},
    {"PAGE_RETIREMENT", {"retired_pages"}},
    {"ROW_REMAPPER", {"remapped_rows"}},
    {"ACCOUNTING", {"accounting_mode", "accounting_mode_buffer_size"}},
    {"ENCODER_STATS", {"encoder_stats"}},
    {"FBC_STATS", {"fbc_stats"}},
};

enum { SECTIONS = sizeof sections / sizeof sections[0], LABEL_WIDTH = 50 };

static bool is_word(const char *words, const char *word) {
  size_t length = strlen(word);
  for (const char *at = words; at != NULL; at = strchr(at, ',')) {
    if (*at == ',') at++;
    if (strncmp(at, word, length) == 0 && (at[length] == ',' || at[length] == '\0')) return true;
  }
  return false;
}

static bool is_wanted(const char *wanted, const char *tag) {
  if (wanted == NULL) return true;
  for (int i = 0; i < SECTIONS; i++) {
    if (!is_word(wanted, sections[i].section)) continue;
    for (int k = 0; k < 6 && sections[i].tags[k] != NULL; k++) {
      if (strcmp(sections[i].tags[k], tag) == 0) return true;
    }
  }
  return false;
}

// ---- the two ways to write ----

static bool as_xml;

static void indent(unsigned int depth) {
  for (unsigned int i = 0; i < depth; i++) fputs(as_xml ? "\t" : "    ", stdout);
}

static void put_escaped(const char *text) {
  for (; *text != '\0'; text++) {
    const char *name = *text == '&'   ? "&amp;"
                       : *text == '<' ? "&lt;"
                       : *text == '>' ? "&gt;"
                                      : NULL;
    if (name != NULL) {
      fputs(name, stdout);
    } else if (isprint((unsigned char)*text) || (unsigned char)*text >= 0x80) {
      putchar(*text);
    } else {
      putchar('?');
    }
  }
}

static void put(unsigned int depth, const char *label, const char *tag, const char *value) {
  indent(depth);
  if (as_xml) {
    printf("<%s>", tag);
    put_escaped(value);
    printf("</%s>\n", tag);
  } else {
    printf("%-*s: %s\n", LABEL_WIDTH - (int)depth * 4, label, value);
  }
}

static void put_number(unsigned int depth, const char *label, const char *tag,
                       unsigned long long value, const char *unit) {
  char text[64];
  snprintf(text, sizeof text, "%llu%s", value, unit);
  put(depth, label, tag, text);
}

static void begin(unsigned int depth, const char *label, const char *tag) {
  indent(depth);
  printf(as_xml ? "<%s>\n" : "%s\n", as_xml ? tag : label);
}

static void end(unsigned int depth, const char *tag) {
  if (!as_xml) return;
  indent(depth);
  printf("</%s>\n", tag);
}

// ---- what has no fixed rows ----

static void put_mig_device(const smi_gpu *gpu, nvmlDevice_t device, unsigned int depth) {
  unsigned int index = 0, gpu_instance = 0, compute_instance = 0;
  nvmlDeviceAttributes_t attributes = {0};
  nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
  nvml.nvmlDeviceGetIndex(device, &index);
  nvml.nvmlDeviceGetGpuInstanceId(device, &gpu_instance);
  nvml.nvmlDeviceGetComputeInstanceId(device, &compute_instance);
  nvml.nvmlDeviceGetAttributes_v2(device, &attributes);
  nvml.nvmlDeviceGetMemoryInfo_v2(device, &memory);
  begin(depth, "MIG Device", "mig_device");
  put_number(depth + 1, "Index", "index", index, "");
  put_number(depth + 1, "GPU Instance ID", "gpu_instance_id", gpu_instance, "");
  put_number(depth + 1, "Compute Instance ID", "compute_instance_id", compute_instance, "");
  begin(depth + 1, "Device Attributes", "device_attributes");
  begin(depth + 2, "Shared", "shared");
  put_number(depth + 3, "Multiprocessor count", "multiprocessor_count",
             attributes.multiprocessorCount, "");
  put_number(depth + 3, "Copy Engine count", "copy_engine_count", attributes.sharedCopyEngineCount,
             "");
  put_number(depth + 3, "Encoder count", "encoder_count", attributes.sharedEncoderCount, "");
  put_number(depth + 3, "Decoder count", "decoder_count", attributes.sharedDecoderCount, "");
  put_number(depth + 3, "OFA count", "ofa_count", attributes.sharedOfaCount, "");
  put_number(depth + 3, "JPG count", "jpg_count", attributes.sharedJpegCount, "");
  end(depth + 2, "shared");
  end(depth + 1, "device_attributes");
  begin(depth + 1, "FB Memory Usage", "fb_memory_usage");
  put_number(depth + 2, "Total", "total", memory.total >> 20, " MiB");
  put_number(depth + 2, "Reserved", "reserved", memory.reserved >> 20, " MiB");
  put_number(depth + 2, "Used", "used", memory.used >> 20, " MiB");
  put_number(depth + 2, "Free", "free", memory.free >> 20, " MiB");
  end(depth + 1, "fb_memory_usage");
  end(depth, "mig_device");
}

static void put_mig_devices(const smi_gpu *gpu, unsigned int depth) {
  nvmlDevice_t devices[SMI_MIG_DEVICES];
  unsigned int count = smi_mig_devices(gpu, devices);
  if (count == 0) {
    put(depth, "MIG Devices", "mig_devices", "None");
    return;
  }
  begin(depth, "MIG Devices", "mig_devices");
  for (unsigned int i = 0; i < count; i++) put_mig_device(gpu, devices[i], depth + 1);
  end(depth, "mig_devices");
}

static void put_processes(const smi_gpu *gpu, unsigned int depth) {
  static smi_process processes[SMI_PROCESSES];
  char text[16];
  unsigned int count = smi_processes(gpu, processes);
  if (count == 0 && !as_xml) {
    put(depth, "Processes", "processes", "None");
    return;
  }
  begin(depth, "Processes", "processes");
  for (unsigned int i = 0; i < count; i++) {
    const nvmlProcessInfo_t *info = &processes[i].info;
    begin(depth + 1, "Process", "process_info");
    put(depth + 2, "GPU instance ID", "gpu_instance_id",
        smi_instance(info->gpuInstanceId, text, sizeof text));
    put(depth + 2, "Compute instance ID", "compute_instance_id",
        smi_instance(info->computeInstanceId, text, sizeof text));
    put_number(depth + 2, "Process ID", "pid", info->pid, "");
    put(depth + 2, "Type", "type", processes[i].type);
    put(depth + 2, "Name", "process_name", processes[i].name);
    put_number(depth + 2, "Used GPU Memory", "used_memory", info->usedGpuMemory >> 20, " MiB");
    end(depth + 1, "process_info");
  }
  end(depth, "processes");
}

// ---- a GPU ----

static void put_row(const row *each, const smi_gpu *gpu, unsigned int depth) {
  char value[192];
  const smi_field *field = smi_report_field(each->field);
  if (field == NULL || !smi_value(field, gpu, value, sizeof value - 16)) {
    put(depth, each->label, each->tag, "N/A");
    return;
  }
  bool is_width = strncmp(each->field, "pcie.link.width", 15) == 0;
  bool is_temperature = strncmp(each->field, "temperature", 11) == 0;
  const char *unit = is_temperature ? "C" : smi_field_unit(field);
  if (is_width) strcat(value, "x");
  if (*unit != '\0') strcat(strcat(value, " "), unit);
  put(depth, each->label, each->tag, value);
}

static void put_gpu(const smi_gpu *gpu, const char *wanted) {
  const unsigned int base = as_xml ? 2 : 1;
  const char *open[4];  // the groups around the row
  unsigned int depth = 0;
  bool shown = true;
  for (int i = 0; i < ROWS; i++) {
    const row *each = &rows[i];
    while (depth > each->depth) {
      depth--;
      if (shown) end(base + depth, open[depth]);
    }
    if (each->depth == 0) shown = is_wanted(wanted, each->tag);
    if (each->field == NULL && shown && strcmp(each->tag, "mig_devices") == 0) {
      put_mig_devices(gpu, base);
    } else if (each->field == NULL && shown && strcmp(each->tag, "processes") == 0) {
      put_processes(gpu, base);
    } else if (each->field == NULL && i + 1 < ROWS && rows[i + 1].depth > each->depth) {
      open[depth++] = each->tag;
      if (shown) begin(base + each->depth, each->label, each->tag);
    } else if (each->field != NULL && shown) {
      put_row(each, gpu, base + each->depth);
    }
  }
}

static int check_sections(const char *wanted) {
  for (const char *word = wanted; word != NULL; word = strchr(word, ',')) {
    if (*word == ',') word++;
    bool known = false;
    for (int i = 0; i < SECTIONS; i++) {
      size_t length = strlen(sections[i].section);
      known |= strcspn(word, ",") == length && strncmp(word, sections[i].section, length) == 0;
    }
    if (!known) {
      printf("\"%.*s\" is not a valid argument of --display.\n", (int)strcspn(word, ","), word);
      return SMI_INVALID;
    }
  }
  return 0;
}

int smi_show_report(const smi_list *list, const char *wanted, bool xml) {
  as_xml = xml;
  int status = check_sections(wanted);
  if (status != 0) return status;
  char now[64], driver[80] = "N/A", cuda[16] = "N/A", attached[16];
  int version = 0;
  smi_timestamp(now, sizeof now, "%a %b %e %H:%M:%S %Y");
  nvml.nvmlSystemGetDriverVersion(driver, sizeof driver);
  if (nvml.nvmlSystemGetCudaDriverVersion(&version) == NVML_SUCCESS) {
    snprintf(cuda, sizeof cuda, "%d.%d", version / 1000, version % 1000 / 10);
  }
  snprintf(attached, sizeof attached, "%u", list->attached);
  if (xml) {
    puts("<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">");
    puts("<!-- Simulated GPUs, by Allotment. -->\n<nvidia_smi_log>");
  } else {
    puts("\n==============NVSMI LOG==============\n");
    puts("Simulated GPUs, by Allotment.\n");
  }
  unsigned int depth = xml ? 1 : 0;
  put(depth, "Timestamp", "timestamp", now);
  put(depth, "Driver Version", "driver_version", driver);
  put(depth, "CUDA Version", "cuda_version", cuda);
  if (!xml) putchar('\n');
  put(depth, "Attached GPUs", "attached_gpus", attached);
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    if (gpu->problem != NVML_SUCCESS) {
      smi_report_problem(gpu, stderr);
      status = smi_failed(gpu->problem);
      continue;
    }
    printf(xml ? "\t<gpu id=\"%s\">\n" : "GPU %s\n", gpu->bus_id);
    put_gpu(gpu, wanted);
    puts(xml ? "\t</gpu>\n" : "");
  }
  if (xml) puts("</nvidia_smi_log>");
  return status;
}
