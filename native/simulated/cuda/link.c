// SPDX-License-Identifier: Apache-2.0
// Linking images into one. Texts are put behind each other; of compiled images the first stands for
// all, since none of them is read.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

typedef struct link {
  object head;
  char *image;  // the first input that declares anything
  size_t size;
} link;

static CUresult link_of(CUlinkState handle, link **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_LINK)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (link *)handle;
  return CUDA_SUCCESS;
}

CUresult cuLinkCreate_v2(unsigned int count, CUjit_option *options, void **values,
                         CUlinkState *handle) {
  ENTER_CONTEXT(current);
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  link *made = object_new(OBJECT_LINK, sizeof(link), NULL);
  UNLOCK();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUlinkState)made;
  return CUDA_SUCCESS;
}

CUresult cuLinkAddData_v2(CUlinkState handle, CUjitInputType type, void *data, size_t size,
                          const char *name, unsigned int count, CUjit_option *options,
                          void **values) {
  link *into;
  TRY(link_of(handle, &into));
  if (data == NULL || size == 0) return CUDA_ERROR_INVALID_VALUE;
  // Texts are joined, so that the result has all their kernels; of compiled ones the first stays.
  bool text = type == CU_JIT_INPUT_PTX;
  if (into->image != NULL && !text) return CUDA_SUCCESS;
  size_t before = text ? into->size : 0;
  char *joined = realloc(into->image, before + size + 8);
  if (joined == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  memcpy(joined + before, data, size);
  while (text && size > 0 && joined[before + size - 1] == '\0') size--;
  memset(joined + before + size, 0, 8);
  into->image = joined;
  into->size = before + size;
  return CUDA_SUCCESS;
}

CUresult cuLinkAddFile_v2(CUlinkState handle, CUjitInputType type, const char *path,
                          unsigned int count, CUjit_option *options, void **values) {
  link *into;
  TRY(link_of(handle, &into));
  if (path == NULL) return CUDA_ERROR_INVALID_VALUE;
  char *image;
  TRY(image_from_file(path, &image));
  CUresult result =
      cuLinkAddData_v2(handle, type, image, type == CU_JIT_INPUT_PTX ? strlen(image) : 8, path,
                       count, options, values);
  free(image);
  return result;
}

CUresult cuLinkComplete(CUlinkState handle, void **image, size_t *size) {
  link *from;
  TRY(link_of(handle, &from));
  if (image == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (from->image == NULL) return CUDA_ERROR_INVALID_IMAGE;
  *image = from->image;
  if (size != NULL) *size = from->size + 1;
  return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState handle) {
  link *dying;
  TRY(link_of(handle, &dying));
  free(dying->image);
  LOCK();
  object_free(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuLinkCreate(unsigned int count, CUjit_option *options, void **values,
                      CUlinkState *handle) {
  return cuLinkCreate_v2(count, options, values, handle);
}

CUresult cuLinkAddData(CUlinkState handle, CUjitInputType type, void *data, size_t size,
                       const char *name, unsigned int count, CUjit_option *options, void **values) {
  return cuLinkAddData_v2(handle, type, data, size, name, count, options, values);
}

CUresult cuLinkAddFile(CUlinkState handle, CUjitInputType type, const char *path,
                       unsigned int count, CUjit_option *options, void **values) {
  return cuLinkAddFile_v2(handle, type, path, count, options, values);
}
