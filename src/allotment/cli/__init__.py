# SPDX-License-Identifier: Apache-2.0
"""The command line `allot`: one module per command, imported when the command is called.

Each module exposes `command`. Data goes to standard output. Errors go to standard error as
`error: ...`, mostly followed by `hint: ...`, and end with the exit code of their class.
"""

import sys

try:
    from allotment.cli.groups import AllotGroup, main_group
except KeyboardInterrupt:  # Ctrl-C during the import
    sys.exit(130)

__all__ = ["main"]

main: AllotGroup = main_group
"""Entry point of the console script and of `python -m allotment`."""
