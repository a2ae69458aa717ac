// SPDX-License-Identifier: Apache-2.0
// What every file of the shim may use, and nothing about any one of them.
//
// docs/designs/shim.md tells what the shim promises. In short: it is loaded into programs that do
// not know it. It never exits, keeps a descriptor or touches a signal, prints only why a program
// has no CUDA (reason.h), and starts one thread only where its share takes turns (keeper.c).
#ifndef ALLOTMENT_SHIM_SHIM_H
#define ALLOTMENT_SHIM_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SHIM_EXPORT __attribute__((visibility("default")))

// A sanitizer's runtime calls dlsym before it is ready for instrumented code, so whatever a look-up
// runs through is not instrumented when the shim itself is tested under one.
#define SHIM_EARLY __attribute__((no_sanitize("address"), no_sanitize("thread")))

#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)

// Up to the next multiple of `unit`, a power of two; UINT64_MAX instead of an overflow, which no
// limit admits.
static inline uint64_t round_up(uint64_t bytes, uint64_t unit) {
  return bytes > UINT64_MAX - unit ? UINT64_MAX : (bytes + unit - 1) & ~(unit - 1);
}

static inline uint64_t multiply(uint64_t a, uint64_t b) {
  uint64_t product;
  return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

#endif
