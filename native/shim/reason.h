// SPDX-License-Identifier: Apache-2.0
// Why a program has no CUDA, on stderr: otherwise it sees only a number.
#ifndef ALLOTMENT_SHIM_REASON_H
#define ALLOTMENT_SHIM_REASON_H

// Writes "allotment: no CUDA in this program: ..." and what to do next. Only the first reason of a
// process is written, and none that would make it wait or end it (SIGPIPE).
void say_once(const char *format, ...) __attribute__((format(printf, 1, 2)));

// The same for a file of a share that cannot be used: the share's directory, `what` the file holds,
// and the errno value.
void say_unusable(const char *share, const char *what, int error);

#endif
