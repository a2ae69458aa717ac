// SPDX-License-Identifier: Apache-2.0
// Launching kernels.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

CUresult function_of(CUfunction handle, function **found) {
  if (object_valid(handle, OBJECT_FUNCTION)) {
    *found = (function *)handle;
    return CUDA_SUCCESS;
  }
  if (object_valid(handle, OBJECT_KERNEL)) return kernel_function((CUkernel)handle, found);
  return CUDA_ERROR_INVALID_HANDLE;
}

// The first parameter, 8 bytes, from whichever of the two forms the launch used.
static bool first_parameter(void **parameters, void **extra, uint64_t *value) {
  if (parameters != NULL) {
    if (parameters[0] == NULL) return false;
    memcpy(value, parameters[0], sizeof *value);
    return true;
  }
  for (; extra != NULL && extra[0] != CU_LAUNCH_PARAM_END; extra += 2) {
    if (extra[0] != CU_LAUNCH_PARAM_BUFFER_POINTER) continue;
    memcpy(value, extra[1], sizeof *value);
    return true;
  }
  return false;
}

uint64_t function_duration_ns(const function *launched, void **parameters, void **extra) {
  uint64_t spin_ns;
  if (launched->behaviour == FUNCTION_SPIN && first_parameter(parameters, extra, &spin_ns)) {
    return spin_ns < 1ull << 61 ? spin_ns : 0;
  }
  return driver.machine.machine->description.default_kernel_us * 1000ull;
}

CUresult launch_check(const context *owner, const CUlaunchConfig *config) {
  const allot_gpu_description *own = driver_description(owner->gpu);
  if (config->gridDimX == 0 || config->gridDimY == 0 || config->gridDimZ == 0 ||
      config->blockDimX == 0 || config->blockDimY == 0 || config->blockDimZ == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (config->gridDimX > 0x7fffffff || config->gridDimY > 65535 || config->gridDimZ > 65535) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (config->blockDimX > 1024 || config->blockDimY > 1024 || config->blockDimZ > 64 ||
      config->blockDimX * config->blockDimY * config->blockDimZ > own->max_threads_per_block) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (config->sharedMemBytes > own->shared_per_block_optin) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// A launch returns when its kernel has ended.
static bool blocks;

__attribute__((constructor)) static void read_environment(void) {
  const char *value = getenv("CUDA_LAUNCH_BLOCKING");
  blocks = value != NULL && atoi(value) != 0;
}

static CUresult launch(const CUlaunchConfig *config, CUfunction handle, void **parameters,
                       void **extra, bool cooperative) {
  stream *target;
  function *launched;
  TRY(stream_of(config->hStream, &target));
  TRY(function_of(handle, &launched));
  TRY(launch_check(target->owner, config));
  if (launched->module->owner->gpu != target->owner->gpu) return CUDA_ERROR_INVALID_HANDLE;
  if (cooperative && launch_blocks(config) > occupancy_blocks(launched, target->owner, config)) {
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  }
  if (target->capture != NULL) {
    return capture_kernel(target, config, handle, launched, parameters, extra);
  }
  TRY(capture_forbids_legacy(target));
  if (launched->behaviour == FUNCTION_TRAP) {
    allot_mps_fault(&driver.machine, driver.machine.slot, target->owner->gpu,
                    CUDA_ERROR_ILLEGAL_ADDRESS);
    return CUDA_SUCCESS;
  }
  uint64_t duration_ns = function_duration_ns(launched, parameters, extra);
  submit(target, &(submission){.kind = ALLOT_WORK_KERNEL,
                               .sms = launch_sms(target->owner, config),
                               .duration_ns = launch_ns(target->owner, config, duration_ns)});
  return blocks ? stream_synchronize(target) : CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned int grid_dim_x, unsigned int grid_dim_y,
                        unsigned int grid_dim_z, unsigned int block_dim_x, unsigned int block_dim_y,
                        unsigned int block_dim_z, unsigned int shared_mem_bytes, CUstream stream,
                        void **kernel_params, void **extra) {
  CUlaunchConfig config = {.gridDimX = grid_dim_x,
                           .gridDimY = grid_dim_y,
                           .gridDimZ = grid_dim_z,
                           .blockDimX = block_dim_x,
                           .blockDimY = block_dim_y,
                           .blockDimZ = block_dim_z,
                           .sharedMemBytes = shared_mem_bytes,
                           .hStream = stream};
  return launch(&config, f, kernel_params, extra, false);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernel_params,
                          void **extra) {
  ENTER();
  if (config == NULL || (config->numAttrs > 0 && config->attrs == NULL)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  bool cooperative = false;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      cooperative = config->attrs[i].value.cooperative != 0;
    }
  }
  TRY(launch(config, f, kernel_params, extra, cooperative));
  // The event of this attribute stands behind the kernel.
  for (unsigned i = 0; i < config->numAttrs; i++) {
    if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT) continue;
    TRY(cuEventRecord(config->attrs[i].value.launchCompletionEvent.event, config->hStream));
  }
  return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int grid_dim_x, unsigned int grid_dim_y,
                                   unsigned int grid_dim_z, unsigned int block_dim_x,
                                   unsigned int block_dim_y, unsigned int block_dim_z,
                                   unsigned int shared_mem_bytes, CUstream stream,
                                   void **kernel_params) {
  CUlaunchConfig config = {.gridDimX = grid_dim_x,
                           .gridDimY = grid_dim_y,
                           .gridDimZ = grid_dim_z,
                           .blockDimX = block_dim_x,
                           .blockDimY = block_dim_y,
                           .blockDimZ = block_dim_z,
                           .sharedMemBytes = shared_mem_bytes,
                           .hStream = stream};
  return launch(&config, f, kernel_params, NULL, true);
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count,
                                              unsigned int flags) {
  ENTER();
  if (list == NULL || count == 0 || count > (unsigned)driver.device_count) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (unsigned i = 0; i < count; i++) {
    // Each goes to its stream, which tells the context.
    if (!object_valid(list[i].hStream, OBJECT_STREAM)) return CUDA_ERROR_INVALID_HANDLE;
  }
  for (unsigned i = 0; i < count; i++) {
    const CUDA_LAUNCH_PARAMS *one = &list[i];
    TRY(cuLaunchCooperativeKernel(one->function, one->gridDimX, one->gridDimY, one->gridDimZ,
                                  one->blockDimX, one->blockDimY, one->blockDimZ,
                                  one->sharedMemBytes, one->hStream, one->kernelParams));
  }
  return CUDA_SUCCESS;
}
