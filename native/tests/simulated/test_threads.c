// SPDX-License-Identifier: Apache-2.0
// Threads of one process use the driver at once: memory, streams, events, contexts.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: a100-80gb:2
#include <pthread.h>

#include "tests/simulated/driver_test.h"

#define THREADS 4
#define TURNS 200

static CUcontext contexts[2];
static CUfunction spins[2];

static void *work(void *number) {
  unsigned seed = *(unsigned *)number;
  int device = (int)(seed % 2);
  OK(cuCtxSetCurrent(contexts[device]));
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUevent event;
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  for (int i = 0; i < TURNS; i++) {
    CUdeviceptr plain, pooled;
    unsigned char out[64], back[64];
    seed = seed * 1103515245u + 12345u;
    memset(out, (int)(seed >> 24), sizeof out);
    OK(cuMemAlloc_v2(&plain, 64 + (seed >> 12)));
    OK(cuMemAllocAsync(&pooled, 64 + (seed >> 20), stream));
    spin_for(spins[device], seed >> 20, stream);
    OK(cuMemcpyHtoDAsync_v2(plain, out, sizeof out, stream));
    OK(cuMemcpyDtoDAsync_v2(pooled, plain, sizeof out, stream));
    OK(cuMemcpyDtoHAsync_v2(back, pooled, sizeof back, stream));
    OK(cuEventRecord(event, stream));
    OK(cuMemFreeAsync(pooled, stream));
    if (i % 2 == 0) {
      OK(cuEventSynchronize(event));
    } else {
      OK(cuStreamSynchronize(stream));
    }
    assert(memcmp(out, back, sizeof out) == 0);
    OK(cuMemFree_v2(plain));
  }
  OK(cuEventDestroy_v2(event));
  OK(cuStreamDestroy_v2(stream));
  return NULL;
}

static void *initialize_while_cancelled(void *unused) {
  pthread_cancel(pthread_self());
  OK(cuInit(0));
  pthread_testcancel();
  return unused;
}

// cuInit opens files, where a thread may be cancelled: the next call must not wait for it.
static void a_cancelled_thread_initializes_first(void) {
  pthread_t thread;
  void *end;
  pthread_create(&thread, NULL, initialize_while_cancelled, NULL);
  pthread_join(thread, &end);
  assert(end == PTHREAD_CANCELED);
}

int main(void) {
  a_cancelled_thread_initializes_first();
  size_t before[2];
  for (int device = 0; device < 2; device++) {
    contexts[device] = begin(device);
    spins[device] = load_spin();
    before[device] = free_bytes();
  }
  pthread_t threads[THREADS];
  unsigned numbers[THREADS];
  for (unsigned i = 0; i < THREADS; i++) {
    numbers[i] = i + 1;
    assert(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) assert(pthread_join(threads[i], NULL) == 0);
  for (int device = 0; device < 2; device++) {
    OK(cuCtxSetCurrent(contexts[device]));
    OK(cuCtxSynchronize());
    assert(free_bytes() == before[device]);
  }
  return 0;
}
