// SPDX-License-Identifier: Apache-2.0
// All memory that the process knows, by address: a treap, so that order and balance need no care.
#include <stdlib.h>

#include "simulated/cuda/driver.h"

static range *root;

// Any even spread will do; the id is never the same twice.
static uint32_t weigh(uint64_t id) {
  uint64_t mixed = id * 0x9e3779b97f4a7c15ull;
  return (uint32_t)(mixed >> 32 ^ mixed >> 11);
}

// Those that begin before `at` to the left, the others to the right.
static void split(range *tree, CUdeviceptr at, range **left, range **right) {
  if (tree == NULL) {
    *left = *right = NULL;
  } else if (tree->base < at) {
    split(tree->right, at, &tree->right, right);
    *left = tree;
  } else {
    split(tree->left, at, left, &tree->left);
    *right = tree;
  }
}

static range *merge(range *left, range *right) {
  if (left == NULL) return right;
  if (right == NULL) return left;
  if (left->weight > right->weight) {
    left->right = merge(left->right, right);
    return left;
  }
  right->left = merge(left, right->left);
  return right;
}

static range *unused;  // removed ones, by `left`

static range *take_unused(void) {
  if (unused == NULL) {
    range *several = calloc(256, sizeof *several);
    if (several == NULL) return NULL;
    for (int i = 0; i < 256; i++) {
      several[i].left = unused;
      unused = &several[i];
    }
  }
  range *taken = unused;
  unused = taken->left;
  *taken = (range){0};
  return taken;
}

range *range_add(CUdeviceptr base, uint64_t size, enum range_kind kind, int gpu) {
  range *added = take_unused();
  if (added == NULL) return NULL;
  added->base = base;
  added->size = size;
  added->kind = kind;
  added->gpu = gpu;
  added->references = 1;
  added->id = ++driver.last_id;
  added->weight = weigh(added->id);
  range *left, *right;
  split(root, base, &left, &right);
  root = merge(merge(left, added), right);
  return added;
}

void range_remove(range *removed) {
  range *left, *middle, *right;
  split(root, removed->base, &left, &right);
  split(right, removed->base + 1, &middle, &right);
  root = merge(left, right);
  removed->left = unused;
  unused = removed;
}

range *range_find(CUdeviceptr address) {
  range *best = NULL;
  for (range *at = root; at != NULL;) {
    if (at->base <= address) {
      best = at;
      at = at->right;
    } else {
      at = at->left;
    }
  }
  if (best == NULL) return NULL;
  // A range of no bytes still owns its address.
  uint64_t size = best->size > 0 ? best->size : 1;
  return address - best->base < size ? best : NULL;
}

range *range_first(CUdeviceptr from) {
  range *best = NULL;
  for (range *at = root; at != NULL;) {
    if (at->base >= from) {
      best = at;
      at = at->left;
    } else {
      at = at->right;
    }
  }
  return best;
}
