// SPDX-License-Identifier: Apache-2.0
// Work on a mapped file that somebody else may cut short meanwhile.
//
// A share's programs can write `usage` and `leases`, and so truncate them: touching a page that is
// gone ends a process by SIGBUS. A program of the share does that to itself; the agent and `allot`
// must not be ended by it. So where they touch these files they do it through allot_guarded, which
// turns the signal into an error. In the shim, which never touches signals, it is a plain call.
#ifndef ALLOTMENT_BUS_GUARD_H
#define ALLOTMENT_BUS_GUARD_H

#ifdef ALLOT_BUS_GUARD
// Returns what `run` returns, or -EINVAL when it was cut short at a page that is not there. `run`
// must hold nothing that its caller cannot give back: it may not come to its end. One at a time in
// a process; does not nest.
__attribute__((visibility("hidden"))) int allot_guarded(int (*run)(void *), void *argument);
#else
static inline int allot_guarded(int (*run)(void *), void *argument) {
  return run(argument);
}
#endif

#endif
