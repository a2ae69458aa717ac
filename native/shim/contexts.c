// SPDX-License-Identifier: Apache-2.0
// Contexts: their own memory is charged before they exist, and all that was allocated in one is
// given back when it goes.
//
// One lock for all of a process's contexts is held across the driver's calls, so that a number that
// is used again cannot be mistaken for the context that had it before. The driver makes contexts
// one at a time anyway.
#include "charge.h"
#include "compute.h"
#include "dead.h"
#include "driver.h"
#include "extra_abi.h"
#include "graphs.h"
#include "measure.h"
#include "pools.h"
#include "residency.h"

// What a context takes on the driver's side when the policy does not know it: above what drivers of
// the last years need, so that the correction afterwards gives back and does not add.
#define UNKNOWN_CONTEXT_BYTES (512 * MIB)

// ---- the end of a context ----

typedef struct collection {
  uint64_t owner;
  uint64_t bytes[ALLOT_MAX_DEVICES];
  uint64_t context_bytes[ALLOT_MAX_DEVICES];
  uint64_t managed_bytes[ALLOT_MAX_DEVICES];
} collection;

static bool collect(const record *seen, void *context) {
  collection *all = context;
  if (seen->owner != all->owner) return false;
  switch (seen->space) {
    case SPACE_POINTER:
      if (seen->kind == KIND_POOLED) return false;  // its owner is a pool's number
      if (seen->kind == KIND_PLAIN) all->bytes[seen->device] += seen->bytes;
      if (managed_whose(seen) != MANAGED_NOT) all->managed_bytes[seen->device] += seen->bytes;
      return true;
    case SPACE_MODULE:
    case SPACE_LIBRARY:  // it stays loaded; the addresses of its variables are others' now
      return true;
    case SPACE_LIMIT:
      all->context_bytes[seen->device] += seen->bytes;
      all->bytes[seen->device] += seen->bytes;
      return true;
    case SPACE_BLOCK:
    case SPACE_ARRAY:
    case SPACE_MIPMAP:
      all->bytes[seen->device] += seen->bytes;
      return true;
    default:
      return false;
  }
}

// Everything that was allocated in the context is gone.
static void give_back_contents(process *own, CUcontext context) {
  collection all = {.owner = (uint64_t)(uintptr_t)context};
  if (context == NULL) return;
  records_sweep(&own->records, collect, &all);
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    charge_release(own, device, all.bytes[device]);
    if (all.managed_bytes[device] != 0) residency_removed(own, device, all.managed_bytes[device]);
    if (all.context_bytes[device] != 0) {
      charge_note_context(own, device, -(int64_t)all.context_bytes[device]);
    }
  }
}

static void give_back_context(process *own, CUcontext context) {
  give_back_contents(own, context);
  record gone;
  if (!records_take(&own->records, SPACE_CONTEXT, (uint64_t)(uintptr_t)context, &gone)) return;
  charge_release(own, gone.device, gone.bytes);
  charge_note_context(own, gone.device, -(int64_t)gone.bytes);
  pools_settle(own, gone.device);
  graphs_settle(own, gone.device);
}

// ---- the beginning ----

typedef struct creation {
  target at;
  reservation needed;
  uint64_t bytes;    // what it is charged
  bool is_estimate;  // to be measured
  bool is_measured;
  uint64_t before, charged_before;
} creation;

static CUresult creation_of(creation *made, CUdevice ordinal) {
  *made = (creation){.is_estimate = false};
  CUresult refusal = target_device(&made->at, ordinal);
  if (refusal != CUDA_SUCCESS) return refusal;
  made->needed = (reservation){.own = made->at.own, .device = made->at.device};
  made->bytes = made->at.own->policies[made->at.device]->context_bytes;
  made->is_estimate = made->bytes == 0;
  if (made->is_estimate) made->bytes = UNKNOWN_CONTEXT_BYTES;
  return CUDA_SUCCESS;
}

// What the first context of a device was measured to take; 0: none was. With the context_lock.
static uint64_t first_bytes[ALLOT_MAX_DEVICES];

static uint64_t charged_to(const process *own, int device) {
  const joined_device *joined = &own->joined[device];
  return allot_ledger_slot_used(joined->ledger, joined->ledger->slot, joined->index);
}

static bool creation_begin(creation *made) {
  if (!reservation_try(&made->needed, made->bytes)) return false;
  process *own = made->at.own;
  made->is_measured =
      made->is_estimate && measure_process_bytes(own, made->at.device, &made->before);
  made->charged_before = charged_to(own, made->at.device);
  return true;
}

// What the process has more of now, and what other threads have not taken or freed meanwhile. Of
// calls that were on their way some is left in it: no context takes more than the first, which
// nothing else of this process could be beside.
static uint64_t measured_bytes(const creation *made, uint64_t after, uint64_t charged_after) {
  uint64_t *first = &first_bytes[made->at.device];
  int64_t grown = (int64_t)(after - made->before) - (int64_t)(charged_after - made->charged_before);
  bool is_likely = grown > 0 && grown <= (int64_t)(4096 * MIB);
  uint64_t bytes = is_likely ? (uint64_t)grown : made->bytes;
  if (is_likely && made->before == 0) *first = bytes;
  return *first != 0 && bytes > *first ? *first : bytes;
}

// Replaces the estimate by what the driver says. False: that does not fit. What it wants is known
// then, and waited for before it is tried anew.
static bool creation_measure(creation *made) {
  uint64_t after;
  process *own = made->at.own;
  if (!made->is_measured) return true;
  uint64_t charged_after = charged_to(own, made->at.device);
  if (!measure_process_bytes(own, made->at.device, &after)) return true;
  made->bytes = measured_bytes(made, after, charged_after);
  return reservation_try(&made->needed, made->bytes);
}

static bool creation_keep(creation *made, CUcontext context) {
  process *own = made->at.own;
  if (!creation_measure(made)) return false;
  record added = {.space = SPACE_CONTEXT,
                  .key = (uint64_t)(uintptr_t)context,
                  .bytes = made->bytes,
                  .count = (uint32_t)made->at.ordinal,
                  .device = (int16_t)made->at.device};
  record displaced;
  bool was_displaced;
  compute_pause(own, context);
  compute_resume(own, context);
  // A context of that number was destroyed unseen. Otherwise all that is recorded of the number is
  // of other threads that use the new one already.
  record gone;
  if (records_find(&own->records, SPACE_CONTEXT, added.key, &gone)) give_back_context(own, context);
  if (!records_put(&own->records, &added, &displaced, &was_displaced)) return false;
  charge_release(own, made->at.device, made->needed.bytes - made->bytes);
  reservation_keep(&made->needed);
  charge_note_context(own, made->at.device, (int64_t)made->bytes);
  dead_note_listed(own, made->at.device);
  return true;
}

static CUresult finish_explicit(creation *made, CUresult result, const CUcontext *context) {
  reservation_called(&made->needed, result);
  if (result != CUDA_SUCCESS || creation_keep(made, *context)) return result;
  DRIVER(REAL(cuCtxDestroy_v2)(*context));
  return CUDA_ERROR_OUT_OF_MEMORY;
}

#define CREATE_CONTEXT(device, context, call)                                       \
  do {                                                                              \
    UNCANCELLED;                                                                    \
    creation made;                                                                  \
    CUcontext given = NULL;                                                         \
    CUresult result = creation_of(&made, device);                                   \
    if (result != CUDA_SUCCESS) return result;                                      \
    pthread_mutex_t *lock = &made.at.own->context_lock;                             \
    do {                                                                            \
      compute_await_resume(made.at.own, made.at.device);                            \
      process_lock(lock);                                                           \
      result = creation_begin(&made) ? finish_explicit(&made, DRIVER(call), &given) \
                                     : CUDA_ERROR_OUT_OF_MEMORY;                    \
      process_unlock(lock);                                                         \
    } while (reservation_goes_on(&made.needed));                                    \
    reservation_end(&made.needed);                                                  \
    GIVE_RESULT(context, given, result);                                            \
    return result;                                                                  \
  } while (0)

CUDA_WRAPPER(cuCtxCreate, (CUcontext * context, unsigned int flags, CUdevice device)) {
  if (!governed()) return UNGOVERNED(cuCtxCreate)(context, flags, device);
  CREATE_CONTEXT(device, context, REAL(cuCtxCreate)(RESULT(context, given), flags, device));
}

CUDA_WRAPPER(cuCtxCreate_v2, (CUcontext * context, unsigned int flags, CUdevice device)) {
  if (!governed()) return UNGOVERNED(cuCtxCreate_v2)(context, flags, device);
  CREATE_CONTEXT(device, context, REAL(cuCtxCreate_v2)(RESULT(context, given), flags, device));
}

CUDA_WRAPPER(cuCtxCreate_v3, (CUcontext * context, CUexecAffinityParam *parameters, int count,
                              unsigned int flags, CUdevice device)) {
  if (!governed()) return UNGOVERNED(cuCtxCreate_v3)(context, parameters, count, flags, device);
  CREATE_CONTEXT(device, context,
                 REAL(cuCtxCreate_v3)(RESULT(context, given), parameters, count, flags, device));
}

CUDA_WRAPPER(cuCtxCreate_v4, (CUcontext * context, CUctxCreateParams *parameters,
                              unsigned int flags, CUdevice device)) {
  if (!governed()) return UNGOVERNED(cuCtxCreate_v4)(context, parameters, flags, device);
  CREATE_CONTEXT(device, context,
                 REAL(cuCtxCreate_v4)(RESULT(context, given), parameters, flags, device));
}

CUDA_WRAPPER(cuGLCtxCreate, (CUcontext * context, unsigned int flags, CUdevice device)) {
  if (!governed()) return UNGOVERNED(cuGLCtxCreate)(context, flags, device);
  CREATE_CONTEXT(device, context, REAL(cuGLCtxCreate)(RESULT(context, given), flags, device));
}

CUDA_WRAPPER(cuGLCtxCreate_v2, (CUcontext * context, unsigned int flags, CUdevice device)) {
  if (!governed()) return UNGOVERNED(cuGLCtxCreate_v2)(context, flags, device);
  CREATE_CONTEXT(device, context, REAL(cuGLCtxCreate_v2)(RESULT(context, given), flags, device));
}

CUDA_WRAPPER(cuVDPAUCtxCreate, (CUcontext * context, unsigned int flags, CUdevice device,
                                uint32_t vdp_device, void *get_proc_address)) {
  if (!governed()) {
    return UNGOVERNED(cuVDPAUCtxCreate)(context, flags, device, vdp_device, get_proc_address);
  }
  CREATE_CONTEXT(
      device, context,
      REAL(cuVDPAUCtxCreate)(RESULT(context, given), flags, device, vdp_device, get_proc_address));
}

CUDA_WRAPPER(cuVDPAUCtxCreate_v2, (CUcontext * context, unsigned int flags, CUdevice device,
                                   uint32_t vdp_device, void *get_proc_address)) {
  if (!governed()) {
    return UNGOVERNED(cuVDPAUCtxCreate_v2)(context, flags, device, vdp_device, get_proc_address);
  }
  CREATE_CONTEXT(device, context,
                 REAL(cuVDPAUCtxCreate_v2)(RESULT(context, given), flags, device, vdp_device,
                                           get_proc_address));
}

// The driver ends no context before its work has ended, which may wait for what another thread does
// next: that is waited for without the locks.
static void drain(CUcontext context) {
  UNCANCELLED;
  if (context == NULL || DRIVER(USED(cuCtxPushCurrent_v2)(context)) != CUDA_SUCCESS) return;
  DRIVER(REAL(cuCtxSynchronize)());
  DRIVER(USED(cuCtxPopCurrent_v2)(&context));
}

// The end of a context, which is drained, ends captures in it. Another thread may be recording an
// allocation: that must not be made for real, in a stream that has the number next.
#define END_CONTEXT(own, call)            \
  ({                                      \
    process_lock(&(own)->capture_lock);   \
    CUresult ended_ = DRIVER(call);       \
    process_unlock(&(own)->capture_lock); \
    ended_;                               \
  })

#define DESTROY_CONTEXT(context, call, is_gone)          \
  do {                                                   \
    process *own = process_attach();                     \
    if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY; \
    process_lock(&own->context_lock);                    \
    compute_pause(own, context);                         \
    CUresult result = call;                              \
    bool went = result == CUDA_SUCCESS && (is_gone);     \
    compute_resume(own, went ? context : NULL);          \
    if (went) give_back_context(own, context);           \
    process_unlock(&own->context_lock);                  \
    return result;                                       \
  } while (0)

CUDA_WRAPPER(cuCtxDestroy, (CUcontext context)) {
  if (!governed()) return REAL(cuCtxDestroy)(context);
  drain(context);
  DESTROY_CONTEXT(context, END_CONTEXT(own, REAL(cuCtxDestroy)(context)), true);
}

CUDA_WRAPPER(cuCtxDestroy_v2, (CUcontext context)) {
  if (!governed()) return REAL(cuCtxDestroy_v2)(context);
  drain(context);
  DESTROY_CONTEXT(context, END_CONTEXT(own, REAL(cuCtxDestroy_v2)(context)), true);
}

static bool is_dead(CUcontext context) {
  unsigned version;
  return DRIVER(USED(cuCtxGetApiVersion)(context, &version)) != CUDA_SUCCESS;
}

CUDA_WRAPPER(cuCtxDetach, (CUcontext context)) {
  if (!governed()) return REAL(cuCtxDetach)(context);
  DESTROY_CONTEXT(context, DRIVER(REAL(cuCtxDetach)(context)), is_dead(context));
}

// ---- primary contexts ----
//
// Whether a primary context is there the driver is asked, not the number of those who retain it: it
// knows of all of them. Their number says which release is the last, as far as is known here.

static bool is_active(CUdevice ordinal) {
  unsigned flags;
  int active = 0;
  return DRIVER(USED(cuDevicePrimaryCtxGetState)(ordinal, &flags, &active)) == CUDA_SUCCESS &&
         active != 0;
}

static void forget_primary(process *own, CUdevice ordinal) {
  CUcontext context = own->primaries[ordinal];
  __atomic_store_n(&own->primaries[ordinal], NULL, __ATOMIC_RELAXED);
  own->retained[ordinal] = 0;
  if (context == NULL) return;
  give_back_context(own, context);
  int device = process_device(own, ordinal);
  if (device >= 0) pools_reset(own, device);
}

static bool is_ordinal(CUdevice ordinal) {
  return ordinal >= 0 && ordinal < MAX_ORDINALS;
}

static CUresult bring_to_life(process *own, creation *made, CUdevice ordinal, CUcontext *context) {
  if (!is_active(ordinal)) forget_primary(own, ordinal);
  if (made->at.own == NULL) {
    CUresult refusal = creation_of(made, ordinal);
    if (refusal != CUDA_SUCCESS) return refusal;
  }
  if (!creation_begin(made)) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = DRIVER(REAL(cuDevicePrimaryCtxRetain)(context, ordinal));
  if (reservation_called(&made->needed, result) != CUDA_SUCCESS) return result;
  if (!creation_keep(made, *context)) {
    DRIVER(REAL(cuDevicePrimaryCtxRelease_v2)(ordinal));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  __atomic_store_n(&own->primaries[ordinal], *context, __ATOMIC_RELAXED);
  return CUDA_SUCCESS;
}

static CUresult retain_locked(process *own, creation *made, CUdevice ordinal, CUcontext *context) {
  if (!is_ordinal(ordinal)) return DRIVER(REAL(cuDevicePrimaryCtxRetain)(context, ordinal));
  bool is_known = own->primaries[ordinal] != NULL && is_active(ordinal);
  CUresult result = is_known ? DRIVER(REAL(cuDevicePrimaryCtxRetain)(context, ordinal))
                             : bring_to_life(own, made, ordinal, context);
  if (result == CUDA_SUCCESS) own->retained[ordinal]++;
  return result;
}

// Also without the lock: it may be another one at once.
static CUcontext known_primary(const process *own, CUdevice ordinal) {
  return is_ordinal(ordinal) ? __atomic_load_n(&own->primaries[ordinal], __ATOMIC_RELAXED) : NULL;
}

static CUresult retain(process *own, CUdevice ordinal, CUcontext *context) {
  UNCANCELLED;
  creation made = {.is_estimate = false};
  CUresult result;
  do {
    if (known_primary(own, ordinal) == NULL) {
      compute_await_resume(own, process_device(own, ordinal));
    }
    process_lock(&own->context_lock);
    result = retain_locked(own, &made, ordinal, context);
    process_unlock(&own->context_lock);
  } while (reservation_goes_on(&made.needed));
  reservation_end(&made.needed);
  return result;
}

CUDA_WRAPPER(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device)) {
  if (context == NULL || !governed()) return UNGOVERNED(cuDevicePrimaryCtxRetain)(context, device);
  process *own = process_attach();
  if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  CUcontext given = NULL;
  CUresult result = retain(own, device, &given);
  GIVE_RESULT(context, given, result);
  return result;
}

static CUresult primary_released(process *own, CUdevice ordinal, CUresult result, bool is_reset) {
  bool is_known = result == CUDA_SUCCESS && is_ordinal(ordinal);
  bool is_gone = is_known && !is_active(ordinal);
  // The primary context that was reset is another one under the same handle.
  bool is_empty = is_known && (is_gone || is_reset);
  compute_resume(own, is_empty ? own->primaries[ordinal] : NULL);
  if (is_known && !is_reset && own->retained[ordinal] > 0) own->retained[ordinal]--;
  if (is_gone) {
    forget_primary(own, ordinal);
  } else if (is_empty) {
    give_back_contents(own, own->primaries[ordinal]);
  }
  return result;
}

// The primary context if the call ends it: a reset, or the last of the releases that are known of.
static CUcontext ending_primary(const process *own, CUdevice ordinal, bool is_reset) {
  bool ends = is_ordinal(ordinal) && (is_reset || own->retained[ordinal] <= 1);
  return ends ? own->primaries[ordinal] : NULL;
}

static void drain_primary(process *own, CUdevice ordinal, bool is_reset) {
  process_lock(&own->context_lock);
  CUcontext ending = ending_primary(own, ordinal, is_reset);
  process_unlock(&own->context_lock);
  drain(ending);
}

#define RELEASE_PRIMARY(device, call, is_reset)                               \
  do {                                                                        \
    process *own = process_attach();                                          \
    if (own == NULL) return DRIVER(call);                                     \
    drain_primary(own, device, is_reset);                                     \
    process_lock(&own->context_lock);                                         \
    CUcontext ending = ending_primary(own, device, is_reset);                 \
    compute_pause(own, ending);                                               \
    CUresult result = ending != NULL ? END_CONTEXT(own, call) : DRIVER(call); \
    result = primary_released(own, device, result, is_reset);                 \
    process_unlock(&own->context_lock);                                       \
    return result;                                                            \
  } while (0)

static CUresult release(CUdevice device) {
  RELEASE_PRIMARY(device, REAL(cuDevicePrimaryCtxRelease_v2)(device), false);
}

CUDA_WRAPPER(cuDevicePrimaryCtxRelease, (CUdevice device)) {
  if (!governed()) return REAL(cuDevicePrimaryCtxRelease)(device);
  RELEASE_PRIMARY(device, REAL(cuDevicePrimaryCtxRelease)(device), false);
}

CUDA_WRAPPER(cuDevicePrimaryCtxRelease_v2, (CUdevice device)) {
  return governed() ? release(device) : REAL(cuDevicePrimaryCtxRelease_v2)(device);
}

CUDA_WRAPPER(cuDevicePrimaryCtxReset, (CUdevice device)) {
  if (!governed()) return REAL(cuDevicePrimaryCtxReset)(device);
  RELEASE_PRIMARY(device, REAL(cuDevicePrimaryCtxReset)(device), true);
}

CUDA_WRAPPER(cuDevicePrimaryCtxReset_v2, (CUdevice device)) {
  if (!governed()) return REAL(cuDevicePrimaryCtxReset_v2)(device);
  RELEASE_PRIMARY(device, REAL(cuDevicePrimaryCtxReset_v2)(device), true);
}

// ---- green contexts: parts of the primary context, which they retain ----

// The primary context is there, and charged, before its part is made.
CUDA_WRAPPER(cuGreenCtxCreate, (CUgreenCtx * context, CUdevResourceDesc description,
                                CUdevice device, unsigned int flags)) {
  if (!governed()) return UNGOVERNED(cuGreenCtxCreate)(context, description, device, flags);
  process *own = process_attach();
  if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;
  UNCANCELLED;
  CUcontext primary;
  CUresult result = retain(own, device, &primary);
  if (result != CUDA_SUCCESS) return result;
  process_lock(&own->context_lock);
  result = DRIVER(REAL(cuGreenCtxCreate)(context, description, device, flags));
  if (result == CUDA_SUCCESS) own->retained[device]++;
  process_unlock(&own->context_lock);
  release(device);
  return result;
}

// Waits for the work of the part, and of the whole if that ends with it.
static CUdevice drain_green(process *own, CUgreenCtx green) {
  UNCANCELLED;
  CUcontext part;
  CUdevice ordinal = -1;
  if (DRIVER(USED(cuCtxFromGreenCtx)(&part, green)) != CUDA_SUCCESS ||
      DRIVER(USED(cuCtxPushCurrent_v2)(part)) != CUDA_SUCCESS) {
    return ordinal;
  }
  if (DRIVER(USED(cuCtxGetDevice)(&ordinal)) != CUDA_SUCCESS) ordinal = -1;
  DRIVER(REAL(cuCtxSynchronize)());
  DRIVER(USED(cuCtxPopCurrent_v2)(&part));
  drain_primary(own, ordinal, false);
  return ordinal;
}

CUDA_WRAPPER(cuGreenCtxDestroy, (CUgreenCtx context)) {
  if (!governed()) return REAL(cuGreenCtxDestroy)(context);
  process *own = process_attach();
  if (own == NULL) return DRIVER(REAL(cuGreenCtxDestroy)(context));
  CUdevice part_of = drain_green(own, context);
  process_lock(&own->context_lock);
  compute_pause(own, NULL);
  CUresult result = END_CONTEXT(own, REAL(cuGreenCtxDestroy)(context));
  compute_resume(own, NULL);
  if (result == CUDA_SUCCESS && is_ordinal(part_of) && own->retained[part_of] > 0) {
    own->retained[part_of]--;
  }
  for (CUdevice ordinal = 0; result == CUDA_SUCCESS && ordinal < MAX_ORDINALS; ordinal++) {
    if (own->primaries[ordinal] != NULL && !is_active(ordinal)) forget_primary(own, ordinal);
  }
  process_unlock(&own->context_lock);
  return result;
}
