// SPDX-License-Identifier: Apache-2.0
// Holds a thread in the driver: the queue of its stream is full, behind a callback that waits for
// the test.
#ifndef ALLOTMENT_TESTS_SHIM_QUEUE_H
#define ALLOTMENT_TESTS_SHIM_QUEUE_H

#include "waiting.h"

typedef struct stuck_call {
  void (*call)(CUstream stream);
  CUcontext context;
  CUstream stream;
  pthread_t thread;
  bool may_go_on, is_full, has_returned;
} stuck_call;

static void wait_for_sign(void *sign) {
  EXPECT(await(sign, HELD_MS));
}

static void *call_behind_a_full_queue(void *argument) {
  stuck_call *stuck = argument;
  CUevent event;
  OK(cuCtxSetCurrent(stuck->context));
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cuCtxSynchronize());
  OK(cuLaunchHostFunc(stuck->stream, wait_for_sign, &stuck->may_go_on));
  for (unsigned i = 1; i < ALLOT_RING_WORKS; i++) OK(cuEventRecord(event, stuck->stream));
  announce(&stuck->is_full);
  stuck->call(stuck->stream);
  announce(&stuck->has_returned);
  return NULL;
}

// Returns when the call is inside the driver, where it waits.
static void begin_stuck_call(stuck_call *stuck, CUcontext context, void (*call)(CUstream stream)) {
  *stuck = (stuck_call){.call = call, .context = context};
  OK(cuStreamCreate(&stuck->stream, CU_STREAM_NON_BLOCKING));
  OK(pthread_create(&stuck->thread, NULL, call_behind_a_full_queue, stuck));
  EXPECT(await(&stuck->is_full, HELD_MS));
  if (await(&stuck->has_returned, 100)) FAIL("the call does not wait");
}

static void end_stuck_call(stuck_call *stuck) {
  EXPECT(!stuck->has_returned);
  announce(&stuck->may_go_on);
  OK(pthread_join(stuck->thread, NULL));
}

#endif
