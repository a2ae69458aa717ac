// SPDX-License-Identifier: Apache-2.0
// The MIG part of NVML's binary interface; nvml_abi.h includes it, and has the types it needs.
#ifndef ALLOTMENT_NVML_ABI_MIG_H
#define ALLOTMENT_NVML_ABI_MIG_H

enum {
  NVML_DEVICE_MIG_DISABLE = 0x0,
  NVML_DEVICE_MIG_ENABLE = 0x1,
  NVML_GPU_INSTANCE_PROFILE_1_SLICE = 0x0,
  NVML_GPU_INSTANCE_PROFILE_2_SLICE = 0x1,
  NVML_GPU_INSTANCE_PROFILE_3_SLICE = 0x2,
  NVML_GPU_INSTANCE_PROFILE_4_SLICE = 0x3,
  NVML_GPU_INSTANCE_PROFILE_7_SLICE = 0x4,
  NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE = 0x0,
  NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE = 0x1,
  NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE = 0x2,
  NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE = 0x3,
  NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE = 0x4,
  NVML_COMPUTE_INSTANCE_PROFILE_8_SLICE = 0x5,
  NVML_COMPUTE_INSTANCE_PROFILE_6_SLICE = 0x6,
  NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1 = 0x7,
  NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED = 0x0
};

typedef struct nvmlGpuInstancePlacement_st {
  unsigned int start;
  unsigned int size;
} nvmlGpuInstancePlacement_t;

typedef struct nvmlGpuInstanceProfileInfo_st {
  unsigned int id;
  unsigned int isP2pSupported;
  unsigned int sliceCount;
  unsigned int instanceCount;
  unsigned int multiprocessorCount;
  unsigned int copyEngineCount;
  unsigned int decoderCount;
  unsigned int encoderCount;
  unsigned int jpegCount;
  unsigned int ofaCount;
  unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;

typedef struct nvmlGpuInstanceProfileInfo_v2_st {
  unsigned int version;
  unsigned int id;
  unsigned int isP2pSupported;
  unsigned int sliceCount;
  unsigned int instanceCount;
  unsigned int multiprocessorCount;
  unsigned int copyEngineCount;
  unsigned int decoderCount;
  unsigned int encoderCount;
  unsigned int jpegCount;
  unsigned int ofaCount;
  unsigned long long memorySizeMB;
  char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
} nvmlGpuInstanceProfileInfo_v2_t;
#define nvmlGpuInstanceProfileInfo_v2 NVML_VERSION_OF(nvmlGpuInstanceProfileInfo_v2_t, 2)

typedef struct nvmlGpuInstanceProfileInfo_v3_st {
  unsigned int version;
  unsigned int id;
  unsigned int sliceCount;
  unsigned int instanceCount;
  unsigned int multiprocessorCount;
  unsigned int copyEngineCount;
  unsigned int decoderCount;
  unsigned int encoderCount;
  unsigned int jpegCount;
  unsigned int ofaCount;
  unsigned long long memorySizeMB;
  char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
  unsigned int capabilities;
} nvmlGpuInstanceProfileInfo_v3_t;
#define nvmlGpuInstanceProfileInfo_v3 NVML_VERSION_OF(nvmlGpuInstanceProfileInfo_v3_t, 3)

typedef struct nvmlGpuInstanceInfo_st {
  nvmlDevice_t device;  // the whole GPU
  unsigned int id;
  unsigned int profileId;
  nvmlGpuInstancePlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct nvmlComputeInstancePlacement_st {
  unsigned int start;
  unsigned int size;
} nvmlComputeInstancePlacement_t;

typedef struct nvmlComputeInstanceProfileInfo_st {
  unsigned int id;
  unsigned int sliceCount;
  unsigned int instanceCount;
  unsigned int multiprocessorCount;
  unsigned int sharedCopyEngineCount;
  unsigned int sharedDecoderCount;
  unsigned int sharedEncoderCount;
  unsigned int sharedJpegCount;
  unsigned int sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;

typedef struct nvmlComputeInstanceProfileInfo_v2_st {
  unsigned int version;
  unsigned int id;
  unsigned int sliceCount;
  unsigned int instanceCount;
  unsigned int multiprocessorCount;
  unsigned int sharedCopyEngineCount;
  unsigned int sharedDecoderCount;
  unsigned int sharedEncoderCount;
  unsigned int sharedJpegCount;
  unsigned int sharedOfaCount;
  char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
} nvmlComputeInstanceProfileInfo_v2_t;
#define nvmlComputeInstanceProfileInfo_v2 NVML_VERSION_OF(nvmlComputeInstanceProfileInfo_v2_t, 2)

typedef struct nvmlComputeInstanceProfileInfo_v3_st {
  unsigned int version;
  unsigned int id;
  unsigned int sliceCount;
  unsigned int instanceCount;
  unsigned int multiprocessorCount;
  unsigned int sharedCopyEngineCount;
  unsigned int sharedDecoderCount;
  unsigned int sharedEncoderCount;
  unsigned int sharedJpegCount;
  unsigned int sharedOfaCount;
  char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
  unsigned int capabilities;
} nvmlComputeInstanceProfileInfo_v3_t;
#define nvmlComputeInstanceProfileInfo_v3 NVML_VERSION_OF(nvmlComputeInstanceProfileInfo_v3_t, 3)

typedef struct nvmlComputeInstanceInfo_st {  // of nvmlComputeInstanceGetInfo_v2
  nvmlDevice_t device;                       // the MIG device
  nvmlGpuInstance_t gpuInstance;
  unsigned int id;
  unsigned int profileId;
  nvmlComputeInstancePlacement_t placement;
} nvmlComputeInstanceInfo_t;

#endif
