# SPDX-License-Identifier: Apache-2.0
"""Everything that wants a real NVIDIA GPU, by one command: limits under PyTorch, views, overheads.

    python bench/gpu/run.py                     on a GPU (driver 525 or later), with PyTorch
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
from measuring import QUESTIONS, measure  # noqa: E402
from places import ROOT, Place, real_place, simulated_place  # noqa: E402
from tables import put_between_markers, render_markdown, render_text  # noqa: E402

from allotment.model.errors import AllotError, PrerequisiteError  # noqa: E402

COMMAND = "python bench/gpu/run.py"


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulated", action="store_true", help="dry run on a simulated GPU")
    parser.add_argument("--quick", action="store_true", help="few samples")
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
        results = checks.run_all(place, python=chosen.python, with_torch=torch is not None)
        bench = measure(place, Sizes(quick=chosen.quick), only=list(QUESTIONS))
    document = bench.to_document() | {
        "torch": torch,
        "checks": [result.to_document() for result in results],
    }
    path = chosen.out / "gpu-results.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(checks.render_text(results), render_text(bench), f"written: {path}", sep="\n\n")
    if chosen.markdown is not None:
        body = "\n\n".join(
            (checks.render_markdown(results), render_markdown(bench, command=COMMAND))
        )
        put_between_markers(
            chosen.markdown, name="gpu-bench", title="On a real GPU, with PyTorch", body=body
        )
    return (
        0 if not bench.failures and all(result.is_right is not False for result in results) else 1
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AllotError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
