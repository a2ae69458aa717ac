// SPDX-License-Identifier: Apache-2.0
// Entry points that exist, so that programs link and look-ups succeed, but only ever say
// CUDA_ERROR_NOT_SUPPORTED: graphics, texture references, green contexts,
// checkpoints to other storage, external semaphores, and forms of CUDA 3 with 32-bit device
// pointers.
//
// This file does not see the prototypes: the calling convention lets an ignored argument be.
enum { NOT_SUPPORTED = 801 };

#define ABSENT(name)                                       \
  __attribute__((visibility("protected"))) int name(void); \
  int name(void) {                                         \
    return NOT_SUPPORTED;                                  \
  }

// clang-format off
ABSENT(cuArray3DCreate) ABSENT(cuArray3DGetDescriptor) ABSENT(cuArrayCreate)
ABSENT(cuArrayGetDescriptor) ABSENT(cuArrayGetSparseProperties)
ABSENT(cuCheckpointOperationComplete) ABSENT(cuCoredumpDeregisterCompleteCallback)
ABSENT(cuCoredumpDeregisterStartCallback) ABSENT(cuCoredumpGetAttribute)
ABSENT(cuCoredumpGetAttributeGlobal) ABSENT(cuCoredumpRegisterCompleteCallback)
ABSENT(cuCoredumpRegisterStartCallback) ABSENT(cuCoredumpSetAttribute)
ABSENT(cuCoredumpSetAttributeGlobal) ABSENT(cuCtxAttach) ABSENT(cuCtxDetach)
ABSENT(cuCtxFromGreenCtx) ABSENT(cuCtxGetDevResource) ABSENT(cuCtxRecordEvent)
ABSENT(cuDestroyExternalSemaphore) ABSENT(cuDevResourceGenerateDesc)
ABSENT(cuDevSmResourceSplit) ABSENT(cuDevSmResourceSplitByCount) ABSENT(cuDeviceGetCliqueCount)
ABSENT(cuDeviceGetCliqueInfo) ABSENT(cuDeviceGetDevResource) ABSENT(cuDeviceGetFabricClusterUuid)
ABSENT(cuDeviceGetHostAtomicCapabilities) ABSENT(cuDeviceGetNvSciSyncAttributes)
ABSENT(cuDeviceGetP2PAtomicCapabilities) ABSENT(cuDeviceRegisterAsyncNotification)
ABSENT(cuDeviceUnregisterAsyncNotification) ABSENT(cuFabricCpyBatchAsync)
ABSENT(cuFabricCpyBatchAsync_ptsz) ABSENT(cuFuncSetBlockShape) ABSENT(cuFuncSetSharedSize)
ABSENT(cuGraphAddBatchMemOpNode) ABSENT(cuGraphAddExternalSemaphoresSignalNode)
ABSENT(cuGraphAddExternalSemaphoresWaitNode) ABSENT(cuGraphBatchMemOpNodeGetParams)
ABSENT(cuGraphBatchMemOpNodeSetParams) ABSENT(cuGraphConditionalHandleCreate)
ABSENT(cuGraphExecBatchMemOpNodeSetParams) ABSENT(cuGraphExecExternalSemaphoresSignalNodeSetParams)
ABSENT(cuGraphExecExternalSemaphoresWaitNodeSetParams)
ABSENT(cuGraphExternalSemaphoresSignalNodeGetParams)
ABSENT(cuGraphExternalSemaphoresSignalNodeSetParams)
ABSENT(cuGraphExternalSemaphoresWaitNodeGetParams)
ABSENT(cuGraphExternalSemaphoresWaitNodeSetParams) ABSENT(cuGraphicsMapResources)
ABSENT(cuGraphicsMapResources_ptsz) ABSENT(cuGraphicsResourceGetMappedMipmappedArray)
ABSENT(cuGraphicsResourceGetMappedPointer) ABSENT(cuGraphicsResourceGetMappedPointer_v2)
ABSENT(cuGraphicsResourceSetMapFlags) ABSENT(cuGraphicsResourceSetMapFlags_v2)
ABSENT(cuGraphicsSubResourceGetMappedArray) ABSENT(cuGraphicsUnmapResources)
ABSENT(cuGraphicsUnmapResources_ptsz) ABSENT(cuGraphicsUnregisterResource) ABSENT(cuGreenCtxCreate)
ABSENT(cuGreenCtxDestroy) ABSENT(cuGreenCtxGetDevResource) ABSENT(cuGreenCtxGetId)
ABSENT(cuGreenCtxRecordEvent) ABSENT(cuGreenCtxStreamCreate) ABSENT(cuGreenCtxWaitEvent)
ABSENT(cuImportExternalSemaphore) ABSENT(cuLaunch) ABSENT(cuLaunchGrid) ABSENT(cuLaunchGridAsync)
ABSENT(cuLogicalEndpointAddDevice) ABSENT(cuLogicalEndpointBindAddr)
ABSENT(cuLogicalEndpointBindMem) ABSENT(cuLogicalEndpointCreate) ABSENT(cuLogicalEndpointDestroy)
ABSENT(cuLogicalEndpointExport) ABSENT(cuLogicalEndpointGetLimits)
ABSENT(cuLogicalEndpointIdRelease) ABSENT(cuLogicalEndpointIdReserve)
ABSENT(cuLogicalEndpointImport) ABSENT(cuLogicalEndpointQuery) ABSENT(cuLogicalEndpointUnbind)
ABSENT(cuLogsCurrent) ABSENT(cuLogsDumpToFile) ABSENT(cuLogsDumpToMemory)
ABSENT(cuLogsRegisterCallback) ABSENT(cuLogsUnregisterCallback) ABSENT(cuMemAlloc)
ABSENT(cuMemAllocPitch) ABSENT(cuMemBatchDecompressAsync) ABSENT(cuMemBatchDecompressAsync_ptsz)
ABSENT(cuMemFree) ABSENT(cuMemGetAddressRange) ABSENT(cuMemGetLocationInfo)
ABSENT(cuMemHostGetDevicePointer) ABSENT(cuMemcpy2D) ABSENT(cuMemcpy2DAsync)
ABSENT(cuMemcpy2DUnaligned) ABSENT(cuMemcpy3D) ABSENT(cuMemcpy3DAsync) ABSENT(cuMemcpyAtoA)
ABSENT(cuMemcpyAtoD) ABSENT(cuMemcpyAtoH) ABSENT(cuMemcpyAtoHAsync) ABSENT(cuMemcpyDtoA)
ABSENT(cuMemcpyDtoD) ABSENT(cuMemcpyDtoDAsync) ABSENT(cuMemcpyDtoH) ABSENT(cuMemcpyDtoHAsync)
ABSENT(cuMemcpyHtoA) ABSENT(cuMemcpyHtoAAsync) ABSENT(cuMemcpyHtoD) ABSENT(cuMemcpyHtoDAsync)
ABSENT(cuMemsetD16) ABSENT(cuMemsetD2D16) ABSENT(cuMemsetD2D32) ABSENT(cuMemsetD2D8)
ABSENT(cuMemsetD32) ABSENT(cuMemsetD8) ABSENT(cuMipmappedArrayGetSparseProperties)
ABSENT(cuModuleGetGlobal) ABSENT(cuModuleGetSurfRef) ABSENT(cuModuleGetTexRef)
ABSENT(cuMulticastGetGranularity) ABSENT(cuParamSetSize) ABSENT(cuParamSetTexRef)
ABSENT(cuParamSetf) ABSENT(cuParamSeti) ABSENT(cuParamSetv) ABSENT(cuSignalExternalSemaphoresAsync)
ABSENT(cuSignalExternalSemaphoresAsync_ptsz) ABSENT(cuStreamBeginCaptureToCig)
ABSENT(cuStreamBeginCaptureToCig_ptsz) ABSENT(cuStreamEndCaptureToCig)
ABSENT(cuStreamEndCaptureToCig_ptsz) ABSENT(cuStreamGetDevResource)
ABSENT(cuStreamGetDevResource_ptsz) ABSENT(cuStreamGetGreenCtx) ABSENT(cuSurfRefGetArray)
ABSENT(cuSurfRefSetArray) ABSENT(cuTensorMapEncodeIm2col) ABSENT(cuTensorMapEncodeIm2colWide)
ABSENT(cuTensorMapEncodeTiled) ABSENT(cuTensorMapReplaceAddress)
ABSENT(cuTensorMapSetAllocationClass) ABSENT(cuTexRefCreate) ABSENT(cuTexRefDestroy)
ABSENT(cuTexRefGetAddress) ABSENT(cuTexRefGetAddressMode) ABSENT(cuTexRefGetAddress_v2)
ABSENT(cuTexRefGetArray) ABSENT(cuTexRefGetBorderColor) ABSENT(cuTexRefGetFilterMode)
ABSENT(cuTexRefGetFlags) ABSENT(cuTexRefGetFormat) ABSENT(cuTexRefGetMaxAnisotropy)
ABSENT(cuTexRefGetMipmapFilterMode) ABSENT(cuTexRefGetMipmapLevelBias)
ABSENT(cuTexRefGetMipmapLevelClamp) ABSENT(cuTexRefGetMipmappedArray) ABSENT(cuTexRefSetAddress)
ABSENT(cuTexRefSetAddress2D) ABSENT(cuTexRefSetAddress2D_v2) ABSENT(cuTexRefSetAddress2D_v3)
ABSENT(cuTexRefSetAddressMode) ABSENT(cuTexRefSetAddress_v2) ABSENT(cuTexRefSetArray)
ABSENT(cuTexRefSetBorderColor) ABSENT(cuTexRefSetFilterMode) ABSENT(cuTexRefSetFlags)
ABSENT(cuTexRefSetFormat) ABSENT(cuTexRefSetMaxAnisotropy) ABSENT(cuTexRefSetMipmapFilterMode)
ABSENT(cuTexRefSetMipmapLevelBias) ABSENT(cuTexRefSetMipmapLevelClamp)
ABSENT(cuTexRefSetMipmappedArray) ABSENT(cuWaitExternalSemaphoresAsync)
ABSENT(cuWaitExternalSemaphoresAsync_ptsz)
    // clang-format on
