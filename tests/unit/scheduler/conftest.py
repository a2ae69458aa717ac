# SPDX-License-Identifier: Apache-2.0
"""Who binds as it is told, who remembers what was told, and a cluster with SharePods."""

from __future__ import annotations

import pytest
from scheduler_twin import Bindery, Told
from served_sharepods import Served


@pytest.fixture
def bindery() -> Bindery:
    return Bindery()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def served() -> Served:
    return Served()
