// SPDX-License-Identifier: Apache-2.0
// Stands between programs and dlsym, dlvsym, dlopen and dlmopen.
//
// A look-up of a name that the shim does not own goes through with two comparisons of a byte. For a
// name that it owns: what the loader says is what counts (NULL stays NULL, another library's symbol
// of that name stays that), and the driver's own function is replaced by the shim's.
#include "loader.h"

#include "elf.h"
#include "entries.h"
#include "libraries.h"
#include "share.h"

static loader_functions real;
static int prepared;

SHIM_EARLY static void take_from(const elf_object *object) {
  const ElfW(Sym) * symbol;
  if (real.dlsym == NULL && (symbol = elf_find(object, "dlsym")) != NULL)
    *(void **)&real.dlsym = elf_address(object, symbol);
  if (real.dlvsym == NULL && (symbol = elf_find(object, "dlvsym")) != NULL)
    *(void **)&real.dlvsym = elf_address(object, symbol);
  if (real.dlopen == NULL && (symbol = elf_find(object, "dlopen")) != NULL)
    *(void **)&real.dlopen = elf_address(object, symbol);
  if (real.dlmopen == NULL && (symbol = elf_find(object, "dlmopen")) != NULL)
    *(void **)&real.dlmopen = elf_address(object, symbol);
}

// Reads the loader's list of objects without its lock. The constructor does it while the program
// has one thread; only a sanitizer's runtime is earlier, and also alone.
SHIM_EARLY void loader_prepare(void) {
  if (__atomic_load_n(&prepared, __ATOMIC_ACQUIRE) != 0) return;
  for (struct link_map *map = _r_debug.r_map; map != NULL; map = map->l_next) {
    elf_object object;
    if (!elf_read(&object, map->l_addr, map->l_ld)) continue;
    // Since glibc 2.34 the functions are in libc itself.
    if (same_text(object.soname, "libc.so.6") || same_text(object.soname, "libdl.so.2")) {
      take_from(&object);
    }
  }
  __atomic_store_n(&prepared, 1, __ATOMIC_RELEASE);
}

SHIM_EARLY const loader_functions *loader_real(void) {
  loader_prepare();
  return &real;
}

// ---- look-ups ----

typedef struct choice {
  void *jump;
  void *value;
} choice;

// NULL, and dlerror tells that the name was not found: the C library is asked for it.
static void *not_found(const char *name) {
  void *libc = real.dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  return libc == NULL ? NULL : real.dlsym(libc, name);
}

// Where a search that begins at a place of the list of objects would end without the shim.
static void *search_after(const void *caller, bool next, const char *name) {
  struct link_map *start = libraries_map_of(caller);
  struct link_map *own = libraries_map_of((const void *)&search_after);
  if (start == NULL) return NULL;
  if (next) {
    start = start->l_next;
  } else {
    while (start->l_prev != NULL) start = start->l_prev;
  }
  for (; start != NULL; start = start->l_next) {
    elf_object object;
    if (start == own || !elf_read(&object, start->l_addr, start->l_ld)) continue;
    const ElfW(Sym) *symbol = elf_find(&object, name);
    if (symbol != NULL) return elf_address(&object, symbol);
  }
  return NULL;
}

static void *wrapped(int entry, void *found) {
  int known = entry_by_address(found);
  if (known < 0 && found != NULL && libraries_adopt_address(found)) {
    known = entry_by_address(found);
  }
  if (known < 0) return found;
  if (entry_real(known) != NULL) return entry_wrapper(known);
  return not_found(entry_name(entry));  // the shim knows the name, this driver does not
}

static choice choose(void *handle, const char *name, const char *version, const void *caller,
                     void *jump) {
  int entry = entry_by_name(name);
  if (entry < 0 || !share_present()) return (choice){.jump = jump};
  libraries_scan();
  int library = entry_is_cuda(entry) ? LIBRARY_CUDA : LIBRARY_NVML;
  if (entry_real(entry) != NULL && libraries_calls_itself(library, caller)) {
    return (choice){.value = entry_real(entry)};
  }
  if (handle != RTLD_DEFAULT && handle != RTLD_NEXT) {
    void *found = version == NULL ? real.dlsym(handle, name) : real.dlvsym(handle, name, version);
    return (choice){.value = found == NULL ? NULL : wrapped(entry, found)};
  }
  libraries_adopt_namespace_of(caller);
  // The driver's exports lead to the wrappers by now, as the shim's own do, so the loader's answer
  // is right whichever it finds first. Only a name that this driver lacks must not be found here.
  if (entry_real(entry) != NULL) return (choice){.jump = jump};
  void *found = search_after(caller, handle == RTLD_NEXT, name);
  return (choice){.value = found != NULL ? found : not_found(name)};
}

choice shim_choose_dlsym(void *handle, const char *name, void *unused, const void *caller);
choice shim_choose_dlvsym(void *handle, const char *name, const char *version, const void *caller);
choice shim_choose_dlopen(const char *file, uintptr_t flags, void *unused, const void *caller);

SHIM_EARLY choice shim_choose_dlsym(void *handle, const char *name, void *unused,
                                    const void *caller) {
  loader_prepare();
  if (LIKELY(name == NULL || entry_by_name(name) < 0)) return (choice){.jump = (void *)real.dlsym};
  return choose(handle, name, NULL, caller, (void *)real.dlsym);
}

SHIM_EARLY choice shim_choose_dlvsym(void *handle, const char *name, const char *version,
                                     const void *caller) {
  loader_prepare();
  if (LIKELY(name == NULL || version == NULL || entry_by_name(name) < 0)) {
    return (choice){.jump = (void *)real.dlvsym};
  }
  return choose(handle, name, version, caller, (void *)real.dlvsym);
}

// ---- opening ----

// An object that is opened with RTLD_DEEPBIND finds the driver's symbols before the shim's: the
// driver's exports must lead to the wrappers before it is bound. The same for a program that opens
// the driver and then walks its symbols in a way of its own.
SHIM_EARLY static void prepare_drivers(const char *file, uintptr_t flags) {
  if (file == NULL || (flags & RTLD_NOLOAD) != 0) return;
  bool deep = (flags & RTLD_DEEPBIND) != 0;
  for (int library = 0; library < LIBRARY_COUNT; library++) {
    if (!deep && !same_text(file, library_name(library))) continue;
    if (share_present()) libraries_load(library);
  }
}

SHIM_EARLY choice shim_choose_dlopen(const char *file, uintptr_t flags, void *unused,
                                     const void *caller) {
  loader_prepare();
  prepare_drivers(file, flags & UINT32_MAX);
  if (file != NULL && (flags & RTLD_NOLOAD) == 0) libraries_load_beside(caller);
  return (choice){.jump = (void *)real.dlopen};
}

// Names without a slash are looked for on the shim's paths here, not on the caller's RUNPATH.
static void *open_in_space(Lmid_t space, const char *file, int flags) {
  loader_prepare();
  if (space == LM_ID_BASE) prepare_drivers(file, (unsigned)flags);
  if (real.dlmopen == NULL) return NULL;
  void *handle = real.dlmopen(space, file, flags);
  if (handle != NULL && space != LM_ID_BASE && share_present()) {
    libraries_adopt_namespace(handle);
  }
  return handle;
}

SHIM_EXPORT void *dlmopen(Lmid_t space, const char *file, int flags) {
  return open_in_space(space, file, flags);
}

extern const char shim_dlsym[], shim_dlvsym[], shim_dlopen[];

void *loader_replacement(const char *name) {
  if (same_text(name, "dlsym")) return (void *)(uintptr_t)shim_dlsym;
  if (same_text(name, "dlvsym")) return (void *)(uintptr_t)shim_dlvsym;
  if (same_text(name, "dlopen")) return (void *)(uintptr_t)shim_dlopen;
  if (same_text(name, "dlmopen")) return (void *)&open_in_space;
  return NULL;
}
