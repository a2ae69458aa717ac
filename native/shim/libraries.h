// SPDX-License-Identifier: Apache-2.0
// The driver's libraries in this process: found, kept, and led to the shim.
#ifndef ALLOTMENT_SHIM_LIBRARIES_H
#define ALLOTMENT_SHIM_LIBRARIES_H

#include <link.h>

#include "entries.h"
#include "shim.h"

enum { LIBRARY_CUDA, LIBRARY_NVML, LIBRARY_COUNT };

const char *library_name(int library);

// Takes in every copy of the libraries that is loaded by now. Cheap when nothing was loaded since.
void libraries_scan(void);
// Loads the library if it can be found, once per process.
void libraries_load(int library);

// The driver's function behind an entry, with the library loaded for it if need be; else a function
// that returns an error of the kind that fits.
void *libraries_real(shim_entry entry);

// Does the caller's address lie in the library?
bool libraries_calls_itself(int library, const void *caller);

// The driver's function of a name that the shim does not own, or NULL.
void *libraries_symbol(int library, const char *name);

// Takes in the copies of another loader namespace (dlmopen) and leads what is bound there to the
// shim. `handle` is of an object there.
void libraries_adopt_namespace(void *handle);
void libraries_adopt_namespace_of(const void *caller);
// What an object of such a namespace opens may bring a copy along, and is bound to it at once: the
// copies are opened and led before.
void libraries_load_beside(const void *caller);
// True: the address lies in a copy of the driver that was not known, and is taken in now.
bool libraries_adopt_address(const void *address);

struct link_map *libraries_map_of(const void *address);

#endif
