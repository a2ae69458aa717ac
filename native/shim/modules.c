// SPDX-License-Identifier: Apache-2.0
// Modules and libraries: their variables live in device memory that no allocation call is made for.
//
// The image tells names and sizes before it is loaded, and that much is reserved. Afterwards the
// driver tells the variables' addresses, and they are charged like any other memory: small ones by
// the block that they lie in, together with what else lies there.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fcntl.h>

#include "charge.h"
#include "dead.h"
#include "driver.h"
#include "image.h"
#include "memory.h"

#define NAME_BYTES 512

// ---- the reservation ----

typedef struct module_request {
  target at;
  const char *image;  // stays readable to the end
  uint64_t large;     // reserved for variables with memory of their own
  uint64_t in_block, blocks;
  uint64_t reserved;
} module_request;

// Small ones are laid side by side in blocks, as the driver would in empty ones.
static void add_variable(void *context, const char *name, size_t length, uint64_t bytes) {
  module_request *request = context;
  if (bytes >= SMALL_LIMIT) {
    uint64_t whole = round_up(bytes, CHARGE_GRANULE);
    request->large = request->large + whole < whole ? UINT64_MAX : request->large + whole;
    return;
  }
  uint64_t units = round_up(bytes, SMALL_UNIT);
  if (request->blocks == 0 || request->in_block + units > CHARGE_GRANULE) {
    request->blocks++;
    request->in_block = 0;
  }
  request->in_block += units;
}

static CUresult reserve_variables(module_request *request) {
  image_variables(request->image, add_variable, request);
  uint64_t blocks = request->blocks * CHARGE_GRANULE;
  request->reserved = request->large > UINT64_MAX - blocks ? UINT64_MAX : request->large + blocks;
  if (request->reserved == 0) return CUDA_SUCCESS;
  bool fits = charge_acquire(request->at.own, request->at.device, request->reserved);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult module_begin(module_request *request, const void *image) {
  *request = (module_request){.image = image};
  CUresult refusal = target_current(&request->at);
  if (refusal != CUDA_SUCCESS || request->at.context == NULL) return refusal;
  return reserve_variables(request);
}

#define FIRST_ORDINAL 0

// A library can be loaded with no context current, and takes its memory in one that comes later:
// most likely on the first device.
static CUresult library_begin(module_request *request, const void *image) {
  *request = (module_request){.image = image};
  CUresult refusal = target_current(&request->at);
  if (refusal == CUDA_SUCCESS && request->at.context == NULL) {
    refusal = target_device(&request->at, FIRST_ORDINAL);
    // Without a device the driver has its own error.
    if (refusal != CUDA_SUCCESS && request->at.own != NULL) return CUDA_SUCCESS;
  }
  return refusal == CUDA_SUCCESS ? reserve_variables(request) : refusal;
}

// ---- what was loaded ----

typedef CUresult find_variable(void *handle, const char *name, CUdeviceptr *address, size_t *bytes);

static CUresult find_in_module(void *handle, const char *name, CUdeviceptr *address,
                               size_t *bytes) {
  return DRIVER(USED(cuModuleGetGlobal_v2)(address, bytes, handle, name));
}

static CUresult find_in_library(void *handle, const char *name, CUdeviceptr *address,
                                size_t *bytes) {
  return DRIVER(USED(cuLibraryGetGlobal)(address, bytes, handle, name));
}

typedef struct module_visit {
  module_request *request;
  void *handle;
  record_space space;
  find_variable *find;
  uint32_t count;
  uint64_t charged;
  bool failed;
} module_visit;

static uint64_t part_of(const void *handle, uint32_t index) {
  return (uint64_t)(uintptr_t)handle ^ (uint64_t)(index + 1) << 48;
}

static bool put(process *own, const record *added) {
  record displaced;
  bool was_displaced;
  if (!records_put(&own->records, added, &displaced, &was_displaced)) return false;
  if (was_displaced && displaced.space == SPACE_POINTER) record_displaced(own, &displaced);
  return true;
}

// Names of C++ templates have any length. 0: the driver has no such variable.
static CUdeviceptr address_of(module_visit *visit, const char *name, size_t length, size_t *bytes) {
  char brief[NAME_BYTES], *copy = length < sizeof brief ? brief : malloc(length + 1);
  if (copy == NULL) {
    visit->failed = true;
    return 0;
  }
  memcpy(copy, name, length);
  copy[length] = '\0';
  CUdeviceptr address = 0;
  bool is_found = visit->find(visit->handle, copy, &address, bytes) == CUDA_SUCCESS;
  if (copy != brief) free(copy);
  return is_found ? address : 0;
}

static void keep_variable(void *context, const char *name, size_t length, uint64_t bytes) {
  module_visit *visit = context;
  module_request *request = visit->request;
  process *own = request->at.own;
  size_t actual = 0;
  CUdeviceptr address = address_of(visit, name, length, &actual);
  if (address == 0) return;
  if (actual != 0) bytes = actual;
  bool is_small = bytes < SMALL_LIMIT;
  record known;
  bool is_known = records_find(&own->records, SPACE_POINTER, address, &known);
  if (is_known && known.count == 0) return;  // named twice; what has a number is being freed
  record variable = {.space = SPACE_POINTER,
                     .kind = is_small ? KIND_SMALL : KIND_PLAIN,
                     .key = address,
                     .owner = (uint64_t)(uintptr_t)request->at.context,
                     .bytes = round_up(bytes, is_small ? SMALL_UNIT : CHARGE_GRANULE),
                     .device = (int16_t)request->at.device};
  record part = {.space = (uint8_t)visit->space,
                 .key = part_of(visit->handle, visit->count),
                 .owner = variable.owner,
                 .bytes = address};
  visit->failed = visit->failed || !put(own, &variable) || !put(own, &part);
  visit->count++;
  visit->charged += is_small ? small_enter(&request->at, address) : variable.bytes;
}

static void leave_variables(process *own, record_space space, void *handle, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    record part, variable;
    if (!records_take(&own->records, space, part_of(handle, i), &part)) continue;
    if (!records_take(&own->records, SPACE_POINTER, part.bytes, &variable)) continue;
    record_displaced(own, &variable);
  }
}

// False: what was loaded takes more than fits.
static bool module_keep(module_request *request, record_space space, void *handle,
                        find_variable *find) {
  process *own = request->at.own;
  module_visit visit = {.request = request, .handle = handle, .space = space, .find = find};
  image_variables(request->image, keep_variable, &visit);
  record whole = {.space = (uint8_t)space,
                  .key = (uint64_t)(uintptr_t)handle,
                  .owner = (uint64_t)(uintptr_t)request->at.context,
                  .count = visit.count};
  bool fits = put(own, &whole) && !visit.failed;
  if (visit.charged > request->reserved) {
    uint64_t more = visit.charged - request->reserved;
    if (!charge_acquire(own, request->at.device, more)) {
      charge_force(own, request->at.device, more);  // until it is given back below
      fits = false;
    }
    request->reserved += more;
  }
  if (visit.charged < request->reserved) {
    charge_release(own, request->at.device, request->reserved - visit.charged);
    request->reserved = visit.charged;
  }
  if (fits) return true;
  leave_variables(own, space, handle, visit.count);
  records_take(&own->records, space, (uint64_t)(uintptr_t)handle, &whole);
  // What leave_variables gave back is not given back again by the caller.
  request->reserved = request->reserved > visit.charged ? request->reserved - visit.charged : 0;
  return false;
}

static CUresult module_end(module_request *request, CUresult result, void *handle) {
  if (request->reserved == 0) return result;
  if (result == CUDA_SUCCESS) {
    if (module_keep(request, SPACE_MODULE, handle, find_in_module)) return result;
    DRIVER(REAL(cuModuleUnload)(handle));
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  charge_release(request->at.own, request->at.device, request->reserved);
  return result;
}

// Of a library without a context nothing is placed yet: it keeps what was reserved.
static bool library_keep(module_request *request, void *handle) {
  if (request->at.context != NULL) {
    return module_keep(request, SPACE_LIBRARY, handle, find_in_library);
  }
  record whole = {.space = SPACE_LIBRARY,
                  .key = (uint64_t)(uintptr_t)handle,
                  .bytes = request->reserved,
                  .device = (int16_t)request->at.device};
  return put(request->at.own, &whole);
}

static CUresult library_end(module_request *request, CUresult result, void *handle) {
  if (request->reserved == 0) return result;
  if (result == CUDA_SUCCESS) {
    if (library_keep(request, handle)) return result;
    DRIVER(REAL(cuLibraryUnload)(handle));
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  charge_release(request->at.own, request->at.device, request->reserved);
  return result;
}

// ---- images in files ----

typedef struct mapped_file {
  void *start;
  size_t size;
} mapped_file;

// With a NUL behind it, as a text needs: a page more than the file takes, anonymous.
static mapped_file map_image(const char *path) {
  mapped_file none = {0};
  int descriptor = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return none;
  struct stat status;
  void *start = MAP_FAILED;
  size_t page = (size_t)sysconf(_SC_PAGESIZE), size = 0;
  if (fstat(descriptor, &status) == 0 && status.st_size > 0) {
    size = round_up((uint64_t)status.st_size, page) + page;
    start = mmap(NULL, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start != MAP_FAILED && mmap(start, (size_t)status.st_size, PROT_READ,
                                    MAP_PRIVATE | MAP_FIXED, descriptor, 0) == MAP_FAILED) {
      munmap(start, size);
      start = MAP_FAILED;
    }
  }
  close(descriptor);
  return start == MAP_FAILED ? none : (mapped_file){start, size};
}

static void unmap_image(mapped_file file) {
  if (file.start != NULL) munmap(file.start, file.size);
}

// ---- entry points ----

#define LOAD(handle, image, call, kind)                                \
  do {                                                                 \
    UNCANCELLED;                                                       \
    module_request request;                                            \
    __typeof__(*(handle)) made = NULL;                                 \
    CUresult result = kind##_begin(&request, image);                   \
    if (result == CUDA_SUCCESS) {                                      \
      result = WITH_PATIENCE(request.at.own, request.at.device, call); \
      result = kind##_end(&request, result, made);                     \
    }                                                                  \
    GIVE_RESULT(handle, made, result);                                 \
    return result;                                                     \
  } while (0)

CUDA_WRAPPER(cuModuleLoadData, (CUmodule * module, const void *image)) {
  if (!governed()) return UNGOVERNED(cuModuleLoadData)(module, image);
  LOAD(module, image, REAL(cuModuleLoadData)(RESULT(module, made), image), module);
}

CUDA_WRAPPER(cuModuleLoadDataEx, (CUmodule * module, const void *image, unsigned int count,
                                  CUjit_option *options, void **values)) {
  if (!governed()) return UNGOVERNED(cuModuleLoadDataEx)(module, image, count, options, values);
  LOAD(module, image, REAL(cuModuleLoadDataEx)(RESULT(module, made), image, count, options, values),
       module);
}

CUDA_WRAPPER(cuModuleLoadFatBinary, (CUmodule * module, const void *image)) {
  if (!governed()) return UNGOVERNED(cuModuleLoadFatBinary)(module, image);
  LOAD(module, image, REAL(cuModuleLoadFatBinary)(RESULT(module, made), image), module);
}

static CUresult load_file(CUmodule *module, const char *path, const void *image) {
  LOAD(module, image, REAL(cuModuleLoad)(RESULT(module, made), path), module);
}

CUDA_WRAPPER(cuModuleLoad, (CUmodule * module, const char *path)) {
  if (!governed()) return UNGOVERNED(cuModuleLoad)(module, path);
  UNCANCELLED;
  mapped_file file = map_image(path);
  CUresult result = load_file(module, path, file.start);
  unmap_image(file);
  return result;
}

static CUresult unloaded(process *own, CUresult result, record_space space, void *handle,
                         const record *whole) {
  if (result == CUDA_SUCCESS) {
    leave_variables(own, space, handle, whole->count);
    charge_release(own, whole->device, whole->bytes);
  }
  if (result != CUDA_SUCCESS) put(own, whole);
  return result;
}

CUDA_WRAPPER(cuModuleUnload, (CUmodule module)) {
  process *own = governed() ? process_state() : NULL;
  UNCANCELLED;
  record whole;
  uint64_t key = (uint64_t)(uintptr_t)module;
  if (own == NULL || !records_take(&own->records, SPACE_MODULE, key, &whole)) {
    return REAL(cuModuleUnload)(module);
  }
  return unloaded(own, DRIVER(REAL(cuModuleUnload)(module)), SPACE_MODULE, module, &whole);
}

// ---- libraries ----

CUDA_WRAPPER(cuLibraryLoadData, (CUlibrary * library, const void *code, CUjit_option *jit_options,
                                 void **jit_values, unsigned int jit_count,
                                 CUlibraryOption *options, void **values, unsigned int count)) {
  if (!governed()) {
    return UNGOVERNED(cuLibraryLoadData)(library, code, jit_options, jit_values, jit_count, options,
                                         values, count);
  }
  LOAD(library, code,
       REAL(cuLibraryLoadData)(RESULT(library, made), code, jit_options, jit_values, jit_count,
                               options, values, count),
       library);
}

static CUresult load_library_file(CUlibrary *library, const char *path, CUjit_option *jit_options,
                                  void **jit_values, unsigned int jit_count,
                                  CUlibraryOption *options, void **values, unsigned int count,
                                  const void *image) {
  LOAD(library, image,
       REAL(cuLibraryLoadFromFile)(RESULT(library, made), path, jit_options, jit_values, jit_count,
                                   options, values, count),
       library);
}

CUDA_WRAPPER(cuLibraryLoadFromFile,
             (CUlibrary * library, const char *path, CUjit_option *jit_options, void **jit_values,
              unsigned int jit_count, CUlibraryOption *options, void **values,
              unsigned int count)) {
  if (!governed()) {
    return UNGOVERNED(cuLibraryLoadFromFile)(library, path, jit_options, jit_values, jit_count,
                                             options, values, count);
  }
  UNCANCELLED;
  mapped_file file = map_image(path);
  CUresult result = load_library_file(library, path, jit_options, jit_values, jit_count, options,
                                      values, count, file.start);
  unmap_image(file);
  return result;
}

CUDA_WRAPPER(cuLibraryUnload, (CUlibrary library)) {
  process *own = governed() ? process_state() : NULL;
  UNCANCELLED;
  record whole;
  uint64_t key = (uint64_t)(uintptr_t)library;
  if (own == NULL || !records_take(&own->records, SPACE_LIBRARY, key, &whole)) {
    return REAL(cuLibraryUnload)(library);
  }
  return unloaded(own, DRIVER(REAL(cuLibraryUnload)(library)), SPACE_LIBRARY, library, &whole);
}
