// SPDX-License-Identifier: Apache-2.0
// The simulated machine: one file that every process maps, holding the simulated GPUs.
//
// Python makes the file from YAML or a short form (allotment.devices.simulated); libcuda.so.1 and
// libnvidia-ml.so.1 of this folder, and nothing else, run on it. It is found through
// ALLOTMENT_SIMULATED_MACHINE (path of the file), else at ALLOT_MACHINE_DEFAULT_PATH.
//
// The first part of each structure is the description (constant after creation, unless a fault is
// injected); the rest is state. Python writes the description through generated offsets
// (src/allotment/devices/layout.py), so descriptions keep to fixed-width integers and char arrays.
#ifndef ALLOTMENT_MACHINE_H
#define ALLOTMENT_MACHINE_H

#include <stdint.h>

#define ALLOT_MACHINE_MAGIC 0x454e494843414d41ull /* "AMACHINE" */
#define ALLOT_MACHINE_VERSION 1u
#define ALLOT_MACHINE_ENV "ALLOTMENT_SIMULATED_MACHINE"
#define ALLOT_MACHINE_DEFAULT_PATH "/run/allotment/simulated/machine"
// UUIDs of the GPUs that a process can reach, as if it had their device nodes alone; else the file.
#define ALLOT_NODES_ENV "ALLOTMENT_SIMULATED_DEVICES"
#define ALLOT_NODES_DEFAULT_PATH "/run/allotment/simulated/devices"
#define ALLOT_MACHINE_GPUS 16
#define ALLOT_MACHINE_PROCESSES 512

typedef struct allot_gpu_description {
  char uuid[48];          // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", stable for a given machine
  char name[96];          // "NVIDIA A100-SXM4-80GB"
  char architecture[16];  // "Ampere"
  char serial[32];
  char vbios[32];
  char part_number[32];
  uint64_t memory_total;     // bytes, as NVML v2 reports `total`
  uint64_t memory_reserved;  // bytes the driver keeps for itself (NVML v2 `reserved`)
  uint64_t context_bytes;    // device memory one CUDA context costs
  uint64_t bar1_total;       // bytes
  uint32_t sm_count;
  uint32_t compute_major, compute_minor;
  uint32_t max_threads_per_sm, max_threads_per_block, warp_size;
  uint32_t shared_per_block, shared_per_block_optin, shared_per_sm, registers_per_sm;
  uint32_t l2_bytes, memory_bus_width;
  uint32_t sm_clock_mhz, sm_clock_max_mhz, memory_clock_mhz, memory_clock_max_mhz;
  uint32_t power_limit_mw, power_limit_min_mw, power_limit_max_mw, power_idle_mw;
  uint32_t temperature_idle_c, temperature_slowdown_c, temperature_shutdown_c;
  uint32_t fan_count;
  uint32_t pci_domain, pci_bus, pci_device, pci_function;
  uint32_t pci_device_id, pci_subsystem_id;  // (device << 16) | vendor, as NVML has them
  uint32_t pcie_generation, pcie_width;
  int32_t numa_node;
  uint32_t minor;              // /dev/nvidiaN
  uint32_t brand;              // nvmlBrandType_t
  uint32_t nvml_architecture;  // nvmlDeviceArchitecture_t
  uint32_t ecc_supported, ecc_enabled;
  uint32_t mig_supported;  // the model can; MIG itself comes with a later issue
  uint32_t nvlink_count;   // links this GPU has, 0 to 18
  uint32_t nvlink_version;
  int32_t nvlink_peer[18];  // index of the GPU at the other end, -1: none, -2: an NVSwitch
  uint32_t encoder_supported;
  uint32_t engine_concurrent_kernels;
  uint32_t h2d_mib_per_s, d2h_mib_per_s, d2d_mib_per_s;  // copy rates
  uint32_t integrated;                                   // GH200-like coherent memory: 0/1
  uint32_t timeslice_us;                                 // 0: as long as the machine says
  uint32_t spare[14];
} allot_gpu_description;

typedef struct allot_machine_description {
  uint64_t magic;
  uint32_t version;
  uint32_t gpu_count;
  uint64_t file_bytes;         // size of the whole file
  char driver_version[32];     // "580.95.05"
  char nvml_version[32];       // "13.580.95.05"
  uint32_t cuda_version;       // 13000: what cuDriverGetVersion returns
  uint32_t timeslice_us;       // 2000
  uint32_t default_kernel_us;  // duration of a kernel that is not allot_spin
  uint32_t spare[13];
  allot_gpu_description gpus[ALLOT_MACHINE_GPUS];
} allot_machine_description;

// Faults on demand. Written by `allot` (Python) at any time, read by both libraries.
typedef struct allot_gpu_faults {
  uint32_t lost;      // fell off the bus: every call on it fails (CUDA 999/719.., NVML 15)
  uint32_t hang_us;   // every call on it takes this long more
  uint32_t xid_head;  // number of XID events so far; event n is xids[n % 64]
  uint32_t spare;
  struct {
    uint64_t time_ns;
    uint64_t xid;
  } xids[64];
  uint64_t ecc_volatile_corrected, ecc_volatile_uncorrected;
  uint64_t ecc_aggregate_corrected, ecc_aggregate_uncorrected;
  uint32_t retired_pages_sbe, retired_pages_dbe, remapped_rows_correctable,
      remapped_rows_uncorrectable;
} allot_gpu_faults;

typedef struct allot_machine_faults {
  uint32_t nvml_not_loaded;  // nvmlInit fails with NVML_ERROR_DRIVER_NOT_LOADED
  uint32_t cuda_init_error;  // CUresult that cuInit returns, 0: none
  uint32_t spare[14];
  allot_gpu_faults gpus[ALLOT_MACHINE_GPUS];
} allot_machine_faults;

#endif
