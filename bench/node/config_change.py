# SPDX-License-Identifier: Apache-2.0
"""How soon the kubelet knows the number of GPUs after the configuration changed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Final

from stories import NVIDIA
from testbed.waiting import wait_until

from bench.harness.options import Options
from bench.harness.quantiles import quantile
from bench.harness.results import Result
from bench.node.rig import PLAIN, SOFT, NodeRig, two, watching

_SEED: Final = 7

_MAP: Final = "/api/v1/namespaces/allotment-system/configmaps"
_NAME: Final = "allotment-config"
_LABEL: Final = "nvidia.com/device-plugin.config"
_REPLICAS: Final = """\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: {count}
"""


def config_change(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Ask how soon the kubelet goes by another configuration."""
    count = 2 if rig.is_quick else 12
    cluster = rig.cluster
    api = cluster.api
    cluster.allow_agent()
    data = {
        "plain": PLAIN,
        "ten": _REPLICAS.format(count=10),
        "parts": SOFT,
        "edited": _REPLICAS.format(count=4),
    }
    api.post(
        _MAP,
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": _NAME, "namespace": "allotment-system"},
            "data": data,
        },
    )
    flags = ("--config-map", f"allotment-system/{_NAME}", "--default-config", "plain")

    def choose(name: str | None) -> None:
        api.patch(cluster.node_path, {"metadata": {"labels": {_LABEL: name}}})

    def edit(replicas: int) -> None:
        body = {"data": {"edited": _REPLICAS.format(count=replicas)}}
        api.patch(f"{_MAP}/{_NAME}", body)

    labelled, edited = _Changes(rig), _Changes(rig)
    try:
        with rig.agent(None, *flags, simulated="a100-40gb:8"):
            wait_until(lambda: rig.allocatable(NVIDIA) == 8, "8 GPUs", timeout_s=30)
            for number in range(count):
                is_ten = number % 2 == 0
                labelled.time(lambda: choose("ten" if is_ten else "plain"), 80 if is_ten else 8)  # noqa: B023
            choose("edited")
            wait_until(lambda: rig.allocatable(NVIDIA) == 32, "32 GPUs", timeout_s=30)
            for number in range(count):
                edited.time(lambda: edit(5 + number), 8 * (5 + number))  # noqa: B023
            choose(None)
    finally:
        api.delete(f"{_MAP}/{_NAME}")
        choose(None)
    for name, changes in (("the node's label", labelled), ("the ConfigMap", edited)):
        yield changes.finding(f"{name} changes, until the kubelet has the new number of GPUs", 2)


class _Changes:
    """Times from a change to the kubelet's own books and to the node's object."""

    def __init__(self, rig: NodeRig) -> None:
        self._ground = rig
        self._chance = random.Random(_SEED)  # noqa: S311 - no secret
        self.booked: list[float] = []
        self.shown: list[float] = []

    def time(self, change: Callable[[], None], amount: int) -> None:
        """Make a change, and wait for what it leads to."""
        rig = self._ground
        with (
            watching(lambda: rig.registered(NVIDIA)) as booked,
            watching(lambda: rig.allocatable(NVIDIA)) as shown,
        ):
            # The node's status is written in a rhythm; changes are not to follow it.
            time.sleep(0.3 + self._chance.random())
            began = time.monotonic()
            change()
            both = "both accounts of a new configuration"
            wait_until(lambda: amount in booked and amount in shown, both, timeout_s=30)
        self.booked.append(booked[amount] - began)
        self.shown.append(shown[amount] - began)
        rig.log(f"{amount}: {self.booked[-1]:.3f} s, in the node {self.shown[-1]:.3f} s")

    def finding(self, name: str, target: float) -> Result:
        """Return what was found."""
        return Result(
            topic="change",
            name=name,
            seen=f"{two(self.booked, 's')} (in the node's object {two(self.shown, 's')})",
            value=quantile(self.booked, 0.99),
            unit="s",
            target=target,
            samples=len(self.booked),
            method="from before the request to the API server until the number stands in the"
            f" kubelet's own checkpoint; p50 / p99 of {len(self.booked)}; the node's object follows"
            " with the kubelet's next status: each second in the testbed, each 10 s by default",
        )
