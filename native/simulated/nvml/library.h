// SPDX-License-Identifier: Apache-2.0
// What the files of the simulated libnvidia-ml.so.1 share. NVML's own declarations are nvml_abi.h.
#ifndef ALLOTMENT_NVML_LIBRARY_H
#define ALLOTMENT_NVML_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nvml_abi.h"
#include "simulated/engine/engine.h"

#define NVML_EXPORT __attribute__((visibility("default")))

// One GPU or MIG device, for the length of one call.
typedef struct nvml_gpu {
  int index;
  int place;  // `index`, or that of the MIG device among the machine's engines
  const allot_gpu_description *description;
  const allot_gpu_faults *faults;
  allot_handle *engine;
} nvml_gpu;

// ---- library.c ----

// UNINITIALIZED unless nvmlInit was called.
nvmlReturn_t nvml_ready(void);
// The machine, when nvml_ready.
allot_handle *nvml_engine(void);
// A handle's GPU: UNINITIALIZED, INVALID_ARGUMENT or GPU_IS_LOST if it cannot be asked. A GPU that
// hangs lets the caller wait here.
nvmlReturn_t nvml_enter(nvmlDevice_t device, nvml_gpu *gpu);
// The same for calls that take MIG devices, too; to others these are NOT_SUPPORTED.
nvmlReturn_t nvml_enter_any(nvmlDevice_t device, nvml_gpu *gpu);
// As enter, for any GPU's handle of this library, without asking the GPU itself.
nvmlReturn_t nvml_find(nvmlDevice_t device, nvml_gpu *gpu);
// What it is to ask it: to wait while it hangs, or to hear that it is lost.
nvmlReturn_t nvml_ask(const nvml_gpu *gpu);
nvmlDevice_t nvml_device(int place);
bool nvml_is_mig_device(const nvml_gpu *gpu);
// A GPU of any machine, whether the process has its node or not.
nvml_gpu nvml_bare(allot_handle *engine, int index);
bool nvml_is_lost(const nvml_gpu *gpu);
// Has the process the GPU's device node? Without it the GPU is not there, and has no index.
bool nvml_has_node(int gpu);
unsigned int nvml_index(const nvml_gpu *gpu);
// Brings the GPU's engine to the present, for its busy times to be right.
void nvml_advance(const nvml_gpu *gpu);
// Copies a text out; INSUFFICIENT_SIZE if it does not fit with its NUL.
nvmlReturn_t nvml_copy_text(const char *text, char *buffer, unsigned int length);
// Microseconds since the epoch: the time stamp of samples and field values.
unsigned long long nvml_time_us(void);

// ---- numbers.c: a process has one number in each pid namespace that it is seen from ----

typedef struct nvml_number {
  int slot;
  int32_t inside;  // the process's number as it knows it
  uint64_t namespace_id, start_time;
  unsigned int here;  // its number for the caller, 0: the caller cannot see it
} nvml_number;

// Fills in `here` of them all.
void nvml_number_here(nvml_number *numbers, unsigned int count);

// Starts a call on one device: `gpu` is it, and `sane` says that the other arguments are.
#define NVML_ENTER(device, sane)                       \
  nvml_gpu gpu;                                        \
  do {                                                 \
    nvmlReturn_t entered = nvml_enter((device), &gpu); \
    if (entered != NVML_SUCCESS) return entered;       \
    if (!(sane)) return NVML_ERROR_INVALID_ARGUMENT;   \
  } while (0)

#define NVML_ENTER_ANY(device, sane)                       \
  nvml_gpu gpu;                                            \
  do {                                                     \
    nvmlReturn_t entered = nvml_enter_any((device), &gpu); \
    if (entered != NVML_SUCCESS) return entered;           \
    if (!(sane)) return NVML_ERROR_INVALID_ARGUMENT;       \
  } while (0)

// Starts a call on the system.
#define NVML_READY(sane)                             \
  do {                                               \
    nvmlReturn_t ready = nvml_ready();               \
    if (ready != NVML_SUCCESS) return ready;         \
    if (!(sane)) return NVML_ERROR_INVALID_ARGUMENT; \
  } while (0)

// A call that gives one value of a device, if the device has it.
#define NVML_GETTER_ANY(name, type, expression)                     \
  NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, type *value) { \
    NVML_ENTER_ANY(device, value != NULL);                          \
    *value = (expression);                                          \
    return NVML_SUCCESS;                                            \
  }
#define NVML_GETTER(name, type, supported, expression)              \
  NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, type *value) { \
    NVML_ENTER(device, value != NULL);                              \
    if (!(supported)) return NVML_ERROR_NOT_SUPPORTED;              \
    *value = (expression);                                          \
    return NVML_SUCCESS;                                            \
  }

// ---- models.c: what a model has ----

bool nvml_is_geforce(const nvml_gpu *gpu);
bool nvml_has_hbm(const nvml_gpu *gpu);
bool nvml_is_at_least(const nvml_gpu *gpu, unsigned int architecture);
bool nvml_can_mig(const nvml_gpu *gpu);
bool nvml_mig_is_on(const nvml_gpu *gpu);      // in mig.c
bool nvml_counts_ecc(const nvml_gpu *gpu);     // ECC is on
bool nvml_retires_pages(const nvml_gpu *gpu);  // up to Turing
bool nvml_remaps_rows(const nvml_gpu *gpu);    // from Ampere on

// ---- figures.c: what a GPU does, from the engine's busy time ----

// Of the last second. The GPU must have been advanced.
unsigned int nvml_busy_percent(const allot_history *history);
unsigned int nvml_gpu_percent(const nvml_gpu *gpu);
unsigned int nvml_copy_percent(const nvml_gpu *gpu);
unsigned int nvml_memory_percent(const nvml_gpu *gpu);
// How much of the time in which kernels run they read or write memory.
unsigned int nvml_memory_per_gpu_percent(void);
bool nvml_has_contexts(const nvml_gpu *gpu);
unsigned int nvml_power_mw(const nvml_gpu *gpu);
unsigned long long nvml_energy_mj(const nvml_gpu *gpu);  // since the last reset
void nvml_reset_energy(const nvml_gpu *gpu);
unsigned int nvml_temperature_c(const nvml_gpu *gpu);
unsigned int nvml_clock_mhz(const nvml_gpu *gpu, nvmlClockType_t type);
unsigned int nvml_max_clock_mhz(const nvml_gpu *gpu, nvmlClockType_t type);
unsigned int nvml_memory_temperature_c(const nvml_gpu *gpu);

// ---- cuts.c, computes.c: GPU instances and compute instances ----

// A MIG device's GPU instance (the first slot of it), compute instance, and profile.
int nvml_cut_around(const nvml_gpu *gpu);
const allot_gpu_instance *nvml_cut(const nvml_gpu *gpu, int slot);
const allot_compute_instance *nvml_compute(const nvml_gpu *gpu);
const allot_mig_profile *nvml_cut_profile(const nvml_gpu *gpu, int slot);
// The GPU instance that a handle is of, by its first slot: UNINITIALIZED, NOT_FOUND (it has gone).
nvmlReturn_t nvml_enter_cut(nvmlGpuInstance_t handle, nvml_gpu *gpu, int *slot);
nvmlGpuInstance_t nvml_cut_handle(int gpu, int slot);
// A MIG device's number on its GPU.
unsigned int nvml_mig_index(const nvml_gpu *gpu);
// Begins a call that changes MIG, of kind ALLOT_MIG_*: what faults say of it, and whether the
// process may. With NVML_SUCCESS the GPU's MIG lock is held: give it to nvml_end_change.
nvmlReturn_t nvml_begin_change(const nvml_gpu *gpu, unsigned int call, int *lock);
nvmlReturn_t nvml_end_change(const nvml_gpu *gpu, unsigned int call, int lock, nvmlReturn_t result);

// ---- capabilities.c ----

// Makes the machine's folder of capabilities fit what the GPU is cut into. Under its MIG lock.
void nvml_fit_capabilities(const nvml_gpu *gpu);
bool nvml_has_capabilities(const nvml_gpu *gpu);

// ---- errors.c ----

unsigned long long nvml_ecc_count(const nvml_gpu *gpu, unsigned int error, unsigned int counter);

// ---- pcie.c, links.c, topology.c ----

void nvml_fill_pci(const nvml_gpu *gpu, nvmlPciInfo_t *pci);
unsigned int nvml_pcie_kib_per_s(const nvml_gpu *gpu, nvmlPcieUtilCounter_t counter);
bool nvml_link_is_active(const nvml_gpu *gpu, unsigned int link);
unsigned int nvml_link_mbps(const nvml_gpu *gpu);
bool nvml_are_linked(const nvml_gpu *one, const nvml_gpu *other);

#endif
