// SPDX-License-Identifier: Apache-2.0
// The table of records against a plain array, with threads beside it.
//
// sources: shim/records.c
#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "shim/records.h"

#define KEYS 4000
#define STEPS 200000

static record_table table;

static record made(uint64_t key, uint64_t bytes) {
  return (record){.space = SPACE_POINTER, .key = key, .bytes = bytes, .owner = key % 7};
}

// Keys that collide: few low bits differ.
static uint64_t key_of(unsigned number) {
  return (uint64_t)(number + 1) << 21;
}

static void agrees_with_an_array(void) {
  static uint64_t expected[KEYS];
  unsigned seed = 11;
  record found, displaced;
  bool was_displaced;
  for (int step = 0; step < STEPS; step++) {
    unsigned number = (unsigned)rand_r(&seed) % KEYS;
    uint64_t key = key_of(number);
    switch (rand_r(&seed) % 3) {
      case 0: {
        record added = made(key, 1 + (uint64_t)step);
        assert(records_put(&table, &added, &displaced, &was_displaced));
        assert(was_displaced == (expected[number] != 0));
        assert(!was_displaced || displaced.bytes == expected[number]);
        expected[number] = added.bytes;
        break;
      }
      case 1: {
        bool taken = records_take(&table, SPACE_POINTER, key, &found);
        assert(taken == (expected[number] != 0));
        assert(!taken || found.bytes == expected[number]);
        expected[number] = 0;
        break;
      }
      default: {
        bool known = records_find(&table, SPACE_POINTER, key, &found);
        assert(known == (expected[number] != 0));
        assert(!known || (found.bytes == expected[number] && found.key == key));
        // The same number in another space is another thing.
        assert(!records_find(&table, SPACE_ARRAY, key, &found));
      }
    }
  }
  for (unsigned number = 0; number < KEYS; number++) {
    bool taken = records_take(&table, SPACE_POINTER, key_of(number), &found);
    assert(taken == (expected[number] != 0));
  }
}

static bool is_of_owner_three(const record *seen, void *context) {
  uint64_t *sum = context;
  if (seen->owner != 3) return false;
  *sum += seen->bytes;
  return true;
}

static void sweeps_take_all_of_an_owner(void) {
  record displaced, found;
  bool was_displaced;
  uint64_t wanted = 0, sum = 0;
  for (unsigned number = 0; number < KEYS; number++) {
    record added = made(key_of(number), number);
    if (added.owner == 3) wanted += number;
    assert(records_put(&table, &added, &displaced, &was_displaced));
  }
  records_sweep(&table, is_of_owner_three, &sum);
  assert(sum == wanted);
  for (unsigned number = 0; number < KEYS; number++) {
    bool left = records_take(&table, SPACE_POINTER, key_of(number), &found);
    assert(left == (key_of(number) % 7 != 3));
  }
}

static bool count_up(record *changed, bool exists, void *context) {
  (void)context;
  assert(exists == (changed->count > 0));
  changed->count++;
  return true;
}

static bool count_down(record *changed, bool exists, void *context) {
  (void)context;
  assert(exists);
  return --changed->count > 0;
}

static void *change_beside_others(void *argument) {
  unsigned seed = (unsigned)(uintptr_t)argument;
  record found, displaced;
  bool was_displaced;
  for (int step = 0; step < 20000; step++) {
    uint64_t key = (uint64_t)(uintptr_t)argument << 40 | (uint64_t)rand_r(&seed) % 500;
    record added = made(key, 5);
    assert(records_put(&table, &added, &displaced, &was_displaced) && !was_displaced);
    assert(records_change(&table, SPACE_BLOCK, 77, count_up, NULL));
    assert(records_take(&table, SPACE_POINTER, key, &found) && found.bytes == 5);
    assert(records_change(&table, SPACE_BLOCK, 77, count_down, NULL));
  }
  return NULL;
}

static void threads_do_not_meet(void) {
  pthread_t threads[4];
  record found;
  for (uintptr_t i = 0; i < 4; i++) {
    assert(pthread_create(&threads[i], NULL, change_beside_others, (void *)(i + 1)) == 0);
  }
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  assert(!records_find(&table, SPACE_BLOCK, 77, &found));
}

static bool is_full(uint64_t *in_it) {
  for (int i = 0; i < RECORD_SHARDS; i++) {
    const record_shard *shard = &table.shards[i];
    if (shard->capacity == 0 || shard->used * 4 < shard->capacity * 3) continue;
    for (size_t at = 0; at < shard->capacity; at++) {
      if (shard->places[at].space == SPACE_BLOCK) *in_it = shard->places[at].key;
    }
    return true;
  }
  return false;
}

// Else a count that is not raised would say too early that nothing holds what is counted.
static void what_exists_changes_without_memory(void) {
  uint64_t key = 0, next = 1;
  record found;
  while (!is_full(&key)) {
    record added = {.space = SPACE_BLOCK, .key = next++ << 21, .count = 1};
    assert(records_keep(&table, &added));
  }
  struct rlimit before, none;
  assert(getrlimit(RLIMIT_DATA, &before) == 0);
  none = (struct rlimit){.rlim_cur = 0, .rlim_max = before.rlim_max};
  assert(setrlimit(RLIMIT_DATA, &none) == 0);
  bool changed = records_change(&table, SPACE_BLOCK, key, count_up, NULL);
  assert(setrlimit(RLIMIT_DATA, &before) == 0);
  assert(changed && records_find(&table, SPACE_BLOCK, key, &found) && found.count == 2);
}

int main(void) {
  agrees_with_an_array();
  sweeps_take_all_of_an_owner();
  threads_do_not_meet();
  what_exists_changes_without_memory();
  return 0;
}
