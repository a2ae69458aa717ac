// SPDX-License-Identifier: Apache-2.0
// Programs of mode mps start when the control daemon of their GPU is there.
#ifndef ALLOTMENT_SHIM_MPS_H
#define ALLOTMENT_SHIM_MPS_H

#include "process.h"

// Returns CUDA_SUCCESS as soon as a daemon has the socket in the program's pipe directory; at once
// in shares of other modes. CUDA_ERROR_DEVICE_UNAVAILABLE: the program has removed the variable
// that names the directory; it would be no client. CUDA_ERROR_MPS_CONNECTION_FAILED: no daemon for
// a minute. Of both stderr has the reason.
CUresult mps_wait_for_daemon(const process *own);

#endif
