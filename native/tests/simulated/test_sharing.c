// SPDX-License-Identifier: Apache-2.0
// Memory and events between processes: IPC handles, exported physical memory and pools; and what a
// forked child may do.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: a100-80gb
#include <sys/socket.h>
#include <sys/uio.h>

#include "tests/simulated/driver_test.h"

typedef struct parcel {
  CUipcMemHandle large, small;
  CUipcEventHandle event;
  CUmemPoolPtrExportData pooled;
} parcel;

static void send_parcel(int socket, const parcel *sent, int one, int two) {
  int descriptors[2] = {one, two};
  char control[CMSG_SPACE(sizeof descriptors)] = {0};
  struct iovec data = {.iov_base = (void *)(uintptr_t)sent, .iov_len = sizeof *sent};
  struct msghdr message = {
      .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof descriptors);
  memcpy(CMSG_DATA(header), descriptors, sizeof descriptors);
  assert(sendmsg(socket, &message, 0) == sizeof *sent);
}

static void receive_parcel(int socket, parcel *received, int *one, int *two) {
  int descriptors[2];
  char control[CMSG_SPACE(sizeof descriptors)];
  struct iovec data = {.iov_base = received, .iov_len = sizeof *received};
  struct msghdr message = {
      .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  assert(recvmsg(socket, &message, 0) == sizeof *received);
  memcpy(descriptors, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptors);
  *one = descriptors[0];
  *two = descriptors[1];
}

static void expect_text(CUdeviceptr memory, const char *wanted) {
  char text[32] = {0};
  OK(cuMemcpyDtoH_v2(text, memory, sizeof text));
  if (strcmp(text, wanted) != 0) {
    fprintf(stderr, "read \"%s\", expected \"%s\"\n", text, wanted);
    abort();
  }
}

static void put_text(CUdeviceptr memory, const char *text) {
  char padded[32] = {0};
  strcpy(padded, text);
  OK(cuMemcpyHtoD_v2(memory, padded, sizeof padded));
}

static void consume(int socket) {
  parcel received;
  int physical, pool_descriptor;
  CUdeviceptr large, large_again, small, pooled, base;
  CUevent event;
  receive_parcel(socket, &received, &physical, &pool_descriptor);
  begin(0);
  size_t before = free_bytes();

  OK(cuIpcOpenMemHandle_v2(&large, received.large, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  OK(cuIpcOpenMemHandle_v2(&large_again, received.large, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  assert(large == large_again);
  OK(cuIpcOpenMemHandle_v2(&small, received.small, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  OK(cuIpcOpenEventHandle(&event, received.event));
  FAILS(CUDA_ERROR_NOT_READY, cuEventQuery(event));  // the parent's stream waits
  assert(write(socket, "x", 1) == 1);
  OK(cuEventSynchronize(event));
  expect_text(large, "large");
  expect_text(small, "small");
  put_text(large, "answer");

  CUmemGenericAllocationHandle imported;
  CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  OK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)physical,
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  OK(cuMemAddressReserve(&base, 2 * MIB, 0, 0, 0));
  OK(cuMemMap(base, 2 * MIB, 0, imported, 0));
  OK(cuMemSetAccess(base, 2 * MIB, &access, 1));
  expect_text(base, "physical");
  put_text(base, "answer too");

  CUmemoryPool pool;
  OK(cuMemPoolImportFromShareableHandle(&pool, (void *)(intptr_t)pool_descriptor,
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  OK(cuMemPoolImportPointer(&pooled, pool, &received.pooled));
  expect_text(pooled, "pooled");
  assert(free_bytes() == before);  // all of it is the parent's
  OK(cuMemFreeAsync(pooled, NULL));
  OK(cuMemUnmap(base, 2 * MIB));
  OK(cuMemRelease(imported));
  OK(cuIpcCloseMemHandle(large));
  OK(cuIpcCloseMemHandle(large));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle(large));
  OK(cuIpcCloseMemHandle(small));
  assert(free_bytes() == before);
}

static void between_processes(void) {
  int sockets[2];
  assert(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  pid_t child = fork();
  assert(child >= 0);
  if (child == 0) {
    consume(sockets[1]);
    _exit(0);
  }
  close(sockets[1]);  // so that a child that fails ends the test
  begin(0);
  parcel sent;
  CUdeviceptr large, small, base, pooled;
  CUevent event;
  OK(cuMemAlloc_v2(&large, 4 * MIB));
  OK(cuMemAlloc_v2(&small, 100));
  OK(cuMemAlloc_v2(&small, 100));
  put_text(large, "large");
  put_text(small, "small");
  OK(cuIpcGetMemHandle(&sent.large, large));
  OK(cuIpcGetMemHandle(&sent.small, small));
  CUdeviceptr none;
  FAILS(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle_v2(&none, sent.large, 1));
  OK(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
  OK(cuIpcGetEventHandle(&sent.event, event));

  CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
  CUmemAccessDesc access = {.location = wanted.location,
                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle handle;
  int physical, pool_descriptor;
  OK(cuMemCreate(&handle, 2 * MIB, &wanted, 0));
  OK(cuMemAddressReserve(&base, 2 * MIB, 0, 0, 0));
  OK(cuMemMap(base, 2 * MIB, 0, handle, 0));
  OK(cuMemSetAccess(base, 2 * MIB, &access, 1));
  put_text(base, "physical");
  OK(cuMemExportToShareableHandle(&physical, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  expect_text(base, "physical");

  CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                          .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                          .location = wanted.location};
  CUmemoryPool pool;
  OK(cuMemPoolCreate(&pool, &props));
  OK(cuMemAllocFromPoolAsync(&pooled, 1000, pool, NULL));
  put_text(pooled, "pooled");
  OK(cuMemPoolExportToShareableHandle(&pool_descriptor, pool,
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  OK(cuMemPoolExportPointer(&sent.pooled, pooled));

  char asked;
  gate_close(NULL);
  OK(cuEventRecord(event, NULL));
  send_parcel(sockets[0], &sent, physical, pool_descriptor);
  assert(read(sockets[0], &asked, 1) == 1);
  gate_open();
  expect_success(child);
  expect_text(large, "answer");
  expect_text(base, "answer too");
}

static void forked_children(void) {
  pid_t child = fork();
  assert(child >= 0);
  if (child == 0) {
    // The parent's GPU is not the child's, and cannot become so.
    int count;
    size_t bytes;
    FAILS(CUDA_ERROR_NOT_INITIALIZED, cuInit(0));
    FAILS(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
    FAILS(CUDA_ERROR_NOT_INITIALIZED, cuMemGetInfo_v2(&bytes, &bytes));
    _exit(0);
  }
  expect_success(child);
  size_t bytes;
  OK(cuMemGetInfo_v2(&bytes, &bytes));  // and the parent's is still its own
}

int main(void) {
  between_processes();  // forks before cuInit, which is allowed
  forked_children();
  return 0;
}
