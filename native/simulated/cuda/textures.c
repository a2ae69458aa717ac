// SPDX-License-Identifier: Apache-2.0
// Texture and surface objects: descriptions to be kept, since no kernel here reads through them.
#include "simulated/cuda/driver.h"

typedef struct texture {
  object head;
  CUDA_RESOURCE_DESC resource;
  CUDA_TEXTURE_DESC sampling;
  CUDA_RESOURCE_VIEW_DESC view;
  bool has_view;
} texture;

static CUresult check(const CUDA_RESOURCE_DESC *resource) {
  if (resource == NULL || resource->flags != 0) return CUDA_ERROR_INVALID_VALUE;
  switch (resource->resType) {
    case CU_RESOURCE_TYPE_ARRAY:
      return object_valid(resource->res.array.hArray, OBJECT_ARRAY) ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_INVALID_VALUE;
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
      return object_valid(resource->res.mipmap.hMipmappedArray, OBJECT_MIPMAP)
                 ? CUDA_SUCCESS
                 : CUDA_ERROR_INVALID_VALUE;
    case CU_RESOURCE_TYPE_LINEAR:
      return resource->res.linear.devPtr != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_RESOURCE_TYPE_PITCH2D:
      return resource->res.pitch2D.devPtr != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

static texture *new_texture(enum object_kind kind, context *owner,
                            const CUDA_RESOURCE_DESC *resource) {
  LOCK();
  texture *made = object_new(kind, sizeof(texture), owner);
  UNLOCK();
  if (made != NULL) made->resource = *resource;
  return made;
}

CUresult cuTexObjectCreate(CUtexObject *handle, const CUDA_RESOURCE_DESC *resource,
                           const CUDA_TEXTURE_DESC *sampling, const CUDA_RESOURCE_VIEW_DESC *view) {
  ENTER_CONTEXT(current);
  if (handle == NULL || sampling == NULL) return CUDA_ERROR_INVALID_VALUE;
  TRY(check(resource));
  texture *made = new_texture(OBJECT_TEXTURE, current, resource);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  made->sampling = *sampling;
  made->has_view = view != NULL;
  if (view != NULL) made->view = *view;
  *handle = (CUtexObject)(uintptr_t)made;
  return CUDA_SUCCESS;
}

CUresult cuSurfObjectCreate(CUsurfObject *handle, const CUDA_RESOURCE_DESC *resource) {
  ENTER_CONTEXT(current);
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  TRY(check(resource));
  if (resource->resType != CU_RESOURCE_TYPE_ARRAY) return CUDA_ERROR_INVALID_VALUE;
  texture *made = new_texture(OBJECT_SURFACE, current, resource);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUsurfObject)(uintptr_t)made;
  return CUDA_SUCCESS;
}

static CUresult texture_of(unsigned long long handle, enum object_kind kind, texture **found) {
  ENTER();
  if (!object_valid((void *)(uintptr_t)handle, kind)) return CUDA_ERROR_INVALID_VALUE;
  *found = (texture *)(uintptr_t)handle;
  return CUDA_SUCCESS;
}

static CUresult destroy(unsigned long long handle, enum object_kind kind) {
  texture *dying;
  TRY(texture_of(handle, kind, &dying));
  LOCK();
  object_free(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuTexObjectDestroy(CUtexObject handle) {
  return destroy(handle, OBJECT_TEXTURE);
}

CUresult cuSurfObjectDestroy(CUsurfObject handle) {
  return destroy(handle, OBJECT_SURFACE);
}

CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *resource, CUtexObject handle) {
  texture *asked;
  TRY(texture_of(handle, OBJECT_TEXTURE, &asked));
  if (resource == NULL) return CUDA_ERROR_INVALID_VALUE;
  *resource = asked->resource;
  return CUDA_SUCCESS;
}

CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC *sampling, CUtexObject handle) {
  texture *asked;
  TRY(texture_of(handle, OBJECT_TEXTURE, &asked));
  if (sampling == NULL) return CUDA_ERROR_INVALID_VALUE;
  *sampling = asked->sampling;
  return CUDA_SUCCESS;
}

CUresult cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC *view, CUtexObject handle) {
  texture *asked;
  TRY(texture_of(handle, OBJECT_TEXTURE, &asked));
  if (view == NULL || !asked->has_view) return CUDA_ERROR_INVALID_VALUE;
  *view = asked->view;
  return CUDA_SUCCESS;
}

CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *resource, CUsurfObject handle) {
  texture *asked;
  TRY(texture_of(handle, OBJECT_SURFACE, &asked));
  if (resource == NULL) return CUDA_ERROR_INVALID_VALUE;
  *resource = asked->resource;
  return CUDA_SUCCESS;
}
