// SPDX-License-Identifier: Apache-2.0
// Takes GPU memory, 256 MiB at a time, until the driver refuses.
//
// It loads the driver at run time, so it needs neither a GPU nor a toolkit to compile:
//
//   cc -o fill fill.c -ldl
//   allot run --simulated a100-80gb --memory 4Gi -- ./fill
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*init_function)(unsigned int);
typedef int (*device_function)(int *, int);
typedef int (*retain_function)(void **, int);
typedef int (*current_function)(void *);
typedef int (*info_function)(size_t *, size_t *);
typedef int (*allocate_function)(unsigned long long *, size_t);
typedef int (*name_function)(int, const char **);

static void *driver;

static void *find(const char *name) {
  void *function = dlsym(driver, name);
  if (function == NULL) {
    fprintf(stderr, "the driver has no %s\n", name);
    exit(1);
  }
  return function;
}

static void check(int result, const char *what) {
  const char *name = "?";
  if (result == 0) return;
  ((name_function)find("cuGetErrorName"))(result, &name);
  fprintf(stderr, "%s: %s\n", what, name);
  exit(1);
}

static void show_memory(const char *when) {
  size_t available, total;
  check(((info_function)find("cuMemGetInfo_v2"))(&available, &total), "cuMemGetInfo");
  printf("%s: %zu of %zu MiB free\n", when, available >> 20, total >> 20);
}

int main(void) {
  int device, result;
  void *context;
  const char *name = "?";
  unsigned long long address;
  size_t got = 0;
  const size_t piece = 256u << 20;

  driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) {
    fprintf(stderr, "no CUDA driver: %s\n", dlerror());
    return 1;
  }
  check(((init_function)find("cuInit"))(0), "cuInit");
  check(((device_function)find("cuDeviceGet"))(&device, 0), "cuDeviceGet");
  check(((retain_function)find("cuDevicePrimaryCtxRetain"))(&context, device), "context");
  check(((current_function)find("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");

  show_memory("before");
  while ((result = ((allocate_function)find("cuMemAlloc_v2"))(&address, piece)) == 0) got += piece;
  ((name_function)find("cuGetErrorName"))(result, &name);
  printf("got %zu MiB, then %s\n", got >> 20, name);
  show_memory("after");
  return 0;
}
