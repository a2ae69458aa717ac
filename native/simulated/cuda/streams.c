// SPDX-License-Identifier: Apache-2.0
// Streams: their life, what can be asked of them, and waiting for them.
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simulated/cuda/driver.h"

static uint64_t thread_id(void) {
  static __thread uint64_t own;
  if (own == 0) own = (uint64_t)syscall(SYS_gettid);
  return own;
}

stream *stream_legacy(context *owner) {
  return owner->legacy;
}

static stream *find_or_make_own(context *owner) {
  uint64_t self = thread_id();
  LOCK();
  stream *own = owner->per_thread;
  while (own != NULL && own->thread != self) own = own->sibling;
  if (own == NULL) {
    own = object_new(OBJECT_STREAM, sizeof(stream), NULL);
    if (own != NULL) {
      own->owner = owner;
      own->per_thread = true;
      own->thread = self;
      own->sibling = owner->per_thread;
      owner->per_thread = own;
      owner->blocking++;
    }
  }
  UNLOCK();
  return own;
}

stream *stream_per_thread(context *owner) {
  static __thread stream *last;
  static __thread uint64_t last_id;
  bool same = last != NULL && object_valid(last, OBJECT_STREAM) && last->head.id == last_id &&
              last->owner == owner;
  if (!same) {
    last = find_or_make_own(owner);
    last_id = last != NULL ? last->head.id : 0;
  }
  return last;
}

CUresult stream_of(CUstream handle, stream **found) {
  ENTER_CONTEXT(current);
  if (handle == NULL || handle == CU_STREAM_LEGACY) {
    *found = current->legacy;
    return CUDA_SUCCESS;
  }
  if (handle == CU_STREAM_PER_THREAD) {
    *found = stream_per_thread(current);
    return *found != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (!object_valid(handle, OBJECT_STREAM)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (stream *)handle;
  return CUDA_SUCCESS;
}

static CUresult create(CUstream *handle, unsigned flags, int priority) {
  ENTER_CONTEXT(current);
  if (handle == NULL || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  stream *made = object_new(OBJECT_STREAM, sizeof(stream), current);
  if (made != NULL) {
    made->owner = current;
    made->flags = flags;
    if (priority > 0) priority = 0;
    if (priority < STREAM_GREATEST_PRIORITY) priority = STREAM_GREATEST_PRIORITY;
    made->priority = priority;
    if (!(flags & CU_STREAM_NON_BLOCKING)) current->blocking++;
  }
  UNLOCK();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUstream)made;
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned int flags) {
  return create(handle, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority) {
  return create(handle, flags, priority);
}

void stream_destroy_locked(stream *dying) {
  capture_abandon(dying);
  object_free(dying);
}

// Work already submitted goes on without the stream.
CUresult cuStreamDestroy_v2(CUstream handle) {
  ENTER();
  if (!object_valid(handle, OBJECT_STREAM)) return CUDA_ERROR_INVALID_HANDLE;
  stream *dying = (stream *)handle;
  if (dying->legacy || dying->per_thread) return CUDA_ERROR_INVALID_HANDLE;
  LOCK();
  stream_destroy_locked(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream handle) {
  return cuStreamDestroy_v2(handle);
}

// ---- waiting -----------------------------------------------------------------------------------

allot_point stream_end(const stream *asked) {
  uint64_t last = __atomic_load_n(&asked->last, __ATOMIC_RELAXED);
  return last == 0 ? 0 : ALLOT_POINT(driver.machine.slot, asked->owner->gpu, last);
}

// The legacy stream is done when the streams that it synchronises with are done, too.
static bool stands_for_others(const stream *asked) {
  return asked->legacy && asked->owner->blocking > 0;
}

#define LEGACY_AND_BLOCKING ((unsigned)(ALLOT_WORK_LEGACY | ALLOT_WORK_BLOCKING))

CUresult stream_synchronize(stream *waited) {
  int gpu = waited->owner->gpu;
  if (stands_for_others(waited)) {
    context_drain_some(gpu, waited->owner, LEGACY_AND_BLOCKING);
  } else {
    allot_engine_wait(&driver.machine, stream_end(waited));
  }
  return driver_gpu_usable(gpu);
}

static bool is_done(const stream *asked) {
  if (!stands_for_others(asked)) return allot_work_done(&driver.machine, stream_end(asked));
  int gpu = asked->owner->gpu;
  const allot_ring *ring = allot_ring_of(&driver.machine, driver.machine.slot, gpu);
  return context_pending(gpu, asked->owner, LEGACY_AND_BLOCKING, allot_load(&ring->head)) == 0;
}

bool stream_idle(stream *asked) {
  if (is_done(asked)) return true;
  allot_engine_advance(&driver.machine, driver_place(asked->owner->gpu));
  return is_done(asked);
}

CUresult cuStreamSynchronize(CUstream handle) {
  stream *waited;
  TRY(stream_of(handle, &waited));
  TRY(capture_forbids_waiting(waited));
  TRY(stream_synchronize(waited));
  pools_release_surplus(waited->owner->gpu);
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
  stream *asked;
  TRY(stream_of(handle, &asked));
  TRY(capture_forbids_waiting(asked));
  return stream_idle(asked) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

// ---- questions ---------------------------------------------------------------------------------

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
  stream *asked;
  TRY(stream_of(handle, &asked));
  if (priority == NULL) return CUDA_ERROR_INVALID_VALUE;
  *priority = asked->priority;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
  stream *asked;
  TRY(stream_of(handle, &asked));
  if (flags == NULL) return CUDA_ERROR_INVALID_VALUE;
  *flags = asked->flags;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
  stream *asked;
  TRY(stream_of(handle, &asked));
  if (id == NULL) return CUDA_ERROR_INVALID_VALUE;
  *id = asked->head.id;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
  stream *asked;
  TRY(stream_of(handle, &asked));
  if (device == NULL) return CUDA_ERROR_INVALID_VALUE;
  *device = asked->owner->ordinal;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *owner) {
  stream *asked;
  TRY(stream_of(handle, &asked));
  if (owner == NULL) return CUDA_ERROR_INVALID_VALUE;
  *owner = (CUcontext)asked->owner;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *owner, CUgreenCtx *green) {
  TRY(cuStreamGetCtx(handle, owner));
  if (green != NULL) *green = NULL;
  return CUDA_SUCCESS;
}

// ---- attributes --------------------------------------------------------------------------------

static CUstreamAttrValue *attribute_of(stream *asked, CUstreamAttrID attribute) {
  switch ((int)attribute) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      return &asked->window;
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      return &asked->policy;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      return &asked->domain;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      return &asked->domain_map;
    default:
      return NULL;
  }
}

CUresult cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute, CUstreamAttrValue *value) {
  stream *asked;
  TRY(stream_of(handle, &asked));
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  memset(value, 0, sizeof *value);
  if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
    value->priority = asked->priority;
    return CUDA_SUCCESS;
  }
  const CUstreamAttrValue *kept = attribute_of(asked, attribute);
  if (kept == NULL) return CUDA_ERROR_INVALID_VALUE;
  *value = *kept;
  return CUDA_SUCCESS;
}

CUresult cuStreamSetAttribute(CUstream handle, CUstreamAttrID attribute,
                              const CUstreamAttrValue *value) {
  stream *changed;
  TRY(stream_of(handle, &changed));
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
    changed->priority = value->priority;
    return CUDA_SUCCESS;
  }
  CUstreamAttrValue *kept = attribute_of(changed, attribute);
  if (kept == NULL) return CUDA_ERROR_INVALID_VALUE;
  *kept = *value;
  return CUDA_SUCCESS;
}

CUresult cuStreamCopyAttributes(CUstream to, CUstream from) {
  stream *target, *source;
  TRY(stream_of(to, &target));
  TRY(stream_of(from, &source));
  target->window = source->window;
  target->policy = source->policy;
  target->domain = source->domain;
  target->domain_map = source->domain_map;
  return CUDA_SUCCESS;
}

// Managed memory is there for every stream, so attaching changes nothing.
CUresult cuStreamAttachMemAsync(CUstream handle, CUdeviceptr address, size_t size,
                                unsigned int flags) {
  stream *target;
  TRY(stream_of(handle, &target));
  LOCK();
  const range *found = range_find(address);
  bool managed = found != NULL && range_is_managed(found);
  UNLOCK();
  return managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
