# SPDX-License-Identifier: Apache-2.0
"""Quota: every pod counted as what it is, in whatever words, and never more than is allowed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from foreign_pods import load_settings
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from allotment.dialects.own.protocol import ANY_MEMORY
from allotment.kube.objects import Metadata
from allotment.kube.quotas import QuotaObject, quota_of
from allotment.model.clusters import (
    NamespaceQuota,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.mig import MigPlace
from allotment.model.modes import EXCLUSIVE, SOFT
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement.booking import footprint
from allotment.scheduler.core.quota import QuotaBook, charge_of, units_of

GI, MI = 1 << 30, 1 << 20
INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR


def request(
    memory: int | None = None, *, count: int = 1, part: Fraction | None = None, compute: int = 0
) -> Request:
    amount = MemoryAmount("", size_bytes=memory) if part is None else MemoryAmount("", part=part)
    return Request(amount, count=count, compute=Compute(compute * 100, max(compute * 100, 1)))


def need(
    *requests: Request | tuple[ContainerKind, Request], uid: str = "u", namespace: str = "team"
) -> PodNeed:
    pairs = [each if isinstance(each, tuple) else (REGULAR, each) for each in requests]
    return PodNeed(
        uid=PodUid(uid),
        namespace=namespace,
        name=uid,
        containers=tuple(
            WantedContainer(name=f"c{place}", request=its, kind=kind, place=place)
            for place, (kind, its) in enumerate(pairs)
        ),
    )


def booking(of: PodNeed, memory: int) -> PodBooking:
    """Placed so that each device gives this much."""
    return PodBooking(
        uid=of.uid,
        node="n",
        containers=tuple(
            PlacedContainer(
                name=each.name,
                kind=each.kind,
                place=each.place,
                devices=tuple(
                    PlacedDevice(f"GPU-{device}", memory, each.request.compute.guarantee)
                    for device in range(each.request.count)
                ),
            )
            for each in of.containers
        ),
    )


def book(**hard: str) -> QuotaBook:
    made = QuotaBook()
    names = {_NAMES.get(key, key): text for key, text in hard.items()}
    made.set_quotas([NamespaceQuota(namespace="team", name="gpus", hard=names)])
    return made


_NAMES = {
    "gpumem": "limits.nvidia.com/gpumem",
    "cores": "limits.nvidia.com/gpucores",
    "own": "requests.allotment.dev/gpu-memory",
    "own_limit": "limits.allotment.dev/gpu-memory",
    "gpus": "limits.allotment.dev/gpu",
    "nvidia": "limits.nvidia.com/gpu",
    "percent": "limits.nvidia.com/gpumem-percentage",
    "tencent": "limits.tencent.com/vcuda-memory",
}


# ---- what a pod counts as ------------------------------------------------------------------------


def test_values_of_each_gpu_are_multiplied_by_the_gpus() -> None:
    charge = charge_of(need(request(3 * GI, count=4, compute=30)))
    assert charge["memory"] == 12 * GI
    assert charge["compute"] == 4 * 3000
    assert charge["devices"] == 4


def test_a_container_alone_on_its_gpus_counts_as_all_of_them() -> None:
    alone = need(replace(request(1 * MI, count=2), mode=EXCLUSIVE))
    assert (charge_of(alone)["devices"], charge_of(alone)["compute"]) == (2, 20_000)
    assert book(own="40Gi").check(alone) is None  # the size of the GPUs is not known yet
    assert book(own="0").check(alone) is not None
    assert book(percent="199").check_new(alone) is not None
    # Where another mode may be chosen, that counts.
    assert (
        charge_of(need(replace(request(1 * MI), mode=EXCLUSIVE, other_modes=(SOFT,))))["compute"]
        == 0
    )


def test_init_containers_count_as_kubernetes_counts_them() -> None:
    charge = charge_of(
        need(
            (INIT, request(9 * GI, count=1)),
            (SIDECAR, request(2 * GI, count=1)),
            (INIT, request(6 * GI, count=3)),
            request(1 * GI),
            request(2 * GI),
        )
    )
    # 9 alone; 2 + 18 beside the sidecar; 2 + 1 + 2 together.
    assert charge["memory"] == 20 * GI
    assert charge["devices"] == 4


def test_sidecars_alone_count_together() -> None:
    charge = charge_of(need((SIDECAR, request(2 * GI)), (SIDECAR, request(3 * GI))))
    assert charge["memory"] == 5 * GI


def test_a_part_of_an_unknown_gpu_is_known_when_it_is_placed() -> None:
    half = need(request(part=Fraction(1, 2), count=2))
    assert "memory" not in charge_of(half)
    assert charge_of(half)["part"] == 10_000
    placed = charge_of(half, booking=booking(half, 40 * GI))
    assert placed["memory"] == 80 * GI
    assert "unknown" not in placed


# ---- what a namespace may have -------------------------------------------------------------------


def test_slices_count_as_what_they_have_once_they_are_placed() -> None:
    floor = replace(request(count=2), memory=ANY_MEMORY, mode="mig", mig_profile="1g.10gb")
    asks = need(floor)
    before = charge_of(asks)
    assert before["devices"] == 2
    assert before["memory"] == 2 << 20
    slices = tuple(
        PlacedDevice("GPU-a", 10 * GI, 1212, MigPlace("1g.10gb", start)) for start in (0, 1)
    )
    placed = PodBooking(
        uid=asks.uid,
        node="n",
        containers=(PlacedContainer(name="c0", devices=slices, mode="mig"),),
    )
    after = charge_of(asks, booking=placed)
    assert (after["devices"], after["memory"], after["compute"]) == (2, 20 * GI, 2424)


def sliced(kind: ContainerKind, place: int, *cut: PlacedDevice) -> PlacedContainer:
    return PlacedContainer(name=f"c{place}", kind=kind, place=place, devices=cut, mode="mig")


def test_a_slice_counts_for_as_long_as_the_pod_holds_it() -> None:
    """That is also after its init container has ended, as on the node."""
    small = PlacedDevice("GPU-a", 10 * GI, 1400, MigPlace("1g.10gb", 6))
    large = PlacedDevice("GPU-a", 40 * GI, 4200, MigPlace("3g.40gb", 0))
    asks = need((INIT, request(30 * GI)), request(5 * GI))
    for init, amounts in ((large, (2, 50 * GI, 5600)), (small, (1, 10 * GI, 1400))):
        containers = (sliced(INIT, 0, init), sliced(REGULAR, 1, small))
        placed = PodBooking(uid=asks.uid, node="n", containers=containers)
        charge = charge_of(asks, booking=placed, dialect="hami")
        assert (charge["devices"], charge["memory"], charge["compute"]) == amounts
        assert charge["devices:hami"] == amounts[0]
        assert charge["memory"] == footprint(containers)["GPU-a"].part.memory


def test_a_slice_counts_beside_what_others_of_the_pod_have_at_once() -> None:
    large = PlacedDevice("GPU-a", 40 * GI, 4200, MigPlace("3g.40gb", 0))
    asks = need((INIT, request(30 * GI)), (INIT, request(9 * GI)), request(5 * GI))
    soft = booking(asks, 9 * GI).containers
    containers = (sliced(INIT, 0, large), *soft[1:])
    placed = PodBooking(uid=asks.uid, node="n", containers=containers)
    assert charge_of(asks, booking=placed)["memory"] == 49 * GI


def test_need_have_and_hard_are_told() -> None:
    quotas = book(gpumem="40960")
    quotas.add(need(request(36 * GI), uid="a"), booking=booking(need(request(1), uid="a"), 36 * GI))
    rejection = quotas.check(need(request(8 * GI, count=2)))
    assert rejection is not None
    assert rejection.have == 4 * GI
    assert rejection.text == (
        "quota of its namespace exceeded: need 16Gi of GPU memory, have 4Gi of 40Gi"
        " (limits.nvidia.com/gpumem of ResourceQuota team/gpus, 36Gi used)"
    )
    assert rejection.hint == (
        "request less, wait until pods of the namespace end, or raise ResourceQuota team/gpus"
    )
    by_a_byte = quotas.check(need(request(4 * GI + 1)))
    assert by_a_byte is not None
    assert "need 4294967297B of GPU memory, have 4294967296B of 40Gi" in by_a_byte.text
    assert quotas.check(need(request(4 * GI))) is None
    assert quotas.check(need(request(8 * GI, count=2), namespace="other")) is None


@pytest.mark.parametrize(
    ("key", "hard", "fits", "does_not"),
    [
        ("gpumem", "1024", request(1 * GI), request(1 * GI + 1)),
        ("cores", "60", request(1, compute=30, count=2), request(1, compute=31, count=2)),
        ("percent", "50", request(part=Fraction(1, 2)), request(part=Fraction(51, 100))),
        ("tencent", "4", request(1 * GI), request(1 * GI + 1)),
        ("own_limit", "1Gi", request(1 * GI), request(1 * GI + 1)),
        ("gpus", "2", request(1, count=2), request(1, count=3)),
    ],
)
def test_each_name_has_its_own_unit(key: str, hard: str, fits: Request, does_not: Request) -> None:
    quotas = book(**{key: hard})
    for check in (quotas.check, quotas.check_new):
        assert check(need(fits)) is None
        assert check(need(does_not)) is not None


def test_a_unit_can_be_another_by_configuration() -> None:
    settings = load_settings(
        "hami: {memoryFactor: 10}\naliyun: {memoryUnit: MiB}\nvolcano: {gpuMemoryFactor: 3}\n"
    )
    units = units_of(settings)
    assert units["nvidia.com/gpumem"].size == 10 * MI
    assert units["aliyun.com/gpu-mem"].size == MI
    assert units["volcano.sh/vgpu-memory"].size == 3 * MI
    quotas = QuotaBook(units=units)
    hard = {"limits.nvidia.com/gpumem": "100"}
    quotas.set_quotas([NamespaceQuota(namespace="team", name="gpus", hard=hard)])
    assert quotas.check(need(request(1000 * MI))) is None
    assert quotas.check(need(request(1001 * MI))) is not None


def test_zero_allows_none_also_where_the_amount_is_not_known() -> None:
    quotas = book(gpumem="0")
    for each in (request(GI), request(part=Fraction(1, 10))):
        rejection = quotas.check_new(need(each))
        assert rejection is not None
        assert rejection.text.startswith("its namespace's quota allows none: need ")
    assert quotas.check_new(need()) is None


def test_an_unknown_amount_passes_creation_and_is_held_at_binding() -> None:
    quotas = book(gpumem="10240")
    half = need(request(part=Fraction(1, 2)))
    assert quotas.check_new(half) is None
    assert quotas.check(half, booking=booking(half, 10 * GI)) is None
    assert quotas.check(half, booking=booking(half, 40 * GI)) is not None


def test_counts_are_of_the_dialect_whose_name_it_is_and_ours_of_all() -> None:
    quotas = book(nvidia="1", gpus="3")
    one = request(GI, count=1)
    quotas.add(need(one, uid="a"), booking=booking(need(one, uid="a"), GI), dialect="hami")
    assert quotas.check(need(one), dialect="hami") is not None
    assert quotas.check(need(one), dialect="aliyun") is None
    assert quotas.check(need(request(GI, count=3)), dialect="aliyun") is not None
    # As it was added, where nobody says.
    quotas.add(need(one, uid="b"), dialect="hami")
    assert quotas.check(need(one, uid="b")) is not None


def test_what_kubernetes_counts_by_itself_is_left_to_it_until_it_is_known_better() -> None:
    quotas = book(own="1Gi")
    large = need(request(2 * GI))
    assert quotas.check_new(large) is None
    assert quotas.check(large) is not None


def test_creation_counts_all_and_binding_those_that_are_bound() -> None:
    quotas = book(gpumem="2048")
    for uid in ("a", "b"):
        quotas.add(need(request(2 * GI), uid=uid))
    assert quotas.check_new(need(request(GI))) is not None
    # Both were let in at one time; the first to be bound is, and the other waits.
    first = need(request(2 * GI), uid="a")
    assert quotas.check(first) is None
    quotas.add(first, booking=booking(first, 2 * GI))
    assert quotas.check(first) is None
    assert quotas.check(need(request(2 * GI), uid="b")) is not None
    quotas.remove(PodUid("a"))
    assert quotas.check(need(request(2 * GI), uid="b")) is None


def test_a_quota_that_was_lowered_stops_who_comes_and_nobody_else() -> None:
    quotas = book(gpumem="10240")
    held = need(request(8 * GI), uid="a")
    quotas.add(held, booking=booking(held, 8 * GI))
    hard = {"limits.nvidia.com/gpumem": "1024"}
    quotas.set_quotas([NamespaceQuota(namespace="team", name="gpus", hard=hard)])
    rejection = quotas.check(need(request(GI)))
    assert rejection is not None
    assert rejection.have == 0
    assert quotas.check(need()) is None


def test_of_several_quotas_each_is_held() -> None:
    quotas = QuotaBook()
    quotas.set_quotas(
        NamespaceQuota(namespace="team", name=name, hard={"limits.nvidia.com/gpumem": hard})
        for name, hard in (("wide", "4096"), ("narrow", "1024"))
    )
    rejection = quotas.check(need(request(2 * GI)))
    assert rejection is not None
    assert "of ResourceQuota team/narrow," in rejection.text
    assert quotas.namespaces() == ("team",)


def test_usage_is_for_metrics() -> None:
    quotas = book(gpumem="4096")
    held = need(request(GI), uid="a")
    quotas.add(held, booking=booking(held, GI))
    quotas.add(need(request(GI), uid="waits"))
    (use,) = quotas.usage("team")
    assert (use.namespace, use.quota, use.key) == ("team", "gpus", "limits.nvidia.com/gpumem")
    assert (use.measure, use.used, use.hard) == ("memory", GI, 4 * GI)
    assert quotas.usage("other") == []
    assert quotas.bound() == {"team": {"devices": 1, "memory": GI}}


@pytest.mark.parametrize("hard", ["1.5", "x", "", "1e99"])
def test_what_is_no_amount_allows_nothing_and_is_told(hard: str) -> None:
    quotas = book(gpumem=hard)
    assert "limits.nvidia.com/gpumem" in quotas.problems[0]
    assert quotas.check(need(request(GI))) is not None


def test_names_that_are_none_of_ours_are_not_looked_at() -> None:
    quotas = book(
        **{"requests.cpu": "1", "limits.amd.com/gpu": "0", "pods": "0", "nvidia.com/gpu": "0"}
    )
    assert quotas.check(need(request(GI))) is None
    assert not quotas.problems


def test_a_quota_for_some_pods_only_is_not_held_and_that_is_told() -> None:
    quotas = QuotaBook()
    hard = {"limits.nvidia.com/gpumem": "0"}
    quotas.set_quotas([NamespaceQuota(namespace="team", name="q", hard=hard, is_scoped=True)])
    assert quotas.check(need(request(GI))) is None
    assert "scopes" in quotas.problems[0]


def test_a_quota_is_read_from_its_object() -> None:
    import msgspec

    item = msgspec.json.decode(
        b'{"metadata": {"name": "q", "namespace": "team"}, "spec": {"hard":'
        b' {"limits.nvidia.com/gpumem": "4k", "requests.nvidia.com/gpu": 2, "pods": "3"},'
        b' "scopeSelector": {"matchExpressions": []}}}',
        type=QuotaObject,
    )
    assert quota_of(item) == NamespaceQuota(
        namespace="team",
        name="q",
        hard={"limits.nvidia.com/gpumem": "4k", "requests.nvidia.com/gpu": "2"},
        is_scoped=True,
    )
    assert not quota_of(QuotaObject(metadata=Metadata())).hard


# ---- whatever happens ----------------------------------------------------------------------------

REQUESTS = st.builds(
    lambda memory, part, count, compute: request(
        memory * GI, count=count, part=part, compute=compute
    ),
    st.integers(0, 8),
    st.none() | st.fractions(Fraction(1, 100), 1),
    st.integers(1, 4),
    st.integers(0, 100),
)
KINDS = st.sampled_from([INIT, SIDECAR, REGULAR])


@given(st.lists(st.tuples(KINDS, REQUESTS), max_size=5))
def test_a_pod_counts_at_least_as_any_of_its_containers_and_at_most_as_all(
    parts: list[tuple[ContainerKind, Request]],
) -> None:
    whole = charge_of(need(*parts))
    each = [charge_of(need(part)) for part in parts]
    for measure in ("memory", "compute", "devices", "part"):
        amounts = [one.get(measure, 0) for one in each]
        assert max(amounts, default=0) <= whole.get(measure, 0) <= sum(amounts)


class Counting(RuleBasedStateMachine):
    """Pods come, are bound, and go, in any order and more than once."""

    @initialize(hard=st.integers(0, 40))
    def begin(self, hard: int) -> None:
        self.hard = hard * GI
        self.book = book(gpumem=str(hard * 1024))
        self.bound: dict[str, int] = {}

    @rule(uid=st.sampled_from("abcdef"), each=REQUESTS)
    def create(self, uid: str, each: Request) -> None:
        if uid not in self.bound:
            self.book.add(need(each, uid=uid))

    @rule(uid=st.sampled_from("abcdef"), each=REQUESTS, memory=st.integers(0, 12))
    def bind(self, uid: str, each: Request, memory: int) -> None:
        wanted = need(each, uid=uid)
        placed = booking(wanted, memory * GI)
        if self.book.check(wanted, booking=placed) is None:
            self.book.add(wanted, booking=placed)
            self.bound[uid] = memory * GI * each.count

    @rule(uid=st.sampled_from("abcdef"))
    def go(self, uid: str) -> None:
        self.book.remove(PodUid(uid))
        self.bound.pop(uid, None)

    @invariant()
    def nothing_is_exceeded(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.check_invariants()
        assert sum(self.bound.values()) <= self.hard
        for _, _, _, _, used, hard in self.book.usage("team"):
            assert used == sum(self.bound.values()) <= hard


TestCounting = Counting.TestCase
