// SPDX-License-Identifier: Apache-2.0
// Which share this program runs in, decided once per program (exec).
#ifndef ALLOTMENT_SHIM_SHARE_H
#define ALLOTMENT_SHIM_SHARE_H

#include "shim.h"

// The share's directory, or NULL: this program runs in no share and the shim does nothing.
const char *share_directory(void);

static inline bool share_present(void) {
  return share_directory() != NULL;
}

#endif
