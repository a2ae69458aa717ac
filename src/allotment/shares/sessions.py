# SPDX-License-Identifier: Apache-2.0
"""What `allot run` does: find the command, make its share, run it there, end the share with it."""

import os
import select
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from allotment.devices.sources import Inventory
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NoDevicesError,
    NotInModeError,
    PrerequisiteError,
    StateError,
    UnknownProfileError,
    UsageError,
)
from allotment.model.requests import MIG, MPS, Request
from allotment.model.shares import Injection, Share
from allotment.modes.mps.settings import PIPE_DIRECTORY, VARIABLES
from allotment.placement.open_modes import in_each_mode
from allotment.shares import lives, mps_daemons
from allotment.shares.copies import is_trusted, shim_copy, simulated_copy
from allotment.shares.folders import RUN_FOLDER, StateFolder
from allotment.shares.namespaces import MPS_INSIDE, NamespacePlan, can_unshare, enter
from allotment.shares.processes import children, named, this_process
from allotment.shares.records import read_record, write_record
from allotment.shares.running import (
    adopt_orphans,
    end_as,
    find_program,
    signals_held,
    start,
    wait,
)
from allotment.shares.small import too_small
from allotment.shares.traces import Traces, write_traces

__all__ = [
    "Session",
    "check_listable",
    "inside_share",
    "local_devices",
    "local_inventory",
    "refuse_inside",
    "refuse_nesting",
    "run",
    "settle_slices",
]

_SHARE_VARIABLE = "ALLOTMENT_SHARE"
_MACHINE_VARIABLE = "ALLOTMENT_SIMULATED_MACHINE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Where ld.so cuts LD_PRELOAD or LD_LIBRARY_PATH, and what it replaces ($LIB).
_LIST_CHARACTERS = frozenset(":;$")


@dataclass(frozen=True, slots=True)
class Session:
    """A command and the share that it asks for. `inject` is `auto` or an `Injection`."""

    request: Request
    command: tuple[str, ...]
    name: str | None = None
    spec: str | None = None
    inject: str = "auto"
    state: Path | None = None
    host_budget: int | None = None
    """As `lives.Order` has it."""
    keep_s: float = 0.0
    """In mode `mig`, for how many seconds the slice is kept once the share has gone."""
    reuses: bool = False
    """In mode `mig`, whether an idle MIG device that others have cut is taken as well."""


@dataclass(frozen=True, slots=True)
class _Libraries:
    """What gets into the processes."""

    shim: Path
    simulated: Path | None


def inside_share() -> str:
    """Return where the share's ledger is if this process is in one, or an empty text."""
    mounted = RUN_FOLDER / "share"
    if (mounted / "policy").exists():
        return str(mounted)
    named = os.environ.get(_SHARE_VARIABLE, "")
    return named if named and Path(named, "policy").exists() else ""


def refuse_nesting() -> None:
    """Raise `UsageError` inside a share: its part of the GPU cannot be parted again."""
    where = inside_share()
    if where:
        raise UsageError(
            f"this already runs in a share ({where}), and shares do not nest",
            hint="run `allot` outside of it, or run the command directly: it has the share's limit",
        )


def refuse_inside(action: str) -> None:
    """Raise `UsageError` inside a share: who is held to a limit does not move it.

    `action` is the command as it is typed.
    """
    where = inside_share()
    if where:
        raise UsageError(
            f"this runs in a share ({where}), and shares are not changed from inside of one",
            hint=f"run it outside of every share: {action}",
        )


def local_devices(folder: StateFolder, spec: str | None) -> tuple[Path | None, tuple[Device, ...]]:
    """Return the simulated machine's file, if one is meant, and the devices there are.

    Raises `NoDevicesError` (with what to do) where there is no GPU.
    """
    machine, inventory = local_inventory(folder, spec)
    described = [each.device for each in inventory.problems if each.device]
    devices = sorted([*inventory.devices, *described], key=lambda device: device.index)
    return machine, tuple(devices)


def local_inventory(folder: StateFolder, spec: str | None) -> tuple[Path | None, Inventory]:
    """Return the simulated machine's file, if one is meant, what answers there, and what does not.

    Raises `NoDevicesError` (with what to do) where there is no GPU.
    """
    if spec:
        from allotment.devices.simulated import SimulatedMachine, machine_path

        folder.prepare()
        before = {each.name for each in folder.simulated.glob("*")}
        machine = machine_path(folder.root, spec)
        if machine.parent.name not in before:
            from allotment.shares.old_machines import remove_old_machines

            remove_old_machines(folder)
        return machine, SimulatedMachine(machine).inventory()
    from allotment.devices.nvml import Nvml

    with Nvml() as source:
        inventory = source.inventory()
    if not inventory.devices:
        raise NoDevicesError(
            "no GPU of this machine answers",
            hint="see `allot doctor`, or try simulated ones: --simulated a100-80gb",
        )
    return None, inventory


def run(session: Session) -> NoReturn:
    """Run a session to its end, and end this process as the command ended.

    Raises `AllotError` when it cannot start; then no share is left behind.
    """
    refuse_nesting()
    program = find_program(session.command, os.environ.get("PATH"))
    injection = _injection(session.inject)
    folder = StateFolder.at(session.state)
    if injection is Injection.ENVIRONMENT:
        check_listable(folder, blanks=True)
    machine, inventory = local_inventory(folder, session.spec)
    folder.prepare()
    libraries = _Libraries(shim_copy(folder), simulated_copy(folder) if machine else None)
    order = lives.Order(
        request=session.request,
        injection=injection,
        name=session.name,
        machine=machine,
        spec=session.spec,
        runner=this_process(),
        command=session.command,
        problems=inventory.problems,
        host_budget=session.host_budget,
    )
    # From here on the share is in the books: it is ended by us, or else by the next `allot`.
    share, directory, served = _create(folder, order, inventory, session)
    small = too_small(share)
    if small:
        _warn(f"share {share.name}: {small}")
    variables = {**_visible(share), **served}
    strangers = children()  # of whoever became this `allot` by exec
    adopt_orphans()
    with signals_held() as signals:
        try:
            child = None
            if injection is Injection.NAMESPACE:
                plan = _namespace(folder, directory, libraries, machine, share=share)
                inside = {
                    **variables,
                    **({PIPE_DIRECTORY: MPS_INSIDE} if share.mode == MPS else {}),
                }
                try:
                    child = start(
                        program,
                        {**_inherited(), **inside},
                        signals=signals,
                        prepare=lambda: enter(plan),
                    )
                except PrerequisiteError as error:
                    if session.inject != "auto":
                        raise
                    check_listable(folder, blanks=True)
                    _warn(f"{error}; the limit goes by the environment instead")
                    share = replace(share, injection=Injection.ENVIRONMENT)
                    write_record(directory, share)
            if child is None:
                environment = {**_environment(directory, libraries, machine), **variables}
                child = start(program, environment, signals=signals)
            _trace(directory, share, child)
            status = wait(child, on_stop=_Stopped(directory).tell)
        except BaseException:
            _end(folder, share, strangers)
            raise
        _end(folder, share, strangers)
        end_as(status)


def _create(
    folder: StateFolder, order: lives.Order, inventory: Inventory, session: Session
) -> tuple[Share, Path, Mapping[str, str]]:
    """Make the share in the first mode that can be had, and see that its programs can start.

    Returns what its programs need of MPS, too. Raises as the only mode does, or `DoesNotFitError`
    with what each of several says: `UsageError` where what is asked for can be in none of them,
    wherever. A profile that no GPU here has is refused, whatever other modes would do.
    """
    refusals: list[tuple[str, AllotError]] = []
    for request in in_each_mode(order.request):
        alone = replace(order, request=request)
        try:
            share, directory = _create_in(folder, alone, inventory, session)
            served = _mps(folder, share)
        except (BusyError, DoesNotFitError, NotInModeError, PrerequisiteError) as error:
            if not order.request.other_modes or isinstance(error, UnknownProfileError):
                raise
            refusals.append((request.mode, error))
            continue
        for mode, why in refusals:
            _warn(f"share {share.name} is of mode {share.mode}, and not {mode}: {_head(mode, why)}")
        return share, directory, served
    told = "\n".join(f"mode {mode}: {_of_mode(mode, why)}" for mode, why in refusals)
    possible = [why for _, why in refusals if not isinstance(why, NotInModeError)]
    if not possible:
        raise UsageError(told, hint=refusals[0][1].hint)
    raise DoesNotFitError(told, hint=_hint_of(possible, {mode for mode, _ in refusals}))


def _of_mode(mode: str, error: AllotError) -> str:
    """Return what a mode's refusal says behind the mode's name."""
    return error.message.removeprefix(f"mode {mode}: ")


def _head(mode: str, error: AllotError) -> str:
    if isinstance(error, DoesNotFitError) and error.reason:
        return error.reason
    return _of_mode(mode, error).partition("\n")[0].rstrip(":")


def _hint_of(refusals: Sequence[AllotError], modes: Collection[str]) -> str | None:
    """Return the hint of the mode liked best, but none that advises what was asked for already."""
    new = (
        each
        for each in refusals
        if not (isinstance(each, DoesNotFitError) and each.advises in modes)
    )
    return next(new, refusals[0]).hint


def _create_in(
    folder: StateFolder, order: lives.Order, inventory: Inventory, session: Session
) -> tuple[Share, Path]:
    is_mig = order.request.mode == MIG
    # Late: it asks NVML, which most shares need not.
    reuses = is_mig and session.reuses
    if reuses or any(each.lower().startswith("mig-") for each in order.request.selectors):
        from allotment.shares import static_slices as static

        if is_mig and static.names_slices(order.request):
            return static.create_in_named(folder, order)
        if is_mig and (made := static.create_in_static(folder, order)) is not None:
            return made
        if not is_mig:
            slices = static.free_slices(folder, order.machine)
            return lives.create(folder, order, (*inventory.devices, *slices))
    if is_mig:
        from allotment.shares import slicing

        return slicing.create(folder, order, inventory.devices, keep_s=session.keep_s)
    return lives.create(folder, order, inventory.devices)


def _mps(folder: StateFolder, share: Share) -> Mapping[str, str]:
    """Wait for the share's MPS daemon; return what its programs need. Where none comes it ends.

    In another mode it is the GPU that is waited for, where it has been MPS clients' until now.
    """
    try:
        if share.mode != MPS:
            mps_daemons.release(folder, share)
            return {}
        return mps_daemons.ready(folder, share)
    except BaseException:
        lives.end(folder, share, strangers=children())
        raise


def _visible(share: Share) -> Mapping[str, str]:
    """Name the share's slice to CUDA itself, for programs that the shim is not in as well.

    What the variable says here is of whole GPUs, none of which is the share's.
    """
    return {_VISIBLE: share.devices[0].uuid} if share.devices[0].gpu else {}


class _Stopped:
    """Says on standard error why a share's programs stopped, once for each suspension."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told: float | None = None

    def tell(self) -> None:
        """Say it where the share is being suspended; anything else that stops is not our news."""
        try:
            share = read_record(self._directory)
        except (StateError, FileNotFoundError):
            return
        if share.suspension is None or share.suspension.since == self._told:
            return
        self._told = share.suspension.since
        with suppress(OSError):  # closed
            if select.select((), (2,), (), 0)[1]:  # a reader that is slow must not hold us up
                line = f"allot: suspended; `allot resume {share.name}` brings it back\n"
                os.write(2, line.encode())


def check_listable(folder: StateFolder, *, blanks: bool) -> None:
    """Raise `StateError` when a variable of the loader cannot carry the folder's path whole.

    The loader would look for pieces of it, find none of our libraries, and run the program without
    them: without its limit. `blanks`: they are separators too (LD_PRELOAD).
    """
    text = str(folder.root)
    found = sorted(
        {each for each in text if each in _LIST_CHARACTERS or (blanks and each.isspace())}
    )
    if found:
        raise StateError(
            f"{text}: the path of the state folder has {' and '.join(map(repr, found))} in it, and"
            " the loader's variables (LD_PRELOAD, LD_LIBRARY_PATH) cannot carry that",
            hint="choose a folder with a plain path by --state or ALLOTMENT_STATE, or use"
            " --inject namespace (as root), which needs no variables",
        )


def _trace(directory: Path, share: Share, child: int) -> None:
    """Write down by what the share's processes are known, should this process be killed."""
    namespace = None
    if share.injection is Injection.NAMESPACE:
        with suppress(OSError):  # it has ended already: then it has nothing to be known by
            # Open until the end: as long, no other namespace gets the number.
            kept = os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            namespace = os.fstat(kept).st_ino
    with suppress(StateError):  # `allot` goes by mounts and environments then
        write_traces(directory, Traces(namespace, (named(child),)))


def _end(folder: StateFolder, share: Share, strangers: Collection[int]) -> None:
    try:
        lives.end(folder, share, strangers=strangers)
    except AllotError as error:
        # The command's own status counts; the next `allot` removes the share.
        _warn(f"the share {share.id} was not removed: {error}")
    settle_slices(folder)


def settle_slices(folder: StateFolder, *, patience_s: float = 60.0) -> None:
    """Remove MIG slices that are nobody's any more; what cannot be is told, and tried again."""
    if not folder.mig.is_dir() or inside_share():
        return
    from allotment.shares import slicing  # late: few machines have MIG

    for problem in slicing.settle(folder, patience_s=patience_s):
        hint = f" ({problem.hint})" if problem.hint else ""
        _warn(f"a MIG slice that nobody has stays for now: {problem}{hint}")


def _warn(text: str) -> None:
    import sys

    if sys.stderr is not None:  # closed from the beginning
        with suppress(OSError):
            sys.stderr.write(f"warning: {text}\n")


def _injection(wanted: str) -> Injection:
    if wanted == "auto":
        return Injection.NAMESPACE if can_unshare() else Injection.ENVIRONMENT
    if wanted == Injection.NAMESPACE and not can_unshare():
        raise PrerequisiteError(
            "a private mount namespace needs CAP_SYS_ADMIN, which this process does not have",
            hint="run as root (sudo allot run ...), or use --inject environment",
        )
    return Injection(wanted)


def _namespace(
    folder: StateFolder,
    directory: Path,
    libraries: _Libraries,
    machine: Path | None,
    *,
    share: Share,
) -> NamespacePlan:
    cache = _cache_path(folder, libraries.simulated) if libraries.simulated else None
    return NamespacePlan(
        share=directory,
        shim=libraries.shim,
        devices=0 if share.mode in {MPS, MIG} else len(share.devices),
        machine=machine,
        libraries=libraries.simulated,
        mps=mps_daemons.pipes_of(folder, share) if share.mode == MPS else None,
        cache=cache,
    )


def _cache_path(folder: StateFolder, libraries: Path) -> Path:
    """Name the loader cache by what it depends on: the machine's own cache, and the libraries."""
    try:
        now = os.stat("/etc/ld.so.cache")  # noqa: PTH116
        stamp = f"{now.st_mtime_ns:x}-{now.st_size:x}-{now.st_ino:x}"
    except OSError:
        stamp = "none"
    path = folder.simulated / f"ld.so.cache-{libraries.name[:16]}-{stamp}"
    if path.exists() and not is_trusted(path):
        return path.with_name(f"{path.name}-{os.geteuid()}")
    return path


def _inherited() -> dict[str, str]:
    """Return the environment for a namespace: all is at its default place there."""
    names = {_SHARE_VARIABLE, _MACHINE_VARIABLE, *VARIABLES}
    if "LC_CTYPE" in os.environ and not _was_given(b"LC_CTYPE"):
        names.add("LC_CTYPE")  # Python's own, where the locale is C (PEP 538)
    return {key: value for key, value in os.environ.items() if key not in names}


def _was_given(name: bytes) -> bool:
    """Tell whether this process was started with a variable."""
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - start-up time
            return any(each.startswith(name + b"=") for each in file.read().split(b"\0"))
    except OSError:
        return True


def _environment(directory: Path, libraries: _Libraries, machine: Path | None) -> Mapping[str, str]:
    """Return an environment that carries the share."""
    environment = _inherited()
    environment[_SHARE_VARIABLE] = str(directory)
    environment["LD_PRELOAD"] = _prefixed(str(libraries.shim), environment.get("LD_PRELOAD"))
    if machine and libraries.simulated:
        environment[_MACHINE_VARIABLE] = str(machine)
        environment["LD_LIBRARY_PATH"] = _prefixed(
            str(libraries.simulated), environment.get("LD_LIBRARY_PATH")
        )
    return environment


def _prefixed(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first
