// SPDX-License-Identifier: Apache-2.0
// Several processes with several threads each allocate and free at random, near the limit.
//
//   storm PROCESSES THREADS MILLISECONDS
//
// All of them add what they hold to one number in shared memory, after the driver granted it and
// until before they give it back: the number is never more than what the driver has given out.
// Prints its highest value, and how often memory was granted and refused. Whatever the driver
// answers besides success and out of memory ends the program with an error.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"

enum { PIECES = 32 };

static const uint64_t granule = 2u << 20;

typedef struct {
  atomic_ullong held, highest, granted, refused;
} tallies;

typedef struct {
  tallies *tally;
  CUcontext context;
  uint64_t seed;
  uint64_t deadline;
  uint64_t largest;  // granules
} storm;

static void count_in(tallies *tally, uint64_t bytes) {
  unsigned long long held = atomic_fetch_add(&tally->held, bytes) + bytes;
  unsigned long long highest = atomic_load(&tally->highest);
  while (held > highest && !atomic_compare_exchange_weak(&tally->highest, &highest, held)) continue;
  atomic_fetch_add(&tally->granted, 1);
}

static void *allocate_and_free(void *argument) {
  storm *self = argument;
  WRAPPED(cuCtxSetCurrent);
  WRAPPED(cuMemAlloc_v2);
  WRAPPED(cuMemFree_v2);
  need(wrapped_cuCtxSetCurrent(self->context), "cuCtxSetCurrent");
  CUdeviceptr address[PIECES] = {0};
  uint64_t bytes[PIECES] = {0};
  while (now_ns() < self->deadline) {
    uint64_t piece = random_u64(&self->seed) % PIECES;
    if (bytes[piece] != 0) {
      atomic_fetch_sub(&self->tally->held, bytes[piece]);
      need(wrapped_cuMemFree_v2(address[piece]), "cuMemFree");
      bytes[piece] = 0;
      continue;
    }
    uint64_t size = (1 + random_u64(&self->seed) % self->largest) * granule;
    CUresult result = wrapped_cuMemAlloc_v2(&address[piece], size);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      atomic_fetch_add(&self->tally->refused, 1);
      continue;
    }
    need(result, "cuMemAlloc");
    bytes[piece] = size;
    count_in(self->tally, size);
  }
  for (int piece = 0; piece < PIECES; piece++)
    if (bytes[piece] != 0) {
      atomic_fetch_sub(&self->tally->held, bytes[piece]);
      need(wrapped_cuMemFree_v2(address[piece]), "cuMemFree");
    }
  return NULL;
}

static void run_process(tallies *tally, int number, int threads, uint64_t milliseconds) {
  open_device();
  WRAPPED(cuCtxGetCurrent);
  WRAPPED(cuMemGetInfo_v2);
  CUcontext context;
  size_t available, total;
  need(wrapped_cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  need(wrapped_cuMemGetInfo_v2(&available, &total), "cuMemGetInfo");
  wait_for_start();
  pthread_t *ids = calloc((size_t)threads, sizeof *ids);
  storm *storms = calloc((size_t)threads, sizeof *storms);
  if (ids == NULL || storms == NULL) exit(3);
  for (int thread = 0; thread < threads; thread++) {
    storms[thread] = (storm){.tally = tally,
                             .context = context,
                             .seed = (uint64_t)number << 32 | (uint64_t)thread,
                             .deadline = now_ns() + milliseconds * 1000000u,
                             .largest = 1 + total / granule / 8};
    if (pthread_create(&ids[thread], NULL, allocate_and_free, &storms[thread]) != 0) exit(3);
  }
  for (int thread = 0; thread < threads; thread++) pthread_join(ids[thread], NULL);
}

int main(int count, char **arguments) {
  if (count != 4) {
    fprintf(stderr, "usage: storm PROCESSES THREADS MILLISECONDS\n");
    return 2;
  }
  int processes = atoi(arguments[1]), threads = atoi(arguments[2]);
  tallies *tally =
      mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (tally == MAP_FAILED) return 3;
  for (int number = 0; number < processes; number++) {
    pid_t child = fork();
    if (child < 0) return 3;
    if (child == 0) {
      run_process(tally, number, threads, strtoul(arguments[3], NULL, 10));
      _exit(0);
    }
  }
  int status, failed = 0;
  while (wait(&status) > 0) failed |= status != 0;
  printf("{\"highest\": %llu, \"left\": %llu, \"granted\": %llu, \"refused\": %llu}\n",
         atomic_load(&tally->highest), atomic_load(&tally->held), atomic_load(&tally->granted),
         atomic_load(&tally->refused));
  return failed ? 3 : 0;
}
