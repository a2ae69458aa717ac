// SPDX-License-Identifier: Apache-2.0
// Leases: how the shares of one device take turns on it, without a daemon.
//
// For each device, in the state folder:
//
//   contract   what each share is promised. Written by the agent alone; mounted read-only into a
//              container, as is the folder that follows.
//   seats/     a file for each share, named by its seat's serial: what this share has had, who of
//   it
//              waits, and who has the lease as far as it knows. Only the share's processes write
//              it.
//
// A share has a *seat*, which the agent gives it; a process of it takes a *place* by itself, by the
// same kind of kernel lock as a ledger's slot. The lease is held by one place at a time. All
// decisions are made by one pure function (lease_core.c: state and event in, state out). lease.c
// makes the state of what the seats publish: each tells of itself only, and the newest grant
// counts. A process maps its own share's file, and reads those of others by system calls alone, so
// that whatever another share does to its file is an error and no signal. docs/designs/compute.md
// has the reasons.
//
// Times are CLOCK_MONOTONIC nanoseconds. Fractions of a device are in basis points: 10000 is all.
#ifndef ALLOTMENT_LEASE_H
#define ALLOTMENT_LEASE_H

#include <stdbool.h>
#include <stdint.h>

#define ALLOT_CONTRACT_MAGIC 0x525443544f4c4c41ull /* "ALLOTCTR" */
#define ALLOT_SEAT_MAGIC 0x54414553544f4c41ull     /* "ALOTSEAT" */
#define ALLOT_CONTRACT_VERSION 1u
#define ALLOT_SEAT_VERSION 1u
#define ALLOT_SEATS 64u   /* shares of one device, and the unbooked */
#define ALLOT_PLACES 256u /* in one state */
// A share's own processes in its state; behind them, of every other seat, the one that runs and the
// one that has waited longest.
#define ALLOT_OWN_PLACES 128u
#define ALLOT_PLACES_OF(seat) (ALLOT_OWN_PLACES + 2u * (unsigned)(seat))
#define ALLOT_WHOLE 10000u
// The seat of processes whose share was removed while they ran: best effort.
#define ALLOT_SEAT_UNBOOKED (ALLOT_SEATS - 1)

// ---- terms: what one share is promised, in one word so that it changes in one step ----

enum { ALLOT_CLASS_LATENCY = 0, ALLOT_CLASS_NORMAL = 1, ALLOT_CLASS_BESTEFFORT = 2 };

// guarantee | ceiling << 14 | weight << 28 | class << 42 | flags
#define ALLOT_TERMS_FIELD 0x3fffull
#define ALLOT_TERMS(guarantee, ceiling, weight, class, flags)                     \
  ((uint64_t)(guarantee) | (uint64_t)(ceiling) << 14 | (uint64_t)(weight) << 28 | \
   (uint64_t)(class) << 42 | (uint64_t)(flags))
#define ALLOT_TERMS_GUARANTEE(terms) ((uint32_t)((terms) & ALLOT_TERMS_FIELD))
#define ALLOT_TERMS_CEILING(terms) ((uint32_t)((terms) >> 14 & ALLOT_TERMS_FIELD))
#define ALLOT_TERMS_WEIGHT(terms) ((uint32_t)((terms) >> 28 & ALLOT_TERMS_FIELD)) /* 1..10000 */
#define ALLOT_TERMS_CLASS(terms) ((uint32_t)((terms) >> 42 & 3))
#define ALLOT_TERMS_TAKEN (1ull << 48)     /* the seat is some share's */
#define ALLOT_TERMS_GOVERNED (1ull << 49)  /* compute was asked for; see allot_contract.governed */
#define ALLOT_TERMS_SUSPENDED (1ull << 50) /* gets no lease */
#define ALLOT_TERMS_OVERSUBSCRIBED (1ull << 51) /* its memory may live on the host */

typedef struct allot_contract_seat {
  uint64_t terms;
  uint64_t serial;  // another one each time the seat changes hands; 0: never taken
  char share_id[64];
} allot_contract_seat;

typedef struct allot_contract {
  uint64_t magic;
  uint32_t version;
  // Seats with ALLOT_TERMS_GOVERNED or ALLOT_TERMS_OVERSUBSCRIBED. While it is 0 nobody asked for
  // compute on this device, and no memory moves: its processes take no turns and are slowed by
  // nothing.
  uint32_t governed;
  uint64_t generation;  // raised after every change
  uint64_t serial;      // the newest that was given out
  uint32_t quantum_us;  // length of a lease while others wait
  uint32_t spare[7];
  char uuid[48];
  allot_contract_seat seats[ALLOT_SEATS];
} allot_contract;

// ---- the state that decisions are made from (pure data) ----

enum {
  ALLOT_PLACE_FREE = 0,
  ALLOT_PLACE_IDLE = 1,
  ALLOT_PLACE_WAITING = 2,
  ALLOT_PLACE_HOLDING = 3,
};

typedef struct allot_seat_state {
  uint64_t serial;       // whose accounts these are
  uint64_t used_ns;      // GPU time charged
  uint64_t borrowed_ns;  // of it, beyond the guarantee
  uint64_t lent_ns;      // guaranteed to this share, unused by it, and used by others
  uint64_t virtual_ns;   // GPU time divided by the fraction it was owed: who is behind goes before
  int64_t budget_ns;     // what the ceiling allows now; negative: to be waited for
  int64_t owed_ns;       // what of the guarantee was not yet used
  uint64_t active_ns;    // when it last wanted or held the device
  uint64_t move_ns;      // what bringing its memory in cost at its last lease
  uint64_t leases;       // how many it was given
  uint64_t evictions;    // how many were taken from it
  uint64_t blocked;      // 1: the ceiling's budget is spent, until enough of it is there again
  int64_t grace_ns;      // for so long the device may yet be kept idle for it
  uint64_t launch_ns;    // what its newest launch that waited was expected to take
} allot_seat_state;

typedef struct allot_place_state {
  uint16_t seat;
  uint8_t state;      // ALLOT_PLACE_*
  uint8_t slot;       // among the places of its own share
  uint32_t serial;    // low half of the seat's when the place was taken
  uint64_t since_ns;  // WAITING: since when
  // Its program usually works for `burst_ns` and then leaves the device idle for `gap_ns`.
  uint64_t burst_ns, gap_ns;
} allot_place_state;

typedef struct allot_lease_state {
  uint64_t now_ns;  // of the newest event
  uint64_t epoch;   // raised with every grant: names the lease. The time, or later
  int32_t holder;   // place, or -1
  int32_t next;     // who would be given the lease now if nobody held it, or -1
  uint64_t granted_ns;
  uint64_t expires_ns;  // when the holder has to give way; of no meaning while nobody waits
  uint64_t virtual_ns;  // of the seat that is furthest behind: where newcomers begin
  uint32_t waiting;     // places that wait
  uint32_t places_taken;
  uint64_t keep_ns;  // the holder may leave the device idle for so long
  uint32_t is_lent;  // a share that is further behind than the holder is between two pieces of work
  uint32_t spare;
  allot_seat_state seats[ALLOT_SEATS];
  allot_place_state places[ALLOT_PLACES];
} allot_lease_state;

// ---- events and decisions: the pure core (lease_core.c) ----

typedef enum allot_event_kind {
  ALLOT_EVENT_JOIN,     // `place` becomes one of `seat`
  ALLOT_EVENT_LEAVE,    // `place` is free again: its process ended, having used `used_ns`
  ALLOT_EVENT_WANT,     // `place` has work to run
  ALLOT_EVENT_CHARGE,   // `place` used `used_ns`; it keeps the lease while it may
  ALLOT_EVENT_RELEASE,  // as CHARGE, and gives the lease (or its wish for one) back
  ALLOT_EVENT_EVICT,    // the lease is taken from `place`, which does not answer or runs over
  ALLOT_EVENT_LOOK,     // nothing but time has passed
} allot_event_kind;

typedef struct allot_event {
  allot_event_kind kind;
  int place;
  int seat;                   // JOIN
  uint64_t epoch;             // EVICT: the lease that is meant
  uint64_t used_ns;           // CHARGE, RELEASE: measured GPU time since the last charge
  uint64_t move_ns;           // CHARGE, RELEASE: time spent bringing memory in since the grant
  uint64_t launch_ns;         // WANT: what the launch that waits is expected to take
  uint64_t burst_ns, gap_ns;  // CHARGE, RELEASE: see allot_place_state
  uint64_t now_ns;
} allot_event;

// Changes the state by one event. Total: any event in any state gives a valid state.
void allot_lease_decide(allot_lease_state *state, const allot_contract *contract,
                        const allot_event *event);
// Has the holder to stop submitting work, because others wait and its time is over?
bool allot_lease_must_yield(const allot_lease_state *state, const allot_contract *contract,
                            uint64_t now_ns);
// What the seat is owed of the device now, in basis points, given who is active.
uint32_t allot_lease_fraction(const allot_lease_state *state, const allot_contract *contract,
                              int seat, uint64_t now_ns);

// ---- the file ----

typedef struct allot_place_head {
  _Alignas(64) uint32_t wake;  // futex: raised for each message of this place's share to it
  uint32_t busy;               // it has work on the GPU
  uint64_t beat_ns;            // while it holds or works: when it last showed that it lives
  int32_t pid;                 // getpid of the owner
  uint32_t spare;
  uint64_t running_ns;  // while it works: since when nothing of it has ended
  uint64_t silent_ns;   // when it last showed that it lives after it had not for ALLOT_STOPPED_NS
  uint64_t charged_ns;  // what runs is charged up to then
} allot_place_head;

// What a ceiling lets a share catch up of what it left unused.
#define ALLOT_BURST_NS 25000000ull
// A holder that shows no sign of life for so long is evicted.
#define ALLOT_STOPPED_NS 25000000ull

// A place belongs to the process that locks its byte of the share's `usage`, beyond the bytes of
// its slots (ledger.h).
#define ALLOT_PLACE_LOCK_BASE 0x50000000ll
// A byte of the share's file, by which other shares see that the place's process lives.
#define ALLOT_LIFE_LOCK_BASE 0x40000000ll

// What a share tells the others: of itself, and who has the lease.
typedef struct allot_seat_facts {
  uint64_t root;  // that names it: of another one it is not whole
  uint64_t now_ns;
  allot_seat_state account;
  uint64_t virtual_ns;  // as in allot_lease_state
  uint64_t epoch, granted_ns, expires_ns;
  int32_t holder_seat;  // -1: none
  uint32_t holder_slot;
  uint32_t taken;  // places
  uint32_t waiting;
  allot_place_state first;    // of its places the one that has waited longest
  allot_place_state holding;  // FREE: none
} allot_seat_facts;

typedef struct allot_lent {
  uint64_t serial, lent_ns;
} allot_lent;

typedef struct allot_seat_buffer {
  allot_seat_facts facts;
  allot_lent lent[ALLOT_SEATS];  // guaranteed to that seat, and used by this one
  allot_lease_state state;       // all of it as this share sees it
} allot_seat_buffer;

typedef struct allot_leases_file {
  uint64_t magic;
  uint32_t version;
  uint32_t spare;
  // futexes: raised after each word to another seat. Before `root`, so that what is read with an
  // old one here is followed by a wake.
  _Alignas(64) uint32_t told[ALLOT_SEATS];
  // version << 33 | contended << 32 | buffer << 16 | holder + 1: where the state is, and what a
  // launch has to know at once. Contended: another process waits.
  _Alignas(64) uint64_t root;
  uint64_t claimed_ns;  // when it was known to all that a place of this share has the lease
  uint64_t distrusted;  // a bit for each seat that this share does not believe now
  _Alignas(64) allot_place_head heads[ALLOT_OWN_PLACES];
  // Two for each place, which alone writes them; `root` names the one in force. Allocated on the
  // disk when the place is taken.
  _Alignas(4096) allot_seat_buffer buffers[ALLOT_OWN_PLACES * 2];
} allot_leases_file;

#define ALLOT_ROOT_HOLDER(root) ((int)((root) & 0xffff) - 1)
#define ALLOT_ROOT_BUFFER(root) ((unsigned)((root) >> 16 & 0xffff))
#define ALLOT_ROOT_CONTENDED(root) (((root) >> 32 & 1) != 0)

#ifdef ALLOT_LEDGER_EXPORT
#pragma GCC visibility push(default)
#endif

// ---- a process's view ----

// Another seat, as this process knows it.
typedef struct allot_neighbour {
  uint64_t serial;                // 0: none
  const allot_leases_file *file;  // never touched: its pages may be gone
  uint32_t told;                  // what it told us when its facts were read
  allot_seat_facts facts;         // facts.root is 0 while it has published none that can be used
  // As read, until it is known to belong together.
  struct {
    uint64_t magic;
    uint32_t version;
  } mark;
  uint32_t new_told;
  uint64_t new_root;
  allot_seat_facts new_facts;
  uint64_t skipped_ns;     // since when the place waits that did not answer
  uint64_t ended_root;     // all its processes had ended when it had published this
  uint64_t distrusted_ns;  // it is not believed until then
  uint32_t suspicions;
  uint64_t counted_ns;  // since when its messages are counted,
  uint32_t counted;     // and what it had told us then
  uint64_t delayed_ns;  // waits of this process in which it had the lease, or said who has
  bool is_ignored;      // damaged or not believed: no process waits for its messages
} allot_neighbour;

// How long this process waits, and what its share gets: lease.c judges by that whether another
// share steals turns.
typedef struct allot_fairness {
  uint64_t seen_ns;  // the newest decision, and how things stood then:
  bool is_waiting;   // for a turn that its ceiling allows
  bool is_holding;
  int author, holder;   // seats; -1: none
  uint64_t charged_ns;  // to its share
  // Since the last judgement. Used: by all processes of the share, at most so much at once.
  uint64_t waited_ns, stopped_ns, held_ns, used_ns, longest_ns;
  uint64_t excused_ns;  // so much of its next waits does not count
  int64_t lacking_ns;   // waits beyond those that its turns explain; negative: yet to come
} allot_fairness;

typedef struct allot_leases {
  const allot_contract *contract;
  allot_leases_file *file;
  int seat;
  uint64_t serial;
  int place;             // -1: only looking
  void *place_map;       // keeps the description that holds the place's lock
  void *life_map;        // and the one by which other shares see that its process lives
  uint64_t reaped_ns;    // when dead processes' places were last looked for
  uint64_t promised_ns;  // when it was to look again at the latest
  uint64_t wanted_ns;    // since when it waits, and was not stopped; 0: it does not
  allot_fairness fairness;
  bool is_settling;  // a decision was published that its caller does not know yet
  int author;        // the seat whose word on the lease counts; -1: this one
  // What the next decisions tell of the program: see allot_event.
  uint64_t launch_ns, burst_ns, gap_ns;
  uint64_t longest_ns;  // the longest work that ended since, of which some was charged before
  bool is_stalled;      // its queue waits for the host or a copy: its waits for turns do not count
  int64_t lock_base;    // of the places' bytes in the file at `lock_path`; of no other share
  char seats_path[1100], lock_path[1100], own_path[1100];
  allot_neighbour others[ALLOT_SEATS];
} allot_leases;

// Where a share's turns on a device are.
typedef struct allot_leases_paths {
  const char *contract;
  const char *seats;  // the folder of all seats' files
  const char *own;    // this share's file
  const char
      *lock;   // a file that no other share reaches, for the places' locks: the ledger's usage
  int device;  // the share's number for the device
} allot_leases_paths;

// What a process may do now.
typedef struct allot_lease {
  bool held;
  bool yield;           // held, but others wait and its time is over: drain, then release
  bool contended;       // another process waits
  bool alone;           // no other process of the device has a place
  bool latency_active;  // another share of class latency is active: keep queued work very short
  bool lent;            // held, and a share that goes before may be back at any moment
  uint64_t epoch;
  uint64_t budget_ns;   // GPU time that the ceiling allows now, UINT64_MAX: no ceiling
  uint64_t expires_ns;  // while contended
  uint64_t keep_ns;     // held, without work: it may stay so for so long
  uint64_t retry_ns;    // not held: look again then at the latest, if no message comes before
  uint32_t ticket;      // not held: for allot_lease_sleep
} allot_lease;

// Negative errno: -EINVAL (not such files, or damaged), -EPROTO (another version), -ENOSPC (no
// place is free, or the disk is full). A seat that is no longer of that serial (the share was
// removed while its programs run) is exchanged for the unbooked one, now or later.
int allot_leases_open(allot_leases *leases, const allot_leases_paths *paths, int seat,
                      uint64_t serial);
void allot_leases_close(allot_leases *leases);
// Takes a place for the calling process. As allot_ledger_attach: kept by a mapping that children do
// not have, so that the kernel drops it with the process. Not for two threads at once.
int allot_leases_join(allot_leases *leases);
void allot_leases_leave(allot_leases *leases);

// Threads of one process take turns in front of these (one decision of a place at a time).
// Asks for the lease. Never sleeps; no system call unless a process has to be woken.
void allot_lease_want(allot_leases *leases, uint64_t now_ns, allot_lease *lease);
// Accounts for measured GPU time and tells how things stand.
void allot_lease_charge(allot_leases *leases, uint64_t used_ns, uint64_t move_ns, uint64_t now_ns,
                        allot_lease *lease);
// The same, and gives the lease back: nothing of this process runs on the GPU any more. With
// `wants_more` it waits for its next one at once.
void allot_lease_release(allot_leases *leases, uint64_t used_ns, uint64_t move_ns, bool wants_more,
                         uint64_t now_ns, allot_lease *lease);
// How things stand. Publishes nothing.
void allot_lease_look(allot_leases *leases, uint64_t now_ns, allot_lease *lease);
// A waiter's look at the others: takes the lease from a holder that died, stopped, or runs over,
// and gives it to the next one. Asks for it anew should that have been forgotten.
void allot_lease_check(allot_leases *leases, uint64_t now_ns, allot_lease *lease);
// Has another share sent a message since this process last looked at how things stand?
bool allot_lease_is_called(const allot_leases *leases);
// Sleeps until this place is sent a message after `ticket` was drawn, or until then.
void allot_lease_sleep(const allot_leases *leases, uint32_t ticket, uint64_t until_ns);
// Wakes every thread of this process that sleeps so (for the process's own use).
void allot_lease_wake_own(const allot_leases *leases);

// To be stored while it holds the lease or has work on the GPU: every few milliseconds.
static inline void allot_lease_beat(const allot_leases *leases, bool busy, uint64_t now_ns) {
  allot_place_head *own = &leases->file->heads[leases->place];
  uint64_t before = __atomic_load_n(&own->beat_ns, __ATOMIC_RELAXED);
  if (now_ns > before + ALLOT_STOPPED_NS) {
    __atomic_store_n(&own->silent_ns, now_ns, __ATOMIC_SEQ_CST);
  }
  __atomic_store_n(&own->busy, busy ? 1u : 0u, __ATOMIC_SEQ_CST);
  __atomic_store_n(&own->beat_ns, now_ns, __ATOMIC_SEQ_CST);
}

// What its work is charged with should the process die: the time from then, or from what was
// charged of it already, to its last beat.
static inline void allot_lease_tell_running(const allot_leases *leases, uint64_t since_ns) {
  __atomic_store_n(&leases->file->heads[leases->place].running_ns, since_ns, __ATOMIC_SEQ_CST);
}

// 0: nothing runs, as was told last.
static inline uint64_t allot_lease_uncharged_since(const allot_place_head *head) {
  uint64_t running_ns = __atomic_load_n(&head->running_ns, __ATOMIC_SEQ_CST);
  uint64_t charged_ns = __atomic_load_n(&head->charged_ns, __ATOMIC_SEQ_CST);
  return running_ns != 0 && charged_ns > running_ns ? charged_ns : running_ns;
}

static inline void allot_lease_tell_charged(const allot_leases *leases, uint64_t until_ns) {
  __atomic_store_n(&leases->file->heads[leases->place].charged_ns, until_ns, __ATOMIC_SEQ_CST);
}

// The state, as of now.
void allot_leases_read(allot_leases *leases, allot_lease_state *state);

// ---- the agent's side ----

// Makes the file "contract" and the folder "seats" in `directory`, which exists; -EEXIST if the
// contract is there.
int allot_contract_create(const char *directory, const char *uuid);
// Puts a share's file right where one of its programs cut it short, or wrote over its head: 1 if it
// had to, 0 if not. It stays the same file, so who has it mapped goes on: their places are theirs,
// the share's account is 0, and each process seats itself anew with its next launch.
int allot_leases_mend(const char *path);
//
// The caller of what follows holds the state folder's lock.
//
// Takes a free seat, and makes its file: its number, -ENOSPC (all are taken), -ERANGE (guarantees
// would pass the whole).
int allot_contract_take(const char *directory, const char *share_id, uint64_t terms,
                        uint64_t *serial);
// Changes the terms of the seat of that serial: 0, -ESTALE, -ERANGE. In force when it returns;
// those who wait for longer than the new terms make them are woken.
int allot_contract_change(const char *directory, int seat, uint64_t serial, uint64_t terms);
// Gives the seat back. 0 also when it is no longer of that serial.
int allot_contract_free(const char *directory, int seat, uint64_t serial);

#ifdef ALLOT_LEDGER_EXPORT
#pragma GCC visibility pop
#endif

#endif
