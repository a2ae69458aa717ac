// SPDX-License-Identifier: Apache-2.0
// Reads the dynamic sections that the loader itself uses (System V gABI, "Dynamic Linking").
//
// No call into libc here: this runs before the sanitizer runtimes of a host program are ready.
#include "elf.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define SLOT_JUMP R_X86_64_JUMP_SLOT
#define SLOT_DATA R_X86_64_GLOB_DAT
#define SLOT_ABSOLUTE R_X86_64_64
#elif defined(__aarch64__)
#define SLOT_JUMP R_AARCH64_JUMP_SLOT
#define SLOT_DATA R_AARCH64_GLOB_DAT
#define SLOT_ABSOLUTE R_AARCH64_ABS64
#else
#error "the shim is for x86-64 and arm64"
#endif

SHIM_EARLY bool same_text(const char *one, const char *other) {
  while (*one != '\0' && *one == *other) {
    one++;
    other++;
  }
  return *one == *other;
}

// glibc relocates most of these pointers in place, but not those of the vDSO.
SHIM_EARLY static uintptr_t in_memory(uintptr_t base, uintptr_t address) {
  return address < base ? base + address : address;
}

SHIM_EARLY bool elf_read(elf_object *object, uintptr_t base, const ElfW(Dyn) * dynamic) {
  *object = (elf_object){.base = base, .soname = ""};
  if (dynamic == NULL) return false;
  size_t soname = 0, sizes[2] = {0, 0};
  for (; dynamic->d_tag != DT_NULL; dynamic++) {
    uintptr_t value = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        object->symbols = (const void *)in_memory(base, value);
        break;
      case DT_STRTAB:
        object->strings = (const void *)in_memory(base, value);
        break;
      case DT_GNU_HASH:
        object->gnu_hash = (const void *)in_memory(base, value);
        break;
      case DT_HASH:
        object->sysv_hash = (const void *)in_memory(base, value);
        break;
      case DT_SONAME:
        soname = value;
        break;
      case DT_RELA:
        object->relocations[0] = (const void *)in_memory(base, value);
        break;
      case DT_RELASZ:
        sizes[0] = value;
        break;
      case DT_JMPREL:
        object->relocations[1] = (const void *)in_memory(base, value);
        break;
      case DT_PLTRELSZ:
        sizes[1] = value;
        break;
      case DT_RELACOUNT:
        object->unnamed_relocations = value;
        break;
      default:
        break;
    }
  }
  if (object->symbols == NULL || object->strings == NULL) return false;
  object->soname = soname == 0 ? "" : object->strings + soname;
  for (int i = 0; i < 2; i++) {
    if (object->relocations[i] != NULL)
      object->relocation_counts[i] = sizes[i] / sizeof(ElfW(Rela));
  }
  return object->gnu_hash != NULL || object->sysv_hash != NULL;
}

SHIM_EARLY static bool defines(const elf_object *object, const ElfW(Sym) * symbol,
                               const char *name) {
  unsigned type = ELF64_ST_TYPE(symbol->st_info);
  return symbol->st_shndx != SHN_UNDEF && symbol->st_value != 0 && type != STT_TLS &&
         type != STT_GNU_IFUNC && same_text(object->strings + symbol->st_name, name);
}

SHIM_EARLY static const ElfW(Sym) * find_by_gnu_hash(const elf_object *object, const char *name) {
  uint32_t hash = 5381;
  for (const char *at = name; *at != '\0'; at++) hash = hash * 33 + (unsigned char)*at;
  const uint32_t *table = object->gnu_hash;
  uint32_t buckets = table[0], first = table[1], filter_words = table[2];
  if (buckets == 0) return NULL;
  const uint32_t *bucket = table + 4 + filter_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
  const uint32_t *chain = bucket + buckets;
  uint32_t index = bucket[hash % buckets];
  if (index < first) return NULL;
  for (;; index++) {
    uint32_t entry = chain[index - first];
    if ((entry | 1) == (hash | 1) && defines(object, &object->symbols[index], name)) {
      return &object->symbols[index];
    }
    if ((entry & 1) != 0) return NULL;
  }
}

SHIM_EARLY static const ElfW(Sym) * find_by_sysv_hash(const elf_object *object, const char *name) {
  uint32_t hash = 0;
  for (const char *at = name; *at != '\0'; at++) {
    hash = (hash << 4) + (unsigned char)*at;
    uint32_t high = hash & 0xf0000000u;
    hash = (hash ^ (high >> 24)) & ~high;
  }
  const uint32_t *table = object->sysv_hash;
  uint32_t buckets = table[0];
  if (buckets == 0) return NULL;
  const uint32_t *chain = table + 2 + buckets;
  for (uint32_t index = table[2 + hash % buckets]; index != 0; index = chain[index]) {
    if (defines(object, &object->symbols[index], name)) return &object->symbols[index];
  }
  return NULL;
}

SHIM_EARLY const ElfW(Sym) * elf_find(const elf_object *object, const char *name) {
  return object->gnu_hash != NULL ? find_by_gnu_hash(object, name)
                                  : find_by_sysv_hash(object, name);
}

// How many symbols there are is told by the hash tables alone.
static size_t symbol_count(const elf_object *object) {
  if (object->sysv_hash != NULL) return object->sysv_hash[1];
  const uint32_t *table = object->gnu_hash;
  uint32_t buckets = table[0], first = table[1], filter_words = table[2];
  const uint32_t *bucket = table + 4 + filter_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
  uint32_t last = 0;
  for (uint32_t i = 0; i < buckets; i++) {
    if (bucket[i] > last) last = bucket[i];
  }
  if (last < first) return first;
  const uint32_t *chain = bucket + buckets;
  while ((chain[last - first] & 1) == 0) last++;
  return (size_t)last + 1;
}

void elf_exports(const elf_object *object, elf_visit_symbol *visit, void *context) {
  size_t count = symbol_count(object);
  for (size_t i = 1; i < count; i++) {
    const ElfW(Sym) *symbol = &object->symbols[i];
    if (ELF64_ST_BIND(symbol->st_info) == STB_LOCAL) continue;
    if (defines(object, symbol, object->strings + symbol->st_name)) visit(context, symbol);
  }
}

void elf_slots(const elf_object *object, elf_visit_slot *visit, void *context) {
  for (int table = 0; table < 2; table++) {
    size_t first = table == 0 ? object->unnamed_relocations : 0;
    for (size_t i = first; i < object->relocation_counts[table]; i++) {
      const ElfW(Rela) *relocation = &object->relocations[table][i];
      unsigned long type = ELF64_R_TYPE(relocation->r_info);
      if (type != SLOT_JUMP && type != SLOT_DATA && type != SLOT_ABSOLUTE) continue;
      const ElfW(Sym) *symbol = &object->symbols[ELF64_R_SYM(relocation->r_info)];
      if (relocation->r_addend != 0 && type == SLOT_ABSOLUTE) continue;
      visit(context, (void **)(object->base + relocation->r_offset),
            object->strings + symbol->st_name);
    }
  }
}

// What the loader allows for the page of `address` once it is done, as mprotect wants it. A shared
// object's own header is the first thing in its memory. -1: unknown.
static int protection_of(const elf_object *object, uintptr_t address) {
  const ElfW(Ehdr) *header = (const void *)object->base;
  if (header == NULL || memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return -1;
  const ElfW(Phdr) *segments = (const void *)(object->base + header->e_phoff);
  int protection = -1;
  for (unsigned i = 0; i < header->e_phnum; i++) {
    uintptr_t start = object->base + segments[i].p_vaddr;
    uintptr_t end = start + segments[i].p_memsz;
    // The loader protects whole pages only: what shares the last one stays writable.
    if (segments[i].p_type == PT_GNU_RELRO) end &= ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    if (address < start || address >= end) continue;
    if (segments[i].p_type == PT_GNU_RELRO) return PROT_READ;
    if (segments[i].p_type != PT_LOAD) continue;
    unsigned flags = segments[i].p_flags;
    protection = ((flags & PF_R) != 0 ? PROT_READ : 0) | ((flags & PF_W) != 0 ? PROT_WRITE : 0) |
                 ((flags & PF_X) != 0 ? PROT_EXEC : 0);
  }
  return protection;
}

bool elf_unlock(elf_lock *lock, const elf_object *object, const void *first, const void *last) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  uintptr_t start = (uintptr_t)first & ~(page - 1);
  uintptr_t end = ((uintptr_t)last + page) & ~(page - 1);
  int protection = protection_of(object, (uintptr_t)first);
  *lock = (elf_lock){(void *)start, end - start, protection};
  // What was executable stays so meanwhile: other threads may be running on these very pages.
  return protection >= 0 && ((protection & PROT_WRITE) != 0 ||
                             mprotect(lock->start, lock->size, protection | PROT_WRITE) == 0);
}

void elf_relock(const elf_lock *lock) {
  if ((lock->protection & PROT_WRITE) == 0) mprotect(lock->start, lock->size, lock->protection);
}
