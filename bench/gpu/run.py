# SPDX-License-Identifier: Apache-2.0
"""Everything that wants a real NVIDIA GPU, by one command: limits, overheads, turns, MPS, MIG.

    python bench/gpu/run.py                     on a GPU (driver 525 or later), with PyTorch
    python bench/gpu/run.py --only turns        shares of the GPU's time alone
    python bench/gpu/run.py --only mps          shares that compute at the same time alone
    python bench/gpu/run.py --change-settings   also what sets the compute mode, and switches MIG
    python bench/gpu/run.py --python PATH       PyTorch lives in that Python
    python bench/gpu/run.py --simulated         a dry run of what needs no real GPU
    python bench/gpu/run.py --markdown          also into docs/performance.md

Writes gpu-results.json beside the table (--out). Each check says what it expected; the exit status
is 1 when one failed. The GPU's settings are left as they are unless `--change-settings` is given,
as root; then they are put back. What cannot run says why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import checks  # noqa: E402 - found only after the line above
from amounts import Sizes  # noqa: E402
from findings import Finding, Findings  # noqa: E402
from findings import render_markdown as render_findings_as_markdown  # noqa: E402
from findings import render_text as render_findings  # noqa: E402
from grounds import Ground, ground, real_ground  # noqa: E402
from measuring import QUESTIONS, measure  # noqa: E402
from mig_slice import cut_one  # noqa: E402
from mps_shares import measure_mps  # noqa: E402
from places import ROOT, SIMULATED_SPEC, Place, facts, real_place, simulated_place  # noqa: E402
from tables import put_between_markers, render_markdown, render_text  # noqa: E402
from turns import turning  # noqa: E402

from allotment.model.errors import AllotError, PrerequisiteError, UsageError  # noqa: E402

COMMAND = "python bench/gpu/run.py"
MODES = ("turns", "mps", "mig")
"""One part for each mode: soft, mps and mig."""
PARTS = ("checks", "overheads", *MODES)
WITH_TORCH = {"checks", "turns"}
"""What means little without it."""
MIG_MODEL = "h100-80gb"
"""Simulated: its MIG is switched without a reset."""


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulated", action="store_true", help="dry run on a simulated GPU")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="some of it; default: all"
    )
    parser.add_argument(
        "--change-settings",
        action="store_true",
        help="set the compute mode while MPS runs, and switch MIG for a slice; both are put back",
    )
    parser.add_argument("--python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--out", type=Path, default=Path.cwd(), help="folder of gpu-results.json")
    parser.add_argument(
        "--markdown",
        nargs="?",
        type=Path,
        const=ROOT / "docs" / "performance.md",
        help="also write the tables into this page, between their markers",
    )
    return parser.parse_args(words)


def torch_version(python: str, place: Place) -> str | None:
    """Tell which PyTorch that Python has; None when it has none that can use this GPU."""
    command = (
        "import torch; assert torch.cuda.is_available(); "
        "print(torch.__version__, 'CUDA', torch.version.cuda)"
    )
    try:
        answer = subprocess.run(
            [python, "-W", "ignore", "-c", command],
            env=place.bare(),
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def prepare(folder: Path) -> None:
    """Make the folder of the results before anything is measured: that takes minutes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out: {folder} cannot be made: {error.strerror}", hint="name another folder"
        ) from None


def measure_modes(
    chosen: argparse.Namespace, place: Place, *, with_torch: bool
) -> tuple[list[checks.Check], Findings]:
    """Measure what each mode gives; what fails takes the rest of its part away and says so."""
    seen: list[checks.Check] = []
    found: list[Finding] = []
    failures: dict[str, str] = {}

    def ask(part: str, where: Ground) -> Iterator[checks.Check | Finding]:
        quick, change = chosen.quick, chosen.change_settings
        if part == "turns":
            yield from turning(where, quick=quick, python=chosen.python, with_torch=with_torch)
        elif part == "mps":
            yield from measure_mps(
                where,
                quick=quick,
                change_settings=change,
                python=chosen.python,
                with_torch=with_torch,
            )
        else:
            yield from cut_one(where, quick=quick, change_settings=change)

    for part in (each for each in MODES if each in chosen.only):
        model = MIG_MODEL if part == "mig" else SIMULATED_SPEC
        with ground(gpus=1, model=model) if chosen.simulated else real_ground(place.device) as on:
            try:
                for each in ask(part, on):
                    if isinstance(each, Finding):
                        found.append(each)
                    else:
                        seen.append(each)
            except (OSError, RuntimeError, AllotError, subprocess.SubprocessError) as error:
                failures[part] = str(error)
    return seen, Findings(facts=facts(place.driver), findings=found, failures=failures)


def main(words: list[str]) -> int:
    """Check, measure and report."""
    chosen = arguments(words)
    prepare(chosen.out)
    with simulated_place() if chosen.simulated else real_place() as place:
        torch = torch_version(chosen.python, place)
        if torch is None and not chosen.simulated and WITH_TORCH & set(chosen.only):
            raise PrerequisiteError(
                f"{chosen.python} has no PyTorch that can use {place.device.name}",
                hint="pip install torch, name another Python with --python, or leave that out:"
                f" --only {' '.join(each for each in PARTS if each not in WITH_TORCH)}",
            )
        results: list[checks.Check] = []
        if "checks" in chosen.only:
            results = checks.run_all(place, python=chosen.python, with_torch=torch is not None)
        questions = list(QUESTIONS) if "overheads" in chosen.only else []
        bench = measure(place, Sizes(quick=chosen.quick), only=questions)
        more, modes = measure_modes(chosen, place, with_torch=torch is not None)
        results += more
    document = bench.to_document() | {
        "torch": torch,
        "compute": modes.to_document(),
        "checks": [result.to_document() for result in results],
    }
    path = chosen.out / "gpu-results.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(
        checks.render_text(results),
        render_text(bench),
        render_findings(modes),
        f"written: {path}",
        sep="\n\n",
    )
    if chosen.markdown is not None:
        body = "\n\n".join(
            (
                checks.render_markdown(results),
                render_markdown(bench, command=COMMAND),
                render_findings_as_markdown(modes, command=COMMAND),
            )
        )
        put_between_markers(
            chosen.markdown, name="gpu-bench", title="On a real GPU, with PyTorch", body=body
        )
    return (
        1
        if bench.failures or modes.failures or any(result.is_right is False for result in results)
        else 0
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AllotError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
