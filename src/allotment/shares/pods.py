# SPDX-License-Identifier: Apache-2.0
"""Shares for the containers of pods: the node agent makes, repeats and ends them.

`prepare` may be killed at any step, and is repeated until it is done:

    1. the guarantees of the pod's ended containers are released
    2. the share is built out of sight, with its CDI spec, and appears by one rename
    3. the spec is copied to the folder of the container runtime

`end` does the reverse. `tidy` removes what a killed `prepare` left.
"""

import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from allotment.devices.sources import Problem
from allotment.files import FileIdentity, KeptFiles, file_identity
from allotment.ledger.operations import FILES as LEDGER_FILES
from allotment.model.compute import Compute, beyond
from allotment.model.devices import Device
from allotment.model.errors import BusyError, DoesNotFitError, LimitBelowUseError, StateError
from allotment.model.formats import format_count, format_pids, need_and_have
from allotment.model.pods import Owner
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share, ShareId
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.modes.turns import files_of_turns
from allotment.shares import cdi, lifecycle, recovery
from allotment.shares.booking import Bookings, apply_guarantees
from allotment.shares.cdi import driver_edits
from allotment.shares.failpoints import failpoint
from allotment.shares.folders import StateFolder, explained, shim_copy, simulated_copy
from allotment.shares.lifecycle import FrontDoor
from allotment.shares.mode_lives import life_of
from allotment.shares.mps_daemons import known_before
from allotment.shares.placing import MigTerms, ShareOrder
from allotment.shares.record import LoadedShare, read_share
from allotment.shares.recovery import list_shares
from allotment.shares.resize import LimitChange, change_limits
from allotment.shares.status import Readings, ShareView, view

_PRIVATE = 0o700
_SPEC = "cdi.json"
_MARKER = "id"
_PRELOAD = "ld.so.preload"
_VISIBLE = "devices"


class NodeFolders(msgspec.Struct, frozen=True):
    """Folders of the node."""

    cdi: Path = cdi.DEFAULT_FOLDER
    """The container runtime reads temporary CDI specs there."""
    driver_root: Path = Path("/")
    """The node's root, as seen from here."""


CORDONED = "cordoned: it takes no new shares"


class NodePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force on the node at one moment, for orders of one mode."""

    devices: Sequence[Device]
    injection: Injection = Injection.CDI
    """How a share is handed to its container, if the answer to `Allocate` does not say."""
    problems: Sequence[Problem] = ()
    """GPUs that do not answer."""
    unhealthy: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why, by UUID, devices take no new share."""
    cordoned: Collection[str] = ()
    """UUIDs of devices on which only the scheduler places shares: it did so before the cordon."""
    kept: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why, by UUID, devices are not chosen here: other programs use them."""
    unfit: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why, by UUID, devices cannot serve in the order's mode for now."""
    mig: MigTerms = msgspec.field(default_factory=MigTerms)

    def refused(self, order: ShareOrder) -> Mapping[str, str]:
        """Return why, by UUID, devices take no new share for this order.

        An existing share keeps its devices, also when its container restarts. What another plugin
        gave is booked on any device.
        """
        if order.injection is Injection.NONE:
            return {}
        if order.devices:
            return self.unhealthy
        cordoned = dict.fromkeys(self.cordoned, CORDONED)
        return {**self.kept, **cordoned, **self.unfit, **self.unhealthy}


class PodShares:
    """The shares of one node's pods. Several threads may use it.

    All state is in the folder: another `PodShares`, or `allot`, may use it at the same time.
    """

    def __init__(
        self,
        folder: StateFolder,
        *,
        machine: Path | None = None,
        spec: str | None = None,
        folders: NodeFolders | None = None,
    ) -> None:
        """`machine` is the file of a simulated machine, `spec` its description."""
        self._folder = folder
        self._machine = machine
        self._spec = spec
        self._folders = folders or NodeFolders()
        self._bookings = Bookings(folder)
        self._kept = KeptFiles()
        # Threads wait here, and not for the folder's lock, which is polled.
        self._one_at_a_time = threading.Lock()
        self._prepared: FileIdentity | None = None
        """The folder as it was prepared last."""
        self._copies: tuple[Path, Path | None] | None = None
        self._copying = threading.Lock()
        self._driver: dict[tuple[object, ...], Mapping[str, Sequence[Any]]] = {}

    # ---- what the agent does -------------------------------------------------------------------

    def prepare(self, order: ShareOrder, policy: NodePolicy) -> Share:
        """Create the share of an order by its id, or complete it; return it.

        An existing share stays as it is: amounts are decided once. With `Injection.CDI`, its spec
        is in the CDI folder when this returns; with `Injection.MOUNTS`, the files of `mounts`
        exist. Raises `DoesNotFitError` with need and have, or `StateError`; then nothing is left.
        """
        owner = order.owner
        if owner is None:
            raise ValueError(order)
        order, devices = self._completed(order, policy)
        with self._one_at_a_time:
            # The folder may have been emptied under a running agent.
            if self._prepared is None or self._prepared != file_identity(self._folder.root):
                self._folder.prepare(mode=_PRIVATE)
                self._prepared = file_identity(self._folder.root)
            if order.injection is Injection.MOUNTS:
                self._check_executable()
            with self._folder.locked():
                failpoint("prepare.begun")
                found = self._bookings.get(order.id)
                mode = order.request.mode if found is None else found.mode
                if not traits_of(mode).is_slice:
                    if found is not None:
                        return self._repeat(owner, found)
                    return self._create(order, devices, nullcontext)
        # The driver takes its time: it is asked without any lock of ours.
        if found is None or found.share is None:
            return self._create(order, devices, self._sliced)
        life_of(mode).verify(self._folder, found.share, order, devices)
        with self._one_at_a_time, self._folder.locked():
            present = self._bookings.get(order.id)
            if present is None:
                raise StateError(
                    f"share {found.name} was removed meanwhile", hint="the kubelet asks again"
                )
            return self._repeat(owner, present)

    def _completed(
        self, order: ShareOrder, policy: NodePolicy
    ) -> tuple[ShareOrder, Sequence[Device]]:
        """Return the order with what the node adds, and the devices that may serve it."""
        refused = policy.refused(order)
        broken = (
            Problem(device.index, device.uuid, refused[device.uuid], device)
            for device in policy.devices
            if device.uuid in refused
        )
        injection = policy.injection if order.injection is None else order.injection
        complete = replace(
            order,
            injection=injection,
            problems=(*policy.problems, *broken),
            mig=policy.mig,
            machine=self._machine,
            spec=self._spec,
            cdi_folder=self._folders.cdi if injection is Injection.CDI else None,
        )
        return complete, [each for each in policy.devices if each.uuid not in refused]

    def end(self, share: ShareId) -> None:
        """Remove a share and its CDI spec, if it exists.

        Raises `BusyError` while it has processes, `StateError` if it cannot be removed.
        """
        found = read_share(self._folder.share(share))
        if found is None:
            cdi.remove_spec(self._spec_path(share))
            return
        # Without any lock: this reads every process of the machine, and must not delay starts. The
        # container of a share that ends starts no process.
        users = recovery.users_of(found)
        if users:
            some = format_pids(users)
            raise BusyError(
                f"share {found.name} is in use by"
                f" {format_count(len(users), 'process', 'processes')} ({some})",
                hint="the agent removes it when they have ended",
            )
        with self._one_at_a_time, self._folder.locked():
            failpoint("end.begun")
            if found.share is None:
                cdi.remove_spec(self._spec_path(share))
            recovery.remove(self._folder, found)
            self._bookings.get(share)
        self._kept.close_removed()

    def resize(self, share: ShareId, request: Request, policy: NodePolicy) -> Share:
        """Give a live share the amounts of a request; return it.

        May be repeated. Raises `DoesNotFitError` with need and have, `LimitBelowUseError`,
        `NotInModeError` or `StateError`; then nothing has changed.
        """
        with self._one_at_a_time, self._folder.locked():
            shares = recovery.recover(self._folder)
            found = lifecycle.find(self._folder, share)
            _check_asked(found, request, policy.devices)
            change = _change_for(found, request)
            try:
                change_limits(self._folder, found, change, policy.devices, shares=shares)
            except LimitBelowUseError as error:
                error.hint = error.hint_for_pod()
                raise
            present = self._bookings.get(share)
            if present is None or present.share is None:
                raise StateError(f"share {share} was removed meanwhile")
            return present.share

    def owned(self) -> tuple[Share, ...]:
        """Return the shares of pods, oldest first."""
        return tuple(each.share for each in self._read() if each.share and each.share.owner)

    def damaged(self) -> tuple[LoadedShare, ...]:
        """Return the shares whose record cannot be read; they stay booked."""
        return tuple(each for each in self._read() if each.share is None)

    def _read(self) -> list[LoadedShare]:
        with self._one_at_a_time:
            return self._bookings.read() if self._folder.exists() else []

    def compared(self, readings: Readings) -> list[ShareView]:
        """Return the shares of pods, compared with the driver. Raises `StateError`."""
        with self._one_at_a_time:  # no resize changes record and contract meanwhile
            owned = [each for each in list_shares(self._folder) if each.share and each.share.owner]
        return view(owned, readings)

    def tidy(self) -> None:
        """Remove what killed calls and `allot run` left, and specs without a share.

        Raises `StateError`.
        """
        self._kept.close_removed()
        self._keep_files()  # first: it may wait, no start has to
        with self._one_at_a_time:
            self._folder.prepare(mode=_PRIVATE)
            self._copied()  # no answer has to wait for it later
            with self._folder.locked():
                recovery.recover(self._folder)
                cdi.sweep(self._folders.cdi, self._folder.shares)

    # ---- what the answer to Allocate says --------------------------------------------------------

    def mounts(self, share: ShareId, *, mode: str, devices: int) -> tuple[cdi.HostMount, ...]:
        """Return the mounts for a container without CDI; `driver_mounts` returns the driver's.

        `devices` is the number of the share's devices. `prepare` makes the files below the share's
        directory. Does not wait for a start in progress. Raises `StateError`.
        """
        self._folder.prepare(mode=_PRIVATE)
        content = self._content(self._folder.share(share), mode)
        takes_turns = traits_of(mode).takes_turns
        return cdi.mounts_of(content, devices=devices if takes_turns else 0)

    def mps_by_mounts(
        self, uuid: str, *, percent: int
    ) -> tuple[Mapping[str, str], tuple[cdi.HostMount, ...]]:
        """Return environment and further mounts for a container in mode mps without CDI."""
        return known_before(self._folder, uuid, percent=percent)

    def driver_mounts(self, devices: Sequence[Device]) -> tuple[cdi.HostMount, ...]:
        """Return the real driver's files for a container without CDI."""
        if self._machine is not None or not devices:
            return ()
        return tuple(
            cdi.HostMount(str(each["hostPath"]), str(each["containerPath"]))
            for each in self._driver_edits(devices).get("mounts", ())
        )

    def device_nodes(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return the device nodes of real GPUs, for a container without CDI."""
        if self._machine is not None or not devices:
            return ()
        nodes = self._driver_edits(devices).get("deviceNodes", ())
        return tuple(str(each["path"]) for each in nodes)

    def sight(self, directory: Path, visible: Path, devices: Sequence[Device]) -> cdi.CdiContent:
        """Return how a container sees devices without a share of them (`monitors`).

        `visible` is a file that lists them, for a simulated machine.
        """
        if self._machine is None:
            return cdi.CdiContent(directory=directory, driver=self._driver_edits(devices))
        _, libraries = self._copied()
        return cdi.CdiContent(
            directory=directory, machine=self._machine, libraries=libraries, visible=visible
        )

    # ---- how -------------------------------------------------------------------------------------

    def _create(
        self,
        order: ShareOrder,
        devices: Iterable[Device],
        locked: Callable[[], AbstractContextManager[None]],
    ) -> Share:
        door = FrontDoor(
            locked=locked,
            known_shares=self._bookings.read,
            fill=partial(self._fill, order),
            publish=self._publish,
        )
        share, _ = lifecycle.create(self._folder, order, devices, door=door)
        self._keep_files(share)  # before its container starts
        return share

    def _keep_files(self, share: Share | None = None) -> None:
        """Keep what containers can open, of one share or of all: no lease stops its change."""
        among = None if share is None else {device.uuid for device in share.devices}
        self._kept.keep(files_of_turns(self._folder.devices, among=among))
        for name in LEDGER_FILES:
            self._kept.keep(self._folder.shares.glob(f"{share.id if share else '*'}/{name}"))
        # Only read by others; a file that is open for writing could not be run.
        self._kept.keep(self._folder.shims.glob("*/*"), os.O_RDONLY)

    @contextmanager
    def _sliced(self) -> Iterator[None]:
        with self._one_at_a_time, self._folder.locked():
            failpoint("prepare.sliced")
            yield

    def _repeat(self, owner: Owner, found: LoadedShare) -> Share:
        if found.problem:
            raise found.problem
        share = found.share
        if share is None or share.owner is None or not _is_same(share.owner, owner):
            holder = share.owner or share.name if share else "unknown"
            raise StateError(
                f"share {found.id} belongs to {holder}, not to {owner}",
                hint="each id is for one container: see `allot ps`, and delete the pod",
            )
        devices = {device.uuid for device in share.devices}
        try:
            apply_guarantees(self._folder, owner, self._bookings.read(), devices=devices)
        except DoesNotFitError:
            # All that is booked fits, so a seat without a share is in the way.
            apply_guarantees(self._folder, owner, recovery.recover(self._folder), devices=devices)
        self._publish(share, found.directory)
        return share

    def _publish(self, share: Share, directory: Path) -> None:
        failpoint("prepare.made")
        self._bookings.add(share, directory)  # the folder's lock is held
        if share.cdi_spec is None:
            return
        path = directory / _SPEC
        try:
            content = path.read_bytes()
        except OSError as error:
            raise explained(error, path, "read its container's CDI spec") from error
        cdi.publish(Path(share.cdi_spec), content)

    def _fill(
        self, order: ShareOrder, draft: Path, share: Share, devices: Sequence[Device]
    ) -> None:
        """Write the files of a new share's container, beside the ledger."""
        content = self._content(self._folder.share(share.id), share.mode)
        files = {_MARKER: f"{share.id}\n"}
        if content.shim:
            files[_PRELOAD] = cdi.preload_line(content.shim)
        own = {device.uuid for device in share.devices}
        if content.visible:
            # Without CDI the device nodes were chosen before the share's devices.
            by_mounts = order.injection is Injection.MOUNTS and not order.devices
            shown = order.candidates if by_mounts else own
            uuids = [each.uuid for each in devices if shown is None or each.uuid in shown]
            files[_VISIBLE] = "".join(f"{uuid}\n" for uuid in uuids)
        if share.cdi_spec:
            driver = None
            if self._machine is None:
                driver = self._driver_edits([each for each in devices if each.uuid in own])
            content = replace(content, driver=driver)
            content = life_of(share.mode).equip(content, self._folder, share)
            spec = cdi.make_spec(share, content)
            # The runtime parses every spec of the folder for each new one, as YAML: spaces cost.
            files[_SPEC] = json.dumps(spec, separators=(",", ":")) + "\n"
        for name, text in files.items():
            path = draft / name
            path.write_text(text, "utf-8")
            path.chmod(0o644)

    def _content(self, directory: Path, mode: str) -> cdi.CdiContent:
        shim, libraries = self._copied()
        has_shim = traits_of(mode).has_shim
        return cdi.CdiContent(
            directory=directory,
            shim=shim if has_shim else None,
            preload=directory / _PRELOAD if has_shim else None,
            machine=self._machine,
            libraries=libraries,
            marker=directory / _MARKER,
            visible=directory / _VISIBLE if self._machine else None,
        )

    def _copied(self) -> tuple[Path, Path | None]:
        """Return the copies of the native libraries for new shares."""
        with self._copying:
            # The folder may have been emptied under a running agent.
            if self._copies is None or not self._copies[0].exists():
                libraries = simulated_copy(self._folder) if self._machine else None
                self._copies = shim_copy(self._folder), libraries
            return self._copies

    def _check_executable(self) -> None:
        """Refuse a folder from which containers cannot load the shim. CDI mounts it with exec."""
        if os.statvfs(self._folder.root).f_flag & os.ST_NOEXEC:
            raise StateError(
                f"{self._folder.root} is mounted noexec: programs cannot load the shim from it",
                hint="let the container runtime use CDI (containerd 2, CRI-O 1.28), mount that file"
                " system without noexec, or choose another folder with --state",
            )

    def _driver_edits(self, devices: Sequence[Device]) -> Mapping[str, Sequence[Any]]:
        root = self._folders.driver_root
        key = (tuple(each.uuid for each in devices), *_driver_stamps(root))
        found = self._driver.get(key)
        if found is None:
            if len(self._driver) > 256:  # noqa: PLR2004 - more sets of GPUs than are in use at once
                self._driver.clear()
            found = self._driver[key] = driver_edits(devices, root=root)
        return found

    def _spec_path(self, share: ShareId) -> Path:
        return self._folders.cdi / cdi.spec_name(share)


def _driver_stamps(root: Path) -> tuple[object, ...]:
    """Return the times of the files that change with the driver and its toolkit."""
    stamps: list[object] = []
    paths = [root / "etc/ld.so.cache"]
    for folder in (Path("/etc/cdi"), Path("/var/run/cdi")):
        paths += sorted(folder.glob("nvidia*"))
    for path in paths:
        try:
            stamps.append((str(path), path.stat().st_mtime_ns))
        except OSError:
            stamps.append((str(path), 0))
    return tuple(stamps)


def _check_asked(found: LoadedShare, request: Request, devices: Iterable[Device]) -> None:
    """Raise `DoesNotFitError` for more than a pod without a placement asked for at its start.

    No quota and no scheduler counted more. Its annotations may have been changed or forged since.
    """
    sizes = {device.uuid: device.allottable_bytes for device in devices}
    for device in found.devices():
        asked = device.asked
        if asked is None:
            continue
        need, have = request.memory.of(sizes.get(device.uuid, 0)), asked.memory_bytes
        memory = f"memory ({need_and_have(need, have)})"
        more = [memory] if need > have else []
        more += beyond(Compute(asked.guarantee, asked.ceiling), request.compute)
        if more:
            raise DoesNotFitError(
                f"{device.uuid} ({device.name}): more than its pod asked for at its start:"
                f" {'; '.join(more)}",
                hint="growth needs Allotment's scheduler, which has not placed this pod: create the"
                " pod again with the new request",
            )


def _change_for(found: LoadedShare, request: Request) -> LimitChange:
    """Return what a request changes."""
    asked = request.compute
    if all(
        replace(each.compute, is_governed=asked.is_governed) == asked for each in found.devices()
    ):
        return LimitChange(request.memory)
    return LimitChange(request.memory, asked, asked.weight, asked.kind)


def _is_same(one: Owner, other: Owner) -> bool:
    return (one.uid, one.container) == (other.uid, other.container)
