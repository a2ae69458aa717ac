// SPDX-License-Identifier: Apache-2.0
// Memory of processes that have ended, for as long as the driver has not freed it.
#ifndef ALLOTMENT_SHIM_DEAD_H
#define ALLOTMENT_SHIM_DEAD_H

#include "cuda_abi.h"
#include "process.h"

// Reclaims, in one of the process's ledgers, what dead processes left and the driver has freed.
allot_reaped dead_reap(allot_ledger *ledger);

// Does memory of dead processes stand in the way of so many bytes? Reclaims what the driver has
// freed.
bool dead_could_give(process *own, int device, uint64_t bytes);

// Notes in this process's slot that the driver lists it, and under which number. After a context
// was made on the device.
void dead_note_listed(process *own, int device);

// Waits in growing steps, for a bounded time in all.
typedef struct patience {
  uint64_t until_ns;  // 0: it has not begun
  uint64_t step_ns;
} patience;
patience patience_begin(uint64_t most_ns);
// False: the time is over.
bool patience_step(patience *left);

// For dead processes of the own share, which can be seen, and for those of others, which cannot.
#define DEAD_PATIENCE_NS 10000000000ull
#define DRIVER_PATIENCE_NS 3000000000ull

// Is it worth to call the driver again, which was out of memory although the share has reserved the
// bytes? The memory of a process that has just ended, of whichever share, may be about to be freed.
// Waits before it says yes: with no lock held that a free needs, and without the device's turn.
// `left`: zeros at the first time.
bool dead_may_be_freed(process *own, int device, patience *left);

// Calls the driver, and again while that is worth it.
#define WITH_PATIENCE(own, device, call)                       \
  ({                                                           \
    patience left_ = {0};                                      \
    CUresult outcome_;                                         \
    do {                                                       \
      outcome_ = DRIVER(call);                                 \
    } while (UNLIKELY(outcome_ == CUDA_ERROR_OUT_OF_MEMORY) && \
             dead_may_be_freed(own, device, &left_));          \
    outcome_;                                                  \
  })

#endif
