// SPDX-License-Identifier: Apache-2.0
// The CUDA driver's ABI, as far as the simulated driver offers it and the shim wraps it.
//
// Declared by hand from the facts of the public interface (names, values, layouts, prototypes) up
// to CUDA 13.5, so that nothing here needs NVIDIA's header to build. tests/native/test_cuda_abi.py
// compares every value, layout and prototype with the real header where one is installed.
//
// Each file includes the one before it: base, device, context, stream, memory, pool, virtual,
// array, copy, sharing, module, graph, checkpoint.
#ifndef ALLOTMENT_CUDA_ABI_H
#define ALLOTMENT_CUDA_ABI_H

#include "cuda_abi/checkpoint.h"

#endif
