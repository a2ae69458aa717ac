# SPDX-License-Identifier: Apache-2.0
"""What every room's tests share: where things are, a compiler, a machine, the command line."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from others_programs import program_from
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

import native_programs
from allotment import libraries

# A test's forked child finalizes none of its parent's objects: gRPC's would wait for ever for a
# thread that only the parent has.
os.register_at_fork(after_in_child=gc.disable)

ROOT = Path(__file__).resolve().parent.parent
#: PYTHONUNBUFFERED would hide that a program under test forgets to flush what a test waits for.
# xdist gives its workers the size of a terminal.
FOREIGN_VARIABLES = {"COLUMNS", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "LINES", "PYTHONUNBUFFERED"}

# Failures print the blob that reproduces them; a slow shared machine is no failure.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples each time: what fails in one run fails in the next, and not in somebody else's.
settings.register_profile(
    "ci", settings.get_profile("default"), max_examples=40, derandomize=True, database=None
)
settings.register_profile("long", settings.get_profile("ci"), max_examples=120)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# What a machine may lack though .ci/run has installed all that can be installed.
MAY_BE_SKIPPED = (
    "no NAT in this kernel",  # kube-proxy needs it, and a kernel cannot be installed
    "no time namespace can be made here",  # likewise
    "this file system cannot",  # what the disk is, is not ours to choose
    "this machine is arm64",  # the emulated tests run natively there
    "this machine has a GPU",  # tests of what happens without one
    "NVIDIA_PROGRAMS names no folder with",  # NVIDIA publishes no builds that could be installed
)

# Whoever starts the tests in the background (`&` in a script, nohup) hands down that these signals
# are ignored, and programs under test would not be ended by them.
signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(ignored, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Shortens the temporary folder of a worker: a socket's path has at most 107 bytes."""
    if worker := getattr(config, "workerinput", None):
        number = worker["workerid"].removeprefix("gw")
        config.option.basetemp = Path(config.option.basetemp).with_name(number)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Defines `--fail-on-skip`, which .ci/run gives."""
    parser.addoption(
        "--fail-on-skip",
        action="store_true",
        help="fail a test that is skipped for a reason that is not in MAY_BE_SKIPPED",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without a measured test where `-m` wants those alone.

    To import all files takes a core 25 s, and the measured tests are in a few.
    """
    words = config.option.markexpr.split()
    is_for_measured = "measured" in words and not {"or", "(not"} & set(words)
    if not is_for_measured or words[words.index("measured") - 1] == "not":
        return None
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return "mark.measured" not in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the files without looking for garbage, which took a quarter of the processor time.

    What is loaded stays, and is not looked at again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure under `--fail-on-skip`."""
    report = yield
    if report.skipped and item.config.getoption("fail_on_skip") and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(MAY_BE_SKIPPED):
            report.outcome = "failed"
            report.longrepr = f"skipped, which --fail-on-skip does not allow: {reason}"
    return report


# The long files begin first, the longest of each kind in front: at the end no worker is left alone
# with one. Of tests/cluster these share the cluster of their worker.
FIRST_FILES = (
    *(f"tests/cluster/test_{name}.py" for name in (
        "agent_interruptions", "resource_claims", "front", "testbed", "device_plugin",
        "dynamic_mig", "agent_shares", "mps", "deploy", "agent_many", "agent_health",
        "agent_killed", "tenants", "resource_claims_nvidia", "kube", "agent_refusals",
    )),
    "tests/unit/test_packaging.py",
    "tests/native/test_c_programs.py",
)  # fmt: skip
# These start clusters of their own, and need none that is there.
OWN_CLUSTERS = tuple(f"tests/cluster/test_{name}.py" for name in (
    "migrations", "migrate", "modes_on_one_node", "dialects", "sharepods", "deployments",
    "testbed_scheduler", "webhook_manifest", "scheduler", "preemption", "nominating",
    "scheduler_replicas", "explain", "webhook", "webhook_claims", "webhook_certificates",
    "receipts", "scheduler_plain_pods",
))  # fmt: skip


class RoomScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Keeps each file on one worker, and mixes files that wait with files that compute.

    Tests of tests/cluster mostly wait for servers, those of the other rooms keep a core busy. Every
    second worker takes the cluster's files first, so that both kinds run side by side. The others
    take them last, and those with clusters of their own in front: a cluster more for the rest would
    take half a minute.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        is_cluster_worker = int(node.gateway.id.removeprefix("gw")) % 2 == 0
        order = file_order(self.workqueue, is_cluster_worker=is_cluster_worker)
        if order:
            self.workqueue.move_to_end(order[0], last=False)
        super()._assign_work_unit(node)


def file_order(waiting: Collection[str], *, is_cluster_worker: bool) -> list[str]:
    """The files that wait, as a worker takes them."""
    first = [name for name in FIRST_FILES if name in waiting]
    own = [name for name in OWN_CLUSTERS if name in waiting]
    rest = [name for name in waiting if name not in {*first, *own}]
    found = [*first, *rest, *reversed(own)]
    others = [name for name in found if not name.startswith("tests/cluster/")]
    clusters = [name for name in found if name.startswith("tests/cluster/")]
    return [*clusters, *others] if is_cluster_worker else [*others, *reversed(clusters)]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RoomScheduling:
    """Distributes tests over the workers of `-n`."""
    return RoomScheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def outside_of_shares() -> Iterator[None]:
    """A developer's own share, machine or Python settings must not reach into the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("ALLOTMENT_") or name in FOREIGN_VARIABLES:
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def native_dir() -> Path:
    """The folder of this machine's native libraries, as `make native` installs them."""
    folder = Path(libraries.__file__).parent / "_native" / platform.machine()
    if not (folder / "liballotment-shim.so").exists():
        pytest.fail(f"{folder} has no libraries\n\nhint: make native")
    return folder


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A fresh state folder. Give it to `allot` by --state or ALLOTMENT_STATE."""
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def cc() -> list[str]:
    """The start of a command that compiles C: the machine's compiler, else ziglang's."""
    for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"]


@pytest.fixture(scope="session")
def sanitizing_cc() -> list[str]:
    """A compiler that has ASan, UBSan and TSan with their runtimes, or a skip."""
    for name in ("gcc", "clang"):
        if shutil.which(name):
            return [name]
    return pytest.skip("no gcc or clang for the sanitizers (Debian: apt-get install gcc libc6-dev)")


@pytest.fixture(scope="session")
def native_build(sanitizing_cc: list[str]) -> Callable[..., Path]:
    """Builds native libraries with sanitizers: `native_build("thread")` is the folder of all.

    `native_build("thread", "simulated/libcuda.so.1")` builds that one alone.
    """

    def build(sanitizers: str, *libraries: str) -> Path:
        return native_programs.make(sanitizing_cc, libraries, sanitizers=sanitizers)

    return build


@pytest.fixture(scope="session")
def native_objects(request: pytest.FixtureRequest) -> Callable[[list[str], str], list[Path]]:
    """Compiles sources of native/ for a test program: `native_objects(["ledger.c"], "thread")`."""

    def build(sources: list[str], sanitizers: str) -> list[Path]:
        compiler = request.getfixturevalue("sanitizing_cc" if sanitizers else "cc")
        return native_programs.objects(compiler, sources, sanitizers=sanitizers)

    return build


@pytest.fixture(scope="session")
def nvidia_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of one of NVIDIA's programs, from the folder NVIDIA_PROGRAMS; else a skip."""

    def find(name: str) -> Path:
        found = program_from("NVIDIA_PROGRAMS", name, tmp_path_factory.getbasetemp())
        if found is None:
            pytest.skip(f"NVIDIA_PROGRAMS names no folder with {name}")
        return found

    return find


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a simulated machine of its own: `machine("a100-80gb:2")` is the path of its file."""
    made = 0

    def make(spec: str) -> Path:
        # Late: most tests need no machine, and importing costs them.
        from allotment.devices import simulated

        nonlocal made
        made += 1
        return simulated.machine_path(tmp_path / f"machine-{made}", spec)

    return make


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Runs `allot` as a user's shell would, in a process of its own."""

    state: Path

    def environment(self, **variables: str) -> dict[str, str]:
        """What the command sees: this process's variables, its own state folder, no colour."""
        return {
            **os.environ,
            "ALLOTMENT_STATE": str(self.state),
            "NO_COLOR": "1",
            "COLUMNS": "120",
            **variables,
        }

    def command(self, *arguments: str | Path) -> list[str]:
        """The command itself, for tests that start it on their own terms."""
        return [sys.executable, "-m", "allotment", *map(str, arguments)]

    def __call__(
        self, *arguments: str | Path, stdin: str = "", timeout_s: float = 50, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs to the end; the caller looks at `returncode`, `stdout` and `stderr`."""
        return subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=self.environment(**variables),
        )


@pytest.fixture
def allot(state_dir: Path) -> CommandLine:
    """The command line on a fresh state folder: `allot("ps", "-o", "json")`."""
    return CommandLine(state_dir)
