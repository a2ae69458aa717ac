# SPDX-License-Identifier: Apache-2.0
"""What a front door orders, and where on this machine that goes, beside what is booked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from allotment.devices.sources import Problem
from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError
from allotment.model.formats import format_count
from allotment.model.mig import MigPlace, MigProfile
from allotment.model.placements import DeviceState, Placement, Rejection
from allotment.model.pods import Owner
from allotment.model.quantities import check_part
from allotment.model.requests import MIG, MPS, SOFT, Request
from allotment.model.shares import Injection, Runner, ShareId
from allotment.modes import mode_named
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.placement import (
    NOT_SELECTED,
    OTHER_MODE,
    TOO_LITTLE_COMPUTE,
    choose,
    explain,
    follow,
    is_asked_for,
    main_reason,
)
from allotment.shares.bookings import Booking, states_of
from allotment.shares.modes_of_gpus import KEPT, Allowed, refusal_on

__all__ = ["MigTerms", "Order", "place"]


def _nothing_known(_: Device) -> tuple[MigProfile, ...]:
    return ()


_IN_MIG_MODE: Final = "it is in MIG mode: slices of it can be had, and no parts of the whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigTerms:
    """How GPUs may be cut for who asks, by UUID."""

    keeps: Mapping[str, float] = field(default_factory=dict)
    """For how many seconds a slice is kept once its share has gone."""
    resets: frozenset[str] = frozenset()
    """Those that may be reset to switch their mode."""
    peers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Those that NVLink joins to one: its reset is theirs as well."""
    paused: Mapping[str, str] = field(default_factory=dict)
    """Why, of those whose MIG mode is not to be switched on for now."""
    profiles: Callable[[Device], tuple[MigProfile, ...]] = _nothing_known
    """What a GPU can be cut into whose driver does not tell while MIG is off."""


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
    slices: tuple[MigPlace, ...] = ()
    """In mode mig, which slice of each of `devices` a scheduler chose."""
    mig: MigTerms = field(default_factory=MigTerms)


def place(
    order: Order,
    devices: Iterable[Device],
    bookings: Mapping[str, Booking],
    *,
    allowed: Mapping[str, Allowed] | None = None,
) -> Placement:
    """Choose devices for an order, or follow its choice.

    `allowed` is what was said of GPUs' modes, by UUID: it holds for whoever chooses here; a choice
    that was made elsewhere was made before. Raises `DoesNotFitError` with need and have of each
    device.
    """
    said = {} if allowed is None or (order.owner and order.devices) else allowed
    states = list(_states(order, devices, bookings, said))
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
    hint, advises = _hint(order, decision)
    raise DoesNotFitError(message, hint=hint, reason=main_reason(decision), advises=advises)


def _check_count(order: Order, states: Sequence[DeviceState]) -> None:
    """Refuse a container that asks for more devices than its node could ever give it.

    One of a front door of this machine is told about each device.
    """
    wanted = order.request.count
    able = [
        each
        for each in states
        if (order.candidates is None or each.device.uuid in order.candidates)
        and not mode_named(order.request.mode).fits(each.device)
    ]
    if order.owner is None or order.devices or wanted <= len(able):
        return
    of_mode = f" of mode {order.request.mode}" if len(able) < len(states) else ""
    raise DoesNotFitError(
        f"asks for parts of {format_count(wanted, 'GPU')}; this node has {len(able)}{of_mode}",
        hint=f"ask for at most {len(able)}" if able else "choose a node that has such GPUs",
    )


def _states(
    order: Order,
    devices: Iterable[Device],
    bookings: Mapping[str, Booking],
    allowed: Mapping[str, Allowed],
) -> Iterable[DeviceState]:
    mode = mode_named(order.request.mode)
    broken = {each.device: each.message for each in order.problems if each.device}
    for state in states_of([*devices, *broken], bookings, order.host_budget):
        uuid = state.device.uuid
        problem = broken.get(state.device, "") or mode.fits(state.device)
        if not problem and order.candidates is not None and uuid not in order.candidates:
            problem = f"not for mode {mode.name}, by the node's configuration"
        if not problem and allowed:
            problem = refusal_on(allowed, state.device, mode.name)
        if not problem and _is_cut(state.device):
            problem = _IN_MIG_MODE
        yield replace(state, problem=problem)


def _is_cut(device: Device) -> bool:
    """Is it a whole GPU in MIG mode?"""
    return device.mig and device.slice_of is None


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


def _hint(order: Order, decision: Rejection) -> tuple[str, str]:
    """Return the next step, and the mode that it advises, if it advises one."""
    request = order.request
    there = [each.state for each in decision.verdicts]
    asked_for = [each.state for each in decision.verdicts if is_asked_for(each)]
    states = asked_for or there
    working = sum(not state.problem for state in states)
    is_kept = any(state.problem.startswith(KEPT) for state in states)
    is_possible = any(
        request.memory.of(one.device.allottable_bytes) <= one.device.allottable_bytes
        for one in states
    )
    advises = ""
    if states and all(_is_cut(state.device) for state in states):
        hint, advises = _hint_beside_slices(order, states[0].device), MIG
        if len(states) < len(there):
            hint = f"name another --gpu, {hint}"
    elif states and all(mode_named(request.mode).fits(state.device) for state in states):
        hint, advises = "ask for another mode: soft serves every GPU", SOFT
    elif not is_possible and not request.may_oversubscribe:
        which = "no GPU here" if len(states) == len(there) else "none of those that are asked for"
        hint = f"ask for less: {which} is that large, even when empty"
    elif order.owner:
        hint = "it waits until there is room: `allot ps` on the node shows who has what"
    elif request.count > len(there):
        hint = f"this machine has {format_count(len(there), 'GPU')}: ask for at most that --count"
    elif is_kept:
        hint = "`allot devices` shows what GPUs are for, and `allot devices set-mode` changes that"
    elif working < min(request.count, len(states)):
        hint = "a GPU with a problem takes no share: see `allot devices`, and `allot fault` for one"
        hint += " that is simulated"
    else:
        return _hint_to_make_room(order, decision)
    return hint, advises


def _hint_beside_slices(order: Order, device: Device) -> str:
    simulated = f" --simulated {order.spec}" if order.spec else ""
    reset = "" if takes_mode_at_once(device) else " --reset"
    return (
        "ask for a slice by mode mig, or switch MIG off: `allot devices set-mode"
        f" {device.uuid} soft{reset}{simulated}`. It removes slices that are kept warm, and is"
        " refused while slices that others made are there"
    )


def _hint_to_make_room(order: Order, decision: Rejection) -> tuple[str, str]:
    in_the_way = {
        one.reason
        for one in decision.verdicts
        if not one.fits and not one.state.problem and is_asked_for(one)
    }
    if in_the_way == {OTHER_MODE}:
        return _hint_of_mode(order, decision)
    if in_the_way == {TOO_LITTLE_COMPUTE}:
        stays = order.request.mode == MPS
        return (
            "guarantee less (`--compute 0:100` takes what others leave), or make room: `allot ps`"
            " shows the shares, "
            + ("and each has its compute until it ends" if stays else "`allot resize` changes one")
        ), ""
    if order.request.may_oversubscribe:
        return (
            "ask for less, make room (`allot ps` shows the shares), or let more host memory stand"
            " for the GPUs' by --host-memory"
        ), ""
    return "ask for less, or make room: `allot ps` shows the shares, `allot resize` shrinks one", ""


def _hint_of_mode(order: Order, decision: Rejection) -> tuple[str, str]:
    verdicts = decision.verdicts
    modes = {one.state.mode for one in verdicts if one.reason == OTHER_MODE}
    ways = []
    advises = ""
    if len(modes) == 1 and modes <= {SOFT, MPS} and not order.cdi_folder:
        advises = modes.pop()
        ways.append(f"ask for --mode {advises}, which the shares there have")
    if any(one.reason == NOT_SELECTED for one in verdicts):
        ways.append("name another --gpu")
    ways.append("wait until they have ended: `allot ps` shows them")
    return ", or ".join(ways), advises
