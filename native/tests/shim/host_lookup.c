// SPDX-License-Identifier: Apache-2.0
// What look-ups find: the shim's functions for names that it owns, if the driver has them; the
// driver's and everyone else's own for all others. Not linked with the driver.
#include <dlfcn.h>
#include <pthread.h>

#include "host.h"

static const char *file_of(const void *address) {
  Dl_info info;
  return address != NULL && dladdr(address, &info) != 0 ? info.dli_fname : "nothing";
}

#define IS_IN(address, library)                                       \
  do {                                                                \
    const void *address_ = (const void *)(address);                   \
    if (strstr(file_of(address_), library) == NULL) {                 \
      FAIL(#address " is in %s, not in " library, file_of(address_)); \
    }                                                                 \
  } while (0)

static void *open_driver(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) FAIL("%s", dlerror());
  return driver;
}

static void owned_names_are_the_shims(void) {
  void *driver = open_driver();
  IS_IN(dlsym(driver, "cuInit"), "liballotment-shim");
  IS_IN(dlsym(driver, "cuMemAlloc_v2"), "liballotment-shim");
  IS_IN(dlsym(driver, "cuMemAllocAsync_ptsz"), "liballotment-shim");
  EXPECT(dlsym(driver, "cuMemAlloc_v2") == dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
  void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  IS_IN(dlsym(nvml, "nvmlDeviceGetMemoryInfo"), "liballotment-shim");
  IS_IN(dlsym(nvml, "nvmlDeviceGetName"), "libnvidia-ml.so.1");
}

static void other_names_are_the_drivers(void) {
  void *driver = open_driver();
  IS_IN(dlsym(driver, "cuCtxGetCurrent"), "libcuda.so.1");
  IS_IN(dlsym(driver, "cuStreamQuery"), "libcuda.so.1");
  // Nothing that a sanitizer's runtime has too.
  IS_IN(dlsym(RTLD_DEFAULT, "getppid"), "libc.so.6");
  IS_IN(dlsym(RTLD_NEXT, "getppid"), "libc.so.6");
}

static void unknown_names_are_null(void) {
  void *driver = open_driver();
  EXPECT(dlsym(driver, "cuNoSuchThing") == NULL);
  EXPECT(strstr(dlerror(), "cuNoSuchThing") != NULL);
  EXPECT(dlerror() == NULL);
  EXPECT(dlsym(driver, "nvmlDeviceGetCount") == NULL);
  EXPECT(strstr(dlerror(), "nvmlDeviceGetCount") != NULL);
  void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  EXPECT(dlsym(nvml, "cuInit") == NULL);
  EXPECT(dlsym(driver, "") == NULL);
  EXPECT(dlsym(driver, "cu") == NULL);
  EXPECT(dlsym(driver, "cuMemAlloc_v") == NULL);
  EXPECT(dlsym(driver, "cuMemAlloc_v22") == NULL);
}

static void nothing_is_there_before_the_driver(void) {
  EXPECT(dlsym(RTLD_DEFAULT, "cuInit") == NULL);
  EXPECT(strstr(dlerror(), "cuInit") != NULL);
  EXPECT(dlsym(RTLD_NEXT, "cuMemAlloc_v2") == NULL);
  EXPECT(dlvsym(RTLD_DEFAULT, "cuInit", "ANY") == NULL);
  void *self = dlopen(NULL, RTLD_NOW);
  EXPECT(dlsym(self, "cuMemAlloc_v2") == NULL);
  EXPECT(dlsym(self, "puts") != NULL);
  open_driver();
  IS_IN(dlsym(RTLD_DEFAULT, "cuInit"), "liballotment-shim");
  IS_IN(dlsym(RTLD_NEXT, "cuInit"), "liballotment-shim");
}

static void an_old_drivers_gaps_stay(void) {
  void *driver = dlopen(getenv("OLD_DRIVER"), RTLD_NOW);
  if (driver == NULL) FAIL("%s", dlerror());
  IS_IN(dlsym(driver, "cuInit"), "liballotment-shim");
  IS_IN(dlvsym(driver, "cuMemAlloc_v2", "ANY"), "liballotment-shim");
  EXPECT(dlvsym(driver, "cuCtxCreate_v4", "ANY") == NULL);
  EXPECT(dlsym(driver, "cuCtxCreate_v4") == NULL);
  EXPECT(strstr(dlerror(), "cuCtxCreate_v4") != NULL);
  EXPECT(dlsym(driver, "cuMemAllocAsync") == NULL);
  EXPECT(dlsym(RTLD_DEFAULT, "cuMemAllocAsync") == NULL);
  EXPECT(dlsym(RTLD_NEXT, "cuGetProcAddress_v2") == NULL);
}

static void *initialize_while_cancelled(void *initialize) {
  pthread_cancel(pthread_self());
  ((CUresult (*)(unsigned int))initialize)(0);
  pthread_testcancel();
  return NULL;
}

// A thread that is cancelled in the driver keeps no lock of the shim, and the environment as it
// was.
static void a_thread_is_cancelled_in_the_driver(void) {
  void *driver = dlopen(getenv("OLD_DRIVER"), RTLD_NOW), *end;
  CUresult (*initialize)(unsigned int) = (CUresult (*)(unsigned int))dlsym(driver, "cuInit");
  setenv("CUDA_VISIBLE_DEVICES", "0", 1);
  pthread_t thread;
  OK(pthread_create(&thread, NULL, initialize_while_cancelled, (void *)initialize));
  OK(pthread_join(thread, &end));
  EXPECT(end == PTHREAD_CANCELED);
  EXPECT(strcmp(getenv("CUDA_VISIBLE_DEVICES"), "0") == 0);
  OK(initialize(0));
}

static void other_libraries_keep_theirs(void) {
  void *other = dlopen(getenv("OTHER_LIBRARY"), RTLD_NOW);
  if (other == NULL) FAIL("%s", dlerror());
  int (*function)(void) = (int (*)(void))dlsym(other, "cuMemAlloc_v2");
  EXPECT_EQUAL(function(), 4711);
  open_driver();
  function = (int (*)(void))dlsym(other, "cuMemAlloc_v2");
  EXPECT_EQUAL(function(), 4711);
}

typedef CUresult look_up_v1(const char *, void **, int, uint64_t);
typedef CUresult look_up_v2(const char *, void **, int, uint64_t, CUdriverProcAddressQueryResult *);

// What cuGetProcAddress gives is what dlsym gives for that variant's own name.
static void get_proc_address_gives_the_right_variant(void) {
  static const struct {
    const char *name;
    int version;
    uint64_t flags;
    const char *variant;
  } requests[] = {
      {"cuInit", 2000, 0, "cuInit"},
      {"cuMemAlloc", 2000, 0, "cuMemAlloc"},
      {"cuMemAlloc", 3020, 0, "cuMemAlloc_v2"},
      {"cuMemAlloc", 12000, 0, "cuMemAlloc_v2"},
      {"cuMemAlloc", 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, "cuMemAlloc_v2"},
      {"cuMemGetInfo", 11030, 0, "cuMemGetInfo_v2"},
      {"cuCtxCreate", 4000, 0, "cuCtxCreate_v2"},
      {"cuMemAllocAsync", 11020, 0, "cuMemAllocAsync"},
      {"cuMemAllocAsync", 11020, CU_GET_PROC_ADDRESS_LEGACY_STREAM, "cuMemAllocAsync"},
      {"cuMemAllocAsync", 11020, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
       "cuMemAllocAsync_ptsz"},
      {"cuGraphLaunch", 10000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, "cuGraphLaunch_ptsz"},
      {"cuDevicePrimaryCtxRelease", 12000, 0, "cuDevicePrimaryCtxRelease_v2"},
      {"cuGetProcAddress", 11030, 0, "cuGetProcAddress"},
      {"cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"},
      {"cuLaunchKernel", 12000, 0, "cuLaunchKernel"},
      {"cuLaunchKernel", 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
       "cuLaunchKernel_ptsz"},
  };
  void *driver = open_driver();
  CUresult (*init)(unsigned) = (CUresult (*)(unsigned))dlsym(driver, "cuInit");
  OK(init(0));
  look_up_v1 *first = (look_up_v1 *)dlsym(driver, "cuGetProcAddress");
  look_up_v2 *second = (look_up_v2 *)dlsym(driver, "cuGetProcAddress_v2");
  for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
    void *function = NULL;
    void *wanted = dlsym(driver, requests[i].variant);
    CUdriverProcAddressQueryResult status;
    OK(first(requests[i].name, &function, requests[i].version, requests[i].flags));
    if (function != wanted) FAIL("%s: not %s", requests[i].name, requests[i].variant);
    OK(second(requests[i].name, &function, requests[i].version, requests[i].flags, &status));
    if (function != wanted) FAIL("%s: not %s (v2)", requests[i].name, requests[i].variant);
    EXPECT_EQUAL(status, CU_GET_PROC_ADDRESS_SUCCESS);
  }
  void *function = &function;
  CUdriverProcAddressQueryResult status;
  second("cuNoSuchThing", &function, 12000, 0, &status);
  EXPECT(function == NULL);
  EXPECT_EQUAL(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  second("cuMemAllocAsync", &function, 10000, 0, &status);
  EXPECT(function == NULL);
  EXPECT_EQUAL(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
}

// libc's own functions, found without the shim's help, lead to the shim as well.
static void the_loaders_own_functions_find_the_shim(void) {
  void *libc = dlopen("libc.so.6", RTLD_NOW);
  void *(*own)(void *, const char *) = (void *(*)(void *, const char *))dlsym(libc, "dlsym");
  if (own == NULL) return;  // before glibc 2.34 it is in libdl
  IS_IN(own, "libc.so.6");
  void *driver = open_driver();
  IS_IN(own(driver, "cuMemAlloc_v2"), "liballotment-shim");
  IS_IN(own(driver, "cuCtxGetCurrent"), "libcuda.so.1");
}

static const test_case cases[] = {
    {"owned_names_are_the_shims", owned_names_are_the_shims},
    {"other_names_are_the_drivers", other_names_are_the_drivers},
    {"unknown_names_are_null", unknown_names_are_null},
    {"nothing_is_there_before_the_driver", nothing_is_there_before_the_driver},
    {"an_old_drivers_gaps_stay", an_old_drivers_gaps_stay},
    {"a_thread_is_cancelled_in_the_driver", a_thread_is_cancelled_in_the_driver},
    {"other_libraries_keep_theirs", other_libraries_keep_theirs},
    {"get_proc_address_gives_the_right_variant", get_proc_address_gives_the_right_variant},
    {"the_loaders_own_functions_find_the_shim", the_loaders_own_functions_find_the_shim},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
