// SPDX-License-Identifier: Apache-2.0
// One answer for everyone who asks how much memory a device of the share has.
#ifndef ALLOTMENT_SHIM_REPORT_H
#define ALLOTMENT_SHIM_REPORT_H

#include "process.h"

typedef struct memory_report {
  uint64_t total;
  uint64_t used;  // by all processes of the share; above the total after a forced resize
  uint64_t free;
} memory_report;

// `device` is the policy's index.
memory_report report_memory(process *own, int device);

#endif
