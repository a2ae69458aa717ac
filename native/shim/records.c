// SPDX-License-Identifier: Apache-2.0
// Linear probing; a removal closes its gap, so that look-ups end at the first empty place.
#include "records.h"

#include <string.h>
#include <sys/mman.h>

#define FIRST_CAPACITY 512

static uint64_t mix(record_space space, uint64_t key) {
  uint64_t hash = (key ^ ((uint64_t)space << 56)) * UINT64_C(0x9e3779b97f4a7c15);
  return hash ^ (hash >> 29);
}

static record_shard *shard_of(record_table *table, uint64_t hash) {
  return &table->shards[(hash >> 58) % RECORD_SHARDS];
}

static record *place_of(const record_shard *shard, record_space space, uint64_t key,
                        uint64_t hash) {
  if (shard->capacity == 0) return NULL;
  for (size_t i = hash & (shard->capacity - 1);; i = (i + 1) & (shard->capacity - 1)) {
    record *place = &shard->places[i];
    if (place->space == 0 || (place->key == key && place->space == space)) return place;
  }
}

static bool grow(record_shard *shard) {
  size_t capacity = shard->capacity == 0 ? FIRST_CAPACITY : shard->capacity * 2;
  void *memory = mmap(NULL, capacity * sizeof(record), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  record_shard larger = {.places = memory, .capacity = capacity};
  for (size_t i = 0; i < shard->capacity; i++) {
    const record *moved = &shard->places[i];
    if (moved->space == 0) continue;
    *place_of(&larger, moved->space, moved->key, mix(moved->space, moved->key)) = *moved;
  }
  if (shard->capacity != 0) munmap(shard->places, shard->capacity * sizeof(record));
  shard->places = memory;
  shard->capacity = capacity;
  return true;
}

static bool has_room(record_shard *shard) {
  return (shard->capacity != 0 && shard->used * 4 < shard->capacity * 3) || grow(shard);
}

static void remove_place(record_shard *shard, record *place) {
  size_t mask = shard->capacity - 1;
  size_t gap = (size_t)(place - shard->places);
  for (size_t i = (gap + 1) & mask; shard->places[i].space != 0; i = (i + 1) & mask) {
    const record *next = &shard->places[i];
    size_t home = mix(next->space, next->key) & mask;
    // It may move back to the gap unless its home lies between the gap and itself.
    if (((i - home) & mask) < ((i - gap) & mask)) continue;
    shard->places[gap] = *next;
    gap = i;
  }
  shard->places[gap] = (record){.space = 0};
  shard->used--;
}

bool records_change(record_table *table, record_space space, uint64_t key, record_change *change,
                    void *context) {
  uint64_t hash = mix(space, key);
  record_shard *shard = shard_of(table, hash);
  pthread_mutex_lock(&shard->lock);
  record *place = place_of(shard, space, key, hash);
  bool exists = place != NULL && place->space != 0;
  bool kept = exists || has_room(shard);
  if (kept && !exists) {
    place = place_of(shard, space, key, hash);
    *place = (record){.space = (uint8_t)space, .key = key};
    shard->used++;
  }
  if (kept && !change(place, exists, context)) remove_place(shard, place);
  pthread_mutex_unlock(&shard->lock);
  return kept;
}

typedef struct put_context {
  const record *added;
  record *displaced;
  bool was_displaced;
} put_context;

static bool put_record(record *changed, bool exists, void *context) {
  put_context *put = context;
  put->was_displaced = exists;
  if (exists) *put->displaced = *changed;
  *changed = *put->added;
  return true;
}

bool records_put(record_table *table, const record *added, record *displaced, bool *was_displaced) {
  put_context put = {.added = added, .displaced = displaced};
  bool kept = records_change(table, added->space, added->key, put_record, &put);
  *was_displaced = put.was_displaced;
  return kept;
}

bool records_keep(record_table *table, const record *added) {
  record displaced;
  bool was_displaced;
  return records_put(table, added, &displaced, &was_displaced);
}

static bool look(record_table *table, record_space space, uint64_t key, record *found, bool take) {
  uint64_t hash = mix(space, key);
  record_shard *shard = shard_of(table, hash);
  pthread_mutex_lock(&shard->lock);
  record *place = place_of(shard, space, key, hash);
  bool exists = place != NULL && place->space != 0;
  if (exists) *found = *place;
  if (exists && take) remove_place(shard, place);
  pthread_mutex_unlock(&shard->lock);
  return exists;
}

bool records_take(record_table *table, record_space space, uint64_t key, record *taken) {
  return look(table, space, key, taken, true);
}

bool records_find(record_table *table, record_space space, uint64_t key, record *found) {
  return look(table, space, key, found, false);
}

typedef struct same_context {
  const record *found;
  bool is_same;
} same_context;

static bool keep_others(record *seen, bool exists, void *context) {
  same_context *same = context;
  same->is_same = exists && seen->kind == same->found->kind && seen->count == same->found->count;
  return exists && !same->is_same;
}

bool records_take_same(record_table *table, const record *found) {
  same_context same = {.found = found};
  records_change(table, (record_space)found->space, found->key, keep_others, &same);
  return same.is_same;
}

void records_sweep(record_table *table, record_test *leaves, void *context) {
  for (int i = 0; i < RECORD_SHARDS; i++) {
    record_shard *shard = &table->shards[i];
    pthread_mutex_lock(&shard->lock);
    for (size_t at = 0; at < shard->capacity;) {
      record *place = &shard->places[at];
      // A removal may move a later record here: look at the same place again.
      if (place->space != 0 && leaves(place, context)) {
        remove_place(shard, place);
      } else {
        at++;
      }
    }
    pthread_mutex_unlock(&shard->lock);
  }
}
