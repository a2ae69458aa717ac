// SPDX-License-Identifier: Apache-2.0
// Checkpoints: what a process has is charged while it is saved, as before. So it may only come back
// to where it was. On another device no share would be charged for it.
#include <string.h>

#include "driver.h"

static bool moves(const CUcheckpointRestoreArgs *arguments) {
  if (arguments == NULL || arguments->gpuPairs == NULL) return false;
  for (unsigned i = 0; i < arguments->gpuPairsCount; i++) {
    const CUcheckpointGpuPair *pair = &arguments->gpuPairs[i];
    if (memcmp(&pair->oldUuid, &pair->newUuid, sizeof pair->oldUuid) != 0) return true;
  }
  return false;
}

CUDA_WRAPPER(cuCheckpointProcessRestore, (int pid, CUcheckpointRestoreArgs *arguments)) {
  if (governed() && moves(arguments)) return CUDA_ERROR_NOT_PERMITTED;
  return REAL(cuCheckpointProcessRestore)(pid, arguments);
}
