# SPDX-License-Identifier: Apache-2.0
"""Which of two resource versions is the later one: in one place, since all that fences hangs on it.

They are numbers, and may be compared by contract since Kubernetes 1.35 (KEP 5504). What is no
number is not comparable: then nothing counts as later.
"""

__all__ = ["is_as_late", "is_later"]


def is_later(version: str, than: str) -> bool:
    """Tell whether `version` is known to be of after `than`."""
    return version.isdecimal() and than.isdecimal() and int(version) > int(than)


def is_as_late(version: str, other: str) -> bool:
    """Tell whether `version` is known to be `other`, or of after it."""
    return version.isdecimal() and other.isdecimal() and int(version) >= int(other)
