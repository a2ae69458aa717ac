// SPDX-License-Identifier: Apache-2.0
// Modules: images loaded into a context, with their functions and variables.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

#define FATBIN_WRAPPER 0x466243b1u
#define FATBIN 0xba55ed50u
#define LARGEST_FILE (256 * MIB)

// Compiled images are taken as they are. Their names are not known here, so any is accepted.
static bool is_compiled(const void *image) {
  uint32_t magic;
  memcpy(&magic, image, sizeof magic);
  return magic == FATBIN_WRAPPER || magic == FATBIN || memcmp(image, "\177ELF", 4) == 0;
}

static bool is_text(const void *image) {
  const unsigned char *text = image;
  for (int i = 0; i < 4; i++) {
    if (text[i] == '\0') return false;
    if (text[i] < ' ' && strchr("\t\r\n", text[i]) == NULL) return false;
  }
  return true;
}

static void forget_names(module *dying) {
  for (unsigned i = 0; i < dying->entry_count; i++) free(dying->entries[i]);
  free(dying->entries);
  while (dying->globals != NULL) {
    global *gone = dying->globals;
    dying->globals = gone->next;
    free(gone->name);
    free(gone);
  }
}

void module_destroy_locked(module *dying) {
  while (dying->head.children != NULL) {
    function *gone = (function *)dying->head.children;
    free(gone->name);
    object_free(gone);
  }
  for (global *at = dying->globals; at != NULL; at = at->next) {
    range *memory = at->address != 0 ? range_find(at->address) : NULL;
    if (memory != NULL) memory_free_locked(memory);
  }
  forget_names(dying);
  object_free(dying);
}

static CUresult read_image(const void *image, module *into) {
  if (is_compiled(image)) {
    into->opaque = true;
    return CUDA_SUCCESS;
  }
  if (!is_text(image)) return CUDA_ERROR_INVALID_IMAGE;
  return ptx_read(image, into) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX;
}

static CUresult place_globals(context *owner, module *made) {
  for (global *at = made->globals; at != NULL; at = at->next) {
    TRY(memory_new(owner, at->size, RANGE_PLAIN, &at->address));
    range_find(at->address)->touched = true;  // its initial value
  }
  return CUDA_SUCCESS;
}

CUresult module_load(context *owner, const void *image, module **loaded) {
  if (image == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  module *made = object_new(OBJECT_MODULE, sizeof(module), owner);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (made != NULL) {
    made->owner = owner;
    result = read_image(image, made);
    if (result == CUDA_SUCCESS) result = place_globals(owner, made);
    if (result != CUDA_SUCCESS) module_destroy_locked(made);
  }
  UNLOCK();
  if (result == CUDA_SUCCESS) *loaded = made;
  return result;
}

static bool has_entry(const module *from, const char *name) {
  for (unsigned i = 0; i < from->entry_count; i++) {
    if (strcmp(from->entries[i], name) == 0) return true;
  }
  return from->opaque && *name != '\0';
}

static function *known_function(const module *from, const char *name) {
  for (object *at = from->head.children; at != NULL; at = at->next) {
    if (strcmp(((function *)at)->name, name) == 0) return (function *)at;
  }
  return NULL;
}

static function *new_function(module *from, const char *name) {
  char *copy = strdup(name);
  function *made = copy != NULL ? object_new(OBJECT_FUNCTION, sizeof(function), from) : NULL;
  if (made == NULL) {
    free(copy);
    return NULL;
  }
  made->module = from;
  made->name = copy;
  made->carveout = -1;
  if (strcmp(name, "allot_spin") == 0) made->behaviour = FUNCTION_SPIN;
  if (strcmp(name, "allot_trap") == 0) made->behaviour = FUNCTION_TRAP;
  return made;
}

CUresult module_function(module *from, const char *name, function **found) {
  LOCK();
  CUresult result = CUDA_SUCCESS;
  *found = known_function(from, name);
  if (*found == NULL) {
    result = CUDA_ERROR_NOT_FOUND;
    if (has_entry(from, name)) {
      *found = new_function(from, name);
      result = *found != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  UNLOCK();
  return result;
}

static CUresult module_of(CUmodule handle, module **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_MODULE)) return CUDA_ERROR_INVALID_HANDLE;
  *found = (module *)handle;
  return CUDA_SUCCESS;
}

// ---- entry points ------------------------------------------------------------------------------

CUresult cuModuleLoadData(CUmodule *handle, const void *image) {
  ENTER_CONTEXT(current);
  if (handle == NULL) return CUDA_ERROR_INVALID_VALUE;
  module *loaded;
  TRY(module_load(current, image, &loaded));
  *handle = (CUmodule)loaded;
  return CUDA_SUCCESS;
}

// Compiler logs, if asked for, are empty.
static void clear_logs(unsigned count, const CUjit_option *options, void **values) {
  for (unsigned i = 0; i < count && options != NULL && values != NULL; i++) {
    if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES ||
        options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) {
      values[i] = NULL;
    }
  }
}

CUresult cuModuleLoadDataEx(CUmodule *handle, const void *image, unsigned int count,
                            CUjit_option *options, void **values) {
  TRY(cuModuleLoadData(handle, image));
  clear_logs(count, options, values);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadFatBinary(CUmodule *handle, const void *image) {
  return cuModuleLoadData(handle, image);
}

CUresult image_from_file(const char *path, char **image) {
  FILE *file = fopen(path, "rbe");
  if (file == NULL) return CUDA_ERROR_FILE_NOT_FOUND;
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  CUresult result = CUDA_ERROR_INVALID_IMAGE;
  if (size >= 0 && (uint64_t)size < LARGEST_FILE) {
    // Some bytes more, so that looking at the beginning of a short file is in bounds.
    *image = calloc(1, (size_t)size + 8);
    result = *image != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (*image != NULL && fread(*image, 1, (size_t)size, file) != (size_t)size) {
      free(*image);
      result = CUDA_ERROR_FILE_NOT_FOUND;
    }
  }
  fclose(file);
  return result;
}

CUresult cuModuleLoad(CUmodule *handle, const char *path) {
  ENTER_CONTEXT(current);
  if (handle == NULL || path == NULL) return CUDA_ERROR_INVALID_VALUE;
  char *image;
  TRY(image_from_file(path, &image));
  CUresult result = cuModuleLoadData(handle, image);
  free(image);
  return result;
}

CUresult cuModuleUnload(CUmodule handle) {
  module *dying;
  TRY(module_of(handle, &dying));
  context_drain(dying->owner->gpu, dying->owner);
  LOCK();
  module_destroy_locked(dying);
  UNLOCK();
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *handle, CUmodule from, const char *name) {
  module *asked;
  TRY(module_of(from, &asked));
  if (handle == NULL || name == NULL) return CUDA_ERROR_INVALID_VALUE;
  function *found;
  TRY(module_function(asked, name, &found));
  *handle = (CUfunction)found;
  return CUDA_SUCCESS;
}

CUresult module_global(const module *from, const char *name, CUdeviceptr *address, size_t *size) {
  for (const global *at = from->globals; at != NULL; at = at->next) {
    if (strcmp(at->name, name) != 0) continue;
    if (address != NULL) *address = at->address;
    if (size != NULL) *size = at->size;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *size, CUmodule from, const char *name) {
  module *asked;
  TRY(module_of(from, &asked));
  if (name == NULL) return CUDA_ERROR_INVALID_VALUE;
  return module_global(asked, name, address, size);
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
  ENTER();
  if (mode == NULL) return CUDA_ERROR_INVALID_VALUE;
  *mode = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule from) {
  module *asked;
  TRY(module_of(from, &asked));
  if (count == NULL) return CUDA_ERROR_INVALID_VALUE;
  *count = asked->entry_count;
  return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int count, CUmodule from) {
  module *asked;
  TRY(module_of(from, &asked));
  if (functions == NULL) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count && i < asked->entry_count; i++) {
    TRY(cuModuleGetFunction(&functions[i], from, asked->entries[i]));
  }
  return CUDA_SUCCESS;
}
