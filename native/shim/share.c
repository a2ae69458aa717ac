// SPDX-License-Identifier: Apache-2.0
// Finds the share: at the fixed path of a container, which no environment can override, else where
// ALLOTMENT_SHARE points.
//
// The environment is read when the program is loaded: many programs clean it up before they touch
// a GPU. The file is looked for only when something asks, so that a program that never does pays
// nothing.
#include "share.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "loader.h"

#ifndef ALLOT_SHARE_PATH
#define ALLOT_SHARE_PATH "/run/allotment/share"
#endif
#define SHARE_VARIABLE "ALLOTMENT_SHARE"

enum { UNDECIDED = 0, ABSENT, FIXED, NAMED };

static char named_directory[1024];
static int decision;

__attribute__((constructor)) static void note_environment(void) {
  const char *named = getenv(SHARE_VARIABLE);
  if (named != NULL && strlen(named) < sizeof named_directory) strcpy(named_directory, named);
  loader_prepare();
}

// Two threads may decide at once: they decide the same.
static int decide(void) {
  if (access(ALLOT_SHARE_PATH "/policy", F_OK) == 0) return FIXED;
  return named_directory[0] != '\0' ? NAMED : ABSENT;
}

const char *share_directory(void) {
  int decided = __atomic_load_n(&decision, __ATOMIC_ACQUIRE);
  if (UNLIKELY(decided == UNDECIDED)) {
    decided = decide();
    __atomic_store_n(&decision, decided, __ATOMIC_RELEASE);
  }
  return decided == FIXED ? ALLOT_SHARE_PATH : decided == NAMED ? named_directory : NULL;
}

// A host program that is built with AddressSanitizer and its shared runtime refuses to start when
// any library was loaded before that runtime. The program's own definition of this goes first.
SHIM_EXPORT const char *__asan_default_options(void);
SHIM_EARLY const char *__asan_default_options(void) {
  return "verify_asan_link_order=0";
}
