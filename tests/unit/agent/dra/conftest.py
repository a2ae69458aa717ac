# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path that is short enough for sockets."""
    with TemporaryDirectory(prefix="dra-") as name:
        yield Path(name)
