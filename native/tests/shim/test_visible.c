// SPDX-License-Identifier: Apache-2.0
// CUDA_VISIBLE_DEVICES: translated for the driver, shown to it for a moment, and left as it was.
//
// sources: shim/visible.c
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shim/visible.h"

static const allot_device_policy policies[] = {
    {.uuid = "GPU-aaaa0000-0000-0000-0000-000000000000"},
    {.uuid = "GPU-aaaa1111-0000-0000-0000-000000000000"},
    {.uuid = "MIG-bbbb2222-0000-0000-0000-000000000000"}};
static const allot_device_policy *const devices[] = {&policies[0], &policies[1], &policies[2]};

#define FIRST "GPU-aaaa0000-0000-0000-0000-000000000000"
#define SECOND "GPU-aaaa1111-0000-0000-0000-000000000000"
#define THIRD "MIG-bbbb2222-0000-0000-0000-000000000000"

static void expect(const char *choice, const char *wanted) {
  char list[VISIBLE_BYTES];
  visible_choice(list, devices, 3, choice);
  if (strncmp(list, VISIBLE_VARIABLE "=", 21) != 0 || strcmp(list + 21, wanted) != 0) {
    fprintf(stderr, "%s: %s\n", choice == NULL ? "(unset)" : choice, list);
    abort();
  }
}

static void choices(void) {
  expect(NULL, FIRST "," SECOND "," THIRD);
  expect("2,0", THIRD "," FIRST);
  expect("1", SECOND);
  expect("gpu-AAAA1", SECOND);
  expect("GPU-aaaa", "-1");
  expect("MIG-", "-1");
  expect("MIG-b,1", THIRD "," SECOND);
  expect("0,3,1", FIRST);
  expect("0,,1", FIRST);
  expect("0,-1,1", FIRST);
  expect("99999999999999999999", "-1");
  expect("0x1", "-1");
  expect("1 2", "-1");
  expect("", "-1");
  expect(",", "-1");
  expect(FIRST "0", "-1");
  expect("0,0", FIRST "," FIRST);
}

static void long_lists(void) {
  char choice[20000], list[VISIBLE_BYTES + 1];
  for (size_t i = 0; i < sizeof choice; i++) choice[i] = i % 2 == 0 ? '2' : ',';
  choice[sizeof choice - 1] = '\0';
  list[VISIBLE_BYTES] = 'x';
  visible_choice(list, devices, 3, choice);
  assert(list[VISIBLE_BYTES] == 'x' && strlen(list) < VISIBLE_BYTES);
}

static void foreign_bytes(void) {
  char choice[64], list[VISIBLE_BYTES];
  unsigned seed = 9;
  for (int round = 0; round < 100000; round++) {
    for (size_t i = 0; i < sizeof choice - 1; i++) {
      choice[i] = "0123,-GPUMIgpu ab\t/"[rand_r(&seed) % 19];
    }
    choice[sizeof choice - 1] = '\0';
    visible_choice(list, devices, 3, choice);
  }
}

static void shown_for_a_moment(const char *before) {
  if (before == NULL) {
    unsetenv(VISIBLE_VARIABLE);
  } else {
    setenv(VISIBLE_VARIABLE, before, 1);
  }
  char list[VISIBLE_BYTES];
  visible_override override;
  visible_choice(list, devices, 3, "1");
  assert(visible_begin(&override, list));
  assert(strcmp(getenv(VISIBLE_VARIABLE), SECOND) == 0);
  visible_end(&override);
  const char *after = getenv(VISIBLE_VARIABLE);
  assert((after == NULL) == (before == NULL));
  assert(before == NULL || strcmp(after, before) == 0);
}

// What the driver, or another thread, sets meanwhile stays.
static void changed_meanwhile(const char *before) {
  if (before == NULL) {
    unsetenv(VISIBLE_VARIABLE);
  } else {
    setenv(VISIBLE_VARIABLE, before, 1);
  }
  char list[VISIBLE_BYTES], name[64];
  visible_override override;
  visible_choice(list, devices, 3, "1");
  assert(visible_begin(&override, list));
  for (int i = 0; i < 100; i++) {
    snprintf(name, sizeof name, "MEANWHILE_%d_%s", i, before == NULL ? "unset" : before);
    setenv(name, "yes", 1);
  }
  visible_end(&override);
  memset(list, 'x', sizeof list);
  assert(strcmp(getenv(name), "yes") == 0);
  const char *after = getenv(VISIBLE_VARIABLE);
  assert((after == NULL) == (before == NULL));
  assert(before == NULL || strcmp(after, before) == 0);
}

int main(void) {
  choices();
  long_lists();
  foreign_bytes();
  shown_for_a_moment(NULL);
  shown_for_a_moment("0,1");
  changed_meanwhile(NULL);
  changed_meanwhile("2");
  clearenv();
  shown_for_a_moment(NULL);
  return 0;
}
