// SPDX-License-Identifier: Apache-2.0
// Entry points in the form that takes the null stream to be the calling thread's own: they name
// that stream and go on as the others. (Those of copies and fills are with them.)
#include "simulated/cuda/driver.h"

static CUstream own(CUstream stream) {
  return stream != NULL ? stream : CU_STREAM_PER_THREAD;
}

CUresult cuMemcpyBatchAsync_ptsz(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                 CUmemcpyAttributes *attrs, size_t *attrs_idxs, size_t num_attrs,
                                 size_t *fail_idx, CUstream stream) {
  return cuMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrs_idxs, num_attrs, fail_idx,
                            own(stream));
}

CUresult cuMemcpy3DBatchAsync_ptsz(size_t num_ops, CUDA_MEMCPY3D_BATCH_OP *op_list,
                                   size_t *fail_idx, unsigned long long flags, CUstream stream) {
  return cuMemcpy3DBatchAsync(num_ops, op_list, fail_idx, flags, own(stream));
}

CUresult cuMemcpyBatchAsync_v2_ptsz(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
                                    size_t count, CUmemcpyAttributes *attrs, size_t *attrs_idxs,
                                    size_t num_attrs, CUstream stream) {
  return cuMemcpyBatchAsync_v2(dsts, srcs, sizes, count, attrs, attrs_idxs, num_attrs, own(stream));
}

CUresult cuMemcpy3DBatchAsync_v2_ptsz(size_t num_ops, CUDA_MEMCPY3D_BATCH_OP *op_list,
                                      unsigned long long flags, CUstream stream) {
  return cuMemcpy3DBatchAsync_v2(num_ops, op_list, flags, own(stream));
}

CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr pointer, size_t count, CUdevice dst_device,
                                 CUstream stream) {
  return cuMemPrefetchAsync(pointer, count, dst_device, own(stream));
}

CUresult cuMemPrefetchAsync_v2_ptsz(CUdeviceptr pointer, size_t count, CUmemLocation location,
                                    unsigned int flags, CUstream stream) {
  return cuMemPrefetchAsync_v2(pointer, count, location, flags, own(stream));
}

CUresult cuMemPrefetchBatchAsync_ptsz(CUdeviceptr *dptrs, size_t *sizes, size_t count,
                                      CUmemLocation *prefetch_locs, size_t *prefetch_loc_idxs,
                                      size_t num_prefetch_locs, unsigned long long flags,
                                      CUstream stream) {
  return cuMemPrefetchBatchAsync(dptrs, sizes, count, prefetch_locs, prefetch_loc_idxs,
                                 num_prefetch_locs, flags, own(stream));
}

CUresult cuMemDiscardBatchAsync_ptsz(CUdeviceptr *dptrs, size_t *sizes, size_t count,
                                     unsigned long long flags, CUstream stream) {
  return cuMemDiscardBatchAsync(dptrs, sizes, count, flags, own(stream));
}

CUresult cuMemDiscardAndPrefetchBatchAsync_ptsz(CUdeviceptr *dptrs, size_t *sizes, size_t count,
                                                CUmemLocation *prefetch_locs,
                                                size_t *prefetch_loc_idxs, size_t num_prefetch_locs,
                                                unsigned long long flags, CUstream stream) {
  return cuMemDiscardAndPrefetchBatchAsync(dptrs, sizes, count, prefetch_locs, prefetch_loc_idxs,
                                           num_prefetch_locs, flags, own(stream));
}

CUresult cuGraphUpload_ptsz(CUgraphExec graph, CUstream stream) {
  return cuGraphUpload(graph, own(stream));
}

CUresult cuGraphLaunch_ptsz(CUgraphExec graph, CUstream stream) {
  return cuGraphLaunch(graph, own(stream));
}

CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int grid_dim_x, unsigned int grid_dim_y,
                             unsigned int grid_dim_z, unsigned int block_dim_x,
                             unsigned int block_dim_y, unsigned int block_dim_z,
                             unsigned int shared_mem_bytes, CUstream stream, void **kernel_params,
                             void **extra) {
  return cuLaunchKernel(function, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x, block_dim_y,
                        block_dim_z, shared_mem_bytes, own(stream), kernel_params, extra);
}

CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int grid_dim_x,
                                        unsigned int grid_dim_y, unsigned int grid_dim_z,
                                        unsigned int block_dim_x, unsigned int block_dim_y,
                                        unsigned int block_dim_z, unsigned int shared_mem_bytes,
                                        CUstream stream, void **kernel_params) {
  return cuLaunchCooperativeKernel(function, grid_dim_x, grid_dim_y, grid_dim_z, block_dim_x,
                                   block_dim_y, block_dim_z, shared_mem_bytes, own(stream),
                                   kernel_params);
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
  return cuMemFreeAsync(pointer, own(stream));
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
  return cuMemAllocAsync(pointer, bytes, own(stream));
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                                      CUstream stream) {
  return cuMemAllocFromPoolAsync(pointer, bytes, pool, own(stream));
}

CUresult cuStreamGetPriority_ptsz(CUstream stream, int *priority) {
  return cuStreamGetPriority(own(stream), priority);
}

CUresult cuStreamGetId_ptsz(CUstream stream, unsigned long long *stream_id) {
  return cuStreamGetId(own(stream), stream_id);
}

CUresult cuStreamGetFlags_ptsz(CUstream stream, unsigned int *flags) {
  return cuStreamGetFlags(own(stream), flags);
}

CUresult cuStreamGetDevice_ptsz(CUstream stream, CUdevice *device) {
  return cuStreamGetDevice(own(stream), device);
}

CUresult cuStreamGetCtx_ptsz(CUstream stream, CUcontext *pctx) {
  return cuStreamGetCtx(own(stream), pctx);
}

CUresult cuStreamGetCtx_v2_ptsz(CUstream stream, CUcontext *ctx, CUgreenCtx *green_ctx) {
  return cuStreamGetCtx_v2(own(stream), ctx, green_ctx);
}

CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags) {
  return cuStreamWaitEvent(own(stream), event, flags);
}

CUresult cuStreamAddCallback_ptsz(CUstream stream, CUstreamCallback callback, void *user_data,
                                  unsigned int flags) {
  return cuStreamAddCallback(own(stream), callback, user_data, flags);
}

CUresult cuStreamAttachMemAsync_ptsz(CUstream stream, CUdeviceptr pointer, size_t length,
                                     unsigned int flags) {
  return cuStreamAttachMemAsync(own(stream), pointer, length, flags);
}

CUresult cuStreamQuery_ptsz(CUstream stream) {
  return cuStreamQuery(own(stream));
}

CUresult cuStreamSynchronize_ptsz(CUstream stream) {
  return cuStreamSynchronize(own(stream));
}

CUresult cuEventRecord_ptsz(CUevent event, CUstream stream) {
  return cuEventRecord(event, own(stream));
}

CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned int flags) {
  return cuEventRecordWithFlags(event, own(stream), flags);
}

CUresult cuLaunchHostFunc_ptsz(CUstream stream, CUhostFn fn, void *user_data) {
  return cuLaunchHostFunc(own(stream), fn, user_data);
}

CUresult cuLaunchHostFunc_v2_ptsz(CUstream stream, CUhostFn fn, void *user_data,
                                  unsigned int sync_mode) {
  return cuLaunchHostFunc_v2(own(stream), fn, user_data, sync_mode);
}

CUresult cuStreamWriteValue32_ptsz(CUstream stream, CUdeviceptr addr, uint32_t value,
                                   unsigned int flags) {
  return cuStreamWriteValue32(own(stream), addr, value, flags);
}

CUresult cuStreamWaitValue32_ptsz(CUstream stream, CUdeviceptr addr, uint32_t value,
                                  unsigned int flags) {
  return cuStreamWaitValue32(own(stream), addr, value, flags);
}

CUresult cuStreamWriteValue64_ptsz(CUstream stream, CUdeviceptr addr, uint64_t value,
                                   unsigned int flags) {
  return cuStreamWriteValue64(own(stream), addr, value, flags);
}

CUresult cuStreamWaitValue64_ptsz(CUstream stream, CUdeviceptr addr, uint64_t value,
                                  unsigned int flags) {
  return cuStreamWaitValue64(own(stream), addr, value, flags);
}

CUresult cuStreamBatchMemOp_ptsz(CUstream stream, unsigned int count,
                                 CUstreamBatchMemOpParams *param_array, unsigned int flags) {
  return cuStreamBatchMemOp(own(stream), count, param_array, flags);
}

CUresult cuStreamWriteValue32_v2_ptsz(CUstream stream, CUdeviceptr addr, uint32_t value,
                                      unsigned int flags) {
  return cuStreamWriteValue32_v2(own(stream), addr, value, flags);
}

CUresult cuStreamWaitValue32_v2_ptsz(CUstream stream, CUdeviceptr addr, uint32_t value,
                                     unsigned int flags) {
  return cuStreamWaitValue32_v2(own(stream), addr, value, flags);
}

CUresult cuStreamWriteValue64_v2_ptsz(CUstream stream, CUdeviceptr addr, uint64_t value,
                                      unsigned int flags) {
  return cuStreamWriteValue64_v2(own(stream), addr, value, flags);
}

CUresult cuStreamWaitValue64_v2_ptsz(CUstream stream, CUdeviceptr addr, uint64_t value,
                                     unsigned int flags) {
  return cuStreamWaitValue64_v2(own(stream), addr, value, flags);
}

CUresult cuStreamBatchMemOp_v2_ptsz(CUstream stream, unsigned int count,
                                    CUstreamBatchMemOpParams *param_array, unsigned int flags) {
  return cuStreamBatchMemOp_v2(own(stream), count, param_array, flags);
}

CUresult cuStreamBeginCapture_ptsz(CUstream stream) {
  return cuStreamBeginCapture(own(stream));
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  return cuStreamBeginCapture_v2(own(stream), mode);
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph,
                                          const CUgraphNode *dependencies,
                                          const CUgraphEdgeData *dependency_data,
                                          size_t num_dependencies, CUstreamCaptureMode mode) {
  return cuStreamBeginCaptureToGraph(own(stream), graph, dependencies, dependency_data,
                                     num_dependencies, mode);
}

CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode,
                                            CUgraph graph, CUgraphRecaptureCallback callback,
                                            void *data) {
  return cuStreamBeginRecaptureToGraph(own(stream), mode, graph, callback, data);
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
  return cuStreamEndCapture(own(stream), graph);
}

CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *capture_status) {
  return cuStreamIsCapturing(own(stream), capture_status);
}

CUresult cuStreamGetCaptureInfo_ptsz(CUstream stream, CUstreamCaptureStatus *capture_status,
                                     uint64_t *id) {
  return cuStreamGetCaptureInfo(own(stream), capture_status, id);
}

CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream stream, CUstreamCaptureStatus *capture_status,
                                        uint64_t *id, CUgraph *graph,
                                        const CUgraphNode **dependencies,
                                        size_t *num_dependencies) {
  return cuStreamGetCaptureInfo_v2(own(stream), capture_status, id, graph, dependencies,
                                   num_dependencies);
}

CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream stream, CUstreamCaptureStatus *capture_status,
                                        uint64_t *id, CUgraph *graph,
                                        const CUgraphNode **dependencies,
                                        const CUgraphEdgeData **edge_data,
                                        size_t *num_dependencies) {
  return cuStreamGetCaptureInfo_v3(own(stream), capture_status, id, graph, dependencies, edge_data,
                                   num_dependencies);
}

CUresult cuStreamCopyAttributes_ptsz(CUstream dst_stream, CUstream src_stream) {
  return cuStreamCopyAttributes(own(dst_stream), own(src_stream));
}

CUresult cuStreamGetAttribute_ptsz(CUstream stream, CUstreamAttrID attr, CUstreamAttrValue *value) {
  return cuStreamGetAttribute(own(stream), attr, value);
}

CUresult cuStreamSetAttribute_ptsz(CUstream stream, CUstreamAttrID attr,
                                   const CUstreamAttrValue *param) {
  return cuStreamSetAttribute(own(stream), attr, param);
}

CUresult cuStreamUpdateCaptureDependencies_ptsz(CUstream stream, CUgraphNode *dependencies,
                                                size_t num_dependencies, unsigned int flags) {
  return cuStreamUpdateCaptureDependencies(own(stream), dependencies, num_dependencies, flags);
}

CUresult cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream stream, CUgraphNode *dependencies,
                                                   const CUgraphEdgeData *dependency_data,
                                                   size_t num_dependencies, unsigned int flags) {
  return cuStreamUpdateCaptureDependencies_v2(own(stream), dependencies, dependency_data,
                                              num_dependencies, flags);
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *map_info_list, unsigned int count,
                                 CUstream stream) {
  return cuMemMapArrayAsync(map_info_list, count, own(stream));
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function,
                               void **kernel_params, void **extra) {
  if (config == NULL) return cuLaunchKernelEx(config, function, kernel_params, extra);
  CUlaunchConfig named = *config;
  named.hStream = own(config->hStream);
  return cuLaunchKernelEx(&named, function, kernel_params, extra);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *graph_exec, CUgraph graph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS *instantiate_params) {
  if (instantiate_params == NULL) return CUDA_ERROR_INVALID_VALUE;
  instantiate_params->hUploadStream = own(instantiate_params->hUploadStream);
  return cuGraphInstantiateWithParams(graph_exec, graph, instantiate_params);
}
