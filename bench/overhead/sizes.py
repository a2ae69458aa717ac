# SPDX-License-Identifier: Apache-2.0
"""How much the benches of this room measure, and the units that they share."""

from __future__ import annotations

from typing import Final

GRANULE: Final = 2 << 20
MIB: Final = 1 << 20
GIB: Final = 1 << 30
_STARTERS: Final = 64
_KILLED: Final = 100


class Sizes:
    """How much to measure: all of it, or enough to see that it works."""

    def __init__(self, *, quick: bool) -> None:
        """Choose sample counts."""
        self.pairs = 2000 if quick else 50_000
        self.pairs_ms = 200 if quick else 2000
        self.crowd_pairs = 20_000 if quick else 400_000
        self.crowd_ms = 200 if quick else 2000
        self.single_rounds = 5 if quick else 40
        self.crowd_rounds = 1 if quick else 6
        self.starters = 8 if quick else _STARTERS
        self.life_pairs = 30 if quick else 400
        self.commands = 2 if quick else 15
        self.storm_ms = 500 if quick else 3000
        self.kill_rounds = 1 if quick else 3
        self.killed = 10 if quick else _KILLED
