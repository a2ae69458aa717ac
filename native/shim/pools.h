// SPDX-License-Identifier: Apache-2.0
// Memory pools: charged by what they reserve, which grows and shrinks.
#ifndef ALLOTMENT_SHIM_POOLS_H
#define ALLOTMENT_SHIM_POOLS_H

#include "process.h"

// ---- for the rest of the shim ----

// Gives back what pools of the device no longer reserve. Not with one of their locks held.
void pools_settle(process *own, int device);
// After a synchronisation, when pools may have let go of what was freed.
#define EVERY_STREAM UINT64_C(0) /* of the current context */
#define NO_STREAM UINT64_MAX     /* that is known */
void pools_waited(process *own, uint64_t stream);

// A primary context is gone, and with it what pools of its device had.
void pools_reset(process *own, int device);

// Frees what cuMemAllocAsync gave, by cuMemFree.
CUresult pools_free(process *own, const record *known);
// An allocation of a pool is known to be gone.
void pools_lost(process *own, const record *lost);

// ---- between pools.c and pool_pieces.c ----

pool_state *pool_find(process *own, CUmemoryPool handle);
// As pool_find, and also pools that are met without having been made. NULL: which memory the pool
// hands out is not understood, or it is of a device outside the share.
pool_state *pool_known(process *own, CUmemoryPool handle);
uint64_t pool_id(const process *own, const pool_state *pool);
// Around an allocation from an uncharged pool: its handle does not become another pool's meanwhile.
// False: the place is not that pool's any more.
bool pool_enter_uncharged(process *own, pool_state *pool, CUmemoryPool handle);
void pool_leave_uncharged(process *own, pool_state *pool);

// The rest is called with the pool's device's pool_lock held, which is let go of around each call
// of the driver that may wait.
CUresult pool_read(const pool_state *pool, CUmemPool_attribute attribute, uint64_t *bytes);
void pool_call(process *own, int device);
void pool_called(process *own, int device);
// Is it still that pool? Another thread may have seen it go meanwhile.
bool pool_is(const pool_state *pool, CUmemoryPool handle);
// The same once a call that was counted (growing_end) has ended.
bool pool_outlives(pool_state *pool, CUmemoryPool handle);
// Brings the charge to what is reserved; `ended` was reserved for a call that has ended. False: the
// driver knows the pool no more, because its context was reset.
bool pool_settle(process *own, pool_state *pool, uint64_t ended);
void pool_trim(process *own, pool_state *pool);
// All that was freed has been waited for.
void pool_forget_streams(process *own, pool_state *pool);
// Destroys a pool that the program has destroyed, if it is empty; else that is tried again when the
// pools are settled.
void pool_end(process *own, pool_state *pool);

// The device that is charged for such memory, POOL_UNCHARGED, or less: it is not understood, or of
// no device of the share.
int pool_device(process *own, const CUmemLocation *location, CUmemAllocationType type);

// Gives back what no pool of the device uses. Not with their lock or turn held.
void pools_trim(process *own, int device);

// Calls for every pool of the device, taking its lock.
void pools_each(process *own, int device, void (*visit)(process *, pool_state *));

#endif
