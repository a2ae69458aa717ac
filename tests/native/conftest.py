# SPDX-License-Identifier: Apache-2.0
"""Shares and host programs of native/tests/shim to run in them, NVML and CUDA on machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mig_gpu import Gpu, Program

import native_programs
from allotment.devices.packing import read_machine
from shim_hosts import Share, ShimHosts

GIB = 1 << 30


@pytest.fixture
def share_of(tmp_path: Path, machine: Callable[[str], Path]) -> Callable[..., Share]:
    """Makes a share: `share_of("a100-80gb:4", order=(2, 0), limits=(4 * GIB, GIB))`."""
    made = 0

    def make(
        spec: str = "a100-80gb:2",
        *,
        order: Sequence[int] = (0, 1),
        limits: Sequence[int] = (4 * GIB, 2 * GIB),
        knows_contexts: bool = True,
    ) -> Share:
        # Late: most tests here make no share.
        from allotment import ledger

        nonlocal made
        made += 1
        path = machine(spec)
        devices = [read_machine(path).devices[i] for i in order]
        directory = tmp_path / f"share-{made}"
        directory.mkdir()
        policy = ledger.LedgerPolicy(
            share_id=f"share-{made}",
            share_name="test",
            devices=tuple(
                ledger.DevicePolicy(
                    uuid=device.uuid,
                    memory_limit=limit,
                    context_bytes=device.context_bytes if knows_contexts else 0,
                )
                for device, limit in zip(devices, limits, strict=True)
            ),
        )
        ledger.create(directory, policy)
        return Share(directory, path, tuple(device.uuid for device in devices))

    return make


@pytest.fixture(scope="session")
def shim_hosts(cc: list[str], native_dir: Path) -> ShimHosts:
    """Host programs and shim without sanitizers."""
    return ShimHosts(cc, native_dir, "plain", native_programs.build_folder("") / "hosts")


@pytest.fixture(scope="session")
def sanitized_hosts(
    sanitizing_cc: list[str], native_build: Callable[[str], Path]
) -> Callable[[str], ShimHosts]:
    """Host programs, shim and simulated driver, all built with the sanitizers asked for."""
    made: dict[str, ShimHosts] = {}

    def make(sanitizers: str) -> ShimHosts:
        if sanitizers not in made:
            libraries = native_build(sanitizers)
            made[sanitizers] = ShimHosts(sanitizing_cc, libraries, sanitizers, libraries / "hosts")
        return made[sanitizers]

    return make


@pytest.fixture
def hosts_of(shim_hosts: ShimHosts, request: pytest.FixtureRequest) -> Callable[[str], ShimHosts]:
    """Host programs of a build: `hosts_of("plain")`, `hosts_of("thread")`."""

    def find(build: str) -> ShimHosts:
        if build == "plain":
            return shim_hosts
        make: Callable[[str], ShimHosts] = request.getfixturevalue("sanitized_hosts")
        return make(build)

    return find


@pytest.fixture
def nvml_on(
    machine: Callable[[str], Path], native_dir: Path
) -> Iterator[Callable[[str], tuple[Any, Path]]]:
    """nvidia-ml-py on a machine: `nvml, path = nvml_on("h100-80gb")`."""
    assert native_dir.is_dir()
    # Late: most tests here need no NVML.
    from allotment.devices import loading

    used: list[Path] = []

    def start(spec: str) -> tuple[Any, Path]:
        path = machine(spec)
        used.append(path)
        with loading.nvml_of(path) as nvml:
            return nvml, path

    yield start
    for path in used:
        loading.leave(path)


@pytest.fixture
def hopper(nvml_on: Callable[[str], tuple[Any, Path]]) -> Gpu:
    """A GPU that can be cut."""
    nvml, path = nvml_on("h100-80gb")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceSetMigMode(handle, 1) == 0
    return Gpu(nvml, path, handle)


@pytest.fixture
def program(native_dir: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs of CUDA on a machine: `program(path, CUDA_VISIBLE_DEVICES=uuid)`."""
    begun: list[Program] = []

    def begin(machine: Path, **variables: str) -> Program:
        begun.append(Program(machine, native_dir / "simulated", **variables))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()
