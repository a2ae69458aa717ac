// SPDX-License-Identifier: Apache-2.0
// Translates the program's choice of devices into UUIDs, and shows it to the driver for the moment
// of cuInit. The variable itself stays as the program set it: frameworks read it themselves, and
// child processes translate it again.
#include "visible.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct writer {
  char *text;
  size_t length;
} writer;

typedef struct device_list {
  const allot_device_policy *const *devices;
  uint32_t count;
} device_list;

static void append(writer *out, const char *text) {
  size_t length = strlen(text);
  if (out->length + length >= VISIBLE_BYTES) return;
  memcpy(out->text + out->length, text, length + 1);
  out->length += length;
}

// An index, as strtol reads it; -1: not one.
static int index_of(const char *token, size_t length) {
  int value = 0;
  for (size_t i = 0; i < length; i++) {
    if (token[i] < '0' || token[i] > '9' || value > ALLOT_MAX_DEVICES) return -1;
    value = value * 10 + (token[i] - '0');
  }
  return length == 0 ? -1 : value;
}

static bool starts_with(const char *text, const char *start, size_t length) {
  for (size_t i = 0; i < length; i++) {
    char a = text[i], b = start[i];
    if (a >= 'A' && a <= 'Z') a = (char)(a + 32);
    if (b >= 'A' && b <= 'Z') b = (char)(b + 32);
    if (a != b || a == '\0') return false;
  }
  return true;
}

// A full or shortened UUID, or a MIG name of either form ("MIG-<uuid>",
// "MIG-GPU-<uuid>/<gi>/<ci>"), that fits exactly one device; -1 otherwise.
static int device_of_uuid(const device_list *list, const char *token, size_t length) {
  int found = -1;
  if (length <= 4 || (!starts_with(token, "GPU-", 4) && !starts_with(token, "MIG-", 4))) return -1;
  for (uint32_t i = 0; i < list->count; i++) {
    const char *uuid = list->devices[i]->uuid;
    if (length >= ALLOT_UUID_BYTES || !starts_with(uuid, token, length)) continue;
    if (found >= 0) return -1;
    found = (int)i;
  }
  return found;
}

static int device_of_token(const device_list *list, const char *token, size_t length) {
  while (length > 0 && (*token == ' ' || *token == '\t')) {
    token++;
    length--;
  }
  while (length > 0 && (token[length - 1] == ' ' || token[length - 1] == '\t')) length--;
  int index = index_of(token, length);
  if (index >= 0) return index < (int)list->count ? index : -1;
  return device_of_uuid(list, token, length);
}

void visible_choice(char list[VISIBLE_BYTES], const allot_device_policy *const devices[],
                    uint32_t count, const char *choice) {
  const device_list all = {devices, count};
  writer out = {.text = list};
  append(&out, VISIBLE_VARIABLE "=");
  int written = 0;
  if (choice == NULL) {
    for (uint32_t i = 0; i < count; i++) {
      if (written++ > 0) append(&out, ",");
      append(&out, devices[i]->uuid);
    }
    return;
  }
  // As the driver does: what comes before the first thing that is no device counts. Doubles are
  // passed on, for the driver to judge.
  for (const char *token = choice; written < VISIBLE_ENTRIES;) {
    size_t length = strcspn(token, ",");
    int device = device_of_token(&all, token, length);
    if (device < 0) break;
    if (written++ > 0) append(&out, ",");
    append(&out, devices[device]->uuid);
    if (token[length] == '\0') break;
    token += length + 1;
  }
  if (written == 0) append(&out, "-1");  // no device, said so that every driver understands
}

void visible_devices(char list[VISIBLE_BYTES], const allot_device_policy *const devices[],
                     uint32_t count) {
  visible_choice(list, devices, count, getenv(VISIBLE_VARIABLE));
}

// ---- the environment ----
//
// setenv could move the whole environment under another thread that reads it. Here one pointer is
// exchanged for another: the entry's, or the array's where there is no entry yet.

static char **entry_of_variable(char **environment) {
  size_t length = strlen(VISIBLE_VARIABLE);
  for (char **at = environment; at != NULL && *at != NULL; at++) {
    if (strncmp(*at, VISIBLE_VARIABLE, length) == 0 && (*at)[length] == '=') return at;
  }
  return NULL;
}

bool visible_begin(visible_override *override, char *list) {
  *override = (visible_override){.environment = environ, .list = list};
  override->place = entry_of_variable(environ);
  if (override->place != NULL) {
    override->previous = *override->place;
    __atomic_store_n(override->place, list, __ATOMIC_RELEASE);
    return true;
  }
  size_t count = 0;
  while (environ != NULL && environ[count] != NULL) count++;
  // For good, since another thread may read it for a while after: so not from the program's heap.
  void *array = mmap(NULL, (count + 2) * sizeof *environ, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (array == MAP_FAILED) return false;
  override->replaced = array;
  if (count > 0) memcpy(override->replaced, environ, count * sizeof *environ);
  override->replaced[count] = list;
  override->replaced[count + 1] = NULL;
  __atomic_store_n(&environ, override->replaced, __ATOMIC_RELEASE);
  return true;
}

// Another thread, or the driver, may have changed the environment meanwhile: then only our entry
// goes.
void visible_end(visible_override *override) {
  if (override->place != NULL && environ == override->environment &&
      *override->place == override->list) {
    __atomic_store_n(override->place, override->previous, __ATOMIC_RELEASE);
    return;
  }
  if (override->replaced != NULL && environ == override->replaced) {
    __atomic_store_n(&environ, override->environment, __ATOMIC_RELEASE);
    return;
  }
  for (char **at = environ; at != NULL && *at != NULL; at++) {
    if (*at != override->list) continue;
    if (override->previous != NULL) {
      *at = override->previous;
    } else {
      do {
        at[0] = at[1];
      } while (*at++ != NULL);
    }
    return;
  }
}
