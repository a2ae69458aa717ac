# SPDX-License-Identifier: Apache-2.0
"""XIDs: NVIDIA's catalogue, the configuration's overrides, and the action for each.

Facts of https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (columns *Code*,
*Description* and *Resolution Bucket (Immediate Action)*), for Ampere and later. Numbers that it
calls unused are left out; their action is `UNLISTED`.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import Enum, StrEnum
from typing import Final, Self

import msgspec

from allotment.agent.config.schema import HealthConfig
from allotment.model.errors import UsageError

_CATALOGUE: Final[Mapping[str, Mapping[str, Sequence[int]]]] = {
    "RESTART_APP": {
        "GPU stopped processing": (8,),
        "invalid or corrupted push buffer stream": (11, 32),
        "graphics engine exception": (13,),
        "invalid or illegal push buffer stream": (25,),
        "GPU memory page fault": (31,),
        "copy engine exception": (39, 40, 41),
        "video processor exception": (60,),
        "video decoder exception": (68,),
        "graphics engine class error": (69,),
        "copy engine error": (70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
        "corrupted data sent to the GPU": (80,),
        "image decoder error": (82, *range(99, 106)),
        "video decoder error": (83, 84, 88, 89, 96, 97, 98),
        "optical flow engine exception": (86,),
        "contained memory error": (94,),
        "optical flow engine error": (139,),
    },
    "IGNORE": {
        "error made up by a program": (14,),
        "driver firmware error": (37, 38),
        "a program hit a fault and was ended": (43,),
        "graphics engine fault during a context switch": (44,),
        "memory row or page marked for repair": (63,),
        "illegal access by the driver": (66, 67),
        "high rate of corrected memory errors": (92,),
        "InfoROM has been written too often": (93,),
        "test message": (106, 107),
        "NVLink remote translation error": (108,),
        "corrected errors of the link to the CPU": (121,),
        "NVLink access without privilege": (137,),
        "CUDA fast path error": (141,),
        "DLA memory error": (152,),
        "DLA timeout": (153,),
        "no resources are left for a repair": (157,),
        "channel retired": (160,),
        "channel could not be retired": (161,),
    },
    "RESET_GPU": {
        "GPU stopped processing": (46,),
        "internal micro-controller halt": (62,),
        "memory row or page could not be repaired": (64,),
        "uncontained memory error": (95,),
        "context switch timeout": (109,),
        "security fault": (110,),
        "GPU firmware (GSP) does not answer": (119,),
        "GPU firmware (GSP) error": (120,),
        "link training failed": (136,),
        "uncorrected memory error that could not be handled": (140,),
        "GPU initialisation error": (143,),
        "NVLink taken down by software": (155,),
        "resource retired: in force after a reset": (156,),
        "fatal timeout of the GPU": (158,),
    },
    "WORKFLOW_NVLINK5_ERR": {
        "NVLink error (SAW)": (144,),
        "NVLink error (RLW)": (145,),
        "NVLink error (TLW)": (146,),
        "NVLink error (TREX)": (147,),
        "NVLink error (NVLPW_CTRL)": (148,),
        "NVLink error (NETIR)": (149,),
        "NVLink error (MSE)": (150,),
    },
    "": {
        "power smoothing works again": (162,),
        "power smoothing is off": (163,),
        "power smoothing hardware is near its end": (164,),
        "power smoothing hardware is worn out": (165,),
        "NVLink traffic before it was encrypted": (166,),
        "PCIe timeout": (167,),
        "less memory than the model has": (168,),
        "internal micro-controller halt": (169,),
        "NVLink interrupt in confidential mode": (170,),
        "uncorrected error of device memory": (171,),
        "uncorrected error of on-chip memory": (172,),
    },
    "WORKFLOW_XID_45": {"programs ended because of an earlier error": (45,)},
    "WORKFLOW_XID_48": {"uncorrected (double-bit) memory error": (48,)},
    "CHECK_MECHANICALS": {"power is not connected to the GPU's board": (54,)},
    "WORKFLOW_NVLINK_ERR": {"NVLink error": (74,)},
    "UPDATE_SWFW": {"vGPU could not be started": (78,)},
    "RESTART_BM": {"GPU has fallen off the bus": (79,)},
    "CONTACT_SUPPORT": {"video encoder error": (142,)},
    "RESTART_VM": {"key rotation error": (151,)},
    "XID_154": {"the driver says that something has to be done about the GPU": (154,)},
    "CHECK_UVM": {"error of the link to the CPU": (159,)},
}


CATALOGUE: Final[Mapping[int, tuple[str, str]]] = {
    xid: (bucket, meaning)
    for bucket, meanings in _CATALOGUE.items()
    for meaning, xids in meanings.items()
    for xid in xids
}
"""By XID: NVIDIA's bucket of the immediate action (empty: there is none), and its meaning."""

LINKED: Final = frozenset({48, 62, 64, 74, 79, 95, 110, 120, 136, 155, 156, 158, 159})
"""XIDs that need a reset and that change the driver's recovery action, from R565 on (the column
*Xid 154 linkage*). After others it may say that nothing has to be done, and mean nothing by it."""


def meaning_of(xid: int) -> str:
    return CATALOGUE[xid][1] if xid in CATALOGUE else "not in NVIDIA's catalogue"


DISABLE_VARIABLE: Final = "DP_DISABLE_HEALTHCHECKS"
ENABLE_VARIABLE: Final = "DP_ENABLE_HEALTHCHECKS"
_EVERYTHING: Final = "all"
_ALL_WORDS: Final = frozenset({_EVERYTHING, "xids"})


class Effect(Enum):
    """What the agent does about an XID."""

    NOTHING = "it is only counted"
    REPORT = "it is reported; the GPU stays in service"
    TEST = "the GPU is tested, and stays in service unless the test fails"
    TAKE_OUT = "the GPU is out of service until it passes its tests"
    WAIT_FOR_RESET = "the GPU is out of service until it has been reset and passes its tests"


class Action(StrEnum):
    """What has to be done, by the names of NVIDIA's catalogue in the file's spelling."""

    effect: Effect
    """What the agent does."""
    words: str
    """The request to an administrator."""

    def __new__(cls, name: str, effect: Effect, words: str) -> Self:
        action = str.__new__(cls, name)
        action._value_ = name
        action.effect = effect
        action.words = words
        return action

    IGNORE = "ignore", Effect.NOTHING, "nothing has to be done"
    RESTART_APP = "restart-app", Effect.TEST, "restart the program that met it"
    RESTART_VM = "restart-vm", Effect.TEST, "restart the virtual machine that has the GPU"
    UPDATE_SOFTWARE = "update-software", Effect.REPORT, "update the driver and the firmware"
    TEST = "test", Effect.TEST, "the GPU is tested"
    TAKE_OUT = "take-out", Effect.TAKE_OUT, "the GPU is tested before it is used again"
    RESET_GPU = "reset-gpu", Effect.WAIT_FOR_RESET, "reset the GPU"
    CHECK_MECHANICALS = (
        "check-mechanicals",
        Effect.WAIT_FOR_RESET,
        "check the GPU's seating, power and cables",
    )
    CONTACT_SUPPORT = (
        "contact-support",
        Effect.WAIT_FOR_RESET,
        "reset the GPU; if it comes again, ask the vendor's support",
    )
    RESTART_NODE = "restart-node", Effect.WAIT_FOR_RESET, "restart the node"


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
"""For numbers that the catalogue calls unused: older GPUs have them."""
_NEWER: Final = Action.TEST
"""For numbers after the catalogue's last one."""


def parse_action(text: str) -> Action:
    """Read an action by its name here or in NVIDIA's catalogue; raise `UsageError`."""
    bucket = text.strip().upper().replace("-", "_")
    if bucket in _BUCKETS and bucket:
        return _BUCKETS[bucket]
    if bucket in Action.__members__:
        return Action[bucket]
    known = sorted(Action)
    close = get_close_matches(bucket.lower().replace("_", "-"), known, n=1)
    raise UsageError(
        f"there is no action {text!r}",
        hint=f"did you mean {close[0]}?" if close else f"actions: {', '.join(known)}",
    )


def catalogue_action(xid: int) -> Action:
    """Return the action of NVIDIA's catalogue."""
    if xid in CATALOGUE:
        bucket = CATALOGUE[xid][0]
        return _BUCKETS[bucket] if bucket in _BUCKETS else parse_action(bucket)
    return _NEWER if xid > max(CATALOGUE) else UNLISTED


def describe_xid(xid: int) -> str:
    """Return `XID 95 (uncontained memory error)`."""
    return f"XID {xid} ({meaning_of(xid)})"


class XidPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The action for each XID on this node."""

    overrides: Mapping[int, Action] = msgspec.field(default_factory=dict)
    """The file's."""
    disabled: frozenset[int] = frozenset()
    enabled: frozenset[int] = frozenset()
    are_all_disabled: bool = False
    are_all_enabled: bool = False
    is_off: bool = False
    """Nothing takes a GPU out of service (`DP_DISABLE_HEALTHCHECKS=all`)."""
    notes: tuple[str, ...] = ()
    """Invalid parts of the variables."""

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

    Other words than numbers in a variable are ignored, as in NVIDIA's plugin, with a note.
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
