# SPDX-License-Identifier: Apache-2.0
"""Keeps time slices and NVIDIA's CDI specs as configured, and removes leftovers of shares."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from allotment.agent.allocation.reconcile import beyond_promise
from allotment.agent.config.schema import Config
from allotment.agent.node_state import NodeState
from allotment.agent.plugin.allocate_response import (
    CDI_VENDOR,
    device_names,
    enabled_extras,
    uses_nvidia_cdi,
)
from allotment.agent.protocols import Reports
from allotment.devices.nvml import readings
from allotment.devices.timeslices import TimeSlice, set_time_slice
from allotment.model.devices import Device
from allotment.model.errors import AllotError, StateError
from allotment.model.pods import Pod, PodUid
from allotment.model.reported import Reported
from allotment.model.shares import Excess, Share, ShareId
from allotment.modes import take_damages
from allotment.shares.cdi import CDI_VERSION, EXTRAS, driver_edits, extra_edits, write_spec
from allotment.shares.pods import PodShares
from allotment.shares.process_tree import kill
from allotment.shares.status import Readings

_log = structlog.get_logger("allotment.agent")

EXCEEDED: Final = "LimitExceeded"
"""The event on a pod that has more memory than its limit, or whose files allow more."""

_TIDY_S: Final = 60.0
"""The longest life of damage that a container does to files of other shares."""


class Maintenance:
    """Needs `run` running."""

    def __init__(
        self,
        *,
        machine: Path | None,
        cdi_folder: Path,
        state: NodeState,
        shares: PodShares,
        reports: Reports,
        pod: Callable[[PodUid], Pod | None] = lambda _: None,
        ask: Readings = readings,
    ) -> None:
        """`machine`: the simulated machine, in place of a driver. `ask` queries the driver.

        `pod` returns a pod by its uid.
        """
        self._pod = pod
        self._ask = ask
        self._overused: Collection[ShareId] = ()
        """Shares that had more by the driver than their limit at the last look."""
        self._beyond: Collection[ShareId] = ()
        """Shares whose record was beyond its pod at the last look."""
        self._machine = machine
        self._state = state
        self._shares = shares
        self._reports = reports
        self._nvidia_specs = NvidiaSpecs(cdi_folder, driver_edits)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._set_slices())
            group.create_task(self._keep_nvidia_specs())
            group.create_task(self._tidy())

    async def _set_slices(self) -> None:
        """Set each GPU's time slice by its rule."""
        done: dict[str, str] = {}
        async for offer in self._state.offers():
            # A GPU whose rule no longer names a time slice goes back to the driver's default.
            for uuid in [*offer.time_slices, *done]:
                length = offer.time_slices.get(uuid, TimeSlice.DEFAULT)
                if done.get(uuid) == length or uuid not in self._state.devices:
                    continue
                try:
                    await asyncio.to_thread(
                        set_time_slice, uuid, TimeSlice(length), machine=self._machine
                    )
                except AllotError as error:
                    self._reports.node("TimeSliceNotSet", error.message, is_warning=True)
                done[uuid] = length

    async def _keep_nvidia_specs(self) -> None:
        """Write specs for NVIDIA's CDI names, if the configuration uses them."""
        if self._machine is not None:
            return  # there is no NVIDIA driver to describe
        reported = Reported[str]()
        async for _ in self._state.offers():
            devices = tuple(self._state.devices.values())
            config = self._state.config or Config()
            try:
                problems = await asyncio.to_thread(self._nvidia_specs.keep, devices, config)
            except AllotError as error:
                problems = (error.message,)
            for problem in reported.new_of(problems):
                self._reports.node("CdiSpecNotWritten", problem, is_warning=True)

    async def _tidy(self) -> None:
        exceeding = Reported[str]()
        while True:
            await self.report_exceeding(exceeding)
            await asyncio.sleep(_TIDY_S)
            try:
                await asyncio.to_thread(self._shares.tidy)
            except AllotError as error:
                _log.warning("cannot remove leftovers", error=error.message)
            for damage in take_damages():
                self._reports.node("SharedFileMended", damage.message, is_warning=True)

    async def report_exceeding(self, reported: Reported[str]) -> None:
        """Report each share, once, that has or allows more than was promised to its pod.

        Its ledger is compared with the driver, ledger and contract with its record, and that with
        its pod: who can write the state folder can change all files. A resize may change one before
        the other. With `onExcess: stop`, programs that have more by the driver in two looks are
        killed.
        """
        stops = (self._state.config or Config()).allotment.on_excess is Excess.STOP
        try:
            views = await asyncio.to_thread(self._shares.compared, self._ask)
        except AllotError as error:
            _log.warning("cannot compare shares with the driver", error=error.message)
            return
        shares = [each.share for each in views if each.share]
        beyond = {each.id: beyond_promise(each, self._pod_of(each)) for each in shares}
        lasting = {share for share, text in beyond.items() if text and share in self._beyond}
        self._beyond = {share for share, text in beyond.items() if text}
        overused = {each.share.id: each.pids for each in views if each.share and each.overuse}
        pids = {share: of for share, of in overused.items() if share in self._overused}
        self._overused = set(overused)
        found = {
            each.share: each.excess or beyond[each.share.id]
            for each in views
            if each.share and (each.excess or each.share.id in lasting)
        }
        self._reports.gauge("shares_exceeding", len(found))
        new = reported.new_of(share.id for share in found)
        for share, text in found.items():
            end = ""
            if stops and share.id in pids:
                refused = kill(pids[share.id])
                end = "; its programs were killed (onExcess: stop)"
                if refused:
                    end = (
                        f"; its programs could not be killed: {refused} (the agent lacks CAP_KILL)"
                    )
            if (end or share.id in new) and share.owner:
                self._reports.pod(share.owner, EXCEEDED, text + end, is_warning=True)

    def _pod_of(self, share: Share) -> Pod | None:
        return self._pod(share.owner.uid) if share.owner else None


DeviceEdits = Callable[[Sequence[Device]], Mapping[str, Sequence[Any]]]
"""Returns the CDI edits that make real devices usable in a container (`shares.cdi`)."""

ExtraEdits = Callable[[str], Mapping[str, Sequence[Any]]]
"""Returns the CDI edits of one of `EXTRAS`; empty: this machine has no device of it."""

_CLASSES: Final = ("gpu", "imex-channel", *EXTRAS)
# So that the runtime of NVIDIA's toolkit leaves the container alone.
_DONE: Final = {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}


def make_specs(
    devices: Sequence[Device],
    config: Config,
    edits: DeviceEdits,
    extras: ExtraEdits = extra_edits,
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return the specs by class, and the devices that failed and are left out, with the reasons.

    No specs without a CDI strategy.
    """
    if not uses_nvidia_cdi(config):
        return {}, ()
    entries: dict[str, list[dict[str, Any]]] = {each: [] for each in _CLASSES}
    problems: list[str] = []
    for device, name in zip(devices, device_names(devices, config), strict=True):
        try:
            device_edits = {key: list(values) for key, values in edits([device]).items() if values}
        except AllotError as error:
            problems.append(f"{device.uuid}: {error.message}")
            continue
        if device_edits:  # the runtimes refuse a device without edits
            entries["gpu"].append({"name": name, "containerEdits": device_edits})
    for channel in config.imex_channel_ids:
        node = {"path": f"/dev/nvidia-caps-imex-channels/channel{channel}"}
        edit = {"deviceNodes": [node]}
        entries["imex-channel"].append({"name": str(channel), "containerEdits": edit})
    for kind in enabled_extras(config):
        if extra := extras(kind):
            entries[kind].append({"name": "all", "containerEdits": dict(extra)})
    specs = {
        kind: {
            "cdiVersion": CDI_VERSION,
            "kind": f"{CDI_VENDOR}/{kind}",
            "devices": described,
            "containerEdits": _DONE,
        }
        for kind, described in entries.items()
        if described
    }
    return specs, tuple(problems)


class NvidiaSpecs:
    """The spec files."""

    __slots__ = ("_edits", "_folder", "_written")

    def __init__(self, folder: Path, edits: DeviceEdits) -> None:
        """`folder` is read by the container runtime."""
        self._folder = folder
        self._edits = edits
        self._written: dict[str, dict[str, Any] | None] = {}

    def keep(self, devices: Sequence[Device], config: Config) -> tuple[str, ...]:
        """Write or remove changed specs; blocks. Returns the problems of devices.

        Raises `StateError`.
        """
        specs, problems = make_specs(devices, config, self._edits)
        for kind in _CLASSES:
            spec = specs.get(kind)
            if kind in self._written and self._written[kind] == spec:
                continue
            path = self._folder / f"{CDI_VENDOR}-{kind}.json"
            if spec is not None:
                write_spec(path, spec)
            elif self._written.get(kind) is not None:
                # Only our own file: another plugin may have written one before.
                _remove(path)
            self._written[kind] = spec
        return problems


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(
            f"cannot remove the CDI spec {path}: {error.strerror}",
            hint=f"let the node agent write into {path.parent} (a hostPath mount, not read-only)",
        ) from error
