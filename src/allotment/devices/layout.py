# SPDX-License-Identifier: Apache-2.0
"""Where the fields of native/simulated/machine.h lie: name, offset in bytes, `struct` format.

Written by tools/generate_machine_layout.py; a test compares it with the header.
"""

from typing import Final

MACHINE_MAGIC: Final = 4994009611515284801
MACHINE_VERSION: Final = 1
MACHINE_GPUS: Final = 16
MACHINE_PROCESSES: Final = 512
MIG_SLOTS: Final = 8
MIG_PROFILES: Final = 18
PROCESS_LOCK_BASE: Final = 1099511627776
MACHINE_FILE_BYTES: Final = 671088640
MACHINE_RINGS_AT: Final = 5750784
STATE_LAYOUT: Final = "dc6f10db8d488ac0"
MIG_AT: Final = 51288
FAULTS_AT: Final = 32920

MACHINE_SIZE: Final = 32920
MACHINE_FIELDS: Final[dict[str, tuple[int, str]]] = {
    "magic": (0, "Q"),
    "version": (8, "I"),
    "gpu_count": (12, "I"),
    "file_bytes": (16, "Q"),
    "driver_version": (24, "32s"),
    "nvml_version": (56, "32s"),
    "cuda_version": (88, "I"),
    "timeslice_us": (92, "I"),
    "default_kernel_us": (96, "I"),
    "gpus": (152, "32768s"),
}

GPU_SIZE: Final = 2048
GPU_FIELDS: Final[dict[str, tuple[int, str]]] = {
    "uuid": (0, "48s"),
    "name": (48, "96s"),
    "architecture": (144, "16s"),
    "serial": (160, "32s"),
    "vbios": (192, "32s"),
    "part_number": (224, "32s"),
    "memory_total": (256, "Q"),
    "memory_reserved": (264, "Q"),
    "context_bytes": (272, "Q"),
    "bar1_total": (280, "Q"),
    "sm_count": (288, "I"),
    "compute_major": (292, "I"),
    "compute_minor": (296, "I"),
    "max_threads_per_sm": (300, "I"),
    "max_threads_per_block": (304, "I"),
    "warp_size": (308, "I"),
    "shared_per_block": (312, "I"),
    "shared_per_block_optin": (316, "I"),
    "shared_per_sm": (320, "I"),
    "registers_per_sm": (324, "I"),
    "l2_bytes": (328, "I"),
    "memory_bus_width": (332, "I"),
    "sm_clock_mhz": (336, "I"),
    "sm_clock_max_mhz": (340, "I"),
    "memory_clock_mhz": (344, "I"),
    "memory_clock_max_mhz": (348, "I"),
    "power_limit_mw": (352, "I"),
    "power_limit_min_mw": (356, "I"),
    "power_limit_max_mw": (360, "I"),
    "power_idle_mw": (364, "I"),
    "temperature_idle_c": (368, "I"),
    "temperature_slowdown_c": (372, "I"),
    "temperature_shutdown_c": (376, "I"),
    "fan_count": (380, "I"),
    "pci_domain": (384, "I"),
    "pci_bus": (388, "I"),
    "pci_device": (392, "I"),
    "pci_function": (396, "I"),
    "pci_device_id": (400, "I"),
    "pci_subsystem_id": (404, "I"),
    "pcie_generation": (408, "I"),
    "pcie_width": (412, "I"),
    "numa_node": (416, "i"),
    "minor": (420, "I"),
    "brand": (424, "I"),
    "nvml_architecture": (428, "I"),
    "ecc_supported": (432, "I"),
    "ecc_enabled": (436, "I"),
    "nvlink_count": (440, "I"),
    "nvlink_version": (444, "I"),
    "nvlink_peer": (448, "18i"),
    "encoder_supported": (520, "I"),
    "engine_concurrent_kernels": (524, "I"),
    "h2d_mib_per_s": (528, "I"),
    "d2h_mib_per_s": (532, "I"),
    "d2d_mib_per_s": (536, "I"),
    "integrated": (540, "I"),
    "timeslice_us": (544, "I"),
    "mig_slots": (548, "I"),
    "mig_needs_reset": (552, "I"),
    "mig_profiles": (608, "1440s"),
}

FAULTS_SIZE: Final = 18368
FAULTS_FIELDS: Final[dict[str, tuple[int, str]]] = {
    "nvml_not_loaded": (0, "I"),
    "cuda_init_error": (4, "I"),
    "release_us": (8, "I"),
    "gpus": (64, "18304s"),
}

GPU_FAULTS_SIZE: Final = 1144
GPU_FAULTS_FIELDS: Final[dict[str, tuple[int, str]]] = {
    "lost": (0, "I"),
    "hang_us": (4, "I"),
    "xid_head": (8, "I"),
    "xids_cleared": (12, "I"),
    "xids": (16, "1024s"),
    "ecc_volatile_corrected": (1040, "Q"),
    "ecc_volatile_uncorrected": (1048, "Q"),
    "ecc_aggregate_corrected": (1056, "Q"),
    "ecc_aggregate_uncorrected": (1064, "Q"),
    "retired_pages_sbe": (1072, "I"),
    "retired_pages_dbe": (1076, "I"),
    "remapped_rows_correctable": (1080, "I"),
    "remapped_rows_uncorrectable": (1084, "I"),
    "mig_slow_us": (1088, "6I"),
    "mig_errors": (1112, "6I"),
    "mig_ends_before": (1136, "I"),
    "mig_ends_after": (1140, "I"),
}

MIG_PROFILE_SIZE: Final = 80
MIG_PROFILE_FIELDS: Final[dict[str, tuple[int, str]]] = {
    "name": (0, "24s"),
    "slices": (24, "I"),
    "id": (28, "I"),
    "size": (32, "I"),
    "starts": (36, "I"),
    "most": (40, "I"),
    "media": (44, "I"),
    "sm_count": (48, "I"),
    "copy_engines": (52, "I"),
    "decoders": (56, "I"),
    "encoders": (60, "I"),
    "jpegs": (64, "I"),
    "ofas": (68, "I"),
    "memory_bytes": (72, "Q"),
}

GPU_MIG_SIZE: Final = 648
GPU_MIG_FIELDS: Final[dict[str, tuple[int, str]]] = {
    "enabled": (0, "I"),
    "pending": (4, "I"),
    "instances": (8, "128s"),
    "computes": (136, "512s"),
}

GPU_INSTANCE_SIZE: Final = 16
GPU_INSTANCE_FIELDS: Final[dict[str, tuple[int, str]]] = {
    "there": (0, "I"),
    "id": (4, "I"),
    "profile": (8, "I"),
}

COMPUTE_INSTANCE_SIZE: Final = 64
COMPUTE_INSTANCE_FIELDS: Final[dict[str, tuple[int, str]]] = {
    "there": (0, "I"),
    "id": (4, "I"),
    "slices": (8, "I"),
    "sm_count": (12, "I"),
    "uuid": (16, "48s"),
}
