// SPDX-License-Identifier: Apache-2.0
// What every program of the bench needs: the driver's entry points in two forms, and statistics.
//
// `wrapped` is what a program gets when it asks the dynamic linker, so inside a share the shim's
// function. `bare` is the driver's own, found in the library's file on disk, where no preloaded
// library can have a hand in it. With both in one process a pair of calls meets the same driver
// state, the same caches and the same neighbours, and their difference is what the share adds.
#ifndef ALLOTMENT_BENCH_DRIVER_H
#define ALLOTMENT_BENCH_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

// A pointer variable with the type of the entry point `name`, from the one source or the other.
#define WRAPPED(name) __typeof__(name) *wrapped_##name = (__typeof__(name) *)find_wrapped(#name)
#define BARE(name) __typeof__(name) *bare_##name = (__typeof__(name) *)find_bare(#name)

// Both end the program with a message when there is no such function.
void *find_wrapped(const char *name);
void *find_bare(const char *name);

// Ends the program with a message unless `result` is CUDA_SUCCESS.
void need(CUresult result, const char *what);

// Initialises through `wrapped` and makes the primary context of device 0 current.
void open_device(void);

// A function that spins for the nanoseconds in its argument.
CUfunction spin_function(void);

uint64_t now_ns(void);
uint64_t random_u64(uint64_t *state);

// Prints "ready" and blocks until stdin ends: how the runner lets many processes start at once.
void wait_for_start(void);

// Percentile of `count` samples, which it sorts.
int64_t percentile(int64_t *samples, size_t count, double fraction);

// Prints one JSON object: percentiles of `bare`, of `wrapped`, and of the pairs' differences.
// Each sample is the time of `calls` calls. The samples are reordered.
void print_pairs(const char *operation, int64_t *bare, int64_t *wrapped, size_t count, int calls);

#endif
