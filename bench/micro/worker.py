# SPDX-License-Identifier: Apache-2.0
"""What pyperf starts again and again: `python -m bench.micro.worker NAME [pyperf's options]`."""

from __future__ import annotations

import sys

import pyperf

from bench.micro.setups import SETUPS

if __name__ == "__main__":
    name = sys.argv.pop(1)
    runner = pyperf.Runner(program_args=("-m", "bench.micro.worker", name))
    # The manager only starts workers.
    runner.parse_args()
    runner.bench_func(name, SETUPS[name]() if runner.args.worker else object)
