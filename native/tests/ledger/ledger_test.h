// SPDX-License-Identifier: Apache-2.0
// What the ledger's tests have in common: a fresh share in a temporary folder, and a check that
// aborts.
#ifndef ALLOTMENT_LEDGER_TEST_H
#define ALLOTMENT_LEDGER_TEST_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../ledger.h"

#define CHECK(condition, ...)                                        \
  do {                                                               \
    if (!(condition)) {                                              \
      fprintf(stderr, "%s:%d: %s:", __FILE__, __LINE__, #condition); \
      fprintf(stderr, " " __VA_ARGS__);                              \
      fprintf(stderr, "\n");                                         \
      exit(1);                                                       \
    }                                                                \
  } while (0)

static char share[64];

static void remove_share(void) {
  char path[128];
  for (int i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "%s/%s", share, i == 0 ? "policy" : "usage");
    unlink(path);
  }
  rmdir(share);
}

static void make_share(uint64_t limit) {
  strcpy(share, "/tmp/allotment-ledger-XXXXXX");
  CHECK(mkdtemp(share) != NULL);
  allot_policy policy = {.device_count = 2};
  strcpy(policy.share_id, "test");
  for (int i = 0; i < 2; i++) {
    snprintf(policy.devices[i].uuid, sizeof policy.devices[i].uuid, "GPU-%d", i);
    policy.devices[i].memory_limit = limit;
  }
  CHECK(allot_ledger_create(share, &policy) == 0);
}

static allot_ledger open_share(void) {
  allot_ledger ledger;
  int error = allot_ledger_open(&ledger, share);
  CHECK(error == 0, "%d", error);
  return ledger;
}

static allot_ledger attach_share(void) {
  allot_ledger ledger = open_share();
  int error = allot_ledger_attach(&ledger);
  CHECK(error == 0, "%d", error);
  return ledger;
}

// Clears all that dead owners left, as after a look that found it freed.
__attribute__((unused)) static int clear_all(allot_ledger *ledger) {
  int first = allot_ledger_clear(ledger, 0), second = allot_ledger_clear(ledger, UINT64_MAX);
  return first < 0 || second < 0 ? -1 : first + second;
}

// A total is the sum of its slots, whoever died or is stopped.
__attribute__((unused)) static void check_sums(allot_ledger *ledger) {
  for (int device = 0; device < 2; device++) {
    uint64_t sum = 0;
    for (int slot = 0; slot < ALLOT_MAX_SLOTS; slot++)
      sum += allot_ledger_slot_used(ledger, slot, device);
    CHECK(sum == allot_ledger_used(ledger, device), "device %d: slots %llu, total %llu", device,
          (unsigned long long)sum, (unsigned long long)allot_ledger_used(ledger, device));
  }
}

#endif
