# SPDX-License-Identifier: Apache-2.0
"""All benches by name. Code is imported only when its bench runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from bench.harness.options import Options
from bench.harness.results import Result


class Need(Enum):
    """What a bench cannot run without."""

    NODE = "root, and the programs of the test cluster"
    CONTROL_PLANE = "root, and the programs of the test cluster with kube-scheduler"
    ROOT = "root"
    PYPERF = "pyperf (dependency group bench)"
    NUMPY = "numpy"
    CHROMIUM = "Debian's chromium, and playwright (dependency group dev)"
    GPU = "a GPU, or --simulated"

    def missing(self, options: Options) -> str | None:
        """Return why it is missing; None where it is at hand."""
        match self:
            case Need.NODE | Need.CONTROL_PLANE:
                from testbed.requirements import why_not

                return why_not(needs_go=self is Need.CONTROL_PLANE)
            case Need.ROOT:
                return None if os.geteuid() == 0 else "needs root"
            case Need.PYPERF | Need.NUMPY:
                module = self.name.lower()
                return None if find_spec(module) else f"no module {module}; needs {self.value}"
            case Need.CHROMIUM:
                has_chromium = Path("/usr/bin/chromium").exists() and find_spec("playwright")
                return None if has_chromium else f"needs {self.value}"
            case Need.GPU:
                return None if options.is_simulated else _no_gpu()


def _no_gpu() -> str | None:
    from allotment.devices.nvml import Nvml
    from allotment.model.errors import AllotError

    try:
        with Nvml() as source:
            devices = source.inventory().devices
    except AllotError as error:
        return f"{error.message}; --simulated is a dry run"
    return None if devices else "NVML reports no GPU; --simulated is a dry run"


class Rig(Protocol):
    """Where the benches of a room measure."""

    @property
    def facts(self) -> dict[str, str]:
        """What is under test: the driver, the cluster."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench: a function of its name in a module of its room."""

    name: str
    module: str
    seconds: int
    """How long it takes on two cores, roughly."""
    question: str
    room: str = ""
    base: str = ""
    """What the figures are compared with, in the same run."""
    needs: tuple[Need, ...] = ()
    is_default: bool = False

    def results(self, rig: Rig, options: Options) -> Iterator[Result]:
        """Measure."""
        function: Callable[[Any, Options], Iterator[Result]] = _load(self.function)
        return function(rig, options)

    @property
    def function(self) -> str:
        """Return `module:function`, below this package; called with the rig and the options."""
        return f"{self.room}.{self.module}:{self.name.replace('-', '_')}"


RIGS: Final = {
    "overhead": "overhead.rig:share_rig",
    "compute": "compute.rig:rig_of",
    "node": "node.rig:node_rig",
    "mps": "mps.stage:stage",
    "gpu": "gpu.rig:gpu_rig",
}
"""Where a room's benches measure together; the others need nothing in common."""


def open_rig(room: str, options: Options) -> AbstractContextManager[Rig]:
    """Return the rig of a room, to be entered."""
    rig: Callable[[Options], AbstractContextManager[Rig]]
    rig = _load(RIGS.get(room, "harness.runner:no_rig"))
    return rig(options)


def _load(name: str) -> Any:  # noqa: ANN401 - a function of one of several shapes
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"bench.{module}"), attribute)


def select(names: Sequence[str]) -> list[Bench]:
    """Return the benches of these names or rooms, in the registry's order; none: the default set.

    ValueError for an unknown name.
    """
    if not names:
        return [each for each in BENCHES if each.is_default]
    known = {each.name for each in BENCHES} | {each.room for each in BENCHES}
    for name in names:
        if name not in known:
            message = f"no bench or room {name}; `python -m bench --list` shows all of them"
            raise ValueError(message)
    return [each for each in BENCHES if each.name in names or each.room in names]


_overhead: Final = partial(Bench, room="overhead", base="bare driver", is_default=True)
_compute: Final = partial(Bench, room="compute", base="without limits", is_default=True)
_node: Final = partial(Bench, room="node", needs=(Need.NODE,), is_default=True)
_scheduler: Final = partial(Bench, room="scheduler", needs=(Need.CONTROL_PLANE,))
_placement: Final = partial(Bench, room="placement", needs=(Need.NUMPY,))
_mig: Final = partial(Bench, room="mig", needs=(Need.NUMPY,))
_mps: Final = partial(Bench, room="mps", base="time slicing", needs=(Need.ROOT,))
_micro: Final = partial(Bench, room="micro", needs=(Need.PYPERF,))
_gpu: Final = partial(Bench, room="gpu", needs=(Need.GPU,))

BENCHES: Final = (
    # ---- a program in a share
    _overhead("allocate", "calls", 5, "What does a share add to allocating and freeing memory?"),
    _overhead("launch", "calls", 4, "What does a share without a compute limit add to a launch?"),
    _overhead(
        "query",
        "calls",
        4,
        "What does a share add to cuMemGetInfo, and to a call that is not wrapped?",
    ),
    _overhead(
        "crowd",
        "calls",
        8,
        "What does a share add to allocations while eight processes make them at once?",
    ),
    _overhead("init", "starts", 15, "What does a share add to loading the driver and cuInit?"),
    _overhead(
        "start",
        "starts",
        3,
        "What does a share add to a program that never touches a GPU?",
        base="bare program",
    ),
    _overhead("run", "starts", 8, "What does `allot run` add to a command?", base="`true` alone"),
    _overhead(
        "tools",
        "tools",
        90,
        "How much time do `allot run`, `ps`, `top` and 300 new shares take?",
        base="`python -c pass`",
    ),
    _overhead(
        "scrape",
        "scrape",
        20,
        "What does a scrape of the agent's metrics cost with 60 shares on 16 GPUs?",
        base="",
    ),
    _overhead(
        "storm",
        "limits",
        5,
        "Is a memory limit ever exceeded while many threads allocate and free?",
    ),
    _overhead("fill", "limits", 2, "How much of a memory limit is usable?"),
    _overhead(
        "kill",
        "limits",
        20,
        "How soon is a share's usage right after its processes were killed?",
    ),
    _overhead(
        "kill-restart",
        "restarts",
        10,
        "Does a killed and restarted program take memory of its neighbour?",
    ),
    _overhead(
        "forged-use",
        "forgery",
        25,
        "Is a program that forges its ledger ever shown as enforced?",
    ),
    _overhead("size", "limits", 5, "How much disk space does a share take?"),
    # ---- shares of GPU time
    _compute(
        "limited-launch",
        "launches",
        30,
        "What does a compute limit add to a launch on an idle GPU?",
        base="past the shim",
    ),
    _compute(
        "ceilings",
        "ceilings",
        150,
        "Does a ceiling hold, whatever the kernels are and however they are launched?",
    ),
    _compute(
        "splits",
        "splits",
        120,
        "Does each share get its part when all want more, and is any work lost?",
    ),
    _compute(
        "long-kernels",
        "long_kernels",
        20,
        "Do limits hold for kernels that are much longer than a lease?",
    ),
    _compute(
        "gaps",
        "gaps",
        10,
        "What do programs get that wait for each result and leave the GPU idle between?",
    ),
    _compute(
        "compute-matrix",
        "matrix",
        1500,
        "Does a program that waits for its results keep its guarantee?",
        base="alone on a GPU",
        is_default=False,
    ),
    _compute(
        "borrowing", "borrowing", 25, "Is idle time of a share used by others and returned at once?"
    ),
    _compute("latency", "latency", 50, "Does a latency-critical service notice its neighbour?"),
    _compute(
        "oversubscription",
        "oversubscription",
        50,
        "Are two jobs that do not fit together as fast together as one after the other?",
        base="one after the other",
    ),
    _compute(
        "churn", "churn", 120, "Do running shares notice that others start and stop beside them?"
    ),
    _compute(
        "forged-turns",
        "forged_turns",
        130,
        "Do programs compute on while a neighbour forges the file of its turns?",
        base="without it",
        is_default=False,
    ),
    # ---- the node agent
    _node(
        "plugin-calls",
        "starts",
        180,
        "How long do Allocate and PreStartContainer take with 60 pods on the node?",
    ),
    _node(
        "many-pods",
        "starts",
        240,
        "How much longer do fifty pods take to start when each has a share?",
        base="pods without a GPU",
    ),
    _node(
        "preferred", "preferred", 15, "How long does GetPreferredAllocation take for 8 of 16 GPUs?"
    ),
    _node(
        "hang",
        "hang",
        120,
        "When are the other GPUs listed while one hangs in every call?",
        base="none hangs",
    ),
    _node(
        "footprint",
        "footprint",
        110,
        "How much memory and processor time does the agent take at rest?",
    ),
    _node(
        "config-change",
        "config_change",
        80,
        "How soon does the kubelet know a changed configuration?",
    ),
    _node(
        "slice-pods",
        "slices",
        100,
        "How long does a pod take to start on a MIG slice that is created for it?",
        base="a pod without a GPU",
    ),
    _node(
        "claims",
        "claims",
        90,
        "How long does a DRA driver prepare a claim, alone and among others?",
        base="NVIDIA's driver",
    ),
    _node(
        "pool",
        "pool",
        60,
        "How soon do ResourceSlices follow what happens on the node?",
    ),
    # ---- the scheduler
    _scheduler(
        "filter-latency",
        "filter",
        120,
        "How long do filter, prioritize and the choice of GPUs at bind take?",
        needs=(Need.NUMPY,),
    ),
    _scheduler(
        "preemption",
        "preemption",
        60,
        "How long does a preemption take, and how long does it block others?",
        needs=(Need.NUMPY,),
    ),
    _scheduler(
        "rate",
        "rate",
        1500,
        "How many pods are bound in a second, and what does each pod cost?",
        base="pods without GPUs, stock",
    ),
    _scheduler(
        "scale",
        "scale",
        90,
        "What does a pod cost as a cluster grows, and what breaks first?",
        needs=(Need.NUMPY,),
    ),
    _scheduler(
        "shards",
        "shards",
        120,
        "What do several schedulers, each for a part of the nodes, lose and gain?",
        base="one scheduler",
        needs=(Need.NUMPY,),
    ),
    _scheduler(
        "slow-bindings",
        "disruptions",
        90,
        "Is a GPU ever given twice while each binding takes 2 s?",
    ),
    _scheduler(
        "restart",
        "disruptions",
        60,
        "How soon are waiting pods bound after the scheduler restarts?",
    ),
    _scheduler(
        "failover",
        "disruptions",
        240,
        "How soon does the other replica answer after the leader is killed?",
    ),
    _scheduler(
        "startup",
        "startup",
        420,
        "How long from start to ready with 5,000 nodes and 30,000 pods, and how large?",
    ),
    _scheduler(
        "replay",
        "replay",
        900,
        "Does the real scheduler place a trace as `allot simulate` does?",
        base="allot simulate",
    ),
    # ---- the page, and the cluster in the terminal
    Bench(
        "page",
        "pages",
        90,
        "What does the page cost with 1,200 nodes of 8 GPUs?",
        room="web",
        needs=(Need.CHROMIUM,),
    ),
    Bench(
        "inspect",
        "terminal",
        45,
        "How long does `allot inspect` take with 1,200 nodes of 8 GPUs?",
        room="web",
    ),
    # ---- placement
    _placement("decisions", "decisions", 60, "How long do decisions take on a large cluster?"),
    _placement("policies", "policies", 180, "How full does each policy fill a cluster?"),
    _placement(
        "variants",
        "policies",
        600,
        "How full does it get where pods leave, memory counts, or the mix is known?",
    ),
    _placement(
        "replay-time", "replay_time", 25, "How long does `allot simulate` take for one replay?"
    ),
    # ---- MIG
    _mig(
        "slice-decisions",
        "cluster_decisions",
        120,
        "How long do decisions about slices take on a large cluster?",
    ),
    _mig(
        "mig-planner",
        "planner",
        360,
        "How many slices does the planner serve, beside simple rules and the optimum?",
        base="simple rules",
    ),
    _mig(
        "slice-start",
        "slice_start",
        20,
        "What does a pod's start wait for beside the driver where its slice is created?",
        base="with the driver's calls",
        needs=(),
    ),
    # ---- MPS
    _mps(
        "mps-throughput",
        "throughput",
        90,
        "How much more do two programs finish under MPS than under time slicing?",
    ),
    _mps("mps-restart", "restart", 30, "How soon is a killed MPS daemon replaced?"),
    # ---- small calls
    _micro("parse", "calls", 15, "How long does parsing an amount of memory take?"),
    _micro("read-request", "calls", 15, "How long does reading a pod's request for GPUs take?"),
    _micro("choose", "calls", 15, "How long does choosing a GPU of eight on one machine take?"),
    _micro(
        "choose-slice",
        "calls",
        15,
        "How long does choosing a place for a MIG slice on 8 GPUs take?",
    ),
    _micro("read-ledger", "calls", 15, "How long does reading a share's ledger take?"),
    # ---- a real GPU
    _gpu(
        "gpu-checks", "checks", 300, "Do limits and views hold under the real driver and PyTorch?"
    ),
    _gpu(
        "gpu-overhead",
        "overhead",
        90,
        "What does a share cost beside the bare driver of a real GPU?",
        base="bare driver",
    ),
    _gpu("gpu-turns", "turns", 600, "Do shares of a real GPU's time hold?", base="without limits"),
    _gpu(
        "gpu-mps",
        "mps_shares",
        180,
        "Do MPS shares hold on a real GPU, and what do they bring?",
        base="time slicing",
    ),
    _gpu(
        "gpu-mig",
        "mig_slice",
        120,
        "Is a MIG slice created on a real GPU for a command, and removed?",
    ),
)
