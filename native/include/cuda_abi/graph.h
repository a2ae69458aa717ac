// SPDX-License-Identifier: Apache-2.0
// Graphs, their nodes and executable graphs.
#ifndef ALLOTMENT_CUDA_ABI_GRAPH_H
#define ALLOTMENT_CUDA_ABI_GRAPH_H

#include "module.h"

typedef enum CUgraphInstantiate_flags {
  CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH = 1,
  CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD = 2,
  CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH = 4,
  CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY = 8,
} CUgraphInstantiate_flags;

typedef enum CUgraphDebugDot_flags {
  CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE = 1,
  CU_GRAPH_DEBUG_DOT_FLAGS_RUNTIME_TYPES = 2,
  CU_GRAPH_DEBUG_DOT_FLAGS_KERNEL_NODE_PARAMS = 4,
  CU_GRAPH_DEBUG_DOT_FLAGS_MEMCPY_NODE_PARAMS = 8,
  CU_GRAPH_DEBUG_DOT_FLAGS_MEMSET_NODE_PARAMS = 16,
  CU_GRAPH_DEBUG_DOT_FLAGS_HOST_NODE_PARAMS = 32,
  CU_GRAPH_DEBUG_DOT_FLAGS_EVENT_NODE_PARAMS = 64,
  CU_GRAPH_DEBUG_DOT_FLAGS_EXT_SEMAS_SIGNAL_NODE_PARAMS = 128,
  CU_GRAPH_DEBUG_DOT_FLAGS_EXT_SEMAS_WAIT_NODE_PARAMS = 256,
  CU_GRAPH_DEBUG_DOT_FLAGS_KERNEL_NODE_ATTRIBUTES = 512,
  CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES = 1024,
  CU_GRAPH_DEBUG_DOT_FLAGS_MEM_ALLOC_NODE_PARAMS = 2048,
  CU_GRAPH_DEBUG_DOT_FLAGS_MEM_FREE_NODE_PARAMS = 4096,
  CU_GRAPH_DEBUG_DOT_FLAGS_BATCH_MEM_OP_NODE_PARAMS = 0x2000,
  CU_GRAPH_DEBUG_DOT_FLAGS_EXTRA_TOPO_INFO = 0x4000,
  CU_GRAPH_DEBUG_DOT_FLAGS_CONDITIONAL_NODE_PARAMS = 0x8000,
  CU_GRAPH_DEBUG_DOT_FLAGS_MEMCPY_BATCH_NODE_PARAMS = 0x10000,
  CU_GRAPH_DEBUG_DOT_FLAGS_FABRIC_CPY_BATCH_NODE_PARAMS = 0x20000,
} CUgraphDebugDot_flags;

typedef enum CUuserObject_flags {
  CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1,
} CUuserObject_flags;

typedef enum CUuserObjectRetain_flags {
  CU_GRAPH_USER_OBJECT_MOVE = 1,
} CUuserObjectRetain_flags;

typedef enum CUgraphDependencyType {
  CU_GRAPH_DEPENDENCY_TYPE_DEFAULT = 0,
  CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1,
} CUgraphDependencyType;

typedef struct CUDA_KERNEL_NODE_PARAMS {
  CUfunction func;
  unsigned int gridDimX;
  unsigned int gridDimY;
  unsigned int gridDimZ;
  unsigned int blockDimX;
  unsigned int blockDimY;
  unsigned int blockDimZ;
  unsigned int sharedMemBytes;
  void **kernelParams;
  void **extra;
  CUkernel kern;
  CUcontext ctx;
} CUDA_KERNEL_NODE_PARAMS;
typedef CUDA_KERNEL_NODE_PARAMS CUDA_KERNEL_NODE_PARAMS_v2;

typedef struct CUDA_MEMSET_NODE_PARAMS {
  CUdeviceptr dst;
  size_t pitch;
  unsigned int value;
  unsigned int elementSize;
  size_t width;
  size_t height;
} CUDA_MEMSET_NODE_PARAMS;
typedef CUDA_MEMSET_NODE_PARAMS CUDA_MEMSET_NODE_PARAMS_v1;

typedef struct CUDA_HOST_NODE_PARAMS {
  CUhostFn fn;
  void *userData;
} CUDA_HOST_NODE_PARAMS;
typedef CUDA_HOST_NODE_PARAMS CUDA_HOST_NODE_PARAMS_v1;

typedef struct CUDA_BATCH_MEM_OP_NODE_PARAMS {
  CUcontext ctx;
  unsigned int count;
  CUstreamBatchMemOpParams *paramArray;
  unsigned int flags;
} CUDA_BATCH_MEM_OP_NODE_PARAMS;
typedef CUDA_BATCH_MEM_OP_NODE_PARAMS CUDA_BATCH_MEM_OP_NODE_PARAMS_v1;

typedef struct CUgraphExec_st *CUgraphExec;

typedef struct CUDA_MEM_ALLOC_NODE_PARAMS {
  CUmemPoolProps poolProps;
  const CUmemAccessDesc *accessDescs;
  size_t accessDescCount;
  size_t bytesize;
  CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS;
typedef CUDA_MEM_ALLOC_NODE_PARAMS CUDA_MEM_ALLOC_NODE_PARAMS_v1;

typedef enum CUgraphNodeType {
  CU_GRAPH_NODE_TYPE_KERNEL = 0,
  CU_GRAPH_NODE_TYPE_MEMCPY = 1,
  CU_GRAPH_NODE_TYPE_MEMSET = 2,
  CU_GRAPH_NODE_TYPE_HOST = 3,
  CU_GRAPH_NODE_TYPE_GRAPH = 4,
  CU_GRAPH_NODE_TYPE_EMPTY = 5,
  CU_GRAPH_NODE_TYPE_WAIT_EVENT = 6,
  CU_GRAPH_NODE_TYPE_EVENT_RECORD = 7,
  CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL = 8,
  CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT = 9,
  CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10,
  CU_GRAPH_NODE_TYPE_MEM_FREE = 11,
  CU_GRAPH_NODE_TYPE_BATCH_MEM_OP = 12,
  CU_GRAPH_NODE_TYPE_CONDITIONAL = 13,
  CU_GRAPH_NODE_TYPE_MEMCPY_BATCH = 14,
  CU_GRAPH_NODE_TYPE_RESERVED_16 = 16,
  CU_GRAPH_NODE_TYPE_EXTERNAL_ENGINE = 17,
  CU_GRAPH_NODE_TYPE_FABRIC_CPY_BATCH = 18,
} CUgraphNodeType;

typedef enum CUgraphExecUpdateResult {
  CU_GRAPH_EXEC_UPDATE_SUCCESS = 0,
  CU_GRAPH_EXEC_UPDATE_ERROR = 1,
  CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED = 2,
  CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED = 3,
  CU_GRAPH_EXEC_UPDATE_ERROR_FUNCTION_CHANGED = 4,
  CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED = 5,
  CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED = 6,
  CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE = 7,
  CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED = 8,
} CUgraphExecUpdateResult;

typedef struct CUgraphExecUpdateResultInfo {
  CUgraphExecUpdateResult result;
  CUgraphNode errorNode;
  CUgraphNode errorFromNode;
} CUgraphExecUpdateResultInfo;
typedef CUgraphExecUpdateResultInfo CUgraphExecUpdateResultInfo_v1;

typedef struct CUuserObject_st *CUuserObject;

typedef struct CUDA_KERNEL_NODE_PARAMS_v3 {
  CUfunction func;
  unsigned int gridDimX;
  unsigned int gridDimY;
  unsigned int gridDimZ;
  unsigned int blockDimX;
  unsigned int blockDimY;
  unsigned int blockDimZ;
  unsigned int sharedMemBytes;
  void **kernelParams;
  void **extra;
  CUkernel kern;
  CUcontext ctx;
} CUDA_KERNEL_NODE_PARAMS_v3;

typedef struct CUDA_MEMCPY_NODE_PARAMS {
  int flags;
  int reserved;
  CUcontext copyCtx;
  CUDA_MEMCPY3D copyParams;
} CUDA_MEMCPY_NODE_PARAMS;

typedef struct CUDA_MEMSET_NODE_PARAMS_v2 {
  CUdeviceptr dst;
  size_t pitch;
  unsigned int value;
  unsigned int elementSize;
  size_t width;
  size_t height;
  CUcontext ctx;
} CUDA_MEMSET_NODE_PARAMS_v2;

typedef struct CUDA_HOST_NODE_PARAMS_v2 {
  CUhostFn fn;
  void *userData;
  unsigned int syncMode;
  union {
    CUcontext ctx;
    CUgreenCtx gCtx;
  };
} CUDA_HOST_NODE_PARAMS_v2;

typedef enum CUgraphChildGraphNodeOwnership {
  CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE = 0,
  CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE = 1,
  CU_GRAPH_CHILD_GRAPH_OWNERSHIP_INVALID = -1,
} CUgraphChildGraphNodeOwnership;

typedef struct CUDA_CHILD_GRAPH_NODE_PARAMS {
  CUgraph graph;
  CUgraphChildGraphNodeOwnership ownership;
} CUDA_CHILD_GRAPH_NODE_PARAMS;

typedef struct CUDA_EVENT_WAIT_NODE_PARAMS {
  CUevent event;
} CUDA_EVENT_WAIT_NODE_PARAMS;

typedef struct CUDA_EVENT_RECORD_NODE_PARAMS {
  CUevent event;
  union {
    CUcontext ctx;
    CUgreenCtx gCtx;
  };
} CUDA_EVENT_RECORD_NODE_PARAMS;

typedef struct CUextSemaphore_st *CUexternalSemaphore;

typedef struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS {
  struct {
    struct {
      unsigned long long value;
    } fence;
    union {
      void *fence;
      unsigned long long reserved;
    } nvSciSync;
    struct {
      unsigned long long key;
    } keyedMutex;
    unsigned int reserved[12];
  } params;
  unsigned int flags;
  unsigned int reserved[16];
} CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS;
typedef CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1;

typedef struct CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2 {
  CUexternalSemaphore *extSemArray;
  const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *paramsArray;
  unsigned int numExtSems;
  union {
    CUcontext ctx;
    CUgreenCtx gCtx;
  };
} CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2;

typedef struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS {
  struct {
    struct {
      unsigned long long value;
    } fence;
    union {
      void *fence;
      unsigned long long reserved;
    } nvSciSync;
    struct {
      unsigned long long key;
      unsigned int timeoutMs;
    } keyedMutex;
    unsigned int reserved[10];
  } params;
  unsigned int flags;
  unsigned int reserved[16];
} CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS;
typedef CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1;

typedef struct CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2 {
  CUexternalSemaphore *extSemArray;
  const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray;
  unsigned int numExtSems;
  union {
    CUcontext ctx;
    CUgreenCtx gCtx;
  };
} CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2;

typedef struct CUDA_MEM_ALLOC_NODE_PARAMS_v2 {
  CUmemPoolProps poolProps;
  const CUmemAccessDesc *accessDescs;
  size_t accessDescCount;
  size_t bytesize;
  CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS_v2;

typedef struct CUDA_MEM_FREE_NODE_PARAMS {
  CUdeviceptr dptr;
} CUDA_MEM_FREE_NODE_PARAMS;

typedef struct CUDA_BATCH_MEM_OP_NODE_PARAMS_v2 {
  CUcontext ctx;
  unsigned int count;
  CUstreamBatchMemOpParams *paramArray;
  unsigned int flags;
} CUDA_BATCH_MEM_OP_NODE_PARAMS_v2;

typedef uint64_t CUgraphConditionalHandle;

typedef enum CUgraphConditionalNodeType {
  CU_GRAPH_COND_TYPE_IF = 0,
  CU_GRAPH_COND_TYPE_WHILE = 1,
  CU_GRAPH_COND_TYPE_SWITCH = 2,
} CUgraphConditionalNodeType;

typedef struct CUDA_CONDITIONAL_NODE_PARAMS {
  CUgraphConditionalHandle handle;
  CUgraphConditionalNodeType type;
  unsigned int size;
  CUgraph *phGraph_out;
  CUcontext ctx;
} CUDA_CONDITIONAL_NODE_PARAMS;

typedef struct CUDA_MEMCPY_BATCH_NODE_PARAMS {
  size_t count;
  CUdeviceptr *dsts;
  CUdeviceptr *srcs;
  size_t *sizes;
  CUmemcpyAttributes *attrs;
  size_t *attrsIdxs;
  size_t numAttrs;
  union {
    CUcontext ctx;
    CUgreenCtx gCtx;
  };
} CUDA_MEMCPY_BATCH_NODE_PARAMS;
typedef CUDA_MEMCPY_BATCH_NODE_PARAMS CUDA_MEMCPY_BATCH_NODE_PARAMS_V1;

typedef enum CUfabricCpyOperandType {
  CU_FABRIC_COPY_OPERAND_TYPE_POINTER = 1,
  CU_FABRIC_COPY_OPERAND_TYPE_LOGICAL_ENDPOINT = 2,
  CU_FABRIC_COPY_OPERAND_TYPE_MAX = 0x7fffffff,
} CUfabricCpyOperandType;

typedef uint32_t CUlogicalEndpointId;

typedef struct CUfabricCpyOperand {
  CUfabricCpyOperandType type;
  union {
    struct {
      CUdeviceptr ptr;
      CUmemLocation locHint;
    } ptr;
    struct {
      CUlogicalEndpointId id;
      uint64_t offset;
    } le;
  } op;
} CUfabricCpyOperand;

typedef struct CUDA_FABRIC_COPY_BATCH_OP {
  CUfabricCpyOperand src;
  CUfabricCpyOperand dst;
  size_t size;
  unsigned int flags;
} CUDA_FABRIC_COPY_BATCH_OP;
typedef CUDA_FABRIC_COPY_BATCH_OP CUDA_FABRIC_COPY_BATCH_OP_v1;

typedef struct CUDA_FABRIC_CPY_BATCH_NODE_PARAMS {
  size_t numOps;
  CUDA_FABRIC_COPY_BATCH_OP *opList;
  unsigned long long flags;
  union {
    CUcontext ctx;
    CUgreenCtx gCtx;
  };
} CUDA_FABRIC_CPY_BATCH_NODE_PARAMS;
typedef CUDA_FABRIC_CPY_BATCH_NODE_PARAMS CUDA_FABRIC_CPY_BATCH_NODE_PARAMS_V1;

typedef struct CUgraphNodeParams {
  CUgraphNodeType type;
  int reserved0[3];
  union {
    long long reserved1[29];
    CUDA_KERNEL_NODE_PARAMS_v3 kernel;
    CUDA_MEMCPY_NODE_PARAMS memcpy;
    CUDA_MEMSET_NODE_PARAMS_v2 memset;
    CUDA_HOST_NODE_PARAMS_v2 host;
    CUDA_CHILD_GRAPH_NODE_PARAMS graph;
    CUDA_EVENT_WAIT_NODE_PARAMS eventWait;
    CUDA_EVENT_RECORD_NODE_PARAMS eventRecord;
    CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2 extSemSignal;
    CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2 extSemWait;
    CUDA_MEM_ALLOC_NODE_PARAMS_v2 alloc;
    CUDA_MEM_FREE_NODE_PARAMS free;
    CUDA_BATCH_MEM_OP_NODE_PARAMS_v2 memOp;
    CUDA_CONDITIONAL_NODE_PARAMS conditional;
    CUDA_MEMCPY_BATCH_NODE_PARAMS_V1 memcpyBatch;
    CUDA_FABRIC_CPY_BATCH_NODE_PARAMS_V1 fabricCpyBatch;
    char asBytes[232];
  };
  long long reserved2;
} CUgraphNodeParams;

typedef enum CUgraphRecaptureStatus {
  CU_GRAPH_RECAPTURE_ELIGIBLE_FOR_UPDATE = 0,
  CU_GRAPH_RECAPTURE_INELIGIBLE_FOR_UPDATE = 1,
  CU_GRAPH_RECAPTURE_ERROR = 2,
} CUgraphRecaptureStatus;
typedef CUresult (*CUgraphRecaptureCallback)(void *data, CUgraphNode node,
                                             const CUgraphNodeParams *original_params,
                                             const CUgraphNodeParams *recapture_params,
                                             CUgraphRecaptureStatus status);

typedef struct CUDA_KERNEL_NODE_PARAMS_v1 {
  CUfunction func;
  unsigned int gridDimX;
  unsigned int gridDimY;
  unsigned int gridDimZ;
  unsigned int blockDimX;
  unsigned int blockDimY;
  unsigned int blockDimZ;
  unsigned int sharedMemBytes;
  void **kernelParams;
  void **extra;
} CUDA_KERNEL_NODE_PARAMS_v1;

typedef enum CUgraphInstantiateResult {
  CUDA_GRAPH_INSTANTIATE_SUCCESS = 0,
  CUDA_GRAPH_INSTANTIATE_ERROR = 1,
  CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE = 2,
  CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED = 3,
  CUDA_GRAPH_INSTANTIATE_MULTIPLE_CTXS_NOT_SUPPORTED = 4,
  CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED = 5,
} CUgraphInstantiateResult;

typedef struct CUDA_GRAPH_INSTANTIATE_PARAMS {
  uint64_t flags;
  CUstream hUploadStream;
  CUgraphNode hErrNode_out;
  CUgraphInstantiateResult result_out;
} CUDA_GRAPH_INSTANTIATE_PARAMS;

CU_ENTRY_PTSZ(cuStreamBeginRecaptureToGraph,
              (CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
               CUgraphRecaptureCallback callback, void *user_data));
CU_ENTRY(cuGraphCreate, (CUgraph * graph, unsigned int flags));
CU_ENTRY(cuGraphAddKernelNode_v2,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, const CUDA_KERNEL_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphKernelNodeGetParams_v2, (CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphKernelNodeSetParams_v2,
         (CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphAddMemcpyNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, const CUDA_MEMCPY3D *copy_params, CUcontext ctx));
CU_ENTRY(cuGraphMemcpyNodeGetParams, (CUgraphNode node, CUDA_MEMCPY3D *node_params));
CU_ENTRY(cuGraphMemcpyNodeSetParams, (CUgraphNode node, const CUDA_MEMCPY3D *node_params));
CU_ENTRY(cuGraphAddMemsetNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, const CUDA_MEMSET_NODE_PARAMS *memset_params, CUcontext ctx));
CU_ENTRY(cuGraphMemsetNodeGetParams, (CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphMemsetNodeSetParams,
         (CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphAddHostNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, const CUDA_HOST_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphHostNodeGetParams, (CUgraphNode node, CUDA_HOST_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphHostNodeSetParams, (CUgraphNode node, const CUDA_HOST_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphAddChildGraphNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, CUgraph child_graph));
CU_ENTRY(cuGraphChildGraphNodeGetGraph, (CUgraphNode node, CUgraph *graph));
CU_ENTRY(cuGraphAddEmptyNode, (CUgraphNode * graph_node, CUgraph graph,
                               const CUgraphNode *dependencies, size_t num_dependencies));
CU_ENTRY(cuGraphAddEventRecordNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, CUevent event));
CU_ENTRY(cuGraphEventRecordNodeGetEvent, (CUgraphNode node, CUevent *event));
CU_ENTRY(cuGraphEventRecordNodeSetEvent, (CUgraphNode node, CUevent event));
CU_ENTRY(cuGraphAddEventWaitNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, CUevent event));
CU_ENTRY(cuGraphEventWaitNodeGetEvent, (CUgraphNode node, CUevent *event));
CU_ENTRY(cuGraphEventWaitNodeSetEvent, (CUgraphNode node, CUevent event));
CU_ENTRY(cuGraphAddBatchMemOpNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphBatchMemOpNodeGetParams,
         (CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphBatchMemOpNodeSetParams,
         (CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphExecBatchMemOpNodeSetParams, (CUgraphExec graph_exec, CUgraphNode node,
                                              const CUDA_BATCH_MEM_OP_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphAddMemAllocNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, CUDA_MEM_ALLOC_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphMemAllocNodeGetParams, (CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params));
CU_ENTRY(cuGraphAddMemFreeNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, CUdeviceptr pointer));
CU_ENTRY(cuGraphMemFreeNodeGetParams, (CUgraphNode node, CUdeviceptr *pointer));
CU_ENTRY(cuGraphClone, (CUgraph * graph_clone, CUgraph original_graph));
CU_ENTRY(cuGraphNodeFindInClone,
         (CUgraphNode * node, CUgraphNode original_node, CUgraph cloned_graph));
CU_ENTRY(cuGraphNodeGetType, (CUgraphNode node, CUgraphNodeType *type));
CU_ENTRY(cuGraphNodeGetContainingGraph, (CUgraphNode node, CUgraph *graph));
CU_ENTRY(cuGraphNodeGetLocalId, (CUgraphNode node, unsigned int *node_id));
CU_ENTRY(cuGraphNodeGetToolsId, (CUgraphNode node, unsigned long long *tools_node_id));
CU_ENTRY(cuGraphGetId, (CUgraph graph, unsigned int *graph_id));
CU_ENTRY(cuGraphExecGetId, (CUgraphExec graph_exec, unsigned int *graph_id));
CU_ENTRY(cuGraphGetNodes, (CUgraph graph, CUgraphNode *nodes, size_t *num_nodes));
CU_ENTRY(cuGraphGetRootNodes, (CUgraph graph, CUgraphNode *root_nodes, size_t *num_root_nodes));
CU_ENTRY(cuGraphGetEdges_v2, (CUgraph graph, CUgraphNode *from, CUgraphNode *to,
                              CUgraphEdgeData *edge_data, size_t *num_edges));
CU_ENTRY(cuGraphNodeGetDependencies_v2, (CUgraphNode node, CUgraphNode *dependencies,
                                         CUgraphEdgeData *edge_data, size_t *num_dependencies));
CU_ENTRY(cuGraphNodeGetDependentNodes_v2,
         (CUgraphNode node, CUgraphNode *dependent_nodes, CUgraphEdgeData *edge_data,
          size_t *num_dependent_nodes));
CU_ENTRY(cuGraphAddDependencies_v2, (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                     const CUgraphEdgeData *edge_data, size_t num_dependencies));
CU_ENTRY(cuGraphRemoveDependencies_v2,
         (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
          const CUgraphEdgeData *edge_data, size_t num_dependencies));
CU_ENTRY(cuGraphDestroyNode, (CUgraphNode node));
CU_ENTRY(cuGraphInstantiateWithFlags,
         (CUgraphExec * graph_exec, CUgraph graph, unsigned long long flags));
CU_ENTRY(cuGraphExecGetFlags, (CUgraphExec graph_exec, uint64_t *flags));
CU_ENTRY(cuGraphExecKernelNodeSetParams_v2,
         (CUgraphExec graph_exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphExecMemcpyNodeSetParams, (CUgraphExec graph_exec, CUgraphNode node,
                                          const CUDA_MEMCPY3D *copy_params, CUcontext ctx));
CU_ENTRY(cuGraphExecMemsetNodeSetParams,
         (CUgraphExec graph_exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *memset_params,
          CUcontext ctx));
CU_ENTRY(cuGraphExecHostNodeSetParams,
         (CUgraphExec graph_exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS *node_params));
CU_ENTRY(cuGraphExecChildGraphNodeSetParams,
         (CUgraphExec graph_exec, CUgraphNode node, CUgraph child_graph));
CU_ENTRY(cuGraphExecEventRecordNodeSetEvent,
         (CUgraphExec graph_exec, CUgraphNode node, CUevent event));
CU_ENTRY(cuGraphExecEventWaitNodeSetEvent,
         (CUgraphExec graph_exec, CUgraphNode node, CUevent event));
CU_ENTRY(cuGraphNodeSetEnabled,
         (CUgraphExec graph_exec, CUgraphNode node, unsigned int is_enabled));
CU_ENTRY(cuGraphNodeGetEnabled,
         (CUgraphExec graph_exec, CUgraphNode node, unsigned int *is_enabled));
CU_ENTRY(cuGraphExecDestroy, (CUgraphExec graph_exec));
CU_ENTRY(cuGraphDestroy, (CUgraph graph));
CU_ENTRY(cuGraphExecUpdate_v2,
         (CUgraphExec graph_exec, CUgraph graph, CUgraphExecUpdateResultInfo *result_info));
CU_ENTRY(cuGraphKernelNodeCopyAttributes, (CUgraphNode dst, CUgraphNode src));
CU_ENTRY(cuGraphKernelNodeGetAttribute,
         (CUgraphNode node, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value));
CU_ENTRY(cuGraphKernelNodeSetAttribute,
         (CUgraphNode node, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value));
CU_ENTRY(cuGraphDebugDotPrint, (CUgraph graph, const char *path, unsigned int flags));
CU_ENTRY(cuUserObjectCreate, (CUuserObject * object, void *ptr, CUhostFn destroy,
                              unsigned int initial_refcount, unsigned int flags));
CU_ENTRY(cuUserObjectRetain, (CUuserObject object, unsigned int count));
CU_ENTRY(cuUserObjectRelease, (CUuserObject object, unsigned int count));
CU_ENTRY(cuGraphRetainUserObject,
         (CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags));
CU_ENTRY(cuGraphReleaseUserObject, (CUgraph graph, CUuserObject object, unsigned int count));
CU_ENTRY(cuGraphAddNode_v2,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          const CUgraphEdgeData *dependency_data, size_t num_dependencies,
          CUgraphNodeParams *node_params));
CU_ENTRY(cuGraphAddNode_v3,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          const CUgraphEdgeData *dependency_data, size_t num_dependencies,
          CUgraphNodeParams *node_params));
CU_ENTRY(cuGraphNodeSetParams, (CUgraphNode node, CUgraphNodeParams *node_params));
CU_ENTRY(cuGraphNodeSetParams_v2, (CUgraphNode node, CUgraphNodeParams *node_params));
CU_ENTRY(cuGraphNodeGetParams, (CUgraphNode node, CUgraphNodeParams *node_params));
CU_ENTRY(cuGraphExecNodeSetParams,
         (CUgraphExec graph_exec, CUgraphNode node, CUgraphNodeParams *node_params));
CU_ENTRY(cuGraphAddKernelNode,
         (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
          size_t num_dependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *node_params));
CU_ENTRY(cuGraphKernelNodeGetParams, (CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *node_params));
CU_ENTRY(cuGraphKernelNodeSetParams,
         (CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *node_params));
CU_ENTRY(cuGraphExecKernelNodeSetParams,
         (CUgraphExec graph_exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *node_params));
CU_ENTRY_PTSZ(cuGraphInstantiateWithParams, (CUgraphExec * graph_exec, CUgraph graph,
                                             CUDA_GRAPH_INSTANTIATE_PARAMS *instantiate_params));
CU_ENTRY(cuGraphExecUpdate, (CUgraphExec graph_exec, CUgraph graph, CUgraphNode *error_node,
                             CUgraphExecUpdateResult *update_result));
CU_ENTRY_PTSZ(cuGraphUpload, (CUgraphExec graph, CUstream stream));
CU_ENTRY_PTSZ(cuGraphLaunch, (CUgraphExec graph, CUstream stream));
CU_ENTRY(cuGraphGetEdges, (CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *num_edges));
CU_ENTRY(cuGraphNodeGetDependencies,
         (CUgraphNode node, CUgraphNode *dependencies, size_t *num_dependencies));
CU_ENTRY(cuGraphNodeGetDependentNodes,
         (CUgraphNode node, CUgraphNode *dependent_nodes, size_t *num_dependent_nodes));
CU_ENTRY(cuGraphAddDependencies,
         (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t num_dependencies));
CU_ENTRY(cuGraphRemoveDependencies,
         (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t num_dependencies));
CU_ENTRY(cuGraphAddNode, (CUgraphNode * graph_node, CUgraph graph, const CUgraphNode *dependencies,
                          size_t num_dependencies, CUgraphNodeParams *node_params));
CU_ENTRY(cuGraphInstantiate, (CUgraphExec * graph_exec, CUgraph graph, CUgraphNode *error_node,
                              char *log_buffer, size_t buffer_size));
CU_ENTRY(cuGraphInstantiate_v2, (CUgraphExec * graph_exec, CUgraph graph, CUgraphNode *error_node,
                                 char *log_buffer, size_t buffer_size));

#endif
