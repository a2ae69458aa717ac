// SPDX-License-Identifier: Apache-2.0
// What the other shares of a device publish of themselves, and how much of it is believed.
#ifndef ALLOTMENT_NEIGHBOURS_H
#define ALLOTMENT_NEIGHBOURS_H

#include <time.h>

#include "lease.h"

#pragma GCC visibility push(hidden)

// A kernel may run over its lease for so long before the others start beside it: it may be waiting
// for one of theirs.
#define OVERRUN_NS (1000 * 1000000ull)
// As in lease_core.c: times further ahead are of nowhere.
#define CLOCKS_DIFFER_NS (1000 * 1000000ull)

// Brings `state`, this share's own, up to what the others have published: their accounts, who of
// them waits and holds, and the newest word on the lease. A share that takes the lease from a place
// of ours that lives is not believed.
void neighbours_merge(allot_leases *leases, allot_lease_state *state, uint64_t now_ns);
// Has any published something since?
bool neighbours_moved(const allot_leases *leases);
// What this share publishes of `buffer->state`, under `root`.
void neighbours_publish(const allot_leases *leases, allot_seat_buffer *buffer, uint64_t root);
// The head of a place of any share; false if it cannot be read.
bool neighbours_head(const allot_leases *leases, const allot_lease_state *state, int place,
                     allot_place_head *head);
// Has the process of another share's place ended?
bool neighbours_place_is_dead(const allot_leases *leases, const allot_place_state *place);
// Looks for shares all of whose processes have ended.
void neighbours_look_for_dead(allot_leases *leases);
// Its share is as if it were not there for some time, the longer the more often.
void neighbours_distrust(allot_leases *leases, int seat, uint64_t now_ns);
// Has any sent a message since neighbours_merge?
bool neighbours_called(const allot_leases *leases);
// Sleeps until another thread raises this place's word from `ticket`, or another share sends a
// message. 0 or a negative errno.
int neighbours_sleep(const allot_leases *leases, uint32_t ticket, const struct timespec *until);
void neighbours_close(allot_leases *leases);

#pragma GCC visibility pop

#endif
