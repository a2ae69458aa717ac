# SPDX-License-Identifier: Apache-2.0
"""One GPU's MIG as its driver tells and makes it, through nvidia-ml-py.

    gpu = GpuMig(nvml, uuid)
    gpu.look()                              # profiles, starts, instances: what `model.mig` names
    made = gpu.create_gpu_instance(profile, start)
    gpu.create_compute_instance(made, profile)

Every call may block: making takes tenths of a second, removing up to seconds, and a driver may hang
for ever. So they belong into a thread of the GPU's own (`watching.Asker`), and one GPU never waits
for another. Nothing is remembered here: what holds after a crash is the journal of `modes.mig`.

Facts of NVML's MIG interface that decide how it is called: nvml.h, section "Multi Instance GPU
Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

from allotment.devices.mig_names import profile_name
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    PrerequisiteError,
    UsageError,
)
from allotment.model.mig import MigGpu, MigInstance, MigProfile

__all__ = [
    "GpuMig",
    "MadeCompute",
    "MigDriver",
    "MigView",
    "mig_devices",
    "mig_view",
    "read_mig",
]

Handle = Any  # nvidia-ml-py's pointer to a device, a GPU instance or a compute instance

_MIB: Final = 1 << 20
_MOST_INSTANCES: Final = 32
"""Room for every list that NVML fills: it writes as many as there are, whatever fits."""
_KINDS: Final = 32
"""Kinds of profiles to ask for. NVML has 18 (R580): a newer driver's are found as well."""
_SHARED_ENGINES: Final = 0

# What is behind the memory in a profile's name, by NVML_GPU_INSTANCE_PROFILE_*.
_ATTRIBUTES: Final[Mapping[int, str]] = {
    0x7: "+me",
    0x8: "+me",
    0xA: "+gfx",
    0xB: "+gfx",
    0xC: "+gfx",
    0xD: "-me",
    0xE: "-me",
    0xF: "+me.all",
    0x10: "+me.all",
    0x11: "+gfx",
}
_MEDIA: Final = frozenset({"+me", "+me.all"})

_SHOWN: Final = 4


class MadeCompute(NamedTuple):
    """A compute instance that has just been made, and its MIG device's UUID."""

    number: int
    uuid: str


class MigView(NamedTuple):
    """What a GPU is cut into, at one moment."""

    gpu: MigGpu
    users: Mapping[int, tuple[int, ...]]
    """The processes in each GPU instance, by its id."""


class MigDriver(Protocol):
    """What one GPU's driver does for MIG.

    Every method raises `AllotError`: `BusyError` for what is in use, `DoesNotFitError` where the
    slots are taken, `NotFoundError` for what is not there, `PrerequisiteError` without the right.
    """

    @property
    def uuid(self) -> str:
        """The whole GPU's."""
        ...

    def look(self) -> MigGpu:
        """Return what there is and could be. Raises `UsageError` for a GPU without MIG."""
        ...

    def create_gpu_instance(self, profile: MigProfile, start: int) -> int:
        """Make a GPU instance at a start, and return its id. Where it raises, nothing was made."""
        ...

    def create_compute_instance(self, gpu_instance: int, profile: MigProfile) -> MadeCompute:
        """Make the compute instance that takes all of a GPU instance."""
        ...

    def destroy_compute_instances(self, gpu_instance: int) -> None:
        """Remove all compute instances of a GPU instance, which nobody may be using."""
        ...

    def destroy_gpu_instance(self, gpu_instance: int) -> None:
        """Remove a GPU instance that has no compute instance."""
        ...

    def users(self, gpu_instance: int) -> tuple[int, ...]:
        """Return the process ids that the driver knows to use a GPU instance, ascending."""
        ...

    def processes(self) -> tuple[int, ...]:
        """Return the process ids that the driver knows to use any of the GPU, ascending."""
        ...

    def set_mode(self, *, is_on: bool) -> bool:
        """Switch MIG on or off; return whether that is in force, or waits for the GPU's reset.

        Raises `BusyError` where any process uses the GPU.
        """
        ...


class GpuMig:
    """A `MigDriver` on a GPU that NVML has, while NVML is initialised."""

    __slots__ = ("_nvml", "_uuid")

    def __init__(self, nvml: ModuleType, uuid: str) -> None:
        """Name the GPU; nothing is asked yet."""
        self._nvml = nvml
        self._uuid = uuid

    @property
    def uuid(self) -> str:
        """The whole GPU's."""
        return self._uuid

    def look(self) -> MigGpu:
        """Return what there is and could be. Raises `UsageError` for a GPU without MIG."""
        found = self.look_if_any()
        if found is None:
            raise UsageError(f"GPU {self._uuid} has no MIG")
        return found

    def look_if_any(self) -> MigGpu | None:
        """Return what there is and could be; None: the GPU has no MIG."""
        with self._told("tell of its MIG instances"):
            return read_mig(self._nvml, self._gpu(), self._uuid)

    def create_gpu_instance(self, profile: MigProfile, start: int) -> int:
        """Make a GPU instance at a start, and return its id."""
        nvml = self._nvml
        with self._told(f"make {profile.name} at slot {start}"):
            place = nvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
            made = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                self._gpu(), profile.number, ctypes.byref(place)
            )
            try:
                return int(nvml.nvmlGpuInstanceGetInfo(made).id)
            except nvml.NVMLError:
                # Whoever hears of a failure takes it that nothing was made.
                nvml.nvmlGpuInstanceDestroy(made)
                raise

    def create_compute_instance(self, gpu_instance: int, profile: MigProfile) -> MadeCompute:
        """Make the compute instance that takes all of a GPU instance.

        Its profile is the one with as many slices. Not the highest that NVML names: on an A100 it
        names one for a 7g (`7_SLICE_NVL`) that cannot be made there.
        """
        nvml = self._nvml
        with self._told(
            f"make the compute instance of {profile.name} (GPU instance {gpu_instance})"
        ):
            inside = nvml.nvmlDeviceGetGpuInstanceById(self._gpu(), gpu_instance)
            chosen = next(
                (each for each in _compute_profiles(nvml, inside) if each.slices == profile.slices),
                None,
            )
            if chosen is None:
                raise DoesNotFitError(
                    f"GPU {self._uuid}: its driver has no compute instance of {profile.slices}"
                    f" slices for {profile.name}",
                    hint="another driver version may have it",
                )
            made = nvml.nvmlGpuInstanceCreateComputeInstance(inside, chosen.number)
            info = nvml.nvmlComputeInstanceGetInfo(made)
            return MadeCompute(int(info.id), str(nvml.nvmlDeviceGetUUID(info.device)))

    def destroy_compute_instances(self, gpu_instance: int) -> None:
        """Remove all compute instances of a GPU instance, which nobody may be using."""
        nvml = self._nvml
        with self._told(f"remove the compute instance of GPU instance {gpu_instance}"):
            inside = nvml.nvmlDeviceGetGpuInstanceById(self._gpu(), gpu_instance)
            for compute in _compute_instances(nvml, inside):
                nvml.nvmlComputeInstanceDestroy(compute)

    def destroy_gpu_instance(self, gpu_instance: int) -> None:
        """Remove a GPU instance that has no compute instance."""
        nvml = self._nvml
        with self._told(f"remove GPU instance {gpu_instance}"):
            nvml.nvmlGpuInstanceDestroy(
                nvml.nvmlDeviceGetGpuInstanceById(self._gpu(), gpu_instance)
            )

    def users(self, gpu_instance: int) -> tuple[int, ...]:
        """Return the process ids that the driver knows to use a GPU instance, ascending."""
        nvml = self._nvml
        with self._told(f"tell who uses GPU instance {gpu_instance}"):
            return _users(nvml, self._gpu(), gpu_instance)

    def processes(self) -> tuple[int, ...]:
        """Return the process ids that the driver knows to use any of the GPU, ascending."""
        with self._told("tell who uses it"):
            return _processes(self._nvml, self._gpu())

    def set_mode(self, *, is_on: bool) -> bool:
        """Switch MIG on or off; return whether that is in force, or waits for the GPU's reset.

        Ampere's GPUs take the new mode when they are reset, Hopper's and later ones at once; either
        ends the programs on it, so a GPU that is in use is refused before the driver is asked.
        """
        nvml = self._nvml
        wanted = nvml.NVML_DEVICE_MIG_ENABLE if is_on else nvml.NVML_DEVICE_MIG_DISABLE
        with self._told(f"switch MIG {'on' if is_on else 'off'}"):
            handle = self._gpu()
            if using := _processes(nvml, handle):
                raise BusyError(
                    f"GPU {self._uuid} is in use by {_listed(using)}: its MIG mode stays",
                    hint="end these programs first",
                )
            nvml.nvmlDeviceSetMigMode(handle, wanted)
            current, _ = nvml.nvmlDeviceGetMigMode(self._gpu())
            return bool(current == wanted)

    def _gpu(self) -> Handle:
        # Asked for anew each time: a change of mode makes another device of it, with another minor.
        return self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Turn NVML's error into one of ours, which says what was not done and to which GPU."""
        nvml = self._nvml
        try:
            yield
        except nvml.NVMLError as error:
            raise _explained(nvml, error, f"GPU {self._uuid}: its driver does not {doing}") from (
                error
            )


def _explained(nvml: ModuleType, error: Exception, what: str) -> AllotError:
    message = f"{what}: {error}"
    match getattr(error, "value", None):
        case nvml.NVML_ERROR_IN_USE:
            return BusyError(
                message, hint="end the programs that use it: `allot mig plan` names them"
            )
        case nvml.NVML_ERROR_INSUFFICIENT_RESOURCES:
            return DoesNotFitError(message, hint="its slots are taken; see `allot devices`")
        case nvml.NVML_ERROR_NOT_FOUND:
            return NotFoundError(message, hint="somebody else has removed it; see `allot devices`")
        case nvml.NVML_ERROR_NO_PERMISSION:
            return PrerequisiteError(message, hint="MIG instances are root's to see and change")
        case _:
            return AllotError(message, hint="see the kernel's log (dmesg) and `allot doctor`")


# ---- reading -------------------------------------------------------------------------------------


def read_mig(nvml: ModuleType, handle: Handle, uuid: str) -> MigGpu | None:
    """Ask a GPU for its mode, profiles and instances; None: it has no MIG.

    While MIG is off an old driver (R535 and before) tells no profiles. Raises nvidia-ml-py's
    errors.
    """
    mode = _had(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None:
        return None
    is_enabled, is_pending = (each == nvml.NVML_DEVICE_MIG_ENABLE for each in mode)
    profiles = tuple(_profiles(nvml, handle))
    return MigGpu(
        uuid=uuid,
        is_enabled=is_enabled,
        is_pending=is_pending,
        profiles=profiles,
        instances=tuple(
            sorted(_instances(nvml, handle, profiles), key=lambda instance: instance.start)
        )
        if is_enabled
        else (),
    )


def mig_view(nvml: ModuleType, handle: Handle) -> MigView | None:
    """Ask a GPU what it is cut into and who uses that; None: it has no MIG."""
    gpu = read_mig(nvml, handle, str(nvml.nvmlDeviceGetUUID(handle)))
    if gpu is None:
        return None
    users = {}
    for each in gpu.instances:
        with suppress(nvml.NVMLError_NotFound):
            users[each.gpu_instance] = _users(nvml, handle, each.gpu_instance)
    return MigView(gpu, users)


def mig_devices(nvml: ModuleType, handle: Handle) -> Iterator[tuple[MigProfile, Handle]]:
    """Yield each MIG device of a GPU, as NVML's handle of it, with its GPU instance's profile.

    A GPU instance that others have cut into several compute instances has several.
    """
    for profile in _profiles(nvml, handle):
        for inside in _listed_handles(
            nvml, nvml.c_nvmlGpuInstance_t, nvml.nvmlDeviceGetGpuInstances, handle, profile.number
        ):
            for compute in _compute_instances(nvml, inside):
                yield profile, nvml.nvmlComputeInstanceGetInfo(compute).device


def _profiles(nvml: ModuleType, handle: Handle) -> Iterator[MigProfile]:
    """Yield all profiles, in NVML's order of kinds.

    All kinds are asked for: which of them a GPU has is not otherwise told.
    """
    total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    for kind in range(_KINDS):
        # Its first version has all that is wanted, from the first driver with MIG (R450) on.
        info = _had(nvml, nvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, kind, 1)
        if info is None:
            continue
        places = _places(nvml, handle, info.id)
        if not places:
            continue
        attributes = _ATTRIBUTES.get(kind, "")
        yield MigProfile(
            name=profile_name(info.sliceCount, info.memorySizeMB, total_bytes, attributes),
            number=int(info.id),
            slices=int(info.sliceCount),
            memory_bytes=int(info.memorySizeMB) * _MIB,
            size=places[0][1],
            starts=tuple(sorted(start for start, _ in places)),
            most=int(info.instanceCount),
            multiprocessors=int(info.multiprocessorCount),
            has_media=attributes in _MEDIA,
        )


def _places(nvml: ModuleType, handle: Handle, profile: int) -> list[tuple[int, int]]:
    """Return the starts and sizes that a profile may have, whatever is taken."""
    places = (nvml.c_nvmlGpuInstancePlacement_t * _MOST_INSTANCES)()
    count = ctypes.c_uint(_MOST_INSTANCES)
    told = _had(
        nvml,
        nvml.nvmlDeviceGetGpuInstancePossiblePlacements,
        handle,
        profile,
        places,
        ctypes.byref(count),
    )
    if told is None:
        return []
    return [(int(place.start), int(place.size)) for place in places[: count.value]]


def _instances(
    nvml: ModuleType, handle: Handle, profiles: tuple[MigProfile, ...]
) -> Iterator[MigInstance]:
    for profile in profiles:
        for inside in _listed_handles(
            nvml, nvml.c_nvmlGpuInstance_t, nvml.nvmlDeviceGetGpuInstances, handle, profile.number
        ):
            try:
                yield _instance(nvml, inside)
            except nvml.NVMLError_NotFound:
                continue  # somebody removed it between the list and the question


def _instance(nvml: ModuleType, inside: Handle) -> MigInstance:
    info = nvml.nvmlGpuInstanceGetInfo(inside)
    compute_instance, uuid = None, ""
    for compute in _compute_instances(nvml, inside)[:1]:
        # The way to its UUID that is fast: a search through the MIG devices takes seconds.
        made = nvml.nvmlComputeInstanceGetInfo(compute)
        compute_instance, uuid = int(made.id), str(nvml.nvmlDeviceGetUUID(made.device))
    return MigInstance(
        profile=int(info.profileId),
        start=int(info.placement.start),
        size=int(info.placement.size),
        gpu_instance=int(info.id),
        compute_instance=compute_instance,
        uuid=uuid,
    )


class _ComputeProfile(NamedTuple):
    number: int
    slices: int


def _compute_profiles(nvml: ModuleType, inside: Handle) -> Iterator[_ComputeProfile]:
    for kind in range(_KINDS):
        info = _had(
            nvml,
            nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo,
            inside,
            kind,
            _SHARED_ENGINES,
            1,
        )
        if info is not None:
            yield _ComputeProfile(int(info.id), int(info.sliceCount))


def _compute_instances(nvml: ModuleType, inside: Handle) -> list[Handle]:
    return [
        handle
        for profile in _compute_profiles(nvml, inside)
        for handle in _listed_handles(
            nvml,
            nvml.c_nvmlComputeInstance_t,
            nvml.nvmlGpuInstanceGetComputeInstances,
            inside,
            profile.number,
        )
    ]


def _listed_handles(
    nvml: ModuleType,
    kind: Handle,
    call: Callable[..., Any],
    parent: Handle,
    profile: int,
) -> list[Handle]:
    """Let NVML list the instances of one profile. The array is ours: it outlives what is in it."""
    found = (kind * _MOST_INSTANCES)()
    count = ctypes.c_uint(_MOST_INSTANCES)
    if _had(nvml, call, parent, profile, found, ctypes.byref(count)) is None:
        return []
    return list(found[: count.value])


def _users(nvml: ModuleType, handle: Handle, gpu_instance: int) -> tuple[int, ...]:
    inside = nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)
    devices = [
        nvml.nvmlComputeInstanceGetInfo(each).device for each in _compute_instances(nvml, inside)
    ]
    return tuple(sorted({pid for each in devices for pid in _processes(nvml, each)}))


def _processes(nvml: ModuleType, handle: Handle) -> tuple[int, ...]:
    """Return who uses a device, whole or MIG; nobody where the driver does not tell."""
    calls = (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
    )
    return tuple(
        sorted({int(process.pid) for call in calls for process in _had(nvml, call, handle) or ()})
    )


def _had(nvml: ModuleType, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """Return an answer, or None where device or driver have no such thing."""
    try:
        return call(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_InvalidArgument,
    ):
        return None


def _listed(pids: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, pids[:_SHOWN]))
    more = f" and {len(pids) - _SHOWN} more" if len(pids) > _SHOWN else ""
    return f"process{'es' if len(pids) > 1 else ''} {shown}{more}"
