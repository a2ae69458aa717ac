// SPDX-License-Identifier: Apache-2.0
// Arrays, mipmapped arrays, textures and surfaces.
#ifndef ALLOTMENT_CUDA_ABI_ARRAY_H
#define ALLOTMENT_CUDA_ABI_ARRAY_H

#include "virtual.h"

#define CUDA_ARRAY3D_LAYERED 0x01
#define CUDA_ARRAY3D_SURFACE_LDST 0x02
#define CUDA_ARRAY3D_CUBEMAP 0x04
#define CUDA_ARRAY3D_TEXTURE_GATHER 0x08
#define CUDA_ARRAY3D_DEPTH_TEXTURE 0x10
#define CUDA_ARRAY3D_COLOR_ATTACHMENT 0x20
#define CUDA_ARRAY3D_SPARSE 0x40
#define CUDA_ARRAY3D_DEFERRED_MAPPING 0x80

typedef struct CUDA_ARRAY_DESCRIPTOR {
  size_t Width;
  size_t Height;
  CUarray_format Format;
  unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR;
typedef CUDA_ARRAY_DESCRIPTOR CUDA_ARRAY_DESCRIPTOR_v2;

typedef struct CUDA_ARRAY_MEMORY_REQUIREMENTS {
  size_t size;
  size_t alignment;
  unsigned int reserved[4];
} CUDA_ARRAY_MEMORY_REQUIREMENTS;
typedef CUDA_ARRAY_MEMORY_REQUIREMENTS CUDA_ARRAY_MEMORY_REQUIREMENTS_v1;

typedef struct CUDA_ARRAY3D_DESCRIPTOR {
  size_t Width;
  size_t Height;
  size_t Depth;
  CUarray_format Format;
  unsigned int NumChannels;
  unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR;
typedef CUDA_ARRAY3D_DESCRIPTOR CUDA_ARRAY3D_DESCRIPTOR_v2;

typedef unsigned long long CUtexObject_v1;

typedef CUtexObject_v1 CUtexObject;

typedef struct CUDA_RESOURCE_DESC {
  CUresourcetype resType;
  union {
    struct {
      CUarray hArray;
    } array;
    struct {
      CUmipmappedArray hMipmappedArray;
    } mipmap;
    struct {
      CUdeviceptr devPtr;
      CUarray_format format;
      unsigned int numChannels;
      size_t sizeInBytes;
    } linear;
    struct {
      CUdeviceptr devPtr;
      CUarray_format format;
      unsigned int numChannels;
      size_t width;
      size_t height;
      size_t pitchInBytes;
    } pitch2D;
    struct {
      int reserved[32];
    } reserved;
  } res;
  unsigned int flags;
} CUDA_RESOURCE_DESC;
typedef CUDA_RESOURCE_DESC CUDA_RESOURCE_DESC_v1;

typedef enum CUaddress_mode {
  CU_TR_ADDRESS_MODE_WRAP = 0,
  CU_TR_ADDRESS_MODE_CLAMP = 1,
  CU_TR_ADDRESS_MODE_MIRROR = 2,
  CU_TR_ADDRESS_MODE_BORDER = 3,
} CUaddress_mode;

typedef enum CUfilter_mode {
  CU_TR_FILTER_MODE_POINT = 0,
  CU_TR_FILTER_MODE_LINEAR = 1,
} CUfilter_mode;

typedef struct CUDA_TEXTURE_DESC {
  CUaddress_mode addressMode[3];
  CUfilter_mode filterMode;
  unsigned int flags;
  unsigned int maxAnisotropy;
  CUfilter_mode mipmapFilterMode;
  float mipmapLevelBias;
  float minMipmapLevelClamp;
  float maxMipmapLevelClamp;
  float borderColor[4];
  int reserved[12];
} CUDA_TEXTURE_DESC;
typedef CUDA_TEXTURE_DESC CUDA_TEXTURE_DESC_v1;

typedef enum CUresourceViewFormat {
  CU_RES_VIEW_FORMAT_NONE = 0,
  CU_RES_VIEW_FORMAT_UINT_1X8 = 1,
  CU_RES_VIEW_FORMAT_UINT_2X8 = 2,
  CU_RES_VIEW_FORMAT_UINT_4X8 = 3,
  CU_RES_VIEW_FORMAT_SINT_1X8 = 4,
  CU_RES_VIEW_FORMAT_SINT_2X8 = 5,
  CU_RES_VIEW_FORMAT_SINT_4X8 = 6,
  CU_RES_VIEW_FORMAT_UINT_1X16 = 7,
  CU_RES_VIEW_FORMAT_UINT_2X16 = 8,
  CU_RES_VIEW_FORMAT_UINT_4X16 = 9,
  CU_RES_VIEW_FORMAT_SINT_1X16 = 10,
  CU_RES_VIEW_FORMAT_SINT_2X16 = 11,
  CU_RES_VIEW_FORMAT_SINT_4X16 = 12,
  CU_RES_VIEW_FORMAT_UINT_1X32 = 13,
  CU_RES_VIEW_FORMAT_UINT_2X32 = 14,
  CU_RES_VIEW_FORMAT_UINT_4X32 = 15,
  CU_RES_VIEW_FORMAT_SINT_1X32 = 16,
  CU_RES_VIEW_FORMAT_SINT_2X32 = 17,
  CU_RES_VIEW_FORMAT_SINT_4X32 = 18,
  CU_RES_VIEW_FORMAT_FLOAT_1X16 = 19,
  CU_RES_VIEW_FORMAT_FLOAT_2X16 = 20,
  CU_RES_VIEW_FORMAT_FLOAT_4X16 = 21,
  CU_RES_VIEW_FORMAT_FLOAT_1X32 = 22,
  CU_RES_VIEW_FORMAT_FLOAT_2X32 = 23,
  CU_RES_VIEW_FORMAT_FLOAT_4X32 = 24,
  CU_RES_VIEW_FORMAT_UNSIGNED_BC1 = 25,
  CU_RES_VIEW_FORMAT_UNSIGNED_BC2 = 26,
  CU_RES_VIEW_FORMAT_UNSIGNED_BC3 = 27,
  CU_RES_VIEW_FORMAT_UNSIGNED_BC4 = 28,
  CU_RES_VIEW_FORMAT_SIGNED_BC4 = 29,
  CU_RES_VIEW_FORMAT_UNSIGNED_BC5 = 30,
  CU_RES_VIEW_FORMAT_SIGNED_BC5 = 31,
  CU_RES_VIEW_FORMAT_UNSIGNED_BC6H = 32,
  CU_RES_VIEW_FORMAT_SIGNED_BC6H = 33,
  CU_RES_VIEW_FORMAT_UNSIGNED_BC7 = 34,
} CUresourceViewFormat;

typedef struct CUDA_RESOURCE_VIEW_DESC {
  CUresourceViewFormat format;
  size_t width;
  size_t height;
  size_t depth;
  unsigned int firstMipmapLevel;
  unsigned int lastMipmapLevel;
  unsigned int firstLayer;
  unsigned int lastLayer;
  unsigned int reserved[16];
} CUDA_RESOURCE_VIEW_DESC;
typedef CUDA_RESOURCE_VIEW_DESC CUDA_RESOURCE_VIEW_DESC_v1;

typedef unsigned long long CUsurfObject_v1;

typedef CUsurfObject_v1 CUsurfObject;

typedef struct CUDA_ARRAY_DESCRIPTOR_v1 {
  unsigned int Width;
  unsigned int Height;
  CUarray_format Format;
  unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR_v1;

typedef struct CUDA_ARRAY3D_DESCRIPTOR_v1 {
  unsigned int Width;
  unsigned int Height;
  unsigned int Depth;
  CUarray_format Format;
  unsigned int NumChannels;
  unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR_v1;

CU_ENTRY(cuArrayCreate_v2, (CUarray * handle, const CUDA_ARRAY_DESCRIPTOR *allocate_array));
CU_ENTRY(cuArrayGetDescriptor_v2, (CUDA_ARRAY_DESCRIPTOR * array_descriptor, CUarray array));
CU_ENTRY(cuArrayGetMemoryRequirements,
         (CUDA_ARRAY_MEMORY_REQUIREMENTS * memory_requirements, CUarray array, CUdevice device));
CU_ENTRY(cuMipmappedArrayGetMemoryRequirements,
         (CUDA_ARRAY_MEMORY_REQUIREMENTS * memory_requirements, CUmipmappedArray mipmap,
          CUdevice device));
CU_ENTRY(cuArrayGetPlane, (CUarray * plane_array, CUarray array, unsigned int plane_idx));
CU_ENTRY(cuArrayDestroy, (CUarray array));
CU_ENTRY(cuArray3DCreate_v2, (CUarray * handle, const CUDA_ARRAY3D_DESCRIPTOR *allocate_array));
CU_ENTRY(cuArray3DGetDescriptor_v2, (CUDA_ARRAY3D_DESCRIPTOR * array_descriptor, CUarray array));
CU_ENTRY(cuMipmappedArrayCreate,
         (CUmipmappedArray * handle, const CUDA_ARRAY3D_DESCRIPTOR *mipmapped_array_desc,
          unsigned int num_mipmap_levels));
CU_ENTRY(cuMipmappedArrayGetLevel,
         (CUarray * level_array, CUmipmappedArray mipmapped_array, unsigned int level));
CU_ENTRY(cuMipmappedArrayDestroy, (CUmipmappedArray mipmapped_array));
CU_ENTRY(cuTexObjectCreate,
         (CUtexObject * tex_object, const CUDA_RESOURCE_DESC *res_desc,
          const CUDA_TEXTURE_DESC *tex_desc, const CUDA_RESOURCE_VIEW_DESC *res_view_desc));
CU_ENTRY(cuTexObjectDestroy, (CUtexObject tex_object));
CU_ENTRY(cuTexObjectGetResourceDesc, (CUDA_RESOURCE_DESC * res_desc, CUtexObject tex_object));
CU_ENTRY(cuTexObjectGetTextureDesc, (CUDA_TEXTURE_DESC * tex_desc, CUtexObject tex_object));
CU_ENTRY(cuTexObjectGetResourceViewDesc,
         (CUDA_RESOURCE_VIEW_DESC * res_view_desc, CUtexObject tex_object));
CU_ENTRY(cuSurfObjectCreate, (CUsurfObject * surf_object, const CUDA_RESOURCE_DESC *res_desc));
CU_ENTRY(cuSurfObjectDestroy, (CUsurfObject surf_object));
CU_ENTRY(cuSurfObjectGetResourceDesc, (CUDA_RESOURCE_DESC * res_desc, CUsurfObject surf_object));
CU_ENTRY(cuArrayCreate, (CUarray * handle, const CUDA_ARRAY_DESCRIPTOR_v1 *allocate_array));
CU_ENTRY(cuArrayGetDescriptor, (CUDA_ARRAY_DESCRIPTOR_v1 * array_descriptor, CUarray array));
CU_ENTRY(cuArray3DCreate, (CUarray * handle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *allocate_array));
CU_ENTRY(cuArray3DGetDescriptor, (CUDA_ARRAY3D_DESCRIPTOR_v1 * array_descriptor, CUarray array));

#endif
