# SPDX-License-Identifier: Apache-2.0
"""`allotment.devices.watching`: the GPUs that the kernel's driver lists and NVML does not show."""

from __future__ import annotations

from pathlib import Path

import pytest

from allotment.devices.watching import driver_facts, driver_gpus, hidden_gpus

ONE, OTHER, THIRD = "GPU-1", "GPU-2", "GPU-3"


def put(root: Path, bus: str, uuid: str) -> None:
    folder = root / "proc/driver/nvidia/gpus" / bus
    folder.mkdir(parents=True)
    (folder / "information").write_text(
        f"Model: \t\t NVIDIA L4\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\nDevice Minor: \t 1\n"
    )


def test_a_container_has_a_part_of_the_list_and_the_first_process_all_of_it(tmp_path: Path) -> None:
    own, first = tmp_path / "own", tmp_path / "first"
    put(own, "0000:3b:00.0", ONE)
    assert driver_gpus((own, first)) == {ONE: False}
    put(first, "0000:3b:00.0", ONE)
    put(first, "0000:5e:00.0", OTHER)
    (first / "proc/driver/nvidia/gpus/0000:af:00.0").mkdir()  # its table cannot be read
    assert driver_gpus((own, first)) == {ONE: False, OTHER: False}
    assert driver_gpus((tmp_path,)) == {}


def test_the_drivers_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    put(tmp_path, "0000:3b:00.0", ONE)
    facts = driver_facts(tmp_path, "0000:3b:00.0")
    assert (facts["Bus Location"], facts["Device Minor"]) == ("0000:3b:00.0", "1")
    assert driver_facts(tmp_path, "0000:5e:00.0") == {}


@pytest.mark.parametrize(
    ("config", "is_lost"),
    [
        (b"\xff" * 64, True),
        (b"\xde\x10\x30\x23" + b"\xff" * 60, False),
        (b"", False),
        (None, False),  # a sandbox without it
    ],
    ids=["absent", "present", "empty", "unknown"],
)
def test_a_gpu_has_fallen_off_the_bus_if_the_bus_does_not_reach_it(
    tmp_path: Path, config: bytes | None, *, is_lost: bool
) -> None:
    put(tmp_path, "0000:3b:00.0", ONE)
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config").write_bytes(config)
    assert driver_gpus((tmp_path,)) == {ONE: is_lost}


@pytest.mark.parametrize(
    ("shown", "hidden"),
    [
        ([ONE, OTHER, THIRD], set()),
        ([ONE], {OTHER, THIRD}),
        ([], {ONE, OTHER, THIRD}),
        ([ONE, OTHER, None], set()),  # the missing one is the one that does not answer
        ([ONE, None], {OTHER, THIRD}),  # either may be the lost one
        ([ONE, OTHER, THIRD, "GPU-4"], set()),
    ],
)
def test_a_missing_gpu_may_be_the_one_that_does_not_answer(
    shown: list[str | None], hidden: set[str]
) -> None:
    assert hidden_gpus(dict.fromkeys((ONE, OTHER, THIRD), False), shown) == hidden


@pytest.mark.parametrize(
    ("shown", "hidden"),
    [
        ([ONE], {THIRD}),  # NVML does not count the lost one
        ([ONE, None], {THIRD}),  # the one that does not answer
        ([ONE, None, None], set()),
        ([ONE, THIRD], set()),
    ],
)
def test_a_gpu_that_has_fallen_off_the_bus_is_not_hidden(
    shown: list[str | None], hidden: set[str]
) -> None:
    assert hidden_gpus({ONE: False, OTHER: True, THIRD: False}, shown) == hidden
