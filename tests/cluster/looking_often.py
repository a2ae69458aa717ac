# SPDX-License-Identifier: Apache-2.0
"""`allot scheduler`, by the same options, that looks at its certificates every 2 s.

Of a Secret or a configuration that somebody changed it hears at its next look: 30 s later by the
command, which has no option for that because nobody waits for it but tests.
"""

from __future__ import annotations

import sys

from allotment.cli.scheduler import command
from allotment.cli.scheduler_options import SchedulerOptions
from allotment.model.structs import replace
from allotment.scheduler.running import run

LOOK_S = 2.0


def main() -> None:
    """Runs until it is told to end."""
    given = command.make_context("allot scheduler", sys.argv[1:]).params
    settings = SchedulerOptions(**given).settings()
    assert settings.webhook is not None
    run(replace(settings, webhook=replace(settings.webhook, look_s=LOOK_S)))


if __name__ == "__main__":
    main()
