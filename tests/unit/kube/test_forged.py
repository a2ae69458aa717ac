# SPDX-License-Identifier: Apache-2.0
"""Whatever is written on one node or one pod: books and placement serve all others as before.

Who has one node's credentials writes its annotations, and who may create pods writes theirs. What
is generated here is what the readers let pass and no honest writer would write.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allotment.dialects.placements import PLACEMENT
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.inventories import decode
from allotment.kube.objects import PodObject
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeRejection,
    PodNeed,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.model.quantities import MAX_BYTES, MemoryAmount
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.placement.cluster import Cluster
from allotment.placement.refusals import Reason
from allotment.scheduler.book import Book
from allotment.scheduler.keeping import BookKeeper, DialectQuotas
from allotment.scheduler.needs import need_of
from allotment.scheduler.quota import QuotaBook

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
    uid: str, *, count: int = 1, memory: int | Fraction = GI, **wishes: Any  # noqa: ANN401
) -> PodNeed:
    """A pod; `wishes` are `Constraints`' and `Request`'s."""
    constraints = {key: value for key, value in wishes.items() if key in Constraints.__slots__}
    others = {key: value for key, value in wishes.items() if key not in constraints}
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


def keeper() -> tuple[BookKeeper, Cluster]:
    """Books with one node on which every pod of `NEEDS` has room."""
    book = Book(Cluster())
    kept = BookKeeper(book, DialectQuotas(QuotaBook()))
    kept.node_put(HONEST)
    return kept, book.cluster


def check_others_are_served(cluster: Cluster) -> None:
    """Every pod has its place on the honest node, and can say why not on the other."""
    for each in NEEDS:
        ranking = cluster.rank(each)
        assert "honest" in ranking.best, each.uid
        assert set(ranking.refused.reasons()) <= set(Reason), each.uid
        assert not isinstance(cluster.place(each, "honest"), NodeRejection)
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
    {"model": st.sampled_from(["A100", "", "a100", "\u0130"]) | st.text(max_size=4), "memory": edges},
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
