// SPDX-License-Identifier: Apache-2.0
// A sum over many processes' parts that no crash can unbalance, without a lock.
//
// The sum is 16 bytes, changed by compare-and-swap only: its value, and the name of the operation
// that made it so (the part's mark, and a number that only grows). A part publishes what it is
// about to do (before, after), and its operation counts from the swap that carries its name.
// Whoever comes next first marks that operation as committed in its part (helping), so at any
// instant a part is `after` its newest operation if that is committed, else `before` it, and the
// sum is the sum of the parts. docs/designs/ledger.md has the argument. Used by the ledger and by
// the simulated machine's memory.
#ifndef ALLOTMENT_COUNTER_H
#define ALLOTMENT_COUNTER_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// Crash tests define this to stop the process at each step of an operation.
#ifndef COUNTER_STEP
#define COUNTER_STEP(name) ((void)0)
#endif

#define ALLOT_OPERATION_BITS 48
#define ALLOT_OPERATION_MASK ((1ull << ALLOT_OPERATION_BITS) - 1)

typedef struct allot_counter {
  _Alignas(16) uint64_t value;
  uint64_t last;  // mark of the part << ALLOT_OPERATION_BITS | operation
} allot_counter;

// One intended change, in absolute values.
typedef struct allot_intent {
  uint64_t before;
  uint64_t after;
} allot_intent;

typedef struct allot_part {
  allot_intent intents[2];  // the cell of operation n is intents[n & 1]
  uint64_t operation;       // number of the newest operation published by the part's owner
  uint64_t committed;       // number of the newest operation known to be in the counter
} allot_part;

#define ALLOT_LOAD(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define ALLOT_STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)

static inline void allot_raise_to(uint64_t *word, uint64_t value) {
  uint64_t seen = ALLOT_LOAD(word);
  while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, false, __ATOMIC_SEQ_CST,
                                                      __ATOMIC_SEQ_CST)) {
  }
}

// The halves may be of two moments. That is harmless: `last` alone is always an operation that
// truly happened (helping it is right), and a swap fails unless both halves still hold.
static inline allot_counter allot_counter_read(const allot_counter *counter) {
  allot_counter seen = {.last = ALLOT_LOAD(&counter->last)};
  seen.value = ALLOT_LOAD(&counter->value);
  return seen;
}

// ThreadSanitizer's runtime does a 16-byte swap under a lock of the process: no swap between
// processes.
__attribute__((no_sanitize("thread"))) static inline bool allot_counter_swap(allot_counter *counter,
                                                                             allot_counter seen,
                                                                             allot_counter wanted) {
  typedef unsigned __int128 __attribute__((may_alias)) both;
  both from, to;
  memcpy(&from, &seen, sizeof from);
  memcpy(&to, &wanted, sizeof to);
  return __sync_bool_compare_and_swap((both *)(void *)counter, from, to);
}

static inline uint64_t allot_counter_mark(uint64_t last) {
  return last >> ALLOT_OPERATION_BITS;
}

// To be called with every counter read, on the part that `last` names, before a swap replaces it.
static inline void allot_part_help(allot_part *part, uint64_t last) {
  allot_raise_to(&part->committed, last & ALLOT_OPERATION_MASK);
}

// What the part has. Exact for its owner (or who has taken over from it) after helping.
static inline uint64_t allot_part_value(const allot_part *part) {
  uint64_t operation = ALLOT_LOAD(&part->operation);
  const allot_intent *intent = &part->intents[operation & 1];
  bool done = ALLOT_LOAD(&part->committed) >= operation;
  return done ? ALLOT_LOAD(&intent->after) : ALLOT_LOAD(&intent->before);
}

// What the part has, for anyone, while its owner moves on.
static inline uint64_t allot_part_peek(const allot_part *part, const allot_counter *counter,
                                       uint64_t mark) {
  for (int tries = 0; tries < 100; tries++) {
    uint64_t operation = ALLOT_LOAD(&part->operation);
    uint64_t before = ALLOT_LOAD(&part->intents[operation & 1].before);
    uint64_t after = ALLOT_LOAD(&part->intents[operation & 1].after);
    // An operation is in the counter before it is marked as committed: look at both.
    bool done = ALLOT_LOAD(&counter->last) == (mark << ALLOT_OPERATION_BITS | operation) ||
                ALLOT_LOAD(&part->committed) >= operation;
    if (ALLOT_LOAD(&part->operation) == operation) return done ? after : before;
  }
  return allot_part_value(part);
}

// Publishes "from `before` to `after`" and returns the operation's number. The part stays `before`
// until that number is committed, at whichever instruction its owner may end.
static inline uint64_t allot_part_publish(allot_part *part, uint64_t before, uint64_t after) {
  uint64_t operation = ALLOT_LOAD(&part->operation);
  if (ALLOT_LOAD(&part->committed) < operation) {
    // The last one never reached the counter: nobody has seen its number, so it serves again, and
    // its cell already says `before`.
    ALLOT_STORE(&part->intents[operation & 1].after, after);
    return operation;
  }
  allot_intent *intent = &part->intents[(operation + 1) & 1];
  ALLOT_STORE(&intent->before, before);
  ALLOT_STORE(&intent->after, after);
  COUNTER_STEP("intended");
  ALLOT_STORE(&part->operation, operation + 1);
  return operation + 1;
}

// Changes the part from `before` (its value) to `after`, and the counter from what was seen to
// `value`, in one step. False: the counter has moved; read it again.
static inline bool allot_counter_change(allot_counter *counter, allot_counter seen, uint64_t value,
                                        allot_part *part, uint64_t mark, uint64_t before,
                                        uint64_t after) {
  uint64_t operation = allot_part_publish(part, before, after);
  COUNTER_STEP("published");
  allot_counter wanted = {.value = value, .last = mark << ALLOT_OPERATION_BITS | operation};
  if (!allot_counter_swap(counter, seen, wanted)) return false;
  COUNTER_STEP("swapped");
  allot_raise_to(&part->committed, operation);
  COUNTER_STEP("committed");
  return true;
}

#endif
