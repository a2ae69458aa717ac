# SPDX-License-Identifier: Apache-2.0
"""docs/reference/json.md names every field of the JSON documents, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from allotment.burn.drivers import MemoryInfo
from allotment.burn.reports import (
    BurnDevice,
    BurnError,
    BurnPlan,
    BurnReport,
    Latencies,
    ProcessReport,
)
from allotment.cli import devices as devices_command
from allotment.cli.advise import advice_document
from allotment.cli.cluster_top import document as top_document
from allotment.cli.cost import cost_document
from allotment.cli.documents import shares_document
from allotment.cli.explain import document as explain_document
from allotment.cli.explain_claim import claim_document
from allotment.cli.findings import CheckResult, Finding
from allotment.cli.inspect import document as inspect_document
from allotment.cli.machines import DeviceRow
from allotment.cli.mig import MigRow
from allotment.cli.mig_fits import Planned, plan_document
from allotment.cli.migrate import document as migrate_document
from allotment.cli.migrate_plans import FoundPart, MigrationPlan, PlannedNode
from allotment.cli.migrate_systems import Setting
from allotment.cli.status import document as status_document
from allotment.cli.status import sums_of
from allotment.cost.bills import Bill
from allotment.cost.splitting import GpuHour, ShareHour, accounts
from allotment.cost.workloads import AdviceRules, ShareHistory, advise, workloads
from allotment.devices.sources import DeviceProcess, Problem, Reading
from allotment.kube.live import LivePod
from allotment.kube.migrations import Departure
from allotment.ledger import DeviceUse, SeatAccount
from allotment.metrics.use import GpuUse, ShareUse, Use
from allotment.model.clusters import (
    NodeDevice,
    PlacedDevice,
    PodBooking,
    PodNeed,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.devices import Device
from allotment.model.mig import MigPlace
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.requests import whole_devices
from allotment.model.shares import Injection, Runner, Share, ShareDevice, ShareId
from allotment.modes.mig.apply import GpuChange
from allotment.placement.explain import RefusalGroup, refuse
from allotment.scheduler.cluster_use import NodeUse
from allotment.scheduler.explain_claim import (
    ClaimedDevice,
    ClaimExplanation,
    ClaimState,
    ExplainedRequest,
)
from allotment.scheduler.explain_evidence import (
    ContainerSummary,
    Explanation,
    Obstacles,
    PlacedPart,
    PodCondition,
    Standing,
)
from allotment.scheduler.holdings import (
    ClusterHoldings,
    DeviceHoldings,
    Holder,
    NodeHoldings,
    Tenant,
)
from allotment.shares.compute_view import ComputeView
from allotment.shares.mode_policy import ModePolicy
from allotment.shares.status import (
    DeviceView,
    LiveState,
    LossView,
    OutsideView,
    ProcessView,
    ShareStatus,
    ShareView,
)

if TYPE_CHECKING:
    from tests.conftest import CommandLine

REFERENCE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "json.md"
UUID = "GPU-0"
SLICE = MigRow(
    uuid="MIG-1",
    profile="1g.10gb",
    start=6,
    size=1,
    memory_bytes=1,
    gpu_instance=13,
    compute_instance=0,
    state="ours",
    share="train",
    processes=(4711,),
)
OUTSIDE = OutsideView(pid=1, command="python", uuid=UUID, used=2)


def fields(document: object, path: str = "") -> Iterator[str]:
    """The dotted paths of a document's values; `[]` stands for a list's entries."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield from fields(value, f"{path}.{name}" if path else name)
    elif isinstance(document, list):
        assert document, f"{path} has no entry to look at"
        for value in document:
            yield from fields(value, f"{path}[]")
    else:
        yield path


def documented(command: str) -> set[str]:
    """The fields that the reference has for a command, those of objects in place of them."""
    found = _documented(command)
    return {each for each in found if not any(other.startswith(f"{each}.") for other in found)}


def _documented(command: str) -> set[str]:
    for part in REFERENCE.read_text().split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        if f"`{command}`" in heading:
            return set(re.findall(r"^\| `([^`]+)` \|", body, re.MULTILINE))
    raise AssertionError(command)


def devices_example() -> object:
    """What `allot devices` prints of a device with everything."""
    device = Device(
        uuid=UUID,
        name="NVIDIA A100-SXM4-80GB",
        index=0,
        memory_bytes=80 << 30,
        sm_count=108,
        compute_capability=(8, 0),
        numa_node=0,
        pci_bus_id="0000:07:00.0",
        simulated=True,
        mig=False,
    )
    reading = Reading(
        used_bytes=1,
        gpu_percent=2,
        memory_percent=3,
        temperature_c=4,
        power_mw=5,
        processes=(DeviceProcess(pid=6, used_bytes=7),),
    )
    allowed = ModePolicy(("soft",))
    row = DeviceRow(device, 8, ("train",), reading, guaranteed=3000, allowed=allowed)
    problem = Problem(index=1, uuid=None, message="lost")
    slices = {UUID: [SLICE]}
    return devices_command._document([row], [problem], [OUTSIDE], slices)  # noqa: SLF001


def mig_plan_example() -> object:
    """What `allot mig plan` prints of a GPU with something to do."""
    change = GpuChange(gpu=UUID, make=(("1g.10gb", 6),))
    return plan_document([Planned(index=0, uuid=UUID, names={}, change=change)])


def shares_example() -> object:
    """What `allot ps` prints of a share with a process."""
    owner = Owner(
        uid=PodUid("0"),
        namespace="lab",
        pod="one",
        container="train",
        kind=ContainerKind.REGULAR,
        resource="allotment.dev/gpu",
    )
    share = Share(
        id=ShareId("s"),
        name="train",
        created=0.0,
        mode="soft",
        devices=(ShareDevice(UUID, "NVIDIA A100-SXM4-80GB", 1),),
        injection=Injection.NAMESPACE,
        runner=Runner(pid=1, start_time=2),
        command=("python", "train.py"),
        owner=owner,
    )
    device = DeviceView(
        uuid=UUID,
        name="NVIDIA A100-SXM4-80GB",
        limit=1,
        used=2,
        peak=3,
        refusals=4,
        compute=ComputeView(
            promised=Compute(3000, 8000, is_governed=True),
            is_suspended=False,
            is_measured=True,
            use=DeviceUse(used=2, peak=3, refusals=4),
            account=SeatAccount(),
            driver_percent=None,
            read_ns=0,
        ),
    )
    process = ProcessView(
        pid=1,
        pid_inside=2,
        command="python",
        is_enforced=True,
        used=(1,),
        context=(2,),
        peak=(3,),
        refusals=4,
    )
    loss = LossView(UUID, time=0.0, reason="the control daemon ended", recovered_s=0.1)
    view = ShareView(
        "s", "train", LiveState.RUNNING, share, (device,), (process,), None, losses=(loss,)
    )
    return shares_document(ShareStatus((view,), (OUTSIDE,)))


def burn_example() -> object:
    """What `allot burn` prints of a process with an error."""
    latencies = Latencies()
    latencies.add(1000)
    process = ProcessReport(
        pid=1,
        device=BurnDevice(
            ordinal=0, uuid=UUID, name="NVIDIA A100-SXM4-80GB", total_bytes=1, multiprocessors=108
        ),
        memory_before=MemoryInfo(free_bytes=1, total_bytes=2),
        memory_after=MemoryInfo(free_bytes=1, total_bytes=2),
        latencies=latencies,
        errors=[BurnError(code=2, name="CUDA_ERROR_OUT_OF_MEMORY", call="cuMemAlloc", at_bytes=1)],
    )
    return BurnReport(plan=BurnPlan(), processes=[process]).to_document()


def explain_example() -> object:
    """What `allot explain pod` prints of a pod of which there is everything to say."""
    part = PlacedPart(PlacedDevice(UUID, 1, 2), NodeDevice(uuid=UUID, model="A100", memory_bytes=4))
    asked = ContainerSummary(
        name="train", kind="regular", text="a GPU with 1Gi", mode="soft", parts=(part,)
    )
    explanation = Explanation(
        namespace="lab",
        name="one",
        uid="0",
        standing=Standing.PENDING,
        scheduler="allotment-scheduler",
        policies=("fragmentation",),
        containers=(asked,),
        obstacles=(refuse(Obstacles.QUOTA, "need 2, have 1"),),
        condition=PodCondition(type="PodScheduled", reason="Unschedulable", message="0/1 nodes"),
        nodes=2,
        fitting=("a",),
        proposal=(asked,),
        refused=(RefusalGroup("no-gpu", "need a GPU, have no GPU", ("b",), "they are T4"),),
        others=("nvidia.com/gpu",),
        claims=("mine",),
    )
    return explain_document(explanation, ["quotas: refused"])


def claim_example() -> object:
    """What `allot explain claim` prints of a claim of which there is everything to say."""
    device = ClaimedDevice(
        request="gpu",
        driver="gpu.allotment.dev",
        node="a",
        device="gpu-4a0ae330",
        uuid=UUID,
        consumed={"memory": "4Gi"},
        is_admin=False,
        data={"compute": {"guarantee_percent": 30, "ceiling_percent": 80}},
    )
    request = ExplainedRequest(
        name="gpu",
        device_class="share.allotment.dev",
        count=1,
        amounts={"memory": "4Gi"},
        selectors=("true",),
        fitting=("a",),
        refused=(RefusalGroup("gpu-memory", "need 4Gi", ("b",)),),
        not_evaluated=("true",),
    )
    return claim_document(
        ClaimExplanation(
            namespace="lab",
            name="one",
            uid="0",
            state=ClaimState.PREPARED,
            pods=("train",),
            devices=(device,),
            requests=(request,),
            fitting=("a",),
        )
    )


def inspect_example() -> object:
    """What `allot inspect` prints of a pod with a GPU and of one that waits."""
    holder = Holder(
        uid=PodUid("u"),
        namespace="ml",
        name="train",
        container="main",
        pods=("train",),
        mode="mig",
        compute=Compute(1000, 1000),
        slice=MigPlace("1g.10gb", 2),
    )
    device = NodeDevice(uuid=UUID, model="A100", memory_bytes=2)
    need = PodNeed(
        uid=PodUid("w"),
        containers=(WantedContainer(name="main", request=whole_devices(1, mode="soft")),),
    )
    stranger = Tenant(booking=PodBooking(uid=PodUid("s"), node="n"), namespace="ml", name="s")
    node = NodeHoldings(
        name="n",
        devices=(DeviceHoldings(device=device, holders=(holder,)),),
        unlocated=(stranger,),
    )
    found = ClusterHoldings(
        nodes=(node,),
        waiting=(LivePod(need=need),),
        without_devices=("plain",),
        problems=("one",),
    )
    return inspect_document(found, found.nodes)


def top_example() -> object:
    """What `kubectl allot top` prints of a node with a share."""
    gpu = GpuUse(uuid=UUID, index=0, model="A100", pci_bus_id="", memory_total=1)
    use = Use(
        node="n",
        gpus=(gpu,),
        shares=(ShareUse(share="s", gpu=UUID, device=UUID),),
        are_shares_read=True,
    )
    return top_document([NodeUse(node="n", use=use)])


def migrate_example() -> object:
    """What `allot migrate plan` prints of a node that cannot move."""
    departure = Departure(
        node="a",
        system="hami",
        labels={"gpu": None},
        annotations=("hami.io/node-handshake",),
        daemon_sets=("kube-system/hami-device-plugin",),
        resources="nvidia.*",
    )
    node = PlannedNode(
        name="a",
        state="old",
        capacity={"nvidia.com/gpu": "10"},
        config="soft",
        pods=("ml/train",),
        obstacle="drain it",
        departure=departure,
    )
    return migrate_document(
        MigrationPlan(
            system="hami",
            title="HAMi",
            found=(FoundPart("ConfigMap", "a/b", "settings"),),
            settings=(Setting("ConfigMap a/b", "x", "1", reason="why"),),
            values={"agent": {}},
            dialects={"hami": {}},
            shut=("a/b",),
            nodes=(node,),
            before=("one",),
            after=("two",),
            notes=("three",),
        )
    )


def status_example() -> object:
    finding = Finding("agents", CheckResult.NOTE, "none")
    return status_document("https://a", CheckResult.NOTE, [finding], sums_of(ClusterHoldings()))


@pytest.mark.parametrize(
    ("command", "document"),
    [
        ("allot inspect", inspect_example()),
        ("kubectl allot top", top_example()),
        ("allot status", status_example()),
        ("allot devices", devices_example()),
        ("allot mig plan", mig_plan_example()),
        ("allot migrate plan", migrate_example()),
        ("allot ps", shares_example()),
        ("allot burn", burn_example()),
        ("allot explain pod", explain_example()),
        ("allot explain claim", claim_example()),
    ],
    ids=[
        "inspect",
        "cluster top",
        "status",
        "devices",
        "mig plan",
        "migrate plan",
        "ps",
        "burn",
        "explain",
        "explain claim",
    ],
)
def test_fields_are_the_documented_ones(command: str, document: object) -> None:
    assert set(fields(document)) == documented(command)


def test_fields_of_cdi_are_the_documented_ones(allot: CommandLine, tmp_path: Path) -> None:
    made = allot(
        *("cdi", "create", "--memory", "1Gi", "--simulated", "t4"), "--cdi-dir", tmp_path / "cdi"
    )
    assert made.returncode == 0, made.stderr
    listed = allot("cdi", "list", "-o", "json")
    assert set(fields(json.loads(listed.stdout))) == documented("allot cdi list")


def test_fields_of_costs_are_the_documented_ones() -> None:
    hour = GpuHour(price=1, shares=(ShareHour(namespace="ml", memory=0.5),))
    bill = Bill(
        accounts=accounts([hour]),
        models={"A100": 1},
        currency="EUR",
        is_present=False,
        begin=0.0,
        end=0.0,
    )
    found = cost_document(bill, "ml")
    assert set(fields(found)) == documented("allot cost")
    whole = cost_document(bill)
    for name in ("unallocated", "total"):
        assert whole[name].keys() == found["namespaces"][0].keys() - {"namespace"}


def test_fields_of_advice_are_the_documented_ones() -> None:
    share = ShareHistory(workload="web", share="1", gpu_memory=2, limit=1, refusals=1)
    advices = [advise(each, AdviceRules(least_s=1)) for each in workloads([share])]
    assert set(fields(advice_document(advices, "EUR"))) == documented("allot advise")


def test_fields_of_doctor_are_the_documented_ones(allot: CommandLine) -> None:
    examined = allot("doctor", "-o", "json")
    assert set(fields(json.loads(examined.stdout))) == documented("allot doctor")
