# SPDX-License-Identifier: Apache-2.0
"""Shares for the containers of pods: what the node agent makes, repeats and ends.

`prepare` is one step for the agent and any number of steps on the disk, each of which can be the
last: doing it again finishes it, and changes nothing once it is done. Its order is such that
nothing is seen before it is whole:

    1. guarantees of the pod's ended containers are given up
    2. the share is built out of sight, with all that its container will ever get, its CDI spec
       among that, and shown by one rename
    3. the spec is put where the container runtime reads it: the very file that is in the share

`end` goes the other way. What a cut-off `prepare` of a pod that is gone leaves, `tidy` removes.
"""

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allotment.model.devices import Device
from allotment.model.errors import BusyError, DoesNotFitError, StateError
from allotment.model.formats import format_count
from allotment.model.pods import Owner
from allotment.model.requests import MIG, MPS, SOFT
from allotment.model.shares import Injection, Share, ShareId
from allotment.modes import ledger_mode
from allotment.shares import cdi, lives
from allotment.shares.bookings import Bookings
from allotment.shares.copies import shim_copy, simulated_copy
from allotment.shares.drivers import driver_edits
from allotment.shares.folders import StateFolder, explained
from allotment.shares.found import Found, read_share
from allotment.shares.guarantees import settle
from allotment.shares.mps_in_containers import check_injection, known_before, with_daemon
from allotment.shares.placing import Order
from allotment.shares.steps import step

__all__ = ["NodeFolders", "PodShares"]

_PRIVATE = 0o700
_SPEC = "cdi.json"
_MARKER = "id"
_PRELOAD = "ld.so.preload"
_VISIBLE = "devices"
_NAMING = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that name devices: to NVIDIA's container runtime, and to CUDA."""


@dataclass(frozen=True, slots=True)
class NodeFolders:
    """Where things are on the node."""

    cdi: Path = cdi.DEFAULT_FOLDER
    """Where the container runtime reads CDI specs that come and go."""
    driver_root: Path = Path("/")
    """Where the node's own files are, as seen from here."""


class PodShares:
    """The shares of one node's pods. Its calls may be made by several threads at once.

    All state is in the folder: another `PodShares`, or `allot`, may be used beside it at any time.
    """

    def __init__(
        self,
        folder: StateFolder,
        *,
        machine: Path | None = None,
        spec: str | None = None,
        folders: NodeFolders | None = None,
        host_budget: int | None = None,
    ) -> None:
        """Name the folder; nothing is made yet.

        `machine` is the file of the simulated machine that the node has instead of GPUs, `spec` is
        what that was described by.
        """
        self._folder = folder
        self._machine = machine
        self._spec = spec
        self._folders = folders or NodeFolders()
        self._host_budget = host_budget
        self._bookings = Bookings(folder)
        # Threads queue here, and not at the folder's lock, which is polled.
        self._one_at_a_time = threading.Lock()
        self._copies: tuple[Path, Path | None] | None = None
        self._copying = threading.Lock()
        self._driver: dict[tuple[object, ...], Mapping[str, Sequence[Any]]] = {}

    # ---- what the agent does -------------------------------------------------------------------

    def prepare(self, order: Order, devices: Iterable[Device]) -> Share:
        """Make the share that an order names by its id, or find it made, and return it.

        The order has an id and an owner. What is there already for that owner stays as it is,
        whatever the order says by now: amounts are decided once. Where it is `Injection.CDI`, its
        spec is in the CDI folder when this returns; where it is `Injection.MOUNTS`, the files of
        `mounts` are there. Raises `DoesNotFitError` with need and have, or `StateError`; then
        nothing is left behind.
        """
        if order.id is None or order.owner is None:
            raise ValueError(order)
        with self._one_at_a_time:
            self._check_ready(order.injection)
            with self._folder.locked():
                step("prepare.begun")
                found = self._bookings.get(order.id)
                if found is not None and found.mode != MIG:
                    return self._repeat(order.owner, found)
                if found is None and order.request.mode != MIG:
                    return self._make(order, tuple(devices))
        if found is None or found.share is None:
            return self._make_sliced(order, tuple(devices))
        return self._repeat_sliced(found.share, order, order.owner, tuple(devices))

    def end(self, share: ShareId) -> None:
        """Remove a share and its CDI spec; nothing happens where it is not there.

        Raises `BusyError` while a process is in it, `StateError` where it cannot be removed.
        """
        found = read_share(self._folder.share(share))
        if found is None:
            cdi.remove_spec(self._spec_path(share))
            return
        # Without any lock: it takes a look at every process of the machine, starts must not wait
        # for that, and the container of a share that is to end starts none.
        users = lives.users_of(found)
        if users:
            some = ", ".join(map(str, sorted(users)[:8]))
            raise BusyError(
                f"share {found.name} is in use by"
                f" {format_count(len(users), 'process', 'processes')} ({some})",
                hint="it is removed when they have ended",
            )
        with self._one_at_a_time, self._folder.locked():
            step("end.begun")
            if found.share is None:
                cdi.remove_spec(self._spec_path(share))
            lives.remove(self._folder, found)
            self._bookings.get(share)

    def owned(self) -> tuple[Share, ...]:
        """Return the shares of pods that are there, oldest first."""
        with self._one_at_a_time:
            if not self._folder.exists():
                return ()
            found = self._bookings.read()
        return tuple(each.share for each in found if each.share and each.share.owner)

    def damaged(self) -> tuple[Found, ...]:
        """Return the shares whose record cannot be read: they stay booked, for whoever they are."""
        with self._one_at_a_time:
            if not self._folder.exists():
                return ()
            found = self._bookings.read()
        return tuple(each for each in found if each.share is None)

    def tidy(self) -> None:
        """Remove what is left over: of cut-off calls, of `allot run`, and specs without a share.

        Raises `StateError`.
        """
        with self._one_at_a_time:
            self._folder.prepare(mode=_PRIVATE)
            self._copied()  # so that no answer has to wait for it
            with self._folder.locked():
                lives.recover(self._folder)
                cdi.sweep(self._folders.cdi, self._folder.shares)

    # ---- what the answer to Allocate says --------------------------------------------------------

    def mounts(self, share: ShareId, *, mode: str, devices: int) -> tuple[cdi.HostMount, ...]:
        """Return what is to be mounted into a container where there is no CDI.

        `devices` is how many the share will have. The files below the share's directory are there
        when `prepare` has returned. A real driver's files are those of `driver_mounts`. Waits for
        no start that is under way. Raises `StateError`.
        """
        self._check_ready(Injection.MOUNTS)
        content = self._content(self._folder.share(share), mode)
        return cdi.mounts_of(content, devices=devices if mode == SOFT else 0)

    def mps_by_mounts(
        self, uuid: str, *, percent: int
    ) -> tuple[Mapping[str, str], tuple[cdi.HostMount, ...]]:
        """Return environment and mounts, besides, of a container in mode mps without CDI."""
        return known_before(self._folder, uuid, percent=percent)

    def driver_mounts(self, devices: Sequence[Device]) -> tuple[cdi.HostMount, ...]:
        """Return the real driver's files for a container, where there is no CDI."""
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

    # ---- how -------------------------------------------------------------------------------------

    def _make(self, order: Order, devices: Sequence[Device]) -> Share:
        check_injection(order)
        complete = self._completed(order)

        def fill(draft: Path, share: Share) -> None:
            self._fill(draft, share, order, devices)

        try:
            share, directory = lives.place_and_build(
                self._folder, complete, devices, self._bookings.read(), fill=fill
            )
        except DoesNotFitError:
            # What ended without anybody's care may be all that is in the way.
            there = lives.recover(self._folder)
            share, directory = lives.place_and_build(
                self._folder, complete, devices, there, fill=fill
            )
        return self._shown(share, directory)

    def _make_sliced(self, order: Order, devices: Sequence[Device]) -> Share:
        """Make a share of slices: these first, by their drivers, and without any lock of ours."""
        from allotment.shares import sliced  # late: few nodes have MIG, and it asks NVML

        order = self._completed(order)
        whole = [each for each in devices if each.slice_of is None]
        with sliced.cut(self._folder, order, whole) as placement:
            slices = [each.device for each in placement.devices]

            def fill(draft: Path, share: Share) -> None:
                self._fill(draft, share, order, slices)

            with self._one_at_a_time, self._folder.locked():
                step("prepare.sliced")
                made = lives.build_placed(self._folder, order, placement, fill=fill)
                return self._shown(*made)

    def _shown(self, share: Share, directory: Path) -> Share:
        """Show a share that was made to the container runtime, or have it never been."""
        try:
            self._publish(share, directory)
        except BaseException:
            found = self._bookings.get(share.id)
            if found is not None:
                lives.remove(self._folder, found)
            raise
        self._bookings.get(share.id)
        return share

    def _completed(self, order: Order) -> Order:
        return replace(
            order,
            machine=self._machine,
            spec=self._spec,
            cdi_folder=self._folders.cdi if order.injection is Injection.CDI else None,
            host_budget=self._host_budget if order.host_budget is None else order.host_budget,
        )

    def _repeat_sliced(
        self, share: Share, order: Order, owner: Owner, devices: Sequence[Device]
    ) -> Share:
        """Find a share of slices made, if it has them still: their drivers are asked, unlocked."""
        from allotment.shares import sliced  # late, as above

        if gone := sliced.gone(self._folder, share, self._completed(order), devices):
            raise StateError(
                f"share {share.name}: its slice {', '.join(gone)} was removed by others",
                hint="delete the pod, so that it is placed anew; another manager of MIG works on"
                " this node: keep it off, or use that alone",
            )
        with self._one_at_a_time, self._folder.locked():
            found = self._bookings.get(share.id)
            if found is None:
                raise StateError(
                    f"share {share.name} was removed meanwhile", hint="the kubelet asks again"
                )
            return self._repeat(owner, found)

    def _repeat(self, owner: Owner, found: Found) -> Share:
        if found.problem:
            raise found.problem
        share = found.share
        if share is None or share.owner is None or not _is_same(share.owner, owner):
            whose = share.owner or share.name if share else "unknown"
            raise StateError(
                f"share {found.id} is {whose}'s, and was asked for by {owner}",
                hint="an id is made for one container: see `allot ps`, and delete the pod",
            )
        devices = {device.uuid for device in share.devices}
        try:
            settle(self._folder, owner, self._bookings.read(), devices=devices)
        except DoesNotFitError:
            # The seat of a share that was not to be: what is booked fits, so that is in the way.
            settle(self._folder, owner, lives.recover(self._folder), devices=devices)
        self._publish(share, found.directory)
        return share

    def _publish(self, share: Share, directory: Path) -> None:
        step("prepare.made")
        if share.cdi_spec is None:
            return
        path = directory / _SPEC
        try:
            content = path.read_bytes()
        except OSError as error:
            raise explained(error, path, "read what its container gets") from error
        cdi.publish(Path(share.cdi_spec), content)

    def _fill(self, draft: Path, share: Share, order: Order, devices: Sequence[Device]) -> None:
        """Put the files into a new share that its container gets beside the ledger."""
        content = self._content(self._folder.share(share.id), share.mode)
        _write(draft / _MARKER, f"{share.id}\n")
        if content.shim:
            _write(draft / _PRELOAD, cdi.preload_line(content.shim))
        own = {device.uuid for device in share.devices}
        if content.visible:
            # Without CDI the nodes were chosen before anybody knew which devices are meant.
            by_mounts = order.injection is Injection.MOUNTS and not order.devices
            shown = order.candidates if by_mounts else own
            uuids = [each.uuid for each in devices if shown is None or each.uuid in shown]
            _write(draft / _VISIBLE, "".join(f"{uuid}\n" for uuid in uuids))
        if share.cdi_spec:
            driver = None
            if self._machine is None:
                driver = self._driver_edits([each for each in devices if each.uuid in own])
            content = replace(content, driver=driver)
            if share.mode == MIG:
                # For programs that the shim is not in, and for images that say `all`.
                named = ",".join(each.uuid for each in share.devices)
                content = replace(content, environment=dict.fromkeys(_NAMING, named))
            if share.mode == MPS:
                content = with_daemon(content, self._folder, share)
            spec = cdi.make_spec(share, content)
            # The runtime reads every spec of the folder for each that comes, as YAML: spaces cost.
            _write(draft / _SPEC, json.dumps(spec, separators=(",", ":")) + "\n")

    def _content(self, directory: Path, mode: str) -> cdi.CdiContent:
        shim, libraries = self._copied()
        has_shim = mode == MIG or ledger_mode(mode) is not None
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
        """Return the copies of the native libraries that new shares get."""
        with self._copying:
            # The folder may have been emptied under a running agent.
            if self._copies is None or not self._copies[0].exists():
                libraries = simulated_copy(self._folder) if self._machine else None
                self._copies = shim_copy(self._folder), libraries
            return self._copies

    def _check_ready(self, injection: Injection) -> None:
        self._folder.prepare(mode=_PRIVATE)
        if injection is not Injection.MOUNTS:
            return  # CDI says for each mount that it may be executed from
        if os.statvfs(self._folder.root).f_flag & os.ST_NOEXEC:
            raise StateError(
                f"{self._folder.root} is mounted noexec: no program could load the shim from it",
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
    """Return what changes with the driver and its toolkit: their files' times."""
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


def _is_same(one: Owner, other: Owner) -> bool:
    return (one.uid, one.container) == (other.uid, other.container)


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    path.chmod(0o644)
