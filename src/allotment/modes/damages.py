# SPDX-License-Identifier: Apache-2.0
"""What programs did to files of a share that they can write, and what was mended.

It is found where the files are used, by whoever comes first: deep in the making of another share,
or in a look at all of them. None of these fails for it, so it is put down here, and the node agent
takes it from here now and then and tells it (`take_damages`). Others need not.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from allotment.model.shares import ShareId

__all__ = ["Damage", "put_down", "take_damages"]

_MOST: Final = 256
"""A hostile program makes as many as it likes: the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One file that was not as it has to be, and is again."""

    message: str
    """What was found, and what was done."""
    shares: tuple[ShareId, ...]
    """Whose programs can have done it: one share's own file, or all shares of a device."""
    device: str = ""
    """The UUID of the device whose shares have the file in common."""


_damages: deque[Damage] = deque(maxlen=_MOST)  # its methods are atomic


def put_down(message: str, shares: Collection[str], *, device: str = "") -> None:
    """Keep it for `take_damages`."""
    _damages.append(Damage(message, tuple(map(ShareId, sorted(shares))), device))


def take_damages() -> tuple[Damage, ...]:
    """Return what was found in this process since the last call, oldest first."""
    taken = []
    while _damages:
        try:
            taken.append(_damages.popleft())
        except IndexError:  # another thread took the last one
            break
    return tuple(taken)
