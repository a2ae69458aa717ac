# SPDX-License-Identifier: Apache-2.0
"""MIG of a simulated GPU by hand, as nvidia-smi does it; configurations as NVIDIA ships them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.model.mig import MigGpu

T = TypeVar("T")

# In the shapes that NVIDIA ships for its models.
CONFIGURATIONS = """
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-enabled:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  all-1g:
    - device-filter: ["0x233010DE", "0x20B210DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb": 7}
    - device-filter: "0x20B710DE"
      devices: all
      mig-enabled: true
      mig-devices: {"1g.6gb": 4}
  all-1g.me:
    - device-filter: ["0x233010DE", "0x20B210DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb+me": 1}
  all-1g.20gb:
    - devices: all
      mig-enabled: true
      mig-devices: {"1g.20gb": 4}
  all-3g.40gb:
    - devices: all
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
  all-7g.80gb:
    - devices: all
      mig-enabled: true
      mig-devices: {"7g.80gb": 1}
  all-balanced:
    - device-filter: ["0x233010DE", "0x20B210DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    - device-filter: "0x20B710DE"
      devices: all
      mig-enabled: true
      mig-devices: {"1g.6gb": 2, "2g.12gb": 1}
  custom:
    - devices: [0, 1]
      mig-enabled: false
    - devices: [2]
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
    - devices: [3]
      mig-enabled: true
      mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
  impossible:
    - devices: all
      mig-enabled: true
      mig-devices: {"3g.40gb": 2, "1g.10gb": 1}
"""


def on_first(machine: Path, question: Callable[[MigDevice], T]) -> T:
    """Asks the first GPU of a machine."""
    with MigMachine(machine) as gpus:
        answer = gpus.ask(question, patience_s=30)[0][1]
    if isinstance(answer, Exception):
        raise answer
    return answer


def look(machine: Path) -> MigGpu:
    return on_first(machine, lambda device: device.driver.look())


def made_by_hand(machine: Path, name: str, start: int) -> str:
    """Makes an instance as nvidia-smi does, and returns its UUID."""

    def make(device: MigDevice) -> str:
        gpu = device.driver.look()
        if not gpu.is_enabled:
            device.driver.set_mode(is_on=True)
            gpu = device.driver.look()
        profile = next(each for each in gpu.profiles if each.name == name)
        made = device.driver.create_gpu_instance(profile, start)
        return device.driver.create_compute_instance(made, profile).uuid

    return on_first(machine, make)
