# SPDX-License-Identifier: Apache-2.0
"""The time that tests of this room have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONG_S = 300


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give a property test, which is many tests, the time that a slow machine takes for all.

    What `--timeout` says goes before, and what a test says of itself.
    """
    if config.getoption("timeout") is not None:
        return
    for item in items:
        is_property = item.get_closest_marker("hypothesis") is not None
        if (
            is_property
            and item.path.is_relative_to(HERE)
            and not item.get_closest_marker("timeout")
        ):
            item.add_marker(pytest.mark.timeout(LONG_S))


@pytest.fixture
def common_folder() -> Iterator[Path]:
    """A folder that all users can reach and write to. Those of pytest are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        yield folder
