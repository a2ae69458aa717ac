// SPDX-License-Identifier: Apache-2.0
// Streams, events and stream capture.
#ifndef ALLOTMENT_CUDA_ABI_STREAM_H
#define ALLOTMENT_CUDA_ABI_STREAM_H

#include "context.h"

// The two handles that stand for a default stream: the one that all threads share and synchronises
// with every blocking stream, and the calling thread's own.
#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

typedef enum CUstream_flags {
  CU_STREAM_DEFAULT = 0,
  CU_STREAM_NON_BLOCKING = 1,
} CUstream_flags;

typedef enum CUevent_flags {
  CU_EVENT_DEFAULT = 0,
  CU_EVENT_BLOCKING_SYNC = 1,
  CU_EVENT_DISABLE_TIMING = 2,
  CU_EVENT_INTERPROCESS = 4,
} CUevent_flags;

typedef enum CUevent_record_flags {
  CU_EVENT_RECORD_DEFAULT = 0,
  CU_EVENT_RECORD_EXTERNAL = 1,
} CUevent_record_flags;

typedef enum CUevent_wait_flags {
  CU_EVENT_WAIT_DEFAULT = 0,
  CU_EVENT_WAIT_EXTERNAL = 1,
} CUevent_wait_flags;

typedef enum CUstreamWaitValue_flags {
  CU_STREAM_WAIT_VALUE_GEQ = 0,
  CU_STREAM_WAIT_VALUE_EQ = 1,
  CU_STREAM_WAIT_VALUE_AND = 2,
  CU_STREAM_WAIT_VALUE_NOR = 3,
  CU_STREAM_WAIT_VALUE_FLUSH = 0x40000000,
} CUstreamWaitValue_flags;

typedef enum CUstreamWriteValue_flags {
  CU_STREAM_WRITE_VALUE_DEFAULT = 0,
  CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1,
} CUstreamWriteValue_flags;

typedef enum CUstreamUpdateCaptureDependencies_flags {
  CU_STREAM_ADD_CAPTURE_DEPENDENCIES = 0,
  CU_STREAM_SET_CAPTURE_DEPENDENCIES = 1,
} CUstreamUpdateCaptureDependencies_flags;

typedef struct CUstream_st *CUstream;

typedef enum CUstreamCaptureMode {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
} CUstreamCaptureMode;

typedef struct CUevent_st *CUevent;

typedef struct CUgreenCtx_st *CUgreenCtx;

typedef void (*CUstreamCallback)(struct CUstream_st *, CUresult, void *);

typedef void (*CUhostFn)(void *);

typedef enum CUstreamBatchMemOpType {
  CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1,
  CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2,
  CU_STREAM_MEM_OP_WAIT_VALUE_64 = 4,
  CU_STREAM_MEM_OP_WRITE_VALUE_64 = 5,
  CU_STREAM_MEM_OP_BARRIER = 6,
  CU_STREAM_MEM_OP_ATOMIC_REDUCTION = 8,
  CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES = 3,
} CUstreamBatchMemOpType;

typedef enum CUstreamAtomicReductionOpType {
  CU_STREAM_ATOMIC_REDUCTION_OP_OR = 6,
  CU_STREAM_ATOMIC_REDUCTION_OP_AND = 5,
  CU_STREAM_ATOMIC_REDUCTION_OP_ADD = 0,
} CUstreamAtomicReductionOpType;

typedef enum CUstreamAtomicReductionDataType {
  CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32 = 14,
  CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64 = 22,
} CUstreamAtomicReductionDataType;

typedef union CUstreamBatchMemOpParams {
  CUstreamBatchMemOpType operation;
  struct {
    CUstreamBatchMemOpType operation;
    CUdeviceptr address;
    union {
      uint32_t value;
      uint64_t value64;
    };
    unsigned int flags;
    CUdeviceptr alias;
  } waitValue;
  struct {
    CUstreamBatchMemOpType operation;
    CUdeviceptr address;
    union {
      uint32_t value;
      uint64_t value64;
    };
    unsigned int flags;
    CUdeviceptr alias;
  } writeValue;
  struct {
    CUstreamBatchMemOpType operation;
    unsigned int flags;
  } flushRemoteWrites;
  struct {
    CUstreamBatchMemOpType operation;
    unsigned int flags;
  } memoryBarrier;
  struct {
    CUstreamBatchMemOpType operation;
    unsigned int flags;
    CUstreamAtomicReductionOpType reductionOp;
    CUstreamAtomicReductionDataType dataType;
    CUdeviceptr address;
    uint64_t value;
    CUdeviceptr alias;
  } atomicReduction;
  uint64_t pad[6];
} CUstreamBatchMemOpParams;
typedef CUstreamBatchMemOpParams CUstreamBatchMemOpParams_v1;

typedef struct CUgraph_st *CUgraph;

typedef struct CUgraphNode_st *CUgraphNode;

typedef struct CUgraphEdgeData {
  unsigned char from_port;
  unsigned char to_port;
  unsigned char type;
  unsigned char reserved[5];
} CUgraphEdgeData;

typedef enum CUstreamCaptureStatus {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
} CUstreamCaptureStatus;

typedef enum CUlaunchAttributeID {
  CU_LAUNCH_ATTRIBUTE_IGNORE = 0,
  CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW = 1,
  CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
  CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY = 3,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE = 5,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT = 7,
  CU_LAUNCH_ATTRIBUTE_PRIORITY = 8,
  CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP = 9,
  CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN = 10,
  CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION = 11,
  CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT = 12,
  CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE = 13,
  CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 14,
  CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING = 16,
  CU_LAUNCH_ATTRIBUTE_PORTABLE_CLUSTER_SIZE_MODE = 17,
  CU_LAUNCH_ATTRIBUTE_SHARED_MEMORY_MODE = 18,
  CU_LAUNCH_ATTRIBUTE_MAX = 19,
} CUlaunchAttributeID;
typedef CUlaunchAttributeID CUkernelNodeAttrID;
typedef CUlaunchAttributeID CUstreamAttrID;

typedef enum CUaccessProperty {
  CU_ACCESS_PROPERTY_NORMAL = 0,
  CU_ACCESS_PROPERTY_STREAMING = 1,
  CU_ACCESS_PROPERTY_PERSISTING = 2,
} CUaccessProperty;

typedef struct CUaccessPolicyWindow {
  void *base_ptr;
  size_t num_bytes;
  float hitRatio;
  CUaccessProperty hitProp;
  CUaccessProperty missProp;
} CUaccessPolicyWindow;
typedef CUaccessPolicyWindow CUaccessPolicyWindow_v1;

typedef enum CUsynchronizationPolicy {
  CU_SYNC_POLICY_AUTO = 1,
  CU_SYNC_POLICY_SPIN = 2,
  CU_SYNC_POLICY_YIELD = 3,
  CU_SYNC_POLICY_BLOCKING_SYNC = 4,
} CUsynchronizationPolicy;

typedef enum CUclusterSchedulingPolicy {
  CU_CLUSTER_SCHEDULING_POLICY_DEFAULT = 0,
  CU_CLUSTER_SCHEDULING_POLICY_SPREAD = 1,
  CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING = 2,
  CU_CLUSTER_SCHEDULING_POLICY_RUBIN_DSMEM_LOCALITY = 3,
} CUclusterSchedulingPolicy;

typedef struct CUlaunchMemSyncDomainMap {
  unsigned char default_;
  unsigned char remote;
} CUlaunchMemSyncDomainMap;

typedef enum CUlaunchMemSyncDomain {
  CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT = 0,
  CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE = 1,
} CUlaunchMemSyncDomain;

typedef struct CUgraphDeviceUpdatableNode_st *CUgraphDeviceNode;

typedef enum CUlaunchAttributePortableClusterMode {
  CU_LAUNCH_PORTABLE_CLUSTER_MODE_DEFAULT = 0,
  CU_LAUNCH_PORTABLE_CLUSTER_MODE_REQUIRE_PORTABLE = 1,
  CU_LAUNCH_PORTABLE_CLUSTER_MODE_ALLOW_NON_PORTABLE = 2,
} CUlaunchAttributePortableClusterMode;

typedef enum CUsharedMemoryMode {
  CU_SHARED_MEMORY_MODE_DEFAULT = 0,
  CU_SHARED_MEMORY_MODE_REQUIRE_PORTABLE = 1,
  CU_SHARED_MEMORY_MODE_ALLOW_NON_PORTABLE = 2,
  CU_SHARED_MEMORY_MODE_ALLOW_OVERSIZED_SHARED_MEMORY = 3,
  CU_SHARED_MEMORY_MODE_PREFER_OVERSIZED_SHARED_MEMORY = 4,
} CUsharedMemoryMode;

typedef union CUlaunchAttributeValue {
  char pad[64];
  CUaccessPolicyWindow accessPolicyWindow;
  int cooperative;
  CUsynchronizationPolicy syncPolicy;
  struct {
    unsigned int x;
    unsigned int y;
    unsigned int z;
  } clusterDim;
  CUclusterSchedulingPolicy clusterSchedulingPolicyPreference;
  int programmaticStreamSerializationAllowed;
  struct {
    CUevent event;
    int flags;
    int triggerAtBlockStart;
  } programmaticEvent;
  struct {
    CUevent event;
    int flags;
  } launchCompletionEvent;
  int priority;
  CUlaunchMemSyncDomainMap memSyncDomainMap;
  CUlaunchMemSyncDomain memSyncDomain;
  struct {
    unsigned int x;
    unsigned int y;
    unsigned int z;
  } preferredClusterDim;
  struct {
    int deviceUpdatable;
    CUgraphDeviceNode devNode;
  } deviceUpdatableKernelNode;
  unsigned int sharedMemCarveout;
  unsigned int nvlinkUtilCentricScheduling;
  CUlaunchAttributePortableClusterMode portableClusterSizeMode;
  CUsharedMemoryMode sharedMemoryMode;
} CUlaunchAttributeValue;
typedef CUlaunchAttributeValue CUkernelNodeAttrValue_v1;
typedef CUlaunchAttributeValue CUkernelNodeAttrValue;
typedef CUlaunchAttributeValue CUstreamAttrValue_v1;
typedef CUlaunchAttributeValue CUstreamAttrValue;

CU_ENTRY(cuStreamCreate, (CUstream * stream, unsigned int flags));
CU_ENTRY(cuStreamCreateWithPriority, (CUstream * stream, unsigned int flags, int priority));
CU_ENTRY(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode));
CU_ENTRY(cuStreamDestroy_v2, (CUstream stream));
CU_ENTRY(cuEventCreate, (CUevent * event, unsigned int flags));
CU_ENTRY(cuEventQuery, (CUevent event));
CU_ENTRY(cuEventSynchronize, (CUevent event));
CU_ENTRY(cuEventDestroy_v2, (CUevent event));
CU_ENTRY(cuEventElapsedTime_v2, (float *milliseconds, CUevent start, CUevent end));
CU_ENTRY(cuStreamDestroy, (CUstream stream));
CU_ENTRY(cuEventDestroy, (CUevent event));
CU_ENTRY(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end));
CU_ENTRY_PTSZ(cuStreamGetPriority, (CUstream stream, int *priority));
CU_ENTRY_PTSZ(cuStreamGetId, (CUstream stream, unsigned long long *stream_id));
CU_ENTRY_PTSZ(cuStreamGetFlags, (CUstream stream, unsigned int *flags));
CU_ENTRY_PTSZ(cuStreamGetDevice, (CUstream stream, CUdevice *device));
CU_ENTRY_PTSZ(cuStreamGetCtx, (CUstream stream, CUcontext *pctx));
CU_ENTRY_PTSZ(cuStreamGetCtx_v2, (CUstream stream, CUcontext *ctx, CUgreenCtx *green_ctx));
CU_ENTRY(cuCtxWaitEvent, (CUcontext ctx, CUevent event));
CU_ENTRY_PTSZ(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamAddCallback,
              (CUstream stream, CUstreamCallback callback, void *user_data, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamAttachMemAsync,
              (CUstream stream, CUdeviceptr pointer, size_t length, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamQuery, (CUstream stream));
CU_ENTRY_PTSZ(cuStreamSynchronize, (CUstream stream));
CU_ENTRY_PTSZ(cuEventRecord, (CUevent event, CUstream stream));
CU_ENTRY_PTSZ(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned int flags));
CU_ENTRY_PTSZ(cuLaunchHostFunc, (CUstream stream, CUhostFn fn, void *user_data));
CU_ENTRY_PTSZ(cuLaunchHostFunc_v2,
              (CUstream stream, CUhostFn fn, void *user_data, unsigned int sync_mode));
CU_ENTRY_PTSZ(cuStreamWriteValue32,
              (CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamWaitValue32,
              (CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamWriteValue64,
              (CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamWaitValue64,
              (CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamBatchMemOp, (CUstream stream, unsigned int count,
                                   CUstreamBatchMemOpParams *param_array, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamWriteValue32_v2,
              (CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamWaitValue32_v2,
              (CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamWriteValue64_v2,
              (CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamWaitValue64_v2,
              (CUstream stream, CUdeviceptr addr, uint64_t value, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamBatchMemOp_v2, (CUstream stream, unsigned int count,
                                      CUstreamBatchMemOpParams *param_array, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamBeginCapture, (CUstream stream));
CU_ENTRY_PTSZ(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode));
CU_ENTRY_PTSZ(cuStreamBeginCaptureToGraph,
              (CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
               const CUgraphEdgeData *dependency_data, size_t num_dependencies,
               CUstreamCaptureMode mode));
CU_ENTRY_PTSZ(cuStreamEndCapture, (CUstream stream, CUgraph *graph));
CU_ENTRY_PTSZ(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *capture_status));
CU_ENTRY_PTSZ(cuStreamGetCaptureInfo,
              (CUstream stream, CUstreamCaptureStatus *capture_status, uint64_t *id));
CU_ENTRY_PTSZ(cuStreamGetCaptureInfo_v2,
              (CUstream stream, CUstreamCaptureStatus *capture_status, uint64_t *id, CUgraph *graph,
               const CUgraphNode **dependencies, size_t *num_dependencies));
CU_ENTRY_PTSZ(cuStreamGetCaptureInfo_v3,
              (CUstream stream, CUstreamCaptureStatus *capture_status, uint64_t *id, CUgraph *graph,
               const CUgraphNode **dependencies, const CUgraphEdgeData **edge_data,
               size_t *num_dependencies));
CU_ENTRY_PTSZ(cuStreamCopyAttributes, (CUstream dst_stream, CUstream src_stream));
CU_ENTRY_PTSZ(cuStreamGetAttribute,
              (CUstream stream, CUstreamAttrID attr, CUstreamAttrValue *value));
CU_ENTRY_PTSZ(cuStreamSetAttribute,
              (CUstream stream, CUstreamAttrID attr, const CUstreamAttrValue *param));
CU_ENTRY_PTSZ(cuStreamUpdateCaptureDependencies, (CUstream stream, CUgraphNode *dependencies,
                                                  size_t num_dependencies, unsigned int flags));
CU_ENTRY_PTSZ(cuStreamUpdateCaptureDependencies_v2,
              (CUstream stream, CUgraphNode *dependencies, const CUgraphEdgeData *dependency_data,
               size_t num_dependencies, unsigned int flags));

#endif
