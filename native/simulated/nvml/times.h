// SPDX-License-Identifier: Apache-2.0
// How long the processes of a simulated machine have computed: exported by libnvidia-ml.so.1 of
// this folder beside NVML's own functions (times.c). `machine` NULL: the one the environment names.
#ifndef ALLOTMENT_SIMULATED_TIMES_H
#define ALLOTMENT_SIMULATED_TIMES_H

#include "simulated/nvml/library.h"

typedef struct allot_simulated_time {
  int32_t pid;          // getpid of the process
  uint32_t lives;       // 0: it ended, and its row is kept until another process takes its place
  uint64_t start_time;  // field 22 of /proc/<pid>/stat: tells two processes of one number apart
  uint64_t busy_ns;     // time in which a kernel of it ran
  uint64_t copy_ns;     // time that copy engines worked for it
  uint64_t memory_bytes;
} allot_simulated_time;

// Every process that computes on the machine or did, at one moment. *count: in, how many rows there
// is room for; out, how many there are (-ENOSPC: more than there was room for). busy_ns: time in
// which any kernel ran on the GPU. now_ns: the moment, of CLOCK_MONOTONIC.
NVML_EXPORT int allotSimulatedTimes(const char *machine, unsigned int gpu,
                                    allot_simulated_time *times, unsigned int *count,
                                    unsigned long long *busy_ns, unsigned long long *now_ns);
// Of one process by its number: -ESRCH if there is none. `gpu` is the machine's number of it.
NVML_EXPORT int allotSimulatedProcessBusy(unsigned int pid, unsigned int gpu,
                                          unsigned long long *busy_ns);

// Puts a GPU's pending MIG mode into force; what is cut from it goes, and its counters since the
// last reset (energy, volatile ECC errors) begin at 0. -EBUSY: a process uses it, or
// a GPU that NVLink joins to it; -EACCES: a tenant may not; -EIO: a fault.
NVML_EXPORT int allotSimulatedReset(const char *machine, unsigned int gpu);
// The length of a GPU's turns, as of `nvidia-smi compute-policy --set-timeslice`: 0 default,
// 1 short, 2 medium, 3 long.
NVML_EXPORT int allotSimulatedSetTimeslice(const char *machine, unsigned int gpu,
                                           unsigned int length);

// For functions like these: opens the machine and brings the GPU to the present; with 0 until
// times_end no other one runs.
int times_begin(const char *path, unsigned int gpu, allot_handle **handle);
void times_end(void);

#endif
