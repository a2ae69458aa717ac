# SPDX-License-Identifier: Apache-2.0
"""The node's state folder as a `ShareStore`: `shares.pods` with what is in force on the node."""

from collections.abc import Callable, Collection, Mapping, Sequence

from allotment.agent.tenancy.orders import ShareOrder
from allotment.devices.sources import Problem
from allotment.model.devices import Device
from allotment.model.shares import Injection, Share, ShareId
from allotment.shares.placing import MigTerms, Order
from allotment.shares.pods import PodShares

__all__ = ["CORDONED", "NodeShares"]

CORDONED = "cordoned: it takes nothing new"


class NodeShares:
    """Makes and ends shares on this node. Its calls may be made by several threads at once."""

    def __init__(
        self,
        shares: PodShares,
        *,
        devices: Callable[[], Sequence[Device]],
        unhealthy: Callable[[], Mapping[str, str]],
        problems: Callable[[], Sequence[Problem]],
        injection: Callable[[str], Injection],
        cordoned: Callable[[], Collection[str]] = tuple,
        kept: Callable[[], Mapping[str, str]] = dict,
        mig: Callable[[], MigTerms] = MigTerms,
        unfit: Callable[[str, Collection[str]], Mapping[str, str]] = lambda _mode, _uuids: {},
    ) -> None:
        """Take the folder and what is asked at each order; the callables are called in threads.

        `unhealthy` says why, by UUID: no part of such a device is given. `problems` are GPUs that
        do not answer. `injection` is how a share of a mode is handed in where its answer is not
        known. `cordoned` are UUIDs of devices on which nothing is placed that a scheduler has not
        placed there already. `kept` says why, by UUID, of those that somebody else has, which are
        not chosen here either. `mig` says how GPUs may be cut. `unfit` says why, by UUID, which of
        some devices cannot be had in a mode at the moment.
        """
        self._shares = shares
        self._devices = devices
        self._unhealthy = unhealthy
        self._problems = problems
        self._injection = injection
        self._cordoned = cordoned
        self._kept = kept
        self._mig = mig
        self._unfit = unfit

    def prepare(self, order: ShareOrder) -> Share:
        """Make a share, or find it made. Raises `AllotError`."""
        devices = self._devices()
        injection = order.injection
        return self._shares.prepare(
            Order(
                request=order.request,
                injection=self._injection(order.request.mode) if injection is None else injection,
                id=order.id,
                owner=order.owner,
                devices=order.devices,
                slices=order.slices,
                mig=self._mig(),
                candidates=frozenset(order.candidates),
                problems=(*self._problems(), *self._sick(order, devices)),
            ),
            [each for each in devices if each.uuid not in self._passed_over(order)],
        )

    def end(self, share: ShareId) -> None:
        """Remove a share. Raises `BusyError`, `StateError`."""
        self._shares.end(share)

    def owned(self) -> tuple[Share, ...]:
        """Return the shares of pods."""
        return self._shares.owned()

    def _passed_over(self, order: ShareOrder) -> Mapping[str, str]:
        """Return the devices of which no new part is given, whoever has chosen them.

        A share that is there is found before devices are looked at, so that a container which
        restarts keeps what it has. What another plugin gave is booked wherever it is.
        """
        if order.injection is Injection.NONE:
            return {}
        unhealthy = self._unhealthy()
        if order.devices:
            return unhealthy
        unfit = self._unfit(order.request.mode, order.candidates)
        cordoned = dict.fromkeys(self._cordoned(), CORDONED)
        return {**self._kept(), **cordoned, **unfit, **unhealthy}

    def _sick(self, order: ShareOrder, devices: Sequence[Device]) -> tuple[Problem, ...]:
        sick = self._passed_over(order)
        return tuple(
            Problem(each.index, each.uuid, sick[each.uuid], each)
            for each in devices
            if each.uuid in sick
        )
