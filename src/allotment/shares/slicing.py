# SPDX-License-Identifier: Apache-2.0
"""Shares of mode `mig` on one machine: a slice is cut for each, and goes when the share has gone.

    share, directory = create(folder, order, devices, keep_s=0)
    ...
    settle(folder)                  # from anybody, at any time: what is nobody's is removed

How a slice is chosen and made is in `cutting`. The journal names the share from before the first
call on, and the maker keeps its lock on the slice until the share is there; so whoever settles can
tell a slice that is being given from one that was left.

No daemon is on such a machine. Slices are removed by the `allot run` that ends; what one that was
killed left, and what is kept warm for a time, by the next `allot run`, `ps` or `rm`. A GPU whose
MIG mode was switched on for a slice leaves it with its last one.
"""

import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from allotment.devices.mig_machine import MigDevice, MigMachine, reset
from allotment.devices.simulated import read_machine
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    NotFoundError,
    NotInModeError,
    PrerequisiteError,
    StateError,
)
from allotment.model.placements import Placement
from allotment.model.requests import MIG, Request
from allotment.model.shares import Share, ShareId
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.records import SliceRecord, Stage
from allotment.modes.mig.slices import Slices
from allotment.placement import is_selected, unknown_selectors
from allotment.placement.layouts import slices_of
from allotment.shares import lives
from allotment.shares.cutting import WORK_S, Cutter
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import is_for, is_for_mig_alone
from allotment.shares.placing import MigTerms, Order
from allotment.shares.steps import step
from allotment.shares.surveying import Grounds, SliceOrder

__all__ = ["check_request", "create", "in_need", "settle", "settle_one"]


def create(
    folder: StateFolder, order: Order, devices: Iterable[Device], *, keep_s: float
) -> tuple[Share, Path]:
    """Cut a slice for an order, or take a warm one, and make the share; return both as `lives`.

    `keep_s`: for how many seconds the slice is kept once the share has gone. Raises
    `DoesNotFitError` with what each GPU has, `NotInModeError` for what MIG cannot give, and what
    the driver raises. Nothing is left behind by a failure that the driver lets be undone.
    """
    lives.check_name(order.name)
    check_request(order.request)
    if order.machine is None and os.geteuid() != 0:
        # Asked before anything is made: a journal of this user's would be in root's way.
        raise PrerequisiteError(
            "MIG slices of real GPUs are root's to make", hint="run as root: sudo allot run ..."
        )
    order = replace(order, id=order.id or ShareId(os.urandom(6).hex()))
    known = {each.uuid: each for each in devices}
    if unknown := unknown_selectors(known.values(), order.request):
        raise NotFoundError(
            f"no GPU here is {' or '.join(map(repr, unknown))}",
            hint="name a GPU by its UUID (or the start of it) or model, as `allot devices` has it",
        )
    folder.prepare()
    with folder.locked():
        lives.recover(folder)
    settle(folder)
    request = order.request
    wanted = SliceOrder(
        holder=order.id or "",
        request=slices_of(request),
        machine=order.machine,
        spec=order.spec,
    )
    grounds = Grounds(
        devices=known,
        objection=lambda each: "" if is_selected(each, request) else "not selected",
        terms=MigTerms(keeps=dict.fromkeys(known, keep_s)),
        asks_all=True,
    )
    try:
        with MigMachine(order.machine) as gpus, ExitStack() as works:
            (cut,) = Cutter(folder, wanted, gpus, grounds).cut(works)
            return lives.create_placed(folder, order, Placement(request, (cut.placed,)))
    except BaseException:
        with suppress(AllotError):
            settle(folder)
        raise


def settle(
    folder: StateFolder, *, patience_s: float = WORK_S, resets: Collection[str] = ()
) -> list[AllotError]:
    """Remove slices whose share has gone, unless they are kept warm; put right what was cut off.

    `resets` are GPUs that may be reset for their mode. Costs a look at a few files where there is
    nothing to do. Returns what could not be done, for whoever is to tell it: it is tried again by
    whoever comes next.
    """
    waiting = in_need(folder)
    if not waiting or not os.access(folder.mig, os.W_OK):
        return []
    problems: list[AllotError] = []
    for machine, here in _by_machine(folder, waiting).items():
        try:
            with MigMachine(machine) as gpus:
                settling = partial(_settle, folder, here, machine, resets)
                answers = gpus.ask(settling, patience_s=patience_s)
        except AllotError as error:
            problems.append(error)
            continue
        for _, answer in answers:
            problems += [answer] if isinstance(answer, AllotError) else answer
    return problems


def settle_one(
    folder: StateFolder,
    machine: Path | None,
    uuid: str,
    index: int,
    *,
    may_reset: bool,
    patience_s: float,
    keeps_warm: bool = True,
) -> list[AllotError]:
    """Do as `settle` for one GPU, by its number; no other one is asked anything.

    `keeps_warm`: warm slices stay until their time is over, and are not removed now. Raises
    `AllotError` where it does not answer.
    """
    with MigMachine(machine) as gpus:
        resets = {uuid} if may_reset else ()
        settling = partial(_settle, folder, {uuid}, machine, resets, keeps_warm=keeps_warm)
        return gpus.ask_one(index, settling, patience_s=patience_s)


def in_need(folder: StateFolder) -> frozenset[str]:
    """Return the GPUs that `settle` has something to do about, by files alone."""
    return frozenset(uuid for uuid in _gpus(folder) if _needs_care(folder, uuid))


def _settle(
    folder: StateFolder,
    uuids: Collection[str],
    machine: Path | None,
    resets: Collection[str],
    device: MigDevice,
    *,
    keeps_warm: bool = True,
) -> list[AllotError]:
    if device.uuid not in uuids:
        return []
    can_reset = device.uuid in resets
    journal = Journal(folder.mig / device.uuid)
    slices = Slices(
        device.driver,
        journal,
        reset=partial(reset, machine, device.uuid) if can_reset else None,
    )
    # Asked once the slice's lock is had: a maker keeps that until its share is there.
    settled = slices.settle(lambda share: folder.share(ShareId(share)).is_dir(), keep_s=0)
    step("mig.settled")
    problems = [*(error for _, error in settled.stuck), *settled.problems]
    if not keeps_warm or not is_for(folder, device.uuid, MIG):
        problems += _without_warm(slices, journal)
    slices.switch_off(stays=partial(is_for_mig_alone, folder, device.uuid))
    return problems


def _without_warm(slices: Slices, journal: Journal) -> list[AllotError]:
    """Remove the warm slices of a GPU that is not for slices any more: nobody is to have them."""
    problems: list[AllotError] = []
    for record in journal.read().records:
        if record.stage is Stage.READY and not record.holder:
            try:
                slices.remove(record.id)
            except NotFoundError:
                continue
            except AllotError as error:
                problems.append(error)
    return problems


def _gpus(folder: StateFolder) -> list[str]:
    try:
        return sorted(each.name for each in folder.mig.iterdir())
    except OSError:
        return []


def _needs_care(folder: StateFolder, uuid: str) -> bool:
    """Tell whether the journal of a GPU has anything that is to be done, by its files alone."""
    journal = Journal(folder.mig / uuid)
    try:
        found = journal.read()
    except StateError:
        return False  # another user's
    if not found.records:
        is_to_go = journal.is_switched and not found.problems
        return is_to_go and not is_for_mig_alone(folder, uuid)
    return any(_is_left(folder, journal, each) for each in found.records)


def _is_left(folder: StateFolder, journal: Journal, record: SliceRecord) -> bool:
    if record.stage is Stage.READY and record.holder:
        if folder.share(ShareId(record.holder)).is_dir():
            return False
    elif record.stage is Stage.READY:
        is_over = time.time() >= (record.idle_since or 0.0) + record.keep_s
        return is_over or not is_for(folder, record.gpu, MIG)
    with suppress(StateError):
        return journal.is_free(record.id)
    return False


def _by_machine(folder: StateFolder, uuids: Collection[str]) -> Mapping[Path | None, set[str]]:
    """Return which of the GPUs are of which simulated machine; the others are the computer's."""
    found: dict[Path | None, set[str]] = {}
    left = set(uuids)
    for path in sorted(folder.simulated.glob("*/machine")):
        with suppress(StateError):
            if here := left & {each.uuid for each in read_machine(path).devices}:
                found[path] = here
                left -= here
    if left:
        found[None] = left
    return found


def check_request(request: Request) -> None:
    """Refuse what a share of one slice cannot be, with `NotInModeError`."""
    problem = ""
    if request.count > 1:
        problem = "a program sees one MIG device, and no more: start it once for each"
    elif request.may_oversubscribe:
        problem = "a slice's memory is the hardware's, and cannot be promised twice"
    elif request.memory.part is not None:
        problem = "a part of which GPU is not known before it is chosen: name a size or --mig"
    if problem:
        raise NotInModeError(f"mode {request.mode}: {problem}", hint="see docs/guides/mig.md")
