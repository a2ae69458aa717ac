# SPDX-License-Identifier: Apache-2.0
"""The kubelet's checkpoint: every shape it has had, torn files, other plugins' entries."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.kubelet.checkpoint import KubeletCheckpoint, decode
from allotment.agent.kubelet.proto.deviceplugin_pb2 import ContainerAllocateResponse
from allotment.agent.protocols import SHARE_ANNOTATION, CheckpointEntry
from allotment.model.errors import StateError
from allotment.model.pods import PodUid
from allotment.model.shares import Injection, ShareId

UID = "0f5a1c5e-2b7a-4d9e-9c1d-5a0d6b3e7f21"


def answer(share: str | None, *, cdi: str = "", mount: str = "") -> str:
    annotations = {"other": "x"} if share is None else {SHARE_ANNOTATION: share}
    response = ContainerAllocateResponse(annotations=annotations, envs={"A": "b" * 200})
    if cdi:
        response.cdi_devices.add(name=cdi)
    if mount:
        response.mounts.add(host_path="/usr/lib/x", container_path="/usr/lib/x")
        response.mounts.add(host_path=mount, container_path="/run/allotment/share/policy")
    return base64.b64encode(response.SerializeToString()).decode()


def raw(
    ids: object, *, share: str | None = "0123456789ab", container: str = "main"
) -> dict[str, object]:
    return {
        "PodUID": UID,
        "ContainerName": container,
        "ResourceName": "nvidia.com/gpu",
        "DeviceIDs": ids,
        "AllocResp": answer(share),
    }


def document(*entries: object, **extra: object) -> bytes:
    registered: dict[str, list[str]] = {"nvidia.com/gpu": []}
    data = {"PodDeviceEntries": list(entries) or None, "RegisteredDevices": registered}
    return json.dumps({"Data": data, "Checksum": 1234, **extra}).encode()


def entry(
    ids: set[str], share: str | None = "0123456789ab", injection: Injection = Injection.NONE
) -> CheckpointEntry:
    return CheckpointEntry(
        pod=PodUid(UID),
        container="main",
        resource="nvidia.com/gpu",
        ids=frozenset(ids),
        share=None if share is None else ShareId(share),
        injection=None if share is None else injection,
    )


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"-1": ["share::0"]}, {"share::0"}),
        ({"0": ["GPU-0"], "1": ["GPU-1", "GPU-0"]}, {"GPU-0", "GPU-1"}),
        (["GPU-0"], {"GPU-0"}),
        ({}, set()),
        (None, set()),
    ],
    ids=["without nodes", "by node", "before v1.20", "none", "null"],
)
def test_ids_are_read_in_every_shape(ids: object, expected: set[str]) -> None:
    assert decode(document(raw(ids))) == (entry(expected),)


def test_newer_keys_are_passed_over() -> None:
    assert decode(document({**raw(["a"]), "New": 1}, BootID="x")) == (entry({"a"}),)


def test_another_plugins_entry_has_no_share() -> None:
    assert decode(document(raw(["a"], share=None))) == (entry({"a"}, None),)


@pytest.mark.parametrize("text", ["", "%%%", "AAAA", None], ids=repr)
def test_an_answer_that_is_none_has_no_share(text: str | None) -> None:
    assert decode(document({**raw(["a"]), "AllocResp": text})) == (entry({"a"}, None),)


@pytest.mark.parametrize(
    ("text", "injection"),
    [
        (answer("0123456789ab", cdi="allotment.dev/share=0123456789ab"), Injection.CDI),
        (answer("0123456789ab", cdi="allotment.dev/share=ba9876543210"), Injection.NONE),
        (answer("0123456789ab", cdi="k8s.device-plugin.nvidia.com/gpu=GPU-0"), Injection.NONE),
        (answer("0123456789ab", mount="/run/x/shares/0123456789ab/policy"), Injection.MOUNTS),
        (answer("0123456789ab", mount="/run/x/shares/ba9876543210/policy"), Injection.NONE),
    ],
    ids=["cdi", "another's device", "nvidia's device", "mounts", "another's mounts"],
)
def test_an_answer_tells_how_its_share_is_handed_in(text: str, injection: Injection) -> None:
    found = decode(document({**raw(["a"]), "AllocResp": text}))
    assert found == (entry({"a"}, injection=injection),)


def test_nobody_has_anything_before_the_kubelet_wrote(tmp_path: Path) -> None:
    assert KubeletCheckpoint(tmp_path / "checkpoint").entries() == ()


def test_an_empty_checkpoint_has_no_entries(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(document())
    assert KubeletCheckpoint(path).entries() == ()


def replace(path: Path, data: bytes) -> None:
    """Does as the kubelet does: another file, renamed into place."""
    draft = path.with_name("draft")
    draft.write_bytes(data)
    draft.rename(path)


def test_a_new_file_is_read_though_it_is_as_long(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    checkpoint = KubeletCheckpoint(path)
    for number in range(200):
        ids = f"share::{number:03d}"
        replace(path, document(raw([ids])))
        assert checkpoint.entries() == (entry({ids}),)
        assert checkpoint.entries() is checkpoint.entries()


def test_a_file_that_is_half_written_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    whole = document(raw(["a"]))
    path.write_bytes(whole[:50])
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:  # half written for two looks, whoever is slow
            path.write_bytes(whole)

    monkeypatch.setattr(time, "sleep", pause)
    assert KubeletCheckpoint(path).entries() == (entry({"a"}),)
    assert len(pauses) == 2
    assert min(pauses) > 0


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"{}", b'{"Data": 1}', document({"PodUID": 1}), document(raw(["a"]))[:99]],
    ids=["empty", "null", "without data", "a number", "another type", "torn"],
)
def test_what_is_no_checkpoint_is_told_of(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(data)
    with pytest.raises(StateError, match="has an unknown format") as raised:
        KubeletCheckpoint(path).entries()
    assert str(path) in raised.value.message
    assert raised.value.hint


def test_a_torn_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    checkpoint = KubeletCheckpoint(path)
    path.write_bytes(b"{")
    with pytest.raises(StateError):
        checkpoint.entries()
    replace(path, document(raw(["a"])))
    assert checkpoint.entries() == (entry({"a"}),)


def test_a_folder_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="the kubelet keeps its checkpoint there"):
        KubeletCheckpoint(tmp_path / "nowhere" / "checkpoint").entries()


def test_what_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(StateError, match="cannot read"):
        KubeletCheckpoint(tmp_path / "checkpoint").entries()


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_bytes_raise_nothing_else(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(data)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "PodUID": st.text(),
                "ContainerName": st.text(),
                "ResourceName": st.text(),
                "DeviceIDs": st.dictionaries(st.integers(-1, 3).map(str), st.lists(st.text())),
                "AllocResp": st.binary().map(lambda data: base64.b64encode(data).decode()),
            }
        )
    )
)
def test_every_entry_is_there_once(entries: list[dict[str, Any]]) -> None:
    found = decode(document(*entries))
    assert [(each.pod, each.container, each.resource) for each in found] == [
        (each["PodUID"], each["ContainerName"], each["ResourceName"]) for each in entries
    ]
    for one, other in zip(found, entries, strict=True):
        assert one.ids == {name for names in other["DeviceIDs"].values() for name in names}
