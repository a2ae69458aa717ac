# SPDX-License-Identifier: Apache-2.0
"""Whatever is asked for, in whatever order and by whichever door: no GPU gives more than it has,
and the pool offers what is left. What a scheduler allocates from the latest pool is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from examples import examples
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from mig_node import Node

from allotment.agent.dra.devices import (
    DeviceType,
    GpuState,
    Pool,
    PoolDevice,
    gpus_of,
    pool_of,
)
from allotment.agent.mig.state import cut_gpu
from allotment.dialects.own.resource_claims import (
    COMPUTE_CAPACITY,
    MEMORY_CAPACITY,
    AllocatedDevice,
    request_for,
)
from allotment.model.clusters import NodeInventory
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import AllotError
from allotment.model.mig import MigPlace
from allotment.model.modes import EXCLUSIVE, MIG, MPS, SOFT, TIMESLICE
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory, parse_whole
from allotment.model.requests import Request, whole_devices
from allotment.model.shares import Injection, ShareId
from allotment.model.structs import replace
from allotment.shares import lifecycle
from allotment.shares.booking import booked
from allotment.shares.drain import ModeChange
from allotment.shares.mode_policy import modes_on, read_mode_policies, refusal
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares
from allotment.shares.recovery import list_shares
from allotment.simulate.claims import Allocated, ClaimRequest, NodeClaims

DRIVER = "gpu.allotment.dev"
MIB = 1 << 20
SMALL = "1g.10gb"


def share_claim(memory: int, percent: int | None) -> ClaimRequest:
    return ClaimRequest(type=DeviceType.SHARE, memory=parse_memory(f"{memory}Gi"), compute=percent)


AMOUNTS = st.tuples(st.sampled_from([1, 5, 20, 40, 79]), st.sampled_from([0, 10, 40, 60, 100]))
KINDS = st.one_of(
    st.tuples(st.just(SOFT), AMOUNTS),
    st.tuples(st.just("whole"), st.none()),
    st.tuples(st.just("mig"), st.integers(0, 6)),
)
OTHER_MODES = st.tuples(st.sampled_from([MPS, TIMESLICE]), AMOUNTS)
POLICIES = st.sampled_from(
    [None, (SOFT,), (MPS,), (SOFT, MPS), (MIG,), (SOFT, MIG), (EXCLUSIVE, TIMESLICE)]
)
MODE_CHANGES = st.one_of(
    st.tuples(st.just("modes"), st.integers(0, 1), POLICIES),
    st.tuples(st.just("mig"), st.integers(0, 1), st.booleans()),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["claim", "claim", "pod", "run"]), st.integers(0, 1), KINDS),
        st.tuples(st.sampled_from(["claim", "pod"]), st.integers(0, 1), OTHER_MODES),
        MODE_CHANGES,
        st.tuples(st.just("end"), st.integers(0, 7), st.none()),
        st.tuples(st.just("resize"), st.integers(0, 7), AMOUNTS),
    ),
    min_size=4,
    max_size=7,
)
SMALL_PART = (SOFT, (5, 10))
DRAINED: list[tuple[str, int, object]] = [
    ("claim", 0, SMALL_PART),
    ("modes", 0, (MPS,)),
    ("run", 0, SMALL_PART),
    ("claim", 0, SMALL_PART),
    ("modes", 0, (MIG,)),
    ("end", 0, None),
    ("end", 0, None),
    ("run", 0, SMALL_PART),
    ("modes", 0, (MIG,)),
    ("claim", 0, ("mig", 0)),
    ("modes", 0, None),
    ("run", 0, SMALL_PART),
]
"""A GPU drains for other modes, and takes them when its shares have ended."""
LARGE = "3g.40gb"
CLAIMS = st.one_of(
    st.builds(share_claim, st.sampled_from([1, 20, 40]), st.sampled_from([None, 0, 40, 100])),
    st.just(ClaimRequest(type=DeviceType.GPU)),
    st.sampled_from([SMALL, LARGE]).map(
        lambda profile: ClaimRequest(type=DeviceType.MIG, profile=profile)
    ),
)
ALLOCATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.just(0), CLAIMS),
        st.tuples(st.just("allocate"), st.integers(0, 2), CLAIMS),
        st.tuples(st.sampled_from(["pod", "run"]), st.integers(0, 1), KINDS),
        st.tuples(st.just("pod"), st.integers(0, 1), OTHER_MODES),
        MODE_CHANGES,
        st.tuples(st.just("end"), st.integers(0, 7), st.none()),
        st.tuples(st.just("resize"), st.integers(0, 7), AMOUNTS),
    ),
    min_size=4,
    max_size=9,
)
"""A pod's resize is not a claim's: kube-scheduler counts what the claim was allocated."""
TYPES = {DeviceType.SHARE: (SOFT, MPS), DeviceType.GPU: (EXCLUSIVE,), DeviceType.MIG: (MIG,)}
"""The modes of the shares that each type of device gives."""


def soft(amounts: tuple[int, int]) -> Request:
    memory, percent = amounts
    guarantee = percent * WHOLE // 100
    return Request(
        parse_memory(f"{memory}Gi"), compute=Compute(guarantee, is_governed=guarantee > 0)
    )


class Book:
    """A node of two GPUs with MIG, and all its doors."""

    def __init__(self, root: Path) -> None:
        self.node = Node(root, spec="h100-80gb:2")
        self.shares = PodShares(
            self.node.folder,
            machine=self.node.machine,
            spec=self.node.spec,
            folders=NodeFolders(cdi=root / "cdi"),
        )
        self.shares.tidy()
        self.number = 0
        self.without_mig: set[int] = set()
        """GPUs whose modes lack MIG: the agent's configuration was changed."""
        self.pools = [self.gpus()]
        """As published after each step."""
        self.allocated: dict[ShareId, tuple[Allocated, ...]] = {}
        """What the scheduler gave to claims."""

    def make(self, door: str, gpu: int, kind: str, wanted: object) -> None:
        """Ask for a share on one GPU, as a scheduler that knows nothing would choose it."""
        uuid = self.node.uuids[gpu]
        self.number += 1
        slices: tuple[MigPlace, ...] = ()
        if kind == "mig":
            assert isinstance(wanted, int)
            slices = (MigPlace(SMALL, wanted),)
            request = Request(parse_memory("1Mi"), mode=MIG, mig_profile=SMALL)
        elif kind == "whole":
            request = whole_devices(1, mode=EXCLUSIVE)
        elif kind == TIMESLICE:
            request = whole_devices(1, mode=TIMESLICE)
        else:
            assert isinstance(wanted, tuple)
            request = replace(soft(wanted), mode=kind)
        self.prepare(door, uuid, request, slices)

    def prepare(self, door: str, uuid: str, request: Request, slices: tuple[MigPlace, ...]) -> None:
        owner = Owner(
            uid=PodUid(f"uid-{self.number}"),
            namespace="lab",
            pod=f"one-{self.number}",
            container="main",
            kind=ContainerKind.REGULAR,
            resource=DRIVER,
            is_claim=door == "claim",
        )
        order = ShareOrder(
            request,
            Injection.CDI if door != "run" else Injection.ENVIRONMENT,
            id=ShareId(f"{self.number:012x}"),
            owner=None if door == "run" else owner,
            devices=(uuid,) if door != "run" else (),
            candidates=(uuid,),
            slices=slices if door != "run" else (),
            machine=self.node.machine,
            spec=self.node.spec,
        )
        devices = self.node.devices()
        if door == "run":
            lifecycle.create(self.node.folder, order, devices)
            assert not refusal(self.node.state.mode_policies.get(uuid), request.mode)
        else:
            policy = NodePolicy(devices=devices, mig=self.node.slices.terms())
            self.shares.prepare(order, policy)

    def allocate(self, age: int, wanted: ClaimRequest) -> None:
        """Allocate a claim as kube-scheduler does, from a pool that is some steps old, and make it.

        It counts the claims that it allocated before. From the latest pool none may be refused.
        """
        gpus = self.pools[-1 - min(age, len(self.pools) - 1)]
        node = NodeClaims(NodeInventory(name="n"), gpus)
        alive = {each.id for each in list_shares(self.node.folder)}
        present = pool_of(gpus, None).devices
        for share, allocated in self.allocated.items():
            if share in alive:
                node.take([each for each in allocated if each.device.name in present])
        found = node.find(((wanted,),))
        if found is None:
            return
        self.number += 1
        ((each,), (part,)) = found, [each.device.part for each in found]
        consumed = {
            MEMORY_CAPACITY: str(each.consumed.get(MEMORY_CAPACITY, 0)),
            COMPUTE_CAPACITY: str(each.consumed.get(COMPUTE_CAPACITY, 0)),
        }
        device = AllocatedDevice(
            request="gpu", pool="n", device=each.device.name, consumed=consumed
        )
        request = request_for([(device, part)], (), asks_compute=wanted.compute is not None)
        slices = (part.slice,) if part.slice is not None else ()
        if not age and refusal(self.node.state.mode_policies.get(part.uuid), request.mode):
            return  # the driver refuses it: no scheduler reads modes
        try:
            self.prepare("claim", part.uuid, request, slices)
        except AllotError as error:
            if age:
                raise
            raise AssertionError(f"{each.device.name} is in the pool", self.pools[-1]) from error
        self.allocated[ShareId(f"{self.number:012x}")] = found

    def set_modes(self, gpu: int, modes: tuple[str, ...] | None) -> None:
        """As `allot devices set-mode --drain`, whose time is over at once."""
        (device,) = (each for each in self.node.devices() if each.uuid == self.node.uuids[gpu])
        change = ModeChange(
            folder=self.node.folder, device=device, machine=self.node.machine, modes=modes
        )
        change.carry_out(patience_s=0)

    def gpus(self) -> Sequence[GpuState]:
        """Look at the GPUs as the agent does."""
        self.node.state.mode_policies = read_mode_policies(self.node.folder)
        self.node.state.cut_gpus = {
            uuid: cut_gpu(self.node.look(gpu), records, records)
            for gpu, uuid in enumerate(self.node.uuids)
            for records in [self.node.journal(gpu).read().records]
            if gpu not in self.without_mig
        }
        return gpus_of(self.node.state, list_shares(self.node.folder), None, driver=DRIVER)

    def step(self, what: str, number: int, wanted: object) -> None:
        if what == "allocate":
            assert isinstance(wanted, ClaimRequest)
            self.allocate(number, wanted)
            return
        if what == "modes":
            assert wanted is None or isinstance(wanted, tuple)
            self.set_modes(number, wanted)
            return
        if what == "mig":
            (self.without_mig.add if wanted else self.without_mig.discard)(number)
            return
        if what in {"claim", "pod", "run"}:
            assert isinstance(wanted, tuple)
            self.make(what, number, *wanted)
            return
        found = list_shares(self.node.folder)
        if not found:
            return
        chosen = found[number % len(found)]
        if what == "end":
            lifecycle.destroy(self.node.folder, chosen, force=True)
        elif chosen.owner is not None and chosen.id not in self.allocated:
            assert isinstance(wanted, tuple)
            policy = NodePolicy(devices=self.node.devices())
            self.shares.resize(chosen.id, soft(wanted), policy)

    def check(self) -> None:
        shares = list_shares(self.node.folder)
        assert [each.problem for each in shares] == [None] * len(shares)
        everything = booked(shares)
        others = booked([each for each in shares if not (each.owner and each.owner.is_claim)])
        sliced = {part.gpu for each in shares for part in each.devices() if part.gpu}
        self.pools.append(self.gpus())
        for is_nvidias in (False, True):
            check_accepted(pool_of(self.pools[-1], None, is_nvidias=is_nvidias))
        pool = pool_of(self.pools[-1], None)
        memory: Counter[str] = Counter()
        for loaded in shares:
            for part in loaded.devices():
                is_promised = loaded.mode != TIMESLICE
                memory[part.gpu or part.uuid] += part.memory_bytes * is_promised
        filled = [
            memory[uuid] for uuid in dict.fromkeys(e.part.uuid for e in pool.devices.values())
        ]
        assert filled == sorted(filled, reverse=True), "the fullest first"
        for device in self.node.devices():
            if device.slice_of is not None:
                continue
            total = device.memory_bytes - device.reserved_bytes  # also while it has slices
            booking, other = everything.get(device.uuid), others.get(device.uuid)
            if booking is not None:
                assert booking.memory <= total
                assert booking.guaranteed <= WHOLE
                assert device.uuid not in sliced, "either slices or shares of the whole"
            assert len(modes_on(shares, device.uuid)) <= 1
            mine = [each for each in pool.devices.values() if each.part.uuid == device.uuid]
            by_type = {each.document["attributes"]["type"]["string"]: each for each in mine}
            allowed = self.node.state.mode_policies.get(device.uuid)
            kept = {
                kind
                for kind, modes in TYPES.items()
                if all(refusal(allowed, mode) for mode in modes)
            }
            assert all(is_closed(by_type[kind]) for kind in kept & by_type.keys())
            left = total - (other.memory if other else 0)
            percent = (WHOLE - (other.guaranteed if other else 0)) * 100 // WHOLE
            if left < MIB or not percent:
                assert is_closed(by_type["share"])
            else:
                capacity = by_type["share"].document["capacity"]
                assert parse_memory(capacity["memory"]["value"]).size_bytes == left // MIB * MIB
                assert int(capacity["compute"]["value"]) == percent
            theirs = {
                part.gpu
                for each in shares
                if not (each.owner and each.owner.is_claim)
                for part in each.devices()
            }
            # The agent's loop frees the slice of a share that has ended; it is taken until then.
            ids = {each.id for each in shares}
            cut = self.node.state.cut_gpus.get(device.uuid)
            slices = cut.slices if cut else ()
            is_orphaned = any(each.holder and each.holder not in ids for each in slices)
            is_left_to_others = cut is None and device.mig
            is_others = (
                other is not None or device.uuid in theirs or is_orphaned or is_left_to_others
            )
            assert is_closed(by_type["gpu"]) == (is_others or DeviceType.GPU in kept)
            if device.uuid in theirs:
                assert is_closed(by_type["share"])


def check_accepted(pool: Pool) -> None:
    """The API server takes these capacities (ValidateResourceSlice, Kubernetes 1.36)."""
    for device in pool.devices.values():
        for capacity in device.document.get("capacity", {}).values():
            value = parse_whole(capacity["value"])
            assert value > 0
            policy = capacity.get("requestPolicy", {})
            if allowed := policy.get("validRange"):
                least, most, step = (parse_whole(allowed[key]) for key in ("min", "max", "step"))
                default = parse_whole(policy["default"])
                assert least <= default <= most == value
                assert (default - least) % step == (most - least) % step == 0


def is_closed(device: PoolDevice) -> bool:
    return bool(device.document.get("taints"))


def check_books(steps: list[tuple[str, int, object]]) -> None:
    """Checks the books of a new node after each step."""
    with TemporaryDirectory(prefix="books-") as root:
        book = Book(Path(root))
        for step in steps:
            with suppress(AllotError):  # refused: nothing has changed
                book.step(*step)
            book.check()


@pytest.mark.timeout(300)
@settings(max_examples=examples(1 / 8), deadline=None)
@given(steps=STEPS)
@example(steps=DRAINED)
def test_no_gpu_gives_more_than_it_has_and_the_pool_offers_the_rest(
    native_dir: Path, steps: list[tuple[str, int, object]]
) -> None:
    assert native_dir.is_dir()
    check_books(steps)


@pytest.mark.timeout(300)
@settings(
    max_examples=examples(1), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(steps=ALLOCATIONS)
def test_what_is_allocated_from_the_latest_pool_is_made(
    native_dir: Path, steps: list[tuple[str, int, object]]
) -> None:
    """And what is allocated from an old one, as by a second scheduler, is made or refused."""
    assert native_dir.is_dir()
    check_books(steps)
