// SPDX-License-Identifier: Apache-2.0
// nvidia-smi of a simulated machine: what its files share. It asks NVML alone, by the library's
// name, so a share's shim answers it as it answers any program.
#ifndef ALLOTMENT_SMI_H
#define ALLOTMENT_SMI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "nvml_abi.h"

// ---- nvml.c: the library ----

#define SMI_TEXT(name) X(name, (nvmlDevice_t, char *, unsigned int))
#define SMI_UINT(name) X(name, (nvmlDevice_t, unsigned int *))
#define SMI_PAIR(name) X(name, (nvmlDevice_t, unsigned int *, unsigned int *))

#define SMI_FUNCTIONS                                                                              \
  X(nvmlInit_v2, (void))                                                                           \
  X(nvmlSystemGetDriverVersion, (char *, unsigned int))                                            \
  X(nvmlSystemGetNVMLVersion, (char *, unsigned int))                                              \
  X(nvmlSystemGetCudaDriverVersion, (int *))                                                       \
  X(nvmlSystemGetProcessName, (unsigned int, char *, unsigned int))                                \
  X(nvmlDeviceGetCount_v2, (unsigned int *))                                                       \
  X(nvmlDeviceGetHandleByIndex_v2, (unsigned int, nvmlDevice_t *))                                 \
  SMI_TEXT(nvmlDeviceGetName)                                                                      \
  SMI_TEXT(nvmlDeviceGetUUID)                                                                      \
  SMI_TEXT(nvmlDeviceGetSerial)                                                                    \
  SMI_TEXT(nvmlDeviceGetVbiosVersion)                                                              \
  SMI_TEXT(nvmlDeviceGetBoardPartNumber)                                                           \
  SMI_TEXT(nvmlDeviceGetInforomImageVersion)                                                       \
  X(nvmlDeviceGetInforomVersion, (nvmlDevice_t, unsigned int, char *, unsigned int))               \
  X(nvmlDeviceGetGspFirmwareVersion, (nvmlDevice_t, char *))                                       \
  SMI_PAIR(nvmlDeviceGetGspFirmwareMode)                                                           \
  X(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t, nvmlPciInfo_t *))                                      \
  X(nvmlDeviceGetPciInfoExt, (nvmlDevice_t, nvmlPciInfoExt_v1_t *))                                \
  SMI_UINT(nvmlDeviceGetIndex)                                                                     \
  SMI_UINT(nvmlDeviceGetMinorNumber)                                                               \
  SMI_UINT(nvmlDeviceGetBrand)                                                                     \
  SMI_UINT(nvmlDeviceGetArchitecture)                                                              \
  SMI_UINT(nvmlDeviceGetBoardId)                                                                   \
  SMI_UINT(nvmlDeviceGetMultiGpuBoard)                                                             \
  SMI_UINT(nvmlDeviceGetModuleId)                                                                  \
  SMI_UINT(nvmlDeviceGetPersistenceMode)                                                           \
  SMI_UINT(nvmlDeviceGetDisplayMode)                                                               \
  SMI_UINT(nvmlDeviceGetDisplayActive)                                                             \
  SMI_UINT(nvmlDeviceGetAccountingMode)                                                            \
  SMI_UINT(nvmlDeviceGetAccountingBufferSize)                                                      \
  SMI_UINT(nvmlDeviceGetMaxPcieLinkGeneration)                                                     \
  SMI_UINT(nvmlDeviceGetCurrPcieLinkGeneration)                                                    \
  SMI_UINT(nvmlDeviceGetGpuMaxPcieLinkGeneration)                                                  \
  SMI_UINT(nvmlDeviceGetMaxPcieLinkWidth)                                                          \
  SMI_UINT(nvmlDeviceGetCurrPcieLinkWidth)                                                         \
  SMI_UINT(nvmlDeviceGetPcieReplayCounter)                                                         \
  X(nvmlDeviceGetPcieThroughput, (nvmlDevice_t, unsigned int, unsigned int *))                     \
  SMI_UINT(nvmlDeviceGetFanSpeed)                                                                  \
  SMI_UINT(nvmlDeviceGetPerformanceState)                                                          \
  SMI_UINT(nvmlDeviceGetComputeMode)                                                               \
  SMI_UINT(nvmlDeviceGetPowerUsage)                                                                \
  SMI_UINT(nvmlDeviceGetPowerManagementLimit)                                                      \
  SMI_UINT(nvmlDeviceGetPowerManagementDefaultLimit)                                               \
  SMI_UINT(nvmlDeviceGetEnforcedPowerLimit)                                                        \
  SMI_PAIR(nvmlDeviceGetPowerManagementLimitConstraints)                                           \
  SMI_PAIR(nvmlDeviceGetEncoderUtilization)                                                        \
  SMI_PAIR(nvmlDeviceGetDecoderUtilization)                                                        \
  SMI_PAIR(nvmlDeviceGetJpgUtilization)                                                            \
  SMI_PAIR(nvmlDeviceGetOfaUtilization)                                                            \
  SMI_PAIR(nvmlDeviceGetEccMode)                                                                   \
  SMI_PAIR(nvmlDeviceGetMigMode)                                                                   \
  X(nvmlDeviceGetUtilizationRates, (nvmlDevice_t, nvmlUtilization_t *))                            \
  X(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t, nvmlMemory_v2_t *))                                 \
  X(nvmlDeviceGetBAR1MemoryInfo, (nvmlDevice_t, nvmlBAR1Memory_t *))                               \
  X(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t, int *, int *))                              \
  X(nvmlDeviceGetTemperature, (nvmlDevice_t, unsigned int, unsigned int *))                        \
  X(nvmlDeviceGetTemperatureThreshold, (nvmlDevice_t, unsigned int, unsigned int *))               \
  X(nvmlDeviceGetMarginTemperature, (nvmlDevice_t, nvmlMarginTemperature_v1_t *))                  \
  X(nvmlDeviceGetClockInfo, (nvmlDevice_t, unsigned int, unsigned int *))                          \
  X(nvmlDeviceGetMaxClockInfo, (nvmlDevice_t, unsigned int, unsigned int *))                       \
  X(nvmlDeviceGetApplicationsClock, (nvmlDevice_t, unsigned int, unsigned int *))                  \
  X(nvmlDeviceGetDefaultApplicationsClock, (nvmlDevice_t, unsigned int, unsigned int *))           \
  X(nvmlDeviceGetCurrentClocksEventReasons, (nvmlDevice_t, unsigned long long *))                  \
  X(nvmlDeviceGetSupportedClocksEventReasons, (nvmlDevice_t, unsigned long long *))                \
  X(nvmlDeviceGetTotalEccErrors, (nvmlDevice_t, unsigned int, unsigned int, unsigned long long *)) \
  X(nvmlDeviceGetMemoryErrorCounter,                                                               \
    (nvmlDevice_t, unsigned int, unsigned int, unsigned int, unsigned long long *))                \
  X(nvmlDeviceGetRetiredPages, (nvmlDevice_t, unsigned int, unsigned int *, unsigned long long *)) \
  SMI_UINT(nvmlDeviceGetRetiredPagesPendingStatus)                                                 \
  X(nvmlDeviceGetRemappedRows,                                                                     \
    (nvmlDevice_t, unsigned int *, unsigned int *, unsigned int *, unsigned int *))                \
  X(nvmlDeviceGetFieldValues, (nvmlDevice_t, int, nvmlFieldValue_t *))                             \
  X(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *))  \
  X(nvmlDeviceGetMPSComputeRunningProcesses_v3,                                                    \
    (nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *))                                           \
  X(nvmlDeviceGetProcessUtilization,                                                               \
    (nvmlDevice_t, nvmlProcessUtilizationSample_t *, unsigned int *, unsigned long long))          \
  X(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (nvmlDevice_t, nvmlDevice_t *))                  \
  X(nvmlDeviceGetMigDeviceHandleByIndex, (nvmlDevice_t, unsigned int, nvmlDevice_t *))             \
  SMI_UINT(nvmlDeviceGetGpuInstanceId)                                                             \
  SMI_UINT(nvmlDeviceGetComputeInstanceId)                                                         \
  X(nvmlDeviceGetAttributes_v2, (nvmlDevice_t, nvmlDeviceAttributes_t *))                          \
  X(nvmlDeviceGetGpuInstanceProfileInfoV,                                                          \
    (nvmlDevice_t, unsigned int, nvmlGpuInstanceProfileInfo_v2_t *))                               \
  X(nvmlDeviceGetGpuInstanceRemainingCapacity, (nvmlDevice_t, unsigned int, unsigned int *))       \
  X(nvmlDeviceGetGpuInstancePossiblePlacements_v2,                                                 \
    (nvmlDevice_t, unsigned int, nvmlGpuInstancePlacement_t *, unsigned int *))                    \
  X(nvmlDeviceGetGpuInstances, (nvmlDevice_t, unsigned int, nvmlGpuInstance_t *, unsigned int *))  \
  X(nvmlDeviceGetGpuInstanceById, (nvmlDevice_t, unsigned int, nvmlGpuInstance_t *))               \
  X(nvmlGpuInstanceGetInfo, (nvmlGpuInstance_t, nvmlGpuInstanceInfo_t *))                          \
  X(nvmlGpuInstanceGetComputeInstanceProfileInfoV,                                                 \
    (nvmlGpuInstance_t, unsigned int, unsigned int, nvmlComputeInstanceProfileInfo_v2_t *))        \
  X(nvmlGpuInstanceGetComputeInstanceRemainingCapacity,                                            \
    (nvmlGpuInstance_t, unsigned int, unsigned int *))                                             \
  X(nvmlGpuInstanceGetComputeInstances,                                                            \
    (nvmlGpuInstance_t, unsigned int, nvmlComputeInstance_t *, unsigned int *))                    \
  X(nvmlGpuInstanceGetComputeInstanceById,                                                         \
    (nvmlGpuInstance_t, unsigned int, nvmlComputeInstance_t *))                                    \
  X(nvmlComputeInstanceGetInfo_v2, (nvmlComputeInstance_t, nvmlComputeInstanceInfo_t *))           \
  X(nvmlDeviceCreateGpuInstance, (nvmlDevice_t, unsigned int, nvmlGpuInstance_t *))                \
  X(nvmlDeviceCreateGpuInstanceWithPlacement,                                                      \
    (nvmlDevice_t, unsigned int, const nvmlGpuInstancePlacement_t *, nvmlGpuInstance_t *))         \
  X(nvmlGpuInstanceCreateComputeInstance,                                                          \
    (nvmlGpuInstance_t, unsigned int, nvmlComputeInstance_t *))                                    \
  X(nvmlGpuInstanceDestroy, (nvmlGpuInstance_t))                                                   \
  X(nvmlComputeInstanceDestroy, (nvmlComputeInstance_t))                                           \
  X(nvmlDeviceSetMigMode, (nvmlDevice_t, unsigned int, nvmlReturn_t *))                            \
  X(nvmlDeviceSetComputeMode, (nvmlDevice_t, unsigned int))                                        \
  X(nvmlDeviceSetPersistenceMode, (nvmlDevice_t, unsigned int))

typedef struct smi_functions {
#define X(name, arguments) nvmlReturn_t(*name) arguments;
  SMI_FUNCTIONS
#undef X
  const char *(*nvmlErrorString)(nvmlReturn_t);
  // The simulated library's own, by the machine's numbers of its GPUs (simulated/nvml/times.h).
  int (*allotSimulatedReset)(const char *, unsigned int);
  int (*allotSimulatedSetTimeslice)(const char *, unsigned int, unsigned int);
} smi_functions;

extern smi_functions nvml;

// The exit statuses of nvidia-smi(1).
enum { SMI_INVALID = 2, SMI_NO_PERMISSION = 4, SMI_NOT_FOUND = 6, SMI_NO_DRIVER = 9 };

// Loads and initialises NVML; prints why it cannot, and returns the exit status.
int smi_start(void);

// ---- gpus.c: the GPUs, and what was asked of them ----

typedef struct smi_gpu {
  nvmlDevice_t device;
  unsigned int index, minor;
  nvmlReturn_t problem;  // it does not answer
  char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE], name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
  char bus_id[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
  bool has_mig;  // it can, and so answers for its mode
  unsigned int mig, mig_pending;
} smi_gpu;

enum { SMI_GPUS = 32, SMI_PROCESSES = 1024, SMI_MIG_DEVICES = 8 };

typedef struct smi_list {
  unsigned int attached, count;  // in all; those that were asked for
  smi_gpu gpus[SMI_GPUS];
} smi_list;

// The GPUs of `-i` (indices, UUIDs, bus ids and serial numbers, by commas), NULL: all. Returns an
// exit status.
int smi_list_gpus(const char *wanted, smi_list *list);
// Says that a GPU does not answer.
void smi_report_problem(const smi_gpu *gpu, FILE *out);
// The MIG devices of a GPU; how many.
unsigned int smi_mig_devices(const smi_gpu *gpu, nvmlDevice_t *devices);

typedef struct smi_process {
  nvmlProcessInfo_t info;
  const char *type;  // C, or M+C for a client of MPS
  char name[256];
} smi_process;

unsigned int smi_processes(const smi_gpu *gpu, smi_process *processes);
// "N/A" for what is no MIG instance.
const char *smi_instance(unsigned int id, char *text, size_t room);
void smi_timestamp(char *text, size_t room, const char *format);

// ---- fields.c: every value that can be asked for by its name ----

typedef struct smi_field smi_field;

const smi_field *smi_find_field(const char *name, size_t length);
const smi_field *smi_report_field(const char *name);  // of the full report, too
const char *smi_field_names(const smi_field *field);  // by spaces; the first one is shown
const char *smi_field_unit(const smi_field *field);
const smi_field *smi_next_field(const smi_field *field);  // NULL: the first one
// The value without its unit; false if the GPU has none ("N/A").
bool smi_value(const smi_field *field, const smi_gpu *gpu, char *text, size_t room);

// ---- the commands; each returns the exit status ----

int smi_show_table(const smi_list *list);
int smi_show_list(const smi_list *list);
int smi_show_report(const smi_list *list, const char *sections, bool xml);
typedef enum smi_query { SMI_QUERY_GPUS, SMI_QUERY_PROCESSES } smi_query;
int smi_show_query(const smi_list *list, smi_query what, const char *names, const char *format,
                   bool heads);
int smi_help_query(smi_query what);
int smi_mig(int count, char **words);
int smi_monitor_devices(int count, char **words);
int smi_monitor_processes(int count, char **words);
int smi_compute_policy(int count, char **words);

typedef struct smi_changes {
  const char *compute_mode, *persistence, *mig;
  bool reset;
} smi_changes;

int smi_change(const smi_list *list, const smi_changes *changes);
int smi_refuse(const char *option);
// An error of NVML as an exit status, which is its number.
int smi_failed(nvmlReturn_t result);

#endif
