# SPDX-License-Identifier: Apache-2.0
"""Which shares of a pod have their guarantee of compute in force: those of the phase it is in.

A device's contract holds all guarantees to 100 % of its time, whoever runs. Shares of one pod that
are never in use at once are booked as one, so of them only one side can be in force: the side that
starts. The others' guarantees become 0, which takes nothing from them while they do not run, and
are back when their container starts again: `settle` is called at every start.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from allotment.ledger.leases import CONTRACT, TakenSeat, Terms, change, read_contract
from allotment.model.phases import holders
from allotment.model.pods import Owner
from allotment.model.requests import SOFT
from allotment.shares.folders import StateFolder
from allotment.shares.found import Found
from allotment.shares.steps import step

__all__ = ["settle"]


def settle(
    folder: StateFolder, owner: Owner, shares: Iterable[Found], *, devices: Collection[str] = ()
) -> None:
    """Put the guarantees of a pod in force that go with the start of one of its containers.

    `shares` are all there are; `devices` are those that this container is to get a share of. The
    caller holds the folder's lock. Raises `LedgerError` or `DoesNotFitError`.
    """
    siblings = [
        each for each in shares if each.owner and each.owner.uid == owner.uid and each.mode == SOFT
    ]
    wanted = {
        (each.id, device.uuid): device.compute.guarantee
        for each in siblings
        for device in each.devices()
        if device.compute.guarantee
    }
    for uuid in sorted({uuid for _, uuid in wanted}):
        here = [each for each in siblings if (each.id, uuid) in wanted]
        if len(here) > 1 or uuid in devices:
            promises: dict[str, int] = {each.id: wanted[each.id, uuid] for each in here}
            _settle_device(folder, uuid, owner, here, promises)


def _settle_device(
    folder: StateFolder,
    uuid: str,
    owner: Owner,
    siblings: Sequence[Found],
    promises: Mapping[str, int],
) -> None:
    contract = read_contract(folder.devices / uuid / CONTRACT)
    seats = {seat.share_id: seat for seat in contract.seats if seat.share_id in promises}
    now = [
        each.id for each in siblings if each.id in seats and seats[each.id].terms.compute.guarantee
    ]
    members = [(each.id, each.owner) for each in siblings if each.owner]
    after = holders(owner, members, now)
    # First what is given up: the sum never passes the whole device on the way.
    for in_force in (False, True):
        for share, seat in seats.items():
            if (share in after) is in_force:
                _promise(folder, uuid, seat, promises[share] if in_force else 0)


def _promise(folder: StateFolder, uuid: str, seat: TakenSeat, guarantee: int) -> None:
    terms: Terms = seat.terms
    if terms.compute.guarantee != guarantee:
        compute = replace(terms.compute, guarantee=guarantee)
        change(folder.devices / uuid, seat.seat, replace(terms, compute=compute))
        step("settle.changed")
