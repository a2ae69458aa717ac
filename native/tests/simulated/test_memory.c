// SPDX-License-Identifier: Apache-2.0
// Every way to get device memory takes what it should, up to the last byte, and gives it back.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4
#include "tests/simulated/driver_test.h"

static size_t before;

static void expect_taken(uint64_t bytes) {
  size_t now = free_bytes();
  if (before - now != bytes) {
    fprintf(stderr, "taken: %zu, expected %llu\n", before - now, (unsigned long long)bytes);
    abort();
  }
}

static void plain(void) {
  CUdeviceptr small[4096], large;
  OK(cuMemAlloc_v2(&large, MIB));
  expect_taken(2 * MIB);
  OK(cuMemFree_v2(large));
  OK(cuMemAlloc_v2(&large, 2 * MIB + 1));
  expect_taken(4 * MIB);
  OK(cuMemFree_v2(large));
  // 4096 pieces of 512 bytes fill one block of 2 MiB.
  for (int i = 0; i < 4096; i++) OK(cuMemAlloc_v2(&small[i], 512));
  expect_taken(2 * MIB);
  OK(cuMemAlloc_v2(&large, 1));
  expect_taken(4 * MIB);
  OK(cuMemFree_v2(large));
  expect_taken(2 * MIB);
  for (int i = 0; i < 4096; i += 2) OK(cuMemFree_v2(small[i]));
  expect_taken(2 * MIB);
  for (int i = 1; i < 4096; i += 2) OK(cuMemFree_v2(small[i]));
  expect_taken(0);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&large, 0));
}

static int range_fact(CUmem_range_attribute attribute, CUdeviceptr memory, size_t size) {
  int fact;
  OK(cuMemRangeGetAttribute(&fact, sizeof fact, attribute, memory, size));
  return fact;
}

static void advice_is_kept(CUdeviceptr memory, size_t size) {
  CUmem_range_attribute preferred = CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION;
  assert(range_fact(preferred, memory, size) == CU_DEVICE_INVALID);
  OK(cuMemAdvise(memory, size, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU));
  assert(range_fact(preferred, memory, size) == CU_DEVICE_CPU);
  OK(cuMemAdvise(memory, size, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, 0));
  assert(range_fact(preferred, memory, size) == CU_DEVICE_INVALID);
  OK(cuMemAdvise(memory, size, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
  assert(range_fact(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, size) == 1);
  OK(cuMemAdvise(memory, size, CU_MEM_ADVISE_SET_ACCESSED_BY, 0));
  int by[2];
  OK(cuMemRangeGetAttribute(by, sizeof by, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, memory, size));
  assert(by[0] == 0 && by[1] == CU_DEVICE_INVALID);
  OK(cuMemPrefetchAsync(memory, size, 0, NULL));
  assert(range_fact(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, memory, size) == 0);
  FAILS(CUDA_ERROR_INVALID_DEVICE, cuMemPrefetchAsync(memory, size, 77, NULL));
}

static void pitched_and_managed(void) {
  CUdeviceptr memory;
  size_t pitch;
  OK(cuMemAllocPitch_v2(&memory, &pitch, 1000, 4096, 4));
  assert(pitch == 1024);
  expect_taken(4 * MIB);
  OK(cuMemFree_v2(memory));
  OK(cuMemAllocManaged(&memory, 3 * MIB, CU_MEM_ATTACH_GLOBAL));
  expect_taken(0);  // not before it is used there
  OK(cuMemsetD8_v2(memory, 1, 3 * MIB));
  OK(cuCtxSynchronize());
  expect_taken(4 * MIB);
  memset((void *)(uintptr_t)memory, 7, 3 * MIB);  // the host reaches it
  unsigned managed;
  OK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, memory));
  assert(managed == 1);
  advice_is_kept(memory, 3 * MIB);
  OK(cuMemFree_v2(memory));
  expect_taken(0);
}

static void exact_limit(void) {
  CUdeviceptr most, one;
  uint64_t all = before / (2 * MIB) * (2 * MIB);
  OK(cuMemAlloc_v2(&most, all - 2 * MIB));
  OK(cuMemAlloc_v2(&one, 2 * MIB));
  CUdeviceptr none;
  FAILS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&none, 2 * MIB));
  FAILS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&none, UINT64_MAX / 2));
  OK(cuMemFree_v2(one));
  OK(cuMemAlloc_v2(&one, 1));
  FAILS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&none, MIB));
  OK(cuMemAlloc_v2(&none, 512 * 1024));  // in the block that is there
  OK(cuMemFree_v2(none));
  OK(cuMemFree_v2(one));
  OK(cuMemFree_v2(most));
  expect_taken(0);
}

static uint64_t pool_bytes(CUmemoryPool pool, CUmemPool_attribute attribute) {
  uint64_t bytes;
  OK(cuMemPoolGetAttribute(pool, attribute, &bytes));
  return bytes;
}

static void pools(void) {
  CUmemoryPool pool, own;
  CUdeviceptr one, two;
  OK(cuDeviceGetDefaultMemPool(&pool, 0));
  OK(cuMemAllocAsync(&one, 1000, NULL));
  expect_taken(32 * MIB);
  assert(pool_bytes(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 32 * MIB);
  assert(pool_bytes(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 1024);
  OK(cuMemAllocAsync(&two, 40 * MIB + 1, NULL));
  expect_taken(74 * MIB);
  OK(cuMemFreeAsync(one, NULL));
  expect_taken(74 * MIB);  // the pool keeps it until someone waits
  OK(cuStreamSynchronize(NULL));
  expect_taken(42 * MIB);
  uint64_t keep = UINT64_MAX;
  OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
  OK(cuMemFreeAsync(two, NULL));
  OK(cuStreamSynchronize(NULL));
  expect_taken(42 * MIB);
  OK(cuMemPoolTrimTo(pool, 0));
  expect_taken(0);
  assert(pool_bytes(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) == 74 * MIB);

  CUmemPoolProps wanted = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                           .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
  OK(cuMemPoolCreate(&own, &wanted));
  OK(cuMemAllocFromPoolAsync(&one, 8 * MIB, own, NULL));
  OK(cuMemPoolDestroy(own));
  expect_taken(32 * MIB);  // what is in use outlives the pool
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemAllocFromPoolAsync(&two, 8, own, NULL));
  OK(cuMemFree_v2(one));
  expect_taken(0);
}

static void arrays(void) {
  CUarray array, level;
  CUmipmappedArray mipmap;
  CUDA_ARRAY_DESCRIPTOR flat = {
      .Width = 100, .Height = 10, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
  OK(cuArrayCreate_v2(&array, &flat));
  expect_taken(64 * 1024);
  float row[100], back[100];
  for (int i = 0; i < 100; i++) row[i] = (float)i;
  OK(cuMemcpyHtoA_v2(array, 0, row, sizeof row));
  OK(cuMemcpyAtoH_v2(back, array, 0, sizeof back));
  assert(memcmp(row, back, sizeof row) == 0);
  OK(cuArrayDestroy(array));
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuArrayDestroy(array));
  CUDA_ARRAY3D_DESCRIPTOR volume = {.Width = 1024,
                                    .Height = 1024,
                                    .Depth = 0,
                                    .Format = CU_AD_FORMAT_UNSIGNED_INT8,
                                    .NumChannels = 4};
  OK(cuArray3DCreate_v2(&array, &volume));
  expect_taken(4 * MIB);
  OK(cuArrayDestroy(array));
  OK(cuMipmappedArrayCreate(&mipmap, &volume, 3));
  expect_taken(4 * MIB + MIB + MIB / 4);
  OK(cuMipmappedArrayGetLevel(&level, mipmap, 2));
  CUDA_ARRAY_DESCRIPTOR shape;
  OK(cuArrayGetDescriptor_v2(&shape, level));
  assert(shape.Width == 256 && shape.Height == 256);
  OK(cuMipmappedArrayDestroy(mipmap));
  volume.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING;
  OK(cuArray3DCreate_v2(&array, &volume));
  expect_taken(0);
  OK(cuArrayDestroy(array));
}

static void virtual_memory(void) {
  CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
  CUmemAccessDesc access = {.location = wanted.location,
                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle one, two, again;
  CUdeviceptr base;
  char text[] = "across the seam", back[sizeof text];
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&one, 1000, &wanted, 0));
  OK(cuMemCreate(&one, 2 * MIB, &wanted, 0));
  OK(cuMemCreate(&two, 4 * MIB, &wanted, 0));
  expect_taken(6 * MIB);
  OK(cuMemAddressReserve(&base, 6 * MIB, 0, 0, 0));
  OK(cuMemMap(base, 2 * MIB, 0, one, 0));
  OK(cuMemMap(base + 2 * MIB, 4 * MIB, 0, two, 0));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemMap(base, 2 * MIB, 0, one, 0));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(base, text, 4));  // no access yet
  OK(cuMemSetAccess(base, 6 * MIB, &access, 1));
  OK(cuMemcpyHtoD_v2(base + 2 * MIB - 5, text, sizeof text));
  OK(cuMemcpyDtoH_v2(back, base + 2 * MIB - 5, sizeof back));
  assert(strcmp(text, back) == 0);
  OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)base));
  assert(again == one);
  OK(cuMemRelease(again));
  OK(cuMemRelease(one));
  OK(cuMemRelease(two));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemRelease(two));
  expect_taken(6 * MIB);  // the mappings hold it
  OK(cuMemUnmap(base, 2 * MIB));
  expect_taken(4 * MIB);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(base, 6 * MIB));
  OK(cuMemUnmap(base + 2 * MIB, 4 * MIB));
  OK(cuMemAddressFree(base, 6 * MIB));
  expect_taken(0);
}

static void external(void) {
  int descriptor = fileno(tmpfile());
  assert(descriptor >= 0 && ftruncate(descriptor, 1 << 20) == 0);
  CUDA_EXTERNAL_MEMORY_HANDLE_DESC wanted = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
                                             .handle = {.fd = dup(descriptor)},
                                             .size = MIB};
  CUDA_EXTERNAL_MEMORY_BUFFER_DESC buffer = {.offset = 100, .size = 5000};
  CUexternalMemory memory;
  CUdeviceptr address;
  OK(cuImportExternalMemory(&memory, &wanted));
  OK(cuExternalMemoryGetMappedBuffer(&address, memory, &buffer));
  OK(cuMemcpyHtoD_v2(address, "there", 5));
  char back[5];
  assert(pread(descriptor, back, 5, 100) == 5 && memcmp(back, "there", 5) == 0);
  expect_taken(0);
  OK(cuMemFree_v2(address));
  OK(cuDestroyExternalMemory(memory));
  wanted.handle.fd = descriptor;
  wanted.size = 2 * MIB;
  FAILS(CUDA_ERROR_INVALID_VALUE, cuImportExternalMemory(&memory, &wanted));
}

static void modules(void) {
  CUmodule module;
  CUdeviceptr address;
  size_t size;
  OK(cuModuleLoadData(&module,
                      ".version 7.0\n.target sm_50\n.address_size 64\n"
                      ".visible .global .align 8 .b8 big[3145728];\n"
                      ".global .v4 .f32 vector;\n.const .u32 table[4] = {1, 2, 3, 4};\n"
                      ".extern .global .u64 elsewhere;\n.entry f() { ret; }\n"));
  OK(cuModuleGetGlobal_v2(&address, &size, module, "big"));
  assert(size == 3 * MIB);
  OK(cuModuleGetGlobal_v2(&address, &size, module, "vector"));
  assert(size == 16);
  OK(cuModuleGetGlobal_v2(&address, &size, module, "table"));
  assert(size == 16);
  FAILS(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal_v2(&address, &size, module, "elsewhere"));
  expect_taken(6 * MIB);
  OK(cuModuleUnload(module));
  expect_taken(0);
}

static void contexts(void) {
  CUcontext context;
  CUdeviceptr memory;
  CUarray array;
  CUDA_ARRAY_DESCRIPTOR flat = {
      .Width = 100, .Height = 10, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
  OK(cuCtxCreate_v2(&context, 0, 0));
  OK(cuMemAlloc_v2(&memory, 10 * MIB));
  OK(cuMemAlloc_v2(&memory, 10));
  OK(cuArrayCreate_v2(&array, &flat));
  OK(cuCtxDestroy_v2(context));  // takes all along
  expect_taken(0);
  CUdeviceptr most;
  OK(cuMemAlloc_v2(&most, (before - 10 * MIB) / (2 * MIB) * (2 * MIB)));
  FAILS(CUDA_ERROR_OUT_OF_MEMORY, cuCtxCreate_v2(&context, 0, 0));  // costs more than is left
  OK(cuMemFree_v2(most));
  expect_taken(0);
  OK(cuMemAlloc_v2(&memory, 10 * MIB));
  OK(cuMemAllocAsync(&memory, 10 * MIB, NULL));
  OK(cuDevicePrimaryCtxReset_v2(0));
  FAILS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuMemAlloc_v2(&memory, 1));
  begin(0);
  expect_taken(0);
}

int main(void) {
  begin(0);
  before = free_bytes();
  plain();
  pitched_and_managed();
  exact_limit();
  pools();
  arrays();
  virtual_memory();
  external();
  modules();
  contexts();
  return 0;
}
