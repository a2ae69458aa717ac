// SPDX-License-Identifier: Apache-2.0
// Each share publishes itself, in a file that only it can write. So nothing in such a file is
// believed that concerns another share, except the newest word on who has the lease, and of that
// nothing for long: a share that is harmed by it does without that share.
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
#define COUNTED_NS (100 * 1000000ull)
#define MOST_CALLS 1000u
// A waiter looks every 50 ms: one that has not for so long is stopped, and would waste its turns.
#define SILENT_NS (500 * 1000000ull)
#define MOST_PARTS (2 * ALLOT_SEATS)

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

// Parts of others' files, which are read in this order: one system call for all.
typedef struct reading {
  unsigned count;
  uint8_t seats[MOST_PARTS];
  struct iovec local[MOST_PARTS], remote[MOST_PARTS];
} reading;

static void add_part(const allot_leases *leases, reading *parts, int seat, size_t at, void *to,
                     size_t size) {
  const unsigned i = parts->count++;
  char *file = (char *)(uintptr_t)load(&leases->others[seat].file);
  parts->seats[i] = (uint8_t)seat;
  parts->local[i] = (struct iovec){.iov_base = to, .iov_len = size};
  parts->remote[i] = (struct iovec){.iov_base = file + at, .iov_len = size};
}

static uint64_t bit_of(int seat) {
  return 1ull << seat;
}

// The seats of which a part could not be read.
static uint64_t read_parts(const allot_leases *leases, reading *parts) {
  const pid_t own = parts->count > 0 ? getpid() : 0;  // no system call for a share that is alone
  uint64_t failed = 0;
  for (unsigned i = 0; i < parts->count;) {
    const unsigned left = parts->count - i;
    ssize_t got = process_vm_readv(own, &parts->local[i], left, &parts->remote[i], left, 0);
    bool is_forbidden = got < 0 && errno != EFAULT;
    for (; !is_forbidden && i < parts->count; i++) {
      if (got < (ssize_t)parts->local[i].iov_len) break;
      got -= (ssize_t)parts->local[i].iov_len;
    }
    if (i == parts->count) break;
    const allot_neighbour *other = &leases->others[parts->seats[i]];
    size_t at = (size_t)((char *)parts->remote[i].iov_base - (char *)(uintptr_t)other->file);
    if (!is_forbidden ||
        !read_by_path(leases, other, at, parts->local[i].iov_base, parts->local[i].iov_len)) {
      failed |= bit_of(parts->seats[i]);
    }
    i++;
  }
  return failed;
}

// ---- one neighbour ----

// Where this share's messages are. One that was removed has no seat any more, from some moment on.
static size_t told_at(const allot_leases *leases) {
  return offsetof(allot_leases_file, told) + sizeof(uint32_t) * (unsigned)load(&leases->seat);
}

// Until a process notices that its seat is another share's, that one is a neighbour.
static bool is_own(const allot_leases *leases, int seat) {
  return seat == load(&leases->seat) &&
         load(&leases->contract->seats[seat].serial) == load(&leases->serial);
}

static void forget(allot_neighbour *other) {
  const allot_leases_file *file = other->file;
  store(&other->file, NULL);
  store(&other->is_ignored, false);
  store(&other->told, 0u);
  if (file != NULL) munmap((void *)(uintptr_t)file, sizeof *file);
  other->facts = (allot_seat_facts){0};
  other->serial = other->skipped_ns = other->ended_root = other->distrusted_ns = 0;
  other->counted_ns = other->delayed_ns = 0;
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

static bool is_place(const allot_place_state *published) {
  return published->state <= ALLOT_PLACE_HOLDING && published->slot < ALLOT_OWN_PLACES;
}

// No word of a time to come, or of places that cannot be.
static bool is_sound(const allot_neighbour *other, uint64_t now) {
  const allot_seat_facts *facts = &other->facts;
  return facts->account.serial == other->serial && facts->epoch <= now + CLOCKS_DIFFER_NS &&
         facts->holder_seat >= -1 && facts->holder_seat < (int)ALLOT_SEATS &&
         facts->holder_slot < ALLOT_OWN_PLACES && is_place(&facts->first) &&
         is_place(&facts->holding);
}

// What each of the seats told us first: a word that comes after this is heard by neighbours_sleep.
static uint64_t read_heads(allot_leases *leases, uint64_t seats) {
  reading parts = {.count = 0};
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (!(seats & bit_of(seat))) continue;
    allot_neighbour *other = &leases->others[seat];
    add_part(leases, &parts, seat, told_at(leases), &other->new_told, sizeof other->new_told);
    add_part(leases, &parts, seat, offsetof(allot_leases_file, root), &other->new_root,
             sizeof other->new_root);
  }
  return read_parts(leases, &parts);
}

static uint64_t read_facts(allot_leases *leases, uint64_t seats) {
  reading parts = {.count = 0};
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (!(seats & bit_of(seat))) continue;
    allot_neighbour *other = &leases->others[seat];
    const size_t at = offsetof(allot_leases_file, buffers) +
                      sizeof(allot_seat_buffer) * ALLOT_ROOT_BUFFER(other->new_root) +
                      offsetof(allot_seat_buffer, facts);
    add_part(leases, &parts, seat, 0, &other->mark, sizeof other->mark);
    add_part(leases, &parts, seat, at, &other->new_facts, sizeof other->new_facts);
  }
  return read_parts(leases, &parts);
}

static bool is_buffer(unsigned number) {
  return number < ALLOT_OWN_PLACES * 2;
}

static bool has_news(allot_neighbour *other) {
  if (other->new_root != other->facts.root) return true;
  store(&other->told, other->new_told);
  return false;
}

static bool take_over(allot_neighbour *other, uint64_t now) {
  if (other->mark.magic != ALLOT_SEAT_MAGIC || other->mark.version != ALLOT_SEAT_VERSION) {
    return false;
  }
  store(&other->told, other->new_told);
  other->facts = other->new_root == 0 ? (allot_seat_facts){0} : other->new_facts;
  return other->new_root == 0 || is_sound(other, now);  // 0: no process of it has begun
}

// Reads what these seats have published since: those of them that are damaged.
static uint64_t refresh_facts(allot_leases *leases, uint64_t seats, uint64_t now) {
  uint64_t damaged = 0;
  // Those that change all the time: what was known of them will do.
  for (int attempt = 0; attempt < ATTEMPTS && seats != 0; attempt++) {
    damaged |= read_heads(leases, seats);
    seats &= ~damaged;
    for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
      if ((seats & bit_of(seat)) && !has_news(&leases->others[seat])) seats &= ~bit_of(seat);
      const uint64_t root = leases->others[seat].new_root;
      if ((seats & bit_of(seat)) && !is_buffer(ALLOT_ROOT_BUFFER(root))) damaged |= bit_of(seat);
    }
    seats &= ~damaged;
    if (seats == 0) break;
    damaged |= read_facts(leases, seats);
    seats &= ~damaged;
    for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
      allot_neighbour *other = &leases->others[seat];
      if (!(seats & bit_of(seat))) continue;
      if (other->new_root != 0 && other->new_facts.root != other->new_root) continue;
      if (!take_over(other, now)) damaged |= bit_of(seat);
      seats &= ~bit_of(seat);
    }
  }
  return damaged;
}

static void note_distrust(const allot_leases *leases, int seat, bool is_distrusted) {
  uint64_t bit = bit_of(seat), seen = load(&leases->file->distrusted);
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
      descriptor >= 0 && allot_slot_any_owned(descriptor, ALLOT_LIFE_LOCK_BASE + first, count);
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

// Each message wakes this process. No turns need so many.
static bool calls_too_often(allot_neighbour *other, uint64_t now) {
  if (now >= other->counted_ns + COUNTED_NS) {
    other->counted_ns = now;
    other->counted = other->told;
  }
  return other->told - other->counted > MOST_CALLS;
}

static void refresh(allot_leases *leases, uint64_t now) {
  uint64_t seats = 0;
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    if (is_own(leases, seat)) continue;
    const allot_contract_seat *promised = &leases->contract->seats[seat];
    bool is_taken = (load(&promised->terms) & ALLOT_TERMS_TAKEN) != 0;
    meet(leases, seat, is_taken ? load(&promised->serial) : 0);
    if (leases->others[seat].file != NULL) seats |= bit_of(seat);
  }
  const uint64_t damaged = refresh_facts(leases, seats, now);
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    if (!(seats & bit_of(seat))) continue;
    allot_neighbour *other = &leases->others[seat];
    const bool is_damaged = (damaged & bit_of(seat)) != 0;
    if (is_damaged) other->facts.root = 0;
    if ((is_damaged || calls_too_often(other, now)) && now >= other->distrusted_ns) {
      neighbours_distrust(leases, seat, now);
    }
    const bool is_distrusted = now < other->distrusted_ns;
    store(&other->is_ignored, is_damaged || is_distrusted);
    note_distrust(leases, seat, is_distrusted);
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

static bool is_same_lease(const word *a, const word *b) {
  return a->epoch == b->epoch && a->seat == b->seat && a->slot == b->slot;
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

static bool loses(const allot_lease_state *state, const word *newest) {
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
  // It has places, so no other process is alone.
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

// The place that the word names, which holds from then on; -1: none.
static int seat_holder(const allot_leases *leases, allot_lease_state *state, const word *newest) {
  if (newest->seat < 0) return -1;
  int first = newest->names_us ? (int)newest->slot : (int)ALLOT_PLACES_OF(newest->seat);
  int last = newest->names_us ? first : first + 1;
  for (int place = first; place <= last; place++) {
    allot_place_state *named = &state->places[place];
    if (named->state < ALLOT_PLACE_WAITING) continue;
    if (!newest->names_us && named->slot != newest->slot) continue;
    if (newest->names_us && named->state == ALLOT_PLACE_WAITING) {
      allot_seat_state *account = &state->seats[leases->seat];
      account->leases++;
      account->move_ns = 0;
    }
    named->state = ALLOT_PLACE_HOLDING;
    return place;
  }
  return -1;
}

void neighbours_merge(allot_leases *leases, allot_lease_state *state, uint64_t now_ns) {
  refresh(leases, now_ns);
  word newest = newest_word(leases, state, now_ns);
  while (loses(state, &newest) && is_robbery(leases, state, &newest)) {
    neighbours_distrust(leases, newest.author, now_ns);
    newest = newest_word(leases, state, now_ns);
  }
  if (loses(state, &newest)) {
    allot_place_state *loser = &state->places[state->holder];
    if (leases->is_settling) {
      // Its process does not know that it had the lease.
      loser->state = ALLOT_PLACE_WAITING;
      state->seats[leases->seat].leases--;
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
  uint64_t roots[ALLOT_SEATS];
  reading parts = {.count = 0};
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    if (is_own(leases, seat) || leases->others[seat].file == NULL) continue;
    add_part(leases, &parts, seat, offsetof(allot_leases_file, root), &roots[seat], sizeof *roots);
  }
  const uint64_t failed = read_parts(leases, &parts);
  for (unsigned i = 0; i < parts.count; i++) {
    const int seat = parts.seats[i];
    if (failed & bit_of(seat)) continue;
    if (roots[seat] != 0 && roots[seat] != leases->others[seat].facts.root) return true;
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
    allot_place_state published = state->places[place];
    published.slot = (uint8_t)place;
    if (published.state == ALLOT_PLACE_FREE) continue;
    facts->taken++;
    if (published.state == ALLOT_PLACE_HOLDING) facts->holding = published;
    if (published.state != ALLOT_PLACE_WAITING) continue;
    facts->waiting++;
    if (facts->first.state == ALLOT_PLACE_FREE || published.since_ns < facts->first.since_ns) {
      facts->first = published;
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
  const allot_place_state *wanted = &state->places[place];
  size_t at = offsetof(allot_leases_file, heads) + sizeof *head * (wanted->slot % ALLOT_OWN_PLACES);
  const int seat = wanted->seat % (int)ALLOT_SEATS;
  reading parts = {.count = 0};
  if (leases->others[seat].file == NULL) return false;
  add_part(leases, &parts, seat, at, head, sizeof *head);
  return read_parts(leases, &parts) == 0;
}

// Can the words be read that the others raise for this share? Another thread may be changing what
// is known of them meanwhile: then it also raises our own word.
static bool speaks(const allot_leases *leases, int seat) {
  const allot_neighbour *other = &leases->others[seat];
  return !is_own(leases, seat) && load(&other->file) != NULL && !load(&other->is_ignored);
}

bool neighbours_called(const allot_leases *leases) {
  uint32_t seen[ALLOT_SEATS];
  reading parts = {.count = 0};
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    if (!speaks(leases, seat)) continue;
    add_part(leases, &parts, seat, told_at(leases), &seen[seat], sizeof *seen);
  }
  if (parts.count == 0) return false;
  const uint64_t failed = read_parts(leases, &parts);
  for (unsigned i = 0; i < parts.count && failed == 0; i++) {
    if (seen[parts.seats[i]] != load(&leases->others[parts.seats[i]].told)) return true;
  }
  return failed != 0;
}

int neighbours_sleep(const allot_leases *leases, uint32_t ticket, const struct timespec *until) {
  struct futex_waitv words[ALLOT_SEATS];
  unsigned count = 0;
  const uint32_t *own = &leases->file->heads[leases->place].wake;
  words[count++] =
      (struct futex_waitv){.val = ticket, .uaddr = (uint64_t)(uintptr_t)own, .flags = FUTEX_32};
  for (int seat = 0; seat < (int)ALLOT_SEAT_UNBOOKED; seat++) {
    if (!speaks(leases, seat)) continue;
    const allot_neighbour *other = &leases->others[seat];
    const char *word = (const char *)load(&other->file) + told_at(leases);
    words[count++] = (struct futex_waitv){
        .val = load(&other->told), .uaddr = (uint64_t)(uintptr_t)word, .flags = FUTEX_32};
  }
  return syscall(SYS_futex_waitv, words, count, 0, until, CLOCK_MONOTONIC) < 0 ? -errno : 0;
}

void neighbours_close(allot_leases *leases) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) forget(&leases->others[seat]);
}
