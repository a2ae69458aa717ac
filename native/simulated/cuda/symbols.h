// SPDX-License-Identifier: Apache-2.0
// The table of entry points (symbols.inc) for whoever looks one up.
#ifndef ALLOTMENT_CUDA_SYMBOLS_H
#define ALLOTMENT_CUDA_SYMBOLS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct symbol {
  const char *name;
  int version;
  bool own_stream;  // takes the null stream to be the calling thread's own
  void (*address)(void);
} symbol;

extern const symbol symbols[] __attribute__((visibility("hidden")));
extern const size_t symbol_count __attribute__((visibility("hidden")));

#endif
