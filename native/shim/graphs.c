// SPDX-License-Identifier: Apache-2.0
// Graphs with memory nodes. The driver places their memory in a reserve of the device when they are
// launched (or uploaded), and shares it among graphs that do not run at the same time: charged is
// the growth of that reserve, and before each call that may grow it, what the graph allocates in
// all.
//
// Graphs without memory nodes pass with one load, as long as no graph of the program has any.
#include "graphs.h"

#include "charge.h"
#include "dead.h"
#include "driver.h"
#include "graph_need.h"
#include "launches.h"
#include "pools.h"
#include "streams.h"

// ---- the reserve; with graph_lock held ----

// Brings the charge to what is reserved; `ended` was reserved for a call that has ended.
static void settle_device(process *own, int device, uint64_t ended) {
  device_state *state = &own->devices[device];
  uint64_t before = state->graphs.charged, reserved = before + ended;
  DRIVER(USED(cuDeviceGetGraphMemAttribute)(state->graph_ordinal,
                                            CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved));
  if (reserved < before) state->last_graph = 0;
  growing_settle(own, device, &state->graphs, reserved, ended);
}

void graphs_settle(process *own, int device) {
  if ((__atomic_load_n(&own->graph_devices, __ATOMIC_RELAXED) & 1u << device) == 0) return;
  process_lock(&own->graph_lock);
  settle_device(own, device, 0);
  process_unlock(&own->graph_lock);
}

static void settle_all(process *own) {
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) graphs_settle(own, device);
}

static void trim_device(process *own, int device, CUdevice ordinal) {
  DRIVER(REAL(cuDeviceGraphMemTrim)(ordinal));
  process_lock(&own->graph_lock);
  settle_device(own, device, 0);
  own->devices[device].last_graph = 0;
  process_unlock(&own->graph_lock);
}

// ---- calls that may make the reserve grow ----

typedef struct growth {
  process *own;
  graph_need need;
  uint64_t graph;  // 0: there is no executable graph yet
  CUstream stream;
  uint64_t placed_in;  // the stream of a launch; 0: an upload, which may place nothing
  patience left;
  uint32_t in_place;  // a bit for each device
  int short_of;       // the device whose part does not fit; -1: none
  bool has_turn;
} growth;

static bool try_device(growth *of, int device) {
  const uint64_t sizes[] = {of->need.most[device], of->need.least[device]};
  for (int i = 0; i < 2; i++) {
    if (!charge_try(of->own, device, sizes[i])) continue;
    of->need.reserved[device] = sizes[i];
    return true;
  }
  return false;
}

static void let_go(growth *of) {
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    charge_release(of->own, device, of->need.reserved[device]);
    of->need.reserved[device] = 0;
  }
}

// An executable graph that is launched again in the same stream, with no other in between, finds
// its memory in place, unless the driver has taken some of the reserve for other uses.
static bool is_in_place(const growth *of, int device) {
  device_state *state = &of->own->devices[device];
  if (of->placed_in == 0 || state->last_stream != of->placed_in) return false;
  if (state->last_graph == of->graph) settle_device(of->own, device, 0);
  return state->last_graph == of->graph;
}

static bool begin_device(growth *of, int device) {
  device_state *state = &of->own->devices[device];
  if (of->need.reserved[device] == 0 && is_in_place(of, device) &&
      growing_begin_in_place(&state->graphs, of->need.least[device])) {
    of->in_place |= 1u << device;
    return true;
  }
  state->graph_ordinal = of->need.ordinals[device];
  __atomic_or_fetch(&of->own->graph_devices, 1u << device, __ATOMIC_RELAXED);
  if (of->need.reserved[device] == 0 && !try_device(of, device)) return false;
  return growing_begin(of->own, device, &state->graphs, of->need.reserved[device]);
}

// What was reserved for the device's part of the call.
static uint64_t end_device(growth *of, int device) {
  bool in_place = (of->in_place & 1u << device) != 0;
  uint64_t bytes = in_place ? of->need.least[device] : of->need.reserved[device];
  return growing_end(&of->own->devices[device].graphs, bytes, in_place);
}

static bool begin_devices(growth *of) {
  of->short_of = -1;
  of->in_place = 0;
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    if ((of->need.devices & 1u << device) == 0 || begin_device(of, device)) continue;
    if (of->need.reserved[device] == 0) of->short_of = device;
    while (--device >= 0) {
      if ((of->need.devices & 1u << device) == 0) continue;
      of->own->devices[device].graphs.ahead -= end_device(of, device);
    }
    return false;
  }
  return true;
}

// Reserves what is not reserved yet. False: it does not fit. Another call is waited for, but not
// one that takes long: it may wait for this thread.
static bool growth_begin(growth *of) {
  process *own = of->own;
  of->has_turn = turn_take(&own->graph_turn);
  process_lock(&own->graph_lock);
  bool has_begun = begin_devices(of);
  process_unlock(&own->graph_lock);
  if (!has_begun) turn_give(&own->graph_turn, of->has_turn);
  return has_begun;
}

static CUresult growth_end(growth *of, CUresult result) {
  process *own = of->own;
  process_lock(&own->graph_lock);
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    if ((of->need.devices & 1u << device) == 0) continue;
    device_state *state = &own->devices[device];
    settle_device(own, device, end_device(of, device));
    of->need.reserved[device] = 0;
    bool is_placed = result == CUDA_SUCCESS && state->graphs.is_mixed == 0 && of->placed_in != 0;
    state->last_graph = is_placed ? of->graph : 0;
    state->last_stream = of->placed_in;
  }
  process_unlock(&own->graph_lock);
  turn_give(&own->graph_turn, of->has_turn);
  return result;
}

// Memory of graphs that have ended can be had back when their ends were waited for.
static bool make_room(growth *of, int device) {
  process *own = of->own;
  if (stream_is_capturing(of->stream) || context_is_capturing()) return false;
  DRIVER(REAL(cuStreamSynchronize)(of->stream));
  trim_device(own, device, of->need.ordinals[device]);
  if (try_device(of, device)) return true;
  DRIVER(REAL(cuCtxSynchronize)());
  pools_settle(own, device);
  trim_device(own, device, of->need.ordinals[device]);
  if (try_device(of, device)) return true;
  if (!charge_last_try(own, device, of->need.least[device])) return false;
  of->need.reserved[device] = of->need.least[device];
  return true;
}

// There was no memory. Is it worth to begin again? Waits for some before it says yes.
static bool growth_goes_on(growth *of) {
  bool has_room = of->short_of >= 0
                      ? make_room(of, of->short_of)
                      : dead_may_be_freed(of->own, __builtin_ctz(of->need.devices), &of->left);
  if (!has_room) let_go(of);
  return has_room;
}

// ---- executable graphs ----
//
// One record says which devices a graph needs, and one for each of them how much. Handles are
// addresses of aligned objects, so that the following numbers are free. Graphs without memory nodes
// have a record too: a handle without one may be about to be that of a graph with such nodes.

static uint64_t part_of(uint64_t graph, int device) {
  return graph ^ (uint64_t)(device + 1) << 56;
}

static bool remember(process *own, uint64_t graph, const graph_need *need) {
  record whole = {.space = SPACE_GRAPH, .key = graph, .count = need->devices};
  bool kept = records_keep(&own->records, &whole);
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    if ((need->devices & 1u << device) == 0) continue;
    record part = {.space = SPACE_GRAPH,
                   .key = part_of(graph, device),
                   .bytes = need->most[device],
                   .owner = need->least[device],
                   .count = (uint32_t)need->ordinals[device]};
    kept = kept && records_keep(&own->records, &part);
  }
  return kept;
}

static bool recall(process *own, uint64_t graph, graph_need *need) {
  record whole, part;
  if (!records_find(&own->records, SPACE_GRAPH, graph, &whole)) return false;
  *need = (graph_need){.devices = whole.count};
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    if ((need->devices & 1u << device) == 0) continue;
    if (!records_find(&own->records, SPACE_GRAPH, part_of(graph, device), &part)) return false;
    need->most[device] = part.bytes;
    need->least[device] = part.owner;
    need->ordinals[device] = (CUdevice)part.count;
  }
  return true;
}

// Before the driver may give out the handle of one that allocates, launches ask for its record.
static void count_allocating(process *own, const graph_need *need, int change) {
  if (need->devices == 0) return;
  __atomic_add_fetch(&own->allocating_graphs, (uint32_t)change, __ATOMIC_SEQ_CST);
}

static void forget(process *own, uint64_t graph) {
  record whole, part;
  if (!records_take(&own->records, SPACE_GRAPH, graph, &whole)) return;
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    if ((whole.count & 1u << device) == 0) continue;
    records_take(&own->records, SPACE_GRAPH, part_of(graph, device), &part);
  }
}

// ---- entry points ----

// What the executable graph may take, before it was ever launched.
static void expect(process *own, CUgraph graph, const CUgraphExec *made) {
  compute_state *all = compute_state_of(own);
  size_t nodes = 0;
  if (all != NULL && DRIVER(USED(cuGraphGetNodes)(graph, NULL, &nodes)) == CUDA_SUCCESS) {
    estimate_guess(&all->estimates, estimate_key(*made, 0), nodes);
  }
}

// Another thread may have added memory nodes before the driver read the graph. They stay in it.
static bool is_as_read(const growth *of, CUgraph graph) {
  graph_need now;
  graph_need_of(of->own, graph, &now);
  return graph_need_same(&of->need, &now);
}

static CUresult instantiated(growth *of, CUresult result, CUgraph graph, const CUgraphExec *made) {
  if (result == CUDA_SUCCESS) {
    if (is_as_read(of, graph) && remember(of->own, (uint64_t)(uintptr_t)*made, &of->need)) {
      expect(of->own, graph, made);
      return result;
    }
    forget(of->own, (uint64_t)(uintptr_t)*made);
    DRIVER(REAL(cuGraphExecDestroy)(*made));
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  count_allocating(of->own, &of->need, -1);
  return result;
}

#define INSTANTIATE(made, graph_of_it, call)                                                 \
  do {                                                                                       \
    CUgraphExec given = NULL;                                                                \
    growth of = {.own = process_attach()};                                                   \
    if (of.own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;                                  \
    graph_need_of(of.own, graph_of_it, &of.need);                                            \
    if (of.need.devices == 0) {                                                              \
      CUresult plain = instantiated(&of, DRIVER(call), graph_of_it, &given);                 \
      GIVE_RESULT(made, given, plain);                                                       \
      return plain;                                                                          \
    }                                                                                        \
    UNCANCELLED;                                                                             \
    CUresult result;                                                                         \
    count_allocating(of.own, &of.need, 1);                                                   \
    do {                                                                                     \
      result = growth_begin(&of) ? growth_end(&of, DRIVER(call)) : CUDA_ERROR_OUT_OF_MEMORY; \
    } while (result == CUDA_ERROR_OUT_OF_MEMORY && growth_goes_on(&of));                     \
    result = instantiated(&of, result, graph_of_it, &given);                                 \
    GIVE_RESULT(made, given, result);                                                        \
    return result;                                                                           \
  } while (0)

CUDA_WRAPPER(cuGraphInstantiate, (CUgraphExec * made, CUgraph graph, CUgraphNode *error_node,
                                  char *log, size_t log_size)) {
  if (!governed()) return UNGOVERNED(cuGraphInstantiate)(made, graph, error_node, log, log_size);
  INSTANTIATE(made, graph,
              REAL(cuGraphInstantiate)(RESULT(made, given), graph, error_node, log, log_size));
}

CUDA_WRAPPER(cuGraphInstantiate_v2, (CUgraphExec * made, CUgraph graph, CUgraphNode *error_node,
                                     char *log, size_t log_size)) {
  if (!governed()) return UNGOVERNED(cuGraphInstantiate_v2)(made, graph, error_node, log, log_size);
  INSTANTIATE(made, graph,
              REAL(cuGraphInstantiate_v2)(RESULT(made, given), graph, error_node, log, log_size));
}

CUDA_WRAPPER(cuGraphInstantiateWithFlags,
             (CUgraphExec * made, CUgraph graph, unsigned long long flags)) {
  if (!governed()) return UNGOVERNED(cuGraphInstantiateWithFlags)(made, graph, flags);
  INSTANTIATE(made, graph, REAL(cuGraphInstantiateWithFlags)(RESULT(made, given), graph, flags));
}

CUDA_WRAPPER(cuGraphInstantiateWithParams,
             (CUgraphExec * made, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)) {
  if (!governed()) return UNGOVERNED(cuGraphInstantiateWithParams)(made, graph, parameters);
  INSTANTIATE(made, graph,
              REAL(cuGraphInstantiateWithParams)(RESULT(made, given), graph, parameters));
}

CUDA_WRAPPER(cuGraphInstantiateWithParams_ptsz,
             (CUgraphExec * made, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)) {
  if (!governed()) return UNGOVERNED(cuGraphInstantiateWithParams_ptsz)(made, graph, parameters);
  INSTANTIATE(made, graph,
              REAL(cuGraphInstantiateWithParams_ptsz)(RESULT(made, given), graph, parameters));
}

static inline bool some_allocate(process *own) {
  return own != NULL && __atomic_load_n(&own->allocating_graphs, __ATOMIC_ACQUIRE) != 0;
}

// A destroyed graph's handle may be that of another one by the time of the driver's call, as a
// launch may wait for its turn. It may even be during that call: the charge follows then.
static bool may_allocate(CUgraphExec graph) {
  process *own = process_known();
  record whole;
  return UNLIKELY(some_allocate(own)) &&
         (!records_find(&own->records, SPACE_GRAPH, (uint64_t)(uintptr_t)graph, &whole) ||
          whole.count != 0);
}

typedef struct graph_launch {
  CUgraphExec graph;
  CUstream stream;
  CUresult (*call)(CUgraphExec graph, CUstream stream);
  bool takes_turn;   // an upload does not
  bool is_recorded;  // in a stream's capture: nothing is allocated yet
} graph_launch;

// `of` NULL: it needs no memory.
static CUresult launch_once(const graph_launch *what, growth *of) {
  launch_pass pass = {.stream = NULL};
  if (what->takes_turn) {
    CUresult refusal = launch_begin(&pass, what->stream, estimate_key(what->graph, 0), false);
    if (UNLIKELY(refusal != CUDA_SUCCESS)) return refusal;
  }
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (LIKELY(of == NULL)) {
    result = what->is_recorded || !may_allocate(what->graph)
                 ? DRIVER(what->call(what->graph, what->stream))
                 : CUDA_ERROR_INVALID_VALUE;
  } else if (growth_begin(of)) {
    result = growth_end(of, DRIVER(what->call(what->graph, what->stream)));
  }
  launch_end(&pass, result);
  if (of == NULL && result == CUDA_SUCCESS && !what->is_recorded && may_allocate(what->graph)) {
    settle_all(process_known());
  }
  return result;
}

// Where there is no memory, others have the device's turn until there may be some.
static CUresult launch_allocating(process *own, graph_launch *what) {
  growth of = {.own = own,
               .graph = (uint64_t)(uintptr_t)what->graph,
               .stream = what->stream,
               .placed_in = what->takes_turn ? stream_identity(what->stream) : 0};
  if (!recall(own, of.graph, &of.need) || of.need.devices == 0) return launch_once(what, NULL);
  UNCANCELLED;
  CUresult result;
  if (capture_hold(own, what->stream)) {
    what->is_recorded = true;
    result = launch_once(what, NULL);
    capture_let_go(own);
    return result;
  }
  do {
    result = launch_once(what, &of);
  } while (result == CUDA_ERROR_OUT_OF_MEMORY && growth_goes_on(&of));
  let_go(&of);
  return result;
}

#define GRAPH_WRAPPER(name, stream_meant, has_turn)                         \
  CUDA_WRAPPER(name, (CUgraphExec graph, CUstream stream)) {                \
    if (!governed()) return UNGOVERNED(name)(graph, stream);                \
    process *own = process_known();                                         \
    graph_launch what = {graph, stream_meant, REAL(name), has_turn, false}; \
    if (UNLIKELY(some_allocate(own))) return launch_allocating(own, &what); \
    return launch_once(&what, NULL);                                        \
  }

GRAPH_WRAPPER(cuGraphLaunch, stream, true)
GRAPH_WRAPPER(cuGraphLaunch_ptsz, per_thread(stream), true)
GRAPH_WRAPPER(cuGraphUpload, stream, false)
GRAPH_WRAPPER(cuGraphUpload_ptsz, per_thread(stream), false)

static void forget_place(process *own, uint64_t graph) {
  process_lock(&own->graph_lock);
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    uint64_t *last = &own->devices[device].last_graph;
    if (*last == graph) *last = 0;
  }
  process_unlock(&own->graph_lock);
}

CUDA_WRAPPER(cuGraphExecDestroy, (CUgraphExec graph)) {
  process *own = process_known();
  if (own == NULL || !governed()) return UNGOVERNED(cuGraphExecDestroy)(graph);
  UNCANCELLED;
  // It is forgotten first: the driver may give the handle to another thread's graph at once.
  const uint64_t key = (uint64_t)(uintptr_t)graph;
  graph_need need = {.devices = 0};
  bool is_known = recall(own, key, &need);
  forget(own, key);
  if (need.devices != 0) forget_place(own, key);
  CUresult result = DRIVER(REAL(cuGraphExecDestroy)(graph));
  if (result != CUDA_SUCCESS) {
    if (is_known) remember(own, key, &need);
  } else if (need.devices != 0) {
    count_allocating(own, &need, -1);
    settle_all(own);
  }
  return result;
}

CUDA_WRAPPER(cuDeviceGraphMemTrim, (CUdevice ordinal)) {
  UNCANCELLED;
  CUresult result = DRIVER(REAL(cuDeviceGraphMemTrim)(ordinal));
  process *own = governed() ? process_known() : NULL;
  if (own == NULL) return result;
  process_lock(&own->graph_lock);
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    device_state *state = &own->devices[device];
    if (state->graphs.charged == 0 || state->graph_ordinal != ordinal) continue;
    settle_device(own, device, 0);
    state->last_graph = 0;
  }
  process_unlock(&own->graph_lock);
  return result;
}
