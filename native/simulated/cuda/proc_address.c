// SPDX-License-Identifier: Apache-2.0
// cuGetProcAddress: entry points by name, version and kind of default stream.
#include <string.h>

#include "simulated/cuda/driver.h"
#include "simulated/cuda/symbols.h"

// The first row of the name, symbol_count if there is none.
static size_t find_name(const char *name) {
  size_t low = 0, high = symbol_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (strcmp(symbols[middle].name, name) < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < symbol_count && strcmp(symbols[low].name, name) == 0 ? low : symbol_count;
}

// The newest form of the name that both the caller and this driver know; of two as new, the one for
// the thread's own default stream if that is wanted.
static CUdriverProcAddressQueryResult look_up(const char *name, int version, int driver_version,
                                              bool own_stream, void **address) {
  const symbol *best = NULL;
  bool known = false;
  *address = NULL;
  for (size_t at = find_name(name); at < symbol_count && strcmp(symbols[at].name, name) == 0;
       at++) {
    const symbol *row = &symbols[at];
    if (row->version > driver_version) continue;
    known = true;
    if (row->version > version) continue;
    // Those for the thread's own stream came in CUDA 7, so versions alone do not order the rows.
    if (row->own_stream && !own_stream) continue;
    if (best == NULL || row->own_stream >= best->own_stream) best = row;
  }
  if (best == NULL) {
    return known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                 : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  memcpy(address, &best->address, sizeof *address);
  return CU_GET_PROC_ADDRESS_SUCCESS;
}

static CUresult get(const char *name, void **address, int version, uint64_t flags,
                    CUdriverProcAddressQueryResult *status) {
  if (name == NULL || address == NULL) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t known =
      CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if ((flags & ~known) != 0 || flags == known) return CUDA_ERROR_INVALID_VALUE;
  int driver_version = 0;
  if (cuDriverGetVersion(&driver_version) != CUDA_SUCCESS) driver_version = 13000;
  if (version > driver_version) return CUDA_ERROR_INVALID_VALUE;
  *status = look_up(name, version, driver_version,
                    (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, address);
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  TRY(get(name, address, version, flags, &found));
  if (status != NULL) *status = found;
  return CUDA_SUCCESS;
}

// The first form has no other way to say that there is nothing.
CUresult cuGetProcAddress(const char *name, void **address, int version, uint64_t flags) {
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  TRY(get(name, address, version, flags, &found));
  return found == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
