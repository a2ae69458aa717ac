// SPDX-License-Identifier: Apache-2.0
// The simulated CUDA driver from inside: the process's state, its objects, and what files share.
//
// Shared state of the machine is the engine's (simulated/engine); everything here is this
// process's. Locks, always taken in this order: driver.lock for objects and memory, then a device's
// submit_lock for its ring. Neither is held while waiting for work.
#ifndef ALLOTMENT_CUDA_DRIVER_H
#define ALLOTMENT_CUDA_DRIVER_H

#include <pthread.h>
#include <stdbool.h>

// Protected: programs see the names, and this library's own calls cannot be caught by a shim.
#define CU_ENTRY(name, parameters) __attribute__((visibility("protected"))) CUresult name parameters
#define CU_ENTRY_PTSZ(name, parameters) \
  CU_ENTRY(name, parameters);           \
  CU_ENTRY(name##_ptsz, parameters)
#define CU_ENTRY_PTDS(name, parameters) \
  CU_ENTRY(name, parameters);           \
  CU_ENTRY(name##_ptds, parameters)

#include "cuda_abi.h"
#include "simulated/engine/engine.h"

// Returns from the calling function with the error, if there is one.
#define TRY(call)                                      \
  do {                                                 \
    CUresult try_result = (call);                      \
    if (try_result != CUDA_SUCCESS) return try_result; \
  } while (0)

#define KIB 1024ull
#define MIB (1024ull * KIB)

// ---- objects -----------------------------------------------------------------------------------

// A handle is a pointer to an object that begins with this. Memory of destroyed objects is used
// again only for objects of the same kind, so a stale handle is found out instead of followed.
enum object_kind {
  OBJECT_CONTEXT = 1,
  OBJECT_STREAM,
  OBJECT_EVENT,
  OBJECT_MODULE,
  OBJECT_FUNCTION,
  OBJECT_LIBRARY,
  OBJECT_KERNEL,
  OBJECT_POOL,
  OBJECT_PHYSICAL,
  OBJECT_MULTICAST,
  OBJECT_ARRAY,
  OBJECT_MIPMAP,
  OBJECT_TEXTURE,
  OBJECT_SURFACE,
  OBJECT_EXTERNAL,
  OBJECT_GRAPH,
  OBJECT_NODE,
  OBJECT_EXEC,
  OBJECT_USER,
  OBJECT_LINK,
  OBJECT_KINDS,
};

typedef struct object {
  uint32_t magic;
  uint32_t kind;
  uint64_t id;            // never used twice in a process
  struct object *parent;  // destroyed with it
  struct object *children;
  struct object *next, *previous;  // siblings; of a destroyed object: the next one to use again
} object;

// objects.c. All but `valid` are called with driver.lock held.
void *object_new(enum object_kind kind, size_t size, void *parent);
void object_free(void *handle);  // unlinks; children must be gone
bool object_valid(const void *handle, enum object_kind kind);

// ---- contexts ----------------------------------------------------------------------------------

typedef struct stream stream;
typedef struct event event;

typedef struct small_block small_block;  // small.c

#define DEFAULT_STACK_BYTES 1024

typedef struct context {
  object head;
  int ordinal;  // the device as this process numbers it
  int gpu;      // as the machine numbers it
  unsigned flags, api_version;
  bool primary;
  bool active;          // a primary context is kept while nobody retains it, but is dead then
  unsigned references;  // primary: how often retained
  size_t limits[CU_LIMIT_MAX];
  uint64_t stack_bytes;  // of the GPU, for stacks beyond the default
  CUfunc_cache cache;
  stream *legacy;        // the default stream that synchronises with blocking ones
  stream *per_thread;    // list of threads' own default streams, by stream.sibling
  unsigned blocking;     // blocking streams that exist or did: once there was one, barriers matter
  uint64_t legacy_last;  // number of the newest work of the legacy stream
  small_block *blocks;
  uint32_t peers;  // a bit for each ordinal whose memory was opened to this context
} context;

CUresult context_current(context **current);  // CUDA_ERROR_INVALID_CONTEXT if there is none
CUresult context_of(CUcontext handle, context **found);  // NULL means the current one
void context_make_current(context *made);
void context_forget(context *gone);  // current.c: no longer current in the calling thread
CUresult context_synchronize(context *waited);
// Waits for works of the GPU that are already submitted; `only` NULL: of every context.
void context_drain(int gpu, const context *only);
// The same for works with one of these flags (0: all of them).
void context_drain_some(int gpu, const context *only, unsigned flags);
// Newest of these works up to number `head` that is not done, 0: none.
allot_point context_pending(int gpu, const context *only, unsigned flags, uint64_t head);
// What happens to each kind of child when its context goes.
void context_destroy_children(context *dying);

// ---- the process -------------------------------------------------------------------------------

struct pool;

typedef struct device {
  pthread_mutex_t submit_lock;
  event *marked[ALLOT_RING_WORKS];  // whose mark is work n, at n % ALLOT_RING_WORKS
  context *primary;
  unsigned primary_flags;
  uint64_t graph_used, graph_used_high, graph_reserved, graph_reserved_high;
} device;

typedef struct driver_state {
  allot_handle machine;
  bool initialised;
  pthread_mutex_t lock;
  int device_count;
  int gpus[ALLOT_MACHINE_GPUS];        // ordinal to the machine's number
  int cut_place;                       // of the process's MIG device, its only one; 0: none
  allot_gpu_description cut;           // and what it is
  device devices[ALLOT_MACHINE_GPUS];  // by the machine's number
  uint64_t last_id;
} driver_state;

extern driver_state driver __attribute__((visibility("hidden")));

static inline bool driver_is_locked(void) {
  const allot_handle *own = &driver.machine;
  return allot_load(&own->machine->processes[own->slot].checkpoint) != 0;
}

// Files are opened and closed under it: until it is free again the thread is not cancelled.
void driver_lock(void);
void driver_unlock(void);
#define LOCK() driver_lock()
#define UNLOCK() driver_unlock()

// CUDA_ERROR_NOT_INITIALIZED before cuInit and in a child of an initialised process.
CUresult driver_ready(void);
// The device by ordinal, after what faults do to calls on it.
CUresult driver_gpu(CUdevice ordinal, int *gpu);
CUresult driver_gpu_usable(int gpu);
// Of the process's instance of the GPU, where it has one.
const allot_gpu_description *driver_description(int gpu);
// Where the process's kernels run among the machine's engines.
int driver_place(int gpu);
// Ordinal of a GPU of the machine, -1: not visible to this process.
int driver_ordinal(int gpu);
int driver_cuda_version(void);

// Begins an entry point that needs the driver only.
#define ENTER() TRY(driver_ready())
// Begins one that needs a current context.
#define ENTER_CONTEXT(name) \
  context *name;            \
  TRY(context_current(&name))

// visible.c: fills driver.gpus from CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
int visible_devices(const allot_machine_description *description, uint32_t nodes,
                    int gpus[ALLOT_MACHINE_GPUS]);

// mps.c: makes the process a client where a daemon answers, and takes from `nodes` what its server
// has not; then, with the visible devices known, what it may have of their memory.
CUresult mps_become_client(uint32_t *nodes);
void mps_limit_memory(void);
// Multiprocessors that the process may use: of a client, its part.
uint32_t mps_multiprocessors(int gpu);

// mig.c: makes of the visible devices whole GPUs or one MIG device.
void mig_choose(void);
// Keeps the process's device as it is while a context begins on it.
CUresult mig_hold(int gpu, int *lock);
void mig_release(int gpu, int lock);

// ---- memory ------------------------------------------------------------------------------------

enum range_kind {
  RANGE_PLAIN,  // cuMemAlloc and friends: a whole number of 2 MiB
  RANGE_SMALL,  // part of a block of a context
  RANGE_MANAGED,
  RANGE_HOST,        // page-locked, allocated here
  RANGE_REGISTERED,  // page-locked, the program's own
  RANGE_POOL,
  RANGE_MAPPED,    // physical memory mapped at a reserved address
  RANGE_IMPORTED,  // another process's
  RANGE_EXTERNAL,
  RANGE_GRAPH,  // of a graph's allocation node
  RANGE_ARRAY,  // an array's or mipmapped array's
};

typedef struct range {
  CUdeviceptr base;
  uint64_t size;     // as asked for
  uint64_t charged;  // bytes of device memory taken for it alone
  enum range_kind kind;
  int gpu;  // -1: host memory
  uint32_t flags;
  bool touched;     // something was written: pages must be given back
  bool accessible;  // MAPPED: access was set
  bool sync_memops;
  uint32_t references;
  context *owner;             // NULL: of no context
  int preferred, prefetched;  // MANAGED: ordinals, as advised and as asked for last
  bool read_mostly;
  uint32_t accessed_by;  // MANAGED: a bit for each ordinal
  void *origin;          // small_block, pool, physical, ...
  uint64_t offset;       // MAPPED: into the physical memory
  uint64_t imported_id;  // IMPORTED: the id that it has in its own process
  int imported_pid;
  uint64_t id;
  struct range *left, *right;
  uint32_t weight;
} range;

// ranges.c: every piece of memory by its address. With driver.lock held.
range *range_add(CUdeviceptr base, uint64_t size, enum range_kind kind, int gpu);
void range_remove(range *removed);
range *range_find(CUdeviceptr address);  // the one that contains the address
range *range_first(CUdeviceptr from);    // the first that begins at or after it

// address.c: addresses of device memory, backed by pages that cost nothing until written.
CUdeviceptr address_take(uint64_t size, uint64_t alignment);  // 0: no address space
void address_give_back(CUdeviceptr address, uint64_t size, bool touched);
// Where the bytes are kept: a memory file that other processes may map, and the offset there.
bool address_file(CUdeviceptr address, int *descriptor, uint64_t *offset);

int memfd_file(const char *name);  // files.c: a descriptor, -1: none to be had

// memory.c
CUresult memory_new(context *owner, uint64_t size, enum range_kind kind, CUdeviceptr *address);
CUresult memory_free_locked(range *freed);
// The range with room for `size` bytes from `address`, or CUDA_ERROR_INVALID_VALUE.
CUresult memory_check(CUdeviceptr address, uint64_t size, range **found);
CUresult memory_info(int gpu, size_t *free, size_t *total);

// advice.c: moves so many bytes of managed memory to the stream's GPU, or to the host.
void managed_submit(stream *target, bool to_gpu, uint64_t bytes);

// small.c: pieces under 1 MiB, in units of 512 bytes of 2 MiB blocks.
// Managed memory takes nothing of the GPU before it is used there.
bool memory_take(int gpu, uint64_t bytes, bool managed);
void memory_give_back(int gpu, uint64_t bytes, bool managed);
CUdeviceptr small_take(context *owner, uint64_t size, bool managed, small_block **block);
void small_give_back(context *owner, small_block *block, CUdeviceptr address, uint64_t size,
                     bool touched);
void small_drop_all(context *owner);
void small_range(const small_block *block, CUdeviceptr *base, uint64_t *size);

// How each other kind of memory is given up; the range goes too where the name ends in "_locked"
// and the call succeeds, except for host and imported memory, whose range the caller removes.
CUresult pool_free_locked(range *freed, stream *after);
CUresult graph_memory_free_locked(range *freed);
void graph_memory_reset(int gpu);
void host_free_locked(range *freed);
void imported_free_locked(range *freed);

// pools.c
bool range_is_managed(const range *asked);  // also of a pool of managed memory
void pools_reset(int gpu);                  // the device was reset: its pools lose what they hold
// Gives back what pools hold above their thresholds; at each synchronisation.
void pools_release_surplus(int gpu);

// ---- streams and work --------------------------------------------------------------------------

struct capture;

struct stream {
  object head;
  context *owner;
  unsigned flags;
  int priority;
  bool legacy, per_thread;
  uint64_t last;            // number of its newest work, 0: none
  uint64_t thread;          // per_thread: whose
  stream *sibling;          // per_thread: the context's next
  struct capture *capture;  // not NULL: launches are recorded
  struct node **tips;       // what the next one recorded will depend on
  size_t tip_count;
  CUstreamAttrValue window, policy, domain, domain_map;
};

struct event {
  object head;
  context *owner;
  unsigned flags;
  bool recorded;
  allot_point point;
  uint64_t ended_ns;  // known once the work's place in the ring is taken by another
  int shared;         // index among the machine's shared events, -1: not shared
  uint32_t serial;    // of that shared event
  bool imported;
  struct node **captured;  // recorded in a capture: what the stream had come to
  size_t captured_count;
  uint64_t capture_id;
};

// Resolves a handle in the current context: NULL and CU_STREAM_LEGACY, CU_STREAM_PER_THREAD,
// others.
CUresult stream_of(CUstream handle, stream **found);
stream *stream_legacy(context *owner);
stream *stream_per_thread(context *owner);
void stream_destroy_locked(stream *dying);
// Waits for all that was submitted to the stream so far.
CUresult stream_synchronize(stream *waited);
allot_point stream_end(const stream *asked);  // of the newest work; 0: it never had any
bool stream_idle(stream *asked);

#define STREAM_GREATEST_PRIORITY (-5)

// capture.c: errors of calls that a capture in progress does not allow.
CUresult capture_forbids(context *current);        // calls that wait for the context, or may do so
CUresult capture_forbids_waiting(stream *waited);  // waiting for this stream
CUresult capture_forbids_legacy(stream *target);   // work that captured streams would wait for
CUresult capture_unsupported(stream *target);      // ends the capture in failure
void capture_abandon(stream *dying);
void capture_forget_event(event *forgotten);
CUresult capture_child(stream *target, CUgraph child);
// What would be submitted becomes a node instead.
CUresult capture_event_record(stream *target, event *recorded, unsigned flags);
CUresult capture_event_wait(stream *target, event *waited, unsigned flags);
CUresult capture_host(stream *target, CUhostFn function, void *data);
CUresult capture_copy(stream *target, const CUDA_MEMCPY3D *copy);
CUresult capture_fill(stream *target, const CUDA_MEMSET_NODE_PARAMS *fill);
CUresult capture_allocate(stream *target, struct pool *from, uint64_t size, CUdeviceptr *address);
CUresult capture_free(stream *target, CUdeviceptr address);

bool shared_event_make(event *made);
void shared_event_release(event *dying);
void shared_event_record(event *recorded, allot_point point);
allot_point shared_event_point(const event *asked);
void event_destroy_locked(event *dying);
CUresult event_record(event *recorded, stream *target);

typedef struct submission {
  unsigned kind, engine;
  unsigned flags;  // ALLOT_WORK_MANAGED
  uint32_t sms;    // KERNEL
  uint64_t duration_ns, bytes;
  allot_point target;
  event *marked;
} submission;

// Puts one work behind the stream's others. Waits while the ring is full.
allot_point submit(stream *target, const submission *wanted);
// What is ordered in a stream takes a place in its queue: waits for one, unless the stream has done
// all.
void submit_wait_for_room(const stream *target);
void submit_forget_event(event *dying);
CUresult event_wait(event *waited);
bool event_done(event *asked);

// Nanoseconds that copying takes on the GPU.
uint64_t copy_duration_ns(int gpu, unsigned engine, uint64_t bytes);
CUresult stream_submit_copy(stream *target, unsigned engine, uint64_t bytes);

// callbacks.c: functions on the host, in stream order, on one thread that starts on first use.
typedef void (*callback_function)(void *data);
CUresult callback_submit(stream *target, callback_function function, void *data);
// Waits in the stream until `holds` says so, then calls the function.
CUresult callback_submit_when(stream *target, bool (*holds)(const void *data),
                              callback_function function, void *data);
bool callbacks_pending(void);

// ---- copies ------------------------------------------------------------------------------------

// copies.c. copy_async and copy_now take a handle and mind captures; copy_on does not.
CUDA_MEMCPY3D copy_linear(CUmemorytype to_type, CUdeviceptr to, CUmemorytype from_type,
                          CUdeviceptr from, size_t bytes);
CUDA_MEMCPY3D copy_plane(const CUDA_MEMCPY2D *plane);
CUDA_MEMCPY3D copy_between_peers(const CUDA_MEMCPY3D_PEER *peers);
CUresult copy_check(const CUDA_MEMCPY3D *copy);
CUresult copy_on(stream *target, const CUDA_MEMCPY3D *copy);
CUresult copy_async(CUstream handle, const CUDA_MEMCPY3D *copy);
CUresult copy_now(CUstream handle, const CUDA_MEMCPY3D *copy);
CUresult fill_check(const CUDA_MEMSET_NODE_PARAMS *fill);
CUresult fill_on(stream *target, const CUDA_MEMSET_NODE_PARAMS *fill);

// arrays.c: texels in rows of device memory.
typedef struct array {
  object head;
  context *owner;
  struct mipmap *mipmap;  // whose level it is
  struct array *next_level;
  void *physical;  // deferred mapping: what is mapped into it
  CUdeviceptr base;
  size_t width, height, depth, pitch;  // in texels; pitch in bytes
  CUarray_format format;
  unsigned channels, flags;
} array;
void array_destroy_locked(array *dying);
void mipmap_destroy_locked(struct mipmap *dying);
CUresult array_of(CUarray handle, array **found);
size_t array_element_bytes(CUarray handle);  // 1 if it is not valid

// ---- functions ---------------------------------------------------------------------------------

enum { FUNCTION_DEFAULT = 0, FUNCTION_SPIN = 1, FUNCTION_TRAP = 2 };

typedef struct function {
  object head;
  struct module *module;
  char *name;
  int behaviour;
  int dynamic_shared, carveout, cluster[3], cluster_schedule, nonportable_cluster;
  CUfunc_cache cache;
} function;

typedef struct global {
  char *name;
  uint64_t size;
  CUdeviceptr address;
  struct global *next;
} global;

typedef struct module {
  object head;
  context *owner;
  bool opaque;  // no names are known: any is accepted
  char **entries;
  unsigned entry_count;
  global *globals;
} module;

CUresult capture_kernel(stream *target, const CUlaunchConfig *config, CUfunction handle,
                        function *launched, void **parameters, void **extra);
CUresult kernel_function(CUkernel handle, function **found);  // for the current context
CUresult launch_check(const context *owner, const CUlaunchConfig *config);
uint64_t launch_blocks(const CUlaunchConfig *config);
// How many multiprocessors the launch keeps: each is filled before the next.
uint32_t launch_sms(const context *owner, const CUlaunchConfig *config);
// How long a kernel takes that would take `duration_ns` with all the multiprocessors that it wants.
uint64_t launch_ns(const context *owner, const CUlaunchConfig *config, uint64_t duration_ns);
unsigned device_blocks_per_sm(const allot_gpu_description *own);
// How many such blocks the GPU holds at once.
uint64_t occupancy_blocks(const function *asked, const context *owner,
                          const CUlaunchConfig *config);
CUresult function_attribute(const function *asked, const context *owner,
                            CUfunction_attribute attribute, int *value);
CUresult function_set_attribute(function *changed, const context *owner,
                                CUfunction_attribute attribute, int value);
CUresult module_global(const module *from, const char *name, CUdeviceptr *address, size_t *size);
CUresult image_from_file(const char *path, char **image);  // to be freed

// ptx.c: what a PTX text declares. False: it is not PTX.
bool ptx_read(const char *text, module *into);
void module_destroy_locked(module *dying);
CUresult module_load(context *owner, const void *image, module **loaded);
CUresult module_function(module *from, const char *name, function **found);
// A CUfunction may also be a CUkernel.
CUresult function_of(CUfunction handle, function **found);
// How long the function runs with these parameters.
uint64_t function_duration_ns(const function *launched, void **parameters, void **extra);

#endif
