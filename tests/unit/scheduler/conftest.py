# SPDX-License-Identifier: Apache-2.0
"""An API server that binds as it is told, and who remembers what was told."""

from __future__ import annotations

import pytest
from scheduler_twin import Bindery, Told


@pytest.fixture
def bindery() -> Bindery:
    return Bindery()


@pytest.fixture
def told() -> Told:
    return Told()
