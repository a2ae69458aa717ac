// SPDX-License-Identifier: Apache-2.0
// NVML's binary interface, declared by hand: what the simulated libnvidia-ml.so.1 and the shim
// share.
//
// Only facts of the ABI: names, numbers, layouts. tests/native/test_nvml_abi.py compares
// every structure below with nvidia-ml-py's ctypes declarations and, where it is installed, with
// nvml.h.
//
// Function names carry their version (`nvmlInit_v2`): nothing is renamed by macros, because both
// libraries define old and new entry points side by side.
#ifndef ALLOTMENT_NVML_ABI_H
#define ALLOTMENT_NVML_ABI_H

// ---- results -----------------------------------------------------------------------------------

typedef enum nvmlReturn_enum {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NO_PERMISSION = 4,
  NVML_ERROR_ALREADY_INITIALIZED = 5,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_INSUFFICIENT_POWER = 8,
  NVML_ERROR_DRIVER_NOT_LOADED = 9,
  NVML_ERROR_TIMEOUT = 10,
  NVML_ERROR_IRQ_ISSUE = 11,
  NVML_ERROR_LIBRARY_NOT_FOUND = 12,
  NVML_ERROR_FUNCTION_NOT_FOUND = 13,
  NVML_ERROR_CORRUPTED_INFOROM = 14,
  NVML_ERROR_GPU_IS_LOST = 15,
  NVML_ERROR_RESET_REQUIRED = 16,
  NVML_ERROR_OPERATING_SYSTEM = 17,
  NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
  NVML_ERROR_IN_USE = 19,
  NVML_ERROR_MEMORY = 20,
  NVML_ERROR_NO_DATA = 21,
  NVML_ERROR_VGPU_ECC_NOT_SUPPORTED = 22,
  NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
  NVML_ERROR_FREQ_NOT_SUPPORTED = 24,
  NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
  NVML_ERROR_DEPRECATED = 26,
  NVML_ERROR_NOT_READY = 27,
  NVML_ERROR_GPU_NOT_FOUND = 28,
  NVML_ERROR_INVALID_STATE = 29,
  NVML_ERROR_RESET_TYPE_NOT_SUPPORTED = 30,
  NVML_ERROR_UNKNOWN = 999
} nvmlReturn_t;

// What a versioned structure's `version` member must hold.
#define NVML_VERSION_OF(type, number) ((unsigned int)(sizeof(type) | ((number##u) << 24u)))

#define NVML_VALUE_NOT_AVAILABLE (-1)
#define NVML_NO_INSTANCE 0xFFFFFFFFu /* gpuInstanceId, computeInstanceId of what is not MIG */

// ---- handles and buffers -----------------------------------------------------------------------

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlUnit_st *nvmlUnit_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;
typedef struct nvmlGpuInstance_st *nvmlGpuInstance_t;
typedef struct nvmlComputeInstance_st *nvmlComputeInstance_t;

#define NVML_INIT_FLAG_NO_GPUS 1u
#define NVML_INIT_FLAG_NO_ATTACH 2u

#define NVML_DEVICE_UUID_BUFFER_SIZE 80
#define NVML_DEVICE_UUID_V2_BUFFER_SIZE 96
#define NVML_DEVICE_NAME_BUFFER_SIZE 64
#define NVML_DEVICE_NAME_V2_BUFFER_SIZE 96
#define NVML_DEVICE_SERIAL_BUFFER_SIZE 30
#define NVML_DEVICE_PART_NUMBER_BUFFER_SIZE 80
#define NVML_DEVICE_VBIOS_VERSION_BUFFER_SIZE 32
#define NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE 32
#define NVML_DEVICE_PCI_BUS_ID_BUFFER_V2_SIZE 16
#define NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE 80
#define NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE 80

typedef enum nvmlEnableState_enum {
  NVML_FEATURE_DISABLED = 0,
  NVML_FEATURE_ENABLED = 1
} nvmlEnableState_t;

// ---- identity ----------------------------------------------------------------------------------

typedef struct nvmlPciInfo_st {  // nvmlDeviceGetPciInfo_v3; v1 ends before pciSubSystemId
  char busIdLegacy[NVML_DEVICE_PCI_BUS_ID_BUFFER_V2_SIZE];  // "0000:07:00.0"
  unsigned int domain;
  unsigned int bus;
  unsigned int device;
  unsigned int pciDeviceId;  // device << 16 | vendor
  unsigned int pciSubSystemId;
  char busId[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];  // "00000000:07:00.0"
} nvmlPciInfo_t;

typedef struct nvmlPciInfoExt_v1_st {
  unsigned int version;
  unsigned int domain;
  unsigned int bus;
  unsigned int device;
  unsigned int pciDeviceId;
  unsigned int pciSubSystemId;
  unsigned int baseClass;
  unsigned int subClass;
  char busId[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
} nvmlPciInfoExt_v1_t;
#define nvmlPciInfoExt_v1 NVML_VERSION_OF(nvmlPciInfoExt_v1_t, 1)

typedef struct nvmlUUID_v1_st {
  unsigned int version;
  unsigned int type;  // NVML_UUID_TYPE_*
  union {
    char str[41];
    unsigned char bytes[16];
  } value;
} nvmlUUID_v1_t;
#define nvmlUUID_v1 NVML_VERSION_OF(nvmlUUID_v1_t, 1)
enum { NVML_UUID_TYPE_NONE = 0, NVML_UUID_TYPE_ASCII = 1, NVML_UUID_TYPE_BINARY = 2 };

typedef unsigned int nvmlBrandType_t;
enum {
  NVML_BRAND_UNKNOWN = 0,
  NVML_BRAND_TESLA = 2,
  NVML_BRAND_GEFORCE = 5,
  NVML_BRAND_NVIDIA = 14,
  NVML_BRAND_GEFORCE_RTX = 15
};

typedef unsigned int nvmlDeviceArchitecture_t;
enum {
  NVML_DEVICE_ARCH_PASCAL = 4,
  NVML_DEVICE_ARCH_VOLTA = 5,
  NVML_DEVICE_ARCH_TURING = 6,
  NVML_DEVICE_ARCH_AMPERE = 7,
  NVML_DEVICE_ARCH_ADA = 8,
  NVML_DEVICE_ARCH_HOPPER = 9,
  NVML_DEVICE_ARCH_BLACKWELL = 10
};

typedef struct nvmlDeviceAttributes_st {
  unsigned int multiprocessorCount;
  unsigned int sharedCopyEngineCount;
  unsigned int sharedDecoderCount;
  unsigned int sharedEncoderCount;
  unsigned int sharedJpegCount;
  unsigned int sharedOfaCount;
  unsigned int gpuInstanceSliceCount;
  unsigned int computeInstanceSliceCount;
  unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct nvmlSystemDriverBranchInfo_v1_st {
  unsigned int version;
  char branch[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE];
} nvmlSystemDriverBranchInfo_v1_t;
#define nvmlSystemDriverBranchInfo_v1 NVML_VERSION_OF(nvmlSystemDriverBranchInfo_v1_t, 1)

// ---- memory ------------------------------------------------------------------------------------

typedef struct nvmlMemory_st {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;  // what the driver reserves included
} nvmlMemory_t;

typedef struct nvmlMemory_v2_st {
  unsigned int version;
  unsigned long long total;
  unsigned long long reserved;
  unsigned long long free;
  unsigned long long used;  // without reserved
} nvmlMemory_v2_t;
#define nvmlMemory_v2 NVML_VERSION_OF(nvmlMemory_v2_t, 2)

typedef struct nvmlBAR1Memory_st {
  unsigned long long bar1Total;
  unsigned long long bar1Free;
  unsigned long long bar1Used;
} nvmlBAR1Memory_t;

// ---- processes ---------------------------------------------------------------------------------

typedef struct nvmlProcessInfo_v1_st {
  unsigned int pid;
  unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct nvmlProcessInfo_v2_st {  // of the _v2 and of the _v3 calls
  unsigned int pid;
  unsigned long long usedGpuMemory;
  unsigned int gpuInstanceId;
  unsigned int computeInstanceId;
} nvmlProcessInfo_v2_t, nvmlProcessInfo_t;

typedef struct nvmlProcessDetail_v1_st {
  unsigned int pid;
  unsigned long long usedGpuMemory;
  unsigned int gpuInstanceId;
  unsigned int computeInstanceId;
  unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;

enum {
  NVML_PROCESS_MODE_COMPUTE = 0,
  NVML_PROCESS_MODE_GRAPHICS = 1,
  NVML_PROCESS_MODE_MPS = 2,
  NVML_PROCESS_MODE_ALL = 3
};

typedef struct nvmlProcessDetailList_v1_st {
  unsigned int version;
  unsigned int mode;                 // NVML_PROCESS_MODE_*
  unsigned int numProcArrayEntries;  // in: room; out: entries
  nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_v1_t;
#define nvmlProcessDetailList_v1 NVML_VERSION_OF(nvmlProcessDetailList_v1_t, 1)

typedef struct nvmlProcessUtilizationSample_st {
  unsigned int pid;
  unsigned long long timeStamp;  // microseconds
  unsigned int smUtil;
  unsigned int memUtil;
  unsigned int encUtil;
  unsigned int decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct nvmlProcessUtilizationInfo_v1_st {
  unsigned long long timeStamp;
  unsigned int pid;
  unsigned int smUtil;
  unsigned int memUtil;
  unsigned int encUtil;
  unsigned int decUtil;
  unsigned int jpgUtil;
  unsigned int ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;

typedef struct nvmlProcessesUtilizationInfo_v1_st {
  unsigned int version;
  unsigned int processSamplesCount;
  unsigned long long lastSeenTimeStamp;
  nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_v1_t;
#define nvmlProcessesUtilizationInfo_v1 NVML_VERSION_OF(nvmlProcessesUtilizationInfo_v1_t, 1)

typedef struct nvmlAccountingStats_st {
  unsigned int gpuUtilization;
  unsigned int memoryUtilization;
  unsigned long long maxMemoryUsage;
  unsigned long long time;       // milliseconds
  unsigned long long startTime;  // microseconds since the epoch
  unsigned int isRunning;
  unsigned int reserved[5];
} nvmlAccountingStats_t;

// ---- utilisation and samples -------------------------------------------------------------------

typedef struct nvmlUtilization_st {
  unsigned int gpu;
  unsigned int memory;
} nvmlUtilization_t;

typedef unsigned int nvmlSamplingType_t;
enum {
  NVML_TOTAL_POWER_SAMPLES = 0,
  NVML_GPU_UTILIZATION_SAMPLES = 1,
  NVML_MEMORY_UTILIZATION_SAMPLES = 2,
  NVML_ENC_UTILIZATION_SAMPLES = 3,
  NVML_DEC_UTILIZATION_SAMPLES = 4,
  NVML_PROCESSOR_CLK_SAMPLES = 5,
  NVML_MEMORY_CLK_SAMPLES = 6,
  NVML_SAMPLING_TYPES = 10
};

typedef enum nvmlValueType_enum {
  NVML_VALUE_TYPE_DOUBLE = 0,
  NVML_VALUE_TYPE_UNSIGNED_INT = 1,
  NVML_VALUE_TYPE_UNSIGNED_LONG = 2,
  NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
  NVML_VALUE_TYPE_SIGNED_LONG_LONG = 4,
  NVML_VALUE_TYPE_SIGNED_INT = 5,
  NVML_VALUE_TYPE_UNSIGNED_SHORT = 6
} nvmlValueType_t;

typedef union nvmlValue_st {
  double dVal;
  int siVal;
  unsigned int uiVal;
  unsigned long ulVal;
  unsigned long long ullVal;
  signed long long sllVal;
  unsigned short usVal;
} nvmlValue_t;

typedef struct nvmlSample_st {
  unsigned long long timeStamp;
  nvmlValue_t sampleValue;
} nvmlSample_t;

typedef struct nvmlViolationTime_st {
  unsigned long long referenceTime;
  unsigned long long violationTime;
} nvmlViolationTime_t;

typedef struct nvmlGpuDynamicPstatesInfo_st {
  unsigned int flags;
  struct {
    unsigned int bIsPresent;
    unsigned int percentage;
    unsigned int incThreshold;
    unsigned int decThreshold;
  } utilization[8];
} nvmlGpuDynamicPstatesInfo_t;

typedef struct nvmlEncoderSessionInfo_st {
  unsigned int sessionId;
  unsigned int pid;
  unsigned int vgpuInstance;
  unsigned int codecType;
  unsigned int hResolution;
  unsigned int vResolution;
  unsigned int averageFps;
  unsigned int averageLatency;
} nvmlEncoderSessionInfo_t;

typedef struct nvmlFBCStats_st {
  unsigned int sessionsCount;
  unsigned int averageFPS;
  unsigned int averageLatency;
} nvmlFBCStats_t;

// ---- clocks, power, temperature ----------------------------------------------------------------

typedef unsigned int nvmlClockType_t;
enum {
  NVML_CLOCK_GRAPHICS = 0,
  NVML_CLOCK_SM = 1,
  NVML_CLOCK_MEM = 2,
  NVML_CLOCK_VIDEO = 3,
  NVML_CLOCK_COUNT = 4
};
typedef unsigned int nvmlClockId_t;
enum {
  NVML_CLOCK_ID_CURRENT = 0,
  NVML_CLOCK_ID_APP_CLOCK_TARGET = 1,
  NVML_CLOCK_ID_APP_CLOCK_DEFAULT = 2,
  NVML_CLOCK_ID_CUSTOMER_BOOST_MAX = 3,
  NVML_CLOCK_ID_COUNT = 4
};

typedef unsigned int nvmlPstates_t;
enum { NVML_PSTATE_0 = 0, NVML_PSTATE_8 = 8, NVML_PSTATE_UNKNOWN = 32, NVML_PSTATE_ROOM = 16 };

enum {
  NVML_CLOCKS_EVENT_REASON_NONE = 0x0,
  NVML_CLOCKS_EVENT_REASON_GPU_IDLE = 0x1,
  NVML_CLOCKS_EVENT_REASON_APPLICATIONS_CLOCKS = 0x2,
  NVML_CLOCKS_EVENT_REASON_SW_POWER_CAP = 0x4,
  NVML_CLOCKS_EVENT_REASON_HW_SLOWDOWN = 0x8,
  NVML_CLOCKS_EVENT_REASON_SYNC_BOOST = 0x10,
  NVML_CLOCKS_EVENT_REASON_SW_THERMAL = 0x20,
  NVML_CLOCKS_EVENT_REASON_HW_THERMAL = 0x40,
  NVML_CLOCKS_EVENT_REASON_HW_POWER_BRAKE = 0x80
};

typedef unsigned int nvmlTemperatureSensors_t;
enum { NVML_TEMPERATURE_GPU = 0 };
typedef unsigned int nvmlTemperatureThresholds_t;
enum {
  NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0,
  NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1,
  NVML_TEMPERATURE_THRESHOLD_MEM_MAX = 2,
  NVML_TEMPERATURE_THRESHOLD_GPU_MAX = 3,
  NVML_TEMPERATURE_THRESHOLD_COUNT = 8
};
typedef struct nvmlTemperature_v1_st {
  unsigned int version;
  nvmlTemperatureSensors_t sensorType;
  int temperature;
} nvmlTemperature_v1_t;
#define nvmlTemperature_v1 NVML_VERSION_OF(nvmlTemperature_v1_t, 1)

typedef struct nvmlMarginTemperature_v1_st {
  unsigned int version;
  int marginTemperature;
} nvmlMarginTemperature_v1_t;
#define nvmlMarginTemperature_v1 NVML_VERSION_OF(nvmlMarginTemperature_v1_t, 1)

typedef struct nvmlFanSpeedInfo_v1_st {
  unsigned int version;
  unsigned int fan;
  unsigned int speed;  // rotations a minute
} nvmlFanSpeedInfo_v1_t;
#define nvmlFanSpeedInfo_v1 NVML_VERSION_OF(nvmlFanSpeedInfo_v1_t, 1)

typedef unsigned int nvmlComputeMode_t;
enum {
  NVML_COMPUTEMODE_DEFAULT = 0,
  NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1,
  NVML_COMPUTEMODE_PROHIBITED = 2,
  NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3,
};

// ---- errors of the memory ----------------------------------------------------------------------

typedef unsigned int nvmlMemoryErrorType_t;
enum { NVML_MEMORY_ERROR_TYPE_CORRECTED = 0, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1 };
typedef unsigned int nvmlEccCounterType_t;
enum { NVML_VOLATILE_ECC = 0, NVML_AGGREGATE_ECC = 1 };
typedef unsigned int nvmlMemoryLocation_t;
enum {
  NVML_MEMORY_LOCATION_L1_CACHE = 0,
  NVML_MEMORY_LOCATION_L2_CACHE = 1,
  NVML_MEMORY_LOCATION_DEVICE_MEMORY = 2,
  NVML_MEMORY_LOCATION_REGISTER_FILE = 3,
  NVML_MEMORY_LOCATION_TEXTURE_MEMORY = 4,
  NVML_MEMORY_LOCATION_TEXTURE_SHM = 5,
  NVML_MEMORY_LOCATION_CBU = 6,
  NVML_MEMORY_LOCATION_SRAM = 7,
  NVML_MEMORY_LOCATION_COUNT = 8
};
typedef struct nvmlEccErrorCounts_st {
  unsigned long long l1Cache;
  unsigned long long l2Cache;
  unsigned long long deviceMemory;
  unsigned long long registerFile;
} nvmlEccErrorCounts_t;

typedef struct nvmlEccSramErrorStatus_v1_st {
  unsigned int version;
  unsigned long long aggregateUncParity;
  unsigned long long aggregateUncSecDed;
  unsigned long long aggregateCor;
  unsigned long long volatileUncParity;
  unsigned long long volatileUncSecDed;
  unsigned long long volatileCor;
  unsigned long long aggregateUncBucketL2;
  unsigned long long aggregateUncBucketSm;
  unsigned long long aggregateUncBucketPcie;
  unsigned long long aggregateUncBucketMcu;
  unsigned long long aggregateUncBucketOther;
  unsigned int bThresholdExceeded;
} nvmlEccSramErrorStatus_v1_t;
#define nvmlEccSramErrorStatus_v1 NVML_VERSION_OF(nvmlEccSramErrorStatus_v1_t, 1)

typedef unsigned int nvmlPageRetirementCause_t;
enum {
  NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS = 0,
  NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
};

typedef struct nvmlRowRemapperHistogramValues_st {
  unsigned int max;
  unsigned int high;
  unsigned int partial;
  unsigned int low;
  unsigned int none;
} nvmlRowRemapperHistogramValues_t;

// ---- links and topology ------------------------------------------------------------------------

typedef unsigned int nvmlNvLinkCapability_t;
enum {
  NVML_NVLINK_CAP_P2P_SUPPORTED = 0,
  NVML_NVLINK_CAP_SYSMEM_ACCESS = 1,
  NVML_NVLINK_CAP_P2P_ATOMICS = 2,
  NVML_NVLINK_CAP_SYSMEM_ATOMICS = 3,
  NVML_NVLINK_CAP_SLI_BRIDGE = 4,
  NVML_NVLINK_CAP_VALID = 5,
  NVML_NVLINK_CAP_COUNT = 6
};
typedef unsigned int nvmlNvLinkErrorCounter_t;
enum { NVML_NVLINK_ERROR_COUNT = 5 };
typedef unsigned int nvmlIntNvLinkDeviceType_t;
enum {
  NVML_NVLINK_DEVICE_TYPE_GPU = 0,
  NVML_NVLINK_DEVICE_TYPE_SWITCH = 2,
  NVML_NVLINK_DEVICE_TYPE_UNKNOWN = 0xFF
};

typedef unsigned int nvmlGpuTopologyLevel_t;
enum {
  NVML_TOPOLOGY_INTERNAL = 0,
  NVML_TOPOLOGY_SINGLE = 10,
  NVML_TOPOLOGY_MULTIPLE = 20,
  NVML_TOPOLOGY_HOSTBRIDGE = 30,
  NVML_TOPOLOGY_NODE = 40,
  NVML_TOPOLOGY_SYSTEM = 50
};
typedef unsigned int nvmlGpuP2PStatus_t;
enum {
  NVML_P2P_STATUS_OK = 0,
  NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED = 1,
  NVML_P2P_STATUS_GPU_NOT_SUPPORTED = 2,
  NVML_P2P_STATUS_NOT_SUPPORTED = 5
};
typedef unsigned int nvmlGpuP2PCapsIndex_t;
enum {
  NVML_P2P_CAPS_INDEX_READ = 0,
  NVML_P2P_CAPS_INDEX_WRITE = 1,
  NVML_P2P_CAPS_INDEX_NVLINK = 2,
  NVML_P2P_CAPS_INDEX_ATOMICS = 3,
  NVML_P2P_CAPS_INDEX_PCI = 4,
  NVML_P2P_CAPS_INDEX_UNKNOWN = 5
};
typedef unsigned int nvmlPcieUtilCounter_t;
enum { NVML_PCIE_UTIL_TX_BYTES = 0, NVML_PCIE_UTIL_RX_BYTES = 1 };
typedef unsigned int nvmlAffinityScope_t;
enum { NVML_AFFINITY_SCOPE_NODE = 0, NVML_AFFINITY_SCOPE_SOCKET = 1 };

typedef struct nvmlGpuFabricInfo_st {
  unsigned char clusterUuid[16];
  nvmlReturn_t status;
  unsigned int cliqueId;
  unsigned char state;
} nvmlGpuFabricInfo_t;

typedef struct nvmlGpuFabricInfo_v2_st {
  unsigned int version;
  unsigned char clusterUuid[16];
  nvmlReturn_t status;
  unsigned int cliqueId;
  unsigned char state;
  unsigned int healthMask;
} nvmlGpuFabricInfo_v2_t;
#define nvmlGpuFabricInfo_v2 NVML_VERSION_OF(nvmlGpuFabricInfo_v2_t, 2)

typedef struct nvmlGpuFabricInfo_v3_st {
  unsigned int version;
  unsigned char clusterUuid[16];
  nvmlReturn_t status;
  unsigned int cliqueId;
  unsigned char state;
  unsigned int healthMask;
  unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;
#define nvmlGpuFabricInfo_v3 NVML_VERSION_OF(nvmlGpuFabricInfo_v3_t, 3)

// ---- MIG ---------------------------------------------------------------------------------------

#include "nvml_abi_mig.h"

// ---- events ------------------------------------------------------------------------------------

#define NVML_EVENT_SINGLE_BIT_ECC_ERROR 0x1ull
#define NVML_EVENT_DOUBLE_BIT_ECC_ERROR 0x2ull
#define NVML_EVENT_PSTATE 0x4ull
#define NVML_EVENT_XID_CRITICAL_ERROR 0x8ull
#define NVML_EVENT_CLOCK 0x10ull
#define NVML_EVENT_POWER_SOURCE_CHANGE 0x80ull
#define NVML_EVENT_MIG_CONFIG_CHANGE 0x100ull

typedef struct nvmlEventData_st {  // of nvmlEventSetWait_v2; v1 ends before gpuInstanceId
  nvmlDevice_t device;
  unsigned long long eventType;
  unsigned long long eventData;  // the XID
  unsigned int gpuInstanceId;
  unsigned int computeInstanceId;
} nvmlEventData_t;

// ---- field values ------------------------------------------------------------------------------

typedef struct nvmlFieldValue_st {
  unsigned int fieldId;
  unsigned int scopeId;
  long long timestamp;  // microseconds since the epoch
  long long latencyUsec;
  nvmlValueType_t valueType;
  nvmlReturn_t nvmlReturn;
  nvmlValue_t value;
} nvmlFieldValue_t;

#endif
