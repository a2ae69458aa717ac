// SPDX-License-Identifier: Apache-2.0
// Threads that are cancelled inside calls: no lock stays, and no memory is charged.
#include "cancel.h"

#define LARGE (6 * MIB)
#define SMALL 1000

static const CUmemAllocationProp on_device = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED,
    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
static const CUDA_ARRAY_DESCRIPTOR flat = {
    .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
static const CUDA_ARRAY3D_DESCRIPTOR deep = {
    .Width = 512, .Height = 512, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
static const char image[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .global .align 4 .b8 large[6000000];\n"
    ".visible .entry nothing() { ret; }\n";

// ---- plain memory ----

static CUdeviceptr memory;

static void allocate_small(void) {
  cuMemAlloc_v2(&memory, SMALL);
}

static void allocate_large(void) {
  cuMemAlloc_v2(&memory, LARGE);
}

static void allocate_rows(void) {
  size_t pitch;
  cuMemAllocPitch_v2(&memory, &pitch, 5000, 1000, 4);
}

static void allocate_managed(void) {
  cuMemAllocManaged(&memory, LARGE, CU_MEM_ATTACH_GLOBAL);
}

static void free_memory(void) {
  cuMemFree_v2(memory);
}

static void free_in_order(void) {
  cuMemFreeAsync(memory, NULL);
}

// It was not made, or has gone.
static void forget_memory(void) {
  if (memory != 0) cuMemFree_v2(memory);
  memory = 0;
}

// ---- pools ----

static CUmemoryPool pool;

static void allocate_from_pool(void) {
  cuMemAllocAsync(&memory, LARGE, NULL);
}

static void forget_piece(void) {
  forget_memory();
  OK(cuCtxSynchronize());
}

static void create_pool(void) {
  CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
  cuMemPoolCreate(&pool, &properties);
}

static void create_full_pool(void) {
  create_pool();
  OK(cuMemAllocFromPoolAsync(&memory, LARGE, pool, NULL));
  OK(cuMemFreeAsync(memory, NULL));
  memory = 0;
}

static void destroy_pool(void) {
  cuMemPoolDestroy(pool);
}

static void forget_pool(void) {
  if (pool != NULL) cuMemPoolDestroy(pool);
  pool = NULL;
}

// ---- arrays ----

static CUarray array;
static CUmipmappedArray mipmap;

static void create_array(void) {
  cuArrayCreate_v2(&array, &flat);
}

static void destroy_array(void) {
  cuArrayDestroy(array);
}

static void forget_array(void) {
  if (array != NULL) cuArrayDestroy(array);
  array = NULL;
}

static void create_mipmap(void) {
  cuMipmappedArrayCreate(&mipmap, &deep, 3);
}

static void destroy_mipmap(void) {
  cuMipmappedArrayDestroy(mipmap);
}

static void forget_mipmap(void) {
  if (mipmap != NULL) cuMipmappedArrayDestroy(mipmap);
  mipmap = NULL;
}

// ---- modules ----

static CUmodule module;
static CUlibrary library;

static void load_module(void) {
  cuModuleLoadData(&module, image);
}

static void unload_module(void) {
  cuModuleUnload(module);
}

static void forget_module(void) {
  if (module != NULL) cuModuleUnload(module);
  module = NULL;
}

static void load_library(void) {
  cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0);
}

static void unload_library(void) {
  cuLibraryUnload(library);
}

static void forget_library(void) {
  if (library != NULL) cuLibraryUnload(library);
  library = NULL;
}

// ---- virtual memory ----

static CUmemGenericAllocationHandle handle;

static void create_handle(void) {
  cuMemCreate(&handle, LARGE, &on_device, 0);
}

static void release_handle(void) {
  cuMemRelease(handle);
}

static void forget_handle(void) {
  if (handle != 0) cuMemRelease(handle);
  handle = 0;
}

// ---- contexts ----

static CUcontext made;

static void create_context(void) {
  cuCtxCreate_v2(&made, 0, 0);
}

static void destroy_context(void) {
  cuCtxDestroy_v2(made);
}

static void forget_context(void) {
  if (made != NULL) cuCtxDestroy_v2(made);
  made = NULL;
}

static void raise_stack(void) {
  cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2048);
}

static void lower_stack(void) {
  OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024));
}

// ---- graphs ----

static CUgraph graph;
static CUgraphExec executable;

static void instantiate(void) {
  cuGraphInstantiateWithFlags(&executable, graph, 0);
}

static void launch(void) {
  cuGraphLaunch(executable, NULL);
}

static void launch_and_wait(void) {
  instantiate();
  launch();
  OK(cuCtxSynchronize());
}

static void trim(void) {
  cuDeviceGraphMemTrim(0);
}

static void destroy_executable(void) {
  cuGraphExecDestroy(executable);
}

static void forget_executable(void) {
  OK(cuCtxSynchronize());
  if (executable != NULL) cuGraphExecDestroy(executable);
  executable = NULL;
  OK(cuDeviceGraphMemTrim(0));
}

static void make_graph(void) {
  CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
      .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
      .bytesize = LARGE};
  CUgraphNode node, end;
  OK(cuGraphCreate(&graph, 0));
  OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &parameters));
  OK(cuGraphAddMemFreeNode(&end, graph, &node, 1, parameters.dptr));
}

// ---- the cases ----

static const cancelled_call memory_calls[] = {
    {"cuMemAlloc of little", NULL, allocate_small, forget_memory},
    {"cuMemAlloc", NULL, allocate_large, forget_memory},
    {"cuMemAllocPitch", NULL, allocate_rows, forget_memory},
    {"cuMemAllocManaged", NULL, allocate_managed, forget_memory},
    {"cuMemFree of little", allocate_small, free_memory, forget_memory},
    {"cuMemFree", allocate_large, free_memory, forget_memory},
    {"cuMemFreeAsync of plain memory", allocate_large, free_in_order, forget_memory},
    {"cuMemAllocAsync", NULL, allocate_from_pool, forget_piece},
    {"cuMemFreeAsync", allocate_from_pool, free_in_order, forget_piece},
    {"cuMemFree of a piece", allocate_from_pool, free_memory, forget_piece},
    {"cuMemPoolCreate", NULL, create_pool, forget_pool},
    {"cuMemPoolDestroy", create_full_pool, destroy_pool, forget_pool},
    {"cuMemCreate", NULL, create_handle, forget_handle},
    {"cuMemRelease", create_handle, release_handle, forget_handle},
};

static const cancelled_call object_calls[] = {
    {"cuArrayCreate", NULL, create_array, forget_array},
    {"cuArrayDestroy", create_array, destroy_array, forget_array},
    {"cuMipmappedArrayCreate", NULL, create_mipmap, forget_mipmap},
    {"cuMipmappedArrayDestroy", create_mipmap, destroy_mipmap, forget_mipmap},
    {"cuModuleLoadData", NULL, load_module, forget_module},
    {"cuModuleUnload", load_module, unload_module, forget_module},
    {"cuLibraryLoadData", NULL, load_library, forget_library},
    {"cuLibraryUnload", load_library, unload_library, forget_library},
    {"cuCtxCreate", NULL, create_context, forget_context},
    {"cuCtxDestroy", create_context, destroy_context, forget_context},
    {"cuCtxSetLimit", NULL, raise_stack, lower_stack},
    {"cuGraphInstantiate", NULL, instantiate, forget_executable},
    {"cuGraphLaunch", instantiate, launch, forget_executable},
    {"cuDeviceGraphMemTrim", launch_and_wait, trim, forget_executable},
    {"cuGraphExecDestroy", launch_and_wait, destroy_executable, forget_executable},
};

static void run_calls(const cancelled_call *calls, size_t count) {
  CUcontext context = start_on(0);
  make_graph();
  for (size_t i = 0; i < count; i++) {
    expect_whole(&calls[i], context);
    OK(cuCtxSetCurrent(context));
  }
}

static void cancelled_with_memory(void) {
  run_calls(memory_calls, sizeof memory_calls / sizeof *memory_calls);
}

static void cancelled_with_objects(void) {
  run_calls(object_calls, sizeof object_calls / sizeof *object_calls);
}

static void initialise(void) {
  cuInit(0);
}

// Each time in a process that has done nothing yet.
static void cancelled_before_all(void) {
  bool has_ended = true;
  fflush(NULL);
  for (unsigned place = 1; has_ended; place++) {
    pid_t child = fork();
    if (child == 0) {
      bool ended = ends_at(place, NULL, initialise);
      start_on(0);
      allocate_small();
      AGREE();
      _exit(ended ? 7 : 0);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status)) FAIL("ended at place %u: the process ended with %x", place, status);
    has_ended = WEXITSTATUS(status) == 7;
    EXPECT(has_ended || WEXITSTATUS(status) == 0);
    EXPECT_EQUAL(charged(0), 0);
  }
}

static const test_case cases[] = {
    {"cancelled_with_memory", cancelled_with_memory},
    {"cancelled_with_objects", cancelled_with_objects},
    {"cancelled_before_all", cancelled_before_all},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
