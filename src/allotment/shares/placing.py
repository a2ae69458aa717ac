# SPDX-License-Identifier: Apache-2.0
"""What a front door orders, and where on this machine that goes, beside what is booked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allotment.devices.sources import Problem
from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError
from allotment.model.formats import format_count
from allotment.model.placements import DeviceState, Placement, Rejection
from allotment.model.pods import Owner
from allotment.model.quantities import check_part
from allotment.model.requests import Request
from allotment.model.shares import Injection, Runner, ShareId
from allotment.modes import mode_named
from allotment.placement import TOO_LITTLE_COMPUTE, choose, explain, follow
from allotment.shares.bookings import Booking, states_of

__all__ = ["Order", "place"]


@dataclass(frozen=True, slots=True)
class Order:
    """All that a front door knows about the share it wants."""

    request: Request
    injection: Injection
    name: str | None = None
    machine: Path | None = None
    spec: str | None = None
    runner: Runner | None = None
    command: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    """GPUs that do not answer: no share is placed on one, but a refusal names them."""
    cdi_folder: Path | None = None
    """Where the share's CDI spec will be, for a share that has one."""
    host_budget: int | None = None
    """Host memory that may stand for devices' memory, in bytes; None: the machine's own default."""
    id: ShareId | None = None
    """Of the caller's choice, who sees to it that there is none of that id; None: a fresh one."""
    owner: Owner | None = None
    """The container that it is for, on Kubernetes: it names the share, too."""
    devices: tuple[str, ...] = ()
    """UUIDs that a scheduler or the kubelet chose: these and no others. One that is named several
    times gives several parts."""
    candidates: frozenset[str] | None = None
    """UUIDs that this mode may use; None: any device."""


def place(order: Order, devices: Iterable[Device], bookings: Mapping[str, Booking]) -> Placement:
    """Choose devices for an order, or follow its choice.

    Raises `DoesNotFitError` with need and have of each device.
    """
    states = list(_states(order, devices, bookings))
    _check_count(order, states)
    decision = _follow(order, states) if order.devices else choose(states, order.request)
    if isinstance(decision, Placement):
        for placed in decision.devices:
            check_part(order.request.memory, placed.device.allottable_bytes)
        return decision
    nameless = [
        f"  {each.uuid or f'GPU number {each.index}'}: {each.message}"
        for each in order.problems
        if not each.device
    ]
    message = "\n".join([explain(decision), *nameless])
    raise DoesNotFitError(message, hint=_hint(order, states, decision))


def _check_count(order: Order, states: Sequence[DeviceState]) -> None:
    """Refuse a container that asks for more devices than its node could ever give it.

    One of a front door of this machine is told about each device.
    """
    wanted = order.request.count
    able = [
        each for each in states if order.candidates is None or each.device.uuid in order.candidates
    ]
    if order.owner is None or order.devices or wanted <= len(able):
        return
    of_mode = f" of mode {order.request.mode}" if len(able) < len(states) else ""
    raise DoesNotFitError(
        f"asks for parts of {format_count(wanted, 'GPU')}; this node has {len(able)}{of_mode}",
        hint=f"ask for at most {len(able)}" if able else "choose a node that has such GPUs",
    )


def _states(
    order: Order, devices: Iterable[Device], bookings: Mapping[str, Booking]
) -> Iterable[DeviceState]:
    mode = mode_named(order.request.mode)
    broken = {each.device: each.message for each in order.problems if each.device}
    serving = [device for device in devices if not mode.fits(device)]
    for state in states_of([*serving, *broken], bookings, order.host_budget):
        uuid = state.device.uuid
        problem = broken.get(state.device, "")
        if not problem and order.candidates is not None and uuid not in order.candidates:
            problem = f"not for mode {mode.name}, by the node's configuration"
        yield replace(state, problem=problem)


def _follow(order: Order, states: Iterable[DeviceState]) -> Placement | Rejection:
    known = list(states)
    there = {state.device.uuid for state in known}
    missing = sorted(set(order.devices) - there)
    if missing:
        raise DoesNotFitError(
            f"need GPU {' and '.join(missing)}, which was chosen for it; have"
            f" {', '.join(sorted(there)) or 'none'}",
            hint="see `allot devices`: it may be lost, or of another node",
        )
    return follow(known, order.request, order.devices)


def _hint(order: Order, states: Sequence[DeviceState], decision: Rejection) -> str:
    request = order.request
    working = sum(not state.problem for state in states)
    is_possible = any(
        request.memory.of(one.device.allottable_bytes) <= one.device.allottable_bytes
        for one in states
    )
    if not is_possible and not request.may_oversubscribe:
        hint = "ask for less: no GPU here is that large, even when empty"
    elif order.owner:
        hint = "it waits until there is room: `allot ps` on the node shows who has what"
    elif request.count > len(states):
        hint = f"this machine has {format_count(len(states), 'GPU')}: ask for at most that --count"
    elif request.count > working:
        hint = "a GPU with a problem takes no share: see `allot devices`, and `allot fault` for one"
        hint += " that is simulated"
    elif all(one.reason == TOO_LITTLE_COMPUTE for one in decision.verdicts if not one.fits):
        hint = "guarantee less (`--compute 0:100` takes what others leave), or make room: `allot"
        hint += " ps` shows the shares, `allot resize` changes one"
    elif request.may_oversubscribe:
        hint = "ask for less, make room (`allot ps` shows the shares), or let more host memory"
        hint += " stand for the GPUs' by --host-memory"
    else:
        hint = "ask for less, or make room: `allot ps` shows the shares, `allot resize` shrinks one"
    return hint
