# SPDX-License-Identifier: Apache-2.0
"""One process of a burn with several: the plan comes on stdin, the report goes to stdout."""

from __future__ import annotations

import sys

import msgspec

from allotment.burn.plans import BurnPlan
from allotment.burn.processes import Meeting
from allotment.burn.running import work_as_child
from allotment.model.errors import AllotError


def main() -> int:
    """Read the plan, work, write the report; the error's own status when there is no report."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=BurnPlan)
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
