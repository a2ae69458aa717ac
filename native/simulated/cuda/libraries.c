// SPDX-License-Identifier: Apache-2.0
// Libraries: images that belong to no context. Each context that uses one gets a module of it, and
// a kernel is a name that becomes that module's function where it is launched.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

typedef struct library {
  object head;
  module names;       // as read once, without memory
  const void *image;  // compiled: only a mark to load again
  char *text;         // PTX, kept because the program may free its own
} library;

typedef struct kernel {
  object head;
  library *from;
  char *name;
} kernel;

typedef struct placed {
  library *from;
  context *owner;
  uint64_t library_id, context_id;
  module *loaded;
  uint64_t module_id;
  struct placed *next;
} placed;

static placed *placements;

static CUresult library_of(CUlibrary handle, library **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_LIBRARY)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (library *)handle;
  return CUDA_SUCCESS;
}

static CUresult kernel_of(CUkernel handle, kernel **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_KERNEL)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (kernel *)handle;
  return CUDA_SUCCESS;
}

static bool still_there(const placed *at) {
  return object_valid(at->loaded, OBJECT_MODULE) && at->loaded->head.id == at->module_id &&
         at->from->head.id == at->library_id;
}

static placed *find_placed(const library *from, const context *owner) {
  for (placed *at = placements; at != NULL; at = at->next) {
    if (at->from == from && at->owner == owner && at->context_id == owner->head.id) return at;
  }
  return NULL;
}

static CUresult place(library *from, context *owner, module **loaded) {
  LOCK();
  placed *at = find_placed(from, owner);
  bool ready = at != NULL && still_there(at);
  if (ready) *loaded = at->loaded;
  UNLOCK();
  if (ready) return CUDA_SUCCESS;
  TRY(module_load(owner, from->text != NULL ? from->text : from->image, loaded));
  LOCK();
  at = find_placed(from, owner);
  if (at == NULL) {
    at = calloc(1, sizeof *at);
    if (at != NULL) {
      at->next = placements;
      placements = at;
    }
  }
  if (at != NULL) {
    *at =
        (placed){from, owner, from->head.id, owner->head.id, *loaded, (*loaded)->head.id, at->next};
  }
  UNLOCK();
  return at != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// A mark by which module_load knows a compiled image; its bytes may be gone by then.
static const uint32_t compiled_mark[2] = {0xba55ed50u, 0};

static CUresult read_names(const void *code, library *into) {
  uint32_t magic;
  memcpy(&magic, code, sizeof magic);
  bool compiled = magic == 0x466243b1u || magic == 0xba55ed50u || memcmp(code, "\177ELF", 4) == 0;
  if (compiled) {
    into->names.opaque = true;
    into->image = compiled_mark;
    return CUDA_SUCCESS;
  }
  into->text = strdup(code);
  if (into->text == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  return ptx_read(into->text, &into->names) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX;
}

static void forget(library *dying) {
  for (unsigned i = 0; i < dying->names.entry_count; i++) free(dying->names.entries[i]);
  free(dying->names.entries);
  while (dying->names.globals != NULL) {
    global *gone = dying->names.globals;
    dying->names.globals = gone->next;
    free(gone->name);
    free(gone);
  }
  while (dying->head.children != NULL) {
    kernel *gone = (kernel *)dying->head.children;
    free(gone->name);
    object_free(gone);
  }
  free(dying->text);
  object_free(dying);
}

CUresult cuLibraryLoadData(CUlibrary *handle, const void *code, CUjit_option *options,
                           void **values, unsigned int count, CUlibraryOption *library_options,
                           void **library_values, unsigned int library_count) {
  ENTER();
  if (handle == NULL || code == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  library *made = object_new(OBJECT_LIBRARY, sizeof(library), NULL);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (made != NULL) {
    result = read_names(code, made);
    if (result != CUDA_SUCCESS) forget(made);
  }
  UNLOCK();
  if (result == CUDA_SUCCESS) *handle = (CUlibrary)made;
  return result;
}

CUresult cuLibraryLoadFromFile(CUlibrary *handle, const char *path, CUjit_option *options,
                               void **values, unsigned int count, CUlibraryOption *library_options,
                               void **library_values, unsigned int library_count) {
  ENTER();
  if (handle == NULL || path == NULL) return CUDA_ERROR_INVALID_VALUE;
  char *image;
  TRY(image_from_file(path, &image));
  CUresult result = cuLibraryLoadData(handle, image, options, values, count, library_options,
                                      library_values, library_count);
  free(image);
  return result;
}

CUresult cuLibraryUnload(CUlibrary handle) {
  library *dying;
  TRY(library_of(handle, &dying));
  for (int ordinal = 0; ordinal < driver.device_count; ordinal++) {
    context_drain(driver.gpus[ordinal], NULL);
  }
  LOCK();
  for (placed **at = &placements; *at != NULL;) {
    placed *gone = *at;
    if (gone->from != dying) {
      at = &gone->next;
      continue;
    }
    if (still_there(gone)) module_destroy_locked(gone->loaded);
    *at = gone->next;
    free(gone);
  }
  forget(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

static bool has_kernel(const library *from, const char *name) {
  for (unsigned i = 0; i < from->names.entry_count; i++) {
    if (strcmp(from->names.entries[i], name) == 0) return true;
  }
  return from->names.opaque && *name != '\0';
}

static kernel *kernel_named(library *from, const char *name) {
  for (object *at = from->head.children; at != NULL; at = at->next) {
    if (strcmp(((kernel *)at)->name, name) == 0) return (kernel *)at;
  }
  char *copy = strdup(name);
  kernel *made = copy != NULL ? object_new(OBJECT_KERNEL, sizeof(kernel), from) : NULL;
  if (made == NULL) {
    free(copy);
    return NULL;
  }
  made->from = from;
  made->name = copy;
  return made;
}

CUresult cuLibraryGetKernel(CUkernel *handle, CUlibrary from, const char *name) {
  library *asked;
  TRY(library_of(from, &asked));
  if (handle == NULL || name == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (!has_kernel(asked, name)) return CUDA_ERROR_NOT_FOUND;
  LOCK();
  kernel *found = kernel_named(asked, name);
  UNLOCK();
  if (found == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUkernel)found;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary from) {
  library *asked;
  TRY(library_of(from, &asked));
  if (count == NULL) return CUDA_ERROR_INVALID_VALUE;
  *count = asked->names.entry_count;
  return CUDA_SUCCESS;
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int count, CUlibrary from) {
  library *asked;
  TRY(library_of(from, &asked));
  if (kernels == NULL) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count && i < asked->names.entry_count; i++) {
    TRY(cuLibraryGetKernel(&kernels[i], from, asked->names.entries[i]));
  }
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule *handle, CUlibrary from) {
  ENTER_CONTEXT(current);
  library *asked;
  TRY(library_of(from, &asked));
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  module *loaded;
  TRY(place(asked, current, &loaded));
  *handle = (CUmodule)loaded;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *size, CUlibrary from, const char *name) {
  ENTER_CONTEXT(current);
  library *asked;
  TRY(library_of(from, &asked));
  if (name == NULL) return CUDA_ERROR_INVALID_VALUE;
  module *loaded;
  TRY(place(asked, current, &loaded));
  return module_global(loaded, name, address, size);
}

CUresult cuLibraryGetManaged(CUdeviceptr *address, size_t *size, CUlibrary from, const char *name) {
  library *asked;
  TRY(library_of(from, &asked));
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuLibraryGetUnifiedFunction(void **function, CUlibrary from, const char *symbol) {
  library *asked;
  TRY(library_of(from, &asked));
  return CUDA_ERROR_NOT_FOUND;
}

// ---- kernels -----------------------------------------------------------------------------------

static CUresult function_in(CUkernel handle, context *owner, function **found) {
  kernel *asked;
  TRY(kernel_of(handle, &asked));
  module *loaded;
  TRY(place(asked->from, owner, &loaded));
  return module_function(loaded, asked->name, found);
}

CUresult kernel_function(CUkernel handle, function **found) {
  ENTER_CONTEXT(current);
  return function_in(handle, current, found);
}

CUresult cuKernelGetFunction(CUfunction *function_handle, CUkernel handle) {
  ENTER_CONTEXT(current);
  if (function_handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  function *found;
  TRY(function_in(handle, current, &found));
  *function_handle = (CUfunction)found;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary *from, CUkernel handle) {
  kernel *asked;
  TRY(kernel_of(handle, &asked));
  if (from == NULL) return CUDA_ERROR_INVALID_VALUE;
  *from = (CUlibrary)asked->from;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char **name, CUkernel handle) {
  kernel *asked;
  TRY(kernel_of(handle, &asked));
  if (name == NULL) return CUDA_ERROR_INVALID_VALUE;
  *name = asked->name;
  return CUDA_SUCCESS;
}

// Attributes are a device's, so they are kept with the function of its current or primary context.
static CUresult function_on(CUkernel handle, CUdevice device, context **owner, function **found) {
  int gpu;
  TRY(driver_gpu(device, &gpu));
  if (context_current(owner) != CUDA_SUCCESS || (*owner)->gpu != gpu) {
    *owner = driver.devices[gpu].primary;
    if (*owner == NULL || !(*owner)->active) return CUDA_ERROR_INVALID_CONTEXT;
  }
  return function_in(handle, *owner, found);
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel handle,
                              CUdevice device) {
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  context *owner;
  function *asked;
  TRY(function_on(handle, device, &owner, &asked));
  return function_attribute(asked, owner, attribute, value);
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle,
                              CUdevice device) {
  context *owner;
  function *changed;
  TRY(function_on(handle, device, &owner, &changed));
  return function_set_attribute(changed, owner, attribute, value);
}

CUresult cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache config, CUdevice device) {
  context *owner;
  function *changed;
  TRY(function_on(handle, device, &owner, &changed));
  changed->cache = config;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t *offset, size_t *size) {
  kernel *asked;
  TRY(kernel_of(handle, &asked));
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuKernelGetParamCount(CUkernel handle, size_t *count) {
  kernel *asked;
  TRY(kernel_of(handle, &asked));
  return CUDA_ERROR_NOT_SUPPORTED;
}
