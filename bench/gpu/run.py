# SPDX-License-Identifier: Apache-2.0
"""Everything that wants a real NVIDIA GPU, by one command: limits, overheads, turns, MPS, MIG.

    python bench/gpu/run.py                     on a GPU (driver 525 or later), with PyTorch
    python bench/gpu/run.py gpu-turns           shares of the GPU's time alone
    python bench/gpu/run.py gpu-mps             shares that compute at the same time alone
    python bench/gpu/run.py --change-settings   also what sets the compute mode, and switches MIG
    python bench/gpu/run.py --python PATH       PyTorch lives in that Python
    python bench/gpu/run.py --simulated         a dry run of what needs no real GPU

The same as `python -m bench gpu`. Each check reports what it saw; the exit status is 1 when one
failed. The GPU's settings stay as they are unless `--change-settings` is given, as root; then they
are restored. What cannot run reports why.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.__main__ import main
from bench.harness.registry import BENCHES

if __name__ == "__main__":
    words = sys.argv[1:]
    if not {each.name for each in BENCHES} & set(words):
        words = ["gpu", *words]
    sys.exit(main(words))
