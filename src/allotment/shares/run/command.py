# SPDX-License-Identifier: Apache-2.0
"""`allot run`: find the command, create its share, run it there, end the share with it."""

import glob
import os
import select
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pwd import struct_passwd
from typing import NoReturn

import msgspec

from allotment.devices.sources import Inventory
from allotment.libraries import SIMULATED, library_path
from allotment.model.allowances import Allowance
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
from allotment.model.formats import format_count, format_duration
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.modes.mps.mode import PIPE_DIRECTORY, VARIABLES
from allotment.shares import lifecycle
from allotment.shares.folders import (
    RUN_FOLDER,
    StateFolder,
    note,
    shim_copy,
    simulated_copy,
    trusted_path,
)
from allotment.shares.mode_lives import life_of
from allotment.shares.placing import MigTerms, ModeAttempts, ShareOrder, could_fit, memory_warning
from allotment.shares.process_tree import children, named
from allotment.shares.record import Traces, note_event, read_record, write_record, write_traces
from allotment.shares.run.child_process import (
    Program,
    adopt_orphans,
    end_as,
    find_program,
    find_user,
    signals_held,
    start,
    wait,
)
from allotment.shares.run.namespace import (
    MPS_INSIDE,
    NamespacePlan,
    can_unshare,
    enter,
    inside_folder,
)

_SHARE_VARIABLE = "ALLOTMENT_SHARE"
_MACHINE_VARIABLE = "ALLOTMENT_SIMULATED_MACHINE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# ld.so splits LD_PRELOAD and LD_LIBRARY_PATH at these, or replaces them ($LIB).
_LIST_CHARACTERS = frozenset(":;$")


class RunSession(msgspec.Struct, frozen=True):
    """A command and its requested share. `inject` is `auto` or an `Injection`."""

    request: Request
    command: tuple[str, ...]
    name: str | None = None
    spec: str | None = None
    inject: str = "auto"
    user: str | None = None
    """Name or number of the command's user; None: this process's."""
    state: Path | None = None
    host_budget: int | None = None
    """As in `ShareOrder`."""
    keep_s: float = 0.0
    """In mode `mig`, seconds to keep the slice after the share has ended."""
    reuses: bool = False
    """In mode `mig`, also use idle MIG devices of other tools."""
    wait_s: float | None = None
    """Seconds to wait for room; None: it is not waited for."""
    look: Callable[[StateFolder, Share], None] | None = None
    """Called at times while the command runs."""
    allowance: Allowance | None = None
    """As in `ShareOrder`."""


class _Libraries(msgspec.Struct, frozen=True):
    """Copies of the libraries that the processes load."""

    shim: Path
    simulated: Path | None
    """A folder."""


def inside_share() -> str:
    """Return the path of a share that this process is in, or an empty text."""
    # What this user may not look at, as the folder of a node's agent, is no share of theirs. Unlike
    # pathlib's, these functions do not raise there.
    mounted = f"{RUN_FOLDER}/share"
    named = os.environ.get(_SHARE_VARIABLE)
    candidates = (mounted, *glob.glob(f"{mounted}/*"), *([named] if named else []))  # noqa: PTH207
    return next((each for each in candidates if os.path.exists(f"{each}/policy")), "")  # noqa: PTH110


def refuse_nesting() -> None:
    """Raise `UsageError` inside a share: its part of the GPU cannot be split again."""
    if where := inside_share():
        raise UsageError(
            f"this already runs in a share ({where}), and shares do not nest",
            hint="run `allot` outside of it, or run the command directly: it has the share's limit",
        )


def refuse_inside(action: str) -> None:
    """Raise `UsageError` inside a share: a limited program must not change limits.

    `action` is the command as typed.
    """
    if where := inside_share():
        raise UsageError(
            f"this runs in a share ({where}), and shares are not changed from inside of one",
            hint=f"run it outside of every share: {action}",
        )


def local_devices(folder: StateFolder, spec: str | None) -> tuple[Path | None, tuple[Device, ...]]:
    """Return the simulated machine's file, if any, and all devices.

    Raises `NoDevicesError` if there is no GPU.
    """
    machine, inventory = local_inventory(folder, spec)
    described = [each.device for each in inventory.problems if each.device]
    devices = sorted([*inventory.devices, *described], key=lambda device: device.index)
    return machine, tuple(devices)


def local_inventory(folder: StateFolder, spec: str | None) -> tuple[Path | None, Inventory]:
    """Return the simulated machine's file, if any, and the devices with their problems.

    Raises `NoDevicesError` if there is no GPU.
    """
    if spec:
        from allotment.devices.simulated import SimulatedMachine, machine_path

        folder.prepare()
        before = {path.parent.name for path in folder.simulated.glob("*/machine")}
        machine = machine_path(folder.root, spec)
        if before and machine.parent.name not in before:
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


def run(session: RunSession) -> NoReturn:
    """Run a session, and end this process as the command ended.

    Raises `AllotError` if the command cannot start; no share is left behind.
    """
    refuse_nesting()
    program = _program(session)
    user = find_user(session.user) if session.user else None
    injection = _injection(session)
    folder = StateFolder.at(session.state)
    if injection is Injection.ENVIRONMENT:
        check_loadable(folder, blanks=True)
    machine, inventory = local_inventory(folder, session.spec)
    folder.prepare()
    libraries = _Libraries(shim_copy(folder), simulated_copy(folder) if machine else None)
    order = ShareOrder(
        request=session.request,
        injection=injection,
        name=session.name,
        machine=machine,
        spec=session.spec,
        runner=named(os.getpid()),
        command=session.command,
        problems=inventory.problems,
        host_budget=session.host_budget,
        allowance=session.allowance,
        mig=MigTerms(
            keeps={each.uuid: session.keep_s for each in inventory.devices},
            reuses=session.reuses,
        ),
    )
    devices = inventory.devices
    if any(selector.lower().startswith("mig-") for selector in order.request.selectors):
        from allotment.shares.mig import allocate  # late: it asks NVML, which few shares need

        devices = (*devices, *allocate.free_slices(folder, machine))
    # The share is booked from here on: we end it, or else the next `allot` does.
    share, directory, served = _create_in_turn(folder, order, devices, user, session.wait_s)
    if warning := memory_warning(share):
        _warn(f"share {share.name}: {warning}")
    # Names a share's slice to CUDA itself, for programs without the shim. The inherited value is of
    # whole GPUs, and none of these is the share's.
    slices = {_VISIBLE: share.devices[0].uuid} if share.devices[0].gpu else {}
    variables = {**slices, **served}
    other_children = children()  # of the program that became this `allot` by exec
    adopt_orphans()
    with signals_held() as signals:
        try:
            child = None
            if injection is Injection.NAMESPACE:
                plan = _namespace(folder, directory, libraries, machine, share=share)
                tools = inside_folder(libraries.simulated)
                inside = {
                    **_search_path(tools),
                    **variables,
                    **({PIPE_DIRECTORY: MPS_INSIDE} if PIPE_DIRECTORY in served else {}),
                }
                try:
                    child = start(
                        _moved(program, tools),
                        {**_inherited(), **inside},
                        signals=signals,
                        prepare=lambda: enter(plan),
                        user=user,
                    )
                except PrerequisiteError as error:
                    if session.inject != "auto" or user:
                        raise
                    check_loadable(folder, blanks=True)
                    _warn(f"{error}; the limit goes by the environment instead")
                    share = replace(share, injection=Injection.ENVIRONMENT)
                    write_record(directory, share)
            if child is None:
                environment = {**_environment(directory, libraries, machine), **variables}
                moved = _moved(program, str(libraries.simulated))
                child = start(moved, environment, signals=signals)
            _trace(directory, share, child)
            status = wait(
                child,
                on_stop=_SuspensionNotice(directory).print_once,
                look=partial(session.look, folder, share) if session.look else None,
            )
        except BaseException:
            _end(folder, share, other_children)
            raise
        _end(folder, share, other_children)
        end_as(status)


def _program(session: RunSession) -> Program:
    """Find the command; a simulated machine has its own nvidia-smi, before any other."""
    path = os.environ.get("PATH", os.defpath)
    if session.spec:
        path = _prefixed(str(library_path(SIMULATED)), path)
    return find_program(session.command, path)


def _moved(program: Program, tools: str) -> Program:
    """Name a simulated machine's own program where the share has it."""
    folder, name = os.path.split(program.path)
    if folder != str(library_path(SIMULATED)):
        return program
    return replace(program, path=f"{tools}/{name}")


def _search_path(tools: str) -> Mapping[str, str]:
    return {"PATH": _prefixed(tools, os.environ.get("PATH", os.defpath))} if tools else {}


def _give_ledger(draft: Path, user: struct_passwd) -> None:
    """Make the user the owner of the files that its programs write."""
    for path in (draft / "usage", *draft.glob("seat-*")):
        os.chown(path, user.pw_uid, -1)


def _create(
    folder: StateFolder,
    order: ShareOrder,
    devices: Sequence[Device],
    user: struct_passwd | None,
) -> tuple[Share, Path, Mapping[str, str]]:
    """Create the share in the first possible mode, and wait until its programs can start.

    Also returns the variables that its programs need. A profile that no GPU here has is refused,
    whatever the other modes could do.
    """
    attempts = ModeAttempts(order)
    door = lifecycle.FrontDoor(locked=folder.locked)
    if user is not None:
        door = replace(door, fill=lambda draft, *_: _give_ledger(draft, user))
    for alone in attempts.orders:
        try:
            share, directory = lifecycle.create(folder, alone, devices, door=door)
            served = _ready(folder, share)
        except UnknownProfileError:
            raise
        except (BusyError, DoesNotFitError, NotInModeError, PrerequisiteError) as error:
            attempts.add(alone, error)
            continue
        if attempts.refusals:
            for mode, why in attempts.reasons():
                _warn(f"share {share.name} is of mode {share.mode}, and not {mode}: {why}")
        return share, directory, served
    raise attempts.refusal()


_RETRY_S = 5.0
"""A share may become smaller, or a GPU be allowed another mode, without a change of the folder."""


def _create_in_turn(
    folder: StateFolder,
    order: ShareOrder,
    devices: Sequence[Device],
    user: struct_passwd | None,
    wait_s: float | None,
) -> tuple[Share, Path, Mapping[str, str]]:
    """Create the share as soon as there is room, by order of arrival among those that wait.

    `wait_s` None: at once, or not at all. The first of those that wait tries again whenever a share
    begins or ends; the others sleep.
    """
    if wait_s is None or not could_fit(order, devices):
        try:
            return _create(folder, order, devices, user)
        except DoesNotFitError as error:
            _note_refusal(folder, order, error)
            raise
    reason = ""
    until = time.monotonic() + wait_s

    def notice(earlier: int) -> None:
        note(f"waiting behind {format_count(earlier, 'command')} that came before")

    queue = order.machine.parent.name if order.machine else "real"
    try:
        with folder.in_turn(queue, until=until, notice=notice):
            while True:
                before = folder.shares.stat().st_mtime_ns
                try:
                    return _create(folder, order, devices, user)
                except UnknownProfileError:
                    raise
                except DoesNotFitError as error:
                    if error.message != reason:
                        reason = error.message
                        note(f"waiting for room (Ctrl-C ends it): {reason}")
                _await_change(folder, before, until)
    except TimeoutError:
        late = DoesNotFitError(
            f"there was no room within {format_duration(int(wait_s * 1e9))}",
            hint="`allot ps` shows the shares; without a time, --wait has no end",
        )
        _note_refusal(folder, order, late)
        raise late from None


def _note_refusal(folder: StateFolder, order: ShareOrder, error: DoesNotFitError) -> None:
    note_event(folder, "refused", share=order.name or "", share_id=order.id, text=error.one_line())


def _await_change(folder: StateFolder, before: int, until: float) -> None:
    """Wait until a share has begun or ended; raise `TimeoutError` at `until`."""
    retry_at = time.monotonic() + _RETRY_S
    while time.monotonic() < retry_at and folder.shares.stat().st_mtime_ns == before:
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.1)


def _ready(folder: StateFolder, share: Share) -> Mapping[str, str]:
    """Wait until the share's programs can start; if they cannot, end the share."""
    try:
        return life_of(share.mode).ready(folder, share)
    except BaseException:
        lifecycle.end(folder, share, excluded=children())
        raise


class _SuspensionNotice(msgspec.Struct):
    """Reports on standard error why a share's programs stopped, once for each suspension."""

    directory: Path
    reported: float | None = None
    """When the last reported suspension began."""

    def print_once(self) -> None:
        """Report a suspension; nothing if the programs stopped for another reason."""
        try:
            share = read_record(self.directory)
        except (StateError, FileNotFoundError):
            return
        if share.suspension is None or share.suspension.since == self.reported:
            return
        self.reported = share.suspension.since
        with suppress(OSError):  # closed
            if select.select((), (2,), (), 0)[1]:  # never wait for a slow reader
                line = f"allot: suspended; `allot resume {share.name}` brings it back\n"
                os.write(2, line.encode())


def check_loadable(folder: StateFolder, *, blanks: bool) -> None:
    """Raise `StateError` if the loader would split the folder's path, or may not load from it.

    It would then load none of our libraries, and run the program without its limit. `blanks`:
    LD_PRELOAD, which is split at blanks too.
    """
    present = next(each for each in (folder.root, *folder.root.parents) if each.exists())
    if os.statvfs(present).f_flag & os.ST_NOEXEC:
        raise StateError(
            f"{folder.root} is on a file system mounted noexec: programs cannot load the shim",
            hint="choose another folder with --state or ALLOTMENT_STATE, or use --inject namespace"
            " (as root), whose mounts have no such option",
        )
    text = str(folder.root)
    splitting = sorted(
        {
            character
            for character in text
            if character in _LIST_CHARACTERS or (blanks and character.isspace())
        }
    )
    if splitting:
        raise StateError(
            f"{text}: the path of the state folder has {' and '.join(map(repr, splitting))} in it,"
            " and the loader's variables (LD_PRELOAD, LD_LIBRARY_PATH) cannot carry that",
            hint="choose a folder with a plain path by --state or ALLOTMENT_STATE, or use"
            " --inject namespace (as root), which needs no variables",
        )


def _trace(directory: Path, share: Share, child: int) -> None:
    """Record how the share's processes are identified if this process is killed."""
    namespace = None
    if share.injection is Injection.NAMESPACE:
        with suppress(OSError):  # it has ended already
            # Stays open: meanwhile no other namespace gets the number.
            descriptor = os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            namespace = os.fstat(descriptor).st_ino
    with suppress(StateError):  # `allot` then identifies them by mounts and environments
        write_traces(directory, Traces(namespace, (named(child),)))


def _end(folder: StateFolder, share: Share, other_children: Collection[int]) -> None:
    try:
        lifecycle.end(folder, share, excluded=other_children)
    except AllotError as error:
        # Keep the command's own status; the next `allot` removes the share.
        _warn(f"the share {share.id} was not removed: {error}")
    free_orphan_slices(folder)


def free_orphan_slices(folder: StateFolder, *, patience_s: float = 60.0) -> None:
    """Remove unused MIG slices; warn of those that cannot be removed yet."""
    if not folder.mig.is_dir() or inside_share():
        return
    from allotment.shares.mig import allocate  # late: few machines have MIG

    for problem in allocate.free_orphans(folder, patience_s=patience_s):
        hint = f" ({problem.hint})" if problem.hint else ""
        _warn(
            f"could not remove an unused MIG slice, the next `allot` tries again: {problem}{hint}"
        )


def _warn(text: str) -> None:
    import sys

    if sys.stderr is not None:  # closed from the beginning
        with suppress(OSError):
            sys.stderr.write(f"warning: {text}\n")


def _injection(session: RunSession) -> Injection:
    inject = session.inject
    if session.user and inject == Injection.ENVIRONMENT:
        raise UsageError(
            "--user needs a private mount namespace: only its mounts lead another user to the"
            " share's files",
            hint="remove --inject environment",
        )
    if inject == "auto" and not session.user:
        return Injection.NAMESPACE if can_unshare() else Injection.ENVIRONMENT
    if inject != Injection.ENVIRONMENT and not can_unshare():
        raise PrerequisiteError(
            "a private mount namespace needs CAP_SYS_ADMIN, which this process does not have",
            hint="run as root (sudo allot run ...)"
            + ("" if session.user else ", or use --inject environment"),
        )
    return Injection.ENVIRONMENT if inject == Injection.ENVIRONMENT else Injection.NAMESPACE


def _namespace(
    folder: StateFolder,
    directory: Path,
    libraries: _Libraries,
    machine: Path | None,
    *,
    share: Share,
) -> NamespacePlan:
    traits = traits_of(share.mode)
    pipes = None
    if traits.needs_daemon:
        from allotment.shares.mps_daemons import pipes_of

        pipes = pipes_of(folder, share)
    cache = _cache_path(folder, libraries.simulated) if libraries.simulated else None
    return NamespacePlan(
        share=directory,
        shim=libraries.shim,
        devices=len(share.devices) if traits.takes_turns else 0,
        machine=machine,
        libraries=libraries.simulated,
        mps=pipes,
        cache=cache,
    )


def _cache_path(folder: StateFolder, libraries: Path) -> Path:
    """Name the loader cache by its sources: the machine's own cache, and the libraries."""
    try:
        status = os.stat("/etc/ld.so.cache")  # noqa: PTH116
        stamp = f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"
    except OSError:
        stamp = "none"
    return trusted_path(folder.simulated / f"ld.so.cache-{libraries.name[:16]}-{stamp}")


def _inherited() -> dict[str, str]:
    """Return the environment for a namespace, where everything is at its default place."""
    names = {_SHARE_VARIABLE, _MACHINE_VARIABLE, *VARIABLES}
    if "LC_CTYPE" in os.environ and not _was_given(b"LC_CTYPE"):
        names.add("LC_CTYPE")  # Python's own, where the locale is C (PEP 538)
    return {key: value for key, value in os.environ.items() if key not in names}


def _was_given(name: bytes) -> bool:
    """Whether this process was started with a variable."""
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - start-up time
            return any(line.startswith(name + b"=") for line in file.read().split(b"\0"))
    except OSError:
        return True


def _environment(directory: Path, libraries: _Libraries, machine: Path | None) -> Mapping[str, str]:
    """Return an environment that makes programs load the share's libraries."""
    environment = _inherited()
    environment[_SHARE_VARIABLE] = str(directory)
    # After the program's own: a library that stands before the driver stays before it.
    own = environment.get("LD_PRELOAD")
    environment["LD_PRELOAD"] = f"{own}:{libraries.shim}" if own else str(libraries.shim)
    if machine and libraries.simulated:
        environment[_MACHINE_VARIABLE] = str(machine)
        environment["LD_LIBRARY_PATH"] = _prefixed(
            str(libraries.simulated), environment.get("LD_LIBRARY_PATH")
        )
        environment |= _search_path(str(libraries.simulated))
    return environment


def _prefixed(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first
