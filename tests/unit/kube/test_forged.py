# SPDX-License-Identifier: Apache-2.0
"""Whatever is written on one node or one pod: books and placement serve all others as before.

Who has one node's credentials writes its annotations, and who may create pods writes theirs. What
is generated here is what the readers let pass and no honest writer would write.
"""

from __future__ import annotations

import json
from contextlib import suppress
from fractions import Fraction
from typing import Any

import msgspec
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from allotment.dialects.own import annotations as keys
from allotment.dialects.own.placement import PLACEMENT
from allotment.dialects.own.registry import need_of
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.inventories import decode
from allotment.kube.objects import PodObject
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodNeed,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.model.quantities import MAX_BYTES, MemoryAmount
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Reason, Refusal
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.quota import QuotaBook

Document = dict[str, Any]
GI = 1 << 30
HONEST = NodeInventory(
    name="honest",
    cpu_milli=64_000,
    memory_bytes=256 * GI,
    devices=tuple(
        NodeDevice(uuid=f"GPU-{each}", model="A100", memory_bytes=80 * GI, index=each, numa_node=0)
        for each in range(4)
    ),
    links={(f"GPU-{one}", f"GPU-{two}"): 100 for one in range(4) for two in range(one + 1, 4)},
)


def need(
    uid: str,
    *,
    count: int = 1,
    memory: int | Fraction = GI,
    **fields: Any,  # noqa: ANN401
) -> PodNeed:
    """A pod; `fields` are `Constraints`' and `Request`'s."""
    constraints = {
        key: value for key, value in fields.items() if key in Constraints.__struct_fields__
    }
    others = {key: value for key, value in fields.items() if key not in constraints}
    amount = (
        MemoryAmount("", size_bytes=memory)
        if isinstance(memory, int)
        else MemoryAmount("", part=memory)
    )
    request = Request(
        amount,
        count=count,
        compute=Compute(guarantee=1000, is_governed=True),
        constraints=Constraints(**constraints),
        **others,
    )
    container = WantedContainer(name="main", request=request)
    return PodNeed(uid=PodUid(uid), namespace="ns", name=uid, containers=(container,))


NEEDS = (
    need("plain"),
    need("part", memory=Fraction(1, 3)),
    need("model", models=(ModelRule("A100"),)),
    need("several", count=4, same_numa=True),
    need("linked", count=2, needs_nvlink=True),
    need("over", count=2, may_oversubscribe=True),
    need("tagged", affinity="tag"),
)


def keeper() -> tuple[ClusterEventHandler, Cluster]:
    """Books with one node on which every pod of `NEEDS` has room."""
    book = Book(Cluster())
    kept = ClusterEventHandler(book, QuotaBook())
    kept.node_put(HONEST)
    return kept, book.cluster


def check_others_are_served(cluster: Cluster) -> None:
    """Every pod has its place on the honest node, and can say why not on the other."""
    for each in NEEDS:
        ranking = cluster.rank(each)
        assert "honest" in ranking.best, each.uid
        assert set(ranking.refused.reasons()) <= set(Reason), each.uid
        assert not isinstance(cluster.place(each, "honest"), Refusal)
        cluster.place(each, "forged")
    cluster.check_invariants()


# ---- nodes ---------------------------------------------------------------------------------------

words = st.sampled_from(["soft", "exclusive", "timeslice", "mps", "mig", "passthrough", "", "x"])
edges = st.sampled_from([0, 1, 80 * GI, MAX_BYTES // 2, MAX_BYTES]) | st.integers(0, MAX_BYTES)
taken = st.fixed_dictionaries(
    {},
    optional={
        "memory": edges,
        "guarantee": st.integers(0, 1 << 34),
        "shares": st.integers(0, 1 << 20),
        "mode": words,
    },
)
device = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["A100", "", "a100", "\u0130"]) | st.text(max_size=4),
        "memory": edges,
    },
    optional={
        "index": st.integers(0, 1 << 16),
        "numa": st.integers(0, 1 << 16),
        "modes": st.lists(words | st.text(max_size=3), max_size=16),
        "shares": st.integers(0, 1 << 20),
        "guarantee": st.integers(0, 10_000),
        "problem": st.text(max_size=3),
        "taken": taken,
    },
)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    devices = draw(st.lists(device, min_size=1, max_size=6))
    for number, each in enumerate(devices):
        each["uuid"] = draw(st.sampled_from([f"GPU-{number}", f"GPU-x{number}"]))
    place = st.integers(0, len(devices) - 1)
    return {
        "version": 1,
        "devices": devices,
        "host": draw(edges),
        "links": draw(st.lists(st.tuples(place, place, st.integers(0, 1 << 20)), max_size=4)),
    }


def with_device(**changes: object) -> Document:
    return {"version": 1, "devices": [{"uuid": "GPU-x", "model": "m", "memory": 1, **changes}]}


@example(with_device(modes=["a", "b", "c", "d", "e", "f", "g", "h", "i"]))
@example(with_device(numa=40_000))
@example(with_device(memory=MAX_BYTES))
@given(documents())
@settings(deadline=None)
def test_what_is_read_of_one_node_harms_no_other(document: Document) -> None:
    try:
        found = decode("forged", json.dumps(document), cpu_milli=8000, memory_bytes=64 * GI)
    except UsageError:
        return
    kept, cluster = keeper()
    kept.node_put(found)
    check_others_are_served(cluster)
    kept.node_put(replace(found, devices=found.devices[:1]))
    kept.node_dropped("forged")
    check_others_are_served(cluster)


# ---- pods ----------------------------------------------------------------------------------------

KEYS = sorted(
    {
        value
        for value in vars(keys).values()
        if isinstance(value, str) and value.startswith("allotment.dev/")
    }
)
texts = st.one_of(
    st.sampled_from(
        [
            *("", "0", "1", "-1", "30", "30:80", "0:100", "101", "1e308", "9" * 64, "0%", "100%"),
            *(
                "true",
                "soft",
                "mps",
                "later",
                "fragmentation",
                "binpack,fgd",
                "GPU-0,GPU-9",
                "A100",
            ),
            *("*", ",", "a=b", '"', "{}", "[" * 500, "null", '{"version":1}', "\u0130", "\ud800"),
        ]
    ),
    st.text(max_size=8),
)
amount_texts = st.sampled_from(["0", "1", "2", "33", "8Gi", "1E", "9223372036854775807", "1e999"])


@st.composite
def pods(draw: st.DrawFn) -> Document:
    names = ["gpu-memory", "gpu-compute"]
    limits = {
        "allotment.dev/gpu": draw(st.sampled_from(["1", "1", "2", "4", "33", "0"])),
        **draw(st.dictionaries(st.sampled_from(names).map(keys.PREFIX.__add__), amount_texts)),
    }
    written = draw(st.dictionaries(st.sampled_from(KEYS), texts, max_size=4))
    node = draw(st.sampled_from(["", "honest", "gone"]))
    if draw(st.booleans()):
        placed = {
            "devices": draw(st.lists(st.sampled_from(["GPU-0", "GPU-1", "GPU-9", ""]), max_size=3)),
            "memory": draw(edges),
            "guarantee": draw(st.integers(-1, 10_001)),
            "mode": draw(texts),
            "exclusion": draw(texts),
        }
        written[PLACEMENT] = json.dumps(
            {"version": 1, "node": node, "pod": "forged", "containers": {"main": placed}}
        )
    resources = {"limits": limits, "requests": {"cpu": draw(amount_texts)}}
    containers = [{"name": "main", "resources": resources}]
    return {
        "metadata": {
            "name": "forged",
            "namespace": "ns",
            "uid": "forged",
            "annotations": {key: text for key, text in written.items() if _is_json(text)},
        },
        "spec": {
            "nodeName": node,
            "containers": containers,
            "initContainers": draw(st.sampled_from([None, [{**containers[0], "name": "first"}]])),
        },
    }


def _is_json(text: str) -> bool:
    """Text that Go can have written."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


@given(pods())
@settings(deadline=None)
def test_what_is_written_on_one_pod_harms_no_other(document: Document) -> None:
    kept, cluster = keeper()
    pod = to_cluster_pod(msgspec.json.decode(json.dumps(document), type=PodObject))
    kept.pod_put(pod)
    with suppress(UsageError):
        found = need_of(pod)
        event(f"asks for GPUs: {bool(found.containers)}")
        cluster.rank(found).refused.reasons()
        cluster.place(found, "honest")
        cluster.arrived(found)
    kept.pod_gone(pod.uid)
    check_others_are_served(cluster)
