// SPDX-License-Identifier: Apache-2.0
// Objects behind handles: type-stable memory, so that stale handles can be told.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

#define MAGIC(kind) (0xa1107000u + (uint32_t)(kind))

static object *used_before[OBJECT_KINDS];

void *object_new(enum object_kind kind, size_t size, void *parent) {
  object *made = used_before[kind];
  if (made != NULL) {
    used_before[kind] = made->next;
  } else {
    made = malloc(size);
    if (made == NULL) return NULL;
  }
  memset(made, 0, size);
  made->kind = (uint32_t)kind;
  made->id = ++driver.last_id;
  object *above = parent;
  if (above != NULL) {
    made->parent = above;
    made->next = above->children;
    if (made->next != NULL) made->next->previous = made;
    above->children = made;
  }
  made->magic = MAGIC(kind);
  return made;
}

void object_free(void *handle) {
  object *gone = handle;
  if (gone->parent != NULL) {
    if (gone->previous != NULL) {
      gone->previous->next = gone->next;
    } else {
      gone->parent->children = gone->next;
    }
    if (gone->next != NULL) gone->next->previous = gone->previous;
  }
  gone->magic = 0;
  gone->next = used_before[gone->kind];
  used_before[gone->kind] = gone;
}

bool object_valid(const void *handle, enum object_kind kind) {
  if ((uintptr_t)handle < 4096 || (uintptr_t)handle % _Alignof(object) != 0) return false;
  return ((const object *)handle)->magic == MAGIC(kind);
}
