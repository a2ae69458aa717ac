// SPDX-License-Identifier: Apache-2.0
// From cuInit to a kernel that took its time, with the errors of wrong use on the way.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: a100-80gb:2,t4
#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

static void before_cu_init(void) {
  int count, version;
  FAILS(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
  OK(cuDriverGetVersion(&version));
  assert(version >= 11080 && version < 14000);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuInit(1));
}

static void devices(void) {
  int count, value;
  char name[96], id[16];
  CUdevice device, found;
  CUuuid uuid;
  OK(cuDeviceGetCount(&count));
  assert(count == 3);
  OK(cuDeviceGet(&device, 0));
  FAILS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, 3));
  OK(cuDeviceGetName(name, sizeof name, 0));
  assert(strstr(name, "A100") != NULL);
  OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
  assert(value == 8);
  OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
  assert(value == 108);
  OK(cuDeviceGetPCIBusId(id, sizeof id, 1));
  OK(cuDeviceGetByPCIBusId(&found, id));
  assert(found == 1);
  OK(cuDeviceGetUuid_v2(&uuid, 1));
  OK(cuDeviceCanAccessPeer(&value, 0, 1));
  assert(value == 1);
  size_t total;
  OK(cuDeviceTotalMem_v2(&total, 0));
  assert(total > 79 * 1024 * MIB && total < 80 * 1024 * MIB);
}

static void contexts(void) {
  size_t before, after;
  unsigned flags;
  int active;
  CUcontext primary, own, top;
  CUdevice device;
  FAILS(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  assert(!active);
  OK(cuDevicePrimaryCtxRetain(&primary, 0));
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  assert(active);
  OK(cuCtxPushCurrent_v2(primary));
  before = free_bytes();
  OK(cuCtxCreate_v2(&own, CU_CTX_SCHED_YIELD, 0));
  OK(cuCtxGetCurrent(&top));
  assert(top == own);
  OK(cuCtxGetFlags(&flags));
  assert(flags == CU_CTX_SCHED_YIELD);
  after = free_bytes();
  assert(before > after);  // a context costs memory
  OK(cuCtxGetDevice(&device));
  assert(device == 0);
  OK(cuCtxDestroy_v2(own));
  OK(cuCtxGetCurrent(&top));
  assert(top == primary);
  assert(free_bytes() == before);
  FAILS(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy_v2(own));
  OK(cuCtxPopCurrent_v2(&top));
  assert(top == primary);
  OK(cuDevicePrimaryCtxRelease_v2(0));
}

static void data_moves(void) {
  unsigned char host[1000], back[1000];
  CUdeviceptr memory, other;
  for (int i = 0; i < 1000; i++) host[i] = (unsigned char)i;
  OK(cuMemAlloc_v2(&memory, 1000));
  OK(cuMemAlloc_v2(&other, 3 * MIB));
  OK(cuMemcpyHtoD_v2(memory, host, 1000));
  OK(cuMemcpyDtoD_v2(other + 5, memory, 1000));
  OK(cuMemcpyDtoH_v2(back, other + 5, 1000));
  assert(memcmp(host, back, 1000) == 0);
  OK(cuMemsetD32_v2(other, 0x01020304, 250));
  OK(cuMemcpyDtoH_v2(back, other, 1000));
  assert(back[0] == 4 && back[999] == 1);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(other, host, 4 * MIB));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(back, 4096, 1));
  CUdeviceptr base;
  size_t size;
  OK(cuMemGetAddressRange_v2(&base, &size, other + MIB));
  assert(base == other && size == 3 * MIB);
  OK(cuMemFree_v2(memory));
  OK(cuMemFree_v2(other));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(other));
  OK(cuMemFree_v2(0));
}

static void kernels(void) {
  CUmodule module;
  CUfunction spin, other;
  OK(cuModuleLoadData(&module, spin_ptx));
  OK(cuModuleGetFunction(&spin, module, "allot_spin"));
  OK(cuModuleGetFunction(&other, module, "other"));
  FAILS(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&other, module, "not_this"));
  FAILS(CUDA_ERROR_INVALID_PTX, cuModuleLoadData(&module, "no such language"));
  FAILS(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&module, "\1\2\3\4\5\6\7\10"));
  gate_close(NULL);
  CUevent start = mark(NULL);
  spin_for(spin, 3 * MILLISECOND, NULL);
  CUevent end = mark(NULL);
  FAILS(CUDA_ERROR_NOT_READY, cuEventQuery(end));
  FAILS(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
  gate_open();
  OK(cuEventSynchronize(end));
  OK(cuStreamQuery(NULL));
  double ms = elapsed_ms(start, end);
  assert(ms >= 3.0 && ms < 3.2);
  uint64_t nothing = 0;
  void *parameters[] = {&nothing};
  FAILS(CUDA_ERROR_INVALID_VALUE,
        cuLaunchKernel(spin, 0, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
  FAILS(CUDA_ERROR_INVALID_VALUE,
        cuLaunchKernel(spin, 1, 1, 1, 1025, 1, 1, 0, NULL, parameters, NULL));
}

static void many_launches(void) {
  allot_handle seen;
  CUfunction spin = load_spin();
  assert(allot_machine_open(&seen) == 0);
  const uint64_t *busy_ns = &seen.machine->engines[0].busy_ns;
  uint64_t before = allot_load(busy_ns);
  CUevent start = mark(NULL);
  for (int i = 0; i < 5000; i++) spin_for(spin, 2000, NULL);  // far more than the ring holds
  CUevent end = mark(NULL);
  OK(cuCtxSynchronize());
  assert(elapsed_ms(start, end) >= 10.0);
  assert(allot_load(busy_ns) - before == 5000 * 2000);
}

static void errors_have_names(void) {
  const char *text;
  OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
  assert(strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
  OK(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
  assert(strcmp(text, "out of memory") == 0);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGetErrorName((CUresult)12345, &text));
}

int main(void) {
  before_cu_init();
  OK(cuInit(0));
  devices();
  contexts();
  begin(0);
  data_moves();
  kernels();
  many_launches();
  errors_have_names();
  return 0;
}
