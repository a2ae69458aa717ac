# SPDX-License-Identifier: Apache-2.0
"""HAMi's and Volcano's schedulers, from the folder PEER_PROGRAMS, on a control plane of the bench.

Nodes get what each system's device plugin writes. The rest of a plugin matters to HAMi alone: a
node stays locked from a bind until its plugin has answered the kubelet, so one that answers at once
is played.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import yaml
from others_programs import program_from
from testbed.api import Json
from testbed.pods import container, pod
from testbed.sandbox import Process

from allotment.model.clusters import NodeInventory
from bench.scheduler.cluster_shape import Spec
from bench.scheduler.control_plane import ALONE, ControlPlane

_VARIABLE: Final = "PEER_PROGRAMS"
_MIB: Final = 1 << 20
_PORT: Final = 9448
_FIRST_TICK_S: Final = 20
"""HAMi reads the nodes each 15 s, and refuses all pods before the first time."""
_SESSION_S: Final = 3
"""Volcano's first sessions take a second each; nodes changed before are not known (its fault)."""
_SPLIT: Final = 10
"""Pods of a GPU, both systems' own default."""
_EXTENDER: Final = f"""\
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
{ALONE}profiles:
  - schedulerName: default-scheduler
  - schedulerName: hami-scheduler
extenders:
  - urlPrefix: http://127.0.0.1:{_PORT}
    filterVerb: filter
    bindVerb: bind
    nodeCacheCapable: true
    weight: 1
    httpTimeout: 30s
    managedResources:
      - {{name: nvidia.com/gpu, ignoredByScheduler: true}}
      - {{name: nvidia.com/gpumem, ignoredByScheduler: true}}
      - {{name: nvidia.com/gpucores, ignoredByScheduler: true}}
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another system's scheduler."""

    name: str
    config: str | None
    """Of kube-scheduler beside it; None: it has no part in it."""
    body: Callable[[str, Spec], Json]
    running: Callable[[ControlPlane], contextlib.AbstractContextManager[Mapping[str, Process]]]
    """Its processes, ready for pods; those that place pods first."""


def peers(folder: Path) -> Iterator[Peer]:
    """Those whose programs are there; what is packed is unpacked into `folder`."""
    hami = program_from(_VARIABLE, "hami-scheduler", folder)
    settings = program_from(_VARIABLE, "hami-device-config.yaml", folder)
    if hami is not None and settings is not None:
        command = [str(hami), *_HAMI, f"--device-config-file={settings}"]
        words = ("nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores")
        body = partial(_pod, scheduler="hami-scheduler", words=words)
        yield Peer("HAMi", _EXTENDER, body, lambda plane: _hami(plane, command))
    scheduler = program_from(_VARIABLE, "vc-scheduler", folder)
    controllers = program_from(_VARIABLE, "vc-controller-manager", folder)
    crds = program_from(_VARIABLE, "volcano", folder)
    if scheduler is not None and controllers is not None and crds is not None:
        body = partial(_pod, scheduler="volcano", words=_VOLCANO)
        yield Peer(
            "Volcano", None, body, partial(_volcano, programs=(scheduler, controllers, crds))
        )


def _pod(name: str, spec: Spec, *, scheduler: str, words: tuple[str, str, str]) -> Json:
    """A pod of one system; `words` are its resources: GPUs, MiB and percent of each."""
    amounts = (spec.gpus, spec.memory * 1024, spec.compute)
    limits: dict[str, str | int] = {"cpu": f"{spec.cpu}m", **dict(zip(words, amounts, strict=True))}
    return pod(name, container(["sleep"], limits=limits), schedulerName=scheduler)


# ---- HAMi ----------------------------------------------------------------------------------------

_HAMI: Final = (
    *(f"--http_bind=127.0.0.1:{_PORT}", "--scheduler-name=hami-scheduler", "--leader-elect=false"),
    *("--kube-qps=2000", "--kube-burst=4000", "--metrics-bind-address=127.0.0.1:9395"),
)


@contextlib.contextmanager
def _hami(plane: ControlPlane, command: list[str]) -> Iterator[Mapping[str, Process]]:
    def offer(node: NodeInventory) -> tuple[dict[str, str], dict[str, str]]:
        devices = [
            {
                "id": each.uuid,
                "index": each.index,
                "count": _SPLIT,
                "devmem": each.memory_bytes // _MIB,
                "devcore": 100,
                "type": each.model,
                "mode": "hami-core",
                "health": True,
            }
            for each in node.devices
        ]
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        annotations = {
            "hami.io/node-nvidia-register": json.dumps(devices),
            "hami.io/node-handshake": f"Reported_{now}",
        }
        return annotations, {"nvidia.com/gpu": str(_SPLIT * len(devices))}

    _write(plane, offer)
    with _started(plane, "hami-scheduler", command) as process, _answering_plugin(plane):
        time.sleep(_FIRST_TICK_S)
        yield {"hami-scheduler": process}


@contextlib.contextmanager
def _answering_plugin(plane: ControlPlane) -> Iterator[None]:
    """HAMi's device plugin as far as its scheduler waits for it: it unlocks the node at once."""
    is_over = threading.Event()

    def unlock() -> None:
        known = set(plane.watcher.nodes)
        free = {"metadata": {"annotations": {"hami.io/mutex.lock": None}}}
        while not is_over.wait(0.005):
            for name, node in list(plane.watcher.nodes.items()):
                if name not in known:
                    known.add(name)
                    plane.cluster.api.patch(f"/api/v1/nodes/{node}", free)

    thread = threading.Thread(target=unlock, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# ---- Volcano -------------------------------------------------------------------------------------

_VOLCANO: Final = ("volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores")


@contextlib.contextmanager
def _volcano(
    plane: ControlPlane, *, programs: tuple[Path, Path, Path]
) -> Iterator[Mapping[str, Process]]:
    """`programs`: scheduler, controllers, and the folder with definitions and configuration."""
    scheduler, controllers, folder = programs

    def offer(node: NodeInventory) -> tuple[dict[str, str], dict[str, str]]:
        memory = sum(each.memory_bytes for each in node.devices) // _MIB
        devices = "".join(
            f"{each.uuid},{_SPLIT},{each.memory_bytes // _MIB},{each.model},true,hami-core:"
            for each in node.devices
        )
        counts = (_SPLIT * len(node.devices), memory, 100 * len(node.devices))
        amounts = dict(zip(_VOLCANO, map(str, counts), strict=True))
        # Another text each time: the ledger of a node begins with the next change of the node.
        return {"volcano.sh/node-vgpu-register": devices, "bench/at": str(time.time())}, amounts

    _define(plane, folder / "crd")
    config = f"--kubeconfig={plane.cluster.kubeconfig}"
    managing = [
        *(str(controllers), config, "--leader-elect=false", "--listen-address=127.0.0.1:25081"),
        *("--enable-healthz", "--healthz-address=127.0.0.1:25252"),
    ]
    placing = [
        *(str(scheduler), config, "--leader-elect=false", "--cache-dumper=false"),
        f"--scheduler-conf={folder / 'scheduler-binpack.conf'}",
        *("--enable-healthz", "--healthz-address=127.0.0.1:25251"),
        *("--enable-metrics", "--listen-address=127.0.0.1:25080", "-v=0"),
    ]
    with (
        _started(plane, "vc-controller-manager", managing) as manager,
        _started(plane, "vc-scheduler", placing) as placer,
    ):
        time.sleep(_SESSION_S)
        _write(plane, offer)
        time.sleep(_SESSION_S)
        yield {"vc-scheduler": placer, "vc-controller-manager": manager}


def _define(plane: ControlPlane, crds: Path) -> None:
    api = plane.cluster.api
    for file in sorted(crds.glob("*.yaml")):
        for each in yaml.safe_load_all(file.read_text()):
            name = each["metadata"]["name"]
            api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", each)
    if api.find("/api/v1/namespaces/volcano-system") is None:
        plane.cluster.make_namespace("volcano-system")


# ---- both ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(plane: ControlPlane, name: str, command: list[str]) -> Iterator[Process]:
    path = plane.cluster.log(name)
    with path.open("a", encoding="utf-8") as log:
        environment = {"KUBECONFIG": str(plane.cluster.kubeconfig)}
        process = plane.cluster.node.popen(command, environment=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.stop()


def _write(
    plane: ControlPlane, offer: Callable[[NodeInventory], tuple[dict[str, str], dict[str, str]]]
) -> None:
    """Give each node a system's annotations and resources."""

    def write(node: NodeInventory) -> None:
        annotations, amounts = offer(node)
        status = {"capacity": amounts, "allocatable": amounts}
        path = f"/api/v1/nodes/{node.name}"
        plane.cluster.api.patch(f"{path}/status", {"status": status})
        plane.cluster.api.patch(path, {"metadata": {"annotations": annotations}})

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(write, plane.inventories):
            pass
