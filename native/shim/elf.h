// SPDX-License-Identifier: Apache-2.0
// Loaded objects as they lie in memory: find, read and redirect their dynamic symbols.
#ifndef ALLOTMENT_SHIM_ELF_H
#define ALLOTMENT_SHIM_ELF_H

#include <link.h>

#include "shim.h"

typedef struct elf_object {
  uintptr_t base;
  const ElfW(Sym) * symbols;
  const char *strings;
  const uint32_t *gnu_hash;
  const uint32_t *sysv_hash;
  const char *soname;  // "" when it has none
  const ElfW(Rela) * relocations[2];
  size_t relocation_counts[2];
  size_t unnamed_relocations;  // the first of them name no symbol: most of a large library's
} elf_object;

// False: the object has no dynamic symbols to speak of.
bool elf_read(elf_object *object, uintptr_t base, const ElfW(Dyn) * dynamic);
// The object's own definition of a function or variable, or NULL.
const ElfW(Sym) * elf_find(const elf_object *object, const char *name);

SHIM_EARLY static inline void *elf_address(const elf_object *object, const ElfW(Sym) * symbol) {
  return (void *)(object->base + symbol->st_value);
}

typedef void elf_visit_symbol(void *context, const ElfW(Sym) * symbol);
void elf_exports(const elf_object *object, elf_visit_symbol *visit, void *context);

// Calls back with each word that the loader filled with the address of a named symbol.
typedef void elf_visit_slot(void *context, void **slot, const char *name);
void elf_slots(const elf_object *object, elf_visit_slot *visit, void *context);

// Makes the pages from `first` to `last` of an object writable for a moment. False: the system does
// not let us, and nothing was changed.
typedef struct elf_lock {
  void *start;
  size_t size;
  int protection;
} elf_lock;
bool elf_unlock(elf_lock *lock, const elf_object *object, const void *first, const void *last);
void elf_relock(const elf_lock *lock);

bool same_text(const char *one, const char *other);

#endif
