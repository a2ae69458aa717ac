// SPDX-License-Identifier: Apache-2.0
// User objects: what graphs keep alive for the program, by reference counts.
#include <stdlib.h>

#include "simulated/cuda/graphs.h"

typedef struct user {
  object head;
  void *kept;
  CUhostFn destroy;
  unsigned references;
} user;

static CUresult user_of(CUuserObject handle, user **found) {
  ENTER();
  if (!object_valid(handle, OBJECT_USER)) return CUDA_ERROR_INVALID_VALUE;
  *found = (user *)handle;
  return CUDA_SUCCESS;
}

static void drop(user *dropped, unsigned count) {
  LOCK();
  dropped->references -= count < dropped->references ? count : dropped->references;
  bool last = dropped->references == 0;
  CUhostFn destroy = dropped->destroy;
  void *kept = dropped->kept;
  if (last) object_free(dropped);
  UNLOCK();
  if (last) destroy(kept);
}

CUresult cuUserObjectCreate(CUuserObject *handle, void *kept, CUhostFn destroy, unsigned int count,
                            unsigned int flags) {
  ENTER();
  if (handle == NULL || destroy == NULL || count == 0 ||
      flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOCK();
  user *made = object_new(OBJECT_USER, sizeof(user), NULL);
  UNLOCK();
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  made->kept = kept;
  made->destroy = destroy;
  made->references = count;
  *handle = (CUuserObject)made;
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject handle, unsigned int count) {
  user *retained;
  TRY(user_of(handle, &retained));
  if (count == 0) return CUDA_ERROR_INVALID_VALUE;
  retained->references += count;
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned int count) {
  user *released;
  TRY(user_of(handle, &released));
  if (count == 0) return CUDA_ERROR_INVALID_VALUE;
  drop(released, count);
  return CUDA_SUCCESS;
}

static bool attach(graph *to, user *kept) {
  user **more = realloc(to->users, (to->user_count + 1) * sizeof(user *));
  if (more == NULL) return false;
  to->users = more;
  to->users[to->user_count++] = kept;
  return true;
}

CUresult cuGraphRetainUserObject(CUgraph handle, CUuserObject object_handle, unsigned int count,
                                 unsigned int flags) {
  graph *keeper;
  user *kept;
  TRY(graph_of(handle, &keeper));
  TRY(user_of(object_handle, &kept));
  if (count == 0) return CUDA_ERROR_INVALID_VALUE;
  bool moves = (flags & CU_GRAPH_USER_OBJECT_MOVE) != 0;
  for (unsigned i = 0; i < count; i++) {
    if (!attach(keeper, kept)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!moves) kept->references++;
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph handle, CUuserObject object_handle, unsigned int count) {
  graph *keeper;
  user *released;
  TRY(graph_of(handle, &keeper));
  TRY(user_of(object_handle, &released));
  for (size_t i = keeper->user_count; i > 0 && count > 0; i--) {
    if (keeper->users[i - 1] != released) continue;
    keeper->users[i - 1] = keeper->users[--keeper->user_count];
    count--;
    drop(released, 1);
  }
  return count == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void users_copy(const graph *from, graph *to) {
  for (size_t i = 0; i < from->user_count; i++) {
    if (attach(to, from->users[i])) from->users[i]->references++;
  }
}

void users_drop(graph *dying) {
  for (size_t i = 0; i < dying->user_count; i++) drop(dying->users[i], 1);
  free(dying->users);
  dying->users = NULL;
  dying->user_count = 0;
}
