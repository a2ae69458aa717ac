# SPDX-License-Identifier: Apache-2.0
"""What every room's tests share: where things are, a compiler, a machine, the command line."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Failures print the blob that reproduces them; a slow shared machine is no failure.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples each time: what fails in one run fails in the next, and not in somebody else's.
settings.register_profile(
    "ci", settings.get_profile("default"), max_examples=40, derandomize=True, database=None
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Whoever starts the tests in the background (`&` in a script, nohup) hands down that these signals
# are ignored, and programs under test would not be ended by them.
signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(ignored, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes a measurement again that another load of the machine may have spoilt.

    Each repetition is in pytest's closing line; what is broken is broken three times.
    """
    for item in items:
        if item.get_closest_marker("measured"):
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=["AssertionError"]))


@pytest.fixture(autouse=True, scope="session")
def outside_of_shares() -> Iterator[None]:
    """A developer's own share, machine or state folder must not reach into the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("ALLOTMENT_") or name in {"CUDA_VISIBLE_DEVICES", "LD_PRELOAD"}:
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def native_dir() -> Path:
    """The folder of this machine's native libraries, as `make native` installs them."""
    folder = ROOT / "src" / "allotment" / "_native" / platform.machine()
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


def make_native(compiler: list[str], *targets: str, sanitizers: str = "") -> Path:
    """Calls native/Makefile and returns the folder that it builds into.

    Incremental, in native/build/, so that only the first run of a clone takes its time.
    """
    command = ["make", "-C", str(ROOT / "native"), "-s", "-j2", f"CC={' '.join(compiler)}"]
    # This make is no part of one that may have started the tests.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    variant = "-".join([platform.machine(), *filter(None, sanitizers.split(","))])
    folder = ROOT / "native" / "build" / variant
    paths = [f"build/{variant}/{target}" for target in targets]
    done = subprocess.run(
        [*command, f"SANITIZE={sanitizers}", *paths],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def native_build(sanitizing_cc: list[str]) -> Callable[..., Path]:
    """Builds native libraries with sanitizers: `native_build("thread")` is the folder of all.

    `native_build("thread", "simulated/libcuda.so.1")` builds that one alone.
    """

    def build(sanitizers: str, *libraries: str) -> Path:
        return make_native(sanitizing_cc, *libraries, sanitizers=sanitizers)

    return build


@pytest.fixture(scope="session")
def native_objects(request: pytest.FixtureRequest) -> Callable[[list[str], str], list[Path]]:
    """Compiles sources of native/ for a test program: `native_objects(["ledger.c"], "thread")`."""

    def build(sources: list[str], sanitizers: str) -> list[Path]:
        if not sources:
            return []
        compiler = request.getfixturevalue("sanitizing_cc" if sanitizers else "cc")
        objects = [f"objects/tests/{source}.o" for source in sources]
        folder = make_native(compiler, *objects, sanitizers=sanitizers)
        return [folder / name for name in objects]

    return build


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
