# SPDX-License-Identifier: Apache-2.0
"""The users of a node's GPUs beside its shares, for metrics.

The kubelet says which containers hold which devices, of any plugin or driver. Processes outside of
shares belong to the container that their control group names: a process cannot choose it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from allotment.agent.kubelet.podresources import Held, HeldClaim, PodResources
from allotment.devices.sources import Reading
from allotment.devices.watching import driver_minor
from allotment.metrics.use import ShareUse
from allotment.metrics.users import GpuHolder, GpuProcess, OutsideUse
from allotment.model.devices import Device
from allotment.model.pods import Pod
from allotment.model.structs import replace
from allotment.shares.process_tree import PodGroup, pod_group
from allotment.shares.status import OutsideView, ShareView

_REPLICA: Final = re.compile(r"(.+?)(?:::|-_-|[-_])(\d+)")
"""Ids of shared devices: `UUID::3` (NVIDIA), `UUID-3` (HAMi), `UUID-_-3` (Aliyun)."""
_BY_MINOR: Final = re.compile(r"(?:.*/)?nvidia(\d+)(?:/gi\d+)?(?:/vgpu(\d+))?")
"""Google's ids: `nvidia0`, `nvidia0/gi3`, `nvidia0/vgpu2`."""
_NVIDIAS_NAME: Final = re.compile(r"gpu-(\d+)(?:-mig-.*)?")
"""A device of NVIDIA's DRA driver, by its minor number."""

_Amount = TypeVar("_Amount", int, float)

HeldDevices = Callable[[], Sequence[Held]]
"""Asks the kubelet. May block; raises `StateError`."""


def held_devices(socket: Path, *, patience_s: float) -> HeldDevices:
    def ask() -> Sequence[Held]:
        with PodResources(socket, patience_s=patience_s) as kubelet:
            return kubelet.list()

    return ask


class Users:
    """The users at one moment, of the shares and devices that were read with them."""

    def __init__(
        self,
        *,
        devices: Collection[Device],
        shares: Sequence[ShareUse],
        pods: Collection[Pod],
        held: Sequence[Held] | None,
        group_of: Callable[[int], PodGroup | None] = pod_group,
    ) -> None:
        """`held` None: the kubelet did not answer. `group_of`: of a PID."""
        self._devices = {device.uuid: device for device in devices}
        self._shares = shares
        self._pods = {pod.uid: pod for pod in pods}
        self._group_of = group_of
        self.holders = sorted(
            {*map(_of_share, (each for each in shares if each.container))}
            | {holder for each in held or () for holder in self._held(each)},
            key=lambda each: (each.gpu, each.device, each.namespace, each.pod, each.container,
                              each.replica, each.share),
        )  # fmt: skip

    # ---- holders

    def _held(self, held: Held) -> Iterator[GpuHolder]:
        for claim in held.claims:
            yield from self._claimed(held, claim)
        whose = (held.namespace, held.pod, held.container)
        if any((each.namespace, each.pod, each.container) == whose for each in self._shares):
            return  # its share names the devices: the kubelet's ids may be of any GPU
        for resource, ids in held.ids.items():
            for name in ids:
                uuid, replica = self._named(name, resource)
                if uuid:
                    yield self._holder(held, uuid, resource=resource, replica=replica)

    def _claimed(self, held: Held, claim: HeldClaim) -> Iterator[GpuHolder]:
        named = (claim.namespace, claim.claim)
        own = [each for each in self._shares if (each.namespace, each.claim) == named]
        for share in own:
            made = replace(_of_share(share), pod=held.pod, container=held.container)
            yield replace(made, claim=claim.claim, resource=claim.driver)
        match = None if own else _NVIDIAS_NAME.fullmatch(claim.device)
        if match is not None and (uuid := self._by_minor(int(match[1]))):
            yield replace(self._holder(held, uuid, resource=claim.driver), claim=claim.claim)

    def _holder(self, held: Held, uuid: str, *, resource: str, replica: str = "") -> GpuHolder:
        slice_of = self._devices[uuid].slice_of
        return GpuHolder(
            gpu=slice_of.gpu if slice_of else uuid,
            device=uuid if slice_of else "",
            namespace=held.namespace,
            pod=held.pod,
            container=held.container,
            resource=resource,
            replica=replica,
        )

    def _named(self, name: str, resource: str) -> tuple[str, str]:
        """Return the device and the replica that an id names; empty: no device of this node."""
        if name in self._devices:
            return name, ""
        if (match := _REPLICA.fullmatch(name)) and match[1] in self._devices:
            return match[1], match[2]
        match = _BY_MINOR.fullmatch(name) if resource.startswith("nvidia.com/") else None
        return (self._by_minor(int(match[1])), match[2] or "") if match else ("", "")

    def _by_minor(self, minor: int) -> str:
        found = (
            device.uuid
            for device in self._devices.values()
            if device.slice_of is None and _minor(device) == minor
        )
        return next(found, "")

    # ---- processes

    def outside(
        self, views: Iterable[OutsideView], readings: Mapping[str, Reading]
    ) -> tuple[list[OutsideUse], list[GpuProcess]]:
        """Return the processes outside of shares: by container, and each."""
        sums: dict[OutsideUse, list[GpuProcess]] = {}
        for view in views:
            whose = self._container(view.pid, view.uuid)
            process = GpuProcess(
                pid=view.pid,
                gpu=view.uuid,
                namespace=whose.namespace,
                pod=whose.pod,
                container=whose.container,
                memory_used=view.used,
                utilization=_busy(readings.get(view.uuid), view.pid),
            )
            sums.setdefault(whose, []).append(process)
        containers = [
            replace(
                whose,
                memory_used=_sum([each.memory_used for each in processes]),
                utilization=_sum([each.utilization for each in processes]),
                processes=len(processes),
            )
            for whose, processes in sums.items()
        ]
        return containers, [each for processes in sums.values() for each in processes]

    def _container(self, pid: int, gpu: str) -> OutsideUse:
        group = self._group_of(pid)
        pod = self._pods.get(group.pod) if group is not None else None
        if group is None or pod is None:
            return OutsideUse(gpu=gpu)
        names = [each.name for each in pod.containers if each.runtime_id == group.container]
        if not group.container or not names:
            # A runtime that writes no ids, or a status that is not there yet.
            names = [
                each.container
                for each in self.holders
                if (each.gpu, each.namespace, each.pod) == (gpu, pod.namespace, pod.name)
            ] or [each.name for each in pod.containers]
        container = names[0] if len({*names}) == 1 else ""
        return OutsideUse(gpu=gpu, namespace=pod.namespace, pod=pod.name, container=container)


def share_processes(
    view: ShareView, uses: Iterable[ShareUse], readings: Mapping[str, Reading]
) -> Iterator[GpuProcess]:
    """Yield a share's processes on each of its devices; those of unknown PID are left out."""
    for use in uses:
        for process in view.processes:
            if process.pid is None or use.memory_used is None:
                continue
            is_whole = use.device == use.gpu
            yield GpuProcess(
                pid=process.pid,
                gpu=use.gpu,
                device="" if is_whole else use.device,
                namespace=use.namespace,
                pod=use.pod,
                container=use.container,
                claim=use.claim,
                request=use.request,
                share=use.share,
                place=use.place,
                memory_used=process.used[use.place] if use.place < len(process.used) else 0,
                utilization=_busy(readings.get(use.gpu), process.pid) if is_whole else None,
                gpu_ns=process.gpu_ns if use.place == 0 and use.gpu_ns is not None else None,
            )


def _of_share(share: ShareUse) -> GpuHolder:
    return GpuHolder(
        gpu=share.gpu,
        device=share.device if share.device != share.gpu else "",
        namespace=share.namespace,
        pod=share.pod,
        container=share.container,
        share=share.share,
        mode=share.mode,
    )


@cache
def _minor(device: Device) -> int | None:
    return driver_minor(device)


def _busy(reading: Reading | None, pid: int) -> float | None:
    percents = (
        (each.gpu_percent for each in reading.processes if each.pid == pid) if reading else ()
    )
    percent = next(iter(percents), None)
    return None if percent is None else percent / 100


def _sum(amounts: Sequence[_Amount | None]) -> _Amount | None:
    known = [each for each in amounts if each is not None]
    return sum(known) if known else None
