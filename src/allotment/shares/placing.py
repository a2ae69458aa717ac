# SPDX-License-Identifier: Apache-2.0
"""A front door's order for a share, and its placement on this machine's devices."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from allotment.devices.sources import Problem
from allotment.model.allowances import Allowance
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    DoesNotFitError,
    NotFoundError,
    NotInModeError,
    UsageError,
)
from allotment.model.formats import format_bytes, format_count
from allotment.model.mig import MigPlace, MigProfile
from allotment.model.modes import MIG, MPS, SOFT, joined_by_mode
from allotment.model.placements import DeviceState, Judgement, Placement
from allotment.model.pods import Owner
from allotment.model.quantities import check_part
from allotment.model.requests import Request
from allotment.model.shares import Injection, Runner, Share, ShareId
from allotment.model.structs import replace
from allotment.modes import ledger_mode, mode_named, traits_of
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.placement import (
    NOT_SELECTED,
    OTHER_MODE,
    TOO_LITTLE_COMPUTE,
    choose,
    follow,
    unknown_selectors,
)
from allotment.placement.judge import in_each_mode
from allotment.shares.booking import Booking, booked, states_of
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import (
    KEPT,
    ModePolicy,
    read_mode_policies,
    refusal,
    refusal_on,
)
from allotment.shares.record import LoadedShare

_IN_MIG_MODE: Final = "it is in MIG mode: it has slices, and no parts of the whole"


class MigTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How GPUs may be cut for an order, by UUID."""

    keeps: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Seconds to keep a slice after its share has ended."""
    resets: frozenset[str] = frozenset()
    """GPUs that may be reset to switch their mode."""
    peers: Mapping[str, frozenset[str]] = msgspec.field(default_factory=dict)
    """The GPUs that NVLink joins to each: they are reset together."""
    paused: Mapping[str, str] = msgspec.field(default_factory=dict)
    """GPUs whose MIG mode must not be switched on now, with the reason."""
    profiles: Callable[[Device], tuple[MigProfile, ...]] = lambda _: ()
    """The profiles of a GPU whose driver does not list them while MIG is off."""
    reuses: bool = False
    """Also use another tool's idle MIG device of exactly the right profile."""


def fresh_id() -> ShareId:
    return ShareId(os.urandom(6).hex())


class ShareOrder(msgspec.Struct, frozen=True):
    """All that a front door knows about the requested share."""

    request: Request
    injection: Injection | None = None
    """None: filled in from the node's configuration before the share is created."""
    name: str | None = None
    machine: Path | None = None
    spec: str | None = None
    runner: Runner | None = None
    command: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    """GPUs that do not answer: no share is placed there, but a refusal names them."""
    cdi_folder: Path | None = None
    """Folder of the share's CDI spec, if it has one."""
    host_budget: int | None = None
    """Host memory that may stand for devices' memory, in bytes; None: the machine's default."""
    id: ShareId = msgspec.field(default_factory=fresh_id)
    owner: Owner | None = None
    """Its container, on Kubernetes: it names the share, too."""
    devices: tuple[str, ...] = ()
    """UUIDs chosen by a scheduler or the kubelet. A repeated one gives several parts."""
    candidates: Collection[str] | None = None
    """UUIDs that this mode may use; None: any device."""
    slices: tuple[MigPlace, ...] = ()
    """In mode mig, the slice of each of `devices` that a scheduler chose."""
    asked: Request | None = None
    """Of a container that no scheduler placed: it never gets more (`ShareDevice.asked`)."""
    mig: MigTerms = msgspec.field(default_factory=MigTerms)
    allowance: Allowance | None = None
    """What the share's user may have on this machine; None: what is free."""
    otherwise: "tuple[ShareOrder, ...]" = ()
    """The same share in other modes, tried in this order. If only the mode differs,
    `request.other_modes` has them."""


def why_not_together(orders: Sequence[ShareOrder]) -> str:
    """Return why the shares of some orders cannot be in one container; empty: they can be.

    The same as the shim says at a program's start (`native/shim/process.c`, `mps.c`). An order in
    several modes is refused only if none of them would do.
    """
    if len(orders) < 2:  # noqa: PLR2004
        return ""
    having: dict[str, ShareOrder] = {}
    for each in orders:
        for uuid in () if each.slices else set(each.devices):
            if (other := having.setdefault(uuid, each)) is not each:
                return f"{_asker(other)} and {_asker(each)} have parts of one GPU ({uuid})"
    traits = {each.id: [traits_of(mode) for mode in each.request.modes] for each in orders}
    bare = [each for each in orders if not any(one.has_shim for one in traits[each.id])]
    if bare and len(bare) < len(orders):
        return f"{_asker(bare[0])} has whole GPUs, and the others have parts"
    if any(all(one.needs_daemon for one in traits[each.id]) for each in orders):
        return f"one of them has mode {MPS}, which goes with no other share"
    return ""


def _asker(order: ShareOrder) -> str:
    owner = order.owner
    return f"{owner.part} of {owner.namespace}/{owner.pod}" if owner else f"share {order.id}"


class ModeAttempts:
    """The modes of an order, tried one after the other until one succeeds.

    ```
    attempts = ModeAttempts(order)
    for alone in attempts.orders:
        try:
            return create(alone)
        except DoesNotFitError as error:
            attempts.add(alone, error)
    raise attempts.refusal()
    ```
    """

    def __init__(self, order: ShareOrder) -> None:
        alone = tuple(replace(order, request=each) for each in in_each_mode(order.request))
        self.orders = (*alone, *order.otherwise)
        """The order in each mode, the preferred mode first."""
        self.refusals: dict[str, AllotError] = {}
        """The last refusal of each tried mode."""

    def add(self, alone: ShareOrder, error: AllotError) -> None:
        self.refusals[alone.request.mode] = error

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Return each refused mode with its short reason, or the first line of its refusal."""
        for mode, error in self.refusals.items():
            short = error.reason if isinstance(error, DoesNotFitError) else ""
            yield mode, short or error.message.partition("\n")[0].rstrip(":")

    def refusal(self) -> AllotError:
        """Return one error for all modes: a `UsageError` if no GPU could serve any of them.

        It has the preferred mode's hint, unless that advises a mode that was tried.
        """
        errors = list(self.refusals.values())
        if len(errors) == 1:
            return errors[0]
        text = joined_by_mode(
            {mode: error.message for mode, error in self.refusals.items()}, separator="\n"
        )
        possible = [each for each in errors if not isinstance(each, NotInModeError)]
        if not possible:
            return UsageError(text, hint=errors[0].hint)
        useful = (
            each
            for each in possible
            if not (isinstance(each, DoesNotFitError) and each.advises in self.refusals)
        )
        return DoesNotFitError(text, hint=next(useful, possible[0]).hint)


def place_now(
    folder: StateFolder,
    order: ShareOrder,
    devices: Iterable[Device],
    shares: Iterable[LoadedShare],
) -> Placement:
    """Place an order beside these shares, by the current journals and mode policies.

    Raises `DoesNotFitError`.
    """
    # MIG may have been switched on after the inventory was read.
    has_journals = folder.mig.is_dir()
    current = [_as_cut(folder, device) if has_journals else device for device in devices]
    bookings = booked(shares, seen_by=order.owner)
    return place(order, current, bookings, allowed=read_mode_policies(folder))


def refuse_kept(folder: StateFolder, order: ShareOrder, placement: Placement) -> None:
    """Raise `DoesNotFitError` if a slice's GPU was restricted to other modes meanwhile."""
    if order.owner and order.devices:
        return  # a scheduler chose the GPU before that
    policies = read_mode_policies(folder)
    for placed in placement.devices:
        if why := refusal_on(policies, placed.device, order.request.mode):
            raise DoesNotFitError(
                f"GPU {placed.gpu or placed.device.uuid}: {why}",
                hint="`allot devices` shows what GPUs are for",
            )


def in_allowed_modes(order: ShareOrder, policies: Mapping[str, ModePolicy]) -> ShareOrder:
    """Return an order in those of its modes that the GPUs that it names may have.

    For orders whose scheduler knows no modes. Raises `DoesNotFitError` if none is left.
    """
    refusals = {
        mode: [
            f"GPU {uuid}: {why}"
            for uuid in order.devices
            if (why := refusal(policies.get(uuid), mode))
        ]
        for mode in order.request.modes
    }
    modes = [mode for mode, reasons in refusals.items() if not reasons]
    if not modes:
        raise DoesNotFitError(
            f"mode {order.request.mode}: {refusals[order.request.mode][0]}",
            hint="ask for a mode that `allot devices` shows for the GPU, or select another GPU",
        )
    request = replace(order.request, mode=modes[0], other_modes=tuple(modes[1:]))
    return order if request == order.request else replace(order, request=request)


def _as_cut(folder: StateFolder, device: Device) -> Device:
    """Return a GPU that `allot` switched to MIG mode without memory for other modes."""
    if device.mig or not (folder.mig / device.uuid).is_dir():
        return device
    from allotment.modes.mig.journal import Journal  # late: few have MIG, and all would load it

    if not Journal(folder.mig / device.uuid).is_switched:
        return device
    return replace(device, mig=True)


def check_selectors(order: ShareOrder, devices: Iterable[Device]) -> None:
    """Raise `NotFoundError` if the order names a GPU or model that is not on this machine."""
    working = tuple(devices)
    broken = tuple(problem.device for problem in order.problems if problem.device)
    unknown = unknown_selectors((*working, *broken), order.request)
    if unknown:
        listed = "\n".join(f"  {device.uuid} ({device.name})" for device in working)
        raise NotFoundError(
            f"no GPU here is {' or '.join(map(repr, unknown))}; there are:\n{listed}",
            hint="name a GPU by its UUID (or the start of it) or model, as `allot devices` has it",
        )


def place(
    order: ShareOrder,
    devices: Iterable[Device],
    bookings: Mapping[str, Booking],
    *,
    allowed: Mapping[str, ModePolicy] | None = None,
) -> Placement:
    """Choose devices for an order, or use the devices that it names.

    `allowed` is the mode policy by GPU UUID, ignored if a scheduler already chose the devices.
    Raises `DoesNotFitError` with need and have of each device.
    """
    policies = {} if allowed is None or (order.owner and order.devices) else allowed
    states = list(_states(order, devices, bookings, policies))
    if order.owner and not order.devices:
        _check_count(order, states)
    decision = _follow(order, states) if order.devices else choose(states, order.request)
    if isinstance(decision, Placement):
        for placed in decision.devices:
            check_part(order.request.memory, placed.device.allottable_bytes)
        return decision
    from allotment.placement.explain import explain, main_reason  # late: refusals alone need it

    nameless = [
        f"  {each.uuid or f'GPU number {each.index}'}: {each.message}"
        for each in order.problems
        if not each.device
    ]
    message = "\n".join([explain(decision), *nameless])
    hint, advises = _hint(order, decision)
    raise DoesNotFitError(message, hint=hint, reason=main_reason(decision), advises=advises)


def could_fit(order: ShareOrder, devices: Sequence[Device]) -> bool:
    """Whether the order fits on this machine when it has no other share, in one of its modes."""
    for alone in ModeAttempts(order).orders:
        if traits_of(alone.request.mode).is_slice:
            return True  # the GPUs may be cut anew
        with suppress(DoesNotFitError, NotInModeError):
            place(alone, devices, {})
            return True
    return False


def _check_count(order: ShareOrder, states: Sequence[DeviceState]) -> None:
    """Refuse a container that requests more devices than its node could ever provide."""
    able = [
        state
        for state in states
        if (order.candidates is None or state.device.uuid in order.candidates)
        and not mode_named(order.request.mode).fits(state.device)
    ]
    count = order.request.count
    if count <= len(able):
        return
    of_mode = f" of mode {order.request.mode}" if len(able) < len(states) else ""
    raise DoesNotFitError(
        f"asks for parts of {format_count(count, 'GPU')}; this node has {len(able)}{of_mode}",
        hint=f"ask for at most {len(able)}" if able else "choose a node that has such GPUs",
    )


def _states(
    order: ShareOrder,
    devices: Iterable[Device],
    bookings: Mapping[str, Booking],
    policies: Mapping[str, ModePolicy],
) -> Iterable[DeviceState]:
    mode = mode_named(order.request.mode)
    broken = {each.device: each.message for each in order.problems if each.device}
    for state in states_of([*devices, *broken], bookings, order.host_budget):
        uuid = state.device.uuid
        problem = broken.get(state.device, "") or mode.fits(state.device)
        if not problem and order.candidates is not None and uuid not in order.candidates:
            problem = f"not for mode {mode.name}, by the node's configuration"
        if not problem and policies:
            problem = refusal_on(policies, state.device, mode.name)
        if not problem and _is_cut(state.device):
            problem = _IN_MIG_MODE
        yield replace(state, problem=problem)


def _is_cut(device: Device) -> bool:
    """True for a whole GPU in MIG mode."""
    return device.mig and device.slice_of is None


def _follow(order: ShareOrder, states: Sequence[DeviceState]) -> Placement | Judgement:
    present = {state.device.uuid for state in states}
    missing = sorted(set(order.devices) - present)
    if missing:
        raise DoesNotFitError(
            f"need GPU {' and '.join(missing)}, which was chosen for it; have"
            f" {', '.join(sorted(present)) or 'none'}",
            hint="see `allot devices`: it may be lost, or of another node",
        )
    return follow(states, order.request, order.devices)


def _hint(order: ShareOrder, decision: Judgement) -> tuple[str, str]:
    """Return the next step, and the mode that it advises, if it advises one."""
    from allotment.placement.explain import is_asked_for  # late, as above

    verdicts = [verdict for verdict in decision.verdicts if is_asked_for(verdict)]
    devices = [verdict.state.device for verdict in verdicts or decision.verdicts]
    if devices and all(map(_is_cut, devices)):
        hint = _hint_beside_slices(order, devices[0])
        is_narrow = len(devices) < len(decision.verdicts)
        return (f"name another --gpu, {hint}" if is_narrow else hint), MIG
    if devices and all(map(mode_named(order.request.mode).fits, devices)):
        return "ask for another mode: soft serves every GPU", SOFT
    hint = _hint_apart_from_shares(order, decision)
    if hint:
        return hint, ""
    reasons = {
        verdict.reason for verdict in verdicts if not (verdict.fits or verdict.state.problem)
    }
    if reasons == {OTHER_MODE}:
        return _hint_of_mode(order, decision)
    return _hint_to_make_room(order.request, reasons), ""


def _hint_beside_slices(order: ShareOrder, device: Device) -> str:
    simulated = f" --simulated {order.spec}" if order.spec else ""
    reset = "" if takes_mode_at_once(device) else " --reset"
    return (
        "ask for a slice by mode mig, or switch MIG off: `allot devices set-mode"
        f" {device.uuid} soft{reset}{simulated}`. It removes slices that are kept warm, and is"
        " refused while slices that others made are there"
    )


def _hint_apart_from_shares(order: ShareOrder, decision: Judgement) -> str:
    """Return the next step if no share in the way has to end; empty: one has to."""
    from allotment.placement.explain import is_asked_for  # late, as above

    request = order.request
    every = [verdict.state for verdict in decision.verdicts]
    states = [each.state for each in decision.verdicts if is_asked_for(each)] or every
    sizes = [state.device.allottable_bytes for state in states]
    if not request.may_oversubscribe and not any(request.memory.of(size) <= size for size in sizes):
        which = "no GPU here" if len(states) == len(every) else "none of those that are asked for"
        return f"ask for less: {which} is that large, even when empty"
    if order.owner:
        return "it waits until there is room: `allot ps` on the node shows the shares"
    if request.count > len(every):
        return f"this machine has {format_count(len(every), 'GPU')}: ask for at most that --count"
    if any(state.problem.startswith(KEPT) for state in states):
        return "`allot devices` shows what GPUs are for, and `allot devices set-mode` changes that"
    if sum(not state.problem for state in states) < min(request.count, len(states)):
        return (
            "a GPU with a problem takes no share: see `allot devices`, and `allot fault` for one"
            " that is simulated"
        )
    return ""


def _hint_of_mode(order: ShareOrder, decision: Judgement) -> tuple[str, str]:
    modes = {each.state.mode for each in decision.verdicts if each.reason == OTHER_MODE}
    ways = []
    advises = ""
    if len(modes) == 1 and all(map(ledger_mode, modes)) and not order.cdi_folder:
        advises = modes.pop()
        ways.append(f"ask for --mode {advises}, the mode of the shares there")
    if any(verdict.reason == NOT_SELECTED for verdict in decision.verdicts):
        ways.append("name another --gpu")
    ways.append("wait until they have ended: `allot ps` shows them")
    return ", or ".join(ways), advises


def _hint_to_make_room(request: Request, reasons: Collection[str]) -> str:
    if reasons == {TOO_LITTLE_COMPUTE}:
        is_fixed = not traits_of(request.mode).takes_turns
        return (
            "guarantee less (`--compute 0:100` takes what others leave), or make room: `allot ps`"
            " shows the shares, "
            + (
                "and each has its compute until it ends"
                if is_fixed
                else "`allot resize` changes one"
            )
        )
    if request.may_oversubscribe:
        return (
            "ask for less, make room (`allot ps` shows the shares), or let more host memory stand"
            " for the GPUs' by --host-memory"
        )
    return "ask for less, or make room: `allot ps` shows the shares, `allot resize` shrinks one"


def memory_warning(share: Share) -> str:
    """Warn of a share that is hardly larger than CUDA's own contexts; empty: it is large enough."""
    least = traits_of(share.mode).least_bytes
    smallest = min((device.memory_bytes for device in share.devices), default=least)
    if smallest >= least:
        return ""
    return (
        f"it has {format_bytes(smallest)} of a GPU, and CUDA takes 300 to 500 MiB for itself in"
        " each process, so that programs may find no memory when they start; hint: ask for at least"
        " 512Mi of each GPU"
    )
