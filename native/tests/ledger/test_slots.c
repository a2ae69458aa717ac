// SPDX-License-Identifier: Apache-2.0
// sources: ledger.c
// Slots: they outlive closed descriptors, end with their process and not with its children's, run
// out with a clear error; damaged files are refused.
#include <errno.h>
#include <fcntl.h>

#include "ledger_test.h"

static void wait_for(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", (unsigned)status);
}

static void closing_all_descriptors_keeps_the_slot(void) {
  make_share(1000);
  allot_ledger ledger = open_share();
  int pipes[2], back[2];
  CHECK(pipe(pipes) == 0 && pipe(back) == 0);
  pid_t child = fork();
  if (child == 0) {
    allot_ledger own = attach_share();
    CHECK(allot_ledger_reserve(&own, 0, 400));
    for (int i = 3; i < 256; i++) {
      if (i != pipes[0] && i != back[1]) close(i);
    }
    char byte = 'x';
    CHECK(write(back[1], &byte, 1) == 1);
    CHECK(read(pipes[0], &byte, 1) == 1);
    CHECK(allot_ledger_slot_used(&own, own.slot, 0) == 400);
    _exit(0);
  }
  char byte;
  CHECK(read(back[0], &byte, 1) == 1);
  CHECK(allot_ledger_slot_alive(&ledger, 0));
  CHECK(clear_all(&ledger) == 0 && allot_ledger_used(&ledger, 0) == 400);
  CHECK(write(pipes[1], "x", 1) == 1);
  wait_for(child);
  CHECK(clear_all(&ledger) == 1 && allot_ledger_used(&ledger, 0) == 0);
  CHECK(!allot_ledger_slot_alive(&ledger, 0));
  allot_ledger_close(&ledger);
  remove_share();
}

static void children_do_not_keep_a_dead_parents_slot(void) {
  make_share(1000);
  allot_ledger ledger = open_share();
  int pipes[2], back[2];
  CHECK(pipe(pipes) == 0 && pipe(back) == 0);
  pid_t parent = fork();
  if (parent == 0) {
    allot_ledger own = attach_share();
    CHECK(allot_ledger_reserve(&own, 0, 400));
    if (fork() == 0) {
      char byte = 'x';
      close(pipes[1]);
      CHECK(write(back[1], &byte, 1) == 1);
      if (read(pipes[0], &byte, 1) < 0) _exit(1);
      _exit(0);
    }
    raise(SIGKILL);
  }
  char byte;
  CHECK(read(back[0], &byte, 1) == 1);
  waitpid(parent, NULL, 0);
  CHECK(clear_all(&ledger) == 1 && allot_ledger_used(&ledger, 0) == 0);
  close(pipes[1]);
  allot_ledger_close(&ledger);
  remove_share();
}

static void slots_run_out_and_come_back(void) {
  make_share(1000);
  allot_ledger owners[ALLOT_MAX_SLOTS], one_more = open_share();
  for (int i = 0; i < ALLOT_MAX_SLOTS; i++) {
    owners[i] = attach_share();
    CHECK(owners[i].slot == i);
  }
  CHECK(allot_ledger_attach(&one_more) == -ENOSPC);
  allot_ledger_close(&owners[5]);
  CHECK(allot_ledger_attach(&one_more) == 0 && one_more.slot == 5);
  for (int i = 0; i < ALLOT_MAX_SLOTS; i++) {
    if (i != 5) allot_ledger_close(&owners[i]);
  }
  allot_ledger_close(&one_more);
  remove_share();
}

static void write_at(const char *name, long offset, const void *data, size_t size) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", share, name);
  int descriptor = open(path, O_WRONLY);
  CHECK(descriptor >= 0 && pwrite(descriptor, data, size, offset) == (ssize_t)size);
  close(descriptor);
}

static void damaged_files_are_refused(void) {
  allot_ledger ledger;
  char path[128];
  const uint32_t newer = ALLOT_LEDGER_VERSION + 1, many = 1000;
  CHECK(allot_ledger_open(&ledger, "/nonexistent") == -ENOENT);

  make_share(1000);
  write_at("policy", offsetof(allot_policy, version), &newer, sizeof newer);
  CHECK(allot_ledger_open(&ledger, share) == -EPROTO);
  remove_share();

  make_share(1000);
  write_at("policy", offsetof(allot_policy, device_count), &many, sizeof many);
  CHECK(allot_ledger_open(&ledger, share) == -EINVAL);
  remove_share();

  make_share(1000);
  write_at("usage", 0, "garbage!", 8);
  CHECK(allot_ledger_open(&ledger, share) == -EINVAL);
  remove_share();

  make_share(1000);
  snprintf(path, sizeof path, "%s/usage", share);
  CHECK(truncate(path, 4096) == 0);
  CHECK(allot_ledger_open(&ledger, share) == -EINVAL);
  remove_share();

  make_share(1000);
  allot_policy policy = {.device_count = 1};
  CHECK(allot_ledger_create(share, &policy) == -EEXIST);
  ledger = open_share();  // the failed second creation harmed nothing
  allot_ledger_close(&ledger);
  remove_share();
}

static void limits_are_exact(void) {
  make_share(1000);
  allot_ledger own = attach_share();
  CHECK(allot_ledger_reserve(&own, 0, 999) && !allot_ledger_reserve(&own, 0, 2));
  CHECK(allot_ledger_reserve(&own, 0, 1) && !allot_ledger_reserve(&own, 0, 1));
  CHECK(!allot_ledger_reserve(&own, 0, UINT64_MAX) && allot_ledger_used(&own, 0) == 1000);
  CHECK(own.usage->devices[0].refusals == 3);
  allot_ledger_charge(&own, 0, 500);
  CHECK(allot_ledger_used(&own, 0) == 1500);
  uint64_t used;
  CHECK(allot_ledger_set_limit(share, 0, 1200, false, &used) == -EBUSY && used == 1500);
  CHECK(allot_ledger_limit(&own, 0) == 1000);
  CHECK(allot_ledger_set_limit(share, 0, 1200, true, &used) == 0);
  CHECK(!allot_ledger_reserve(&own, 0, 1));
  allot_ledger_release(&own, 0, 301);
  CHECK(allot_ledger_reserve(&own, 0, 1) && !allot_ledger_reserve(&own, 0, 1));
  CHECK(allot_ledger_set_limit(share, 0, 0, true, &used) == -EINVAL);
  CHECK(allot_ledger_set_limit(share, 2, 5, true, &used) == -EINVAL);
  allot_ledger_release(&own, 0, UINT64_MAX);
  CHECK(allot_ledger_used(&own, 0) == 0 && own.usage->devices[0].peak == 1500);
  allot_ledger_close(&own);
  remove_share();
}

int main(void) {
  limits_are_exact();
  closing_all_descriptors_keeps_the_slot();
  children_do_not_keep_a_dead_parents_slot();
  slots_run_out_and_come_back();
  damaged_files_are_refused();
  puts("ok");
  return 0;
}
