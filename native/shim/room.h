// SPDX-License-Identifier: Apache-2.0
// Is there room for an allocation in what the driver has taken from the GPU already?
#ifndef ALLOTMENT_SHIM_ROOM_H
#define ALLOTMENT_SHIM_ROOM_H

#include "process.h"

// Stretches of device memory (chunks of a pool, blocks of a context), and the pieces in use of
// them.
typedef struct room_question {
  record_space holders;  // SPACE_CHUNK or SPACE_BLOCK
  record_kind pieces;    // KIND_POOLED or KIND_SMALL
  uint64_t owner;        // of both
  uint64_t bytes;        // of the wanted piece
  // What all stretches come to, if that is known: what is recorded must agree with it, with all
  // stretches, or with those alone that have pieces in use. UINT64_MAX: the records are right.
  uint64_t total;
} room_question;

// True only if the piece certainly fits, by what is recorded. Stretches that are found to be gone
// are taken out of the records. The caller keeps both kinds of records from changing.
bool room_exists(process *own, const room_question *question);

#endif
