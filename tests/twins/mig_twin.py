# SPDX-License-Identifier: Apache-2.0
"""A GPU with MIG in memory: what a driver does about instances, and nothing else.

It knows whose each instance is, which no driver does: `touched` tells when one party removed the
other's. It can be made to fail, and to end its caller (`Crash`) before or after any of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from allotment.devices.mig import MadeCompute
from allotment.model.errors import AllotError, BusyError, DoesNotFitError, NotFoundError
from allotment.model.mig import MigGpu, MigInstance, MigProfile

_GIB = 1 << 30


def _profile(name: str, number: int, slots: tuple[tuple[int, ...], int], most: int) -> MigProfile:
    slices = int(name[0])
    starts, size = slots
    return MigProfile(
        name=name,
        number=number,
        slices=slices,
        memory_bytes=int(name[3:].partition("gb")[0]) * _GIB,
        size=size,
        starts=starts,
        most=most,
        multiprocessors=14 * slices,
        has_media="+me" in name,
    )


A100 = (
    _profile("1g.5gb", 19, ((0, 1, 2, 3, 4, 5, 6), 1), 7),
    _profile("1g.5gb+me", 20, ((0, 1, 2, 3, 4, 5, 6), 1), 1),
    _profile("1g.10gb", 15, ((0, 2, 4, 6), 2), 4),
    _profile("2g.10gb", 14, ((0, 2, 4), 2), 3),
    _profile("3g.20gb", 9, ((0, 4), 4), 2),
    _profile("4g.20gb", 5, ((0,), 4), 1),
    _profile("7g.40gb", 0, ((0,), 8), 1),
)


class Crash(BaseException):
    """The process has ended here: nothing below may catch it."""


@dataclass(slots=True)
class Twin:
    """An instance, and whose it is."""

    profile: MigProfile
    start: int
    owner: str
    compute: int | None = None
    uuid: str = ""
    users: set[int] = field(default_factory=set)


class MigTwin:
    """A `MigDriver` in memory."""

    def __init__(self, profiles: tuple[MigProfile, ...] = A100, *, uuid: str = "GPU-0") -> None:
        self.uuid = uuid
        self.profiles = profiles
        self.is_enabled = True
        self.there: dict[int, Twin] = {}
        self.owner = "ours"
        """Who is calling."""
        self.touched: list[Twin] = []
        """What one party removed of another."""
        self.steps_left: int | None = None
        """Before or after how many steps the caller ends; None: it does not."""
        self.failing: set[str] = set()
        """Steps that fail."""
        self._uuids = count(1)

    def look(self) -> MigGpu:
        with self._step("look"):
            return MigGpu(
                uuid=self.uuid,
                is_enabled=self.is_enabled,
                is_pending=self.is_enabled,
                profiles=self.profiles,
                instances=tuple(
                    MigInstance(
                        profile=each.profile.number,
                        start=each.start,
                        size=each.profile.size,
                        gpu_instance=number,
                        compute_instance=each.compute,
                        uuid=each.uuid,
                    )
                    for number, each in sorted(self.there.items())
                ),
            )

    def create_gpu_instance(self, profile: MigProfile, start: int) -> int:
        with self._step("create_gpu_instance"):
            assert start in profile.starts
            wanted = set(range(start, start + profile.size))
            for each in tuple(self.there.values()):
                if wanted & set(range(each.start, each.start + each.profile.size)):
                    raise DoesNotFitError("insufficient resources")
            same = sum(each.profile is profile for each in tuple(self.there.values()))
            if same >= profile.most:
                raise DoesNotFitError("insufficient resources")
            # As an A100 numbers them: by place, so that numbers come back.
            number = start if profile.size == 1 else 16 * profile.size + start
            self.there[number] = Twin(profile, start, self.owner)
            return number

    def create_compute_instance(self, gpu_instance: int, profile: MigProfile) -> MadeCompute:
        with self._step("create_compute_instance"):
            assert profile.slices
            twin = self._twin(gpu_instance)
            twin.compute, twin.uuid = 0, f"MIG-{next(self._uuids)}"
            return MadeCompute(0, twin.uuid)

    def destroy_compute_instances(self, gpu_instance: int) -> None:
        with self._step("destroy_compute_instances"):
            twin = self._twin(gpu_instance)
            if twin.users:
                raise BusyError("in use")
            self._note(twin)
            twin.compute, twin.uuid = None, ""

    def destroy_gpu_instance(self, gpu_instance: int) -> None:
        with self._step("destroy_gpu_instance"):
            twin = self._twin(gpu_instance)
            if twin.compute is not None:
                raise BusyError("in use")
            self._note(twin)
            del self.there[gpu_instance]

    def users(self, gpu_instance: int) -> tuple[int, ...]:
        with self._step("users"):
            return tuple(sorted(self._twin(gpu_instance).users))

    def processes(self) -> tuple[int, ...]:
        with self._step("processes"):
            return tuple(sorted(set().union(*(each.users for each in self.there.values()))))

    def set_mode(self, *, is_on: bool) -> bool:
        with self._step("set_mode"):
            if any(each.users for each in self.there.values()):
                raise BusyError("in use")
            self.is_enabled = is_on
            self.there.clear()
            return True

    @contextmanager
    def foreign(self) -> Iterator[None]:
        """Others call, whom nothing ends."""
        before, self.owner = self.owner, "foreign"
        steps, self.steps_left = self.steps_left, None
        failing, self.failing = self.failing, set()
        try:
            yield
        finally:
            self.owner, self.steps_left, self.failing = before, steps, failing

    def _twin(self, gpu_instance: int) -> Twin:
        try:
            return self.there[gpu_instance]
        except KeyError:
            raise NotFoundError(f"no GPU instance {gpu_instance}") from None

    def _note(self, twin: Twin) -> None:
        if twin.owner != self.owner:
            self.touched.append(twin)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._count_down()
        if name in self.failing:
            raise AllotError(f"{name} was made to fail")
        yield
        self._count_down()

    def _count_down(self) -> None:
        if self.steps_left is None:
            return
        self.steps_left -= 1
        if self.steps_left < 0:
            self.steps_left = None
            raise Crash
