// SPDX-License-Identifier: Apache-2.0
// See driver.h.
#include "driver.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char library_name[] = "libcuda.so.1";

static const char spin_ptx[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry allot_spin(.param .u64 allot_spin_nanoseconds)\n"
    "{\n"
    "  .reg .pred %p<2>;\n"
    "  .reg .b64 %rd<5>;\n"
    "  ld.param.u64 %rd1, [allot_spin_nanoseconds];\n"
    "  mov.u64 %rd2, %globaltimer;\n"
    "spin:\n"
    "  mov.u64 %rd3, %globaltimer;\n"
    "  sub.s64 %rd4, %rd3, %rd2;\n"
    "  setp.lt.u64 %p1, %rd4, %rd1;\n"
    "  @%p1 bra spin;\n"
    "  ret;\n"
    "}\n";

static _Noreturn void give_up(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(3);
}

static void *library_handle(void) {
  static void *handle;
  if (handle == NULL) handle = dlopen(library_name, RTLD_NOW | RTLD_GLOBAL);
  if (handle == NULL) give_up(library_name, dlerror());
  return handle;
}

void *find_wrapped(const char *name) {
  void *address = dlsym(library_handle(), name);
  if (address == NULL) give_up(name, "the driver has no such function");
  return address;
}

typedef struct {
  uintptr_t base;
  char path[4096];
} loaded_library;

static int is_driver(struct dl_phdr_info *info, size_t size, void *found) {
  const char *name = info->dlpi_name == NULL ? "" : strrchr(info->dlpi_name, '/');
  if (name == NULL || strncmp(name, "/libcuda.so", strlen("/libcuda.so")) != 0) return 0;
  loaded_library *library = found;
  library->base = info->dlpi_addr;
  snprintf(library->path, sizeof library->path, "%s", info->dlpi_name);
  return 1;
}

static const char *map_file(const char *path) {
  struct stat status;
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0 || fstat(descriptor, &status) != 0) give_up(path, "cannot be opened");
  void *start = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  close(descriptor);
  if (start == MAP_FAILED) give_up(path, "cannot be mapped");
  return start;
}

void *find_bare(const char *name) {
  static loaded_library library;
  static const char *file;
  if (file == NULL) {
    library_handle();
    if (dl_iterate_phdr(is_driver, &library) == 0) give_up(library_name, "is not loaded");
    file = map_file(library.path);
  }
  const ElfW(Ehdr) *header = (const void *)file;
  const ElfW(Shdr) *sections = (const void *)(file + header->e_shoff);
  for (int index = 0; index < header->e_shnum; index++) {
    if (sections[index].sh_type != SHT_DYNSYM) continue;
    const ElfW(Sym) *symbols = (const void *)(file + sections[index].sh_offset);
    const char *names = file + sections[sections[index].sh_link].sh_offset;
    for (size_t each = 0; each < sections[index].sh_size / sizeof *symbols; each++)
      if (symbols[each].st_shndx != SHN_UNDEF && strcmp(names + symbols[each].st_name, name) == 0)
        return (void *)(library.base + symbols[each].st_value);
  }
  give_up(name, "is not in the driver's file");
}

void need(CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return;
  char text[32];
  snprintf(text, sizeof text, "CUresult %d", (int)result);
  give_up(what, text);
}

void open_device(void) {
  WRAPPED(cuInit);
  WRAPPED(cuDeviceGet);
  WRAPPED(cuDevicePrimaryCtxRetain);
  WRAPPED(cuCtxSetCurrent);
  CUdevice device;
  CUcontext context;
  need(wrapped_cuInit(0), "cuInit");
  need(wrapped_cuDeviceGet(&device, 0), "cuDeviceGet");
  need(wrapped_cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  need(wrapped_cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

CUfunction spin_function(void) {
  WRAPPED(cuModuleLoadData);
  WRAPPED(cuModuleGetFunction);
  CUmodule module;
  CUfunction function;
  need(wrapped_cuModuleLoadData(&module, spin_ptx), "cuModuleLoadData");
  need(wrapped_cuModuleGetFunction(&function, module, "allot_spin"), "cuModuleGetFunction");
  return function;
}

uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

uint64_t random_u64(uint64_t *state) {
  *state += 0x9e3779b97f4a7c15u;  // splitmix64: any seed will do
  uint64_t value = *state;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

void wait_for_start(void) {
  char byte;
  printf("ready\n");
  fflush(stdout);
  while (read(STDIN_FILENO, &byte, 1) > 0) continue;
}

static int ascending(const void *left, const void *right) {
  int64_t one = *(const int64_t *)left, other = *(const int64_t *)right;
  return (one > other) - (one < other);
}

int64_t percentile(int64_t *samples, size_t count, double fraction) {
  if (count == 0) return 0;
  qsort(samples, count, sizeof *samples, ascending);
  size_t index = (size_t)(fraction * (double)(count - 1) + 0.5);
  return samples[index];
}

static void print_percentiles(const char *name, int64_t *samples, size_t count, int calls) {
  printf(", \"%s\": {\"p50\": %.2f, \"p99\": %.2f}", name,
         (double)percentile(samples, count, 0.5) / calls,
         (double)percentile(samples, count, 0.99) / calls);
}

void print_pairs(const char *operation, int64_t *bare, int64_t *wrapped, size_t count, int calls) {
  int64_t *added = malloc((count + 1) * sizeof *added);
  if (added == NULL) give_up(operation, "out of memory");
  for (size_t index = 0; index < count; index++) added[index] = wrapped[index] - bare[index];
  printf("{\"operation\": \"%s\", \"samples\": %zu", operation, count);
  print_percentiles("bare", bare, count, calls);
  print_percentiles("wrapped", wrapped, count, calls);
  print_percentiles("added", added, count, calls);
  printf("}\n");
  fflush(stdout);
  free(added);
}
