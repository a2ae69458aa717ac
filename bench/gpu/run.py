# SPDX-License-Identifier: Apache-2.0
"""Everything that wants a real NVIDIA GPU, by one command: limits, views, overheads, turns.

    python bench/gpu/run.py                     on a GPU (driver 525 or later), with PyTorch
    python bench/gpu/run.py --only turns        shares of the GPU's time alone
    python bench/gpu/run.py --python PATH       PyTorch lives in that Python
    python bench/gpu/run.py --simulated         a dry run of what needs no real GPU
    python bench/gpu/run.py --markdown          also into docs/performance.md

Writes gpu-results.json beside the table (--out). Each check says what it expected; the exit status
is 1 when one failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import checks  # noqa: E402 - found only after the line above
from amounts import Sizes  # noqa: E402
from findings import Finding, Findings  # noqa: E402
from findings import render_markdown as render_findings_as_markdown  # noqa: E402
from findings import render_text as render_findings  # noqa: E402
from grounds import ground, real_ground  # noqa: E402
from measuring import QUESTIONS, measure  # noqa: E402
from places import ROOT, Place, facts, real_place, simulated_place  # noqa: E402
from tables import put_between_markers, render_markdown, render_text  # noqa: E402
from turns import turning  # noqa: E402

from allotment.model.errors import AllotError, PrerequisiteError  # noqa: E402

COMMAND = "python bench/gpu/run.py"
PARTS = ("checks", "overheads", "turns")


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulated", action="store_true", help="dry run on a simulated GPU")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="some of it; default: all"
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


def measure_turns(chosen: argparse.Namespace, place: Place, *, with_torch: bool) -> Findings:
    """Measure shares of the GPU's time; what fails takes the rest away and says so."""
    found: list[Finding] = []
    failures: dict[str, str] = {}
    with ground(gpus=1) if chosen.simulated else real_ground(place.device) as where:
        try:
            found.extend(
                turning(where, quick=chosen.quick, python=chosen.python, with_torch=with_torch)
            )
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            failures["shares of time"] = str(error)
    return Findings(facts=facts(place.driver), findings=found, failures=failures)


def main(words: list[str]) -> int:
    """Check, measure and report."""
    chosen = arguments(words)
    with simulated_place() if chosen.simulated else real_place() as place:
        torch = torch_version(chosen.python, place)
        if torch is None and not chosen.simulated:
            raise PrerequisiteError(
                f"{chosen.python} has no PyTorch that can use {place.device.name}",
                hint="pip install torch, or name another Python with --python",
            )
        results: list[checks.Check] = []
        if "checks" in chosen.only:
            results = checks.run_all(place, python=chosen.python, with_torch=torch is not None)
        questions = list(QUESTIONS) if "overheads" in chosen.only else []
        bench = measure(place, Sizes(quick=chosen.quick), only=questions)
        turns = Findings(facts=bench.facts, findings=(), failures={})
        if "turns" in chosen.only:
            turns = measure_turns(chosen, place, with_torch=torch is not None)
    document = bench.to_document() | {
        "torch": torch,
        "compute": turns.to_document(),
        "checks": [result.to_document() for result in results],
    }
    path = chosen.out / "gpu-results.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(
        checks.render_text(results),
        render_text(bench),
        render_findings(turns),
        f"written: {path}",
        sep="\n\n",
    )
    if chosen.markdown is not None:
        body = "\n\n".join(
            (
                checks.render_markdown(results),
                render_markdown(bench, command=COMMAND),
                render_findings_as_markdown(turns, command=COMMAND),
            )
        )
        put_between_markers(
            chosen.markdown, name="gpu-bench", title="On a real GPU, with PyTorch", body=body
        )
    return (
        1
        if bench.failures or turns.failures or any(result.is_right is False for result in results)
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
