// SPDX-License-Identifier: Apache-2.0
// Checkpoints: a process's memory on its GPUs put aside from outside, by its number, and back.
#ifndef ALLOTMENT_CUDA_ABI_CHECKPOINT_H
#define ALLOTMENT_CUDA_ABI_CHECKPOINT_H

#include "cuda_abi/graph.h"

typedef enum CUprocessState_enum {
  CU_PROCESS_STATE_RUNNING = 0,
  CU_PROCESS_STATE_LOCKED = 1,
  CU_PROCESS_STATE_CHECKPOINTED = 2,
  CU_PROCESS_STATE_FAILED = 3,
  CU_PROCESS_STATE_CHECKPOINTING = 4,
  CU_PROCESS_STATE_RESTORING = 5,
} CUprocessState;

typedef struct CUcheckpointCustomStoragePerDeviceData_st {
  CUdeviceptr devPtr;
  size_t size;
  CUstream stream;
} CUcheckpointCustomStoragePerDeviceData;

typedef struct CUIcheckpointOperation_st *CUcheckpointOperationHandle;

typedef struct CUcheckpointCustomStorageInfo_st {
  CUcheckpointOperationHandle handle;
  CUcheckpointCustomStoragePerDeviceData *perDeviceData;
  unsigned int deviceCount;
} CUcheckpointCustomStorageInfo;

typedef struct CUcheckpointLockArgs_st {
  unsigned int timeoutMs;
  unsigned int reserved0;
  uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct CUcheckpointCheckpointArgs_st {
  CUcheckpointCustomStorageInfo **customStorageInfo_out;
  char reserved[56];
} CUcheckpointCheckpointArgs;

typedef struct CUcheckpointGpuPair_st {
  CUuuid oldUuid;
  CUuuid newUuid;
} CUcheckpointGpuPair;

typedef struct CUcheckpointRestoreArgs_st {
  CUcheckpointGpuPair *gpuPairs;
  unsigned int gpuPairsCount;
  unsigned int padding0;
  CUcheckpointCustomStorageInfo **customStorageInfo_out;
  char reserved[40];
} CUcheckpointRestoreArgs;

typedef struct CUcheckpointUnlockArgs_st {
  uint64_t reserved[8];
} CUcheckpointUnlockArgs;

CU_ENTRY(cuCheckpointProcessGetRestoreThreadId, (int pid, int *tid));
CU_ENTRY(cuCheckpointProcessGetState, (int pid, CUprocessState *state));
CU_ENTRY(cuCheckpointProcessLock, (int pid, CUcheckpointLockArgs *args));
CU_ENTRY(cuCheckpointProcessCheckpoint, (int pid, CUcheckpointCheckpointArgs *args));
CU_ENTRY(cuCheckpointProcessRestore, (int pid, CUcheckpointRestoreArgs *args));
CU_ENTRY(cuCheckpointProcessUnlock, (int pid, CUcheckpointUnlockArgs *args));

#endif
