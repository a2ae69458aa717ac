# SPDX-License-Identifier: Apache-2.0
"""Types that msgspec has prepared: for threads that read the same kind of document."""

import threading
from typing import Any, Final, TypeVar

import msgspec

_T = TypeVar("_T")

_preparing: Final = threading.Lock()
_prepared: Final[set[Any]] = set()


def prepared(kind: type[_T]) -> type[_T]:
    """Return the type, once msgspec can read it in any thread.

    At the first use of a type msgspec (0.22) stores it on the class and then fills it, so that a
    second thread dereferences a null pointer: the process ends with SIGSEGV.
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind
