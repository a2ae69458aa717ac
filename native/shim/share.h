// SPDX-License-Identifier: Apache-2.0
// Which shares this program runs in, decided once per program (exec).
#ifndef ALLOTMENT_SHIM_SHARE_H
#define ALLOTMENT_SHIM_SHARE_H

#include "shim.h"

#define MAX_SHARES 8 /* of one container */

// 0: this program runs in no share and the shim does nothing. More than MAX_SHARES cannot be used.
unsigned share_count(void);

// Why the shares could not be looked for, or are no longer where they were when the program was
// loaded (errno); 0: they are known. In the first case one share counts, which cannot be used.
int share_failure(void);
// Is there also a share without a ledger, whose devices the shim does not know?
bool share_beside_bare(void);
// The directory of one of them, in a fixed order.
const char *share_directory(unsigned share);

static inline bool share_present(void) {
  return share_count() > 0;
}

#endif
