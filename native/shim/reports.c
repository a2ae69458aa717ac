// SPDX-License-Identifier: Apache-2.0
// What CUDA tells a program about a device's memory: the share's part of it.
#include "charge.h"
#include "dead.h"
#include "driver.h"
#include "graphs.h"
#include "pools.h"
#include "report.h"
#include "residency.h"

memory_report report_memory(process *own, int device) {
  // A call here is worth the search for the dead: what is told has to be true when a neighbour was
  // killed a moment ago.
  if (__atomic_load_n(&own->attached, __ATOMIC_ACQUIRE) != 0) {
    pools_settle(own, device);
    graphs_settle(own, device);
  }
  const joined_device *joined = &own->joined[device];
  dead_reap(own, joined->ledger);
  memory_report report = {.total = allot_ledger_limit(joined->ledger, joined->index),
                          .used = allot_ledger_used(joined->ledger, joined->index)};
  report.free = report.used < report.total ? report.total - report.used : 0;
  return report;
}

static unsigned int narrow(uint64_t bytes) {
  return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes;
}

static CUresult share_info(size_t *free, size_t *total) {
  size_t real_free, real_total;
  CUresult result = DRIVER(REAL(cuMemGetInfo_v2)(&real_free, &real_total));
  if (result != CUDA_SUCCESS) return result;
  target at;
  result = target_current(&at);
  if (result != CUDA_SUCCESS || at.context == NULL) return result;
  memory_report report = report_memory(at.own, at.device);
  *total = report.total;
  bool elsewhere = residency_possible(at.own, at.device);
  *free = elsewhere || report.free < real_free ? report.free : real_free;
  return CUDA_SUCCESS;
}

CUDA_WRAPPER(cuMemGetInfo_v2, (size_t *free, size_t *total)) {
  if (free == NULL || total == NULL || !governed()) return REAL(cuMemGetInfo_v2)(free, total);
  return share_info(free, total);
}

CUDA_WRAPPER(cuMemGetInfo, (unsigned int *free, unsigned int *total)) {
  if (free == NULL || total == NULL || !governed()) return REAL(cuMemGetInfo)(free, total);
  size_t wide_free, wide_total;
  CUresult result = share_info(&wide_free, &wide_total);
  if (result != CUDA_SUCCESS) return result;
  *free = narrow(wide_free);
  *total = narrow(wide_total);
  return CUDA_SUCCESS;
}

static CUresult share_total(uint64_t *bytes, CUdevice ordinal) {
  process *own = process_view();
  if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  int device = process_device(own, ordinal);
  if (device >= 0) {
    *bytes = allot_ledger_limit(own->joined[device].ledger, own->joined[device].index);
  }
  return device >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUDA_WRAPPER(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device)) {
  CUresult result = DRIVER(REAL(cuDeviceTotalMem_v2)(bytes, device));
  if (result != CUDA_SUCCESS || !governed()) return result;
  uint64_t limit;
  result = share_total(&limit, device);
  if (result == CUDA_SUCCESS) *bytes = limit;
  return result;
}

CUDA_WRAPPER(cuDeviceTotalMem, (unsigned int *bytes, CUdevice device)) {
  CUresult result = DRIVER(REAL(cuDeviceTotalMem)(bytes, device));
  if (result != CUDA_SUCCESS || !governed()) return result;
  uint64_t limit;
  result = share_total(&limit, device);
  if (result == CUDA_SUCCESS) *bytes = narrow(limit);
  return result;
}
