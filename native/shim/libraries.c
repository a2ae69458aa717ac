// SPDX-License-Identifier: Apache-2.0
// Takes the driver's libraries in: learns the addresses of owned entries, then changes the
// library's own symbol table (this process's private copy of it) so that any look-up, by whichever
// loader function, from whichever scope, finds the wrappers.
//
// A process has one driver. A further copy of the library (another namespace, a copy under another
// path) would have a state of its own, with contexts and memory that the first knows nothing of, so
// all exports of a further copy lead to the first one or to its wrappers.
#include "libraries.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "cuda_abi.h"
#include "elf.h"
#include "loader.h"
#include "nvml_abi.h"
#include "process.h"

static const char *const names[LIBRARY_COUNT] = {"libcuda.so.1", "libnvidia-ml.so.1"};

#define COPIES 8 /* of both libraries, in one namespace */

// The first copy, which everything goes to. Set once.
static elf_object primaries[LIBRARY_COUNT];
static bool present[LIBRARY_COUNT];

const char *library_name(int library) {
  return names[library];
}

static int library_of(const elf_object *object) {
  for (int library = 0; library < LIBRARY_COUNT; library++) {
    if (same_text(object->soname, names[library])) return library;
  }
  return -1;
}

static shim_entry first_entry(int library) {
  return library == LIBRARY_CUDA ? 0 : ENTRY_NVML_START + 1;
}

static shim_entry end_entry(int library) {
  return library == LIBRARY_CUDA ? ENTRY_CUDA_END : ENTRY_COUNT;
}

// ---- one copy ----

// Are the copy's exports led already? It has an owned entry that leads to its wrapper.
static bool is_led(const elf_object *object, int library) {
  for (shim_entry entry = first_entry(library); entry < end_entry(library); entry++) {
    const ElfW(Sym) *symbol = elf_find(object, entry_name(entry));
    if (symbol != NULL && elf_address(object, symbol) == entry_wrapper(entry)) return true;
  }
  return false;
}

// Where a further copy's symbol leads: to the wrapper, or to the first copy's function.
static void *target_of(int library, const char *name) {
  int entry = entry_by_name(name);
  if (entry >= 0)
    return entry_real((shim_entry)entry) == NULL ? NULL : entry_wrapper((shim_entry)entry);
  if (!present[library]) return NULL;
  const ElfW(Sym) *symbol = elf_find(&primaries[library], name);
  return symbol == NULL ? NULL : elf_address(&primaries[library], symbol);
}

static void redirect(const elf_object *object, const ElfW(Sym) * symbol, void *target) {
  ElfW(Sym) *changed = (void *)(uintptr_t)symbol;
  __atomic_store_n(&changed->st_value, (uintptr_t)target - object->base, __ATOMIC_RELEASE);
}

// ---- the driver's calls of its own functions, which go past the wrappers ----
//
// Where the system forbids the change, they count as the program's: too much is charged.

typedef struct own_visit {
  const elf_object *object;
  elf_lock lock;  // of the page of the last slot; none: `size` is 0
} own_visit;

static bool opens_page(own_visit *visit, void **slot) {
  uintptr_t start = (uintptr_t)visit->lock.start;
  if ((uintptr_t)slot >= start && (uintptr_t)(slot + 1) <= start + visit->lock.size) return true;
  if (visit->lock.size != 0) elf_relock(&visit->lock);
  if (elf_unlock(&visit->lock, visit->object, slot, (char *)(slot + 1) - 1)) return true;
  visit->lock.size = 0;
  return false;
}

static void lead_own_slot(void *context, void **slot, const char *name) {
  own_visit *visit = context;
  int entry = entry_by_name(name);
  void *real = entry < 0 ? NULL : entry_real((shim_entry)entry);
  if (real == NULL || *slot == real) return;
  if (opens_page(visit, slot)) __atomic_store_n(slot, real, __ATOMIC_RELEASE);
}

static void lead_own_slots(const elf_object *object) {
  own_visit visit = {.object = object};
  elf_slots(object, lead_own_slot, &visit);
  if (visit.lock.size != 0) elf_relock(&visit.lock);
}

static void learn(const elf_object *object, int library) {
  for (shim_entry entry = first_entry(library); entry < end_entry(library); entry++) {
    const ElfW(Sym) *symbol = elf_find(object, entry_name(entry));
    if (symbol != NULL) entry_learn(entry, elf_address(object, symbol));
  }
  lead_own_slots(object);
  primaries[library] = *object;
  __atomic_store_n(&present[library], true, __ATOMIC_RELEASE);
}

static void lead_owned(const elf_object *object, int library) {
  const ElfW(Sym) * found[ENTRY_COUNT], *lowest = NULL, *highest = NULL;
  for (shim_entry entry = first_entry(library); entry < end_entry(library); entry++) {
    const ElfW(Sym) *symbol = found[entry] = elf_find(object, entry_name(entry));
    if (symbol == NULL) continue;
    if (lowest == NULL || symbol < lowest) lowest = symbol;
    if (highest == NULL || symbol > highest) highest = symbol;
  }
  elf_lock lock;
  // Where the system forbids it, dlsym and plain symbols still lead to the wrappers.
  if (lowest == NULL || !elf_unlock(&lock, object, lowest, highest + 1)) return;
  for (shim_entry entry = first_entry(library); entry < end_entry(library); entry++) {
    if (found[entry] != NULL) redirect(object, found[entry], entry_wrapper(entry));
  }
  elf_relock(&lock);
}

typedef struct copy_visit {
  const elf_object *object;
  int library;
} copy_visit;

static void lead_one(void *context, const ElfW(Sym) * symbol) {
  const copy_visit *visit = context;
  const char *name = visit->object->strings + symbol->st_name;
  int entry = entry_by_name(name);
  if (entry >= 0) entry_alias((shim_entry)entry, elf_address(visit->object, symbol));
  void *target = target_of(visit->library, name);
  elf_lock lock;
  if (target == NULL || !elf_unlock(&lock, visit->object, symbol, symbol + 1)) return;
  redirect(visit->object, symbol, target);
  elf_relock(&lock);
}

static void adopt(const elf_object *object, int library) {
  if (!present[library]) learn(object, library);
  if (is_led(object, library)) return;
  if (object->base == primaries[library].base) {
    lead_owned(object, library);
  } else {
    copy_visit visit = {object, library};
    elf_exports(object, lead_one, &visit);
  }
}

// ---- the program's own namespace ----

typedef struct scan {
  elf_object copies[COPIES];
  const char *paths[COPIES];
  int count;
  unsigned long long changes;
  bool started;
} scan;

static unsigned long long scanned_changes;

static int note_object(struct dl_phdr_info *info, size_t size, void *context) {
  scan *found = context;
  if (!found->started) {
    found->started = true;
    found->changes = info->dlpi_adds + info->dlpi_subs;
    if (found->changes == __atomic_load_n(&scanned_changes, __ATOMIC_RELAXED)) return 1;
  }
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    elf_object object;
    const void *dynamic = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    if (!elf_read(&object, info->dlpi_addr, dynamic) || library_of(&object) < 0) continue;
    if (found->count == COPIES) return 1;
    found->paths[found->count] = info->dlpi_name;
    found->copies[found->count++] = object;
  }
  return 0;
}

// Pointers into the library are kept from here on: it must never be unloaded. Not under a lock: the
// loader's own is held by threads that may want ours.
static void keep(const char *path) {
  if (loader_real()->dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) == NULL) dlerror();
}

void libraries_scan(void) {
  process *own = process_state();
  if (own == NULL) return;
  scan found = {.count = 0};
  bool first[COPIES];
  pthread_mutex_lock(&own->library_lock);
  dl_iterate_phdr(note_object, &found);
  for (int i = 0; i < found.count; i++) {
    int library = library_of(&found.copies[i]);
    first[i] = !present[library];
    adopt(&found.copies[i], library);
  }
  __atomic_store_n(&scanned_changes, found.changes, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&own->library_lock);
  for (int i = 0; i < found.count; i++) {
    if (first[i]) keep(found.paths[i]);
  }
}

void libraries_load(int library) {
  if (__atomic_load_n(&present[library], __ATOMIC_ACQUIRE)) return;
  libraries_scan();
  process *own = process_state();
  if (own == NULL || __atomic_load_n(&present[library], __ATOMIC_ACQUIRE)) return;
  if (__atomic_exchange_n(&own->load_tried[library], 1, __ATOMIC_ACQ_REL) != 0) return;
  if (loader_real()->dlopen == NULL) return;
  if (loader_real()->dlopen(names[library], RTLD_LAZY | RTLD_LOCAL) == NULL) {
    dlerror();  // the program has asked for nothing that failed
    return;
  }
  libraries_scan();
}

// ---- what a wrapper calls when there is no driver ----

static CUresult no_cuda(void) {
  return CUDA_ERROR_NO_DEVICE;
}
static CUresult no_cuda_entry(void) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
static nvmlReturn_t no_nvml(void) {
  return NVML_ERROR_LIBRARY_NOT_FOUND;
}
static nvmlReturn_t no_nvml_entry(void) {
  return NVML_ERROR_FUNCTION_NOT_FOUND;
}

void *libraries_real(shim_entry entry) {
  void *real = entry_real(entry);
  if (LIKELY(real != NULL)) return real;
  int library = entry_is_cuda(entry) ? LIBRARY_CUDA : LIBRARY_NVML;
  libraries_scan();
  libraries_load(library);
  real = entry_real(entry);
  if (real != NULL) return real;
  bool loaded = __atomic_load_n(&present[library], __ATOMIC_ACQUIRE);
  if (entry_is_cuda(entry)) return loaded ? (void *)no_cuda_entry : (void *)no_cuda;
  return loaded ? (void *)no_nvml_entry : (void *)no_nvml;
}

void *libraries_symbol(int library, const char *name) {
  libraries_load(library);
  if (!__atomic_load_n(&present[library], __ATOMIC_ACQUIRE)) return NULL;
  const ElfW(Sym) *symbol = elf_find(&primaries[library], name);
  return symbol == NULL ? NULL : elf_address(&primaries[library], symbol);
}

// ---- other namespaces ----

struct link_map *libraries_map_of(const void *address) {
  Dl_info info;
  void *map = NULL;
  return dladdr1(address, &info, &map, RTLD_DL_LINKMAP) != 0 ? map : NULL;
}

bool libraries_calls_itself(int library, const void *caller) {
  const struct link_map *map = libraries_map_of(caller);
  return map != NULL && __atomic_load_n(&present[library], __ATOMIC_ACQUIRE) &&
         map->l_addr == primaries[library].base;
}

typedef struct slot_visit {
  const elf_object *object;
  const elf_object *copies;
  int count;
} slot_visit;

static void lead_slot(void *context, void **slot, const char *name) {
  const slot_visit *visit = context;
  void *target = loader_replacement(name);
  for (int i = 0; i < visit->count && target == NULL; i++) {
    const ElfW(Sym) *symbol = elf_find(&visit->copies[i], name);
    if (symbol == NULL || *slot != elf_address(&visit->copies[i], symbol)) continue;
    target = target_of(library_of(&visit->copies[i]), name);
  }
  elf_lock lock;
  if (target == NULL || *slot == target) return;
  if (!elf_unlock(&lock, visit->object, slot, slot + 1)) return;
  __atomic_store_n(slot, target, __ATOMIC_RELEASE);
  elf_relock(&lock);
}

static void adopt_from(struct link_map *first) {
  elf_object copies[COPIES];
  int count = 0;
  for (struct link_map *map = first; map != NULL && count < COPIES; map = map->l_next) {
    elf_object object;
    if (elf_read(&object, map->l_addr, map->l_ld) && library_of(&object) >= 0) {
      copies[count++] = object;
    }
  }
  // What is bound already comes first, while the copies still export their own addresses.
  for (int i = 0; i < count; i++) {
    if (!present[library_of(&copies[i])]) learn(&copies[i], library_of(&copies[i]));
  }
  for (struct link_map *map = first; map != NULL; map = map->l_next) {
    elf_object object;
    if (!elf_read(&object, map->l_addr, map->l_ld)) continue;
    slot_visit visit = {&object, copies, count};
    elf_slots(&object, lead_slot, &visit);
  }
  for (int i = 0; i < count; i++) adopt(&copies[i], library_of(&copies[i]));
}

static void adopt_map(struct link_map *map) {
  struct link_map *first = map;
  while (first->l_prev != NULL) first = first->l_prev;
  for (struct link_map *at = first; at != NULL; at = at->l_next) {
    elf_object object;
    if (!elf_read(&object, at->l_addr, at->l_ld)) continue;
    int library = library_of(&object);
    if (library >= 0) libraries_load(library);  // the program's own namespace has the first copy
  }
  process *own = process_state();
  if (own == NULL) return;
  pthread_mutex_lock(&own->library_lock);
  adopt_from(first);
  pthread_mutex_unlock(&own->library_lock);
}

static bool is_own_namespace(const struct link_map *map) {
  while (map->l_prev != NULL) map = map->l_prev;
  return map == _r_debug.r_map;
}

static bool has_namespaces;

void libraries_adopt_namespace(void *handle) {
  __atomic_store_n(&has_namespaces, true, __ATOMIC_RELEASE);
  adopt_map(handle);
}

static bool has_copy(const struct link_map *map, int library) {
  while (map->l_prev != NULL) map = map->l_prev;
  for (; map != NULL; map = map->l_next) {
    elf_object object;
    if (elf_read(&object, map->l_addr, map->l_ld) && library_of(&object) == library) return true;
  }
  return false;
}

SHIM_EARLY void libraries_load_beside(const void *caller) {
  if (LIKELY(!__atomic_load_n(&has_namespaces, __ATOMIC_ACQUIRE))) return;
  struct link_map *map = libraries_map_of(caller);
  Lmid_t space;
  if (map == NULL || is_own_namespace(map) || dlinfo(map, RTLD_DI_LMID, &space) != 0) return;
  for (int library = 0; library < LIBRARY_COUNT; library++) {
    if (has_copy(map, library)) continue;
    if (loader_real()->dlmopen(space, names[library], RTLD_LAZY | RTLD_LOCAL) == NULL) dlerror();
  }
  adopt_map(map);
}

void libraries_adopt_namespace_of(const void *caller) {
  struct link_map *map = libraries_map_of(caller);
  if (map != NULL && !is_own_namespace(map)) adopt_map(map);
}

bool libraries_adopt_address(const void *address) {
  struct link_map *map = libraries_map_of(address);
  elf_object object;
  if (map == NULL || !elf_read(&object, map->l_addr, map->l_ld)) return false;
  if (library_of(&object) < 0 || is_own_namespace(map)) return false;
  adopt_map(map);
  return true;
}
