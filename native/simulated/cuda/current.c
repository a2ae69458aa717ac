// SPDX-License-Identifier: Apache-2.0
// Each thread's stack of contexts; its top is the current one.
#include "simulated/cuda/driver.h"

#define DEPTH 64

// A context is remembered with its id: its memory may hold another context by now.
typedef struct entry {
  context *made;
  uint64_t id;
} entry;

static __thread entry stack[DEPTH];
static __thread int depth;  // 0: nothing was ever pushed or set

static bool alive(const entry *asked) {
  const context *made = asked->made;
  return object_valid(made, OBJECT_CONTEXT) && made->head.id == asked->id && made->active;
}

CUresult context_current(context **current) {
  TRY(driver_ready());
  if (depth == 0 || stack[depth - 1].made == NULL) return CUDA_ERROR_INVALID_CONTEXT;
  if (!alive(&stack[depth - 1])) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  *current = stack[depth - 1].made;
  return driver_gpu_usable((*current)->gpu);
}

CUresult context_of(CUcontext handle, context **found) {
  if (handle == NULL) return context_current(found);
  TRY(driver_ready());
  *found = (context *)handle;
  if (!object_valid(handle, OBJECT_CONTEXT) || !(*found)->active) {
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  }
  return driver_gpu_usable((*found)->gpu);
}

static CUresult push(context *made) {
  if (depth == DEPTH) return CUDA_ERROR_INVALID_VALUE;
  stack[depth++] = (entry){made, made->head.id};
  return CUDA_SUCCESS;
}

void context_make_current(context *made) {
  (void)push(made);
}

void context_forget(context *gone) {
  if (depth > 0 && stack[depth - 1].made == gone) depth--;
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  ENTER();
  if (!object_valid(handle, OBJECT_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
  return push((context *)handle);
}

CUresult cuCtxPopCurrent_v2(CUcontext *handle) {
  ENTER();
  if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  entry top = stack[--depth];
  if (handle != NULL) *handle = (CUcontext)top.made;
  return CUDA_SUCCESS;
}

// Replaces the top of the stack; NULL takes it away.
CUresult cuCtxSetCurrent(CUcontext handle) {
  ENTER();
  if (handle == NULL) {
    if (depth > 0) depth--;
    return CUDA_SUCCESS;
  }
  if (!object_valid(handle, OBJECT_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
  if (depth > 0) depth--;
  return push((context *)handle);
}

CUresult cuCtxGetCurrent(CUcontext *handle) {
  ENTER();
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  *handle = depth > 0 ? (CUcontext)stack[depth - 1].made : NULL;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext handle) {
  return cuCtxPushCurrent_v2(handle);
}

CUresult cuCtxPopCurrent(CUcontext *handle) {
  return cuCtxPopCurrent_v2(handle);
}

CUresult cuCtxGetDevice(CUdevice *device) {
  ENTER_CONTEXT(current);
  if (device == NULL) return CUDA_ERROR_INVALID_VALUE;
  *device = current->ordinal;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext handle) {
  context *asked;
  TRY(context_of(handle, &asked));
  if (device == NULL) return CUDA_ERROR_INVALID_VALUE;
  *device = asked->ordinal;
  return CUDA_SUCCESS;
}
