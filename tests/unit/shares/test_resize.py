# SPDX-License-Identifier: Apache-2.0
"""Other limits for shares whose mode does not let them have all that there is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gpus import gpu
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.compute import ComputeClass, parse_compute
from allotment.model.errors import DoesNotFitError, NotInModeError, UsageError
from allotment.model.modes import EXCLUSIVE, MIG, MPS
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share
from allotment.model.structs import replace
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.process_tree import named
from allotment.shares.record import read_record, write_record
from allotment.shares.resize import LimitChange, resize

GI = 1 << 30
DEVICES = (gpu(memory_bytes=64 * GI),)
Make = Callable[..., tuple[Share, Path]]


def made(root: Path, *, may_oversubscribe: bool = False) -> StateFolder:
    """A state folder with the share `held`, of mode mps and 8 GiB."""
    folder = StateFolder(root)
    folder.prepare()
    request = Request(parse_memory("8Gi"), mode=MPS, may_oversubscribe=may_oversubscribe)
    order = ShareOrder(request, Injection.ENVIRONMENT, name="held", runner=named(os.getpid()))
    lifecycle.create(folder, order, DEVICES)
    return folder


def limit(folder: StateFolder) -> int:
    return sum(lifecycle.find(folder, "held").limits().values())


@given(steps=st.lists(st.tuples(st.integers(1, 16), st.booleans()), max_size=8))
def test_programs_of_mode_mps_never_have_more_than_they_began_with(
    native_dir: Path, steps: list[tuple[int, bool]]
) -> None:
    assert native_dir.is_dir()
    with tempfile.TemporaryDirectory() as root:
        folder = made(Path(root))
        for gibibytes, force in steps:
            before = limit(folder)
            change = LimitChange(memory=parse_memory(f"{gibibytes}Gi"))
            if gibibytes <= 8:
                resize(folder, "held", change, DEVICES, force=force)
                assert limit(folder) == gibibytes * GI
            else:
                with pytest.raises(NotInModeError, match="have 8Gi: under MPS"):
                    resize(folder, "held", change, DEVICES, force=force)
                assert limit(folder) == before
            (device,) = read_record(lifecycle.find(folder, "held").directory).devices
            assert device.memory_bytes == limit(folder)


def test_memory_that_may_lie_on_the_host_grows_under_mps(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    folder = made(tmp_path, may_oversubscribe=True)
    resize(folder, "held", LimitChange(memory=parse_memory("16Gi")), DEVICES, force=False)
    assert limit(folder) == 16 * GI


@pytest.mark.parametrize(
    ("size", "may_oversubscribe", "way"),
    [
        ("500Gi", False, "this GPU has 64Gi, even when empty"),
        ("64Gi", False, "make room"),
        ("500Gi", True, "--host-memory"),
    ],
    ids=["larger than the GPU", "beside another share", "larger than GPU and host"],
)
def test_who_asks_for_too_much_memory_is_told_what_can_help(
    tmp_path: Path, native_dir: Path, size: str, way: str, *, may_oversubscribe: bool
) -> None:
    assert native_dir.is_dir()
    folder = made(tmp_path, may_oversubscribe=may_oversubscribe)
    other = ShareOrder(
        Request(parse_memory("8Gi"), mode=MPS), Injection.ENVIRONMENT, runner=named(os.getpid())
    )
    lifecycle.create(folder, other, DEVICES)
    change = LimitChange(memory=parse_memory(size), host_budget=8 * GI)
    with pytest.raises(DoesNotFitError, match="beside the other shares") as caught:
        resize(folder, "held", change, DEVICES, force=False)
    hint = caught.value.hint or ""
    assert way in hint
    assert ("make room" in hint) is (way != "this GPU has 64Gi, even when empty")


def test_one_byte_too_much_is_shown_in_bytes(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    folder = made(tmp_path)
    change = LimitChange(memory=parse_memory(f"{64 * GI + 1}"))
    with pytest.raises(DoesNotFitError, match=r"need 68719476737B, have 68719476736B beside"):
        resize(folder, "held", change, DEVICES, force=False)


@pytest.mark.parametrize(
    "change",
    [
        LimitChange(compute=parse_compute("30")),
        LimitChange(weight=7),
        LimitChange(kind=ComputeClass.BESTEFFORT),
        LimitChange(memory=parse_memory("4Gi"), compute=parse_compute("30")),
    ],
    ids=["part", "weight", "class", "beside memory"],
)
def test_compute_under_mps_is_refused_and_nothing_is_changed(
    tmp_path: Path, native_dir: Path, change: LimitChange
) -> None:
    assert native_dir.is_dir()
    folder = made(tmp_path)
    with pytest.raises(NotInModeError, match="under MPS the compute") as caught:
        resize(folder, "held", change, DEVICES, force=False)
    assert "--mode mps --compute" in (caught.value.hint or "")
    assert limit(folder) == 8 * GI


@pytest.mark.parametrize(
    ("mode", "why"), [(MIG, "its slice is the hardware's"), (EXCLUSIVE, "Allotment is not in it")]
)
def test_what_has_no_ledger_says_why_and_what_to_do(
    folder: StateFolder, make: Make, mode: str, why: str
) -> None:
    share, directory = make("4Gi", name="held")
    write_record(directory, replace(share, mode=mode))
    changes = "it cannot be resized, suspended or resumed"
    with pytest.raises(UsageError, match=f"{why}, and {changes}") as caught:
        resize(folder, "held", LimitChange(memory=parse_memory("2Gi")), DEVICES, force=False)
    assert "run them in a new share" in (caught.value.hint or "")
