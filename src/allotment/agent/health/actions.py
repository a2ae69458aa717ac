# SPDX-License-Identifier: Apache-2.0
"""What an XID means for a GPU: NVIDIA's catalogue, the file's overrides, and NVIDIA's variables.

An `Action` is what people have to do, by NVIDIA's names; its `Effect` is what the agent does
meanwhile. The same XID does not have to end the same way everywhere: whoever knows better says so
in the configuration (`allotment.health.xid`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum, StrEnum
from typing import Final

from allotment.agent.config.effective import HealthConfig
from allotment.agent.health.xids import CATALOGUE, meaning_of
from allotment.model.errors import UsageError

__all__ = [
    "DISABLE_VARIABLE",
    "ENABLE_VARIABLE",
    "Action",
    "Effect",
    "XidPolicy",
    "catalogue_action",
    "describe_xid",
    "parse_action",
    "policy_of",
]

DISABLE_VARIABLE: Final = "DP_DISABLE_HEALTHCHECKS"
ENABLE_VARIABLE: Final = "DP_ENABLE_HEALTHCHECKS"
_EVERYTHING: Final = "all"
_ALL_WORDS: Final = frozenset({_EVERYTHING, "xids"})


class Effect(Enum):
    """What the agent does about it."""

    NOTHING = "it is counted, and that is all"
    REPORT = "it is reported; the GPU stays in service"
    TEST = "the GPU is tested, and stays in service unless the test fails"
    TAKE_OUT = "the GPU is out of service until it passes its tests"
    WAIT_FOR_RESET = "the GPU is out of service until it has been reset and passes its tests"


class Action(StrEnum):
    """What has to be done, by the names of NVIDIA's catalogue in the file's spelling."""

    IGNORE = "ignore"
    RESTART_APP = "restart-app"
    RESTART_VM = "restart-vm"
    UPDATE_SOFTWARE = "update-software"
    TEST = "test"
    TAKE_OUT = "take-out"
    RESET_GPU = "reset-gpu"
    CHECK_MECHANICALS = "check-mechanicals"
    CONTACT_SUPPORT = "contact-support"
    RESTART_NODE = "restart-node"

    @property
    def effect(self) -> Effect:
        """What the agent does."""
        return _EFFECTS[self]

    @property
    def words(self) -> str:
        """Say it to people, as a request."""
        return _WORDS[self]


_EFFECTS: Final = {
    Action.IGNORE: Effect.NOTHING,
    Action.UPDATE_SOFTWARE: Effect.REPORT,
    Action.RESTART_APP: Effect.TEST,
    Action.RESTART_VM: Effect.TEST,
    Action.TEST: Effect.TEST,
    Action.TAKE_OUT: Effect.TAKE_OUT,
    Action.RESET_GPU: Effect.WAIT_FOR_RESET,
    Action.CHECK_MECHANICALS: Effect.WAIT_FOR_RESET,
    Action.CONTACT_SUPPORT: Effect.WAIT_FOR_RESET,
    Action.RESTART_NODE: Effect.WAIT_FOR_RESET,
}
_WORDS: Final = {
    Action.IGNORE: "nothing has to be done",
    Action.UPDATE_SOFTWARE: "update the driver and the firmware",
    Action.RESTART_APP: "restart the program that met it",
    Action.RESTART_VM: "restart the virtual machine that has the GPU",
    Action.TEST: "the GPU is tested",
    Action.TAKE_OUT: "the GPU is tested before it is used again",
    Action.RESET_GPU: "reset the GPU",
    Action.CHECK_MECHANICALS: "check the GPU's seating, power and cables",
    Action.CONTACT_SUPPORT: "reset the GPU; if it comes again, ask the vendor's support",
    Action.RESTART_NODE: "restart the node",
}

# NVIDIA's buckets, where they are called otherwise here or say what we can do at once.
_BUCKETS: Final = {
    "": Action.TEST,
    "CHECK_UVM": Action.RESET_GPU,  # unified memory may be in use, and NVML does not say
    "RESTART_BM": Action.RESTART_NODE,
    "UPDATE_SWFW": Action.UPDATE_SOFTWARE,
    "WORKFLOW_NVLINK5_ERR": Action.TEST,  # depends on bits that NVML does not tell
    "WORKFLOW_NVLINK_ERR": Action.RESET_GPU,
    "WORKFLOW_XID_45": Action.IGNORE,  # the XID before it counts
    "WORKFLOW_XID_48": Action.RESET_GPU,
    "XID_154": Action.TEST,  # the test asks the driver what has to be done
}

UNLISTED: Final = Action.CONTACT_SUPPORT
"""Of numbers that the catalogue calls unused: they are those of older GPUs."""
_NEWER: Final = Action.TEST
"""Of numbers after the catalogue's last one: the latest ones were mostly information."""


def parse_action(text: str) -> Action:
    """Read an action by its name here or in NVIDIA's catalogue; raise `UsageError`."""
    bucket = text.strip().upper().replace("-", "_")
    if bucket in _BUCKETS and bucket:
        return _BUCKETS[bucket]
    name = bucket.lower().replace("_", "-")
    if name in set(Action):
        return Action(name)
    known = sorted(Action)
    close = get_close_matches(name, known, n=1)
    raise UsageError(
        f"there is no action {text!r}",
        hint=f"did you mean {close[0]}?" if close else f"actions: {', '.join(known)}",
    )


def catalogue_action(xid: int) -> Action:
    """Return what NVIDIA's catalogue says."""
    if xid in CATALOGUE:
        bucket = CATALOGUE[xid][0]
        return _BUCKETS[bucket] if bucket in _BUCKETS else parse_action(bucket)
    return _NEWER if xid > max(CATALOGUE) else UNLISTED


def describe_xid(xid: int) -> str:
    """Name an XID for people: `XID 95 (uncontained memory error)`."""
    return f"XID {xid} ({meaning_of(xid)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class XidPolicy:
    """What is done about each XID on this node."""

    overrides: Mapping[int, Action] = field(default_factory=dict)
    """The file's."""
    disabled: frozenset[int] = frozenset()
    enabled: frozenset[int] = frozenset()
    are_all_disabled: bool = False
    are_all_enabled: bool = False
    is_off: bool = False
    """Nothing takes a GPU out of service (`DP_DISABLE_HEALTHCHECKS=all`)."""
    notes: tuple[str, ...] = ()
    """What of the variables could not be read."""

    def action(self, xid: int) -> Action:
        """Return the action for an XID.

        Later ones win: catalogue, file, disabled by variable, enabled by variable. To enable one
        by name means, as in NVIDIA's plugin, that it takes the GPU out of service; to enable all
        means there that none is disabled.
        """
        action = self.overrides.get(xid, catalogue_action(xid))
        if xid in self.enabled:
            mild = action.effect in {Effect.NOTHING, Effect.REPORT, Effect.TEST}
            return Action.TAKE_OUT if mild else action
        if self.are_all_enabled:
            return action
        if self.are_all_disabled or xid in self.disabled:
            return Action.IGNORE
        return action


def policy_of(config: HealthConfig, environment: Mapping[str, str]) -> XidPolicy:
    """Join the file's section with NVIDIA's variables; raise `UsageError` for an unknown action.

    What is no number in a variable is passed over, as NVIDIA's plugin does, with a note.
    """
    notes: list[str] = []
    disabled = _words(environment, DISABLE_VARIABLE)
    enabled = _words(environment, ENABLE_VARIABLE)
    return XidPolicy(
        overrides={xid: parse_action(name) for xid, name in config.xid_actions},
        disabled=_numbers(disabled, DISABLE_VARIABLE, notes),
        enabled=_numbers(enabled, ENABLE_VARIABLE, notes),
        are_all_disabled=bool(_ALL_WORDS & set(disabled)),
        are_all_enabled=bool(_ALL_WORDS & set(enabled)),
        is_off=_EVERYTHING in disabled and not enabled,
        notes=tuple(notes),
    )


def _words(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    words = (word.strip() for word in environment.get(name, "").lower().split(","))
    return tuple(word for word in words if word)


def _numbers(words: tuple[str, ...], name: str, notes: list[str]) -> frozenset[int]:
    numbers = set()
    for word in words:
        if word.isascii() and word.isdecimal():
            numbers.add(int(word))
        elif word not in _ALL_WORDS:
            notes.append(f"{name}: {word!r} is no XID, and is ignored")
    return frozenset(numbers)
