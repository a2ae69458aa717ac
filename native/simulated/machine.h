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
// UUIDs of the GPUs that a process can reach, as if it had their device nodes alone; else the files
// of the folder, of which each of a container's shares mounts one.
#define ALLOT_NODES_ENV "ALLOTMENT_SIMULATED_DEVICES"
#define ALLOT_NODES_FOLDER "/run/allotment/simulated/devices"
#define ALLOT_MACHINE_GPUS 16
#define ALLOT_MACHINE_PROCESSES 512
#define ALLOT_MIG_SLOTS 8     /* memory slots that a GPU has at most, and so instances of it */
#define ALLOT_MIG_PROFILES 18 /* NVML's numbers of them: NVML_GPU_INSTANCE_PROFILE_COUNT */

// A shape of GPU instance; at the place of NVML's number for it (NVML_GPU_INSTANCE_PROFILE_*).
typedef struct allot_mig_profile {
  char name[24];    // "1g.10gb+me"
  uint32_t slices;  // compute slices, 0: the model has not this one
  uint32_t id;      // what creating an instance is told
  uint32_t size;    // memory slots that an instance covers
  uint32_t starts;  // a bit for each slot at which one may begin
  uint32_t most;    // at once
  uint32_t media;   // it has media engines of which there is one set for the GPU
  uint32_t sm_count;
  uint32_t copy_engines, decoders, encoders, jpegs, ofas;
  uint64_t memory_bytes;
} allot_mig_profile;

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
  uint32_t nvlink_count;  // links this GPU has, 0 to 18
  uint32_t nvlink_version;
  int32_t nvlink_peer[18];  // index of the GPU at the other end, -1: none, -2: an NVSwitch
  uint32_t encoder_supported;
  uint32_t engine_concurrent_kernels;
  uint32_t h2d_mib_per_s, d2h_mib_per_s, d2d_mib_per_s;  // copy rates
  uint32_t integrated;                                   // GH200-like coherent memory: 0/1
  uint32_t timeslice_us;                                 // 0: as long as the machine says
  uint32_t mig_slots;                                    // memory slots, 0: no MIG
  uint32_t mig_needs_reset;  // a change of mode waits for a reset (Ampere), else it is at once
  uint32_t spare[12];
  allot_mig_profile mig_profiles[ALLOT_MIG_PROFILES];
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

// Calls that change MIG.
enum {
  ALLOT_MIG_SET_MODE = 0,
  ALLOT_MIG_CREATE_GPU = 1,  // a GPU instance
  ALLOT_MIG_CREATE_COMPUTE = 2,
  ALLOT_MIG_DESTROY_GPU = 3,
  ALLOT_MIG_DESTROY_COMPUTE = 4,
  ALLOT_MIG_RESET = 5,  // of the GPU, which puts a pending mode into force
};
#define ALLOT_MIG_CALLS 6

// Faults on demand. Written by `allot` (Python) at any time, read by both libraries.
typedef struct allot_gpu_faults {
  uint32_t lost;          // fell off the bus: every call on it fails (CUDA 999/719.., NVML 15)
  uint32_t hang_us;       // every call on it takes this long more
  uint32_t xid_head;      // number of XID events so far; event n is xids[n % 64]
  uint32_t xids_cleared;  // `allot fault` does not show the events before this one
  struct {
    uint64_t time_ns;
    uint64_t xid;
  } xids[64];
  uint64_t ecc_volatile_corrected, ecc_volatile_uncorrected;
  uint64_t ecc_aggregate_corrected, ecc_aggregate_uncorrected;
  uint32_t retired_pages_sbe, retired_pages_dbe, remapped_rows_correctable,
      remapped_rows_uncorrectable;
  // Of calls that change MIG, by ALLOT_MIG_*: how much longer they take, what they return instead
  // of doing anything (nvmlReturn_t), and which of them (a bit each) end the calling process,
  // before they do anything and after they have done it: a crash at that step.
  uint32_t mig_slow_us[ALLOT_MIG_CALLS];
  uint32_t mig_errors[ALLOT_MIG_CALLS];
  uint32_t mig_ends_before, mig_ends_after;
} allot_gpu_faults;

typedef struct allot_machine_faults {
  uint32_t nvml_not_loaded;  // nvmlInit fails with NVML_ERROR_DRIVER_NOT_LOADED
  uint32_t cuda_init_error;  // CUresult that cuInit returns, 0: none
  // How long the driver keeps a process's memory after it has ended, and lists it as if it lived.
  uint32_t release_us;
  uint32_t spare[13];
  allot_gpu_faults gpus[ALLOT_MACHINE_GPUS];
} allot_machine_faults;

// ---- MIG: what the GPUs are cut into ------------------------------------------------------------

// Changed by libnvidia-ml under the GPU's MIG lock (engine/mig.c); Python writes it into a new
// machine. `there` is stored last when one is made and first when one goes, so whoever ends in
// between leaves nothing half made.

typedef struct allot_gpu_instance {
  uint32_t there;
  uint32_t id;       // NVML's, used again
  uint32_t profile;  // at which place of mig_profiles
  uint32_t spare;
} allot_gpu_instance;

typedef struct allot_compute_instance {
  uint32_t there;
  uint32_t id;      // within its GPU instance
  uint32_t slices;  // compute slices
  uint32_t sm_count;
  char uuid[48];  // "MIG-...", another one each time
} allot_compute_instance;

// A GPU instance has the place of its first slot. A compute instance has the place of its first
// compute slice, counted from its GPU instance's first slot: no profile has more slices than slots.
typedef struct allot_gpu_mig {
  uint32_t enabled, pending;
  allot_gpu_instance instances[ALLOT_MIG_SLOTS];
  allot_compute_instance computes[ALLOT_MIG_SLOTS];
} allot_gpu_mig;

typedef struct allot_machine_mig {
  allot_gpu_mig gpus[ALLOT_MACHINE_GPUS];
} allot_machine_mig;

#endif
