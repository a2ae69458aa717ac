# SPDX-License-Identifier: Apache-2.0
"""How long to wait before asking again, so that thousands of nodes do not all ask at once."""

from dataclasses import dataclass, field
from random import Random

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Waits that double from `first_s` up to `most_s`, each a random part of at least its half."""

    first_s: float = 0.2
    most_s: float = 10.0
    random: Random = field(default_factory=Random)
    _failures: int = 0

    def next(self, *, at_least_s: float | None = None) -> float:
        """Return how many seconds to wait after one more failure.

        `at_least_s`: what the server asked for, up to a minute of which is honoured.
        """
        longest = min(self.most_s, self.first_s * float(1 << min(self._failures, 30)))
        self._failures += 1
        wait = longest * self.random.uniform(0.5, 1.0)
        return max(wait, min(at_least_s or 0.0, 60.0))

    def reset(self) -> None:
        """Begin anew: it worked."""
        self._failures = 0
