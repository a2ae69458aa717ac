// SPDX-License-Identifier: Apache-2.0
// Prints what cuInit gives, then the UUID and the total memory of each device that the program
// sees. With an argument, first allocates on the device of that ordinal.
#include "host.h"

static void print_device(CUdevice device) {
  CUuuid uuid;
  size_t bytes;
  OK(cuDeviceGetUuid_v2(&uuid, device));
  OK(cuDeviceTotalMem_v2(&bytes, device));
  printf("GPU-");
  for (int i = 0; i < 16; i++) {
    printf("%02x%s", (unsigned char)uuid.bytes[i], i == 3 || i == 5 || i == 7 || i == 9 ? "-" : "");
  }
  printf(" %zu\n", bytes);
}

int main(int argc, char **argv) {
  const char *before = getenv("CUDA_VISIBLE_DEVICES");
  char *kept = before == NULL ? NULL : strdup(before);
  printf("%d\n", (int)cuInit(0));
  const char *after = getenv("CUDA_VISIBLE_DEVICES");
  EXPECT((kept == NULL) == (after == NULL));
  EXPECT(kept == NULL || strcmp(kept, after) == 0);
  int count = 0;
  if (cuDeviceGetCount(&count) != CUDA_SUCCESS) return 0;
  for (int i = 0; i < count; i++) print_device(i);
  if (argc > 1) {
    CUdeviceptr pointer;
    start_on(atoi(argv[1]));
    OK(cuMemAlloc_v2(&pointer, 64 * MIB));
    look_at_share();
    for (int i = 0; i < (int)share.policy->device_count; i++) {
      printf("%llu\n", (unsigned long long)charged(i));
    }
  }
  return 0;
}
