# SPDX-License-Identifier: Apache-2.0
"""What GPUs are for: read as it is written, and believed of nobody else."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.devices import Device, DeviceSlice
from allotment.model.errors import PrerequisiteError, UsageError
from allotment.model.modes import MODES
from allotment.model.structs import replace
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import (
    ModePolicy,
    is_for_mig_alone,
    mode_policy_of,
    narrowed,
    parse_modes,
    read_mode_policies,
    refusal,
    refusal_on,
    write_mode_policy,
)

NOBODY = 65534
MODE_LISTS = st.lists(st.sampled_from(MODES), min_size=1)


@given(modes=MODE_LISTS)
def test_modes_are_read_in_one_order_and_once(modes: list[str]) -> None:
    found = parse_modes(" , ".join(modes).upper())
    assert found is not None
    assert set(found) == set(modes)
    assert list(found) == sorted(set(modes), key=MODES.index)


@pytest.mark.parametrize("text", ["", ",", "soft,", "sofd", "soft mps", "default,soft"])
def test_what_is_no_mode_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_modes(text)


@given(modes=MODE_LISTS, others=MODE_LISTS)
def test_what_is_left_is_what_is_not_refused(modes: list[str], others: list[str]) -> None:
    allowed = ModePolicy(tuple(modes))
    assert narrowed(others, allowed) == {each for each in others if not refusal(allowed, each)}
    assert narrowed(others, None) == set(others)


def test_a_slice_is_refused_where_its_gpu_is_not_for_slices(devices: tuple[Device, ...]) -> None:
    gpu = devices[0]
    where = DeviceSlice(
        gpu=gpu.uuid, number=0, profile="1g.10gb", gpu_instance=1, compute_instance=0
    )
    piece = replace(gpu, uuid="MIG-0", slice_of=where)
    assert refusal_on({gpu.uuid: ModePolicy(("mig",))}, piece, "soft") == ""
    assert refusal_on({gpu.uuid: ModePolicy(("soft",))}, piece, "soft") != ""
    assert refusal_on({gpu.uuid: ModePolicy(("mig",))}, gpu, "soft") != ""


def test_what_is_written_is_read_until_it_is_taken_back(folder: StateFolder) -> None:
    assert read_mode_policies(folder) == {}
    write_mode_policy(folder, "GPU-0", ModePolicy(("mig",)))
    write_mode_policy(folder, "GPU-1", ModePolicy(("soft", "mps"), by="node"))
    found = read_mode_policies(folder)
    assert {uuid: (each.modes, each.by) for uuid, each in found.items()} == {
        "GPU-0": (("mig",), "command"),
        "GPU-1": (("soft", "mps"), "node"),
    }
    assert is_for_mig_alone(folder, "GPU-0")
    assert not is_for_mig_alone(folder, "GPU-1")
    write_mode_policy(folder, "GPU-0", None)
    write_mode_policy(folder, "GPU-0", None)
    assert set(read_mode_policies(folder)) == {"GPU-1"}


@pytest.mark.parametrize(
    "uuid",
    ["", ".", "..", "GPU-", "/../victim", "GPU-0/../../victim", "GPU-0\n", "GPU-" + "0" * 300],
)
def test_what_is_no_uuid_is_no_files_name(folder: StateFolder, uuid: str) -> None:
    (folder.root / "victim.json").write_text("as it was")
    for allowed in (ModePolicy(("mig",)), None):
        with pytest.raises(UsageError, match="is no GPU's UUID"):
            write_mode_policy(folder, uuid, allowed)
    assert (folder.root / "victim.json").read_text() == "as it was"
    assert not (folder.root / "modes").exists()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 2, "modes": ["soft"]}', '{"version": 1}', '"' * 9000, "\0" * 40],
)
def test_what_cannot_be_read_is_for_nothing(folder: StateFolder, content: str) -> None:
    write_mode_policy(folder, "GPU-0", ModePolicy(("mig",)))
    (folder.root / "modes" / "GPU-0.json").write_text(content)
    found = mode_policy_of(folder, "GPU-0")
    assert found is not None
    assert found.modes == ()
    assert "GPU-0.json cannot be read" in refusal(found, "soft")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_user_says_nothing(folder: StateFolder) -> None:
    write_mode_policy(folder, "GPU-0", ModePolicy(("mig",)))
    os.chown(folder.root / "modes", NOBODY, NOBODY)
    assert read_mode_policies(folder) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_only_the_folders_owner_may_say_it() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are root's alone
        folder = StateFolder(Path(name))
        folder.prepare()
        folder.root.chmod(0o1777)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(PrerequisiteError):
                write_mode_policy(folder, "GPU-0", ModePolicy(("mig",)))
        finally:
            os.seteuid(0)
        assert read_mode_policies(folder) == {}
