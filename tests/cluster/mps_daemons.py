# SPDX-License-Identifier: Apache-2.0
"""What tests of MPS on a node have in common: a program, replicas for it, and the GPUs' daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stories import NodeAgent
from testbed.waiting import wait_until

from allotment.devices.compute_modes import GpuSettings
from allotment.devices.simulated import machine_path
from allotment.modes.mps.state import DaemonState, MpsPlace, MpsStatus

HALVES: Final = """\
version: v1
sharing:
  mps:
    resources:
      - name: nvidia.com/gpu
        replicas: 2
"""
CLIENT: Final = (Path(__file__).parents[1] / "local" / "mps_client.py").read_text("utf-8")
RPC_FAILURE: Final = 806
HALF_OF_AN_A100: Final = 54
"""Multiprocessors."""


class Gpus:
    """The daemons of the node's GPUs, as seen from here."""

    def __init__(self, node: NodeAgent) -> None:
        self.node = node
        self.uuids = node.gpus()

    def status(self, uuid: str) -> MpsStatus:
        """What is known of a GPU's daemon."""
        return MpsPlace(self.node.cluster.node.path(f"/run/allotment/mps/{uuid}")).status()

    def settings(self, uuid: str) -> GpuSettings:
        """A GPU as its administrator has it."""
        state = self.node.cluster.node.path("/run/allotment")
        return GpuSettings(uuid, machine=machine_path(state, self.node.simulated))

    def kill(self, uuid: str) -> None:
        """Kills a GPU's control daemon."""
        daemon = self.status(uuid).daemon
        assert daemon is not None
        self.node.cluster.node.run(["kill", "-KILL", str(daemon)])

    def wait_free(self) -> None:
        """Waits until no container has a share. A daemon stays 10 s longer, for who comes next."""
        wait_until(lambda: not self.node.shares(), "end of shares", explain=self._explain)

    def wait_stopped(self) -> None:
        """Waits until there is no daemon either: nothing is left of earlier tests."""
        self.wait_free()
        over = {DaemonState.STOPPED, DaemonState.FAILED}
        wait_until(
            lambda: all(self.status(uuid).state in over for uuid in self.uuids),
            "end of daemons",
            explain=self._explain,
        )

    def _explain(self) -> str:
        found = [f"{uuid}: {self.status(uuid)}" for uuid in self.uuids]
        return "\n".join([*found, self.node.explain()])
