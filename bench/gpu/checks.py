# SPDX-License-Identifier: Apache-2.0
"""The checks of the GPU run: what was expected of a share under real programs, and what came."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.gpu.rig import GpuRig
from bench.harness.options import Options
from bench.harness.results import Result, check
from bench.overhead.rig import ShareRig

HERE: Final = Path(__file__).resolve().parent
MIB: Final = 1 << 20
GIB: Final = 1 << 30
LIMIT: Final = 4 * GIB
GRANULE: Final = 2 * MIB
POOL_GROWTH: Final = 32 * MIB  # what the driver adds to a pool at least
SCENARIO_SECONDS: Final = 300
_MODES: Final = {
    "the caching allocator": "",
    "expandable_segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}


def gpu_checks(rig: GpuRig, options: Options) -> Iterator[Result]:
    """Run every check that this GPU and this Python can."""
    rig.require_torch()
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as state:
        runner = Runner(rig=rig.shares, state=Path(state), python=options.python)
        for group in (_views, _burns, _torch_fills, _torch_graphs, _torch_rate):
            print(f"checking: {group.__name__.strip('_')}", file=sys.stderr)
            if group.__name__.startswith("_torch") and rig.torch is None:
                name = group.__name__.strip("_").replace("_", " ")
                yield check(name, is_right=None, seen="no PyTorch here")
                continue
            yield from group(runner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs programs inside `allot run` and outside of it."""

    rig: ShareRig
    state: Path
    python: str

    def shared(self, *command: str, memory: str = "4Gi") -> list[str]:
        """Return the command line of a program inside a share of its own."""
        spec = ["--simulated", self.rig.spec] if self.rig.spec else []
        allot = [sys.executable, "-m", "allotment", "run", "--memory", memory, *spec]
        return [*allot, "--gpu", self.rig.device.uuid, "--", *command]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of `allot run`."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith("ALLOTMENT_")
        }
        return {**kept, "ALLOTMENT_STATE": str(self.state), **variables}

    def answer(self, command: list[str]) -> tuple[dict[str, Any], int]:
        """Run to the end; the JSON object on stdout, and the exit status."""
        done = subprocess.run(
            command,
            env=self.environment({}),
            capture_output=True,
            text=True,
            timeout=SCENARIO_SECONDS,
            check=False,
        )
        try:
            return json.loads(done.stdout), done.returncode
        except json.JSONDecodeError:
            message = f"{command} answered nothing: {done.stderr.strip()[-2000:]}"
            raise RuntimeError(message) from None

    @contextmanager
    def scenario(
        self, name: str, variables: Mapping[str, str] | None = None, *, inside: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Run a PyTorch scenario; it still holds its memory within the block."""
        command = [self.python, str(HERE / "scenario.py"), name]
        environment = self.environment(variables or {})
        if not inside:
            environment |= self.rig.bare()
        program = subprocess.Popen(
            self.shared(*command) if inside else command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            line = "" if program.stdout is None else program.stdout.readline()
            if not line:
                _, complaint = program.communicate()
                message = f"scenario {name} answered nothing: {complaint.strip()[-2000:]}"
                raise RuntimeError(message)
            yield json.loads(line)
        finally:
            program.communicate("\n", timeout=SCENARIO_SECONDS)


def _views(runner: Runner) -> Iterator[Result]:
    seen, _ = runner.answer(runner.shared(sys.executable, str(HERE / "views.py")))
    cuda, nvml, smi = seen["cuda"], seen["nvml"], seen["nvidia_smi"]
    yield check(
        name="CUDA shows the share",
        is_right=not any(cuda["results"])
        and cuda["devices"] == 1
        and cuda["total_bytes"] == cuda["device_bytes"] == LIMIT,
        seen=f"{cuda['devices']} device, total {cuda['total_bytes']}, free {cuda['free_bytes']}",
    )
    used = LIMIT - cuda["free_bytes"]
    yield check(
        name="NVML v1 and v2 agree with CUDA",
        is_right=nvml["devices"] == 1
        and all(
            nvml[version]["total_bytes"] == LIMIT and nvml[version]["used_bytes"] == used
            for version in ("v1", "v2")
        ),
        seen=f"total {nvml['v1']['total_bytes']}, used {nvml['v1']['used_bytes']} (v1), "
        f"{nvml['v2']['used_bytes']} (v2); CUDA used {used}",
    )
    yield check(
        name="NVML lists the share's process as the share sees it",
        is_right=nvml["processes"] == {str(seen["pid"]): used},
        seen=f"{nvml['processes']}, process {seen['pid']}",
    )
    yield check(
        name="nvidia-smi shows the share",
        is_right=None if smi is None else smi["devices"] == 1 and smi["total_mib"] == LIMIT // MIB,
        seen="no nvidia-smi here" if smi is None else str(smi),
    )


def _burns(runner: Runner) -> Iterator[Result]:
    for api in ("plain", "async", "pool", "vmm", "managed", "array"):
        options = ["--memory", "6Gi", "--chunk", "2Mi", "--api", api, "-o", "json"]
        report, status = runner.answer(
            runner.shared(sys.executable, "-m", "allotment", "burn", *options)
        )
        (process,) = report["processes"]
        before, after = process["memory_before"], process["memory_after"]
        name = f"`allot burn --api {api}` gets all of its share and no more"
        if before is None or after is None:
            yield check(name=name, is_right=False, seen=str(process["errors"]))
            continue
        yield check(
            name=name,
            is_right=status == 9
            and before["total_bytes"] == LIMIT
            and after["free_bytes"] < (POOL_GROWTH if api in {"async", "pool"} else GRANULE)
            and report["got_bytes"] <= before["free_bytes"],
            seen=f"got {report['got_bytes']} of {before['free_bytes']} free, "
            f"{after['free_bytes']} left, exit status {status}",
        )
    options = ["--memory", "512Mi", "--seconds", "2", "--graph", "20", "--streams", "2"]
    report, status = runner.answer(
        runner.shared(sys.executable, "-m", "allotment", "burn", *options, "-o", "json")
    )
    yield check(
        name="graphs of kernels run in a share",
        is_right=status == 0 and report["kernels"] > 0,
        seen=f"{report['kernels']} kernels, {report['event_seconds']} s by events",
    )


def _configuration(setting: str) -> dict[str, str]:
    # PyTorch has a newer name for it, and reads this one as well.
    return {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}


def _torch_fills(runner: Runner) -> Iterator[Result]:
    for mode, setting in _MODES.items():
        with runner.scenario("refill", _configuration(setting)) as seen:
            physical = runner.rig.used_by(seen["pid"])
        unused = seen["left_bytes"]
        yield check(
            name=f"PyTorch, {mode}: all of the share, and no more",
            is_right=seen["total_bytes"] == LIMIT
            and seen["refusal"] == "OutOfMemoryError"
            and unused < (POOL_GROWTH if mode == "cudaMallocAsync" else 2 * GRANULE)
            and (physical is None or physical <= LIMIT),
            seen=f"{seen['got_bytes']} in tensors, {seen['reserved_bytes']} reserved, {unused} "
            f"left; {physical} by NVML outside; then {seen['refusal']}",
        )
        yield check(
            name=f"PyTorch, {mode}: what is given back can be had again",
            is_right=seen["got_bytes"] >= seen["first_got_bytes"] - GRANULE,
            seen=f"first {seen['first_got_bytes']}, then {seen['got_bytes']}",
        )


def _torch_graphs(runner: Runner) -> Iterator[Result]:
    for mode, setting in _MODES.items():
        with runner.scenario("graphs", _configuration(setting)) as seen:
            # Simulated kernels take time and compute nothing.
            right = runner.rig.machine is not None or seen["wrong"] == 0
            yield check(
                name=f"PyTorch CUDA graphs, {mode}",
                is_right=right and seen["refusal"] == "OutOfMemoryError",
                seen=f"{seen['replays']} replays, {seen['wrong']} wrong; too large: "
                f"{seen['refusal']}",
            )


def _torch_rate(runner: Runner) -> Iterator[Result]:
    ratios = []
    for _ in range(3):
        with runner.scenario("train", inside=False) as bare:
            pass
        with runner.scenario("train") as shared:
            pass
        ratios.append(shared["steps_per_second"] / bare["steps_per_second"])
    middle = sorted(ratios)[1]
    yield check(
        name="PyTorch training in a share, rate beside the whole GPU",
        is_right=middle > 0.97,
        seen=f"{middle:.3f} (median of 3 pairs)",
    )
