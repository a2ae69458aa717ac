// SPDX-License-Identifier: Apache-2.0
// A host program that stands before the driver itself: its own cuMemAlloc_v2 counts calls and goes
// on to the next one, which is the shim's.
#include <dlfcn.h>

#include "host.h"

static int counted;

__attribute__((visibility("default"))) CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
  static __typeof__(&cuMemAlloc_v2) next;
  if (next == NULL) next = (__typeof__(&cuMemAlloc_v2))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
  EXPECT(next != NULL && next != &cuMemAlloc_v2);
  counted++;
  return next(pointer, bytes);
}

int main(void) {
  CUdeviceptr pointer;
  look_at_share();
  start_on(0);
  OK(cuMemAlloc_v2(&pointer, 10 * MIB));
  GIVES(cuMemAlloc_v2(&pointer, 1000 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQUAL(counted, 2);
  EXPECT_EQUAL(charged(0), context_cost() + 10 * MIB);
  // Whoever looks the program's function up finds that, and the driver gives the shim's.
  EXPECT(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == (void *)&cuMemAlloc_v2);
  void *given;
  OK(cuGetProcAddress_v2("cuMemAlloc", &given, 12000, 0, NULL));
  EXPECT(given != (void *)&cuMemAlloc_v2);
  OK(((__typeof__(&cuMemAlloc_v2))given)(&pointer, 10 * MIB));
  EXPECT_EQUAL(charged(0), context_cost() + 20 * MIB);
  EXPECT_EQUAL(counted, 2);
  AGREE();
  return 0;
}
