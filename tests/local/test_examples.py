# SPDX-License-Identifier: Apache-2.0
"""The examples do what their README says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from patience import wait_until
from rounds import undisturbed

Run = Callable[..., subprocess.CompletedProcess[str]]
SHARE = ("run", "--simulated", "a100-80gb", "--memory", "4Gi", "--")


@pytest.mark.usefixtures("native_dir")
def test_a_c_program_takes_its_share(
    allot: Run, cc: Sequence[str], root: Path, tmp_path: Path
) -> None:
    program = tmp_path / "fill"
    source = root / "examples" / "fill.c"
    subprocess.run([*cc, "-o", str(program), str(source), "-ldl"], check=True)
    done = allot(*SHARE, program)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].endswith(" of 4096 MiB free")
    assert lines[1].startswith("got 3")
    assert lines[1].endswith(" MiB, then CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.usefixtures("native_dir")
def test_cuda_and_nvml_show_the_same(allot: Run, root: Path) -> None:
    pytest.importorskip("cuda.bindings")
    done = allot(*SHARE, sys.executable, root / "examples" / "see_my_share.py")
    assert done.returncode == 0, done.stderr
    device, cuda, nvml = done.stdout.splitlines()
    assert device.startswith("device: NVIDIA A100")
    assert cuda.split()[1:] == nvml.split()[1:]
    assert cuda.endswith(" of 4096 MiB free")


@pytest.fixture
def environment(native_dir: Path, state_dir: Path, tmp_path: Path) -> dict[str, str]:
    """Variables with an `allot` on their PATH."""
    assert native_dir.is_dir()
    allot = tmp_path / "allot"
    allot.write_text(f'#!/bin/sh\nexec {sys.executable} -m allotment "$@"\n')
    allot.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {**os.environ, "ALLOTMENT_STATE": str(state_dir), "PATH": path}


@pytest.fixture
def script(
    environment: dict[str, str], root: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs an example's shell script."""

    def run(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(root / "examples" / name)],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    return run


def kernels(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"kernels +(\d+) of", text)]


def test_two_at_once(script: Run) -> None:
    done = script("two_at_once.sh")
    assert done.returncode == 0, done.stderr
    assert "the greedy one ended with 9" in done.stdout
    assert "the modest one ended with 0" in done.stdout


@pytest.mark.measured
def test_two_trainings_get_their_parts(script: Run) -> None:
    def ratios() -> tuple[float, float]:
        done = script("two_trainings.sh")
        assert done.returncode == 0, done.stderr
        small, large = kernels(done.stdout)
        last = done.stdout.splitlines()[-1]
        assert last.startswith("of the GPU's time: ")
        parts = {name: float(part) for name, part in re.findall(r"(small|large) ([0-9.]+)%", last)}
        return large / small, parts["large"] / parts["small"]

    # They do not start at the same instant, and a busy computer starts programs slowly.
    found = undisturbed(ratios, lambda ratios: min(ratios) > 1.4)
    assert min(found) > 1.4


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
@pytest.mark.parametrize(
    "name",
    ["two_at_once.sh", "two_trainings.sh", "two_big_jobs.sh", "service_beside_batch.sh"],
)
def test_an_example_that_is_interrupted_leaves_nothing(
    environment: dict[str, str], root: Path, tmp_path: Path, name: str, signum: int
) -> None:
    """Ctrl-C goes to all of the terminal's programs; those started with & do not hear it."""
    here = tmp_path / "here"
    here.mkdir()
    process = subprocess.Popen(
        ["sh", str(root / "examples" / name)],
        env={**environment, "TMPDIR": str(here), "SECONDS_EACH": "600", "LAUNCHES": "30000"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    shares = Path(environment["ALLOTMENT_STATE"]) / "shares"
    wait_until(lambda: shares.is_dir() and any(shares.glob("[!.]*")))
    assert (name == "two_at_once.sh") != any(here.glob("tmp.*"))
    os.killpg(process.pid, signum)
    assert process.wait(timeout=90) == 130
    assert not any(here.iterdir())
    wait_until(lambda: not is_there(process.pid))


def is_there(group: int) -> bool:
    """Does a process of this group run?"""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.measured
def test_a_service_beside_a_batch_job(script: Run) -> None:
    def service() -> tuple[str, int]:
        done = script("service_beside_batch.sh", SECONDS_EACH="2")
        assert done.returncode == 0, done.stderr
        alone, beside, batch = done.stdout.splitlines()
        assert alone.startswith("the service alone:  latency   p50 ")
        assert beside.startswith("beside the batch:   latency   p50 ")
        (ran,) = kernels(batch)
        return alone.removeprefix("the service alone:  latency   p50 "), ran

    # The job had the GPU for about four seconds, of which the service took a fiftieth.
    p50, ran = undisturbed(service, lambda found: found[0].startswith("1") and found[1] > 4000)
    assert p50.startswith("1")
    assert ran > 4000


def test_what_the_quickstart_does_by_hand(script: Run, root: Path, tmp_path: Path) -> None:
    text = (root / "docs" / "quickstart.md").read_text()
    (block,) = re.findall(r"<!-- tested: by hand -->\n```console\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.removeprefix("$ ") for line in block.splitlines()]
    assert "allot ps" in lines[-1]
    # The programs that it leaves in the background end with it here.
    lines[-1] = lines[-1].replace("sleep 1", "until allot ps | grep -q mine; do sleep 0.1; done")
    path = tmp_path / "by_hand.sh"
    path.write_text("\n".join([*lines, "kill $!", "wait $!"]))
    shown = script(str(path)).stdout
    assert "CUDA_ERROR_OUT_OF_MEMORY" in shown
    (share,) = [line for line in shown.splitlines() if line.startswith("mine")]
    assert "4Gi" in share


def test_what_an_example_needs_is_said(root: Path) -> None:
    text = (root / "examples" / "README.md").read_text()
    for path in (root / "examples").glob("*.py"):
        for needed in re.findall(r"^pip install .*$", path.read_text(), flags=re.MULTILINE):
            assert text.index(f"$ {needed}") < text.index(f"python {path.name}")


def test_what_is_compiled_by_the_readme_is_ignored(root: Path) -> None:
    if not (root / ".git").exists():
        pytest.skip("this is no clone")
    done = subprocess.run(["git", "check-ignore", "examples/fill"], cwd=root, check=False)
    assert done.returncode == 0


def test_two_big_jobs_take_turns_in_one_memory(script: Run) -> None:
    done = script("two_big_jobs.sh", LAUNCHES="300")
    assert done.returncode == 0, done.stderr
    assert kernels(done.stdout) == [300, 300]
    assert done.stdout.count("got 2.1Gi of 2.1Gi") == 2
