# SPDX-License-Identifier: Apache-2.0
"""Measurements, as ratios beside a base in the same run: `python -m bench --list`.

Clusters, nodes and MIG GPUs are those of the tests, so their folders are on the path.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent / "tests"

for _folder in ("cluster", "twins"):
    if str(_TESTS / _folder) not in sys.path:
        sys.path.append(str(_TESTS / _folder))
