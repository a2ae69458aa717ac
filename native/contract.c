// SPDX-License-Identifier: Apache-2.0
// The agent's side of leases: what each share of a device is promised.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bus_guard.h"
#include "lease.h"
#include "mapping.h"

// Crash tests define this to stop the process at each step of an operation.
#ifndef LEASE_STEP
#define LEASE_STEP(name) ((void)0)
#endif

#define QUANTUM_US 10000u

#define load(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define store(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)

typedef struct part {
  size_t at;
  const void *data;
  size_t size;
} part;

static bool write_part(int descriptor, const part *written) {
  return pwrite(descriptor, written->data, written->size, (off_t)written->at) ==
         (ssize_t)written->size;
}

// A new file of `size` bytes with two parts that are not zero; of it `allocated` bytes have their
// space on the disk now. It appears whole, by a link that replaces nothing.
static int create_file(const char *directory, const char *name, const part parts[2],
                       size_t allocated, size_t size) {
  char path[4096], draft[4096];
  int error = allot_path_in(directory, name, path, sizeof path);
  if (error != 0) return error;
  int length = snprintf(draft, sizeof draft, "%s/.%s-%d", directory, name, (int)getpid());
  if (length < 0 || (size_t)length >= sizeof draft) return -ENAMETOOLONG;
  int descriptor = open(draft, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0) return -errno;
  error = posix_fallocate(descriptor, 0, (off_t)allocated);
  if (error == 0 && ftruncate(descriptor, (off_t)size) != 0) error = errno;
  for (int i = 0; i < 2 && error == 0; i++) {
    if (!write_part(descriptor, &parts[i])) error = EIO;
  }
  if (error == 0 && fchmod(descriptor, 0644) != 0) error = errno;
  close(descriptor);
  if (error == 0 && link(draft, path) != 0) error = errno;
  unlink(draft);
  return -error;
}

static const struct {
  uint64_t magic;
  uint32_t version;
} seat_head = {ALLOT_SEAT_MAGIC, ALLOT_SEAT_VERSION};
static const allot_lease_state first_state = {.holder = -1, .next = -1};

#define SEAT_SIZE sizeof(allot_leases_file)
#define FIRST_BUFFER offsetof(allot_leases_file, buffers)
#define FIRST_STATE (FIRST_BUFFER + offsetof(allot_seat_buffer, state))
#define SEAT_BEGUN (FIRST_BUFFER + sizeof(allot_seat_buffer))
#define SEATS_PATH 64 /* /proc/self/fd/N */

// What a seat's file begins with, apart from zeros.
static const part fresh_seat[2] = {{0, &seat_head, sizeof seat_head},
                                   {FIRST_STATE, &first_state, sizeof first_state}};

// The folder of the seats, and a path of it that leads nowhere else while it is open. In a folder
// for all users another user may have put a link in its place.
static int open_seats(const char *directory, char *path, size_t size) {
  char seats[4096];
  int error = allot_path_in(directory, "seats", seats, sizeof seats);
  if (error != 0) return error;
  int descriptor = open(seats, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0) return -errno;
  snprintf(path, size, "/proc/self/fd/%d", descriptor);
  return descriptor;
}

int allot_contract_create(const char *directory, const char *uuid) {
  allot_contract contract = {.magic = ALLOT_CONTRACT_MAGIC,
                             .version = ALLOT_CONTRACT_VERSION,
                             .generation = 1,
                             .serial = 1,
                             .quantum_us = QUANTUM_US};
  if (strlen(uuid) >= sizeof contract.uuid) return -EINVAL;
  strcpy(contract.uuid, uuid);
  contract.seats[ALLOT_SEAT_UNBOOKED] = (allot_contract_seat){
      .terms = ALLOT_TERMS(0, ALLOT_WHOLE, 100, ALLOT_CLASS_BESTEFFORT, ALLOT_TERMS_TAKEN),
      .serial = 1};
  // First the folder: a contract that is there has it.
  const part of_contract[2] = {{0, &contract, sizeof contract}, {0, "", 0}};
  char seats[4096];
  int error = allot_path_in(directory, "seats", seats, sizeof seats);
  if (error != 0) return error;
  if (mkdir(seats, 0755) != 0 && errno != EEXIST) return -errno;
  return create_file(directory, "contract", of_contract, sizeof contract, sizeof contract);
}

// ---- mending ----

typedef struct damage {
  bool is_short, has_bad_head, has_bad_root;
} damage;

static int look_for_damage(int descriptor, damage *found) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) return -errno;
  if (!S_ISREG(status.st_mode)) return -EINVAL;
  // Zero where it is shorter.
  uint64_t words[offsetof(allot_leases_file, root) / sizeof(uint64_t) + 1] = {0};
  if (pread(descriptor, words, sizeof words, 0) < 0) return -errno;
  uint32_t version;
  memcpy(&version, (const char *)words + offsetof(allot_leases_file, version), sizeof version);
  uint64_t root = words[offsetof(allot_leases_file, root) / sizeof(uint64_t)];
  *found = (damage){
      .is_short = (uint64_t)status.st_size < SEAT_SIZE,
      .has_bad_head = words[0] != ALLOT_SEAT_MAGIC || version != ALLOT_SEAT_VERSION,
      .has_bad_root = ALLOT_ROOT_BUFFER(root) >= ALLOT_OWN_PLACES * 2,
  };
  return 0;
}

static bool is_damaged(const damage *found) {
  return found->is_short || found->has_bad_head || found->has_bad_root;
}

// Never through a mapping: somebody may cut the file again. The mark comes last, so that nobody
// opens it before all is there.
static int restore(int descriptor, const damage *found) {
  if (found->is_short) {
    if (ftruncate(descriptor, (off_t)SEAT_SIZE) != 0) return -errno;
    int error = posix_fallocate(descriptor, 0, (off_t)SEAT_BEGUN);
    if (error != 0) return -error;
  }
  if (found->is_short || found->has_bad_root) {
    const uint64_t none = 0;  // the first state is in force, and it says that nobody has a turn
    const part root = {offsetof(allot_leases_file, root), &none, sizeof none};
    if (!write_part(descriptor, &fresh_seat[1]) || !write_part(descriptor, &root)) return -EIO;
  }
  return write_part(descriptor, &fresh_seat[0]) ? 0 : -EIO;
}

int allot_leases_mend(const char *path) {
  // Who may only read it can still tell that it is whole.
  int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor < 0) descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor < 0) return -errno;
  damage found = {0};
  int error = look_for_damage(descriptor, &found);
  const bool was_damaged = error == 0 && is_damaged(&found);
  if (was_damaged) error = restore(descriptor, &found);
  close(descriptor);
  return error != 0 ? error : was_damaged;
}

// ---- changes, one agent at a time ----
//
// The caller holds the state folder's lock. No lock on `contract` itself: a container has it open,
// and could hold that while all starts of the machine wait.

// In a folder for all users another user may cut the file short meanwhile: what touches it is
// guarded, and holds nothing else then.

typedef struct change_work {
  const char *directory;
  allot_contract *contract;
  const char *share_id;
  int seat;
  uint64_t terms;
  uint64_t serial;
} change_work;

static int check_head(const allot_contract *contract) {
  if (contract->magic != ALLOT_CONTRACT_MAGIC) return -EINVAL;
  return contract->version == ALLOT_CONTRACT_VERSION ? 0 : -EPROTO;
}

static int with_contract(change_work *work, int (*run)(void *)) {
  void *mapped = NULL;
  int error = allot_map_in(work->directory, "contract", sizeof(allot_contract), O_RDWR, &mapped);
  if (error != 0) return error;
  work->contract = mapped;
  const int result = allot_guarded(run, work);
  munmap(mapped, sizeof(allot_contract));
  return result;
}

// The places that processes have: most seats have few, and many have none. Who takes a place later
// looks at the terms after that.
static unsigned taken_places(int descriptor, unsigned taken[ALLOT_OWN_PLACES]) {
  allot_place_head heads[ALLOT_OWN_PLACES];
  unsigned count = 0;
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // the terms are written before this look
  ssize_t size = pread(descriptor, heads, sizeof heads, offsetof(allot_leases_file, heads));
  if (size != (ssize_t)sizeof heads) return 0;
  for (unsigned place = 0; place < ALLOT_OWN_PLACES; place++) {
    if (heads[place].pid != 0) taken[count++] = place;
  }
  return count;
}

// A share's programs can cut its file short: the kernel meets that with an error where it reads or
// raises a word for us, and no load or store of ours touches it.
static void wake_places(const char *seats, uint64_t serial) {
  char path[4096];
  void *mapped = NULL;
  unsigned taken[ALLOT_OWN_PLACES];
  const size_t size = offsetof(allot_leases_file, buffers);
  if (allot_seat_path(seats, serial, path, sizeof path) != 0) return;
  int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor < 0) return;
  const unsigned count = taken_places(descriptor, taken);
  if (count > 0 && allot_map(descriptor, size, size, PROT_READ | PROT_WRITE, &mapped) == 0) {
    allot_leases_file *file = mapped;
    const int raise = FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0);
    for (unsigned i = 0; i < count; i++) {
      uint32_t *word = &file->heads[taken[i]].wake;
      syscall(SYS_futex, word, FUTEX_WAKE_OP, INT_MAX, NULL, word, raise);
    }
    munmap(mapped, size);
  }
  close(descriptor);
}

// Wakes whoever waits for a turn, or holds one, to look at the new terms.
static void wake_all(const char *directory, const allot_contract *contract) {
  uint64_t serials[ALLOT_SEATS];
  unsigned count = 0;
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    const allot_contract_seat *promised = &contract->seats[seat];
    if (load(&promised->terms) & ALLOT_TERMS_TAKEN) serials[count++] = load(&promised->serial);
  }
  char seats[SEATS_PATH];
  int folder = open_seats(directory, seats, sizeof seats);
  if (folder < 0) return;
  while (count > 0) wake_places(seats, serials[--count]);
  close(folder);
}

static bool is_promised_too_much(const allot_contract *contract, int changed, uint64_t terms) {
  uint32_t sum = ALLOT_TERMS_GUARANTEE(terms);
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    uint64_t other = contract->seats[seat].terms;
    if (seat != changed && (other & ALLOT_TERMS_TAKEN)) sum += ALLOT_TERMS_GUARANTEE(other);
  }
  return sum > ALLOT_WHOLE;
}

static bool is_valid(uint64_t terms) {
  return ALLOT_TERMS_CEILING(terms) > 0 && ALLOT_TERMS_CEILING(terms) <= ALLOT_WHOLE &&
         ALLOT_TERMS_GUARANTEE(terms) <= ALLOT_TERMS_CEILING(terms) &&
         ALLOT_TERMS_WEIGHT(terms) > 0 && ALLOT_TERMS_WEIGHT(terms) <= ALLOT_WHOLE &&
         ALLOT_TERMS_CLASS(terms) <= ALLOT_CLASS_BESTEFFORT;
}

// Memory that moves from share to share does so with the turns.
#define TAKES_TURNS (ALLOT_TERMS_GOVERNED | ALLOT_TERMS_OVERSUBSCRIBED)

static uint32_t count_governed(const allot_contract *contract) {
  uint32_t governed = 0;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    uint64_t terms = contract->seats[seat].terms;
    if ((terms & ALLOT_TERMS_TAKEN) && (terms & TAKES_TURNS)) governed++;
  }
  return governed;
}

// While the terms change everybody takes turns, so that an agent that dies in the middle leaves no
// terms without effect.
static void put_terms(allot_contract *contract, int seat, uint64_t terms) {
  store(&contract->governed, count_governed(contract) + 1);
  LEASE_STEP("governed");
  store(&contract->seats[seat].terms, terms);
  LEASE_STEP("promised");
  store(&contract->governed, count_governed(contract));
  store(&contract->generation, contract->generation + 1);
  LEASE_STEP("counted");
}

static int create_seat(const char *directory, uint64_t serial) {
  char seats[SEATS_PATH], name[32];
  int folder = open_seats(directory, seats, sizeof seats);
  if (folder < 0) return folder;
  snprintf(name, sizeof name, "%llu", (unsigned long long)serial);
  int error = create_file(seats, name, fresh_seat, SEAT_BEGUN, SEAT_SIZE);
  close(folder);
  return error;
}

static int claim_seat(void *argument) {
  change_work *work = argument;
  allot_contract *contract = work->contract;
  int result = check_head(contract);
  if (result != 0) return result;
  result = is_promised_too_much(contract, -1, work->terms) ? -ERANGE : -ENOSPC;
  for (int seat = 0; seat < (int)ALLOT_SEATS && result == -ENOSPC; seat++) {
    allot_contract_seat *promised = &contract->seats[seat];
    if (promised->terms & ALLOT_TERMS_TAKEN) continue;
    memset(promised->share_id, 0, sizeof promised->share_id);
    strcpy(promised->share_id, work->share_id);
    LEASE_STEP("named");
    work->serial = ++contract->serial;
    LEASE_STEP("numbered");
    store(&promised->serial, work->serial);
    LEASE_STEP("seated");
    result = create_seat(work->directory, work->serial);
    if (result != 0) break;
    put_terms(contract, seat, work->terms | ALLOT_TERMS_TAKEN);
    result = seat;
  }
  if (result >= 0) wake_all(work->directory, contract);
  return result;
}

int allot_contract_take(const char *directory, const char *share_id, uint64_t terms,
                        uint64_t *serial) {
  change_work work = {.directory = directory, .share_id = share_id, .terms = terms};
  if (!is_valid(terms) || strlen(share_id) >= sizeof work.contract->seats[0].share_id) {
    return -EINVAL;
  }
  const int result = with_contract(&work, claim_seat);
  if (result >= 0) *serial = work.serial;
  return result;
}

static void remove_seat(const char *directory, uint64_t serial) {
  char seats[SEATS_PATH], path[4096];
  int folder = open_seats(directory, seats, sizeof seats);
  if (folder < 0) return;
  wake_places(seats, serial);
  if (allot_seat_path(seats, serial, path, sizeof path) == 0) unlink(path);
  close(folder);
}

static int change_seat(void *argument) {
  const change_work *work = argument;
  allot_contract *contract = work->contract;
  const uint64_t terms = work->terms, serial = work->serial;
  int error = check_head(contract);
  if (error != 0) return error;
  const allot_contract_seat *promised = &contract->seats[work->seat];
  if (!(promised->terms & ALLOT_TERMS_TAKEN) || promised->serial != serial) return -ESTALE;
  if ((terms & ALLOT_TERMS_TAKEN) && is_promised_too_much(contract, work->seat, terms)) {
    return -ERANGE;
  }
  put_terms(contract, work->seat, terms);
  wake_all(work->directory, contract);
  // Its programs, if any are left, go on without a seat.
  if (!(terms & ALLOT_TERMS_TAKEN)) remove_seat(work->directory, serial);
  return 0;
}

static int change(const char *directory, int seat, uint64_t serial, uint64_t terms) {
  if (seat < 0 || seat >= (int)ALLOT_SEAT_UNBOOKED) return -EINVAL;
  change_work work = {.directory = directory, .seat = seat, .terms = terms, .serial = serial};
  return with_contract(&work, change_seat);
}

int allot_contract_change(const char *directory, int seat, uint64_t serial, uint64_t terms) {
  return is_valid(terms) ? change(directory, seat, serial, terms | ALLOT_TERMS_TAKEN) : -EINVAL;
}

int allot_contract_free(const char *directory, int seat, uint64_t serial) {
  int error = change(directory, seat, serial, 0);
  return error == -ESTALE ? 0 : error;
}
