# SPDX-License-Identifier: Apache-2.0
"""The device plugin at the real kubelet, with a tenancy that only tells whose container it is."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
from podresources import POD_RESOURCES_SOCKET, PodResources
from stories import wait_taken_on
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import PATIENCE_S, TestbedError, wait_until

from allotment.agent.config.schema import Config
from allotment.agent.configuring import CHECKPOINT, PLUGIN_FOLDER
from allotment.agent.kubelet.checkpoint import KubeletCheckpoint
from allotment.agent.plugin.allocate_response import describe
from allotment.agent.plugin.front import OFFER, Front
from allotment.agent.plugin.front_keeping import Duties, FrontKeeping
from allotment.agent.plugin.serving import OfferedResource
from allotment.agent.resources import Resource, Slot
from allotment.model.errors import AllotError, DoesNotFitError, NotFoundError
from allotment.model.pods import Owner, Pod
from allotment.model.structs import replace
from allotment.shares.cdi import CDI_VERSION, KIND, spec_name, write_spec

SHARE = "tests.allotment.dev/share"
GPU = "tests.allotment.dev/gpu"
TELL = ["sh", "-c", "echo $POD_OF_SHARE/$CONTAINER_OF_SHARE"]
# A first process takes only signals that it asked for.
STAY = [*TELL[:2], f"{TELL[2]}; trap 'exit 1' TERM; sleep 1000 & wait"]


def shares(count: int) -> Resource:
    slots = tuple(Slot(f"share::{n}", None) for n in range(count))
    return Resource(name=SHARE, mode="soft", slots=slots)


def gpus(count: int) -> Resource:
    slots = tuple(Slot(f"GPU-{n}", f"GPU-{n}", numa_node=0) for n in range(count))
    return Resource(name=GPU, mode="exclusive", slots=slots)


@dataclass
class Tenancy:
    """Gives every container a CDI device that tells, in its environment, whose it is."""

    checkpoint: KubeletCheckpoint
    cdi: Path
    refuses_prepare: AllotError | None = None
    prepared: list[tuple[str, frozenset[str]]] = field(default_factory=list)

    @staticmethod
    def offered(resource: Resource) -> OfferedResource:
        return describe(resource, config=Config(), devices={})

    async def prepare(self, resource: str, ids: frozenset[str]) -> None:
        self.prepared.append((resource, ids))
        if self.refuses_prepare is not None:
            raise self.refuses_prepare
        entries = await asyncio.to_thread(self.checkpoint.entries)
        mine = [each for each in entries if each.resource == resource and each.ids == ids]
        assert len({each.pod for each in mine}) == 1
        for each in mine:
            assert each.share is not None
            env = [f"POD_OF_SHARE={each.pod}", f"CONTAINER_OF_SHARE={each.container}"]
            device = {"name": each.share, "containerEdits": {"env": env}}
            spec = {"cdiVersion": CDI_VERSION, "kind": KIND, "devices": [device]}
            await asyncio.to_thread(write_spec, self.cdi / spec_name(each.share), spec)


class Reports:
    """Forgets all but what went wrong on the node."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        """The tenancy here makes none."""

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        self.events.append(f"{reason} {message} {is_warning}")

    def count(self, name: str, **labels: str) -> None:
        """Figures are others' tests'."""

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Likewise."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Likewise."""


class Plugin:
    """The device plugin, in a thread of its own beside the test."""

    def __init__(self, cluster: Cluster) -> None:
        folder = cluster.node.path(PLUGIN_FOLDER)
        checkpoint = KubeletCheckpoint(folder / CHECKPOINT)
        self.links: dict[frozenset[str], int] = {}
        self.reports = Reports()
        # Not /var/run: that is a link, which would lead to the machine's own folder from here.
        self.tenancy = Tenancy(checkpoint, cluster.node.path("/run/cdi"))
        self._cluster = cluster
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        duties = Duties(
            offered=self.tenancy.offered,
            pre_start=self.tenancy.prepare,
            reports=self.reports,
            links=lambda: self.links,
            policy=lambda: "distributed",
        )
        state = Path(tempfile.mkdtemp(prefix="dp-"))  # sockets have short paths
        self._offer = folder / OFFER
        self._front = partial(Front, kubelet=folder / "kubelet.sock", state=state)
        self._made = partial(
            FrontKeeping,
            kubelet=folder / "kubelet.sock",
            state=state,
            duties=duties,
            checkpoint=checkpoint,
        )
        self._state = state
        self._keeping: FrontKeeping | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        async def started() -> None:
            self._keeping = self._made()
            works = (self._front().run(), self._keeping.run())
            self._tasks = [asyncio.create_task(each) for each in works]

        if not self._thread.is_alive():
            self._thread.start()
        asyncio.run_coroutine_threadsafe(started(), self._loop).result(PATIENCE_S)

    def offer(self, *resources: Resource) -> None:
        assert self._keeping is not None
        self._loop.call_soon_threadsafe(self._keeping.offer, resources)

    def offer_and_wait(self, *resources: Resource) -> None:
        self.offer(*resources)
        for each in resources:
            self._cluster.wait_allocatable(each.name, len(each.slots))

    def wait_status(self, resource: str, capacity: int, allocatable: int) -> None:
        """Waits for what the kubelet itself says of a resource, within its ten seconds."""

        def said() -> bool:
            status = self._cluster.api.get(self._cluster.node_path)["status"]
            found = (status["capacity"].get(resource), status["allocatable"].get(resource))
            return found == (str(capacity), str(allocatable))

        wait_until(said, f"{resource} {allocatable} of {capacity}")

    def stop(self) -> None:
        async def ended() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(ended(), self._loop).result(PATIENCE_S)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
        self._offer.unlink(missing_ok=True)
        shutil.rmtree(self._state)


@pytest.fixture
def plugin(cluster: Cluster, pods: Pods) -> Iterator[Plugin]:
    made = Plugin(cluster)
    made.start()
    yield made
    try:
        pods.delete()
        made.offer()
        for resource in (SHARE, GPU):
            wait_until(partial(is_free, cluster, resource), f"free {resource}")
            cluster.wait_allocatable(resource, 0)
    finally:
        made.close()
    for spec in made.tenancy.cdi.glob("allotment.dev-share-*"):
        with contextlib.suppress(OSError):
            spec.unlink()


def held_of(cluster: Cluster, resource: str) -> Mapping[str, frozenset[str]]:
    """What running containers have of a resource, by pod and container."""
    with PodResources(cluster.node.path(POD_RESOURCES_SOCKET)) as kubelet:
        return {
            f"{each.pod}/{each.container}": each.ids[resource]
            for each in kubelet.list()
            if resource in each.ids
        }


def is_free(cluster: Cluster, resource: str) -> bool:
    return not held_of(cluster, resource)


def uid(pods: Pods, name: str) -> str:
    return str(pods.get(name)["metadata"]["uid"])


def end_program(pods: Pods, name: str) -> None:
    """Ends a container's program; the kubelet starts it again."""
    # `kill` may itself go with the container, before it has returned.
    with contextlib.suppress(TestbedError):
        pods.exec(name, ["kill", "1"])


def test_every_container_is_known_by_its_ids(plugin: Plugin, pods: Pods) -> None:
    plugin.offer_and_wait(shares(20))
    names = [f"p{n}" for n in range(6)]
    for name in names:
        pods.create(
            pod(
                name,
                container(TELL, name="one", limits={SHARE: 1}),
                container(TELL, name="two", limits={SHARE: 1}),
                container(TELL, name="none"),
                initContainers=[container(TELL, name="first", limits={SHARE: 1})],
            )
        )
    for name in names:
        pods.wait_phase(name, "Succeeded", timeout_s=120)
        for each in ("first", "one", "two"):
            assert pods.logs(name, each).strip() == f"{uid(pods, name)}/{each}"
        assert pods.logs(name, "none").strip() == "/"
    assert plugin.reports.events == []


def test_the_node_follows_what_is_offered(plugin: Plugin) -> None:
    plugin.offer_and_wait(shares(3), gpus(2))
    sick = Slot("GPU-1", "GPU-1", is_healthy=False)
    plugin.offer(shares(5), Resource(name=GPU, mode="", slots=(*gpus(1).slots, sick)))
    plugin.wait_status(SHARE, 5, 5)
    plugin.wait_status(GPU, 2, 1)
    plugin.offer(gpus(2))
    plugin.wait_status(SHARE, 0, 0)
    plugin.wait_status(GPU, 2, 2)
    plugin.offer_and_wait(shares(4), gpus(2))


def test_a_container_waits_with_the_reason_until_its_share_is_there(
    plugin: Plugin, pods: Pods
) -> None:
    plugin.offer_and_wait(shares(2))
    plugin.tenancy.refuses_prepare = DoesNotFitError(
        "no GPU has 8Gi left:\n  GPU-0: need 8Gi, have 2Gi", hint="ask for less"
    )
    pods.create(pod("waits", container(TELL, limits={SHARE: 1})))
    why = pods.wait_waiting("waits", "CreateContainerConfigError")
    text = "no GPU has 8Gi left: GPU-0: need 8Gi, have 2Gi; hint: ask for less"
    assert why.endswith(f"rpc error: code = ResourceExhausted desc = {text}")
    pods.wait_event("waits", reason="Failed", contains=text)
    plugin.tenancy.refuses_prepare = None
    pods.wait_phase("waits", "Succeeded")
    assert pods.logs("waits").strip() == f"{uid(pods, 'waits')}/main"


def test_a_refused_allocation_is_told_in_the_pods_event(plugin: Plugin, pods: Pods) -> None:
    plugin.offer_and_wait(replace(shares(2), fails_above_one=True))
    pods.create(pod("refused", container(TELL, limits={SHARE: 2})))
    pods.wait_phase("refused", "Failed")
    pods.wait_event(
        "refused",
        reason="UnexpectedAdmissionError",
        contains="maximum request size for shared resources is 1; found 2; hint: ask for 1",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_a_new_kubelet_knows_what_is_offered_and_running_pods_stay(
    cluster: Cluster, plugin: Plugin, pods: Pods, number: signal.Signals
) -> None:
    plugin.offer_and_wait(shares(3), gpus(1))
    pods.create(pod("stays", container(STAY, limits={SHARE: 1}), restart="Always"))
    pods.wait_ready("stays")
    before = len(plugin.tenancy.prepared)
    cluster.restart("kubelet", number)
    cluster.wait_node_ready()
    plugin.wait_status(SHARE, 3, 3)
    plugin.wait_status(GPU, 1, 1)
    assert pods.restarts("stays") == 0
    # The node's status may be the one of before: then the kubelet knows of no plugin yet.
    later = pod("later", container(TELL, limits={SHARE: 1}))
    pods.create(later)
    wait_taken_on(pods, "later")
    pods.wait_phase("later", "Succeeded")
    ids = held_of(cluster, SHARE)["stays/main"]
    end_program(pods, "stays")
    pods.wait_restarted("stays")
    assert (SHARE, ids) in plugin.tenancy.prepared[before:]
    assert pods.wait_logs("stays").strip() == f"{uid(pods, 'stays')}/main"


def test_containers_restart_though_their_resource_is_offered_no_more(
    cluster: Cluster, plugin: Plugin, pods: Pods
) -> None:
    plugin.offer_and_wait(shares(2), gpus(1))
    pods.create(pod("holds", container(STAY, limits={SHARE: 1}), restart="Always"))
    pods.wait_ready("holds")
    plugin.offer(gpus(1))
    plugin.wait_status(SHARE, 0, 0)
    end_program(pods, "holds")
    pods.wait_restarted("holds")
    assert held_of(cluster, SHARE).keys() == {"holds/main"}


def test_a_plugin_that_was_away_finds_its_containers_again(plugin: Plugin, pods: Pods) -> None:
    plugin.offer_and_wait(shares(2))
    pods.create(pod("holds", container(STAY, limits={SHARE: 1}), restart="Always"))
    pods.wait_ready("holds")
    plugin.stop()
    plugin.wait_status(SHARE, 2, 0)
    end_program(pods, "holds")
    pods.create(pod("waits", container(TELL, limits={SHARE: 1})))
    time.sleep(1)
    plugin.start()
    plugin.offer_and_wait(shares(2))
    # The kubelet, which has found no plugin, tries again after 10 s, 20 s, 40 s.
    pods.wait_restarted("holds", timeout_s=150)
    pods.wait_phase("waits", "Succeeded")


def test_the_kubelet_takes_the_gpus_that_are_preferred(
    cluster: Cluster, plugin: Plugin, pods: Pods
) -> None:
    group = {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0, 7: 1}
    plugin.links.update(
        {
            frozenset((f"GPU-{one}", f"GPU-{other}")): 50 if group[one] == group[other] else 10
            for one, other in combinations(range(8), 2)
        }
    )
    plugin.offer_and_wait(gpus(8))
    pods.create(pod("four", container(STAY, limits={GPU: 4})))
    pods.wait_ready("four")
    assert held_of(cluster, GPU)["four/main"] in (
        {"GPU-0", "GPU-2", "GPU-4", "GPU-6"},
        {"GPU-1", "GPU-3", "GPU-5", "GPU-7"},
    )


def test_a_pod_that_the_kubelet_has_not_is_not_found(cluster: Cluster) -> None:
    with (
        PodResources(cluster.node.path(POD_RESOURCES_SOCKET)) as kubelet,
        pytest.raises(NotFoundError),
    ):
        kubelet.get("default", "nobody")
