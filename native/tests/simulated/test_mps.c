// SPDX-License-Identifier: Apache-2.0
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: a100-80gb
//
// Clients of an MPS server as the engine has them: one turn, a part of the multiprocessors for
// each, one fate. The server is a bare process here and who becomes a client says so itself; how
// real ones come to each other is tested with the control program (tests/local/test_mps.py).
#include <signal.h>

#include "simulated/cuda/driver.h"
#undef MIB  // both have it, alike
#include "driver_test.h"

static const char trap_ptx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry allot_trap()\n{\n  ret;\n}\n";

static allot_handle seen;
static int shared[2];  // of children to the test

static pid_t serve(int *slot) {
  pid_t child = fork();
  if (child == 0) {
    allot_handle own;
    assert(allot_machine_open(&own) == 0);
    assert(allot_machine_attach(&own, ALLOT_PROCESS_MPS_SERVER) == 0);
    allot_store(&own.machine->processes[own.slot].gpus[0].contexts, 1u);
    assert(write(shared[1], &own.slot, sizeof own.slot) == (ssize_t)sizeof own.slot);
    for (;;) pause();
  }
  assert(read(shared[0], slot, sizeof *slot) == (ssize_t)sizeof *slot);
  return child;
}

static void become_client(int server, uint32_t percentage) {
  OK(cuInit(0));
  allot_mps *own = &driver.machine.machine->processes[driver.machine.slot].mps;
  own->percentage = percentage;
  allot_store(&own->server, (uint32_t)server + 1);
}

static void spin_on(CUfunction spin, unsigned blocks, uint64_t nanoseconds, CUstream stream) {
  void *parameters[] = {&nanoseconds};
  OK(cuLaunchKernel(spin, blocks, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL));
}

static uint64_t own_busy(void) {
  return driver.machine.machine->processes[driver.machine.slot].gpus[0].busy_ns;
}

static void finish(pid_t child) {
  int status;
  assert(waitpid(child, &status, 0) == child);
  if (status != 0) fprintf(stderr, "a child ended with %x\n", (unsigned)status);
  assert(status == 0);
}

static void end(pid_t child) {
  kill(child, SIGKILL);
  waitpid(child, NULL, 0);
}

static void wait_for_children(int count) {
  char word;
  for (int i = 0; i < count; i++) assert(read(shared[0], &word, 1) == 1);
}

static void tell(void) {
  assert(write(shared[1], "x", 1) == 1);
}

// Each of two processes runs a kernel of `ms` on half of the GPU. Returns how long the GPU was
// busy.
static uint64_t run_two(int server, uint64_t ms) {
  int go[2];
  assert(pipe(go) == 0);
  uint64_t before = seen.machine->engines[0].busy_ns;
  pid_t children[2];
  for (int i = 0; i < 2; i++) {
    children[i] = fork();
    if (children[i] != 0) continue;
    if (server >= 0) become_client(server, 50);
    begin(0);
    CUfunction spin = load_spin();
    tell();
    char word;
    assert(read(go[0], &word, 1) == 1);
    spin_on(spin, 54 * 2, ms * MILLISECOND, NULL);
    OK(cuCtxSynchronize());
    assert(own_busy() >= ms * MILLISECOND * 9 / 10);
    _exit(0);
  }
  wait_for_children(2);
  assert(write(go[1], "xx", 2) == 2);
  finish(children[0]);
  finish(children[1]);
  return seen.machine->engines[0].busy_ns - before;
}

static void clients_run_at_once(void) {
  int server;
  pid_t served = serve(&server);
  // The GPU would be busy for twice as long if one waited for the other, even if one begins late.
  assert(run_two(server, 2000) < 3900 * MILLISECOND);
  end(served);
  assert(run_two(-1, 400) > 780 * MILLISECOND);
}

// Kernels of 20 multiprocessors each in streams of their own: one at a time within a fourth of 108.
static void a_client_has_its_part(void) {
  int server;
  pid_t served = serve(&server), child = fork();
  if (child == 0) {
    become_client(server, 25);
    CUcontext context = begin(0);
    int count;
    OK(cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
    assert(count == 26);
    CUfunction spin = load_spin();
    CUstream streams[3];
    for (int i = 0; i < 3; i++) {
      OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
      spin_on(spin, 40, 50 * MILLISECOND, streams[i]);
    }
    OK(cuCtxSynchronize());
    assert(own_busy() > 145 * MILLISECOND);
    // One that would fill the GPU takes as much longer as it has less of it.
    uint64_t before = own_busy();
    fill_for(spin, 20 * MILLISECOND, NULL);
    OK(cuCtxSynchronize());
    assert(own_busy() - before > 80 * MILLISECOND && own_busy() - before < 90 * MILLISECOND);
    assert(context != NULL);
    _exit(0);
  }
  finish(child);
  end(served);
}

static void a_limit_of_memory_is_each_processs(void) {
  int server;
  pid_t served = serve(&server), child = fork();
  if (child == 0) {
    become_client(server, 100);
    begin(0);
    allot_process *own = &driver.machine.machine->processes[driver.machine.slot];
    uint64_t used = allot_process_used(&driver.machine, driver.machine.slot, 0);
    own->mps.memory_limit[0] = used + 64 * MIB;
    CUdeviceptr address;
    OK(cuMemAlloc_v2(&address, 64 * MIB));
    FAILS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&address, 2 * MIB));
    _exit(0);
  }
  finish(child);
  end(served);
}

static pid_t hold(int server, CUresult expected) {
  pid_t child = fork();
  if (child == 0) {
    become_client(server, 50);
    begin(0);
    CUfunction spin = load_spin();
    tell();
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < 20000 && result == CUDA_SUCCESS; i++) {
      uint64_t nanoseconds = MILLISECOND;
      void *parameters[] = {&nanoseconds};
      result = cuLaunchKernel(spin, 4, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL);
      if (result == CUDA_SUCCESS) result = cuCtxSynchronize();
    }
    if (result != expected) fprintf(stderr, "%d instead of %d\n", (int)result, (int)expected);
    assert(result == expected);
    char word;
    assert(expected == CUDA_ERROR_MPS_RPC_FAILURE || read(STDIN_FILENO, &word, 1) == 0);
    _exit(0);
  }
  wait_for_children(1);
  return child;
}

static void a_servers_end_is_its_clients(void) {
  int server;
  pid_t served = serve(&server), client = hold(server, CUDA_ERROR_MPS_RPC_FAILURE);
  end(served);
  finish(client);
}

static void a_fault_is_everybodys(void) {
  int server, held[2], kept = dup(STDIN_FILENO);
  assert(pipe(held) == 0);
  dup2(held[0], STDIN_FILENO);
  pid_t served = serve(&server), victim = hold(server, CUDA_ERROR_ILLEGAL_ADDRESS);
  assert(!allot_mps_is_faulty(&seen, server));
  pid_t culprit = fork();
  if (culprit == 0) {
    become_client(server, 50);
    begin(0);
    CUmodule module;
    CUfunction trap;
    OK(cuModuleLoadData(&module, trap_ptx));
    OK(cuModuleGetFunction(&trap, module, "allot_trap"));
    OK(cuLaunchKernel(trap, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
    FAILS(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    FAILS(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    _exit(0);
  }
  finish(culprit);
  // The victim lives on, as programs may, and keeps the server from taking others.
  assert(allot_mps_is_faulty(&seen, server));
  end(victim);
  assert(!allot_mps_is_faulty(&seen, server));
  dup2(kept, STDIN_FILENO);
  end(served);
}

static void only_clients_where_a_server_has_the_gpu(void) {
  int server;
  pid_t served = serve(&server);
  allot_store(&seen.machine->engines[0].compute_mode, (uint32_t)CU_COMPUTEMODE_EXCLUSIVE_PROCESS);
  pid_t stranger = fork();
  if (stranger == 0) {
    CUcontext context;
    OK(cuInit(0));
    FAILS(CUDA_ERROR_DEVICE_UNAVAILABLE, cuDevicePrimaryCtxRetain(&context, 0));
    _exit(0);
  }
  finish(stranger);
  pid_t client = fork();
  if (client == 0) {
    become_client(server, 50);
    begin(0);
    _exit(0);
  }
  finish(client);
  end(served);
  allot_store(&seen.machine->engines[0].compute_mode, (uint32_t)CU_COMPUTEMODE_DEFAULT);
}

int main(void) {
  assert(allot_machine_open(&seen) == 0);
  assert(pipe(shared) == 0);
  clients_run_at_once();
  a_client_has_its_part();
  a_limit_of_memory_is_each_processs();
  a_servers_end_is_its_clients();
  a_fault_is_everybodys();
  only_clients_where_a_server_has_the_gpu();
  allot_machine_close(&seen);
  return 0;
}
