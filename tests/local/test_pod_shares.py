# SPDX-License-Identifier: Apache-2.0
"""Programs in the shares of pods, as a container runtime starts them: by CDI, and without it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.model.compute import Compute
from allotment.model.errors import BusyError
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request, replicas_of, whole_devices
from allotment.model.shares import Injection, Share, ShareId
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares
from allotment.shares.run.namespace import can_unshare

pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")

Allot = Any  # tests/conftest.py: CommandLine
Start = Callable[..., "subprocess.Popen[str]"]
GI = 1 << 30
BURN = (sys.executable, "-m", "allotment", "burn", "-o", "json", "--seconds", "1")
Mounts = list[tuple[str, str]]


class Node:
    """A node of two simulated T4."""

    def __init__(self, state: Path) -> None:
        self.machine = machine_path(state, "t4:2")
        self.devices = read_machine(self.machine).devices
        self.uuids = [device.uuid for device in self.devices]
        self.cdi = state / "cdi"
        self.shares = PodShares(
            StateFolder(state),
            machine=self.machine,
            spec="t4:2",
            folders=NodeFolders(cdi=self.cdi),
        )

    def prepare(
        self,
        number: int,
        request: Request,
        *,
        devices: Iterable[str] = (),
        injection: Injection = Injection.CDI,
        claim: str = "",
    ) -> Share:
        owner = Owner(
            uid=PodUid(f"uid-{number}"),
            namespace="lab",
            pod=claim or f"pod-{number}",
            container="gpu" if claim else "train",
            kind=ContainerKind.REGULAR,
            resource="gpu.allotment.dev" if claim else "allotment.dev/gpu",
            is_claim=bool(claim),
        )
        order = ShareOrder(
            request,
            injection,
            id=ShareId(f"{number:012x}"),
            owner=owner,
            devices=tuple(devices),
            candidates=frozenset(self.uuids),
        )
        return self.shares.prepare(order, NodePolicy(devices=self.devices))


def of_spec(share: Share) -> Mounts:
    """What a runtime mounts for the share's CDI device."""
    assert share.cdi_spec
    (device,) = json.loads(Path(share.cdi_spec).read_text())["devices"]
    assert device["name"] == share.id
    return [
        (mount["hostPath"], mount["containerPath"]) for mount in device["containerEdits"]["mounts"]
    ]


@pytest.fixture
def node(state_dir: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(state_dir)


@pytest.fixture
def start(allot: Allot) -> Iterator[Start]:
    """Starts a program with these mounts in a namespace of its own, as a container's would be."""
    started: list[subprocess.Popen[str]] = []

    def run(mounts: Mounts, *words: str) -> "subprocess.Popen[str]":
        steps = ["mount -t tmpfs none /run", "touch /etc/ld.so.preload"]
        libraries = next(Path(source).parent for source, target in mounts if "libcuda" in target)
        for source, target in mounts:
            if target.startswith("/usr/"):
                continue  # this machine's folders stand for the image's: no file is made in them
            kind = "mkdir -p" if Path(source).is_dir() else f"mkdir -p {Path(target).parent}; touch"
            steps += [f"{kind} {target}", f"mount --bind {source} {target}"]
        command = " ".join(words)
        steps.append(f"exec env LD_LIBRARY_PATH={libraries} {command}")
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", "\n".join(steps)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=allot.environment(),
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def burn(start: Start, mounts: Mounts, *words: str) -> dict[str, Any]:
    """What a burning program met."""
    process = start(mounts, *BURN, *words)
    told, complaints = process.communicate(timeout=120)
    assert process.returncode in {0, 9}, complaints
    report: dict[str, Any] = json.loads(told)["processes"][0]
    return report


def shares(allot: Allot) -> dict[str, dict[str, Any]]:
    done = allot("ps", "-o", "json")
    assert done.returncode == 0, done.stderr
    return {each["id"]: each for each in json.loads(done.stdout)["shares"]}


def devices(allot: Allot) -> list[dict[str, Any]]:
    done = allot("devices", "-o", "json")
    assert done.returncode == 0, done.stderr
    listed: list[dict[str, Any]] = json.loads(done.stdout)["devices"]
    return listed


@pytest.mark.parametrize("injection", [Injection.CDI, Injection.MOUNTS])
def test_a_soft_share_is_a_gpu_of_its_size(
    allot: Allot, node: Node, start: Start, injection: Injection
) -> None:
    mounts = node.shares.mounts(ShareId(f"{1:012x}"), mode=SOFT, devices=1)
    request = Request(parse_memory("2Gi"), compute=Compute(3000, 8000, is_governed=True))
    share = node.prepare(1, request, injection=injection)
    if injection is Injection.CDI:
        inside = of_spec(share)
    else:
        inside = [(each.host_path, each.container_path) for each in mounts]
    report = burn(start, inside, "--memory", "6Gi")
    assert report["device"]["total_bytes"] == 2 * GI
    assert report["errors"][0]["name"] == "CUDA_ERROR_OUT_OF_MEMORY"
    seen = shares(allot)[share.id]
    assert (seen["name"], seen["state"]) == ("lab/pod-1/train", "waiting")
    assert (seen["enforced"], seen["remark"]) == (True, None)
    assert seen["owner"]["pod"] == "pod-1"
    assert 1.9 * GI < seen["devices"][0]["memory_peak_bytes"] <= 2 * GI
    assert seen["devices"][0]["compute"]["guarantee_percent"] == 30
    node.shares.end(share.id)
    assert shares(allot) == {}


def test_an_exclusive_share_has_its_gpu_and_no_other(
    allot: Allot, node: Node, start: Start
) -> None:
    first, second = node.uuids
    share = node.prepare(1, whole_devices(1, mode=EXCLUSIVE), devices=(second,))
    report = burn(start, of_spec(share), "--memory", "6Gi")
    assert report["device"]["uuid"] == second
    assert report["errors"] == []
    whole = next(each for each in node.devices if each.uuid == second)
    assert report["device"]["total_bytes"] >= whole.allottable_bytes
    seen = shares(allot)[share.id]
    assert (seen["enforced"], seen["remark"]) == (False, "not enforced: exclusive")
    assert seen["devices"][0]["compute"] is None
    process = start(of_spec(share), *BURN[:-2], "--memory", "3Gi", "--seconds", "600")
    wait_until(lambda: shares(allot)[share.id]["devices"][0]["memory_used_bytes"] > 2 * GI)
    with pytest.raises(BusyError, match="in use by 1 process"):
        node.shares.end(share.id)
    table = allot("ps").stdout
    (row,) = [line for line in table.splitlines() if line.startswith("lab/pod-1/train")]
    assert " exclusive " in row
    assert " running " in row
    assert " allotment burn " in row
    assert "outside" not in table
    assert allot("top", "--once").returncode == 0
    resized = allot("resize", share.id, "--memory", "1Gi")
    assert resized.returncode == 2
    assert "has what its pod asks for" in resized.stderr
    assert allot("rm", share.id).returncode == 7
    process.kill()
    process.communicate()
    wait_until(lambda: not shares(allot)[share.id]["processes"])
    node.shares.end(share.id)
    assert node.prepare(2, Request(parse_memory("1Gi")), devices=(second,)).mode == SOFT
    assert first != second


def test_time_slices_share_all_there_is(allot: Allot, node: Node, start: Start) -> None:
    first, _ = node.uuids
    made = [
        node.prepare(number, whole_devices(1, mode=TIMESLICE), devices=(first,))
        for number in (1, 2)
    ]
    for share in made:
        report = burn(start, of_spec(share), "--memory", "9Gi")
        assert (report["device"]["uuid"], report["errors"]) == (first, [])
    assert {each["remark"] for each in shares(allot).values()} == {"time-sliced, nothing enforced"}
    (device,) = [each for each in devices(allot) if each["uuid"] == first]
    assert (device["memory_allotted_bytes"], len(device["shares"])) == (0, 2)


def test_a_claims_share_has_the_claims_name_in_each_listing(allot: Allot, node: Node) -> None:
    first, second = node.uuids
    part = node.prepare(1, Request(parse_memory("4Gi")), devices=(first,), claim="quarter")
    whole = node.prepare(2, whole_devices(1, mode=EXCLUSIVE), devices=(second,), claim="whole")
    names: dict[str, str] = {part.id: "lab/quarter/gpu", whole.id: "lab/whole/gpu"}
    for command in (("ps",), ("top", "--once")):
        listed = allot(*command).stdout
        assert all(name in listed for name in names.values()), command
    listed = allot("ps", names[part.id]).stdout
    assert (names[part.id] in listed, names[whole.id] in listed) == (True, False)
    for id_, found in shares(allot).items():
        assert (found["name"], found["owner"]["claim"]) == (names[id_], True)
    held = {each["uuid"]: each["shares"] for each in devices(allot)}
    assert held == {first: [names[part.id]], second: [names[whole.id]]}


def test_replicas_are_parts_that_are_enforced(node: Node, start: Start) -> None:
    first, _ = node.uuids
    whole = node.devices[0].allottable_bytes
    for number, parts in ((1, 1), (2, 3)):
        request = replicas_of(4, count=parts)
        share = node.prepare(number, request, devices=(first,) * parts)
        report = burn(start, of_spec(share), "--memory", "15Gi")
        assert report["device"]["total_bytes"] == whole * parts // 4
        assert report["errors"][0]["name"] == "CUDA_ERROR_OUT_OF_MEMORY"
