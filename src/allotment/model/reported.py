# SPDX-License-Identifier: Apache-2.0
"""What was reported already, so that each thing is reported once and not at every retry."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class Reported(Generic[_Key]):
    """The last text of each key, for as long as it holds. For one thread at a time."""

    def __init__(self) -> None:
        self._last: dict[_Key, str] = {}

    def is_new(self, key: _Key, text: str = "") -> bool:
        """Return whether this text of the key is to be reported, and remember it."""
        if self._last.get(key) == text:
            return False
        self._last[key] = text
        return True

    def new_of(self, keys: Iterable[_Key]) -> list[_Key]:
        """Return which of all that hold now are to be reported; all others are over."""
        holding = dict.fromkeys(keys, "")
        new = [key for key in holding if key not in self._last]
        self._last = holding
        return new

    def over(self, key: _Key) -> None:
        """Forget a key: it is reported when it comes again."""
        self._last.pop(key, None)
