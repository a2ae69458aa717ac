// SPDX-License-Identifier: Apache-2.0
// What libcuda and the control daemon say to each other: one question, one answer, on the socket
// `control` of the pipe directory. NVIDIA's own protocol is not published; names of files and what
// programs see of them are NVIDIA's (docs/designs/simulated-gpus.md).
#ifndef ALLOTMENT_MPS_PROTOCOL_H
#define ALLOTMENT_MPS_PROTOCOL_H

#include <stddef.h>
#include <stdint.h>

#define MPS_PIPE_ENV "CUDA_MPS_PIPE_DIRECTORY"
#define MPS_LOG_ENV "CUDA_MPS_LOG_DIRECTORY"
#define MPS_PERCENTAGE_ENV "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
#define MPS_MEMORY_ENV "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
#define MPS_PRIORITY_ENV "CUDA_MPS_CLIENT_PRIORITY"
#define MPS_PROTOCOL_ENV "CUDA_MPS_PROTOCOL_VERSION"
#define MPS_PIPE_DEFAULT "/tmp/nvidia-mps"
#define MPS_LOG_DEFAULT "/var/log/nvidia-mps"
#define MPS_CONTROL "control"
#define MPS_PRIVILEGED "control_privileged"

typedef struct mps_question {
  uint64_t machine;       // inode of the machine file: a daemon serves one machine's GPUs
  uint32_t slot;          // of the process that wants to be a client
  uint32_t percentage;    // 1 to 100
  uint32_t priority;      // 0 or 1
  uint32_t has_priority;  // the program has set it
} mps_question;

typedef struct mps_answer {
  uint32_t result;    // CUresult
  uint32_t gpus;      // a bit for each GPU that the server has
  uint32_t protocol;  // of the daemon: 2, or 3
  uint32_t spare;
} mps_answer;

// What programs write as an amount of memory, as in 1024K, 512M or 2G; 0: no amount.
uint64_t mps_amount(const char *text, size_t length);
// A socket of a pipe directory, whose path may be longer than a socket's can be: connected, or
// bound and listening. Negative errno.
int mps_connect(const char *folder, const char *name);
int mps_listen(const char *folder, const char *name, unsigned mode);

#endif
