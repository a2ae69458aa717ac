# SPDX-License-Identifier: Apache-2.0
"""The scheduler over HTTP, held to its own description by schemathesis, and on bad requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from aiohttp import web
from examples import examples
from hypothesis import HealthCheck, settings
from scheduler_twin import Bindery, Told, cluster_pod, node
from schemathesis.specs.openapi.checks import negative_data_rejection
from served_twin import Thread, in_a_thread

from allotment.dialects.own.registry import need_of
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.metrics.serving import Probes
from allotment.model.clusters import ClusterPod, PodBooking
from allotment.model.structs import replace
from allotment.scheduler import serving
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.nominations import NominatedCluster
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.extender.binder import Binder
from allotment.scheduler.extender.extender import Extender
from allotment.scheduler.extender.preemption import Preemption
from allotment.scheduler.gpushare import GpuShareInspection
from allotment.scheduler.serving import application

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "extender-openapi.yaml"
LIMIT = 1 << 20
WHOLE = {"allotment.dev/gpu": "1"}
NODES = ("a", "b", "full")
WAITING: Mapping[str, Mapping[str, Any]] = {
    **{f"share-{number}": {} for number in range(5)},
    "whole": {"limits": WHOLE},
    "two": {"limits": {"allotment.dev/gpu": "2", "allotment.dev/gpu-memory": "160Gi"}},
    "important": {"limits": WHOLE, "priority": 100},
    "plain": {"limits": {"cpu": "1"}},
    "mistaken": {"limits": {"allotment.dev/gpu-memory": "4Gi"}},
}
RUNNING = ("low-0", "low-1")


@dataclass
class World:
    """A small cluster: `full` has a pod on each of its GPUs, and ten pods wait."""

    leads: bool = True
    metrics: SchedulerMetrics = field(default_factory=SchedulerMetrics)
    pods: dict[str, ClusterPod] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    bindery: Bindery = field(default_factory=Bindery)

    def __post_init__(self) -> None:
        self.cluster = NominatedCluster(node_policies=("binpack",), device_policies=("binpack",))
        quotas = QuotaBook()
        self.book = Book(self.cluster, quotas=quotas)
        self.preemption = Preemption(
            self.cluster, pods=self.pods.get, quotas=quotas, leads=lambda: self.leads, echo_s=0.0
        )
        self.keeper = ClusterEventHandler(
            self.book, quotas, nominations=self.preemption.nominations
        )
        self.extender = Extender(
            self.book,
            Binder(self.book, self.bindery, clock=time.monotonic),
            observer=self.told,
            pods=self.pods.get,
            leads=lambda: self.leads,
        )

    def renew(self) -> None:
        """Have all as it was in the beginning."""
        self.leads = True
        for pod in list(self.pods.values()):
            del self.pods[pod.uid]
            self.keeper.pod_gone(pod.uid)
            self.bindery.pods.pop(pod.uid, None)
        self.bindery.asked.clear()
        for name in NODES:
            self.keeper.node_put(node(name))
        for device, name in enumerate(RUNNING):
            pod = cluster_pod(
                name, limits=WHOLE, annotations={"allotment.dev/uuids": f"GPU-full{device}"}
            )
            placed = self.cluster.place(need_of(pod), "full")
            assert isinstance(placed, PodBooking)
            self._put(replace(pod, node="full", booking=placed, version=""))
        for name, options in WAITING.items():
            self._put(cluster_pod(name, **options))

    def check(self) -> None:
        """Look whether anything is given twice, or was bound that nobody booked."""
        self.cluster.check_invariants()
        for uid, pod in self.bindery.pods.items():
            if pod.node and pod.asks is not None:
                booked = self.book.booking(uid)
                assert booked is not None
                assert booked.node == pod.node

    def app(self) -> web.Application:
        return application(
            {
                "filter": self.extender.filter,
                "prioritize": self.extender.prioritize,
                "bind": self.extender.bind,
                "preempt": self.preemption.preempt,
            },
            probes=Probes(is_leading=lambda: [] if self.leads else ["another replica leads"]),
            registry=self.metrics.registry,
            inspect=GpuShareInspection(self.book).answer,
            on_answer=lambda verb, seconds, _: self.metrics.observe(
                "request_seconds", seconds, verb
            ),
            max_body_bytes=LIMIT,
        )

    def _put(self, pod: ClusterPod) -> None:
        self.pods[pod.uid] = pod
        self.keeper.pod_put(pod)
        self.bindery.add(pod)


@dataclass(frozen=True)
class Served:
    thread: Thread
    world: World

    @property
    def port(self) -> int:
        return self.thread.port


@pytest.fixture(scope="module")
def serving_world() -> Iterator[Served]:
    """The real application, in a thread with a loop of its own."""
    world = World()
    with in_a_thread(world.app) as thread:
        yield Served(thread, world)


@pytest.fixture
def served(serving_world: Served) -> Served:
    """That, with all as it was in the beginning."""
    serving_world.thread.do(serving_world.world.renew)
    return serving_world


def known() -> dict[str, Any]:
    """The description, by which half of the questions are about pods and nodes that there are."""
    document: dict[str, Any] = yaml.safe_load(DOCUMENT.read_text("utf-8"))
    schemas = document["components"]["schemas"]

    def one_of(those: Iterable[str]) -> dict[str, Any]:
        return {"type": "string", "enum": list(those)}

    def some_of(those: Iterable[str], **more: object) -> dict[str, Any]:
        return {"type": "array", "minItems": 1, "uniqueItems": True, "items": one_of(those), **more}

    def all_of(**properties: object) -> dict[str, Any]:
        # And nothing else: of what is not named here, anything would be right.
        found = {"type": "object", "required": list(properties), "properties": properties}
        return {**found, "additionalProperties": False}

    def pod(uids: Iterable[str]) -> dict[str, Any]:
        about = all_of(name=one_of(["x"]), namespace=one_of(["ml"]), uid=one_of(uids))
        return all_of(metadata=about, spec=all_of(containers={"type": "array", "maxItems": 0}))

    waiting = pod(f"uid-{name}" for name in WAITING)
    victims = some_of(
        RUNNING, items=all_of(UID=one_of([*(f"uid-{name}" for name in RUNNING), "uid-plain"]))
    )
    wanted = {
        "ExtenderArgs": [
            all_of(Pod=waiting, NodeNames=some_of([*NODES, "gone"])),
            all_of(
                Pod=waiting,
                Nodes=all_of(items=some_of((), items=all_of(metadata=all_of(name=one_of(NODES))))),
            ),
        ],
        "BindingArguments": [
            all_of(
                PodName=one_of([name]),
                PodNamespace=one_of(["ml"]),
                PodUID=one_of([f"uid-{name}"]),
                Node=one_of(NODES),
            )
            for name in WAITING
        ],
        "PreemptionArguments": [
            all_of(
                Pod=pod(["uid-important", "uid-whole"]),
                NodeNameToMetaVictims=all_of(full=all_of(Pods=victims)),
            ),
            all_of(
                Pod=pod(["uid-important"]),
                NodeNameToVictims=all_of(
                    full=all_of(Pods={**victims, "items": pod(f"uid-{name}" for name in RUNNING)})
                ),
            ),
        ],
    }
    for name, those in wanted.items():
        schemas[name] = {"anyOf": [*those, schemas[name]]}
    return document


schema = schemathesis.openapi.from_dict(known())


@pytest.mark.timeout(300)
@schema.parametrize()
@settings(
    max_examples=examples(1 / 4),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_everything_is_as_described(case: schemathesis.Case[Any], serving_world: Served) -> None:
    served = serving_world
    served.thread.do(served.world.renew)
    case.call_and_validate(
        base_url=served.thread.url,
        # What is not looked at is passed over, as everywhere where Go's JSON is spoken.
        excluded_checks=[negative_data_rejection],
    )
    served.thread.do(served.world.check)


def test_pods_are_placed_bound_and_preempted_for(served: Served) -> None:
    """What is asked above at random, asked once as kube-scheduler does."""

    def answer(verb: str, body: object) -> Any:  # noqa: ANN401 - JSON
        status, _, text = ask(served, "POST", f"/{verb}", json.dumps(body).encode())
        assert status == 200
        served.thread.do(served.world.check)
        return json.loads(text)

    def asked(name: str) -> dict[str, Any]:
        pod = {"metadata": {"name": name, "namespace": "ml", "uid": f"uid-{name}"}}
        return {"Pod": {**pod, "spec": {"containers": []}}}

    names = {"NodeNames": list(NODES)}
    [best] = answer("filter", asked("whole") | names)["NodeNames"]
    scores = {each["Host"]: each["Score"] for each in answer("prioritize", asked("whole") | names)}
    assert max(scores, key=lambda name: scores[name]) == best
    assert answer("filter", asked("mistaken") | names)["NodeNames"] == []
    assert answer("filter", asked("plain") | names)["NodeNames"] == list(NODES)
    pod = {"PodName": "whole", "PodNamespace": "ml", "PodUID": "uid-whole"}
    assert answer("bind", pod | {"Node": best}) == {"Error": ""}
    assert served.world.told.bound_pods[-1:] == ["whole"]
    victims = {"NodeNameToMetaVictims": {"full": {"Pods": [{"UID": "uid-low-0"}]}}}
    found = answer("preempt", asked("important") | victims)["NodeNameToMetaVictims"]
    assert [each["UID"] for each in found["full"]["Pods"]] == ["uid-low-0"]


def test_gpushares_clients_see_who_has_what(served: Served) -> None:
    """The JSON of its `/inspect`, in GiB."""
    status, kind, text = ask(served, "GET", "/gpushare-scheduler/inspect/full")
    assert (status, kind) == (200, "application/json")
    pods = [[{"name": name, "namespace": "ml", "usedGPU": 80}] for name in RUNNING]
    devices = [
        {"id": index, "totalGPU": 80, "usedGPU": 80, "pods": those}
        for index, those in enumerate(pods)
    ]
    full = {"name": "full", "totalGPU": 160, "usedGPU": 160, "devs": devices}
    assert json.loads(text) == {"nodes": [full]}
    found = json.loads(ask(served, "GET", "/gpushare-scheduler/inspect")[2])
    assert [each["name"] for each in found["nodes"]] == ["a", "b", "full"]
    assert [each["usedGPU"] for each in found["nodes"]] == [0, 0, 160]
    text = ask(served, "GET", "/gpushare-scheduler/inspect/plain")[2]
    assert json.loads(text) == {"nodes": [], "error": "node 'plain' shares no GPU"}


def ask(served: Served, method: str, path: str, body: bytes | None = None) -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
    try:
        connection.request(method, path, body=body)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("verb", ["filter", "prioritize", "bind", "preempt"])
def test_what_is_no_question_is_refused_with_the_next_step(served: Served, verb: str) -> None:
    for body in (b"", b"{", b"[]", b'{"Pod": 3}', b"\xff" * 50, b"[" * 100_000):
        status, kind, text = ask(served, "POST", f"/{verb}", body)
        assert status == 400, (body[:10], text)
        assert kind.startswith("application/json")
        assert "Pod" in text


def test_a_body_beyond_the_limit_is_refused(served: Served) -> None:
    assert ask(served, "POST", "/filter", b" " * (LIMIT + 1))[0] == 413


def test_who_follows_says_so(served: Served) -> None:
    served.world.leads = False
    assert ask(served, "GET", "/leading")[0] == 503
    assert ask(served, "GET", "/readyz")[0] == 200
    assert ask(served, "GET", "/healthz")[0] == 200
    status, _, text = ask(served, "POST", "/filter", b"{}")
    assert status == 503
    assert "another replica" in text


@pytest.mark.parametrize("leads", [True, False])
def test_only_who_leads_keeps_a_connection(served: Served, leads: bool) -> None:  # noqa: FBT001
    """Who keeps one to a replica that follows would ask it for ever."""
    served.world.leads = leads
    connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
    try:
        connection.request("POST", "/filter", body=b'{"Pod": {"metadata": {"uid": "u"}}}')
        answer = connection.getresponse()
        answer.read()
        assert answer.will_close is not leads
    finally:
        connection.close()


def test_calls_are_counted(served: Served) -> None:
    ask(served, "POST", "/filter", b"{}")
    _, kind, text = ask(served, "GET", "/metrics")
    assert kind.startswith("text/plain")
    assert 'allotment_scheduler_request_seconds_count{verb="filter"}' in text


@pytest.mark.parametrize(("method", "path"), [("GET", "/filter"), ("POST", "/"), ("GET", "/x")])
def test_other_paths_and_methods_are_not_there(served: Served, method: str, path: str) -> None:
    assert ask(served, method, path)[0] in {404, 405}


def test_a_body_that_does_not_end_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_READ_S", 0.1)
    connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
    try:
        connection.putrequest("POST", "/filter")
        connection.putheader("Content-Length", "10")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
    finally:
        connection.close()
