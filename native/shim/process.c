// SPDX-License-Identifier: Apache-2.0
// The pages of a process, and how it joins its share.
#include "process.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "driver.h"
#include "reason.h"

process *process_pages;

static bool is_wiped;  // the kernel clears the pages in children

// glibc's own registration, which pthread_atfork calls: it is in every libc.so.6.
extern int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void),
                             void *object);

// A child that is forked while another thread takes a slot would inherit what holds the slot's lock
// (its descriptor, or its mapping before it is kept out of children), and keep the slot alive after
// its owner's end: forks wait for it. Not that of the thread itself, which is then in a signal's
// handler; nothing can be waited for there.
static __thread bool is_joining __attribute__((tls_model("initial-exec")));
static __thread process *fork_locked __attribute__((tls_model("initial-exec")));

static void before_fork(void) {
  int error = errno;
  fork_locked = !is_joining && share_present() ? process_state() : NULL;
  if (fork_locked != NULL) pthread_mutex_lock(&fork_locked->attach_lock);
  errno = error;
}

static void after_fork(void) {
  if (fork_locked != NULL) pthread_mutex_unlock(&fork_locked->attach_lock);
  fork_locked = NULL;
}

// On kernels before 4.14 nothing was wiped; elsewhere most of the pages do not exist.
static void forget_in_child(void) {
  process *own = __atomic_load_n(&process_pages, __ATOMIC_RELAXED);
  if (fork_locked != NULL) {
    // In wiped pages it is free already; this says so to sanitizers, which count by themselves.
    pthread_mutex_unlock(&fork_locked->attach_lock);
    memset(&fork_locked->attach_lock, 0, sizeof fork_locked->attach_lock);
  }
  if (own != NULL && !is_wiped) memset((void *)own, 0, sizeof *own);
  fork_locked = NULL;
  is_joining = false;
}

// From the start: a fork that began before the first call may end in the midst of it.
__attribute__((constructor)) static void watch_forks(void) {
  __register_atfork(before_fork, after_fork, forget_in_child, NULL);
}

static process *make_pages(void) {
  void *made =
      mmap(NULL, sizeof(process), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return NULL;
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
  // Linux 4.14. Threads that get here together are told the same.
  bool wiped = madvise(made, sizeof(process), MADV_WIPEONFORK) == 0;
  __atomic_store_n(&is_wiped, wiped, __ATOMIC_RELAXED);
  process *first = NULL;
  if (!__atomic_compare_exchange_n(&process_pages, &first, made, false, __ATOMIC_ACQ_REL,
                                   __ATOMIC_ACQUIRE)) {
    munmap(made, sizeof(process));
    return first;
  }
  return made;
}

process *process_state(void) {
  process *own = __atomic_load_n(&process_pages, __ATOMIC_ACQUIRE);
  if (LIKELY(own != NULL)) return own;
  int error = errno;
  own = make_pages();
  errno = error;
  return own;
}

#define HOLDS_LOCK 0x10000u /* counts as one reason, in its own half of the number */

static __thread unsigned uncancelled __attribute__((tls_model("initial-exec")));
static __thread int cancel_state __attribute__((tls_model("initial-exec")));

static inline void begin_uncancelled(unsigned reason) {
  if (uncancelled == 0) pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
  uncancelled += reason;
}

static inline void end_uncancelled(unsigned reason) {
  uncancelled -= reason;
  if (uncancelled == 0) pthread_setcancelstate(cancel_state, NULL);
}

void uncancelled_begin(void) {
  begin_uncancelled(1);
}

void uncancelled_end(void) {
  end_uncancelled(1);
}

bool process_holds_lock(void) {
  return uncancelled >= HOLDS_LOCK;
}

void process_lock(pthread_mutex_t *lock) {
  begin_uncancelled(HOLDS_LOCK);
  pthread_mutex_lock(lock);
}

bool process_trylock(pthread_mutex_t *lock) {
  begin_uncancelled(HOLDS_LOCK);
  if (pthread_mutex_trylock(lock) == 0) return true;
  end_uncancelled(HOLDS_LOCK);
  return false;
}

static struct timespec time_in(uint64_t ns, clockid_t clock) {
  struct timespec until;
  clock_gettime(clock, &until);
  uint64_t end = (uint64_t)until.tv_nsec + ns;
  until.tv_sec += (time_t)(end / 1000000000u);
  until.tv_nsec = (long)(end % 1000000000u);
  return until;
}

// ThreadSanitizer does not see `pthread_mutex_clocklock`, and would report each unlock after it.
#ifdef __SANITIZE_THREAD__
#define IS_WATCHED true
#else
#define IS_WATCHED false
#endif

// glibc 2.30. Before, a wait is longer if the machine's clock is put back meanwhile.
extern int pthread_mutex_clocklock(pthread_mutex_t *lock, clockid_t clock,
                                   const struct timespec *until) __attribute__((weak));

static int lock_within(pthread_mutex_t *lock, uint64_t ns) {
  bool has_clock = pthread_mutex_clocklock != NULL && !IS_WATCHED;
  struct timespec until = time_in(ns, has_clock ? CLOCK_MONOTONIC : CLOCK_REALTIME);
  return has_clock ? pthread_mutex_clocklock(lock, CLOCK_MONOTONIC, &until)
                   : pthread_mutex_timedlock(lock, &until);
}

bool process_lock_within(pthread_mutex_t *lock, uint64_t ns) {
  if (LIKELY(process_trylock(lock))) return true;
  if (ns == 0) return false;
  begin_uncancelled(HOLDS_LOCK);
  if (lock_within(lock, ns) == 0) return true;
  end_uncancelled(HOLDS_LOCK);
  return false;
}

void process_unlock(pthread_mutex_t *lock) {
  pthread_mutex_unlock(lock);
  end_uncancelled(HOLDS_LOCK);
}

// Driver's calls take microseconds, those that free or make memory milliseconds.
#define TURN_NS UINT64_C(200000000)

bool turn_take(call_turn *turn) {
  bool is_long = __atomic_load_n(&turn->is_long, __ATOMIC_RELAXED) != 0;
  if (process_lock_within(&turn->lock, is_long ? 0 : TURN_NS)) return true;
  __atomic_store_n(&turn->is_long, 1, __ATOMIC_RELAXED);
  return false;
}

void turn_give(call_turn *turn, bool taken) {
  if (!taken) return;
  __atomic_store_n(&turn->is_long, 0, __ATOMIC_RELAXED);
  process_unlock(&turn->lock);
}

static bool is_usable(int error, const char *directory) {
  if (error != 0) say_unusable(directory, "ledger", -error);
  return error == 0;
}

// Gives the devices of a share their numbers. A device has one limit: two shares of it cannot be
// had together.
static bool number_devices(process *own, allot_ledger *ledger) {
  for (int i = 0; i < (int)ledger->policy->device_count; i++) {
    const allot_device_policy *policy = &ledger->policy->devices[i];
    if (process_device_by_uuid(own, policy->uuid) >= 0) {
      say_once("two of its shares are parts of %.*s; ask for one share with both parts",
               ALLOT_UUID_BYTES, policy->uuid);
      return false;
    }
    if (own->device_count == ALLOT_MAX_DEVICES) {
      say_once("its shares have more than %d devices together", ALLOT_MAX_DEVICES);
      return false;
    }
    own->policies[own->device_count] = policy;
    own->joined[own->device_count++] = (joined_device){ledger, i};
  }
  return true;
}

static bool are_in_place(void) {
  int failure = share_failure();
  if (failure != 0) say_unusable(share_directory(0), "folder", failure);
  return failure == 0;
}

static bool view_shares(process *own) {
  unsigned count = share_count();
  if (!are_in_place()) return false;
  // The driver would show its devices or these.
  if (share_beside_bare()) {
    say_once(
        "one of its shares has whole devices (mode exclusive or timeslice): it cannot be combined"
        " with another share; use one container for each");
    return false;
  }
  if (count > MAX_SHARES) {
    say_once("its container has %u shares, at most %d can be used", count, MAX_SHARES);
    return false;
  }
  for (own->share_count = own->device_count = 0; own->share_count < count;) {
    allot_ledger *ledger = &own->ledgers[own->share_count];
    const char *directory = share_directory(own->share_count);
    if (!is_usable(allot_ledger_open(ledger, directory), directory)) return false;
    own->share_count++;
    if (!number_devices(own, ledger)) return false;
  }
  return true;
}

static bool view_locked(process *own) {
  if (own->viewed != 0) return true;
  if (!view_shares(own)) {
    for (uint32_t share = 0; share < own->share_count; share++) {
      allot_ledger_close(&own->ledgers[share]);
    }
    own->share_count = own->device_count = 0;
    return false;
  }
  __atomic_store_n(&own->viewed, 1, __ATOMIC_RELEASE);
  return true;
}

static bool attach_locked(process *own) {
  if (own->attached != 0) return true;
  if (!view_locked(own) || !are_in_place()) return false;
  for (uint32_t share = 0; share < own->share_count; share++) {
    allot_ledger *ledger = &own->ledgers[share];
    if (ledger->slot >= 0) continue;
    if (!is_usable(allot_ledger_attach(ledger), ledger->directory)) return false;
  }
  __atomic_store_n(&own->attached, 1, __ATOMIC_RELEASE);
  return true;
}

static process *join(uint32_t *joined, process *own, bool (*step)(process *)) {
  if (LIKELY(__atomic_load_n(joined, __ATOMIC_ACQUIRE) != 0)) return own;
  int error = errno;
  is_joining = true;
  process_lock(&own->attach_lock);
  bool done = step(own);
  process_unlock(&own->attach_lock);
  is_joining = false;
  errno = error;
  return done ? own : NULL;
}

process *process_view(void) {
  process *own = process_state();
  return own == NULL ? NULL : join(&own->viewed, own, view_locked);
}

process *process_attach(void) {
  process *own = process_state();
  return own == NULL ? NULL : join(&own->attached, own, attach_locked);
}

bool process_guarded(process *own, bool (*step)(process *own, void *context), void *context) {
  is_joining = true;
  process_lock(&own->attach_lock);
  bool done = step(own, context);
  process_unlock(&own->attach_lock);
  is_joining = false;
  return done;
}

// ---- devices ----

int process_device_by_uuid(const process *own, const char *uuid) {
  for (uint32_t i = 0; i < own->device_count; i++) {
    if (strncmp(own->policies[i]->uuid, uuid, ALLOT_UUID_BYTES) == 0) return (int)i;
  }
  return -1;
}

static int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Does a policy's text, "GPU-..." or "MIG-...", spell these bytes?
static bool spells(const char *text, const CUuuid *uuid) {
  if (strncmp(text, "GPU-", 4) != 0 && strncmp(text, "MIG-", 4) != 0) return false;
  text += 4;
  for (int i = 0; i < 16; i++) {
    if (*text == '-') text++;
    int high = digit(text[0]);
    int low = high < 0 ? -1 : digit(text[1]);
    if (low < 0 || (unsigned char)uuid->bytes[i] != high * 16 + low) return false;
    text += 2;
  }
  return *text == '\0';
}

#define KNOWN_OFFSET 3 /* keeps what is known from zero, which is not known yet */

static int find_device(process *own, CUdevice ordinal) {
  CUuuid uuid;
  // Of a MIG device only the second version tells its own UUID.
  if (DRIVER(USED(cuDeviceGetUuid_v2)(&uuid, ordinal)) != CUDA_SUCCESS &&
      DRIVER(USED(cuDeviceGetUuid)(&uuid, ordinal)) != CUDA_SUCCESS) {
    return DEVICE_UNKNOWN;
  }
  for (uint32_t i = 0; i < own->device_count; i++) {
    if (spells(own->policies[i]->uuid, &uuid)) return (int)i;
  }
  return DEVICE_OUTSIDE;
}

int process_device(process *own, CUdevice ordinal) {
  if (ordinal < 0 || ordinal >= MAX_ORDINALS) return DEVICE_UNKNOWN;
  int16_t *known = &own->device_of_ordinal[ordinal];
  int device = __atomic_load_n(known, __ATOMIC_RELAXED);
  if (LIKELY(device != 0)) return device - KNOWN_OFFSET;
  device = find_device(own, ordinal);
  if (device == DEVICE_UNKNOWN) return device;
  __atomic_store_n(known, (int16_t)(device + KNOWN_OFFSET), __ATOMIC_RELAXED);
  return device;
}
