# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's catalogue of XIDs: what each number means, and what has to be done about it at once.

Facts of https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (columns *Code*,
*Description* and *Resolution Bucket (Immediate Action)*), for Ampere and later. Numbers that it
calls unused are left out: what to do about those is `actions.UNLISTED`.
"""

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["CATALOGUE", "LINKED", "meaning_of"]

_RESTART_APP: Final = {
    8: "GPU stopped processing",
    11: "invalid or corrupted push buffer stream",
    13: "graphics engine exception",
    25: "invalid or illegal push buffer stream",
    31: "GPU memory page fault",
    32: "invalid or corrupted push buffer stream",
    39: "copy engine exception",
    40: "copy engine exception",
    41: "copy engine exception",
    60: "video processor exception",
    68: "video decoder exception",
    69: "graphics engine class error",
    70: "copy engine error",
    71: "copy engine error",
    72: "copy engine error",
    75: "copy engine error",
    76: "copy engine error",
    77: "copy engine error",
    80: "corrupted data sent to the GPU",
    82: "image decoder error",
    83: "video decoder error",
    84: "video decoder error",
    85: "copy engine error",
    86: "optical flow engine exception",
    88: "video decoder error",
    89: "video decoder error",
    94: "contained memory error",
    139: "optical flow engine error",
    **dict.fromkeys(range(96, 99), "video decoder error"),
    **dict.fromkeys(range(99, 106), "image decoder error"),
    **dict.fromkeys(range(126, 136), "copy engine error"),
}
_IGNORE: Final = {
    14: "error made up by a program",
    37: "driver firmware error",
    38: "driver firmware error",
    43: "a program hit a fault and was ended",
    44: "graphics engine fault during a context switch",
    63: "memory row or page marked for repair",
    66: "illegal access by the driver",
    67: "illegal access by the driver",
    92: "high rate of corrected memory errors",
    93: "InfoROM has been written too often",
    106: "test message",
    107: "test message",
    108: "NVLink remote translation error",
    121: "corrected errors of the link to the CPU",
    137: "NVLink access without privilege",
    141: "CUDA fast path error",
    152: "DLA memory error",
    153: "DLA timeout",
    157: "no resources are left for a repair",
    160: "channel retired",
    161: "channel could not be retired",
}
_RESET_GPU: Final = {
    46: "GPU stopped processing",
    62: "internal micro-controller halt",
    64: "memory row or page could not be repaired",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GPU firmware (GSP) does not answer",
    120: "GPU firmware (GSP) error",
    136: "link training failed",
    140: "uncorrected memory error that could not be handled",
    143: "GPU initialisation error",
    155: "NVLink taken down by software",
    156: "resource retired: in force after a reset",
    158: "fatal timeout of the GPU",
}
_NVLINK5: Final = {
    144: "NVLink error (SAW)",
    145: "NVLink error (RLW)",
    146: "NVLink error (TLW)",
    147: "NVLink error (TREX)",
    148: "NVLink error (NVLPW_CTRL)",
    149: "NVLink error (NETIR)",
    150: "NVLink error (MSE)",
}
_BLANK: Final = {
    162: "power smoothing works again",
    163: "power smoothing is off",
    164: "power smoothing hardware is near its end",
    165: "power smoothing hardware is worn out",
    166: "NVLink traffic before it was encrypted",
    167: "PCIe timeout",
    168: "less memory than the model has",
    169: "internal micro-controller halt",
    170: "NVLink interrupt in confidential mode",
    171: "uncorrected error of device memory",
    172: "uncorrected error of on-chip memory",
}


def _rows(action: str, meanings: Mapping[int, str]) -> Iterable[tuple[int, tuple[str, str]]]:
    return ((xid, (action, meaning)) for xid, meaning in meanings.items())


CATALOGUE: Final[Mapping[int, tuple[str, str]]] = dict(
    sorted(
        (
            *_rows("RESTART_APP", _RESTART_APP),
            *_rows("IGNORE", _IGNORE),
            *_rows("RESET_GPU", _RESET_GPU),
            *_rows("WORKFLOW_NVLINK5_ERR", _NVLINK5),
            *_rows("", _BLANK),
            (45, ("WORKFLOW_XID_45", "programs ended because of an earlier error")),
            (48, ("WORKFLOW_XID_48", "uncorrected (double-bit) memory error")),
            (54, ("CHECK_MECHANICALS", "power is not connected to the GPU's board")),
            (74, ("WORKFLOW_NVLINK_ERR", "NVLink error")),
            (78, ("UPDATE_SWFW", "vGPU could not be started")),
            (79, ("RESTART_BM", "GPU has fallen off the bus")),
            (142, ("CONTACT_SUPPORT", "video encoder error")),
            (151, ("RESTART_VM", "key rotation error")),
            (154, ("XID_154", "the driver says that something has to be done about the GPU")),
            (159, ("CHECK_UVM", "error of the link to the CPU")),
        )
    )
)
"""By XID: NVIDIA's bucket of the immediate action (empty: there is none), and what it is."""


LINKED: Final = frozenset({48, 62, 64, 74, 79, 95, 110, 120, 136, 155, 156, 158, 159})
"""XIDs that need a reset and that change the driver's recovery action, from R565 on (the column
*Xid 154 linkage*). After others it may say that nothing has to be done, and mean nothing by it."""


def meaning_of(xid: int) -> str:
    """Say what an XID is, in a few words."""
    return CATALOGUE[xid][1] if xid in CATALOGUE else "not in NVIDIA's catalogue"
