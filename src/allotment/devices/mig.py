# SPDX-License-Identifier: Apache-2.0
"""One GPU's MIG state and changes, through nvidia-ml-py.

    gpu = GpuMig(nvml, uuid)
    gpu.look()                              # profiles, starts, instances: values of `model.mig`
    made = gpu.create_gpu_instance(profile, start)
    gpu.create_compute_instance(made, profile)

Calls may block: creation takes tenths of a second, removal up to seconds, and a driver may hang. So
each GPU needs its own thread (`watching.Asker`). Nothing is remembered here: the journal of
`modes.mig` survives crashes. The calls follow nvml.h, section "Multi Instance GPU Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

from allotment.devices.geometries import profile_name
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    PrerequisiteError,
    UsageError,
)
from allotment.model.formats import format_pids
from allotment.model.mig import MigGpu, MigInstance, MigProfile

Handle = Any  # nvidia-ml-py's pointer to a device, a GPU instance or a compute instance

_MIB: Final = 1 << 20
_MOST_INSTANCES: Final = 32
"""Size of every list that NVML fills: it ignores the size and writes all entries."""
_KINDS: Final = 32
"""Number of profile kinds to query. NVML has 18 (R580); this leaves room for newer drivers."""
_SHARED_ENGINES: Final = 0

# Suffix after the memory in a profile's name, by NVML_GPU_INSTANCE_PROFILE_*.
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


class MadeCompute(NamedTuple):
    """A new compute instance, and its MIG device's UUID."""

    number: int
    uuid: str


class MigView(NamedTuple):
    """A GPU's MIG state at one moment."""

    gpu: MigGpu
    users: Mapping[int, tuple[int, ...]]
    """The processes in each GPU instance, by its id."""


class MigDriver(Protocol):
    """MIG operations of one GPU's driver.

    Every method raises `AllotError`: `BusyError` if in use, `DoesNotFitError` if slots are
    occupied, `NotFoundError` if missing, `PrerequisiteError` without permission.
    """

    @property
    def uuid(self) -> str: ...

    def look(self) -> MigGpu:
        """Existing and possible instances. Raises `UsageError` for a GPU without MIG."""
        ...

    def create_gpu_instance(self, profile: MigProfile, start: int) -> int:
        """Create a GPU instance at a start; return its id. After an error nothing was created."""
        ...

    def create_compute_instance(self, gpu_instance: int, profile: MigProfile) -> MadeCompute:
        """Create the compute instance that uses a whole GPU instance."""
        ...

    def destroy_compute_instances(self, gpu_instance: int) -> None:
        """Remove all compute instances of an unused GPU instance."""
        ...

    def destroy_gpu_instance(self, gpu_instance: int) -> None:
        """Remove a GPU instance without compute instances."""
        ...

    def users(self, gpu_instance: int) -> tuple[int, ...]:
        """Pids of a GPU instance's users that the driver knows, ascending."""
        ...

    def processes(self) -> tuple[int, ...]:
        """Pids of all the GPU's users that the driver knows, ascending."""
        ...

    def set_mode(self, *, is_on: bool) -> bool:
        """Switch MIG on or off; return whether it is in force, or waits for the GPU's reset.

        Raises `BusyError` if any process uses the GPU.
        """
        ...


class GpuMig:
    """A `MigDriver` on a GPU of NVML, while NVML is initialised."""

    __slots__ = ("_nvml", "_uuid")

    def __init__(self, nvml: ModuleType, uuid: str) -> None:
        self._nvml = nvml
        self._uuid = uuid

    @property
    def uuid(self) -> str:
        return self._uuid

    def look(self) -> MigGpu:
        gpu = self.look_if_any()
        if gpu is None:
            raise UsageError(f"GPU {self._uuid} has no MIG")
        return gpu

    def look_if_any(self) -> MigGpu | None:
        """None: the GPU has no MIG."""
        with self._explaining("list its MIG instances"):
            return read_mig(self._nvml, self._gpu(), self._uuid)

    def create_gpu_instance(self, profile: MigProfile, start: int) -> int:
        nvml = self._nvml
        with self._explaining(f"make {profile.name} at slot {start}"):
            place = nvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
            made = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                self._gpu(), profile.number, ctypes.byref(place)
            )
            try:
                return int(nvml.nvmlGpuInstanceGetInfo(made).id)
            except nvml.NVMLError:
                # Callers rely on it that after an error nothing was created.
                nvml.nvmlGpuInstanceDestroy(made)
                raise

    def create_compute_instance(self, gpu_instance: int, profile: MigProfile) -> MadeCompute:
        """The profile is the one with the same number of slices.

        Not the highest that NVML names: on an A100 it names one for a 7g (`7_SLICE_NVL`) that
        cannot be created there.
        """
        nvml = self._nvml
        with self._explaining(
            f"make the compute instance of {profile.name} (GPU instance {gpu_instance})"
        ):
            inside = nvml.nvmlDeviceGetGpuInstanceById(self._gpu(), gpu_instance)
            profiles = _compute_profiles(nvml, inside)
            chosen = next((kind for kind in profiles if kind.slices == profile.slices), None)
            if chosen is None:
                raise DoesNotFitError(
                    f"GPU {self._uuid}: its driver has no compute instance of {profile.slices}"
                    f" slices for {profile.name}",
                    hint="try another driver version",
                )
            made = nvml.nvmlGpuInstanceCreateComputeInstance(inside, chosen.number)
            info = nvml.nvmlComputeInstanceGetInfo(made)
            return MadeCompute(int(info.id), str(nvml.nvmlDeviceGetUUID(info.device)))

    def destroy_compute_instances(self, gpu_instance: int) -> None:
        nvml = self._nvml
        with self._explaining(f"remove the compute instance of GPU instance {gpu_instance}"):
            inside = nvml.nvmlDeviceGetGpuInstanceById(self._gpu(), gpu_instance)
            for compute in _compute_instances(nvml, inside):
                nvml.nvmlComputeInstanceDestroy(compute)

    def destroy_gpu_instance(self, gpu_instance: int) -> None:
        nvml = self._nvml
        with self._explaining(f"remove GPU instance {gpu_instance}"):
            nvml.nvmlGpuInstanceDestroy(
                nvml.nvmlDeviceGetGpuInstanceById(self._gpu(), gpu_instance)
            )

    def users(self, gpu_instance: int) -> tuple[int, ...]:
        nvml = self._nvml
        with self._explaining(f"list the processes of GPU instance {gpu_instance}"):
            gpu = self._gpu()
            with suppress(*removed(nvml)):
                return _users(nvml, gpu, gpu_instance)
            return ()

    def processes(self) -> tuple[int, ...]:
        with self._explaining("list its processes"):
            return _processes(self._nvml, self._gpu())

    def set_mode(self, *, is_on: bool) -> bool:
        """Ampere applies the mode at a reset, Hopper and later at once.

        Either ends the GPU's programs, so a GPU in use is refused before the driver is called.
        """
        nvml = self._nvml
        mode = nvml.NVML_DEVICE_MIG_ENABLE if is_on else nvml.NVML_DEVICE_MIG_DISABLE
        with self._explaining(f"switch MIG {'on' if is_on else 'off'}"):
            handle = self._gpu()
            if using := _processes(nvml, handle):
                raise BusyError(
                    f"GPU {self._uuid} is in use by {_listed(using)}; its MIG mode is unchanged",
                    hint="end these programs first",
                )
            nvml.nvmlDeviceSetMigMode(handle, mode)
            current, _ = nvml.nvmlDeviceGetMigMode(self._gpu())
            return bool(current == mode)

    def _gpu(self) -> Handle:
        # Looked up each time: a mode change makes another device of it, with another minor.
        return self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)

    @contextmanager
    def _explaining(self, doing: str) -> Iterator[None]:
        """Turn NVML's error into ours, which names the failed action and the GPU."""
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
            return NotFoundError(message, hint="another process removed it; see `allot devices`")
        case nvml.NVML_ERROR_NO_PERMISSION:
            return PrerequisiteError(message, hint="only root may read and change MIG instances")
        case _:
            return AllotError(message, hint="see the kernel's log (dmesg) and `allot doctor`")


# ---- reading -------------------------------------------------------------------------------------


def read_mig(nvml: ModuleType, handle: Handle, uuid: str) -> MigGpu | None:
    """A GPU's mode, profiles and instances; None: it has no MIG.

    While MIG is off an old driver (R535 and before) reports no profiles. Raises nvidia-ml-py's
    errors.
    """
    mode = _supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None:
        return None
    is_enabled, is_pending = (state == nvml.NVML_DEVICE_MIG_ENABLE for state in mode)
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
    """A GPU's instances and their users; None: it has no MIG."""
    gpu = read_mig(nvml, handle, str(nvml.nvmlDeviceGetUUID(handle)))
    if gpu is None:
        return None
    users = {}
    for instance in gpu.instances:
        with suppress(*removed(nvml)):
            users[instance.gpu_instance] = _users(nvml, handle, instance.gpu_instance)
    return MigView(gpu, users)


def mig_devices(nvml: ModuleType, handle: Handle) -> Iterator[tuple[MigProfile, Handle]]:
    """Yield each MIG device's NVML handle, with its GPU instance's profile.

    A GPU instance has several if another tool created several compute instances.
    """
    for profile in _profiles(nvml, handle):
        for inside in _gpu_instances(nvml, handle, profile):
            for compute in _compute_instances(nvml, inside):
                yield profile, nvml.nvmlComputeInstanceGetInfo(compute).device


def removed(nvml: ModuleType) -> tuple[type[Exception], ...]:
    """What the query of an instance raises that was removed after NVML listed it.

    The handle of its MIG device is not valid any more: an invalid argument.
    """
    return nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument


def _profiles(nvml: ModuleType, handle: Handle) -> Iterator[MigProfile]:
    """Yield all profiles, in NVML's order of kinds.

    All kinds are queried: NVML has no list of a GPU's kinds.
    """
    total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    for kind in range(_KINDS):
        # Its first version suffices, from the first driver with MIG (R450) on.
        info = _supported(nvml, nvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, kind, 1)
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
    places = (nvml.c_nvmlGpuInstancePlacement_t * _MOST_INSTANCES)()
    count = ctypes.c_uint(_MOST_INSTANCES)
    call = nvml.nvmlDeviceGetGpuInstancePossiblePlacements
    if _supported(nvml, call, handle, profile, places, ctypes.byref(count)) is None:
        return []
    return [(int(place.start), int(place.size)) for place in places[: count.value]]


def _gpu_instances(nvml: ModuleType, handle: Handle, profile: MigProfile) -> list[Handle]:
    kind, call = nvml.c_nvmlGpuInstance_t, nvml.nvmlDeviceGetGpuInstances
    return _listed_handles(nvml, kind, call, handle, profile.number)


def _instances(
    nvml: ModuleType, handle: Handle, profiles: tuple[MigProfile, ...]
) -> Iterator[MigInstance]:
    for profile in profiles:
        for inside in _gpu_instances(nvml, handle, profile):
            try:
                yield _instance(nvml, inside)
            except removed(nvml):
                continue


def _instance(nvml: ModuleType, inside: Handle) -> MigInstance:
    info = nvml.nvmlGpuInstanceGetInfo(inside)
    compute_instance, uuid = None, ""
    for compute in _compute_instances(nvml, inside)[:1]:
        # The fast way to its UUID: a search through the MIG devices takes seconds.
        with suppress(*removed(nvml)):
            made = nvml.nvmlComputeInstanceGetInfo(compute)
            uuid = str(nvml.nvmlDeviceGetUUID(made.device))
            compute_instance = int(made.id)
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
        call = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
        info = _supported(nvml, call, inside, kind, _SHARED_ENGINES, 1)
        if info is not None:
            yield _ComputeProfile(int(info.id), int(info.sliceCount))


def _compute_instances(nvml: ModuleType, inside: Handle) -> list[Handle]:
    kind, call = nvml.c_nvmlComputeInstance_t, nvml.nvmlGpuInstanceGetComputeInstances
    return [
        handle
        for profile in _compute_profiles(nvml, inside)
        for handle in _listed_handles(nvml, kind, call, inside, profile.number)
    ]


def _listed_handles(
    nvml: ModuleType,
    kind: Handle,
    call: Callable[..., Any],
    parent: Handle,
    profile: int,
) -> list[Handle]:
    """Let NVML list the instances of one profile. The array is ours: it outlives its contents."""
    handles = (kind * _MOST_INSTANCES)()
    count = ctypes.c_uint(_MOST_INSTANCES)
    if _supported(nvml, call, parent, profile, handles, ctypes.byref(count)) is None:
        return []
    return list(handles[: count.value])


def _users(nvml: ModuleType, handle: Handle, gpu_instance: int) -> tuple[int, ...]:
    inside = nvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance)
    devices = [
        nvml.nvmlComputeInstanceGetInfo(compute_instance).device
        for compute_instance in _compute_instances(nvml, inside)
    ]
    return tuple(sorted({pid for device in devices for pid in _processes(nvml, device)}))


def _processes(nvml: ModuleType, handle: Handle) -> tuple[int, ...]:
    """Users of a device, whole or MIG; empty if the driver does not report them."""
    return tuple(
        sorted(
            {
                int(process.pid)
                for call in process_lists(nvml)
                for process in _supported(nvml, call, handle) or ()
            }
        )
    )


def process_lists(nvml: ModuleType) -> tuple[Callable[..., Any], ...]:
    """NVML's calls that list a device's processes, each for one kind of program."""
    return (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
    )


def _supported(nvml: ModuleType, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """None if the device or the driver does not support it."""
    try:
        return call(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_InvalidArgument,
    ):
        return None


def _listed(pids: tuple[int, ...]) -> str:
    return f"process{'es' if len(pids) > 1 else ''} {format_pids(pids)}"
