// SPDX-License-Identifier: Apache-2.0
// CUDA_VISIBLE_DEVICES inside shares: indices count the devices of these, in the process's order.
#ifndef ALLOTMENT_SHIM_VISIBLE_H
#define ALLOTMENT_SHIM_VISIBLE_H

#include "ledger.h"
#include "shim.h"

#define VISIBLE_VARIABLE "CUDA_VISIBLE_DEVICES"
// Longer lists than this name devices twice, and the driver accepts none twice.
#define VISIBLE_ENTRIES 64
#define VISIBLE_BYTES (sizeof VISIBLE_VARIABLE + 1 + VISIBLE_ENTRIES * (ALLOT_UUID_BYTES + 1))

// Writes "CUDA_VISIBLE_DEVICES=<UUIDs>" for what the program chose among the `count` devices.
void visible_devices(char list[VISIBLE_BYTES], const allot_device_policy *const devices[],
                     uint32_t count);
// The same of a given choice; NULL: everything. For tests.
void visible_choice(char list[VISIBLE_BYTES], const allot_device_policy *const devices[],
                    uint32_t count, const char *choice);

// Puts the entry into the environment, and takes it out again with what was there before. Between
// the two calls `list` must stay. False: no memory.
typedef struct visible_override {
  char **environment;  // as it was
  char **replaced;     // the one that took its place, or NULL
  char **place;        // the entry that was changed in place, or NULL
  char *previous;
  char *list;
} visible_override;
bool visible_begin(visible_override *override, char *list);
void visible_end(visible_override *override);

#endif
