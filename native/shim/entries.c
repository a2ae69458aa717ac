// SPDX-License-Identifier: Apache-2.0
// Names, wrappers and driver addresses of the owned entry points.
#include "entries.h"

#include "elf.h"

// Wrappers are named wrap_<name> inside; only their exported aliases bear the driver's names, so
// that a host program's own definition of such a name never gets between.
#define SHIM_ENTRY(name) extern int wrap_##name(void);
SHIM_CUDA_ENTRIES(SHIM_ENTRY)
SHIM_NVML_ENTRIES(SHIM_ENTRY)
#undef SHIM_ENTRY

typedef struct entry_description {
  const char *name;
  int (*wrapper)(void);
} entry_description;

static const entry_description descriptions[ENTRY_COUNT] = {
#define SHIM_ENTRY(name) [ENTRY_##name] = {#name, wrap_##name},
    SHIM_CUDA_ENTRIES(SHIM_ENTRY) SHIM_NVML_ENTRIES(SHIM_ENTRY)
#undef SHIM_ENTRY
};

static void *reals[ENTRY_COUNT];

SHIM_EARLY static bool may_be_owned(const char *name) {
  if (name[0] == 'c') return name[1] == 'u';
  return name[0] == 'n' && name[1] == 'v' && name[2] == 'm' && name[3] == 'l';
}

SHIM_EARLY shim_entry entry_by_name(const char *name) {
  if (!may_be_owned(name)) return -1;
  int low = 0, high = ENTRY_COUNT - 1;
  while (low <= high) {
    int middle = (low + high) / 2;
    const unsigned char *one = (const unsigned char *)name;
    const unsigned char *other = (const unsigned char *)descriptions[middle].name;
    while (*one != 0 && *one == *other) {
      one++;
      other++;
    }
    if (*one == *other) return middle;
    if (*one < *other) {
      high = middle - 1;
    } else {
      low = middle + 1;
    }
  }
  return -1;
}

const char *entry_name(shim_entry entry) {
  return descriptions[entry].name;
}

void *entry_wrapper(shim_entry entry) {
  return (void *)descriptions[entry].wrapper;
}

void *entry_real(shim_entry entry) {
  return __atomic_load_n(&reals[entry], __ATOMIC_ACQUIRE);
}

// ---- from an address to its entry ----

#define ADDRESS_SLOTS 4096 /* far more than entries: wrappers, the driver's, those of look-ups */

typedef struct address_slot {
  const void *address;  // written last
  shim_entry entry;
} address_slot;

static address_slot addresses[ADDRESS_SLOTS];
static unsigned char claimed[ADDRESS_SLOTS];

static size_t first_slot(const void *address) {
  return (size_t)(((uintptr_t)address * UINT64_C(0x9e3779b97f4a7c15)) >> 52) % ADDRESS_SLOTS;
}

// Several threads may learn at once, and a child may be forked meanwhile: a slot is claimed before
// it is filled, and nobody waits for anybody.
static void remember_address(const void *address, shim_entry entry) {
  size_t slot = first_slot(address);
  for (int tries = 0; tries < ADDRESS_SLOTS; tries++, slot = (slot + 1) % ADDRESS_SLOTS) {
    if (__atomic_load_n(&addresses[slot].address, __ATOMIC_ACQUIRE) == address) return;
    if (__atomic_exchange_n(&claimed[slot], 1, __ATOMIC_ACQ_REL) != 0) continue;
    addresses[slot].entry = entry;
    __atomic_store_n(&addresses[slot].address, address, __ATOMIC_RELEASE);
    return;
  }
}

void entry_alias(shim_entry entry, const void *address) {
  remember_address(address, entry);
}

void entry_learn(shim_entry entry, void *real) {
  if (real == entry_wrapper(entry)) return;
  void *unknown = NULL;
  __atomic_compare_exchange_n(&reals[entry], &unknown, real, false, __ATOMIC_ACQ_REL,
                              __ATOMIC_ACQUIRE);
  remember_address(real, entry);
}

shim_entry entry_by_address(const void *address) {
  if (address == NULL) return -1;
  size_t slot = first_slot(address);
  for (int tries = 0; tries < ADDRESS_SLOTS; tries++, slot = (slot + 1) % ADDRESS_SLOTS) {
    const void *found = __atomic_load_n(&addresses[slot].address, __ATOMIC_ACQUIRE);
    if (found == NULL && __atomic_load_n(&claimed[slot], __ATOMIC_ACQUIRE) == 0) break;
    if (found == address) return addresses[slot].entry;
  }
  // Wrappers are few and rarely asked for: they need no slots.
  for (int entry = 0; entry < ENTRY_COUNT; entry++) {
    if ((void *)descriptions[entry].wrapper == address) return entry;
  }
  return -1;
}
