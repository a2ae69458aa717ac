// SPDX-License-Identifier: Apache-2.0
// sources: lease_core.c lease_view.c
// Any bytes are a state and a contract, any event may come: the core makes a valid state of them,
// and does nothing that C leaves undefined. (What it decides is tested in tests/unit/leases.)
#include "lease_test.h"

#define ROUNDS 10000

static uint64_t seed = 88172645463325252ull;

static uint64_t random_word(void) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return seed;
}

static uint64_t likely_word(void) {
  static const uint64_t words[] = {0,          1,          2,       3,          63,
                                   64,         255,        256,     10000,      0x7fffffff,
                                   0x80000000, 0xffffffff, 1 << 20, 1ull << 62, 1ull << 63,
                                   UINT64_MAX, INT64_MAX};
  return random_word() % 3 == 0 ? random_word() : words[random_word() % (sizeof words / 8)];
}

static void fill(void *memory, size_t size) {
  uint64_t *words = memory;
  for (size_t i = 0; i < size / sizeof *words; i++) words[i] = likely_word();
}

static void check_valid(const allot_lease_state *state) {
  int holding = -1;
  uint32_t waiting = 0, taken = 0;
  for (int place = 0; place < (int)ALLOT_PLACES; place++) {
    const allot_place_state *one = &state->places[place];
    CHECK(one->state <= ALLOT_PLACE_HOLDING);
    CHECK(one->state == ALLOT_PLACE_FREE || one->seat < ALLOT_SEATS);
    taken += one->state != ALLOT_PLACE_FREE;
    waiting += one->state == ALLOT_PLACE_WAITING;
    if (one->state == ALLOT_PLACE_HOLDING) {
      CHECK(holding == -1);
      holding = place;
    }
  }
  CHECK(state->holder == holding && state->waiting == waiting && state->places_taken == taken);
  CHECK(state->next >= -1 && state->next < (int)ALLOT_PLACES);
  CHECK(state->next == -1 || state->places[state->next].state == ALLOT_PLACE_WAITING);
}

int main(void) {
  static allot_lease_state state;
  static allot_contract contract;
  for (int round = 0; round < ROUNDS; round++) {
    fill(&state, sizeof state);
    fill(&contract, sizeof contract);
    for (int place = 0; place < (int)ALLOT_PLACES; place++) {
      // Mostly of some sense, or every place would be thrown away at once.
      if (random_word() % 4 == 0) continue;
      int seat = (int)(random_word() % ALLOT_SEATS);
      state.places[place].seat = (uint16_t)seat;
      state.places[place].state = (uint16_t)(random_word() % 4);
      state.places[place].serial = (uint32_t)contract.seats[seat].serial;
      contract.seats[seat].terms |= ALLOT_TERMS_TAKEN;
    }
    for (int i = 0; i < 6; i++) {
      allot_event event;
      fill(&event, sizeof event);
      if (random_word() % 4 != 0) {
        event.kind = (allot_event_kind)(random_word() % 8);
        event.place = (int)(random_word() % 2 ? random_word() % ALLOT_PLACES
                                              : (uint64_t)(uint32_t)state.holder);
        event.seat = (int)(random_word() % ALLOT_SEATS);
        event.epoch = state.epoch;
      }
      allot_lease_must_yield(&state, &contract, event.now_ns);
      allot_lease_fraction(&state, &contract, (int)likely_word(), event.now_ns);
      allot_lease_decide(&state, &contract, &event);
      check_valid(&state);
      CHECK(allot_lease_fraction(&state, &contract, event.seat, event.now_ns) <= ALLOT_WHOLE);
    }
  }
  return 0;
}
