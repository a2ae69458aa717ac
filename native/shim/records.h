// SPDX-License-Identifier: Apache-2.0
// What this process holds of the driver and what was charged for it, by pointer or handle.
//
// Open-addressing tables in anonymous memory, in shards that each have a lock: no allocation in the
// common case, and none of it from the program's heap.
#ifndef ALLOTMENT_SHIM_RECORDS_H
#define ALLOTMENT_SHIM_RECORDS_H

#include <pthread.h>

#include "shim.h"

// Values of different spaces are told apart: a context may have the number of a device pointer.
typedef enum record_space {
  SPACE_POINTER = 1,  // what cuMemFree takes
  SPACE_BLOCK,        // 2 MiB of small allocations, by address
  SPACE_CHUNK,        // what a pool once grew by, by address
  SPACE_ARRAY,
  SPACE_MIPMAP,
  SPACE_MODULE,
  SPACE_LIBRARY,
  SPACE_GRAPH,     // executable graphs that allocate
  SPACE_HANDLE,    // VMM allocation handles
  SPACE_PHYSICAL,  // VMM allocations, by a number of the shim's own
  SPACE_MAPPING,   // VMM mappings, by their first address
  SPACE_SPARSE,    // VMM allocations that are mapped into arrays
  SPACE_BINDING,   // VMM allocations that are bound to multicast objects or endpoints
  SPACE_CONTEXT,
  SPACE_LIMIT,  // what cuCtxSetLimit added to a context, by context and limit
} record_space;

typedef enum record_kind {
  KIND_PLAIN = 0,  // `bytes` are charged on `device`
  KIND_SMALL,      // part of a block; `bytes` are not charged themselves
  KIND_POOLED,     // from the pool `owner`; `bytes` are not charged themselves
} record_kind;

typedef struct record {
  uint64_t key;
  uint64_t bytes;  // of a binding: its place in the object (bindings.c)
  uint64_t owner;  // the context it dies with, the pool or allocation it belongs to; 0: none
  uint32_t count;  // of a block: small allocations in it; of a handle: references; of plain memory:
                   // how it moves (residency.h); of a small or pooled piece: its number
  int16_t device;  // index in the policy
  uint8_t space;   // 0: the place is empty
  uint8_t kind;
} record;

#define RECORD_SHARDS 16

typedef struct record_shard {
  pthread_mutex_t lock;
  record *places;
  size_t capacity;  // a power of two
  size_t used;
} record_shard;

typedef struct record_table {
  record_shard shards[RECORD_SHARDS];
} record_table;

// False: no memory for it. If there is a record of that key already, it is handed out in
// *displaced (its object must be gone, or the driver would not have given its number again).
bool records_put(record_table *table, const record *added, record *displaced, bool *was_displaced);
// The same where nothing can be displaced, or what is displaced has no charge of its own.
bool records_keep(record_table *table, const record *added);
// Takes the record out.
bool records_take(record_table *table, record_space space, uint64_t key, record *taken);
bool records_find(record_table *table, record_space space, uint64_t key, record *found);
// Takes the record of a piece out if it is still the one that was found.
bool records_take_same(record_table *table, const record *found);

// Calls back with the record under its shard's lock; what is returned says whether it stays. With
// `key` absent from the table a record of zeros with space and key set is shown, and kept if asked.
// False: that one is absent, and there is no memory for it.
typedef bool record_change(record *changed, bool exists, void *context);
bool records_change(record_table *table, record_space space, uint64_t key, record_change *change,
                    void *context);

// Takes out all records that the callback says yes to. It is called under a shard's lock.
typedef bool record_test(const record *seen, void *context);
void records_sweep(record_table *table, record_test *leaves, void *context);

#endif
