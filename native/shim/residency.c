// SPDX-License-Identifier: Apache-2.0
// Moving a process's memory of one device there and back, in whole sets.
//
// Kernels would fetch what they need by themselves, page by page, at a fraction of what the bus can
// do. So the set is brought in one go, on a stream of the shim's own, when the lease is gained; the
// time is told to whoever counts leases. The driver moves others' pages out to make room.
//
// Whether anything had to move cannot be asked, only measured: memory that is there already is
// prefetched faster than any bus could bring it.
#include "residency.h"

#include <sys/mman.h>
#include <time.h>

#include "compute.h"
#include "driver.h"

// Faster than this (bytes a nanosecond) nothing comes over a bus: PCIe 6 with 16 lanes has 121.
#define BUS_LIMIT 128
// What the call and the driver's look at the pages take at most where nothing moves.
#define LOOK_NS UINT64_C(500000)
// Sets are moved in groups of this size at least, each timed by itself, and in pieces: some drivers
// move before they return, and somebody waits for a sign of life.
#define GROUP_BYTES (1024 * MIB)
#define PIECE_BYTES (64 * MIB)
#define TICK_NS UINT64_C(5000000)
#define NAP_NS 500000L
// How long memory that was there is taken to be there still, as long as nobody is short of room.
#define TRUST_NS UINT64_C(1000000000)
// Where somebody may be, so many times what the look took, and longer each time that all was there.
#define TRUST_LOOKS 20

enum { SUPPORT_YES = 1, SUPPORT_NO = 2 };

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

bool residency_possible(const process *own, int device) {
  return (own->policies[device]->flags & ALLOT_DEVICE_OVERSUBSCRIBED) != 0;
}

bool residency_active(const process *own, int device) {
  return residency_possible(own, device) &&
         __atomic_load_n(&own->devices[device].residency.set_bytes, __ATOMIC_RELAXED) != 0;
}

uint64_t residency_linger_ns(const process *own, int device) {
  if (!residency_active(own, device)) return 0;
  return __atomic_load_n(&own->devices[device].residency.move_ns, __ATOMIC_RELAXED);
}

// ---- what is in the set ----

static uint32_t ask_support(CUdevice ordinal) {
  int concurrent = 0;
  CUresult result = DRIVER(USED(cuDeviceGetAttribute)(
      &concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, ordinal));
  return result == CUDA_SUCCESS && concurrent != 0 ? SUPPORT_YES : SUPPORT_NO;
}

bool residency_wanted(process *own, int device, CUdevice ordinal) {
  if (LIKELY(!residency_possible(own, device))) return false;
  residency_state *state = &own->devices[device].residency;
  uint32_t support = __atomic_load_n(&state->support, __ATOMIC_ACQUIRE);
  if (support == 0) {
    support = ask_support(ordinal);
    __atomic_store_n(&state->ordinal, ordinal, __ATOMIC_RELAXED);
    __atomic_store_n(&state->support, support, __ATOMIC_RELEASE);
  }
  return support == SUPPORT_YES;
}

static uint64_t *host_bytes(process *own, int device) {
  return &process_usage(own, device)->host_bytes;
}

// A process that was killed leaves its part in the share's figure; the first one after the last
// begins at zero.
static void forget_the_dead(process *own, int device) {
  if (__atomic_load_n(host_bytes(own, device), __ATOMIC_RELAXED) == 0) return;
  const allot_ledger *ledger = own->joined[device].ledger;
  uint32_t high = __atomic_load_n(&ledger->usage->high_slot, __ATOMIC_ACQUIRE);
  for (uint32_t slot = 0; slot < high && slot < ALLOT_MAX_SLOTS; slot++) {
    if ((int)slot != ledger->slot && allot_ledger_slot_alive(ledger, (int)slot)) return;
  }
  __atomic_store_n(host_bytes(own, device), 0, __ATOMIC_RELAXED);
}

// ---- what the agent is told in the slot ----

#define HAS UINT64_C(1)
#define EVICTED (UINT64_C(1) << 32)

static uint64_t *movable(process *own, int device) {
  return &process_slot(own, device)->movable;
}

static uint64_t bit_of(process *own, int device, uint64_t what) {
  return what << own->joined[device].index;
}

static void say(process *own, int device, uint64_t what, bool is_so) {
  uint64_t *word = movable(own, device), bit = bit_of(own, device, what);
  if (((__atomic_load_n(word, __ATOMIC_SEQ_CST) & bit) != 0) == is_so) return;
  if (is_so) {
    __atomic_or_fetch(word, bit, __ATOMIC_SEQ_CST);
  } else {
    __atomic_and_fetch(word, ~bit, __ATOMIC_SEQ_CST);
  }
}

static bool is_evicted(process *own, int device) {
  return (__atomic_load_n(movable(own, device), __ATOMIC_SEQ_CST) & bit_of(own, device, EVICTED)) !=
         0;
}

// Whether there is a set, whoever else changes it meanwhile.
static void say_what_is_there(process *own, int device) {
  const uint64_t *bytes = &own->devices[device].residency.set_bytes;
  bool is_there;
  do {
    is_there = __atomic_load_n(bytes, __ATOMIC_SEQ_CST) != 0;
    say(own, device, HAS, is_there);
  } while (is_there != (__atomic_load_n(bytes, __ATOMIC_SEQ_CST) != 0));
}

// The keeper is there from now on: it moves the set when the share is suspended, launches or not.
static void begin_set(process *own, int device) {
  if (!residency_possible(own, device)) return;
  forget_the_dead(own, device);
  compute_state *turns = compute_state_of(own);
  if (turns != NULL && turns->devices[device].has_turns != 0) compute_join(&turns->devices[device]);
}

void residency_added(process *own, int device, uint64_t bytes) {
  residency_state *state = &own->devices[device].residency;
  bool is_first = __atomic_fetch_add(&state->set_bytes, bytes, __ATOMIC_SEQ_CST) == 0;
  if (is_first) begin_set(own, device);
  // What is new is not on the host.
  __atomic_add_fetch(&state->additions, 1, __ATOMIC_SEQ_CST);
  say(own, device, EVICTED, false);
  if (is_first) say_what_is_there(own, device);
  if (!residency_possible(own, device)) return;
  __atomic_add_fetch(host_bytes(own, device), bytes, __ATOMIC_RELAXED);
}

// Never below zero, whoever wrote into the file.
static uint64_t subtract(uint64_t *from, uint64_t bytes) {
  uint64_t seen = __atomic_load_n(from, __ATOMIC_RELAXED), left;
  do {
    left = seen > bytes ? seen - bytes : 0;
  } while (
      !__atomic_compare_exchange_n(from, &seen, left, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return left;
}

void residency_removed(process *own, int device, uint64_t bytes) {
  uint64_t left = subtract(&own->devices[device].residency.set_bytes, bytes);
  subtract(host_bytes(own, device), bytes);
  if (left == 0) say_what_is_there(own, device);
}

__attribute__((destructor)) static void leave_at_exit(void) {
  process *own = process_known();
  if (own == NULL || __atomic_load_n(&own->attached, __ATOMIC_ACQUIRE) == 0) return;
  for (int device = 0; device < (int)own->device_count; device++) {
    uint64_t mine = __atomic_load_n(&own->devices[device].residency.set_bytes, __ATOMIC_RELAXED);
    if (mine != 0) subtract(host_bytes(own, device), mine);
  }
}

typedef struct range {
  CUdeviceptr start;
  uint64_t bytes;
} range;

typedef struct range_list {
  range *places;  // NULL: only counted
  size_t capacity;
  size_t count;
  int device;
  bool with_programs;  // also what the program made managed by itself
} range_list;

static bool list_range(const record *seen, void *context) {
  range_list *list = context;
  uint32_t whose = managed_whose(seen);
  if (whose == MANAGED_NOT || seen->device != list->device) return false;
  if (whose == MANAGED_BY_PROGRAM && !list->with_programs) return false;
  if (list->places != NULL && list->count < list->capacity) {
    list->places[list->count] = (range){seen->key, managed_bytes(seen)};
  }
  list->count++;
  return false;
}

// What is allocated between the two looks is left to the driver.
static bool list_make(range_list *list, process *own, int device, bool with_programs) {
  *list = (range_list){.device = device, .with_programs = with_programs};
  records_sweep(&own->records, list_range, list);
  if (list->count == 0) return false;
  size_t capacity = list->count;
  void *made = mmap(NULL, capacity * sizeof(range), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return false;
  *list = (range_list){
      .places = made, .capacity = capacity, .device = device, .with_programs = with_programs};
  records_sweep(&own->records, list_range, list);
  if (list->count > capacity) list->count = capacity;
  return true;
}

static void list_drop(range_list *list) {
  munmap(list->places, list->capacity * sizeof(range));
}

// ---- moving ----

typedef struct search {
  int device;
  CUcontext found;
} search;

static bool note_context(const record *seen, void *context) {
  search *wanted = context;
  if (seen->space == SPACE_CONTEXT && seen->device == wanted->device) {
    wanted->found = (CUcontext)(uintptr_t)seen->key;
  }
  return false;
}

typedef struct mover {
  process *own;
  int device;
  CUdevice ordinal;
  CUstreamCaptureMode mode;
  CUstream stream;
  residency_tick *tick;  // NULL: nobody waits for signs of life
  void *tick_context;
  uint64_t began_ns, ticked_ns;
  uint64_t took_ns;
  uint64_t moved_bytes;
  bool failed;   // something may not be where it should
  bool stopped;  // the lease is lost
} mover;

// Holds off those who destroy contexts, if none of them is at it: they may wait for work that waits
// for the lease. False: there is no context, or somebody is.
static bool mover_begin(mover *made, process *own, int device) {
  *made = (mover){.own = own, .device = device, .mode = CU_STREAM_CAPTURE_MODE_RELAXED};
  made->ordinal = __atomic_load_n(&own->devices[device].residency.ordinal, __ATOMIC_RELAXED);
  if (!process_trylock(&own->context_lock)) return false;
  search wanted = {.device = device};
  records_sweep(&own->records, note_context, &wanted);
  if (wanted.found != NULL && DRIVER(USED(cuCtxPushCurrent_v2)(wanted.found)) == CUDA_SUCCESS) {
    // Another thread may be recording what it launches: this is no part of it.
    DRIVER(USED(cuThreadExchangeStreamCaptureMode)(&made->mode));
    return true;
  }
  process_unlock(&own->context_lock);
  return false;
}

static void mover_end(mover *made) {
  CUcontext popped;
  if (made->stream != NULL) DRIVER(USED(cuStreamDestroy_v2)(made->stream));
  DRIVER(USED(cuThreadExchangeStreamCaptureMode)(&made->mode));
  DRIVER(USED(cuCtxPopCurrent_v2)(&popped));
  process_unlock(&made->own->context_lock);
}

static void show_life(mover *made) {
  uint64_t now = now_ns();
  if (made->tick == NULL || made->stopped || now - made->ticked_ns < TICK_NS) return;
  made->ticked_ns = now;
  made->stopped = !made->tick(made->tick_context, now - made->began_ns);
}

static void wait_for_group(mover *made, uint64_t bytes, uint64_t began) {
  CUresult result;
  while ((result = DRIVER(USED(cuStreamQuery)(made->stream))) == CUDA_ERROR_NOT_READY) {
    show_life(made);
    nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
  }
  if (result != CUDA_SUCCESS) made->failed = true;
  uint64_t took = now_ns() - began;
  if (took <= LOOK_NS + bytes / BUS_LIMIT) return;
  made->took_ns += took;
  made->moved_bytes += bytes;
}

// A range that was freed meanwhile is refused by the driver, or is another one by now: both are
// right.
static void move_range(mover *made, const range *moved, CUdevice target, uint64_t most) {
  uint64_t end = moved->bytes < most ? moved->bytes : most;
  for (uint64_t at = 0; at < end && !made->stopped; at += PIECE_BYTES) {
    uint64_t bytes = end - at < PIECE_BYTES ? end - at : PIECE_BYTES;
    CUresult result =
        DRIVER(USED(cuMemPrefetchAsync)(moved->start + at, bytes, target, made->stream));
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE) made->failed = true;
    show_life(made);
  }
}

static void move(mover *made, const range_list *list, CUdevice target, uint64_t most) {
  if (DRIVER(USED(cuStreamCreate)(&made->stream, CU_STREAM_NON_BLOCKING)) != CUDA_SUCCESS) {
    made->stream = NULL;
    made->failed = true;
    return;
  }
  uint64_t group = 0, began = made->began_ns = made->ticked_ns = now_ns();
  for (size_t i = 0; i < list->count && most > 0 && !made->stopped; i++) {
    uint64_t bytes = list->places[i].bytes < most ? list->places[i].bytes : most;
    move_range(made, &list->places[i], target, most);
    group += bytes;
    most -= bytes;
    if (group < GROUP_BYTES && i + 1 < list->count && most > 0) continue;
    wait_for_group(made, group, began);
    group = 0;
    began = now_ns();
  }
}

// With a part of the device to spare nobody's pages were put aside lately. Without, whoever found
// all of its own there looks again ever more seldom: a look at many pages takes its time. What is
// put aside meanwhile is noticed at the end of the trust, and comes page by page until then.
static bool is_surely_there(const residency_state *state, bool is_slack) {
  uint64_t trust_ns = is_slack && state->was_slack != 0 ? TRUST_NS : state->trust_ns;
  return state->confirmed_ns != 0 && now_ns() - state->confirmed_ns < trust_ns;
}

static void learn(residency_state *state, const mover *made, bool is_slack) {
  uint64_t now = now_ns(), look_ns = now - made->began_ns;
  bool was_there = made->took_ns == 0 && !made->failed && !made->stopped;
  uint64_t trust_ns = state->trust_ns * 2;
  if (trust_ns < look_ns * TRUST_LOOKS) trust_ns = look_ns * TRUST_LOOKS;
  if (trust_ns > TRUST_NS) trust_ns = TRUST_NS;
  state->trust_ns = was_there ? trust_ns : 0;
  state->confirmed_ns = made->failed || made->stopped ? 0 : now;
  state->was_slack = is_slack;
}

static void bring(mover *made, residency_state *state) {
  size_t free = 0, total = 0;
  DRIVER(REAL(cuMemGetInfo_v2)(&free, &total));
  bool is_slack = free > total / 16;
  if (is_surely_there(state, is_slack)) return;
  range_list list;
  // What the program made managed by itself may be where it is on purpose.
  if (!list_make(&list, made->own, made->device, false)) return;
  // Beyond the device's size the rest would displace what came first.
  move(made, &list, made->ordinal, total);
  list_drop(&list);
  DRIVER(REAL(cuMemGetInfo_v2)(&free, &total));
  learn(state, made, free > total / 16);
}

uint64_t residency_gained(process *own, int device, residency_tick *tick, void *context) {
  if (!residency_active(own, device)) return 0;
  residency_state *state = &own->devices[device].residency;
  // Also where nothing can be moved now: pages come as they are touched.
  say(own, device, EVICTED, false);
  mover made;
  if (!mover_begin(&made, own, device)) return 0;
  made.tick = tick;
  made.tick_context = context;
  bring(&made, state);
  mover_end(&made);
  __atomic_store_n(&state->move_ns, made.took_ns, __ATOMIC_RELAXED);
  __atomic_add_fetch(&process_usage(own, device)->moved_bytes, made.moved_bytes, __ATOMIC_RELAXED);
  return made.took_ns;
}

static void say_evicted(process *own, int device, uint64_t additions) {
  const uint64_t *now = &own->devices[device].residency.additions;
  if (__atomic_load_n(now, __ATOMIC_SEQ_CST) != additions) return;
  say(own, device, EVICTED, true);
  if (__atomic_load_n(now, __ATOMIC_SEQ_CST) != additions) say(own, device, EVICTED, false);
}

void residency_evict(process *own, int device) {
  mover made;
  range_list list;
  if (!residency_active(own, device) || is_evicted(own, device)) return;
  if (!mover_begin(&made, own, device)) return;
  uint64_t additions = __atomic_load_n(&own->devices[device].residency.additions, __ATOMIC_SEQ_CST);
  if (list_make(&list, own, device, true)) {
    move(&made, &list, CU_DEVICE_CPU, UINT64_MAX);
    list_drop(&list);
  }
  own->devices[device].residency.confirmed_ns = 0;
  mover_end(&made);
  if (!made.failed) say_evicted(own, device, additions);
}
