// SPDX-License-Identifier: Apache-2.0
// The table of entry points by address. It does not see their prototypes: only where they are.
#include "simulated/cuda/symbols.h"

#define SYMBOL(name, version, entry) __attribute__((visibility("protected"))) void entry(void);
#define SYMBOL_OWN SYMBOL
#include "simulated/cuda/symbols.inc"
#undef SYMBOL
#undef SYMBOL_OWN

#define SYMBOL(name, version, entry) {#name, version, false, entry},
#define SYMBOL_OWN(name, version, entry) {#name, version, true, entry},
const symbol symbols[] = {
#include "simulated/cuda/symbols.inc"
};

const size_t symbol_count = sizeof symbols / sizeof *symbols;
