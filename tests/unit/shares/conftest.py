# SPDX-License-Identifier: Apache-2.0
"""A state folder and a machine of two devices, without any GPU or driver."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from allotment.shares.placing import ShareOrder
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
def order() -> Callable[..., ShareOrder]:
    """Makes orders; the runner is this process unless another (or None) is given."""

    def make(
        memory: str = "4Gi",
        *,
        count: int = 1,
        compute: Compute | None = None,
        may_oversubscribe: bool = False,
        **rest: object,
    ) -> ShareOrder:
        request = Request(
            parse_memory(memory),
            count=count,
            compute=compute or Compute(),
            may_oversubscribe=may_oversubscribe,
        )
        values: dict[str, object] = {"runner": named(os.getpid()), **rest}
        return ShareOrder(request, Injection.ENVIRONMENT, **values)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make(
    folder: StateFolder, devices: tuple[Device, ...], order: Callable[..., ShareOrder]
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
            ["/bin/cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **variables},
        )
        started.append(process)
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"x")
        assert process.stdout.read(1) == b"x"  # it runs: the kernel shows its environment
        return process

    yield start
    for process in started:
        process.communicate()


_HOLDER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
ledger = ctypes.create_string_buffer(4096)
directory = sys.argv[2].encode()
assert library.allot_ledger_open(ledger, directory) == 0
assert library.allot_ledger_attach(ledger) == 0
library.allot_ledger_reserve.restype = ctypes.c_bool
library.allot_ledger_reserve.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64]
assert library.allot_ledger_reserve(ledger, int(sys.argv[3]), 3 << 30)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold(
    native_dir: Path,
) -> Callable[[Path, int], AbstractContextManager["subprocess.Popen[bytes]"]]:
    """Has 3 GiB of a share's device, by its number, until the program ends."""

    @contextmanager
    def held(directory: Path, device: int = 0) -> Iterator["subprocess.Popen[bytes]"]:
        library = str(native_dir / "liballotment-ledger.so")
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDER, library, str(directory), str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield holder

    return held
