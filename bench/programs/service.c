// SPDX-License-Identifier: Apache-2.0
// A service that answers requests by one kernel each, and tells how long each of them took.
//
//   service KERNEL_NS REQUESTS_PER_SECOND SECONDS
//
// Requests come at even intervals, shifted at random by up to half of one, whether or not the one
// before is over. A request that comes while the service waits for it is timed from when the
// service woke up, so that the operating system's part in waking it is nobody's latency; one that
// comes earlier is timed from when it came. Starts when stdin ends.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "lanes.h"

int main(int count, char **arguments) {
  if (count != 4) {
    fprintf(stderr, "usage: service KERNEL_NS REQUESTS_PER_SECOND SECONDS\n");
    return 2;
  }
  uint64_t kernel_ns = strtoull(arguments[1], NULL, 10);
  double rate = strtod(arguments[2], NULL), seconds = strtod(arguments[3], NULL);
  size_t requests = (size_t)(rate * seconds);
  int64_t *latencies = calloc(requests + 1, sizeof *latencies);
  if (latencies == NULL) return 3;
  open_device();
  WRAPPED(cuStreamCreate);
  WRAPPED(cuEventRecord);
  WRAPPED(cuEventSynchronize);
  CUfunction function = spin_function();
  unsigned int grid = whole_grid();
  CUstream stream;
  need(wrapped_cuStreamCreate(&stream, 1), "cuStreamCreate");
  CUevent over = blocking_event();
  wait_for_start();
  uint64_t begun_ns = now_ns(), random = begun_ns, period_ns = (uint64_t)(1e9 / rate);
  for (size_t index = 0; index < requests; index++) {
    uint64_t came_ns = begun_ns + index * period_ns + random_u64(&random) % (period_ns / 2);
    uint64_t free_ns = now_ns();
    sleep_until(came_ns);
    uint64_t from_ns = came_ns < free_ns ? came_ns : now_ns();
    launch_whole(function, grid, &kernel_ns, stream);
    need(wrapped_cuEventRecord(over, stream), "cuEventRecord");
    need(wrapped_cuEventSynchronize(over), "cuEventSynchronize");
    latencies[index] = (int64_t)(now_ns() - from_ns);
  }
  printf("{\"pid\": %d, \"begun_ns\": %llu, \"ended_ns\": %llu, \"latencies_ns\": [", (int)getpid(),
         (unsigned long long)begun_ns, (unsigned long long)now_ns());
  for (size_t index = 0; index < requests; index++)
    printf("%s%lld", index == 0 ? "" : ", ", (long long)latencies[index]);
  printf("]}\n");
  fflush(stdout);
  sleep_until(now_ns() + 200000000u);  // the sampler sees the last of this process
  return 0;
}
