# SPDX-License-Identifier: Apache-2.0
"""`allot doctor`: checks the prerequisites of this machine."""

import asyncio
import ctypes
import grp
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from allotment.cli.findings import CheckResult, Finding, examine_allowance, print_findings
from allotment.cli.machines import known_machines, real_inventory
from allotment.cli.mig import mig_views
from allotment.cli.options import (
    cluster_option,
    cluster_options,
    is_kubectl,
    output_option,
    state_option,
    system_namespace_option,
    usual_kubeconfig,
)
from allotment.devices.watching import OFF_BUS, driver_gpus, hidden_gpus
from allotment.ledger import read_contract
from allotment.libraries import LEDGER, SHIM, SIMULATED_CUDA, SIMULATED_NVML, library_path
from allotment.model.errors import AllotError, LedgerError
from allotment.model.formats import format_count
from allotment.model.mig import MigGpu
from allotment.modes import traits_of
from allotment.modes.mig.journal import Journal, Stage, stands_for
from allotment.modes.mps.state import DaemonState, MpsStatus
from allotment.shares.cdi import has_toolkit_spec
from allotment.shares.folders import (
    RUN_FOLDER,
    StateFolder,
    is_common,
    shared_folder_command,
)
from allotment.shares.mps_daemons import place_of, statuses
from allotment.shares.recovery import list_shares
from allotment.shares.run.command import inside_share
from allotment.shares.run.namespace import PRELOAD_FILE, can_unshare

if TYPE_CHECKING:
    from allotment.kube.policies import FoundPolicies, Specs


@click.command(short_help="Check the prerequisites of this machine, and print fixes.")
@output_option("table", "json", "yaml")
@state_option
@click.option(
    "--dialects",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Compare the cluster's policies with those for these settings of the scheduler: the file"
    " of `allot scheduler --dialects`.",
)
@cluster_option("Check a cluster in place of this machine.")
@cluster_options
@system_namespace_option
def command(
    *,
    output: str,
    state: Path | None,
    dialects: Path | None,
    is_cluster: bool,
    kubeconfig: Path | None,
    context: str | None,
    system_namespace: str,
) -> int:
    """Check everything that Allotment needs of this machine, and print a fix for each problem.

    With --cluster it checks a cluster: agents, scheduler, webhook and its certificates, versions,
    other plugins that offer the same GPUs, and admission policies. What this user may not read is
    named, with the right that is missing.

    Exits with 0, or with 8 if an essential prerequisite is missing.

    \b
    Examples:
      allot doctor
      kubectl allot doctor
    """  # noqa: D301 - click's mark
    if is_cluster or is_kubectl():
        from allotment.cli.cluster_checks import examine_cluster

        findings = examine_cluster(kubeconfig, context, system_namespace)
        policies = _cluster(dialects, kubeconfig, context)
        return print_findings([*findings, *policies], output)
    return print_findings(list(examine(StateFolder.at(state), dialects)), output)


_OLDEST_GLIBC = (2, 17)
_TIMEOUT_S = 20


def examine(folder: StateFolder, dialects: Path | None) -> Iterator[Finding]:
    # The essential checks come first.
    yield from _system()
    yield from _libraries()
    yield from _state(folder)
    yield from examine_allowance()
    yield from _turns(folder)
    yield from _mps(folder)
    yield from _injection()
    yield from _driver()
    yield from _mig(folder)
    yield from _containers()
    yield from _cluster(dialects)


def _system() -> Iterator[Finding]:
    name, text = platform.libc_ver()
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
    if name == "glibc" and version >= _OLDEST_GLIBC:
        yield Finding("C library", CheckResult.OK, f"glibc {text}")
    else:
        yield Finding(
            "C library",
            CheckResult.MISSING,
            f"{name or 'not glibc'} {text}".strip(),
            "use a system with glibc 2.17 or later: the shim cannot load into programs with"
            " another libc",
        )
    machine = os.uname().machine
    if machine in {"x86_64", "aarch64"}:
        yield Finding("processor", CheckResult.OK, machine)
    else:
        yield Finding("processor", CheckResult.MISSING, machine, "use an x86-64 or arm64 machine")


def _libraries() -> Iterator[Finding]:
    for name in (LEDGER, SHIM, SIMULATED_CUDA, SIMULATED_NVML):
        try:
            path = library_path(name)
        except AllotError as error:
            yield Finding(name, CheckResult.MISSING, error.message, error.hint or "")
            continue
        complaint = _load(path)
        if complaint:
            fix = "rebuild it: `make native` in a clone, or reinstall the wheel"
            yield Finding(name, CheckResult.MISSING, f"{path} cannot be loaded: {complaint}", fix)
        else:
            yield Finding(name, CheckResult.OK, str(path))


def _load(path: Path) -> str:
    """Load a library in another process; return the loader's error."""
    done = subprocess.run(
        ["/bin/true"],
        env={"LD_PRELOAD": str(path), "LD_BIND_NOW": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    return done.stderr.strip() or ("" if done.returncode == 0 else f"status {done.returncode}")


def _state(folder: StateFolder) -> Iterator[Finding]:
    root = folder.root
    try:
        folder.prepare()
        with folder.locked():
            pass
    except AllotError as error:
        yield Finding("state folder", CheckResult.MISSING, error.message, error.hint or "")
        return
    status = root.stat()
    mode = f"{root}, mode {status.st_mode & 0o7777:04o}"
    if is_common(status.st_mode):
        who = "all users" if status.st_mode & 0o002 else f"group {_group_name(status.st_gid)}"
        yield Finding("state folder", CheckResult.OK, f"{mode}, shared by {who}")
    elif root == RUN_FOLDER:
        folders = "{shares,devices,queue,shim,simulated,simulated/lib}"
        fix = f"to let all users share its GPUs: chmod 1777 {root} {root}/{folders}"
        if any(folder.devices.iterdir()):
            fix += f"; chmod 666 {folder.devices}/*/*"
        yield Finding("state folder", CheckResult.OK, f"{mode}, for root only", fix)
    else:
        yield Finding(
            "state folder",
            CheckResult.NOTE,
            f"{mode}: shares in other folders are invisible, so a GPU may be allotted twice",
            f"to share GPUs among users, create it as root: {shared_folder_command(RUN_FOLDER)}",
        )
    if os.statvfs(root).f_flag & os.ST_NOEXEC and not can_unshare():
        yield Finding(
            "state folder: noexec",
            CheckResult.MISSING,
            f"{root} is on a file system mounted noexec, so the shim cannot be loaded from it",
            "choose another folder with --state or ALLOTMENT_STATE",
        )


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _turns(folder: StateFolder) -> Iterator[Finding]:
    """Check the contracts of the devices, and count those with promised compute."""
    try:
        contracts = sorted(folder.devices.glob("[!.]*/contract"))
    except OSError:
        contracts = []
    governed = 0
    for path in contracts:
        try:
            contract = read_contract(path)
        except LedgerError as error:
            name = f"turns on GPU {path.parent.name}"
            yield Finding(name, CheckResult.NOTE, error.message, error.hint or "")
            continue
        governed += contract.is_governed
    details = []
    if governed:
        details.append(f"shares take turns by their promised compute; GPUs: {governed}")
    if by_driver := _held_by_mps(folder):
        details.append(f"MPS limits shares to their multiprocessors; GPUs: {by_driver}")
    detail = "; ".join(details) or "no share sets --compute: programs take no turns"
    yield Finding("compute", CheckResult.OK, detail)


def _held_by_mps(folder: StateFolder) -> int:
    return len(
        {
            device.uuid
            for share in list_shares(folder)
            if traits_of(share.mode).needs_daemon and share.share
            for device in share.share.devices
            if device.compute.is_governed
        }
    )


def _mps(folder: StateFolder) -> Iterator[Finding]:
    """Check the MPS control daemons of GPUs that shares used."""
    for uuid, status in statuses(folder).items():
        name = f"MPS on GPU {uuid}"
        log = f"see {place_of(folder, uuid).root}/events.log"
        if status.state is DaemonState.FAILED:
            yield Finding(name, CheckResult.NOTE, status.problem, status.hint or log)
            continue
        detail = str(status.state)
        if status.restarts:
            detail += f", restarted {format_count(status.restarts, 'time')}"
        for loss in status.losses[-1:]:
            when = datetime.fromtimestamp(loss.time, UTC).isoformat(timespec="seconds")
            detail += f"; at {when} {loss.reason}; programs of these shares lost their memory"
            detail += f" and contexts: {', '.join(loss.shares) or 'none'}"
        if status.daemon is not None:
            detail += f"; {_protocol(status)}"
        is_well = status.state is not DaemonState.FAULTED and not status.losses
        if status.daemon is not None and not status.is_exclusive:
            detail += "; the GPU's compute mode is not exclusive: a program can bypass the daemon"
            is_well = False
        yield Finding(
            name, CheckResult.OK if is_well else CheckResult.NOTE, detail, "" if is_well else log
        )


def _protocol(status: MpsStatus) -> str:
    if status.has_namespaces:
        return "the daemon limits each share (MPS v3)"
    why = f"; no v3: {status.older_because}" if status.older_because else ""
    return f"each program receives its part as a setting (MPS v2{why})"


def _injection() -> Iterator[Finding]:
    if not can_unshare():
        yield Finding(
            "mount namespace",
            CheckResult.NOTE,
            "no CAP_SYS_ADMIN: limits use environment variables. A program that scrubs its"
            " environment escapes (`allot ps` shows it as not enforced if the driver reports it)",
            "run `allot run` as root",
        )
        return
    complaint = _try_namespace()
    if complaint:
        yield Finding(
            "mount namespace",
            CheckResult.NOTE,
            f"{complaint}: limits use environment variables",
            "in a container: start it with --cap-add SYS_ADMIN and a seccomp profile that allows"
            " mount",
        )
    else:
        yield Finding(
            "mount namespace", CheckResult.OK, "limits also apply to scrubbed environments"
        )
    yield _preload_file()


def _try_namespace() -> str:
    """Let a child enter a mount namespace; return its error."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "slave", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    return done.stderr.strip()


def _preload_file() -> Finding:
    path = Path(PRELOAD_FILE)
    if path.exists():
        others = path.read_text(errors="replace").split()
        detail = f"names {' '.join(others)}, which stay preloaded" if others else "exists, empty"
        return Finding(PRELOAD_FILE, CheckResult.OK, detail)
    if os.access(path.parent, os.W_OK):
        return Finding(
            PRELOAD_FILE, CheckResult.OK, "missing; the first `allot run` creates it, empty"
        )
    fix = f"create an empty one: touch {path}"
    return Finding(PRELOAD_FILE, CheckResult.NOTE, "missing, and cannot be created", fix)


def _driver() -> Iterator[Finding]:
    simulated = "needed for real GPUs only; simulated GPUs work: --simulated a100-80gb"
    install = "install NVIDIA's driver (nvidia.com/drivers, or the distribution's package)"
    try:
        ctypes.CDLL("libcuda.so.1")
        yield Finding("CUDA driver", CheckResult.OK, "libcuda.so.1 loads")
    except OSError as error:
        yield Finding("CUDA driver", CheckResult.NOTE, f"{error}; {simulated}", install)
    try:
        inventory = real_inventory()
    except AllotError as error:
        yield Finding("NVML", CheckResult.NOTE, f"{error.message}; {simulated}", install)
        yield from _hidden(())
        return
    names = ", ".join(device.name for device in inventory.devices) or "no GPU"
    yield Finding("NVML", CheckResult.OK, f"{format_count(len(inventory.devices), 'GPU')}: {names}")
    for problem in inventory.problems:
        fix = "check the kernel log (dmesg | grep -i xid); reset or replace the GPU"
        name = problem.uuid or f"number {problem.index}"
        yield Finding(f"GPU {name}", CheckResult.NOTE, problem.message, fix)
    if inventory.devices and not has_toolkit_spec(inventory.devices):
        yield Finding(
            "NVIDIA's CDI spec",
            CheckResult.NOTE,
            "none for these GPUs: containers with a share get the driver's compute libraries, but"
            " not those for video and graphics, and none of NVIDIA's hooks",
            "install nvidia-container-toolkit, and nvidia-ctk cdi generate"
            " --output=/etc/cdi/nvidia.yaml",
        )
    silent = [problem.uuid for problem in inventory.problems]
    yield from _hidden([*silent, *(device.uuid for device in inventory.devices)])


def _hidden(shown: Sequence[str | None]) -> Iterator[Finding]:
    """Name the GPUs of the driver that NVML does not show to this process."""
    if inside_share():
        return
    listed = driver_gpus()
    for uuid in sorted(uuid for uuid, is_lost in listed.items() if is_lost and uuid not in shown):
        fix = "check the kernel log (dmesg | grep -i xid); restart the machine"
        yield Finding(f"GPU {uuid}", CheckResult.NOTE, OFF_BUS, fix)
    for uuid in sorted(hidden_gpus(listed, shown)):
        yield Finding(
            f"GPU {uuid}",
            CheckResult.NOTE,
            "the kernel's driver lists it, and this process cannot see it",
            "in a container: give it all GPUs, as by NVIDIA_VISIBLE_DEVICES=all; else check the"
            " kernel log (dmesg | grep -i nvrm)",
        )


def _mig(folder: StateFolder) -> Iterator[Finding]:
    for uuid, view in mig_views(known_machines(folder)):
        yield from _mig_gpu(uuid, view.gpu)
        yield from _mig_journal(uuid, view.gpu, Journal(folder.mig / uuid))


def _mig_gpu(uuid: str, gpu: MigGpu) -> Iterator[Finding]:
    name = f"MIG on GPU {uuid}"
    if gpu.is_enabled != gpu.is_pending:
        word = "on" if gpu.is_pending else "off"
        yield Finding(
            name,
            CheckResult.NOTE,
            f"switching MIG {word} is pending until the GPU is reset",
            f"end the programs on the GPU, then: nvidia-smi --gpu-reset -i {uuid}",
        )
    if gpu.is_enabled and not gpu.instances:
        yield Finding(
            name,
            CheckResult.NOTE,
            "MIG is on without an instance: no program can use this GPU",
            "create instances or switch MIG off: allot mig apply",
        )
    half = [instance for instance in gpu.instances if not instance.uuid]
    for instance in half:
        yield Finding(
            name,
            CheckResult.NOTE,
            f"GPU instance {instance.gpu_instance} at slot {instance.start} has no compute"
            " instance: no program can use it",
            f"remove it: nvidia-smi mig -dgi -gi {instance.gpu_instance} -i {uuid}",
        )


def _mig_journal(uuid: str, gpu: MigGpu, journal: Journal) -> Iterator[Finding]:
    try:
        state = journal.read()
    except AllotError as error:
        yield Finding(f"MIG on GPU {uuid}", CheckResult.NOTE, error.message, error.hint or "")
        return
    for problem in state.problems:
        yield Finding(f"MIG on GPU {uuid}", CheckResult.NOTE, problem.message, problem.hint or "")
    for record in state.records:
        if record.stage is Stage.READY and stands_for(record, gpu.instances) is None:
            yield Finding(
                f"MIG on GPU {uuid}",
                CheckResult.NOTE,
                f"slice {record.name} {record.uuid} is missing: another program removed it",
                "run no other MIG manager on this node; `allot mig apply` drops the record",
            )


def _containers() -> Iterator[Finding]:
    runtimes = [name for name in ("docker", "podman") if shutil.which(name)]
    folders = [path for path in ("/etc/cdi", "/var/run/cdi") if Path(path).is_dir()]
    if not runtimes:
        yield Finding(
            "containers",
            CheckResult.NOTE,
            "neither docker nor podman is installed; needed for `allot cdi` only",
            "install Docker 28.3 or later (earlier: enable its feature `cdi`), or Podman",
        )
        return
    where = ", ".join(folders) or "created by the first `allot cdi create`"
    yield Finding("containers", CheckResult.OK, f"{', '.join(runtimes)}; CDI folders: {where}")


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest of this version, for the policies in it."""

    file: str
    check: str
    risk: str
    """Without them."""
    fix: str
    is_optional: bool = False
    """A cluster may be without it."""


_MANIFESTS = (
    _Manifest(
        file="state-folder.yaml",
        check="pods' host paths",
        risk="a pod with hostPath can change every limit of its node",
        fix="kubectl apply -f deploy/manifests/state-folder.yaml, or enforce the Pod Security"
        " Standard `baseline`",
    ),
    _Manifest(
        file="agent.yaml",
        check="pods' placements",
        risk="users can forge the GPUs of a pod or change the request of a running one, or an agent"
        " can change other nodes",
        fix="kubectl apply -f deploy/manifests/agent.yaml; write the account of a scheduler of your"
        " own into it first",
    ),
    _Manifest(
        file="scheduler.yaml",
        check="the scheduler's policies",
        risk="pods can evade the webhook, or the scheduler can change more of a pod than its"
        " annotations",
        fix="kubectl apply -f deploy/manifests/scheduler.yaml; with your own dialects: allot"
        " scheduler --dialects FILE --print-manifests | kubectl apply -f -, and allot doctor"
        " --dialects FILE",
        is_optional=True,
    ),
)
_OWN_KEYS = "validatingadmissionpolicies/allotment-scheduler-own-keys"


def _cluster(
    dialects: Path | None, kubeconfig: Path | None = None, context: str | None = None
) -> Iterator[Finding]:
    """Compare the cluster's admission policies with those of this version."""
    path = kubeconfig or usual_kubeconfig()
    if path is None and "KUBERNETES_SERVICE_HOST" not in os.environ:
        if dialects is not None:
            text = "no kubeconfig: the policies are not compared"
            yield Finding("admission policies", CheckResult.NOTE, text, "set KUBECONFIG")
        return
    try:
        from allotment.kube.clients import connect
        from allotment.kube.policies import exists, read_policies, user_of
    except ImportError:
        return  # installed without the parts for Kubernetes
    shipped = {each.file: _specs_in(each.file) for each in _MANIFESTS}
    if dialects is not None:
        shipped["scheduler.yaml"] = _specs_with(dialects)
    every = {name: spec for specs in shipped.values() for name, spec in specs.items()}
    usual = user_of(every[_OWN_KEYS])

    async def read() -> "tuple[str, FoundPolicies, bool]":
        async with connect(path, context=context) as api:
            found = await read_policies(api, every)
            users = found.accounts(every).get(usual) or (usual,)
            # An unknown account that is not the usual one was chosen for a scheduler.
            there = [(await exists(api, user), user != usual) for user in users]
            return api.server, found, any(chosen if it is None else it for it, chosen in there)

    try:
        server, found, has_scheduler = asyncio.run(read())
    except AllotError as error:
        yield Finding("admission policies", CheckResult.NOTE, error.message, error.hint or "")
        return
    # A kubeconfig may be of a cluster that has nothing to do with this machine.
    where = f" in the cluster {server}"
    yield from _compared(shipped, found, has_scheduler=has_scheduler, where=where)
    for expected, users in found.accounts(every).items():
        if [*users] != [expected]:
            yield _accounts(expected, users, where)


def _accounts(expected: str, users: Mapping[str, Sequence[str]], where: str) -> Finding:
    """Name the accounts that policies have in place of the usual one."""
    named = "; ".join(f"{user} ({', '.join(names)})" for user, names in users.items())
    check, policies = f"account {expected.rpartition(':')[2]}", f"the policies{where} name"
    if len(users) == 1:
        return Finding(check, CheckResult.OK, f"{policies} another account: {named}")
    fix = "write the account that is in use into all of them: the others have no effect on it"
    return Finding(check, CheckResult.NOTE, f"{policies} several accounts: {named}", fix)


def _compared(
    shipped: "Mapping[str, Specs]", found: "FoundPolicies", *, has_scheduler: bool, where: str
) -> Iterator[Finding]:
    for manifest in _MANIFESTS:
        specs = shipped[manifest.file]
        if manifest.is_optional:  # the other policies in it are agent.yaml's, too
            specs = {name: specs[name] for name in specs.keys() - shipped["agent.yaml"].keys()}
            if not has_scheduler and not any(found.specs[name] for name in specs):
                continue
        problems = dict.fromkeys(
            problem
            for name, spec in sorted(specs.items())
            if (problem := found.problem(name, spec))
        )
        if problems:
            detail = f"{'; '.join(problems)}{where}: {manifest.risk}"
            yield Finding(manifest.check, CheckResult.NOTE, detail, manifest.fix)
        else:
            names = ", ".join(sorted({name.partition("/")[2] for name in specs}))
            detail = f"guarded by {names}, as in this version{where}"
            yield Finding(manifest.check, CheckResult.OK, detail)


def _specs_in(file: str) -> "Specs":
    """Return the policies and bindings of a manifest of this version."""
    import yaml

    from allotment.kube.policies import specs_of

    package = Path(__file__).resolve().parents[1]
    folder = package / "_manifests"  # in a wheel
    if not folder.is_dir():
        folder = package.parents[1] / "deploy" / "manifests"
    return specs_of(yaml.safe_load_all((folder / file).read_text("utf-8")))


def _specs_with(dialects: Path) -> "Specs":
    """Return the policies and bindings of scheduler.yaml for these settings."""
    from allotment.dialects.foreign.settings import foreign_dialects
    from allotment.kube.policies import specs_of
    from allotment.scheduler.admission.manifests import Installation, admission_objects
    from allotment.scheduler.admission.rules import all_keys
    from allotment.scheduler.settings import read_file_settings

    settings = read_file_settings(dialects)
    installation = Installation(ignored_namespaces=settings.webhook.ignored_namespaces)
    keys = all_keys(foreign_dialects(settings.dialects))
    return specs_of(each.document for each in admission_objects(keys, installation))
