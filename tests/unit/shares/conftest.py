# SPDX-License-Identifier: Apache-2.0
"""A state folder and a machine of two devices, without any GPU or driver."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pod_node import Node

from allotment.model.compute import Compute
from allotment.model.devices import Device
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Runner, Share
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.process_tree import named

GI = 1 << 30


@pytest.fixture
def devices() -> tuple[Device, ...]:
    return tuple(
        Device(
            uuid=f"GPU-{index}0000000", name="Tesla T4", index=index, memory_bytes=16 * GI,
            sm_count=40, compute_capability=(7, 5), numa_node=None,
            pci_bus_id=f"0000:0{index}:00.0", simulated=True, mig=False,
        )
        for index in range(2)
    )  # fmt: skip


@pytest.fixture
def folder(state_dir: Path, native_dir: Path) -> StateFolder:
    assert native_dir.is_dir()
    state = StateFolder(state_dir)
    state.prepare()
    return state


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    """A node of pods, of two simulated GPUs."""
    assert native_dir.is_dir()
    return Node(tmp_path)


@pytest.fixture
def order() -> Callable[..., lifecycle.ShareOrder]:
    """Makes orders; the runner is this process unless another (or None) is given."""

    def make(
        memory: str = "4Gi",
        *,
        count: int = 1,
        compute: Compute | None = None,
        may_oversubscribe: bool = False,
        **rest: object,
    ) -> lifecycle.ShareOrder:
        request = Request(
            parse_memory(memory),
            count=count,
            compute=compute or Compute(),
            may_oversubscribe=may_oversubscribe,
        )
        values: dict[str, object] = {"runner": named(os.getpid()), **rest}
        return lifecycle.ShareOrder(request, Injection.ENVIRONMENT, **values)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make(
    folder: StateFolder, devices: tuple[Device, ...], order: Callable[..., lifecycle.ShareOrder]
) -> Callable[..., tuple[Share, Path]]:
    """Makes shares."""

    def create(memory: str = "4Gi", **rest: object) -> tuple[Share, Path]:
        return lifecycle.create(folder, order(memory, **rest), devices)

    return create


@pytest.fixture
def dead_runner() -> Runner:
    """Names a process that has ended."""
    with subprocess.Popen(["/bin/true"]) as process:
        process.wait()
    return Runner(process.pid, 1, named(os.getpid()).boot_id)


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that wait for their end, with the given variables."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**variables: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["/bin/cat"], stdin=subprocess.PIPE, env={**os.environ, **variables}
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.communicate()
