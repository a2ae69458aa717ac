# SPDX-License-Identifier: Apache-2.0
"""share.json: what is written is what is read, and anything else is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import StateError
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import (
    Amounts,
    Injection,
    Runner,
    Share,
    ShareDevice,
    ShareId,
    SuspendedBy,
    Suspension,
)
from allotment.model.structs import replace
from allotment.shares.record import read_record, write_record

SHARE = Share(
    id=ShareId("0123456789ab"),
    name="train",
    created=1_800_000_000.25,
    mode="soft",
    devices=(
        ShareDevice("GPU-0", "Tesla T4", 1 << 30),
        ShareDevice(
            "GPU-1",
            "Tesla T4",
            2 << 30,
            compute=Compute(1250, 8000, 7, ComputeClass.LATENCY, is_governed=True),
            is_oversubscribed=True,
            begun_bytes=3 << 30,
            asked=Amounts(2 << 30, 1250, 8000),
        ),
    ),
    injection=Injection.NAMESPACE,
    machine="/m",
    spec="t4:2",
    runner=Runner(17, 4711, "boot"),
    command=("python", "-c", "print('ä\n')"),
    cdi_spec=None,
)


OWNER = Owner(
    uid=PodUid("0a1b"),
    namespace="lab",
    pod="one",
    container="train",
    kind=ContainerKind.SIDECAR,
    resource="allotment.dev/gpu",
    place=1,
)


def test_a_record_comes_back(tmp_path: Path) -> None:
    write_record(tmp_path, SHARE)
    assert read_record(tmp_path) == SHARE
    assert [path.name for path in tmp_path.iterdir()] == ["share.json"]


def test_a_suspension_comes_back(tmp_path: Path) -> None:
    stopped = (Runner(18, 4712, "boot"), Runner(19, 4713, "boot"))
    suspension = Suspension(1.5, SuspendedBy.EVICTION, is_complete=True, stopped=stopped)
    write_record(tmp_path, replace(SHARE, suspension=suspension))
    assert read_record(tmp_path).suspension == suspension
    document: dict[str, Any] = json.loads((tmp_path / "share.json").read_text())
    del document["suspension"]["stopped"]  # as it was written before there was such a field
    (tmp_path / "share.json").write_text(json.dumps(document))
    assert read_record(tmp_path).suspension == replace(suspension, stopped=())


@pytest.mark.parametrize("place", [None, 0, 3])
def test_an_owner_comes_back(tmp_path: Path, place: int | None) -> None:
    owned = replace(SHARE, owner=replace(OWNER, place=place), injection=Injection.MOUNTS)
    write_record(tmp_path, owned)
    assert read_record(tmp_path) == owned


def test_a_record_of_the_version_before_has_no_owner(tmp_path: Path) -> None:
    write_record(tmp_path, SHARE)
    document: dict[str, Any] = json.loads((tmp_path / "share.json").read_text())
    document["version"] = 2
    del document["owner"]
    (tmp_path / "share.json").write_text(json.dumps(document))
    assert read_record(tmp_path) == SHARE


@pytest.mark.parametrize(
    ("field", "value"), [("uid", 7), ("kind", "main"), ("place", "0"), ("pod", None)]
)
def test_an_owner_that_cannot_be_is_damage(tmp_path: Path, field: str, value: object) -> None:
    write_record(tmp_path, replace(SHARE, owner=OWNER))
    document: dict[str, Any] = json.loads((tmp_path / "share.json").read_text())
    document["owner"][field] = value
    (tmp_path / "share.json").write_text(json.dumps(document))
    with pytest.raises(StateError, match=r"share\.json"):
        read_record(tmp_path)


def test_a_record_of_the_first_version_says_nothing_of_compute(tmp_path: Path) -> None:
    write_record(tmp_path, SHARE)
    document: dict[str, Any] = json.loads((tmp_path / "share.json").read_text())
    document["version"] = 1
    del document["suspension"]
    for device in document["devices"]:
        del device["compute"], device["oversubscribed"]
    (tmp_path / "share.json").write_text(json.dumps(document))
    devices = read_record(tmp_path).devices
    assert [each.compute for each in devices] == [Compute(), Compute()]
    assert not any(each.is_oversubscribed for each in devices)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guarantee", 9000),
        ("guarantee", True),
        ("ceiling", 10_001),
        ("ceiling", 0),
        ("weight", 0),
        ("class", "fast"),
        ("governed", 1),
    ],
)
def test_what_cannot_be_promised_is_damage(tmp_path: Path, field: str, value: object) -> None:
    write_record(tmp_path, SHARE)
    document: dict[str, Any] = json.loads((tmp_path / "share.json").read_text())
    document["devices"][1]["compute"][field] = value
    (tmp_path / "share.json").write_text(json.dumps(document))
    with pytest.raises(StateError, match=r"share\.json"):
        read_record(tmp_path)


@pytest.mark.parametrize("field", ["guarantee", "ceiling", "weight", "class"])
def test_a_missing_promise_is_damage(tmp_path: Path, field: str) -> None:
    write_record(tmp_path, SHARE)
    document: dict[str, Any] = json.loads((tmp_path / "share.json").read_text())
    del document["devices"][1]["compute"][field]
    (tmp_path / "share.json").write_text(json.dumps(document))
    with pytest.raises(StateError, match=r"share\.json"):
        read_record(tmp_path)


def test_a_share_that_is_gone_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_record(tmp_path / "gone")
    with pytest.raises(StateError, match="missing"):
        read_record(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"share\.json"):
        write_record(tmp_path / "gone", SHARE)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.data())
def test_any_changed_field_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("share")
    write_record(directory, SHARE)
    document: dict[str, Any] = json.loads((directory / "share.json").read_text())
    key = data.draw(st.sampled_from(sorted(document)))
    if data.draw(st.booleans()):
        document[key] = data.draw(values)
    else:
        del document[key]
    (directory / "share.json").write_text(json.dumps(document))
    try:
        share = read_record(directory)
    except StateError as error:
        assert "share.json" in error.message  # noqa: PT017 - both ends are fine
    else:
        assert isinstance(share.name, str)
        assert all(isinstance(device.memory_bytes, int) for device in share.devices)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    directory = tmp_path_factory.mktemp("share")
    (directory / "share.json").write_bytes(content)
    with pytest.raises(StateError):
        read_record(directory)


def test_a_record_as_it_was_written_is_not_parsed(tmp_path: Path) -> None:
    share = SHARE
    write_record(tmp_path, share)
    assert read_record(tmp_path, written=share) is share
    changed = replace(share, name="changed")
    write_record(tmp_path, changed)
    assert read_record(tmp_path, written=share) == changed
    (tmp_path / "share.json").write_text("{", "utf-8")
    with pytest.raises(StateError):
        read_record(tmp_path, written=share)


@pytest.mark.parametrize(("length", "is_kept"), [(1 << 10, True), (1 << 20, False)])
def test_a_process_keeps_no_long_record(tmp_path: Path, length: int, *, is_kept: bool) -> None:
    """In a folder for all users each can write a thousand of 2 MiB."""
    share = replace(SHARE, command=("train", "x" * length))
    write_record(tmp_path, share)
    first, second = read_record(tmp_path), read_record(tmp_path)
    assert first == second == share
    assert (first is second) == is_kept
