# SPDX-License-Identifier: Apache-2.0
"""JSON that is nested deeper than a decoder goes: what is too deep is cut out of it.

The API server lets 10,000 levels pass, in what a definition's author leaves to whoever writes the
objects; decoders recurse, also over what they skip, and end at a thousand. One such object would
make every list that has it unreadable, and with it all others.
"""

import re
from typing import Final

__all__ = ["MOST_LEVELS", "shallow"]

MOST_LEVELS: Final = 200
"""What Kubernetes' own objects have is a tenth of it."""

# A string is passed over whole, whatever brackets it has; one without an end is the rest of it.
_MARKS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_OPENING: Final = (b"[", b"{")
_CLOSING: Final = (b"]", b"}")


def shallow(data: bytes, *, levels: int = MOST_LEVELS) -> bytes:
    """Return the same with `null` in place of each list and map that is more than `levels` deep.

    Takes time as the text is long. What is cut out is not looked at, whether it is JSON or not.
    """
    if data.count(b"[") + data.count(b"{") <= levels:
        return data
    kept: list[bytes] = []
    depth = begins = ends = 0
    for mark in _MARKS.finditer(data):
        text = mark[0]
        if text in _OPENING:
            depth += 1
            if depth == levels + 1:
                begins = mark.start()
        elif text in _CLOSING:
            depth -= 1
            if depth == levels:
                kept += (data[ends:begins], b"null")
                ends = mark.end()
    return b"".join((*kept, data[ends:])) if kept else data
