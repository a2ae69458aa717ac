# SPDX-License-Identifier: Apache-2.0
"""Other users of a machine: for tests that run as root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Acts as another user, by the effective uid."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
