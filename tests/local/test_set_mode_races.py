# SPDX-License-Identifier: Apache-2.0
"""`allot devices set-mode` beside shares that come at the last moment, and what others left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from modes_machine import Machine
from patience import wait_until

from allotment.devices.simulated import SimulatedMachine
from allotment.model.errors import BusyError, DoesNotFitError
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.modes.mig.journal import Journal
from allotment.shares import drain, lifecycle, recovery
from allotment.shares.drain import ModeChange
from allotment.shares.mig import allocate
from allotment.shares.mode_policy import mode_policy_of, modes_on
from allotment.shares.placing import ShareOrder

Allot = Any  # tests/conftest.py: CommandLine


@pytest.fixture
def machine(allot: Allot) -> Iterator[Machine]:
    with Machine(allot) as made:
        yield made


# ---- a pod that was placed before ----------------------------------------------------------------


def _placed_pod(machine: Machine) -> None:
    """Make the soft share of a pod for which a scheduler chose the GPU before anything was said."""
    owner = Owner(
        uid=PodUid("1"),
        namespace="default",
        pod="pod-1",
        container="main",
        kind=ContainerKind.REGULAR,
        resource="allotment.dev/gpu",
    )
    order = ShareOrder(
        Request(parse_memory("1Gi")),
        Injection.ENVIRONMENT,
        machine=machine.file,
        owner=owner,
        devices=(machine.uuids[0],),
    )
    lifecycle.create(machine.folder, order, SimulatedMachine(machine.file).devices())


def _end_pod(machine: Machine) -> None:
    [found] = recovery.list_shares(machine.folder)
    lifecycle.destroy(machine.folder, found, force=True)


def _change(machine: Machine, *modes: str) -> ModeChange:
    [device, _] = SimulatedMachine(machine.file).devices()
    return ModeChange(folder=machine.folder, device=device, machine=machine.file, modes=modes)


def _modes(machine: Machine) -> frozenset[str]:
    return modes_on(recovery.list_shares(machine.folder), machine.uuids[0])


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Have something happen at a step, the first time that it is reached."""

    def at(name: str, what: Callable[[], None]) -> None:
        waiting = [what]

        def step(reached: str) -> None:
            if reached == name and waiting:
                waiting.pop()()

        monkeypatch.setattr(drain, "failpoint", step)

    return at


AtStep = Callable[[str, Callable[[], None]], None]


def test_one_that_comes_at_the_last_moment_has_the_gpu_to_itself(
    machine: Machine, at_step: AtStep
) -> None:
    at_step("modes.drained", lambda: _placed_pod(machine))
    with pytest.raises(BusyError, match="in use by share default/pod-1/main of mode soft"):
        _change(machine, "mig").carry_out(patience_s=None)
    assert machine.mig() == (False, 0)
    assert _modes(machine) == {"soft"}
    assert mode_policy_of(machine.folder, machine.uuids[0]) is None
    assert not Journal(machine.folder.mig / machine.uuids[0]).is_switched


def test_one_that_comes_at_the_last_moment_is_waited_for_as_well(
    machine: Machine, at_step: AtStep
) -> None:
    at_step("modes.drained", lambda: _placed_pod(machine))
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        assert machine.mig() == (False, 0)
        _end_pod(machine)

    change = _change(machine, "mig")
    change.tell = tell
    assert change.carry_out(patience_s=120).endswith("MIG is switched on")
    assert told == ["waiting for share default/pod-1/main of mode soft"]
    assert machine.mig() == (True, 0)


def test_one_that_comes_after_that_is_refused(machine: Machine, at_step: AtStep) -> None:
    refused: list[str] = []

    def come() -> None:
        with pytest.raises(DoesNotFitError) as caught:
            _placed_pod(machine)
        refused.append(str(caught.value))

    at_step("modes.claimed", come)
    _change(machine, "mig").carry_out(patience_s=None)
    assert len(refused) == 1
    assert _modes(machine) == frozenset()
    assert machine.mig() == (True, 0)


@pytest.mark.parametrize("modes", ["mig", "soft", "soft,mig", "default"])
def test_a_claim_whose_maker_died_is_in_nobodys_way(machine: Machine, modes: str) -> None:
    done = machine.allot(*machine.words("mig"), ALLOTMENT_KILL_AT="modes.claimed")
    assert done.returncode == -signal.SIGKILL
    assert Journal(machine.folder.mig / machine.uuids[0]).is_switched
    again = machine.set(modes)
    assert again.returncode == 0, again.stderr
    assert machine.mig() == (modes == "mig", 0)
    assert Journal(machine.folder.mig / machine.uuids[0]).is_switched == (modes == "mig")
    right = ("--mig", "1g.10gb") if modes == "mig" else ("--memory", "1Gi")
    assert machine.run(*right).returncode == 0


# ---- other GPUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("patience_s", [None, 1.0])
def test_what_is_left_on_another_gpu_is_not_waited_for(
    machine: Machine, patience_s: float | None
) -> None:
    """Each driver may take its time, and is to be waited for by who wants something of it."""
    left = machine.share("--mig", "1g.10gb", gpu=1)
    os.killpg(left.pid, signal.SIGKILL)
    left.wait(timeout=30)

    def is_in_need() -> bool:
        with machine.folder.locked():
            recovery.recover(machine.folder)
        return machine.uuids[1] in allocate.in_need(machine.folder)

    wait_until(is_in_need, "its program lives on")
    _change(machine, "soft").carry_out(patience_s=patience_s)
    assert machine.mig(1) == (True, 1), "nobody has asked it anything"


def test_what_is_left_on_the_gpu_itself_is_removed(machine: Machine) -> None:
    left = machine.share("--mig", "1g.10gb")
    os.killpg(left.pid, signal.SIGKILL)
    left.wait(timeout=30)
    _change(machine, "soft").carry_out(patience_s=60)
    assert machine.mig() == (False, 0)
