// SPDX-License-Identifier: Apache-2.0
// How much device memory an array takes.
#ifndef ALLOTMENT_SHIM_ARRAY_SIZE_H
#define ALLOTMENT_SHIM_ARRAY_SIZE_H

#include "cuda_abi.h"
#include "shim.h"

// Bytes of all levels; 0 for arrays that have no memory of their own.
uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels);

#endif
