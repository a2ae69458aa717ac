# SPDX-License-Identifier: Apache-2.0
"""A worker process of a burn: reads its plan from stdin and writes its report to stdout."""

from __future__ import annotations

import sys

import msgspec

from allotment.burn.processes import Meeting, work_as_child
from allotment.burn.reports import BurnPlan
from allotment.model.errors import AllotError
from allotment.model.structs import prepared


def main() -> int:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=prepared(BurnPlan))
    meeting = Meeting(*map(int, sys.argv[1:3]))
    try:
        report = work_as_child(plan, meeting)
    except AllotError as error:
        sys.stderr.write(error.message + "\n" + (error.hint or ""))
        return error.exit_code
    sys.stdout.buffer.write(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
