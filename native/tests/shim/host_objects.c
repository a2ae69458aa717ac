// SPDX-License-Identifier: Apache-2.0
// VMM, arrays, modules and graphs: what they hold of a GPU is charged once and given back.
#include <sys/mman.h>

#include "host.h"
#include "waiting.h"

#define CONTEXT context_cost()

// ---- virtual memory management ----

static const CUmemAllocationProp on_device = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED,
    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};

static CUdeviceptr reserve(uint64_t size) {
  CUdeviceptr address;
  OK(cuMemAddressReserve(&address, size, 0, 0, 0));
  EXPECT_EQUAL(charged(0), charged(0));
  return address;
}

static void physical_memory_is_charged_until_nothing_holds_it(void) {
  start_on(0);
  CUmemGenericAllocationHandle handle, again;
  CUdeviceptr address = reserve(64 * MIB);
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuMemCreate(&handle, 8 * MIB, &on_device, 0));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);
  OK(cuMemMap(address, 8 * MIB, 0, handle, 0));
  OK(cuMemMap(address + 16 * MIB, 8 * MIB, 0, handle, 0));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);
  OK(cuMemRelease(handle));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);
  AGREE();
  OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(address + 6 * MIB)));
  OK(cuMemUnmap(address, 8 * MIB));
  OK(cuMemUnmap(address + 16 * MIB, 8 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);
  AGREE();
  OK(cuMemRelease(again));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  EXPECT(cuMemRelease(again) != CUDA_SUCCESS);
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuMemAddressFree(address, 64 * MIB));
}

static void one_unmapping_for_several_mappings(void) {
  start_on(0);
  CUdeviceptr address = reserve(64 * MIB);
  for (uint64_t i = 0; i < 16; i++) {
    CUmemGenericAllocationHandle handle;
    OK(cuMemCreate(&handle, 4 * MIB, &on_device, 0));
    OK(cuMemMap(address + i * 4 * MIB, 4 * MIB, 0, handle, 0));
    OK(cuMemRelease(handle));
  }
  EXPECT_EQUAL(charged(0), CONTEXT + 64 * MIB);
  OK(cuMemUnmap(address, 32 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT + 32 * MIB);
  AGREE();
  OK(cuMemUnmap(address + 32 * MIB, 32 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void imported_memory_is_not_charged_again(void) {
  start_on(0);
  CUmemGenericAllocationHandle handle, imported;
  CUdeviceptr address = reserve(8 * MIB);
  int descriptor;
  OK(cuMemCreate(&handle, 8 * MIB, &on_device, 0));
  OK(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                  0));
  OK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)descriptor,
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);
  OK(cuMemMap(address, 8 * MIB, 0, imported, 0));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);
  OK(cuMemUnmap(address, 8 * MIB));
  OK(cuMemRelease(imported));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);
  OK(cuMemRelease(handle));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);  // the descriptor is still open
}

// The descriptor and what was imported from it keep the memory after its handle was released.
static void exported_memory_stays_charged(void) {
  pid_t child = fork();
  if (child == 0) {
    start_on(0);
    uint64_t before = charged(0), kept = 0;
    CUmemGenericAllocationHandle handle, imported;
    CUdeviceptr address = reserve(GIB);
    while (cuMemCreate(&handle, GIB, &on_device, 0) == CUDA_SUCCESS) {
      int descriptor;
      GIVES(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0),
            CUDA_ERROR_NOT_SUPPORTED);
      OK(cuMemMap(address, GIB, 0, handle, 0));
      for (int i = 0; i < 2; i++) {
        OK(cuMemExportToShareableHandle(&descriptor, handle,
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
      }
      OK(cuMemRelease(handle));
      OK(cuMemUnmap(address, GIB));
      OK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)descriptor,
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
      kept += GIB;
      EXPECT_EQUAL(charged(0), before + kept);
      EXPECT(kept <= limit_of(0));
    }
    EXPECT(kept > 0);
    // Only what was exported: not what failed to be, nor other memory.
    uint64_t full = charged(0);
    OK(cuMemCreate(&handle, 8 * MIB, &on_device, 0));
    GIVES(cuMemExportToShareableHandle(&imported, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0),
          CUDA_ERROR_NOT_SUPPORTED);
    OK(cuMemRelease(handle));
    EXPECT_EQUAL(charged(0), full);
    _exit(0);
  }
  int status;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  EXPECT_EQUAL(charged(0), 0);
}

// What is bound to a multicast object stays allocated without handles and mappings.
static void bound_memory_stays_charged(void) {
  start_on(0);
  CUmulticastObjectProp wanted = {.numDevices = 1, .size = 32 * MIB};
  CUmemGenericAllocationHandle team, by_handle, by_address;
  CUdeviceptr address = reserve(16 * MIB);
  OK(cuMulticastCreate(&team, &wanted));
  OK(cuMulticastAddDevice(team, 0));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuMemCreate(&by_handle, 16 * MIB, &on_device, 0));
  OK(cuMemCreate(&by_address, 16 * MIB, &on_device, 0));
  OK(cuMemMap(address, 16 * MIB, 0, by_address, 0));
  OK(cuMulticastBindMem(team, 0, by_handle, 0, 16 * MIB, 0));
  OK(cuMulticastBindAddr_v2(team, 0, 16 * MIB, address, 16 * MIB, 0));
  OK(cuMemRelease(by_handle));
  OK(cuMemUnmap(address, 16 * MIB));
  OK(cuMemRelease(by_address));
  EXPECT_EQUAL(charged(0), CONTEXT + 32 * MIB);
  AGREE();
  OK(cuMulticastUnbind(team, 0, 16 * MIB, 2 * MIB));  // the rest of it holds the memory
  EXPECT_EQUAL(charged(0), CONTEXT + 32 * MIB);
  AGREE();
  OK(cuMulticastUnbind(team, 0, 16 * MIB, 16 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT + 16 * MIB);
  AGREE();
  OK(cuMulticastUnbind(team, 0, 0, 32 * MIB));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  OK(cuMemRelease(team));
}

// Another process's memory has that process's charge, and no second one.
static void memory_of_another_process_is_not_charged(void) {
  int handles[2], done[2];
  OK(pipe(handles));
  OK(pipe(done));
  CUipcMemHandle handle;
  pid_t child = fork();
  if (child == 0) {
    CUdeviceptr pointer;
    char byte;
    close(done[1]);
    start_on(0);
    OK(cuMemAlloc_v2(&pointer, 24 * MIB));
    OK(cuIpcGetMemHandle(&handle, pointer));
    EXPECT(write(handles[1], &handle, sizeof handle) == sizeof handle);
    _exit((int)read(done[0], &byte, 1));
  }
  EXPECT(read(handles[0], &handle, sizeof handle) == sizeof handle);
  start_on(0);
  EXPECT_EQUAL(charged(0), 2 * CONTEXT + 24 * MIB);
  CUdeviceptr imported;
  OK(cuIpcOpenMemHandle_v2(&imported, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  EXPECT_EQUAL(charged(0), 2 * CONTEXT + 24 * MIB);
  AGREE();
  OK(cuIpcCloseMemHandle(imported));
  EXPECT_EQUAL(charged(0), 2 * CONTEXT + 24 * MIB);
  close(done[1]);
  int status;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  EXPECT_EQUAL(charged(0), CONTEXT);
}

// The shim charges a context before the driver makes it.
static void a_context_that_the_driver_refuses_costs_nothing(void) {
  start_on(0);
  uint64_t before = charged(0);
  CUcontext context;
  GIVES(cuCtxCreate_v2(&context, 1u << 31, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQUAL(charged(0), before);
  AGREE();
}

static void contexts_for_graphics_are_charged(void) {
  OK(cuInit(0));
  CUcontext context;
  OK(cuGLCtxCreate_v2(&context, 0, 0));
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuVDPAUCtxCreate_v2(&context, 0, 0, 0, NULL));
  EXPECT_EQUAL(charged(0), 2 * CONTEXT);
  AGREE();
  OK(cuCtxDestroy_v2(context));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

// The charge would stay with the device that the memory was on.
static void a_process_is_not_restored_to_another_device(void) {
  start_on(0);
  CUcheckpointGpuPair pair = {.oldUuid = {{1}}, .newUuid = {{2}}};
  CUcheckpointRestoreArgs arguments = {.gpuPairs = &pair, .gpuPairsCount = 1};
  GIVES(cuCheckpointProcessRestore(getpid(), &arguments), CUDA_ERROR_NOT_PERMITTED);
  pair.newUuid = pair.oldUuid;
  GIVES(cuCheckpointProcessRestore(getpid(), &arguments), CUDA_ERROR_ILLEGAL_STATE);
}

static void physical_memory_is_refused(void) {
  start_on(0);
  CUmemGenericAllocationHandle handle;
  GIVES(cuMemCreate(&handle, limit_of(0), &on_device, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQUAL(charged(0), CONTEXT);
  EXPECT(cuMemCreate(&handle, 12345, &on_device, 0) != CUDA_SUCCESS);
  EXPECT_EQUAL(charged(0), CONTEXT);
  CUmemAllocationProp nowhere = on_device;
  nowhere.location.id = 9;
  GIVES(cuMemCreate(&handle, 8 * MIB, &nowhere, 0), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQUAL(charged(0), CONTEXT);
  // A place that could be on a device, which does not say on which.
  nowhere.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_INVISIBLE, .id = -1};
  GIVES(cuMemCreate(&handle, 8 * MIB, &nowhere, 0), CUDA_ERROR_OUT_OF_MEMORY);
}

// ---- arrays ----

static void arrays(void) {
  start_on(0);
  CUarray flat, volume, layered;
  CUmipmappedArray mipmap;
  CUDA_ARRAY_DESCRIPTOR shape = {1000, 1000, CU_AD_FORMAT_FLOAT, 4};
  CUDA_ARRAY3D_DESCRIPTOR deep = {100, 90, 80, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0};
  OK(cuArrayCreate_v2(&flat, &shape));
  EXPECT(charged(0) >= CONTEXT + 16000000);
  AGREE();
  OK(cuArray3DCreate_v2(&volume, &deep));
  AGREE();
  deep.Flags = CUDA_ARRAY3D_LAYERED;
  OK(cuArray3DCreate_v2(&layered, &deep));
  AGREE();
  deep.Flags = 0;
  OK(cuMipmappedArrayCreate(&mipmap, &deep, 5));
  AGREE();
  uint64_t all = charged(0);
  CUarray level;
  OK(cuMipmappedArrayGetLevel(&level, mipmap, 2));
  EXPECT_EQUAL(charged(0), all);
  shape.NumChannels = 3;
  GIVES(cuArrayCreate_v2(&level, &shape), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQUAL(charged(0), all);
  OK(cuArrayDestroy(flat));
  OK(cuArrayDestroy(volume));
  OK(cuArrayDestroy(layered));
  OK(cuMipmappedArrayDestroy(mipmap));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  CUDA_ARRAY_DESCRIPTOR huge = {100000, 60000, CU_AD_FORMAT_FLOAT, 4};
  GIVES(cuArrayCreate_v2(&flat, &huge), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQUAL(charged(0), CONTEXT);
}

static void arrays_go_with_their_context(void) {
  start_on(0);
  CUarray flat;
  CUDA_ARRAY_DESCRIPTOR shape = {1000, 1000, CU_AD_FORMAT_FLOAT, 4};
  OK(cuArrayCreate_v2(&flat, &shape));
  AGREE();
  OK(cuDevicePrimaryCtxReset_v2(0));
  EXPECT_EQUAL(charged(0), 0);
  AGREE();
}

static CUarray sparse_array(void) {
  CUarray sparse;
  CUDA_ARRAY3D_DESCRIPTOR shape = {1024, 1024, 0, CU_AD_FORMAT_FLOAT, 4, CUDA_ARRAY3D_SPARSE};
  OK(cuArray3DCreate_v2(&sparse, &shape));
  return sparse;
}

static CUarrayMapInfo mapping_of(CUarray sparse, CUmemGenericAllocationHandle handle) {
  CUarrayMapInfo info = {.resourceType = CU_RESOURCE_TYPE_ARRAY,
                         .resource = {.array = sparse},
                         .subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL,
                         .memOperationType = CU_MEM_OPERATION_TYPE_MAP,
                         .memHandleType = CU_MEM_HANDLE_TYPE_GENERIC,
                         .memHandle = {.memHandle = handle},
                         .deviceBitMask = 1};
  info.subresource.sparseLevel.extentWidth = 256;
  info.subresource.sparseLevel.extentHeight = 256;
  info.subresource.sparseLevel.extentDepth = 1;
  return info;
}

static void sparse_arrays_hold_what_is_mapped_into_them(void) {
  start_on(0);
  CUarray sparse = sparse_array();
  CUmemGenericAllocationHandle handle;
  EXPECT_EQUAL(charged(0), CONTEXT);
  OK(cuMemCreate(&handle, 4 * MIB, &on_device, 0));
  CUarrayMapInfo info = mapping_of(sparse, handle);
  OK(cuMemMapArrayAsync(&info, 1, NULL));
  OK(cuMemRelease(handle));
  EXPECT_EQUAL(charged(0), CONTEXT + 4 * MIB);
  AGREE();
  OK(cuArrayDestroy(sparse));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void sparse_arrays_hold_what_a_refused_list_maps(void) {
  start_on(0);
  CUarray sparse = sparse_array(), other = sparse_array();
  CUmemGenericAllocationHandle handle;
  OK(cuMemCreate(&handle, 4 * MIB, &on_device, 0));
  CUarrayMapInfo list[2] = {mapping_of(sparse, handle), mapping_of(other, 12345)};
  EXPECT(cuMemMapArrayAsync(list, 2, NULL) != CUDA_SUCCESS);
  OK(cuMemRelease(handle));
  AGREE();
  OK(cuArrayDestroy(sparse));
  OK(cuArrayDestroy(other));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

// Behind the list is no memory.
static void no_more_of_a_refused_list_is_read_than_the_driver_reads(void) {
  start_on(0);
  CUarray sparse = sparse_array(), other = sparse_array();
  CUmemGenericAllocationHandle handle;
  OK(cuMemCreate(&handle, 4 * MIB, &on_device, 0));
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(pages != MAP_FAILED);
  OK(mprotect(pages + page, page, PROT_NONE));
  CUarrayMapInfo *list = (CUarrayMapInfo *)(void *)(pages + page) - 2;
  list[0] = mapping_of(sparse, handle);
  list[1] = mapping_of(other, 12345);
  EXPECT(cuMemMapArrayAsync(list, 1000, NULL) != CUDA_SUCCESS);
  OK(cuMemRelease(handle));
  AGREE();
  OK(cuArrayDestroy(sparse));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

// ---- threads, while one waits for the memory of the dead ----

static CUresult create_context(void) {
  CUcontext made;
  const CUresult result = cuCtxCreate_v2(&made, 0, 0);
  return result == CUDA_SUCCESS ? cuCtxDestroy_v2(made) : result;
}

static CUresult raise_limit(void) {
  return cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB + CONTEXT);
}

// Others make and leave contexts meanwhile: no lock is held.
static void wait_beside_others(CUresult (*call)(void)) {
  simulation.machine->faults.release_us = 600 * 1000000u;
  be_killed_with(limit_of(0) - 2 * CONTEXT - 2 * MIB);
  waiting_call waiting;
  CUcontext context = start_on(0);
  begin_waiting_call(&waiting, context, call);
  OK(cuDevicePrimaryCtxRetain(&context, 0));
  OK(cuDevicePrimaryCtxRelease_v2(0));
  simulation.machine->faults.release_us = 0;
  end_waiting_call(&waiting);
}

static void others_go_on_while_a_context_waits_for_memory(void) {
  wait_beside_others(create_context);
  AGREE();
}

static void others_go_on_while_a_limit_waits_for_memory(void) {
  wait_beside_others(raise_limit);
}

// ---- modules ----

static const char text[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    "// .global .b8 comment[100000000];\n"
    ".global .align 4 .b8 large[6000000];\n"
    ".visible .global .f32 medium[1024][200];\n"
    ".extern .global .b8 elsewhere[9000000];\n"
    ".const .u64 table[3] = {1, 2, 3};\n"
    ".global .v4 .f32 one;\n"
    ".visible .entry allot_fill() { ret; }\n";

static void variables_of_modules(void) {
  start_on(0);
  CUmodule module, second;
  CUdeviceptr small;
  OK(cuMemAlloc_v2(&small, 100));
  OK(cuModuleLoadData(&module, text));
  EXPECT_EQUAL(charged(0), CONTEXT + 2 * MIB + 6 * MIB);
  AGREE();
  OK(cuMemFree_v2(small));
  AGREE();
  OK(cuModuleLoadDataEx(&second, text, 0, NULL, NULL));
  AGREE();
  OK(cuModuleUnload(module));
  AGREE();
  OK(cuModuleUnload(second));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  OK(cuModuleLoadFatBinary(&module, text));
  OK(cuDevicePrimaryCtxReset_v2(0));
  EXPECT_EQUAL(charged(0), 0);
  AGREE();
}

static void modules_in_files(void) {
  start_on(0);
  FILE *file = fopen("module.ptx", "w");
  EXPECT(file != NULL && fwrite(text, 1, sizeof text - 1, file) == sizeof text - 1);
  OK(fclose(file));
  CUmodule module;
  CUlibrary library;
  OK(cuModuleLoad(&module, "module.ptx"));
  EXPECT_EQUAL(charged(0), CONTEXT + 8 * MIB);
  AGREE();
  OK(cuModuleUnload(module));
  GIVES(cuModuleLoad(&module, "no-such-file.ptx"), CUDA_ERROR_FILE_NOT_FOUND);
  OK(cuLibraryLoadFromFile(&library, "module.ptx", NULL, NULL, 0, NULL, NULL, 0));
  AGREE();
  OK(cuLibraryUnload(library));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  unlink("module.ptx");
}

static void variables_of_libraries(void) {
  start_on(0);
  CUlibrary library;
  OK(cuLibraryLoadData(&library, text, NULL, NULL, 0, NULL, NULL, 0));
  EXPECT(physical(0) <= charged(0));
  CUdeviceptr address;
  size_t bytes;
  OK(cuLibraryGetGlobal(&address, &bytes, library, "large"));
  AGREE();
  OK(cuLibraryUnload(library));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void a_library_gives_nothing_back_that_its_context_has_taken_along(void) {
  CUcontext context;
  OK(cuInit(0));
  OK(cuCtxCreate_v2(&context, 0, 0));
  CUlibrary library;
  OK(cuLibraryLoadData(&library, ".version 6.0\n.target sm_50\n.global .b8 large[6291456];", NULL,
                       NULL, 0, NULL, NULL, 0));
  CUdeviceptr variable, later;
  size_t bytes;
  OK(cuLibraryGetGlobal(&variable, &bytes, library, "large"));
  OK(cuCtxDestroy_v2(context));
  OK(cuCtxCreate_v2(&context, 0, 0));
  OK(cuMemAlloc_v2(&later, 6 * MIB));
  EXPECT_EQUAL(later, variable);  // the driver gives the address again
  OK(cuLibraryUnload(library));
  AGREE();
}

static void libraries_without_a_context_are_charged(void) {
  CUlibrary library;
  OK(cuInit(0));
  OK(cuLibraryLoadData(&library, text, NULL, NULL, 0, NULL, NULL, 0));
  EXPECT_EQUAL(charged(0), 8 * MIB);
  start_on(0);
  CUdeviceptr address;
  size_t bytes;
  OK(cuLibraryGetGlobal(&address, &bytes, library, "large"));
  AGREE();
  OK(cuLibraryUnload(library));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
  OK(cuCtxSetCurrent(NULL));
  GIVES(cuLibraryLoadData(&library,
                          ".version 6.0\n.target sm_50\n.address_size 64\n"
                          ".global .b8 huge[99000000000];\n",
                          NULL, NULL, 0, NULL, NULL, 0),
        CUDA_ERROR_OUT_OF_MEMORY);
  GIVES(
      cuLibraryLoadData(&library, "nonsense .global .b8 a[3000000];", NULL, NULL, 0, NULL, NULL, 0),
      CUDA_ERROR_INVALID_PTX);
  EXPECT_EQUAL(charged(0), CONTEXT);
}

static void variables_with_names_of_any_length(void) {
  start_on(0);
  char image[4096], name[2000] = {0};
  memset(name, 'n', sizeof name - 1);
  snprintf(image, sizeof image,
           ".version 6.0\n.target sm_50\n.address_size 64\n.global .b8 %s[6000000];\n", name);
  CUmodule module;
  OK(cuModuleLoadData(&module, image));
  EXPECT_EQUAL(charged(0), CONTEXT + 6 * MIB);
  AGREE();
  OK(cuModuleUnload(module));
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static void variables_with_sizes_by_expressions(void) {
  start_on(0);
  CUmodule module;
  OK(cuModuleLoadData(&module, ".version 6.0\n.target sm_50\n.global .b8 six[1024 * 1024 * 6];"));
  EXPECT_EQUAL(charged(0), CONTEXT + 6 * MIB);
  AGREE();
  GIVES(cuModuleLoadData(&module, ".version 6.0\n.target sm_50\n.global .b8 huge[1024 * 4000000];"),
        CUDA_ERROR_OUT_OF_MEMORY);
  AGREE();
}

static void modules_are_refused(void) {
  start_on(0);
  CUmodule module;
  GIVES(cuModuleLoadData(&module,
                         ".version 6.0\n.target sm_50\n.address_size 64\n"
                         ".global .b8 huge[99000000000];\n"),
        CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQUAL(charged(0), CONTEXT);
  GIVES(cuModuleLoadData(&module, "nonsense .global .b8 a[3000000];"), CUDA_ERROR_INVALID_PTX);
  EXPECT_EQUAL(charged(0), CONTEXT);
  GIVES(cuModuleLoadData(&module, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQUAL(charged(0), CONTEXT);
  AGREE();
}

static const test_case cases[] = {
    {"physical_memory_is_charged_until_nothing_holds_it",
     physical_memory_is_charged_until_nothing_holds_it},
    {"one_unmapping_for_several_mappings", one_unmapping_for_several_mappings},
    {"imported_memory_is_not_charged_again", imported_memory_is_not_charged_again},
    {"exported_memory_stays_charged", exported_memory_stays_charged},
    {"bound_memory_stays_charged", bound_memory_stays_charged},
    {"memory_of_another_process_is_not_charged", memory_of_another_process_is_not_charged},
    {"contexts_for_graphics_are_charged", contexts_for_graphics_are_charged},
    {"a_process_is_not_restored_to_another_device", a_process_is_not_restored_to_another_device},
    {"a_context_that_the_driver_refuses_costs_nothing",
     a_context_that_the_driver_refuses_costs_nothing},
    {"physical_memory_is_refused", physical_memory_is_refused},
    {"arrays", arrays},
    {"arrays_go_with_their_context", arrays_go_with_their_context},
    {"sparse_arrays_hold_what_is_mapped_into_them", sparse_arrays_hold_what_is_mapped_into_them},
    {"sparse_arrays_hold_what_a_refused_list_maps", sparse_arrays_hold_what_a_refused_list_maps},
    {"no_more_of_a_refused_list_is_read_than_the_driver_reads",
     no_more_of_a_refused_list_is_read_than_the_driver_reads},
    {"others_go_on_while_a_context_waits_for_memory",
     others_go_on_while_a_context_waits_for_memory},
    {"others_go_on_while_a_limit_waits_for_memory", others_go_on_while_a_limit_waits_for_memory},
    {"variables_of_modules", variables_of_modules},
    {"modules_in_files", modules_in_files},
    {"variables_of_libraries", variables_of_libraries},
    {"a_library_gives_nothing_back_that_its_context_has_taken_along",
     a_library_gives_nothing_back_that_its_context_has_taken_along},
    {"libraries_without_a_context_are_charged", libraries_without_a_context_are_charged},
    {"variables_with_names_of_any_length", variables_with_names_of_any_length},
    {"variables_with_sizes_by_expressions", variables_with_sizes_by_expressions},
    {"modules_are_refused", modules_are_refused},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}
