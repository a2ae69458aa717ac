// SPDX-License-Identifier: Apache-2.0
// The dynamic loader's functions: the real ones for the shim, the shim's in place of them.
#ifndef ALLOTMENT_SHIM_LOADER_H
#define ALLOTMENT_SHIM_LOADER_H

#include <dlfcn.h>
#include <link.h>

#include "shim.h"

// The C library's own, found without the loader's help. NULL: this is no glibc.
typedef struct loader_functions {
  void *(*dlsym)(void *handle, const char *name);
  void *(*dlvsym)(void *handle, const char *name, const char *version);
  void *(*dlopen)(const char *file, int flags);
  void *(*dlmopen)(Lmid_t space, const char *file, int flags);
} loader_functions;

const loader_functions *loader_real(void);
void loader_prepare(void);

// What takes the place of the loader's function of that name, or NULL.
void *loader_replacement(const char *name);

#endif
