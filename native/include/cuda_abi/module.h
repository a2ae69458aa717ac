// SPDX-License-Identifier: Apache-2.0
// Modules, libraries, functions, occupancy and launches.
#ifndef ALLOTMENT_CUDA_ABI_MODULE_H
#define ALLOTMENT_CUDA_ABI_MODULE_H

#include "sharing.h"

// `extra` of a launch: pairs of a tag and its value, ended by END.
#define CU_LAUNCH_PARAM_END ((void *)0x00)
#define CU_LAUNCH_PARAM_BUFFER_POINTER ((void *)0x01)
#define CU_LAUNCH_PARAM_BUFFER_SIZE ((void *)0x02)

typedef enum CUoccupancy_flags {
  CU_OCCUPANCY_DEFAULT = 0,
  CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE = 1,
} CUoccupancy_flags;

typedef enum CUshared_carveout {
  CU_SHAREDMEM_CARVEOUT_DEFAULT = -1,
  CU_SHAREDMEM_CARVEOUT_MAX_SHARED = 100,
  CU_SHAREDMEM_CARVEOUT_MAX_L1 = 0,
} CUshared_carveout;

typedef struct CUmod_st *CUmodule;

typedef enum CUjit_option {
  CU_JIT_MAX_REGISTERS = 0,
  CU_JIT_THREADS_PER_BLOCK = 1,
  CU_JIT_WALL_TIME = 2,
  CU_JIT_INFO_LOG_BUFFER = 3,
  CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES = 4,
  CU_JIT_ERROR_LOG_BUFFER = 5,
  CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
  CU_JIT_OPTIMIZATION_LEVEL = 7,
  CU_JIT_TARGET_FROM_CUCONTEXT = 8,
  CU_JIT_TARGET = 9,
  CU_JIT_FALLBACK_STRATEGY = 10,
  CU_JIT_GENERATE_DEBUG_INFO = 11,
  CU_JIT_LOG_VERBOSE = 12,
  CU_JIT_GENERATE_LINE_INFO = 13,
  CU_JIT_CACHE_MODE = 14,
  CU_JIT_NEW_SM3X_OPT = 15,
  CU_JIT_FAST_COMPILE = 16,
  CU_JIT_GLOBAL_SYMBOL_NAMES = 17,
  CU_JIT_GLOBAL_SYMBOL_ADDRESSES = 18,
  CU_JIT_GLOBAL_SYMBOL_COUNT = 19,
  CU_JIT_LTO = 20,
  CU_JIT_FTZ = 21,
  CU_JIT_PREC_DIV = 22,
  CU_JIT_PREC_SQRT = 23,
  CU_JIT_FMA = 24,
  CU_JIT_REFERENCED_KERNEL_NAMES = 25,
  CU_JIT_REFERENCED_KERNEL_COUNT = 26,
  CU_JIT_REFERENCED_VARIABLE_NAMES = 27,
  CU_JIT_REFERENCED_VARIABLE_COUNT = 28,
  CU_JIT_OPTIMIZE_UNUSED_DEVICE_VARIABLES = 29,
  CU_JIT_POSITION_INDEPENDENT_CODE = 30,
  CU_JIT_MIN_CTA_PER_SM = 31,
  CU_JIT_MAX_THREADS_PER_BLOCK = 32,
  CU_JIT_OVERRIDE_DIRECTIVE_VALUES = 33,
  CU_JIT_SPLIT_COMPILE = 34,
  CU_JIT_BINARY_LOADER_THREAD_COUNT = 35,
  CU_JIT_NUM_OPTIONS = 36,
} CUjit_option;

typedef struct CUfunc_st *CUfunction;

typedef struct CUlinkState_st *CUlinkState;

typedef enum CUjitInputType {
  CU_JIT_INPUT_CUBIN = 0,
  CU_JIT_INPUT_PTX = 1,
  CU_JIT_INPUT_FATBINARY = 2,
  CU_JIT_INPUT_OBJECT = 3,
  CU_JIT_INPUT_LIBRARY = 4,
  CU_JIT_INPUT_NVVM = 5,
  CU_JIT_NUM_INPUT_TYPES = 6,
} CUjitInputType;

typedef struct CUlib_st *CUlibrary;

typedef enum CUlibraryOption {
  CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE = 0,
  CU_LIBRARY_BINARY_IS_PRESERVED = 1,
  CU_LIBRARY_NUM_OPTIONS = 2,
} CUlibraryOption;

typedef struct CUkern_st *CUkernel;

typedef enum CUfunction_attribute {
  CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
  CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
  CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES = 2,
  CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
  CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
  CU_FUNC_ATTRIBUTE_PTX_VERSION = 5,
  CU_FUNC_ATTRIBUTE_BINARY_VERSION = 6,
  CU_FUNC_ATTRIBUTE_CACHE_MODE_CA = 7,
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9,
  CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET = 10,
  CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH = 11,
  CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT = 12,
  CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH = 13,
  CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
  CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE = 15,
  CU_FUNC_ATTRIBUTE_DEVICE_NODE_UPDATE_SUPPORTED = 16,
  CU_FUNC_ATTRIBUTE_SHARED_MEMORY_MODE = 17,
  CU_FUNC_ATTRIBUTE_MAX = 18,
} CUfunction_attribute;

typedef enum CUfunctionLoadingState {
  CU_FUNCTION_LOADING_STATE_UNLOADED = 0,
  CU_FUNCTION_LOADING_STATE_LOADED = 1,
  CU_FUNCTION_LOADING_STATE_MAX = 2,
} CUfunctionLoadingState;

typedef struct CUDA_LAUNCH_PARAMS {
  CUfunction function;
  unsigned int gridDimX;
  unsigned int gridDimY;
  unsigned int gridDimZ;
  unsigned int blockDimX;
  unsigned int blockDimY;
  unsigned int blockDimZ;
  unsigned int sharedMemBytes;
  CUstream hStream;
  void **kernelParams;
} CUDA_LAUNCH_PARAMS;
typedef CUDA_LAUNCH_PARAMS CUDA_LAUNCH_PARAMS_v1;

typedef unsigned long (*CUoccupancyB2DSize)(int);

typedef struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char pad[4];
  CUlaunchAttributeValue value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
  unsigned int gridDimX;
  unsigned int gridDimY;
  unsigned int gridDimZ;
  unsigned int blockDimX;
  unsigned int blockDimY;
  unsigned int blockDimZ;
  unsigned int sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute *attrs;
  unsigned int numAttrs;
} CUlaunchConfig;

CU_ENTRY(cuModuleLoad, (CUmodule * module, const char *fname));
CU_ENTRY(cuModuleLoadData, (CUmodule * module, const void *image));
CU_ENTRY(cuModuleLoadDataEx, (CUmodule * module, const void *image, unsigned int num_options,
                              CUjit_option *options, void **option_values));
CU_ENTRY(cuModuleLoadFatBinary, (CUmodule * module, const void *fat_cubin));
CU_ENTRY(cuModuleUnload, (CUmodule hmod));
CU_ENTRY(cuModuleGetLoadingMode, (CUmoduleLoadingMode * mode));
CU_ENTRY(cuModuleGetFunction, (CUfunction * function, CUmodule hmod, const char *name));
CU_ENTRY(cuModuleGetFunctionCount, (unsigned int *count, CUmodule mod));
CU_ENTRY(cuModuleEnumerateFunctions,
         (CUfunction * functions, unsigned int num_functions, CUmodule mod));
CU_ENTRY(cuModuleGetGlobal_v2,
         (CUdeviceptr * pointer, size_t *bytes, CUmodule hmod, const char *name));
CU_ENTRY(cuLinkCreate_v2, (unsigned int num_options, CUjit_option *options, void **option_values,
                           CUlinkState *state_out));
CU_ENTRY(cuLinkAddData_v2,
         (CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
          unsigned int num_options, CUjit_option *options, void **option_values));
CU_ENTRY(cuLinkAddFile_v2, (CUlinkState state, CUjitInputType type, const char *path,
                            unsigned int num_options, CUjit_option *options, void **option_values));
CU_ENTRY(cuLinkComplete, (CUlinkState state, void **cubin_out, size_t *size_out));
CU_ENTRY(cuLinkDestroy, (CUlinkState state));
CU_ENTRY(cuLibraryLoadData,
         (CUlibrary * library, const void *code, CUjit_option *jit_options,
          void **jit_options_values, unsigned int num_jit_options, CUlibraryOption *library_options,
          void **library_option_values, unsigned int num_library_options));
CU_ENTRY(cuLibraryLoadFromFile,
         (CUlibrary * library, const char *file_name, CUjit_option *jit_options,
          void **jit_options_values, unsigned int num_jit_options, CUlibraryOption *library_options,
          void **library_option_values, unsigned int num_library_options));
CU_ENTRY(cuLibraryUnload, (CUlibrary library));
CU_ENTRY(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name));
CU_ENTRY(cuLibraryGetKernelCount, (unsigned int *count, CUlibrary lib));
CU_ENTRY(cuLibraryEnumerateKernels, (CUkernel * kernels, unsigned int num_kernels, CUlibrary lib));
CU_ENTRY(cuLibraryGetModule, (CUmodule * mod, CUlibrary library));
CU_ENTRY(cuKernelGetFunction, (CUfunction * func, CUkernel kernel));
CU_ENTRY(cuKernelGetLibrary, (CUlibrary * lib, CUkernel kernel));
CU_ENTRY(cuLibraryGetGlobal,
         (CUdeviceptr * pointer, size_t *bytes, CUlibrary library, const char *name));
CU_ENTRY(cuLibraryGetManaged,
         (CUdeviceptr * pointer, size_t *bytes, CUlibrary library, const char *name));
CU_ENTRY(cuLibraryGetUnifiedFunction, (void **fptr, CUlibrary library, const char *symbol));
CU_ENTRY(cuKernelGetAttribute,
         (int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice device));
CU_ENTRY(cuKernelSetAttribute,
         (CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice device));
CU_ENTRY(cuKernelSetCacheConfig, (CUkernel kernel, CUfunc_cache config, CUdevice device));
CU_ENTRY(cuKernelGetName, (const char **name, CUkernel function));
CU_ENTRY(cuKernelGetParamInfo,
         (CUkernel kernel, size_t param_index, size_t *param_offset, size_t *param_size));
CU_ENTRY(cuKernelGetParamCount, (CUkernel kernel, size_t *param_count));
CU_ENTRY(cuFuncGetAttribute, (int *pi, CUfunction_attribute attrib, CUfunction function));
CU_ENTRY(cuFuncSetAttribute, (CUfunction function, CUfunction_attribute attrib, int value));
CU_ENTRY(cuFuncSetCacheConfig, (CUfunction function, CUfunc_cache config));
CU_ENTRY(cuFuncGetModule, (CUmodule * hmod, CUfunction function));
CU_ENTRY(cuFuncGetName, (const char **name, CUfunction function));
CU_ENTRY(cuFuncGetParamInfo,
         (CUfunction func, size_t param_index, size_t *param_offset, size_t *param_size));
CU_ENTRY(cuFuncGetParamCount, (CUfunction func, size_t *param_count));
CU_ENTRY(cuFuncIsLoaded, (CUfunctionLoadingState * state, CUfunction function));
CU_ENTRY(cuFuncLoad, (CUfunction function));
CU_ENTRY(cuLaunchCooperativeKernelMultiDevice,
         (CUDA_LAUNCH_PARAMS * launch_params_list, unsigned int num_devices, unsigned int flags));
CU_ENTRY(cuFuncSetSharedMemConfig, (CUfunction function, CUsharedconfig config));
CU_ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor,
         (int *num_blocks, CUfunction func, int block_size, size_t dynamic_smem_size));
CU_ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
         (int *num_blocks, CUfunction func, int block_size, size_t dynamic_smem_size,
          unsigned int flags));
CU_ENTRY(cuOccupancyMaxPotentialBlockSize, (int *min_grid_size, int *block_size, CUfunction func,
                                            CUoccupancyB2DSize block_size_to_dynamic_smem_size,
                                            size_t dynamic_smem_size, int block_size_limit));
CU_ENTRY(cuOccupancyMaxPotentialBlockSizeWithFlags,
         (int *min_grid_size, int *block_size, CUfunction func,
          CUoccupancyB2DSize block_size_to_dynamic_smem_size, size_t dynamic_smem_size,
          int block_size_limit, unsigned int flags));
CU_ENTRY(cuOccupancyAvailableDynamicSMemPerBlock,
         (size_t *dynamic_smem_size, CUfunction func, int num_blocks, int block_size));
CU_ENTRY(cuOccupancyMaxPotentialClusterSize,
         (int *cluster_size, CUfunction func, const CUlaunchConfig *config));
CU_ENTRY(cuOccupancyMaxActiveClusters,
         (int *num_clusters, CUfunction func, const CUlaunchConfig *config));
CU_ENTRY(cuLinkCreate, (unsigned int num_options, CUjit_option *options, void **option_values,
                        CUlinkState *state_out));
CU_ENTRY(cuLinkAddData,
         (CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
          unsigned int num_options, CUjit_option *options, void **option_values));
CU_ENTRY(cuLinkAddFile, (CUlinkState state, CUjitInputType type, const char *path,
                         unsigned int num_options, CUjit_option *options, void **option_values));
CU_ENTRY(cuModuleGetGlobal,
         (CUdeviceptr_v1 * pointer, unsigned int *bytes, CUmodule hmod, const char *name));
CU_ENTRY_PTSZ(cuLaunchKernel,
              (CUfunction function, unsigned int grid_dim_x, unsigned int grid_dim_y,
               unsigned int grid_dim_z, unsigned int block_dim_x, unsigned int block_dim_y,
               unsigned int block_dim_z, unsigned int shared_mem_bytes, CUstream stream,
               void **kernel_params, void **extra));
CU_ENTRY_PTSZ(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function,
                                 void **kernel_params, void **extra));
CU_ENTRY_PTSZ(cuLaunchCooperativeKernel,
              (CUfunction function, unsigned int grid_dim_x, unsigned int grid_dim_y,
               unsigned int grid_dim_z, unsigned int block_dim_x, unsigned int block_dim_y,
               unsigned int block_dim_z, unsigned int shared_mem_bytes, CUstream stream,
               void **kernel_params));

#endif
