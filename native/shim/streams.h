// SPDX-License-Identifier: Apache-2.0
// Streams: whose device, and whether work is done now or recorded for later.
#ifndef ALLOTMENT_SHIM_STREAMS_H
#define ALLOTMENT_SHIM_STREAMS_H

#include "charge.h"

#define STREAM_LEGACY ((CUstream)0x1)
#define STREAM_PER_THREAD ((CUstream)0x2)

// What a stream argument means in the _ptsz form of an entry point.
static inline CUstream per_thread(CUstream stream) {
  return stream == NULL ? STREAM_PER_THREAD : stream;
}

// Tells streams apart, whatever they are called: the per-thread stream is another one in each
// thread. Never 0.
uint64_t stream_identity(CUstream stream);

// As target_current, for the stream's context and device.
CUresult target_stream(target *found, CUstream stream);

// Recorded work allocates nothing yet.
bool stream_is_capturing(CUstream stream);
// The same. If so, no recording ends until it is let go: what the driver does meanwhile is
// recorded.
bool capture_hold(process *own, CUstream stream);
void capture_let_go(process *own);
// Would waiting for the current context spoil a recording?
bool context_is_capturing(void);

#endif
