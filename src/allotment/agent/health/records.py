# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a GPU's health, and how patient one is. Values; `machine` changes them."""

from dataclasses import dataclass
from enum import StrEnum

from allotment.agent.health.actions import Action
from allotment.devices.watching import Vitals

__all__ = ["Need", "Record", "Rules", "State"]


class State(StrEnum):
    """Where a GPU stands."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"


class Need(StrEnum):
    """What has to be seen before an unhealthy GPU is tested."""

    NOTHING = "nothing"
    TESTS = "tests"
    ANSWER = "an answer"
    RESET = "a reset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How patient one is; times in seconds."""

    silence_s: float = 10.0
    """So long a GPU may not answer before it is unhealthy."""
    test_pause_s: float = 5.0
    """Between tests, and after the first failed one."""
    longest_pause_s: float = 600.0
    tests_to_pass: int = 2
    most_tests: int = 64
    memory_s: float = 3600.0
    """So long it counts against a GPU that it was taken out."""
    calm_s: float = 10.0
    """So long the driver has to say that nothing has to be done, to be believed."""
    sympathy_s: float = 60.0
    """So long after an XID about memory errors, counts of them are taken for its own."""
    recovers: bool = True
    """False: what is unhealthy stays so until the agent starts anew."""
    memory_errors: Action = Action.RESET_GPU
    """What uncorrected memory errors mean that no XID announced: the policy's for XID 48."""
    failed_repairs: Action = Action.RESET_GPU
    """What rows that cannot be remapped mean: the policy's for XID 64."""
    drivers_word: Action = Action.TEST
    """What the driver's recovery action means: the policy's for XID 154. IGNORE: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All that is remembered of one GPU. Times are of one clock that only goes forward."""

    state: State = State.HEALTHY
    need: Need = Need.NOTHING
    reason: str = ""
    """What is wrong, for people; empty while nothing is."""
    action: Action | None = None
    """What people have to do about it."""
    xid: int | None = None
    since: float = 0.0
    """When it came into this state."""
    test_at: float | None = None
    """When the next test is due."""
    passed: int = 0
    """Tests passed in a row."""
    failed: int = 0
    """Tests failed since it was taken out."""
    was_away: bool = False
    """Since it was taken out it was lost or gone, or the driver was."""
    calm_since: float | None = None
    """Since when the driver has said that nothing has to be done."""
    vitals: Vitals | None = None
    """The last ones it told."""
    memory_xid_at: float | None = None
    """When an XID about memory errors was last seen."""
    taken_out: tuple[float, ...] = ()
    """When it was, as far as that counts against it."""

    @property
    def is_offered(self) -> bool:
        """Whether containers may get it."""
        return self.state in {State.HEALTHY, State.SUSPECT}

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a record that cannot be."""
        healthy = self.state is State.HEALTHY
        assert healthy == (self.reason == ""), self  # noqa: S101 - what the name says
        assert (self.need is not Need.NOTHING) == (self.state is State.UNHEALTHY), self  # noqa: S101
        testing = self.state in {State.SUSPECT, State.RECOVERING}
        assert not testing or self.test_at is not None, self  # noqa: S101
        assert not healthy or self.test_at is None, self  # noqa: S101
        assert self.need is not Need.TESTS or self.test_at is not None, self  # noqa: S101
        assert self.state is State.RECOVERING or self.passed == 0, self  # noqa: S101
