// SPDX-License-Identifier: Apache-2.0
// Takes one granule after the other until the driver refuses. Prints what it got, and what
// cuMemGetInfo told before the first and after the last.
#include <stdio.h>

#include "driver.h"

int main(void) {
  const size_t granule = 2u << 20;
  open_device();
  WRAPPED(cuMemAlloc_v2);
  WRAPPED(cuMemGetInfo_v2);
  size_t before, after, total;
  need(wrapped_cuMemGetInfo_v2(&before, &total), "cuMemGetInfo");
  uint64_t got = 0;
  CUdeviceptr address;
  CUresult result;
  while ((result = wrapped_cuMemAlloc_v2(&address, granule)) == CUDA_SUCCESS) got += granule;
  need(wrapped_cuMemGetInfo_v2(&after, &total), "cuMemGetInfo");
  printf("{\"limit\": %zu, \"before\": %zu, \"got\": %llu, \"after\": %zu, \"result\": %d}\n",
         total, before, (unsigned long long)got, after, (int)result);
  return 0;
}
