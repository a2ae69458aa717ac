// SPDX-License-Identifier: Apache-2.0
// What a module's image says about variables in device memory, before anything is loaded.
#ifndef ALLOTMENT_SHIM_IMAGE_H
#define ALLOTMENT_SHIM_IMAGE_H

#include "shim.h"

// Calls back with each variable's name, which is not terminated, and size in bytes. Images that
// cannot be read from here (compressed, encrypted, not an image) have none.
typedef void image_visit(void *context, const char *name, size_t length, uint64_t bytes);
void image_variables(const void *image, image_visit *visit, void *context);

#endif
