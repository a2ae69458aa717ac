// SPDX-License-Identifier: Apache-2.0
// Leases between processes: each decision of lease_core.c becomes one compare-and-swap.
//
// A process copies its share's state in force into a state of its own place, takes over what the
// other shares publish (neighbours.h), lets the core change the copy, and swaps the file's root to
// name it. If another process was faster, the swap fails, and all is done again from the newer
// state. No process ever holds anything that another waits for, so a process may be killed or
// stopped at any instruction; docs/designs/compute.md has the argument.
#include "lease.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "lease_places.h"
#include "mapping.h"
#include "neighbours.h"

// A holder of our share that does not answer for so long is asked for: is it dead?
#define DEAD_NS (2 * MILLISECOND)
#define LONGEST_OVERRUN_NS (10000 * MILLISECOND)
// Who is not next looks at the others only so often.
#define PATIENCE_NS (20 * MILLISECOND)
#define LONGEST_SLEEP_NS (50 * MILLISECOND)
#define DEAF_NS MILLISECOND
#define LOOKS 8
#define REAP_NS (1000 * MILLISECOND)
// Others keep their queues short for so long after a latency share's last work.
#define LATENCY_NS (1000 * MILLISECOND)
// Who is owed something waits no longer than this, and the turns of the others that make up its
// own.
#define STARVED_NS (10000 * MILLISECOND)
#define TURNS_NS (40 * MILLISECOND)
// A share that gets less than one part in so many of its fraction is robbed.
#define FAIR_PARTS 4u
#define LONGEST_EXPLAINED_NS (600000ull * MILLISECOND)
#define SHORT_GAP_PARTS 8u
// As in lease_core.c: what a share that spent its budget waits for.
#define PIECE_NS (2 * MILLISECOND)

_Static_assert(ALLOT_OWN_PLACES * 2 <= 0x10000 && ALLOT_PLACES < 0xffff, "they fit into the root");
_Static_assert(ALLOT_PLACES_OF(ALLOT_SEAT_UNBOOKED) <= ALLOT_PLACES, "each seat has two");
_Static_assert(sizeof(allot_lease_state) % 8 == 0, "states are copied by words");

// ---- the root ----

#define ROOT_VERSION_SHIFT 33

static uint64_t next_root(uint64_t root, unsigned buffer, const allot_lease_state *state) {
  uint64_t version = (root >> ROOT_VERSION_SHIFT) + 1;
  return version << ROOT_VERSION_SHIFT | (uint64_t)(state->next >= 0) << 32 |
         (uint64_t)buffer << 16 | (uint64_t)(uint32_t)(state->holder + 1);
}

// Other processes may write the source meanwhile; the root tells afterwards.
__attribute__((no_sanitize("thread"))) static void copy_words(void *to, const void *from,
                                                              size_t size) {
  uint64_t *target = to;
  const uint64_t *source = from;
  for (size_t i = 0; i < size / sizeof *target; i++) {
    target[i] = __atomic_load_n(&source[i], __ATOMIC_RELAXED);
  }
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

static const allot_seat_buffer *buffer_of(const allot_leases *leases, uint64_t root) {
  return &leases->file->buffers[ALLOT_ROOT_BUFFER(root) % (ALLOT_OWN_PLACES * 2)];
}

// The root whose state was copied.
uint64_t lease_read_state(const allot_leases *leases, allot_lease_state *state) {
  for (;;) {
    uint64_t root = load(&leases->file->root);
    LEASE_STEP("reading");
    copy_words(state, &buffer_of(leases, root)->state, sizeof *state);
    if (load(&leases->file->root) == root) return root;
  }
}

// ---- messages ----

static void wake(const allot_leases *leases, const allot_lease_state *state, int place) {
  if (place < 0 || place >= (int)ALLOT_PLACES) return;
  uint32_t *word = place < (int)ALLOT_OWN_PLACES
                       ? &leases->file->heads[place].wake
                       : &leases->file->told[state->places[place].seat % ALLOT_SEATS];
  __atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void allot_lease_wake_own(const allot_leases *leases) {
  wake(leases, NULL, leases->place);
}

bool allot_lease_is_called(const allot_leases *leases) {
  return neighbours_called(leases);
}

void allot_lease_sleep(const allot_leases *leases, uint32_t ticket, uint64_t until_ns) {
  const uint64_t now = now_ns();
  if (until_ns <= now) return;
  struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u),
                           .tv_nsec = (long)(until_ns % 1000000000u)};
  int error = neighbours_sleep(leases, ticket, &until);
  if (error != -ENOSYS && error != -EPERM && error != -EFAULT) return;
  // A file that was cut short, or a kernel before 5.16: others are heard at the next look.
  uint64_t left = until_ns - now < DEAF_NS ? until_ns - now : DEAF_NS;
  struct timespec patience = {.tv_nsec = (long)left};
  syscall(SYS_futex, &leases->file->heads[leases->place].wake, FUTEX_WAIT, ticket, &patience, NULL,
          0);
}

// ---- one decision ----

typedef struct outcome {
  uint64_t old_root, root;
  uint64_t old_epoch;
  allot_lease_state *state;  // the one in force, until the next
  bool concerns_others;      // another process has the lease, or waits
} outcome;

// The core credits the share that lent its time; the others keep their accounts themselves.
static void note_lent(allot_seat_buffer *draft, const uint64_t before[ALLOT_SEATS]) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    const allot_seat_state *lender = &draft->state.seats[seat];
    if (lender->lent_ns <= before[seat]) continue;
    if (draft->lent[seat].serial != lender->serial) {
      draft->lent[seat] = (allot_lent){.serial = lender->serial};
    }
    draft->lent[seat].lent_ns += lender->lent_ns - before[seat];
  }
}

// From what the shares publish to what this one publishes next.
static void change_state(allot_leases *leases, allot_seat_buffer *draft, const allot_event *events,
                         int count) {
  allot_lease_state *state = &draft->state;
  neighbours_merge(leases, state, events[0].now_ns);
  LEASE_STEP("merged");
  const uint64_t epoch = state->epoch;
  const int holder = state->holder;
  uint64_t lent[ALLOT_SEATS];
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) lent[seat] = state->seats[seat].lent_ns;
  for (int i = 0; i < count; i++) allot_lease_decide(state, leases->contract, &events[i]);
  if (state->epoch != epoch || state->holder != holder) {
    // The newest word counts: later than all that were known.
    state->epoch = epoch < state->now_ns ? state->now_ns : epoch + 1;
    leases->author = -1;
  }
  lent[leases->seat] = UINT64_MAX;
  note_lent(draft, lent);
}

static outcome decide(allot_leases *leases, const allot_event *events, int count) {
  allot_leases_file *file = leases->file;
  for (;;) {
    uint64_t root = load(&file->root);
    // Never the one in force: others may be reading it.
    unsigned buffer = (unsigned)leases->place * 2;
    if (ALLOT_ROOT_BUFFER(root) == buffer) buffer++;
    allot_seat_buffer *draft = &file->buffers[buffer];
    copy_words(draft->lent, buffer_of(leases, root)->lent, sizeof draft->lent);
    copy_words(&draft->state, &buffer_of(leases, root)->state, sizeof draft->state);
    LEASE_STEP("copied");
    if (load(&file->root) != root) continue;
    outcome done = {.old_root = root, .old_epoch = draft->state.epoch, .state = &draft->state};
    change_state(leases, draft, events, count);
    LEASE_STEP("decided");
    done.root = next_root(root, buffer, done.state);
    neighbours_publish(leases, draft, done.root);
    done.concerns_others = done.state->epoch != done.old_epoch ||
                           draft->facts.waiting != load(&buffer_of(leases, root)->facts.waiting);
    uint64_t expected = root;
    if (!__atomic_compare_exchange_n(&file->root, &expected, done.root, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST)) {
      continue;
    }
    LEASE_STEP("swapped");
    if (done.state->epoch != done.old_epoch && ALLOT_ROOT_HOLDER(done.root) >= 0) {
      uint64_t now = now_ns();
      store(&file->claimed_ns, now > done.state->now_ns ? now : done.state->now_ns);
    }
    return done;
  }
}

static void read_now(allot_leases *leases, allot_lease_state *state, uint64_t now_ns) {
  lease_read_state(leases, state);
  allot_event look = {.kind = ALLOT_EVENT_LOOK, .now_ns = now_ns};
  neighbours_merge(leases, state, look.now_ns);
  allot_lease_decide(state, leases->contract, &look);
}

void allot_leases_read(allot_leases *leases, allot_lease_state *state) {
  read_now(leases, state, now_ns());
}

// Tells those whom the decision concerns: the new holder, and one that has to give way now.
static void tell(const allot_leases *leases, const outcome *done) {
  int holder = ALLOT_ROOT_HOLDER(done->root);
  bool granted = done->state->epoch != done->old_epoch;
  bool pressed =
      ALLOT_ROOT_CONTENDED(done->root) &&
      (!ALLOT_ROOT_CONTENDED(done->old_root) || done->state->expires_ns <= done->state->now_ns);
  if (holder != leases->place && (granted || pressed)) wake(leases, done->state, holder);
  LEASE_STEP("told");
}

// Decides, and tells whom it concerns. Two shares may decide at the same time without knowing of
// each other: both look again once they have published, so that one of them knows.
static outcome settle(allot_leases *leases, const allot_event *events, int count) {
  outcome done = decide(leases, events, count);
  tell(leases, &done);
  const allot_event look = {.kind = ALLOT_EVENT_LOOK, .now_ns = events[0].now_ns};
  for (int i = 0; i < LOOKS && done.concerns_others && neighbours_moved(leases); i++) {
    leases->is_settling = true;
    done = decide(leases, &look, 1);
    tell(leases, &done);
  }
  leases->is_settling = false;
  return done;
}

void lease_settle(allot_leases *leases, const allot_event *events, int count) {
  settle(leases, events, count);
}

static bool latency_is_active(const allot_lease_state *state, const allot_contract *contract,
                              int own_seat, uint64_t now_ns) {
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    uint64_t terms = __atomic_load_n(&contract->seats[seat].terms, __ATOMIC_RELAXED);
    if (seat == own_seat || !(terms & ALLOT_TERMS_TAKEN)) continue;
    if (ALLOT_TERMS_CLASS(terms) != ALLOT_CLASS_LATENCY) continue;
    const allot_seat_state *other = &state->seats[seat];
    if (other->active_ns != 0 && since(now_ns, other->active_ns) < LATENCY_NS) return true;
  }
  return false;
}

static uint64_t when_to_look(const allot_leases *leases, const allot_lease_state *state,
                             uint32_t ceiling, uint64_t now_ns) {
  const allot_seat_state *own = &state->seats[leases->seat];
  uint64_t at = now_ns + PATIENCE_NS;
  if (own->blocked != 0 && ceiling > 0) {
    uint64_t lacking = own->budget_ns < (int64_t)PIECE_NS ? PIECE_NS - (uint64_t)own->budget_ns : 0;
    uint64_t most = LONGEST_SLEEP_NS * ceiling / ALLOT_WHOLE;
    // A little later than computed: earlier would be for nothing.
    at = now_ns + (lacking < most ? lacking * ALLOT_WHOLE / ceiling : LONGEST_SLEEP_NS) + 10000;
  } else if (state->holder < 0) {
    at = now_ns + MILLISECOND;
  } else if (state->next == leases->place) {
    uint64_t expires = state->expires_ns > now_ns ? state->expires_ns : now_ns;
    at = expires + DEAD_NS;
  }
  return at < now_ns + LONGEST_SLEEP_NS ? at : now_ns + LONGEST_SLEEP_NS;
}

static void describe(const allot_leases *leases, const allot_lease_state *state, uint32_t ticket,
                     uint64_t now_ns, allot_lease *lease) {
  const allot_contract *contract = leases->contract;
  uint64_t terms = __atomic_load_n(&contract->seats[leases->seat].terms, __ATOMIC_RELAXED);
  uint32_t ceiling = ALLOT_TERMS_CEILING(terms);
  int64_t budget = state->seats[leases->seat].budget_ns;
  bool held = leases->place >= 0 && state->holder == leases->place;
  *lease = (allot_lease){
      .held = held,
      .yield = held && allot_lease_must_yield(state, contract, now_ns),
      .contended = state->next >= 0 && state->next != leases->place,
      .alone = state->places_taken <= 1,
      .latency_active = latency_is_active(state, contract, leases->seat, now_ns),
      .lent = held && state->is_lent != 0,
      .epoch = state->epoch,
      .budget_ns = ceiling >= ALLOT_WHOLE ? UINT64_MAX
                   : budget > 0           ? at_most((uint64_t)budget, ALLOT_BURST_NS)
                                          : 0,
      .expires_ns = state->expires_ns,
      .keep_ns = held ? state->keep_ns : 0,
      .retry_ns = held ? 0 : when_to_look(leases, state, ceiling, now_ns),
      .ticket = ticket,
  };
}

// ---- the seat ----

// Is the place this process's in the state in force? Every state since it was taken says so, so it
// does no harm when the one that is looked at is being replaced.
static bool is_seated(const allot_leases *leases) {
  const allot_place_state *own =
      &buffer_of(leases, load(&leases->file->root))->state.places[leases->place];
  return __atomic_load_n(&own->state, __ATOMIC_RELAXED) != ALLOT_PLACE_FREE &&
         __atomic_load_n(&own->seat, __ATOMIC_RELAXED) == leases->seat &&
         __atomic_load_n(&own->serial, __ATOMIC_RELAXED) == (uint32_t)leases->serial;
}

// The share was removed and its programs run on: they become best effort. A place that somebody
// damaged is taken anew.
void lease_keep_seat(allot_leases *leases, uint64_t now_ns) {
  uint64_t serial = load(&leases->contract->seats[leases->seat].serial);
  uint64_t terms = load(&leases->contract->seats[leases->seat].terms);
  bool is_booked = serial == leases->serial && (terms & ALLOT_TERMS_TAKEN);
  if (!is_booked) {
    store(&leases->seat, (int)ALLOT_SEAT_UNBOOKED);  // another thread may be going to sleep
    store(&leases->serial, load(&leases->contract->seats[leases->seat].serial));
  }
  if (leases->place < 0 || is_seated(leases)) return;
  allot_event moved = {
      .kind = ALLOT_EVENT_JOIN, .place = leases->place, .seat = leases->seat, .now_ns = now_ns};
  store(&leases->file->heads[leases->place].pid, (int32_t)getpid());  // the file may be a fresh one
  lease_settle(leases, &moved, 1);
}

// ---- waits ----

static bool is_other_seat(const allot_leases *leases, int seat) {
  return seat >= 0 && seat < (int)ALLOT_SEATS && seat != leases->seat;
}

static void note_wait(allot_leases *leases, uint64_t from_ns, uint64_t until_ns) {
  allot_fairness *fairness = &leases->fairness;
  // A process that was stopped loses its turns rightly.
  const uint64_t promised = leases->promised_ns > from_ns ? leases->promised_ns : from_ns;
  const uint64_t waited = since(at_most(promised, until_ns), from_ns);
  const uint64_t excused = at_most(fairness->excused_ns, waited), counted = waited - excused;
  fairness->stopped_ns += since(until_ns, promised);
  fairness->excused_ns -= excused;
  fairness->waited_ns += counted;
  if (is_other_seat(leases, fairness->author))
    leases->others[fairness->author].delayed_ns += counted;
  // A share that was named by another is less to blame: it may not know better.
  if (is_other_seat(leases, fairness->holder) && fairness->holder != fairness->author) {
    const bool was_named = is_other_seat(leases, fairness->author);
    leases->others[fairness->holder].delayed_ns += was_named ? counted - counted / 8 : counted;
  }
}

// What has passed since the last decision, after which things stood as `fairness` says.
static void note_turn(allot_leases *leases, const allot_lease_state *state, uint64_t now_ns) {
  allot_fairness *fairness = &leases->fairness;
  if (leases->place < 0) return;
  const allot_seat_state *own = &state->seats[leases->seat];
  const bool holds = state->holder == leases->place;
  const bool is_ours = state->holder >= 0 && state->holder < (int)ALLOT_OWN_PLACES;
  uint64_t turn_ns = now_ns;
  if (fairness->is_holding) {
    turn_ns = fairness->seen_ns;
  } else if (holds) {
    turn_ns = at_most(now_ns, state->granted_ns);
    if (turn_ns < fairness->seen_ns) turn_ns = fairness->seen_ns;
  }
  if (fairness->is_waiting) note_wait(leases, fairness->seen_ns, turn_ns);
  if (fairness->seen_ns != 0) {
    const uint64_t used = since(own->used_ns, fairness->charged_ns);
    fairness->held_ns += since(now_ns, turn_ns);
    fairness->used_ns += used;
    const uint64_t longest = used > leases->longest_ns ? used : leases->longest_ns;
    if (longest > fairness->longest_ns) fairness->longest_ns = longest;
    leases->longest_ns = 0;
  }
  uint64_t terms = load(&leases->contract->seats[leases->seat].terms);
  fairness->seen_ns = now_ns;
  fairness->is_waiting = state->places[leases->place].state == ALLOT_PLACE_WAITING && !is_ours &&
                         own->blocked == 0 && !(terms & ALLOT_TERMS_SUSPENDED) &&
                         !leases->is_stalled;
  fairness->is_holding = holds;
  fairness->author = leases->author;
  fairness->holder = state->holder < 0 ? -1 : state->places[state->holder].seat;
  fairness->charged_ns = own->used_ns;
}

// A program that leaves the device idle finds a launch of another that cannot be taken back: that
// wait is its own, up to the longest that is not evicted. Over short gaps it keeps the device.
static void excuse_wait(allot_leases *leases) {
  bool keeps = leases->gap_ns * SHORT_GAP_PARTS <= leases->burst_ns;
  leases->fairness.excused_ns = keeps ? 0 : OVERRUN_NS;
}

static void act(allot_leases *leases, const allot_event *events, int count, uint64_t now_ns,
                allot_lease *lease) {
  // Drawn before the decision: whatever is decided later is told later.
  uint32_t ticket = load(&leases->file->heads[leases->place].wake);
  outcome done = settle(leases, events, count);
  describe(leases, done.state, ticket, now_ns, lease);
  note_turn(leases, done.state, now_ns);
  lease_note_wanted(leases, done.state, now_ns);
  leases->promised_ns = lease->retry_ns;
}

// A waiter that was stopped may have been given the lease and lost it: until it asks anew it is
// passed over.
static bool has_missed_turns(const allot_leases *leases, uint64_t now_ns) {
  const uint64_t root = load(&leases->file->root);
  const allot_place_state *own = &buffer_of(leases, root)->state.places[leases->place];
  return ALLOT_ROOT_HOLDER(root) != leases->place &&
         __atomic_load_n(&own->state, __ATOMIC_RELAXED) == ALLOT_PLACE_WAITING &&
         now_ns > leases->promised_ns + ALLOT_STOPPED_NS;
}

// Returns how many events they are: at most two.
static int ask(const allot_leases *leases, uint64_t now_ns, allot_event events[2]) {
  int count = 0;
  if (has_missed_turns(leases, now_ns)) {
    events[count++] = (allot_event){.kind = ALLOT_EVENT_RELEASE,
                                    .place = leases->place,
                                    .burst_ns = leases->burst_ns,
                                    .gap_ns = leases->gap_ns,
                                    .now_ns = now_ns};
  }
  events[count++] = (allot_event){.kind = ALLOT_EVENT_WANT,
                                  .place = leases->place,
                                  .launch_ns = leases->launch_ns,
                                  .now_ns = now_ns};
  return count;
}

void allot_lease_want(allot_leases *leases, uint64_t now_ns, allot_lease *lease) {
  allot_event events[2];
  lease_keep_seat(leases, now_ns);
  act(leases, events, ask(leases, now_ns, events), now_ns, lease);
}

void allot_lease_charge(allot_leases *leases, uint64_t used_ns, uint64_t move_ns, uint64_t now_ns,
                        allot_lease *lease) {
  lease_keep_seat(leases, now_ns);
  allot_event event = {.kind = ALLOT_EVENT_CHARGE,
                       .place = leases->place,
                       .used_ns = used_ns,
                       .move_ns = move_ns,
                       .burst_ns = leases->burst_ns,
                       .gap_ns = leases->gap_ns,
                       .now_ns = now_ns};
  act(leases, &event, 1, now_ns, lease);
}

void allot_lease_release(allot_leases *leases, uint64_t used_ns, uint64_t move_ns, bool wants_more,
                         uint64_t now_ns, allot_lease *lease) {
  lease_keep_seat(leases, now_ns);
  allot_event events[2] = {
      {.kind = ALLOT_EVENT_RELEASE,
       .place = leases->place,
       .used_ns = used_ns,
       .move_ns = move_ns,
       .burst_ns = leases->burst_ns,
       .gap_ns = leases->gap_ns,
       .now_ns = now_ns},
      {.kind = ALLOT_EVENT_WANT,
       .place = leases->place,
       .launch_ns = leases->launch_ns,
       .now_ns = now_ns},
  };
  act(leases, events, wants_more ? 2 : 1, now_ns, lease);
  if (!wants_more) excuse_wait(leases);
  // Places of the dead would make a process that is alone believe that it is not.
  if (!lease->alone && since(now_ns, leases->reaped_ns) > REAP_NS) {
    leases->reaped_ns = now_ns;
    lease_reap(leases, now_ns);
  }
}

void allot_lease_look(allot_leases *leases, uint64_t now_ns, allot_lease *lease) {
  uint32_t ticket = leases->place < 0 ? 0 : load(&leases->file->heads[leases->place].wake);
  allot_lease_state state;
  read_now(leases, &state, now_ns);
  describe(leases, &state, ticket, now_ns, lease);
}

// ---- looking at the others ----

// Does the holder run over its time without an end in sight? As long as its kernels end one after
// another, what is queued will be over soon. A lease that nobody waits for is never over.
static bool is_stuck(const allot_lease_state *state, uint64_t progress_ns, uint64_t wanted_ns,
                     uint64_t now_ns) {
  uint64_t over = since(now_ns, state->expires_ns > wanted_ns ? state->expires_ns : wanted_ns);
  return over > LONGEST_OVERRUN_NS ||
         (over > OVERRUN_NS && since(now_ns, progress_ns) > OVERRUN_NS);
}

// Has the lease to be taken from the holder? One of ours that is dead is gone afterwards.
static bool judge_holder(allot_leases *leases, const allot_lease_state *state, uint64_t now_ns) {
  int holder = state->holder;
  if (holder < 0 || holder >= (int)ALLOT_PLACES || holder == leases->place) return false;
  const allot_place_state *own = &state->places[leases->place];
  if (own->state != ALLOT_PLACE_WAITING) return false;
  allot_place_head head;
  // What cannot be read shows no sign of life.
  if (!neighbours_head(leases, state, holder, &head)) head = (allot_place_head){0};
  // It has had as long to answer as we wait, if it was idle and had nothing to tell.
  uint64_t heard = head.beat_ns;
  if (heard < state->granted_ns || since(heard, now_ns) > CLOCKS_DIFFER_NS) {
    heard = state->granted_ns;
  }
  if (heard < own->since_ns) heard = own->since_ns;
  uint64_t silence = since(now_ns, heard);
  if (silence >= DEAD_NS && holder < (int)ALLOT_OWN_PLACES) {
    int descriptor = open(leases->lock_path, O_RDWR | O_CLOEXEC);
    bool was_dead = descriptor >= 0 && lease_free_if_dead(leases, descriptor, holder, now_ns);
    if (descriptor >= 0) close(descriptor);
    if (was_dead) return false;
  }
  const allot_place_state *judged = &state->places[holder];
  const bool is_other = holder >= (int)ALLOT_OWN_PLACES;
  const bool is_gone = silence >= ALLOT_STOPPED_NS ||
                       (silence >= DEAD_NS && is_other && neighbours_place_is_dead(leases, judged));
  if (!is_gone && (state->next < 0 || lease_was_stopped(leases, now_ns))) return false;
  if (!is_gone) return is_stuck(state, head.running_ns, leases->wanted_ns, now_ns);
  // Should it have been given the lease while it was stopped: not again before it asks anew.
  if (is_other) leases->others[judged->seat].skipped_ns = judged->since_ns;
  return true;
}

// How long turns may last to be worth the moves of memory before them.
static uint64_t longest_moved_turns(const allot_leases *leases, const allot_lease_state *state) {
  uint64_t longest = 0;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    if (!(load(&leases->contract->seats[seat].terms) & ALLOT_TERMS_OVERSUBSCRIBED)) continue;
    longest += at_most(state->seats[seat].move_ns, LONGEST_OVERRUN_NS) * 2;
  }
  return longest;
}

// The share that delayed this process most is not believed.
static void blame(allot_leases *leases, uint64_t now_ns) {
  int most = -1;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) {
    const uint64_t delayed = leases->others[seat].delayed_ns;
    if (delayed > 0 && (most < 0 || delayed > leases->others[most].delayed_ns)) most = seat;
  }
  if (most >= 0) neighbours_distrust(leases, most, now_ns);
}

static void forget_waits(allot_leases *leases) {
  if (leases->fairness.lacking_ns > 0) leases->fairness.lacking_ns = 0;
  for (int seat = 0; seat < (int)ALLOT_SEATS; seat++) leases->others[seat].delayed_ns = 0;
}

static int64_t take_off(int64_t from, int64_t what) {
  return from > what ? from - what : 0;
}

// The waits that a turn explains.
static int64_t explained_by(uint64_t turn_ns, uint64_t fraction) {
  turn_ns =
      at_most(turn_ns, LONGEST_EXPLAINED_NS) * (FAIR_PARTS * ALLOT_WHOLE - fraction) / fraction;
  return (int64_t)at_most(turn_ns, LONGEST_EXPLAINED_NS);
}

// While it has work, a share that is owed the fraction f of the device waits for (1 - f) / f of the
// time of its turns. It is content with f / FAIR_PARTS. Waits beyond that add up, and so do waits
// without turns.
static void judge_wait(allot_leases *leases, const allot_lease_state *state, uint64_t now_ns) {
  allot_fairness *fairness = &leases->fairness;
  const uint64_t fraction = allot_lease_fraction(state, leases->contract, leases->seat, now_ns);
  const uint64_t waited = fairness->waited_ns, stopped = fairness->stopped_ns;
  // Time that it held the device and left idle is its own, and so is work that ran on afterwards.
  const uint64_t got =
      fairness->held_ns > fairness->used_ns ? fairness->held_ns : fairness->used_ns;
  const uint64_t longest_ns = fairness->longest_ns;
  fairness->waited_ns = fairness->stopped_ns = 0;
  fairness->held_ns = fairness->used_ns = fairness->longest_ns = 0;
  if (fraction == 0 || leases->seat == (int)ALLOT_SEAT_UNBOOKED) {
    forget_waits(leases);
    return;
  }
  int64_t lacking = fairness->lacking_ns;
  if (lacking > 0) lacking = take_off(lacking, explained_by(got, fraction));
  // Turns are not saved up. Only a long kernel explains the wait after it, which may be long too.
  const int64_t yet = explained_by(longest_ns, fraction);
  if (lacking <= 0 && lacking > -yet) lacking = -yet;
  lacking += (int64_t)waited;
  if (lacking > 0) lacking = take_off(lacking, (int64_t)stopped);
  fairness->lacking_ns = lacking;
  if (lacking <= 0) {
    forget_waits(leases);
    return;
  }
  const uint64_t longest =
      STARVED_NS + TURNS_NS * ALLOT_WHOLE / fraction + longest_moved_turns(leases, state);
  if ((uint64_t)lacking < longest) return;
  blame(leases, now_ns);
  forget_waits(leases);
}

void allot_lease_check(allot_leases *leases, uint64_t now_ns, allot_lease *lease) {
  lease_keep_seat(leases, now_ns);
  allot_lease_state state;
  lease_read_state(leases, &state);
  allot_event events[3];
  int count = 0;
  judge_wait(leases, &state, now_ns);
  if (judge_holder(leases, &state, now_ns)) {
    events[count++] = (allot_event){
        .kind = ALLOT_EVENT_EVICT, .place = state.holder, .epoch = state.epoch, .now_ns = now_ns};
  }
  count += ask(leases, now_ns, &events[count]);
  act(leases, events, count, now_ns, lease);
}
