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

// Brings the charge to what is reserved; `ahead` was charged beyond it.
static void settle_device(process *own, int device, uint64_t ahead) {
  device_state *state = &own->devices[device];
  uint64_t reserved = state->graph_charged + ahead;
  DRIVER(USED(cuDeviceGetGraphMemAttribute)(state->graph_ordinal,
                                            CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved));
  charge_correct(own, device, state->graph_charged + ahead, reserved);
  if (reserved < state->graph_charged) state->last_graph = 0;
  __atomic_store_n(&state->graph_charged, reserved, __ATOMIC_RELAXED);
}

void graphs_settle(process *own, int device) {
  if (__atomic_load_n(&own->devices[device].graph_charged, __ATOMIC_RELAXED) == 0) return;
  process_lock(&own->graph_lock);
  settle_device(own, device, 0);
  process_unlock(&own->graph_lock);
}

static void trim_device(process *own, int device, CUdevice ordinal) {
  DRIVER(REAL(cuDeviceGraphMemTrim)(ordinal));
  settle_device(own, device, 0);
  own->devices[device].last_graph = 0;
}

static bool try_device(process *own, graph_need *need, int device) {
  need->reserved[device] = need->most[device];
  if (charge_try(own, device, need->most[device])) return true;
  need->reserved[device] = need->least[device];
  return need->least[device] < need->most[device] && charge_try(own, device, need->least[device]);
}

static bool reserve_device(process *own, graph_need *need, int device, CUstream stream) {
  CUdevice ordinal = need->ordinals[device];
  own->devices[device].graph_ordinal = ordinal;
  if (try_device(own, need, device)) return true;
  // Memory of graphs that have ended can be had back when their ends were waited for.
  if (stream_is_capturing(stream) || context_is_capturing()) return false;
  process_unlock(&own->graph_lock);
  DRIVER(REAL(cuStreamSynchronize)(stream));
  process_lock(&own->graph_lock);
  trim_device(own, device, ordinal);
  if (try_device(own, need, device)) return true;
  process_unlock(&own->graph_lock);
  DRIVER(REAL(cuCtxSynchronize)());
  pools_settle(own, device);
  process_lock(&own->graph_lock);
  trim_device(own, device, ordinal);
  return try_device(own, need, device) || charge_last_try(own, device, need->reserved[device]);
}

// An executable graph that is launched again, with no other in between, finds its memory in place.
// `graph` 0: there is no executable graph yet.
static bool reserve_all(process *own, graph_need *need, uint64_t graph, CUstream stream) {
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    need->reserved[device] = 0;
    if ((need->devices & 1u << device) == 0) continue;
    if (graph != 0 && own->devices[device].last_graph == graph) continue;
    if (reserve_device(own, need, device, stream)) continue;
    while (device-- > 0) charge_release(own, device, need->reserved[device]);
    return false;
  }
  return true;
}

static int one_device(const graph_need *need) {
  return __builtin_ctz(need->devices);
}

static void settle_needed(process *own, const graph_need *need, uint64_t graph, bool launched) {
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    if ((need->devices & 1u << device) == 0) continue;
    settle_device(own, device, need->reserved[device]);
    own->devices[device].last_graph = launched ? graph : 0;
  }
}

// ---- executable graphs ----
//
// One record says which devices a graph needs, and one for each of them how much. Handles are
// addresses of aligned objects, so that the following numbers are free.

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
  if (kept) __atomic_add_fetch(&own->allocating_graphs, 1, __ATOMIC_RELEASE);
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

static void forget(process *own, uint64_t graph) {
  record whole, part;
  if (!records_take(&own->records, SPACE_GRAPH, graph, &whole)) return;
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    if ((whole.count & 1u << device) == 0) continue;
    records_take(&own->records, SPACE_GRAPH, part_of(graph, device), &part);
  }
  __atomic_sub_fetch(&own->allocating_graphs, 1, __ATOMIC_RELEASE);
}

// ---- entry points ----

// What the executable graph may take, before it was ever launched.
static CUresult expect(process *own, CUresult result, CUgraph graph, const CUgraphExec *made) {
  compute_state *all = result == CUDA_SUCCESS ? compute_state_of(own) : NULL;
  size_t nodes = 0;
  if (all != NULL && DRIVER(USED(cuGraphGetNodes)(graph, NULL, &nodes)) == CUDA_SUCCESS) {
    estimate_guess(&all->estimates, estimate_key(*made, 0), nodes);
  }
  return result;
}

#define INSTANTIATE(made, graph, call)                                                   \
  do {                                                                                   \
    process *own = process_attach();                                                     \
    graph_need need;                                                                     \
    if (own == NULL) return CUDA_ERROR_SYSTEM_NOT_READY;                                 \
    graph_need_of(own, graph, &need);                                                    \
    if (need.devices == 0) return expect(own, DRIVER(call), graph, made);                \
    process_lock(&own->graph_lock);                                                      \
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;                                          \
    if (reserve_all(own, &need, 0, NULL)) {                                              \
      result = WITH_PATIENCE(own, one_device(&need), call);                              \
      settle_needed(own, &need, 0, false);                                               \
    }                                                                                    \
    if (result == CUDA_SUCCESS && !remember(own, (uint64_t)(uintptr_t)*(made), &need)) { \
      DRIVER(REAL(cuGraphExecDestroy)(*(made)));                                         \
      result = CUDA_ERROR_OUT_OF_MEMORY;                                                 \
    }                                                                                    \
    process_unlock(&own->graph_lock);                                                    \
    return expect(own, result, graph, made);                                             \
  } while (0)

CUDA_WRAPPER(cuGraphInstantiate, (CUgraphExec * made, CUgraph graph, CUgraphNode *error_node,
                                  char *log, size_t log_size)) {
  if (!governed()) return REAL(cuGraphInstantiate)(made, graph, error_node, log, log_size);
  INSTANTIATE(made, graph, REAL(cuGraphInstantiate)(made, graph, error_node, log, log_size));
}

CUDA_WRAPPER(cuGraphInstantiate_v2, (CUgraphExec * made, CUgraph graph, CUgraphNode *error_node,
                                     char *log, size_t log_size)) {
  if (!governed()) return REAL(cuGraphInstantiate_v2)(made, graph, error_node, log, log_size);
  INSTANTIATE(made, graph, REAL(cuGraphInstantiate_v2)(made, graph, error_node, log, log_size));
}

CUDA_WRAPPER(cuGraphInstantiateWithFlags,
             (CUgraphExec * made, CUgraph graph, unsigned long long flags)) {
  if (!governed()) return REAL(cuGraphInstantiateWithFlags)(made, graph, flags);
  INSTANTIATE(made, graph, REAL(cuGraphInstantiateWithFlags)(made, graph, flags));
}

CUDA_WRAPPER(cuGraphInstantiateWithParams,
             (CUgraphExec * made, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)) {
  if (!governed()) return REAL(cuGraphInstantiateWithParams)(made, graph, parameters);
  INSTANTIATE(made, graph, REAL(cuGraphInstantiateWithParams)(made, graph, parameters));
}

CUDA_WRAPPER(cuGraphInstantiateWithParams_ptsz,
             (CUgraphExec * made, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)) {
  if (!governed()) return REAL(cuGraphInstantiateWithParams_ptsz)(made, graph, parameters);
  INSTANTIATE(made, graph, REAL(cuGraphInstantiateWithParams_ptsz)(made, graph, parameters));
}

typedef CUresult launch_call(CUgraphExec graph, CUstream stream);

static inline bool some_allocate(process *own) {
  return own != NULL && __atomic_load_n(&own->allocating_graphs, __ATOMIC_ACQUIRE) != 0;
}

static CUresult launch(process *own, CUgraphExec graph, CUstream stream, launch_call *call) {
  graph_need need;
  uint64_t key = (uint64_t)(uintptr_t)graph;
  if (!recall(own, key, &need) || stream_is_capturing(stream)) return DRIVER(call(graph, stream));
  process_lock(&own->graph_lock);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (reserve_all(own, &need, key, stream)) {
    result = WITH_PATIENCE(own, one_device(&need), call(graph, stream));
    settle_needed(own, &need, key, result == CUDA_SUCCESS);
  }
  process_unlock(&own->graph_lock);
  return result;
}

static CUresult launch_or_pass(process *own, CUgraphExec graph, CUstream stream,
                               launch_call *call) {
  if (LIKELY(!some_allocate(own))) return DRIVER(call(graph, stream));
  return launch(own, graph, stream, call);
}

#define UPLOAD_WRAPPER(name, stream_meant)                   \
  CUDA_WRAPPER(name, (CUgraphExec graph, CUstream stream)) { \
    process *own = process_known();                          \
    if (LIKELY(!some_allocate(own)) || !governed()) {        \
      return REAL(name)(graph, stream);                      \
    }                                                        \
    return launch(own, graph, stream_meant, REAL(name));     \
  }

#define LAUNCH_WRAPPER(name, stream_meant)                                             \
  CUDA_WRAPPER(name, (CUgraphExec graph, CUstream stream)) {                           \
    if (!governed()) return REAL(name)(graph, stream);                                 \
    process *own = process_known();                                                    \
    launch_pass pass;                                                                  \
    CUresult result = launch_begin(&pass, stream_meant, estimate_key(graph, 0), true); \
    if (UNLIKELY(result != CUDA_SUCCESS)) return result;                               \
    if (LIKELY(pass.stream == NULL) && !some_allocate(own)) {                          \
      return REAL(name)(graph, stream);                                                \
    }                                                                                  \
    result = launch_or_pass(own, graph, stream_meant, REAL(name));                     \
    launch_end(&pass, result);                                                         \
    return result;                                                                     \
  }

LAUNCH_WRAPPER(cuGraphLaunch, stream)
LAUNCH_WRAPPER(cuGraphLaunch_ptsz, per_thread(stream))
UPLOAD_WRAPPER(cuGraphUpload, stream)
UPLOAD_WRAPPER(cuGraphUpload_ptsz, per_thread(stream))

CUDA_WRAPPER(cuGraphExecDestroy, (CUgraphExec graph)) {
  process *own = process_known();
  if (!some_allocate(own) || !governed()) return REAL(cuGraphExecDestroy)(graph);
  process_lock(&own->graph_lock);
  CUresult result = DRIVER(REAL(cuGraphExecDestroy)(graph));
  if (result == CUDA_SUCCESS) {
    forget(own, (uint64_t)(uintptr_t)graph);
    for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
      if (own->devices[device].last_graph == (uint64_t)(uintptr_t)graph) {
        own->devices[device].last_graph = 0;
      }
      if (own->devices[device].graph_charged != 0) settle_device(own, device, 0);
    }
  }
  process_unlock(&own->graph_lock);
  return result;
}

CUDA_WRAPPER(cuDeviceGraphMemTrim, (CUdevice ordinal)) {
  CUresult result = DRIVER(REAL(cuDeviceGraphMemTrim)(ordinal));
  process *own = governed() ? process_known() : NULL;
  if (own == NULL) return result;
  process_lock(&own->graph_lock);
  for (int device = 0; device < ALLOT_MAX_DEVICES; device++) {
    device_state *state = &own->devices[device];
    if (state->graph_charged == 0 || state->graph_ordinal != ordinal) continue;
    settle_device(own, device, 0);
    state->last_graph = 0;
  }
  process_unlock(&own->graph_lock);
  return result;
}
