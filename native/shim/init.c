// SPDX-License-Identifier: Apache-2.0
// cuInit: joins the share, and shows the driver the share's devices under the program's own choice
// of CUDA_VISIBLE_DEVICES.
#include <string.h>

#include "compute.h"
#include "driver.h"
#include "mps.h"
#include "process.h"
#include "visible.h"

static CUresult initialize(process *own, unsigned flags) {
  char list[VISIBLE_BYTES];
  visible_devices(list, own->policies, own->device_count);
  visible_override override;
  if (!visible_begin(&override, list)) return CUDA_ERROR_OUT_OF_MEMORY;
  own->launches_block = compute_launches_block();
  CUresult result = DRIVER(REAL(cuInit)(flags));
  visible_end(&override);
  return result;
}

// With the ledger missing, damaged, of another version or without a free slot, nothing could be
// charged: the program then has no GPU at all, as on a machine whose driver is not ready.
CUDA_WRAPPER(cuInit, (unsigned int flags)) {
  if (!governed()) return REAL(cuInit)(flags);
  process *own = process_attach();
  if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  if (__atomic_load_n(&own->initialized, __ATOMIC_ACQUIRE) != 0) {
    return DRIVER(REAL(cuInit)(flags));
  }
  CUresult result = mps_wait_for_daemon(own);
  if (result != CUDA_SUCCESS) return result;
  process_lock(&own->context_lock);
  result = own->initialized != 0 ? DRIVER(REAL(cuInit)(flags)) : initialize(own, flags);
  if (result == CUDA_SUCCESS) __atomic_store_n(&own->initialized, 1, __ATOMIC_RELEASE);
  process_unlock(&own->context_lock);
  return result;
}
