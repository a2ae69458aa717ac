# SPDX-License-Identifier: Apache-2.0
"""The command line: `allot`. One module a command, imported when that command is called.

A command's module exposes `command`. Data goes to standard output; errors go to standard error as
`error: ...`, mostly followed by `hint: ...`, and end with the exit code of their class.
"""

import sys

try:
    from allotment.cli.groups import AllotGroup, main_group
except KeyboardInterrupt:  # Ctrl-C in the first moment is one like any other
    sys.exit(130)

__all__ = ["main"]

main: AllotGroup = main_group
"""What the console script and `python -m allotment` call."""
