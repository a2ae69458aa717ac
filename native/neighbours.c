// SPDX-License-Identifier: Apache-2.0
// Each share publishes itself, in a file that only it can write. So nothing in such a file is
// believed that concerns another share, except the newest word on who has the lease, and of that
// nothing for long: whoever is harmed by it does without that share.
//
// The files are mapped for their addresses alone (futexes need them). What is read is copied by the
// kernel, which answers with an error where a page is gone.
#include "neighbours.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "mapping.h"
#include "slots.h"

#define DISTRUST_NS (10000 * 1000000ull)
#define MOST_DOUBLINGS 6
#define LONGEST_DEBT_NS (3600000 * 1000000ll)
#define ATTEMPTS 3
// A waiter looks every 50 ms: one that has not for so long is stopped, and would waste its turns.
#define SILENT_NS (500 * 1000000ull)
#define MOST_PARTS 3

#define load(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define store(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)

// ---- reading what may go away ----

static int open_file(const allot_leases *leases, uint64_t serial) {
  char path[1200];
  if (allot_seat_path(leases->seats_path, serial, path, sizeof path) != 0) return -1;
  return open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
}

// Where a sandbox forbids the first way.
static bool read_by_path(const allot_leases *leases, const allot_neighbour *other, size_t at,
                         void *to, size_t size) {
  int descriptor = open_file(leases, other->serial);
  if (descriptor < 0) return false;
  bool done = pread(descriptor, to, size, (off_t)at) == (ssize_t)size;
  close(descriptor);
  return done;
}

typedef struct piece {
  size_t at, size;
  void *to;
} piece;

// In that order.
static bool read_parts(const allot_leases *leases, const allot_neighbour *other, const piece *parts,
                       unsigned count) {
  struct iovec here[MOST_PARTS], there[MOST_PARTS];
  size_t size = 0;
  if (other->file == NULL || count > MOST_PARTS) return false;
  for (unsigned i = 0; i < count; i++) {
    here[i] = (struct iovec){.iov_base = parts[i].to, .iov_len = parts[i].size};
    there[i] = (struct iovec){.iov_base = (char *)(uintptr_t)other->file + parts[i].at,
                              .iov_len = parts[i].size};
    size += parts[i].size;
  }
  ssize_t got = process_vm_readv(getpid(), here, count, there, count, 0);
  if (got >= 0 || errno == EFAULT) return got == (ssize_t)size;
  for (unsigned i = 0; i < count; i++) {
    if (!read_by_path(leases, other, parts[i].at, parts[i].to, parts[i].size)) return false;
  }
  return true;
}

static bool read_part(const allot_leases *leases, const allot_neighbour *other, size_t at, void *to,
                      size_t size) {
  const piece one = {at, size, to};
  return read_parts(leases, other, &one, 1);
}

// ---- one neighbour ----

// Until a process notices that its seat is another share's, that one is a neighbour.
static bool is_own(const allot_leases *leases, int seat) {
  return seat == leases->seat && load(&leases->contract->seats[seat].serial) == leases->serial;
}

static void forget(allot_neighbour *other) {
  const allot_leases_file *file = other->file;
  store(&other->file, NULL);
  store(&other->is_damaged, false);
  store(&other->told, 0u);
  if (file != NULL) munmap((void *)(uintptr_t)file, sizeof *file);
  other->facts = (allot_seat_facts){0};
  other->serial = other->skipped_ns = other->ended_root = other->distrusted_ns = 0;
  other->suspicions = 0;
}

// The file of a seat that changed hands is another one.
static void meet(allot_leases *leases, int seat, uint64_t serial) {
  allot_neighbour *other = &leases->others[seat];
  if (other->serial == serial) return;
  forget(other);
  other->serial = serial;
  struct stat status;
  void *mapped = NULL;
  int descriptor = serial == 0 ? -1 : open_file(leases, serial);
  if (descriptor < 0) return;
  if (fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) &&
      allot_map(descriptor, sizeof *other->file, 0, PROT_READ, &mapped) == 0) {
    store(&other->file, mapped);
  }
  close(descriptor);
}

static bool is_place(const allot_place_state *one) {
  return one->state <= ALLOT_PLACE_HOLDING && one->slot < ALLOT_OWN_PLACES;
}

// No word of a time to come, or of places that cannot be.
static bool is_sound(const allot_neighbour *other, uint64_t now) {
  const allot_seat_facts *facts = &other->facts;
  return facts->account.serial == other->serial && facts->epoch <= now + CLOCKS_DIFFER_NS &&
         facts->holder_seat >= -1 && facts->holder_seat < (int)ALLOT_SEATS &&
         facts->holder_slot < ALLOT_OWN_PLACES && is_place(&facts->first) &&
         is_place(&facts->holding);
}

static bool refresh_facts(const allot_leases *leases, allot_neighbour *other, uint64_t now) {
  for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
    char head[sizeof(uint64_t) + sizeof(uint32_t)];
    uint32_t told, version;
    uint64_t magic, root;
    // What it told us first: a word that comes after this is heard by neighbours_sleep.
    const piece start[MOST_PARTS] = {
        {offsetof(allot_leases_file, told) + sizeof told * (unsigned)leases->seat, sizeof told,
         &told},
        {offsetof(allot_leases_file, root), sizeof root, &root},
        {0, sizeof magic + sizeof version, head},
    };
    if (!read_parts(leases, other, start, MOST_PARTS)) return false;
    memcpy(&magic, head, sizeof magic);
    memcpy(&version, head + sizeof magic, sizeof version);
    if (magic != ALLOT_SEAT_MAGIC || version != ALLOT_SEAT_VERSION) return false;
    if (root == 0) other->facts.root = 0;  // nobody of it has begun
    if (root == other->facts.root) {
      store(&other->told, told);
      return true;
    }
    unsigned buffer = ALLOT_ROOT_BUFFER(root);
    if (buffer >= ALLOT_OWN_PLACES * 2) return false;
    size_t at = offsetof(allot_leases_file, buffers) + sizeof(allot_seat_buffer) * buffer +
                offsetof(allot_seat_buffer, facts);
    allot_seat_facts facts;
    if (!read_part(leases, other, at, &facts, sizeof facts)) return false;
    if (facts.root != root) continue;
    store(&other->told, told);
    other->facts = facts;
    return is_sound(other, now);
  }
  return true;  // it changes all the time: what was known of it will do
}

static void note_distrust(const allot_leases *leases, int seat, bool is_distrusted) {
  uint64_t bit = 1ull << seat, seen = load(&leases->file->distrusted);
  if (((seen & bit) != 0) == is_distrusted) return;
  if (is_distrusted) {
    __atomic_or_fetch(&leases->file->distrusted, bit, __ATOMIC_SEQ_CST);
  } else {
    __atomic_and_fetch(&leases->file->distrusted, ~bit, __ATOMIC_SEQ_CST);
  }
}

static bool any_lives(const allot_leases *leases, uint64_t serial, int64_t first, int count) {
  int descriptor = open_file(leases, serial);
  bool lives =
      descriptor >= 0 && allot_slot_any_owned(descriptor, ALLOT_PLACE_LOCK_BASE + first, count);
  if (descriptor >= 0) close(descriptor);
  return lives;
}

bool neighbours_place_is_dead(const allot_leases *leases, const allot_place_state *place) {
  return !any_lives(leases, leases->others[place->seat % ALLOT_SEATS].serial, place->slot, 1);
}

void neighbours_look_for_dead(allot_leases *leases) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    allot_neighbour *other = &leases->others[seat];
    if (other->facts.root == 0 || other->facts.taken == 0) continue;
    if (other->ended_root == other->facts.root) continue;
    if (!any_lives(leases, other->serial, 0, (int)ALLOT_OWN_PLACES)) {
      other->ended_root = other->facts.root;
    }
  }
}

void neighbours_distrust(allot_leases *leases, int seat, uint64_t now_ns) {
  if (seat < 0 || seat >= (int)ALLOT_SEATS) return;
  allot_neighbour *other = &leases->others[seat];
  other->distrusted_ns = now_ns + (DISTRUST_NS << other->suspicions);
  if (other->suspicions < MOST_DOUBLINGS) other->suspicions++;
  note_distrust(leases, seat, true);
}

static bool is_believed(const allot_leases *leases, int seat, uint64_t now) {
  const allot_neighbour *other = &leases->others[seat];
  return other->facts.root != 0 && now >= other->distrusted_ns;
}

static void refresh(allot_leases *leases, uint64_t now) {
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    if (is_own(leases, seat)) continue;
    const allot_contract_seat *promised = &leases->contract->seats[seat];
    bool is_taken = (load(&promised->terms) & ALLOT_TERMS_TAKEN) != 0;
    allot_neighbour *other = &leases->others[seat];
    meet(leases, seat, is_taken ? load(&promised->serial) : 0);
    if (other->file == NULL) continue;
    store(&other->is_damaged, !refresh_facts(leases, other, now));
    if (other->is_damaged) other->facts.root = 0;
    if (other->is_damaged && now >= other->distrusted_ns) neighbours_distrust(leases, seat, now);
    note_distrust(leases, seat, now < other->distrusted_ns);
  }
}

// ---- the newest word on the lease ----

typedef struct word {
  int author;  // -1: this share
  int seat;    // of the holder, or -1
  unsigned slot;
  bool names_us;
  uint64_t epoch, granted_ns, expires_ns;
} word;

static word own_word(const allot_leases *leases, const allot_lease_state *state) {
  word own = {.author = -1,
              .seat = -1,
              .epoch = state->epoch,
              .granted_ns = state->granted_ns,
              .expires_ns = state->expires_ns};
  if (state->holder < 0 || state->holder >= (int)ALLOT_PLACES) return own;
  own.names_us = state->holder < (int)ALLOT_OWN_PLACES;
  own.seat = own.names_us ? leases->seat : state->places[state->holder].seat;
  own.slot = own.names_us ? (unsigned)state->holder : state->places[state->holder].slot;
  return own;
}

static word word_of(const allot_leases *leases, int seat) {
  const allot_seat_facts *facts = &leases->others[seat].facts;
  return (word){.author = seat,
                .seat = facts->holder_seat,
                .slot = facts->holder_slot,
                .names_us = facts->holder_seat >= 0 && is_own(leases, facts->holder_seat),
                .epoch = facts->epoch,
                .granted_ns = facts->granted_ns,
                .expires_ns = facts->expires_ns};
}

// Of equally new words those of the seat with the lower number count, for all.
static bool precedes(const allot_leases *leases, int author, int seat) {
  return (author < 0 ? leases->seat : author) < seat;
}

static bool is_same_lease(const word *one, const word *other) {
  return one->epoch == other->epoch && one->seat == other->seat && one->slot == other->slot;
}

static word newest_word(const allot_leases *leases, const allot_lease_state *state, uint64_t now) {
  const word own = own_word(leases, state);
  word newest = own;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (is_own(leases, seat) || !is_believed(leases, seat, now)) continue;
    const word other = word_of(leases, seat);
    if (other.epoch < newest.epoch) continue;
    if (other.epoch == newest.epoch && precedes(leases, newest.author, seat)) continue;
    newest = other;
  }
  // Until when it has the lease, the holder knows: it may have prolonged it since.
  if (newest.names_us) return is_same_lease(&own, &newest) ? own : newest;
  if (newest.seat < 0 || !is_believed(leases, newest.seat, now)) return newest;
  const word holders = word_of(leases, newest.seat);
  return is_same_lease(&holders, &newest) ? holders : newest;
}

// Was the lease taken from a place of ours that showed signs of life and did not run over? Who
// decided before our claim was to be seen did not know better.
static bool is_robbery(const allot_leases *leases, const allot_lease_state *state,
                       const word *newest) {
  if (leases->seat == (int)ALLOT_SEAT_UNBOOKED) return false;
  const allot_place_head *own = &leases->file->heads[state->holder];
  uint64_t beat = load(&own->beat_ns), claimed = load(&leases->file->claimed_ns);
  if (beat < state->granted_ns) beat = state->granted_ns;
  bool was_silent = beat + ALLOT_STOPPED_NS <= newest->epoch ||
                    newest->epoch <= load(&own->silent_ns) + OVERRUN_NS;
  bool was_long = state->next >= 0 && newest->epoch > state->granted_ns + OVERRUN_NS;
  return !was_silent && !was_long && newest->epoch > claimed + ALLOT_STOPPED_NS;
}

static bool loses(const allot_leases *leases, const allot_lease_state *state, const word *newest) {
  return newest->author >= 0 && state->holder >= 0 && state->holder < (int)ALLOT_OWN_PLACES &&
         state->places[state->holder].state == ALLOT_PLACE_HOLDING &&
         !(newest->names_us && newest->slot == (unsigned)state->holder);
}

// ---- the state ----

// What its ceiling allows is as of when it was published; the core adds for the time since our last
// decision.
static void import_account(const allot_leases *leases, allot_lease_state *state, int seat) {
  const allot_seat_facts *facts = &leases->others[seat].facts;
  allot_seat_state *account = &state->seats[seat];
  *account = facts->account;
  uint64_t terms = load(&leases->contract->seats[seat].terms);
  int64_t ahead = (int64_t)(state->now_ns - facts->now_ns);
  if (state->now_ns == 0 || ahead > LONGEST_DEBT_NS || ahead < -LONGEST_DEBT_NS) return;
  if (account->budget_ns > LONGEST_DEBT_NS || account->budget_ns < -LONGEST_DEBT_NS) return;
  account->budget_ns += ahead / (int64_t)ALLOT_WHOLE * (int64_t)ALLOT_TERMS_CEILING(terms);
}

static void import_places(const allot_leases *leases, allot_lease_state *state, int seat,
                          uint64_t now) {
  const allot_neighbour *other = &leases->others[seat];
  const allot_seat_facts *facts = &other->facts;
  allot_place_state *places = &state->places[ALLOT_PLACES_OF(seat)];
  if (other->ended_root == facts->root) return;
  places[0] = facts->holding;
  places[1] = facts->first;
  bool is_silent = now > facts->now_ns + SILENT_NS;
  if (facts->first.state == ALLOT_PLACE_WAITING &&
      (is_silent || facts->first.since_ns == other->skipped_ns)) {
    places[1].state = ALLOT_PLACE_IDLE;
  }
  // It has places, so nobody else is alone.
  if (facts->taken > 0 && places[0].state == ALLOT_PLACE_FREE &&
      places[1].state == ALLOT_PLACE_FREE) {
    places[0].state = ALLOT_PLACE_IDLE;
  }
  for (int i = 0; i < 2; i++) {
    places[i].seat = (uint16_t)seat;
    places[i].serial = (uint32_t)other->serial;
  }
}

static void import(const allot_leases *leases, allot_lease_state *state, uint64_t now) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (is_own(leases, seat)) continue;
    memset(&state->places[ALLOT_PLACES_OF(seat)], 0, 2 * sizeof(allot_place_state));
    if (!is_believed(leases, seat, now)) continue;
    import_account(leases, state, seat);
    import_places(leases, state, seat, now);
    uint64_t begin = leases->others[seat].facts.virtual_ns;
    if (state->virtual_ns < begin) state->virtual_ns = begin;
  }
}

// The place that the word names, which holds from then on; -1: nobody does.
static int seat_holder(const allot_leases *leases, allot_lease_state *state, const word *newest) {
  if (newest->seat < 0) return -1;
  int first = newest->names_us ? (int)newest->slot : (int)ALLOT_PLACES_OF(newest->seat);
  int last = newest->names_us ? first : first + 1;
  for (int place = first; place <= last; place++) {
    allot_place_state *one = &state->places[place];
    if (one->state < ALLOT_PLACE_WAITING) continue;
    if (!newest->names_us && one->slot != newest->slot) continue;
    if (newest->names_us && one->state == ALLOT_PLACE_WAITING) {
      allot_seat_state *account = &state->seats[leases->seat];
      account->leases++;
      account->move_ns = 0;
    }
    one->state = ALLOT_PLACE_HOLDING;
    return place;
  }
  return -1;
}

void neighbours_merge(allot_leases *leases, allot_lease_state *state, uint64_t now_ns) {
  refresh(leases, now_ns);
  word newest = newest_word(leases, state, now_ns);
  while (loses(leases, state, &newest) && is_robbery(leases, state, &newest)) {
    neighbours_distrust(leases, newest.author, now_ns);
    newest = newest_word(leases, state, now_ns);
  }
  if (loses(leases, state, &newest)) {
    allot_place_state *loser = &state->places[state->holder];
    if (leases->is_settling) {
      loser->state = ALLOT_PLACE_WAITING;  // its process was not told that it has the lease
    } else {
      loser->state = ALLOT_PLACE_IDLE;
      state->seats[leases->seat].evictions++;
    }
  }
  import(leases, state, now_ns);
  leases->author = newest.author;
  state->epoch = newest.epoch;
  state->granted_ns = newest.granted_ns;
  state->expires_ns = newest.expires_ns;
  state->holder = seat_holder(leases, state, &newest);
}

bool neighbours_moved(const allot_leases *leases) {
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    const allot_neighbour *other = &leases->others[seat];
    uint64_t root;
    if (is_own(leases, seat) || other->file == NULL) continue;
    if (read_part(leases, other, offsetof(allot_leases_file, root), &root, sizeof root) &&
        root != other->facts.root && root != 0) {
      return true;
    }
  }
  return false;
}

void neighbours_publish(const allot_leases *leases, allot_seat_buffer *buffer, uint64_t root) {
  const allot_lease_state *state = &buffer->state;
  word own = own_word(leases, state);
  allot_seat_facts *facts = &buffer->facts;
  *facts = (allot_seat_facts){.account = state->seats[leases->seat],
                              .now_ns = state->now_ns,
                              .virtual_ns = state->virtual_ns,
                              .epoch = own.epoch,
                              .granted_ns = own.granted_ns,
                              .expires_ns = own.expires_ns,
                              .holder_seat = own.seat,
                              .holder_slot = own.slot};
  for (unsigned place = 0; place < ALLOT_OWN_PLACES; place++) {
    allot_place_state one = state->places[place];
    one.slot = (uint8_t)place;
    if (one.state == ALLOT_PLACE_FREE) continue;
    facts->taken++;
    if (one.state == ALLOT_PLACE_HOLDING) facts->holding = one;
    if (one.state != ALLOT_PLACE_WAITING) continue;
    facts->waiting++;
    if (facts->first.state == ALLOT_PLACE_FREE || one.since_ns < facts->first.since_ns) {
      facts->first = one;
    }
  }
  facts->root = root;
}

bool neighbours_head(const allot_leases *leases, const allot_lease_state *state, int place,
                     allot_place_head *head) {
  if (place < (int)ALLOT_OWN_PLACES) {
    const allot_place_head *own = &leases->file->heads[place];
    *head = (allot_place_head){.beat_ns = load(&own->beat_ns),
                               .busy = load(&own->busy),
                               .running_ns = load(&own->running_ns)};
    return true;
  }
  const allot_place_state *one = &state->places[place];
  size_t at = offsetof(allot_leases_file, heads) + sizeof *head * (one->slot % ALLOT_OWN_PLACES);
  return read_part(leases, &leases->others[one->seat % ALLOT_SEATS], at, head, sizeof *head);
}

int neighbours_sleep(const allot_leases *leases, uint32_t ticket, const struct timespec *until) {
  struct futex_waitv words[ALLOT_SEATS];
  unsigned count = 0;
  const uint32_t *own = &leases->file->heads[leases->place].wake;
  words[count++] =
      (struct futex_waitv){.val = ticket, .uaddr = (uint64_t)(uintptr_t)own, .flags = FUTEX_32};
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    const allot_neighbour *other = &leases->others[seat];
    // Another thread of this process may be changing them: then it also raises our own word.
    const allot_leases_file *file = load(&other->file);
    if (is_own(leases, seat) || file == NULL || load(&other->is_damaged)) continue;
    words[count++] = (struct futex_waitv){.val = load(&other->told),
                                          .uaddr = (uint64_t)(uintptr_t)&file->told[leases->seat],
                                          .flags = FUTEX_32};
  }
  long woken = syscall(SYS_futex_waitv, words, count, 0, until, CLOCK_MONOTONIC);
  return woken >= 0 ? woken > 0 : -errno;
}

void neighbours_close(allot_leases *leases) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) forget(&leases->others[seat]);
}
