// SPDX-License-Identifier: Apache-2.0
// sources: ledger.c
// What the system refuses: long paths, full disks, files that another user may only read. Each is a
// clear error, and nothing half made stays behind.
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "ledger_test.h"

enum { NOBODY = 65534 };

static void long_paths_are_refused(void) {
  char directory[8192];
  memset(directory, 'd', sizeof directory - 1);
  directory[sizeof directory - 1] = '\0';
  allot_ledger ledger;
  CHECK(allot_ledger_open(&ledger, directory) == -ENAMETOOLONG);
  allot_policy policy = {.device_count = 1};
  CHECK(allot_ledger_create(directory, &policy) == -ENAMETOOLONG);
}

// `most` bytes are the longest file that the disk takes.
static void a_full_disk_leaves_no_file(rlim_t most) {
  make_share(1000);
  char policy_file[128], usage_file[128];
  snprintf(policy_file, sizeof policy_file, "%s/policy", share);
  snprintf(usage_file, sizeof usage_file, "%s/usage", share);
  unlink(policy_file);
  unlink(usage_file);
  struct rlimit before;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  signal(SIGXFSZ, SIG_IGN);
  CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){most, before.rlim_max}) == 0);
  allot_policy policy = {.device_count = 1};
  int error = allot_ledger_create(share, &policy);
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(error == -EFBIG, "%d", error);
  CHECK(access(policy_file, F_OK) != 0 && access(usage_file, F_OK) != 0);
  CHECK(allot_ledger_create(share, &policy) == 0);  // and it can be made once there is space
  remove_share();
}

// In a process that may read the share, and write nothing of it.
static void read_what_another_user_owns(void) {
  allot_ledger own = open_share();
  CHECK(allot_ledger_used(&own, 0) == 400 && allot_ledger_limit(&own, 0) == 1000);
  CHECK(allot_ledger_attach(&own) == -EACCES);
  allot_ledger_close(&own);
  uint64_t used;
  CHECK(allot_ledger_set_limit(share, 0, 2000, false, &used) == -EACCES);
}

static void another_user_reads_and_changes_nothing(void) {
  make_share(1000);
  CHECK(chmod(share, 0755) == 0);
  allot_ledger ledger = attach_share();
  CHECK(allot_ledger_reserve(&ledger, 0, 400));
  pid_t child = fork();
  if (child == 0) {
    CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
    read_what_another_user_owns();
    exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0, "status %x", (unsigned)status);
  CHECK(allot_ledger_limit(&ledger, 0) == 1000);
  allot_ledger_close(&ledger);
  remove_share();
}

int main(void) {
  long_paths_are_refused();
  a_full_disk_leaves_no_file(1);                     // not even the policy
  a_full_disk_leaves_no_file(sizeof(allot_policy));  // the policy alone
  if (geteuid() == 0) another_user_reads_and_changes_nothing();
  puts("ok");
  return 0;
}
