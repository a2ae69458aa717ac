# SPDX-License-Identifier: Apache-2.0
"""Tests here start a dozen programs each: they have more time than others."""

from __future__ import annotations

from pathlib import Path

import pytest
from mig_hands import CONFIGURATIONS

# A command takes half a second alone, and ten times that on a machine that does other things.
TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests here that time, unless they say themselves how much they need."""
    for item in items:
        is_here = item.path.is_relative_to(Path(__file__).parent)
        if is_here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture
def mig_file(tmp_path: Path) -> Path:
    """A file with configurations of MIG, for `allot mig`."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIGURATIONS, "utf-8")
    return path
