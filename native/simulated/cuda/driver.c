// SPDX-License-Identifier: Apache-2.0
// Initialisation, versions and what injected faults do to calls.
#include <errno.h>
#include <string.h>

#include "simulated/cuda/driver.h"

driver_state driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

static __thread int cancel_state;

void driver_lock(void) {
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
  pthread_mutex_lock(&driver.lock);
}

void driver_unlock(void) {
  pthread_mutex_unlock(&driver.lock);
  pthread_setcancelstate(cancel_state, NULL);
}

static CUresult attach(void) {
  int error = allot_machine_open(&driver.machine);
  // A machine without a driver has no machine file; one that is damaged is not ready.
  if (error == -ENOENT || error == -ENOTDIR) return CUDA_ERROR_NO_DEVICE;
  if (error == -EPROTO) return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  if (error != 0) return CUDA_ERROR_SYSTEM_NOT_READY;
  uint32_t fault = allot_load(&driver.machine.machine->faults.cuda_init_error);
  if (fault != 0) return (CUresult)fault;
  error = allot_machine_attach(&driver.machine, ALLOT_PROCESS_COMPUTE);
  if (error == -ENOSPC) return CUDA_ERROR_OUT_OF_MEMORY;
  if (error != 0) return CUDA_ERROR_OPERATING_SYSTEM;
  uint32_t nodes = driver.machine.nodes;
  TRY(mps_become_client(&nodes));
  driver.device_count = visible_devices(&driver.machine.machine->description, nodes, driver.gpus);
  mig_choose();
  if (driver.device_count == 0) return CUDA_ERROR_NO_DEVICE;
  mps_limit_memory();
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  // A child of an initialised process has the parent's memory but not its GPU.
  if (__atomic_load_n(&driver.initialised, __ATOMIC_ACQUIRE)) return driver_ready();
  LOCK();
  CUresult result = CUDA_SUCCESS;
  if (!driver.initialised) {
    for (int gpu = 0; gpu < ALLOT_MACHINE_GPUS; gpu++) {
      pthread_mutex_init(&driver.devices[gpu].submit_lock, NULL);
    }
    result = attach();
    if (result == CUDA_SUCCESS) {
      __atomic_store_n(&driver.initialised, true, __ATOMIC_RELEASE);
    } else {
      allot_machine_close(&driver.machine);
    }
  }
  UNLOCK();
  return result;
}

CUresult driver_ready(void) {
  if (!__atomic_load_n(&driver.initialised, __ATOMIC_ACQUIRE)) return CUDA_ERROR_NOT_INITIALIZED;
  if (!allot_machine_attached(&driver.machine)) return CUDA_ERROR_NOT_INITIALIZED;
  // A process that another one has locked stays in its next call.
  if (__builtin_expect(driver_is_locked(), 0)) allot_checkpoint_wait(&driver.machine);
  return CUDA_SUCCESS;
}

CUresult driver_gpu_usable(int gpu) {
  const allot_gpu_faults *faults = &driver.machine.machine->faults.gpus[gpu];
  allot_wait_out(&faults->hang_us);
  if (allot_load(&faults->lost) != 0) return CUDA_ERROR_UNKNOWN;
  const allot_handle *own = &driver.machine;
  return (CUresult)allot_load(&own->machine->processes[own->slot].failed);
}

CUresult driver_gpu(CUdevice ordinal, int *gpu) {
  TRY(driver_ready());
  if (ordinal < 0 || ordinal >= driver.device_count) return CUDA_ERROR_INVALID_DEVICE;
  *gpu = driver.gpus[ordinal];
  return driver_gpu_usable(*gpu);
}

const allot_gpu_description *driver_description(int gpu) {
  if (driver.cut_place > 0) return &driver.cut;
  return &driver.machine.machine->description.gpus[gpu];
}

int driver_place(int gpu) {
  return allot_compute_place(&driver.machine, driver.machine.slot, gpu);
}

int driver_ordinal(int gpu) {
  for (int ordinal = 0; ordinal < driver.device_count; ordinal++) {
    if (driver.gpus[ordinal] == gpu) return ordinal;
  }
  return -1;
}

int driver_cuda_version(void) {
  uint32_t version = driver.machine.machine->description.cuda_version;
  return version != 0 ? (int)version : 13000;
}

// Answers before cuInit too, as programs ask for the version first.
CUresult cuDriverGetVersion(int *version) {
  if (version == NULL) return CUDA_ERROR_INVALID_VALUE;
  LOCK();
  CUresult result = CUDA_SUCCESS;
  if (driver.machine.machine != NULL) {
    *version = driver_cuda_version();
  } else {
    allot_handle looking;
    result = allot_machine_open(&looking) == 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
    if (result == CUDA_SUCCESS) {
      *version = (int)looking.machine->description.cuda_version;
      if (*version == 0) *version = 13000;
    }
    allot_machine_close(&looking);
  }
  UNLOCK();
  return result;
}

static const struct {
  CUresult code;
  const char *name, *text;
} results[] = {
#define ROW(name, value, text) {name, #name, text},
    ALLOT_CU_RESULTS(ROW)
#undef ROW
};

CUresult cuGetErrorName(CUresult error, const char **name) {
  if (name == NULL) return CUDA_ERROR_INVALID_VALUE;
  *name = NULL;
  for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
    if (results[i].code == error) *name = results[i].name;
  }
  return *name != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  if (text == NULL) return CUDA_ERROR_INVALID_VALUE;
  *text = NULL;
  for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
    if (results[i].code == error) *text = results[i].text;
  }
  return *text != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The driver's private tables are not part of the simulation.
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
  if (table != NULL) *table = NULL;
  return table == NULL || id == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_FOUND;
}

CUresult cuProfilerInitialize(const char *config, const char *output, int mode) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuProfilerStart(void) {
  ENTER_CONTEXT(current);
  return CUDA_SUCCESS;
}

CUresult cuProfilerStop(void) {
  ENTER_CONTEXT(current);
  return CUDA_SUCCESS;
}
