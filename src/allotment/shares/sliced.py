# SPDX-License-Identifier: Apache-2.0
"""A container's slices on a node: cut at the places that were chosen, or where they fit best.

    with cut(folder, order, devices) as placement:
        ...                                # make the share; until then nobody takes its slices

Who fails inside leaves slices of a share that is not there, as a crash does: they are warm at
once. The kubelet asks again, and has them then.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine
from allotment.model.devices import Device
from allotment.model.errors import AllotError, DoesNotFitError, StateError, UsageError
from allotment.model.phases import overlap
from allotment.model.placements import Placement
from allotment.model.requests import MIG
from allotment.model.shares import Injection, Share
from allotment.modes.mig.journal import Journal
from allotment.placement import is_selected
from allotment.placement.layouts import slices_of
from allotment.shares import lives
from allotment.shares.cutting import Cutter
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import read_allowed, refusal_on
from allotment.shares.placing import Order
from allotment.shares.surveying import Grounds, SliceOrder

__all__ = ["cut", "gone"]


@contextmanager
def cut(folder: StateFolder, order: Order, devices: Sequence[Device]) -> Iterator[Placement]:
    """Have the slices of an order, which is complete, for as long as the block runs.

    `devices` are the GPUs that may serve. Raises `DoesNotFitError` with what each GPU has.
    """
    _check(order)
    known = {each.uuid: each for each in devices}
    allowed = {} if order.devices else read_allowed(folder)

    def objection(device: Device) -> str:
        if order.candidates is not None and device.uuid not in order.candidates:
            return f"not for mode {MIG}, by the node's configuration"
        if order.devices:
            return ""
        if not is_selected(device, order.request):
            return "not selected"
        return refusal_on(allowed, device, MIG)

    wanted = SliceOrder(
        holder=order.id or "",
        request=slices_of(order.request),
        places=tuple(zip(order.devices, order.slices, strict=True)),
        after=_ended_before(folder, order),
        machine=order.machine,
        spec=order.spec,
    )
    sick = {each.device.uuid: each for each in order.problems if each.device is not None}
    for uuid in order.devices:
        if uuid in sick:
            raise DoesNotFitError(
                f"GPU {uuid} was chosen for it: {sick[uuid].message}",
                hint="see `allot devices` on the node, and the node's events",
            )
    grounds = Grounds(devices=known, objection=objection, terms=order.mig)
    with MigMachine(order.machine) as gpus, ExitStack() as works:
        cuts = Cutter(folder, wanted, gpus, grounds).cut(works)
        yield Placement(order.request, tuple(each.placed for each in cuts))


def gone(
    folder: StateFolder, share: Share, order: Order, devices: Sequence[Device]
) -> tuple[str, ...]:
    """Return which of a share's slices it has no more, by UUID: others removed them.

    Journal and driver are asked, and not what anybody remembers: what is at the same place by now
    may be another's, and has the device nodes that the share's container is given. Raises
    `StateError` where a GPU does not answer. `devices` are the node's, as far as they are well.
    """
    owned = {each.uuid: each.gpu for each in share.devices if each.gpu}
    index = {each.uuid: each.index for each in devices if each.slice_of is None}
    gpus = set(owned.values())
    among = {index[each] for each in gpus} if gpus <= index.keys() else None
    with MigMachine(order.machine) as machine:
        answers = machine.ask(_instances, patience_s=LOOK_S, among=among)
    there = dict(answer for _, answer in answers if not isinstance(answer, AllotError))
    if silent := sorted(gpus - there.keys()):
        raise StateError(
            f"share {share.name}: GPU {', '.join(silent)} does not tell whether its slice is there",
            hint="it is tried again by itself; see `allot devices` on the node",
        )
    entitled = {share.id, *_ended_before(folder, order)}
    return tuple(
        uuid
        for uuid, gpu in owned.items()
        if uuid not in there[gpu] or not _is_entitled(Journal(folder.mig / gpu), uuid, entitled)
    )


def _instances(device: MigDevice) -> tuple[str, frozenset[str]]:
    gpu = device.driver.look_if_any()
    instances = gpu.instances if gpu is not None else ()
    return device.uuid, frozenset(each.uuid for each in instances if each.uuid)


def _is_entitled(journal: Journal, uuid: str, holders: Collection[str]) -> bool:
    """Tell whether a slice is one of these holders'; one that is not ours is whoever's has it."""
    return all(each.holder in holders for each in journal.read().records if each.uuid == uuid)


def _ended_before(folder: StateFolder, order: Order) -> frozenset[str]:
    """Return the shares of the pod that are never in use beside this one: init containers'.

    The scheduler gives such containers one slice where it is large enough for both, and counts it
    once. Where the node chooses, one that is there and will do saves cutting another.
    """
    mine = order.owner
    if mine is None:
        return frozenset()
    return frozenset(
        each.id
        for each in lives.look(folder)
        if each.mode == MIG
        and each.owner is not None
        and each.owner.uid == mine.uid
        and not overlap(mine, each.owner)
    )


def _check(order: Order) -> None:
    request = order.request
    if order.injection is Injection.MOUNTS:
        raise UsageError(
            "mode mig needs CDI: which slice a container has is known when it starts, and mounts"
            " are said before",
            hint="turn CDI on in the container runtime (containerd 2, CRI-O 1.28 have it on), or"
            " use another mode on this node",
        )
    if request.may_oversubscribe:
        raise UsageError(
            "mode mig: a slice's memory is the hardware's, and cannot be promised twice",
            hint="leave allotment.dev/oversubscribe out, or ask for another mode",
        )
    if len(order.devices) != len(order.slices):
        raise StateError(
            f"the slice of share {order.id} is not there any more: {', '.join(order.devices)}",
            hint="delete the pod, so that it is placed anew",
        )
