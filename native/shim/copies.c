// SPDX-License-Identifier: Apache-2.0
// Copies and fills. They run on the copy engines beside everyone's kernels, so they never wait for
// a turn; they are measured for an account of their own, and end the batch of kernels before them.
#include "compute.h"
#include "driver.h"
#include "streams.h"

typedef struct copy_pass {
  stream_state *stream;  // NULL: not measured
  batch *marks;
} copy_pass;

static void copy_begin(copy_pass *pass, CUstream stream) {
  pass->stream = NULL;
  compute_state *all = compute_governed();
  if (LIKELY(all == NULL) || compute_is_recorded(all, stream)) return;
  stream_state *of = stream_state_of(all, stream, true);
  if (of == NULL || !compute_is_governed(of->at)) return;
  if (!compute_join(of->at) || keeper_is_stopped(all)) return;
  // A copy in the legacy stream comes between the kernels of the others.
  if (stream == STREAM_LEGACY || stream == NULL) marks_settle(all);
  marks_interrupt_joined(all, of, stream);
  if (!process_lock_within(&of->lock, INSIDE_NS)) return;
  pass->marks = copy_before(of);
  if (pass->marks != NULL) {
    pass->stream = of;
    uncancelled_begin();  // the marks are to be taken in
  }
  process_unlock(&of->lock);
}

// Not with the lock held from the beginning: a copy may wait for the stream, and for the program.
static void copy_end(copy_pass *pass) {
  bool is_ours = process_lock_within(&pass->stream->lock, INSIDE_NS);
  copy_after(pass->stream, pass->marks, is_ours);
  if (is_ours) process_unlock(&pass->stream->lock);
  uncancelled_end();
  compute_state *all = pass->stream->at->all;
  if (__atomic_load_n(&all->keeper.is_deep, __ATOMIC_SEQ_CST) != 0) keeper_wake(all);
}

#define COPY(name, meant, parameters, arguments)                  \
  CUDA_WRAPPER(name, parameters) {                                \
    if (!governed()) return REAL(name) arguments;                 \
    copy_pass pass;                                               \
    copy_begin(&pass, meant);                                     \
    if (LIKELY(pass.stream == NULL)) return REAL(name) arguments; \
    CUresult result = DRIVER(REAL(name) arguments);               \
    copy_end(&pass);                                              \
    return result;                                                \
  }

// In the default stream; in one that is named, of the forms that have a per-thread variant.
#define SYNC(name, parameters, arguments)          \
  COPY(name, STREAM_LEGACY, parameters, arguments) \
  COPY(name##_ptds, STREAM_PER_THREAD, parameters, arguments)
#define ASYNC(name, parameters, arguments)  \
  COPY(name, stream, parameters, arguments) \
  COPY(name##_ptsz, per_thread(stream), parameters, arguments)
// The forms with pointers of 32 bits.
#define OLD_SYNC(name, parameters, arguments) COPY(name, STREAM_LEGACY, parameters, arguments)
#define OLD_ASYNC(name, parameters, arguments) COPY(name, stream, parameters, arguments)

// clang-format off
SYNC(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), (dst, src, bytes))
ASYNC(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream), (copy, stream))
SYNC(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *copy), (copy))
SYNC(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *copy), (copy))
ASYNC(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *copy, CUstream stream), (copy, stream))
ASYNC(cuMemcpy3DBatchAsync, (size_t num_ops, CUDA_MEMCPY3D_BATCH_OP *op_list, size_t *fail_idx,
    unsigned long long flags, CUstream stream), (num_ops, op_list, fail_idx, flags, stream))
ASYNC(cuMemcpy3DBatchAsync_v2, (size_t num_ops, CUDA_MEMCPY3D_BATCH_OP *op_list, unsigned long
    long flags, CUstream stream), (num_ops, op_list, flags, stream))
SYNC(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *copy), (copy))
ASYNC(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *copy, CUstream stream), (copy, stream))
ASYNC(cuMemcpy3DWithAttributesAsync, (CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags,
    CUstream stream), (op, flags, stream))
SYNC(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *copy), (copy))
ASYNC(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream), (dst, src,
    bytes, stream))
SYNC(cuMemcpyAtoA_v2, (CUarray dst_array, size_t dst_offset, CUarray src_array, size_t src_offset,
    size_t bytes), (dst_array, dst_offset, src_array, src_offset, bytes))
SYNC(cuMemcpyAtoD_v2, (CUdeviceptr dst_device, CUarray src_array, size_t src_offset, size_t
    bytes), (dst_device, src_array, src_offset, bytes))
ASYNC(cuMemcpyAtoHAsync_v2, (void *dst_host, CUarray src_array, size_t src_offset, size_t bytes,
    CUstream stream), (dst_host, src_array, src_offset, bytes, stream))
SYNC(cuMemcpyAtoH_v2, (void *dst_host, CUarray src_array, size_t src_offset, size_t bytes),
    (dst_host, src_array, src_offset, bytes))
ASYNC(cuMemcpyBatchAsync, (CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
    CUmemcpyAttributes *attrs, size_t *attrs_idxs, size_t num_attrs, size_t *fail_idx, CUstream
    stream), (dsts, srcs, sizes, count, attrs, attrs_idxs, num_attrs, fail_idx, stream))
ASYNC(cuMemcpyBatchAsync_v2, (CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
    CUmemcpyAttributes *attrs, size_t *attrs_idxs, size_t num_attrs, CUstream stream), (dsts,
    srcs, sizes, count, attrs, attrs_idxs, num_attrs, stream))
SYNC(cuMemcpyDtoA_v2, (CUarray dst_array, size_t dst_offset, CUdeviceptr src_device, size_t
    bytes), (dst_array, dst_offset, src_device, bytes))
ASYNC(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst_device, CUdeviceptr src_device, size_t bytes,
    CUstream stream), (dst_device, src_device, bytes, stream))
SYNC(cuMemcpyDtoD_v2, (CUdeviceptr dst_device, CUdeviceptr src_device, size_t bytes), (dst_device,
    src_device, bytes))
ASYNC(cuMemcpyDtoHAsync_v2, (void *dst_host, CUdeviceptr src_device, size_t bytes, CUstream
    stream), (dst_host, src_device, bytes, stream))
SYNC(cuMemcpyDtoH_v2, (void *dst_host, CUdeviceptr src_device, size_t bytes), (dst_host,
    src_device, bytes))
ASYNC(cuMemcpyHtoAAsync_v2, (CUarray dst_array, size_t dst_offset, const void *src_host, size_t
    bytes, CUstream stream), (dst_array, dst_offset, src_host, bytes, stream))
SYNC(cuMemcpyHtoA_v2, (CUarray dst_array, size_t dst_offset, const void *src_host, size_t bytes),
    (dst_array, dst_offset, src_host, bytes))
ASYNC(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst_device, const void *src_host, size_t bytes, CUstream
    stream), (dst_device, src_host, bytes, stream))
SYNC(cuMemcpyHtoD_v2, (CUdeviceptr dst_device, const void *src_host, size_t bytes), (dst_device,
    src_host, bytes))
SYNC(cuMemcpyPeer, (CUdeviceptr dst_device, CUcontext dst_context, CUdeviceptr src_device,
    CUcontext src_context, size_t bytes), (dst_device, dst_context, src_device, src_context,
    bytes))
ASYNC(cuMemcpyPeerAsync, (CUdeviceptr dst_device, CUcontext dst_context, CUdeviceptr src_device,
    CUcontext src_context, size_t bytes, CUstream stream), (dst_device, dst_context, src_device,
    src_context, bytes, stream))
ASYNC(cuMemcpyWithAttributesAsync, (CUdeviceptr dst, CUdeviceptr src, size_t size,
    CUmemcpyAttributes *attr, CUstream stream), (dst, src, size, attr, stream))
ASYNC(cuMemsetD16Async, (CUdeviceptr dst_device, unsigned short us, size_t n, CUstream stream),
    (dst_device, us, n, stream))
SYNC(cuMemsetD16_v2, (CUdeviceptr dst_device, unsigned short us, size_t n), (dst_device, us, n))
ASYNC(cuMemsetD2D16Async, (CUdeviceptr dst_device, size_t dst_pitch, unsigned short us, size_t
    width, size_t height, CUstream stream), (dst_device, dst_pitch, us, width, height, stream))
SYNC(cuMemsetD2D16_v2, (CUdeviceptr dst_device, size_t dst_pitch, unsigned short us, size_t width,
    size_t height), (dst_device, dst_pitch, us, width, height))
ASYNC(cuMemsetD2D32Async, (CUdeviceptr dst_device, size_t dst_pitch, unsigned int ui, size_t
    width, size_t height, CUstream stream), (dst_device, dst_pitch, ui, width, height, stream))
SYNC(cuMemsetD2D32_v2, (CUdeviceptr dst_device, size_t dst_pitch, unsigned int ui, size_t width,
    size_t height), (dst_device, dst_pitch, ui, width, height))
ASYNC(cuMemsetD2D8Async, (CUdeviceptr dst_device, size_t dst_pitch, unsigned char uc, size_t
    width, size_t height, CUstream stream), (dst_device, dst_pitch, uc, width, height, stream))
SYNC(cuMemsetD2D8_v2, (CUdeviceptr dst_device, size_t dst_pitch, unsigned char uc, size_t width,
    size_t height), (dst_device, dst_pitch, uc, width, height))
ASYNC(cuMemsetD32Async, (CUdeviceptr dst_device, unsigned int ui, size_t n, CUstream stream),
    (dst_device, ui, n, stream))
SYNC(cuMemsetD32_v2, (CUdeviceptr dst_device, unsigned int ui, size_t n), (dst_device, ui, n))
ASYNC(cuMemsetD8Async, (CUdeviceptr dst_device, unsigned char uc, size_t n, CUstream stream),
    (dst_device, uc, n, stream))
SYNC(cuMemsetD8_v2, (CUdeviceptr dst_device, unsigned char uc, size_t n), (dst_device, uc, n))
OLD_SYNC(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *copy), (copy))
OLD_ASYNC(cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *copy, CUstream stream), (copy, stream))
OLD_SYNC(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *copy), (copy))
OLD_SYNC(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *copy), (copy))
OLD_ASYNC(cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *copy, CUstream stream), (copy, stream))
OLD_SYNC(cuMemcpyAtoA, (CUarray dst_array, unsigned int dst_offset, CUarray src_array, unsigned
    int src_offset, unsigned int bytes), (dst_array, dst_offset, src_array, src_offset, bytes))
OLD_SYNC(cuMemcpyAtoD, (CUdeviceptr_v1 dst_device, CUarray src_array, unsigned int src_offset,
    unsigned int bytes), (dst_device, src_array, src_offset, bytes))
OLD_SYNC(cuMemcpyAtoH, (void *dst_host, CUarray src_array, unsigned int src_offset, unsigned int
    bytes), (dst_host, src_array, src_offset, bytes))
OLD_ASYNC(cuMemcpyAtoHAsync, (void *dst_host, CUarray src_array, unsigned int src_offset, unsigned
    int bytes, CUstream stream), (dst_host, src_array, src_offset, bytes, stream))
OLD_SYNC(cuMemcpyDtoA, (CUarray dst_array, unsigned int dst_offset, CUdeviceptr_v1 src_device,
    unsigned int bytes), (dst_array, dst_offset, src_device, bytes))
OLD_SYNC(cuMemcpyDtoD, (CUdeviceptr_v1 dst_device, CUdeviceptr_v1 src_device, unsigned int bytes),
    (dst_device, src_device, bytes))
OLD_ASYNC(cuMemcpyDtoDAsync, (CUdeviceptr_v1 dst_device, CUdeviceptr_v1 src_device, unsigned int
    bytes, CUstream stream), (dst_device, src_device, bytes, stream))
OLD_SYNC(cuMemcpyDtoH, (void *dst_host, CUdeviceptr_v1 src_device, unsigned int bytes), (dst_host,
    src_device, bytes))
OLD_ASYNC(cuMemcpyDtoHAsync, (void *dst_host, CUdeviceptr_v1 src_device, unsigned int bytes,
    CUstream stream), (dst_host, src_device, bytes, stream))
OLD_SYNC(cuMemcpyHtoA, (CUarray dst_array, unsigned int dst_offset, const void *src_host, unsigned
    int bytes), (dst_array, dst_offset, src_host, bytes))
OLD_ASYNC(cuMemcpyHtoAAsync, (CUarray dst_array, unsigned int dst_offset, const void *src_host,
    unsigned int bytes, CUstream stream), (dst_array, dst_offset, src_host, bytes, stream))
OLD_SYNC(cuMemcpyHtoD, (CUdeviceptr_v1 dst_device, const void *src_host, unsigned int bytes),
    (dst_device, src_host, bytes))
OLD_ASYNC(cuMemcpyHtoDAsync, (CUdeviceptr_v1 dst_device, const void *src_host, unsigned int bytes,
    CUstream stream), (dst_device, src_host, bytes, stream))
OLD_SYNC(cuMemsetD16, (CUdeviceptr_v1 dst_device, unsigned short us, unsigned int n), (dst_device,
    us, n))
OLD_SYNC(cuMemsetD2D16, (CUdeviceptr_v1 dst_device, unsigned int dst_pitch, unsigned short us,
    unsigned int width, unsigned int height), (dst_device, dst_pitch, us, width, height))
OLD_SYNC(cuMemsetD2D32, (CUdeviceptr_v1 dst_device, unsigned int dst_pitch, unsigned int ui,
    unsigned int width, unsigned int height), (dst_device, dst_pitch, ui, width, height))
OLD_SYNC(cuMemsetD2D8, (CUdeviceptr_v1 dst_device, unsigned int dst_pitch, unsigned char uc,
    unsigned int width, unsigned int height), (dst_device, dst_pitch, uc, width, height))
OLD_SYNC(cuMemsetD32, (CUdeviceptr_v1 dst_device, unsigned int ui, unsigned int n), (dst_device,
    ui, n))
OLD_SYNC(cuMemsetD8, (CUdeviceptr_v1 dst_device, unsigned char uc, unsigned int n), (dst_device,
    uc, n))
// clang-format on
