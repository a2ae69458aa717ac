# SPDX-License-Identifier: Apache-2.0
"""Lets the agent answer the kubelet at once on a busy node: pods wait for each of its wake-ups.

Three things would delay an answer by milliseconds: the kernel's scheduler (threads with short
slices run at once from Linux 6.12 on, EEVDF's `sched_attr.sched_runtime`), the switch interval of
Python's threads (5 ms), and Python's garbage collector, which scans all imported objects.
"""

import ctypes
import gc
import platform
import struct
import sys
from typing import Final

_SLICE_NS: Final = 100_000
"""The kernel's minimum."""
_SWITCH_S: Final = 0.001
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")
"""`struct sched_attr`: size, policy, flags, nice, priority, runtime, deadline, period, and the
bounds of utilisation (include/uapi/linux/sched/types.h)."""
_CALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""sched_setattr and sched_getattr, by machine."""
_OTHER: Final = 0
"""SCHED_OTHER, the default policy."""


def tune_latency() -> None:
    """Tune this thread and all that it starts later."""
    request_short_slices()
    sys.setswitchinterval(_SWITCH_S)


def request_short_slices() -> bool:
    """Request short slices for this thread and those that it starts; False: not supported.

    Policy and nice value stay the same. A thread with another policy is left alone.
    """
    numbers = _CALLS.get(platform.machine())
    if numbers is None or sys.platform != "linux":
        return False
    set_attributes, get_attributes = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    size = _ATTRIBUTES.size
    current = ctypes.create_string_buffer(size)
    if libc.syscall(get_attributes, 0, current, size, 0) != 0:
        return False
    _, policy, flags, nice, priority, *_ = _ATTRIBUTES.unpack(current.raw)
    if policy != _OTHER:
        return False
    requested = _ATTRIBUTES.pack(size, policy, flags, nice, priority, _SLICE_NS, 0, 0, 0, 0)
    return bool(libc.syscall(set_attributes, 0, requested, 0) == 0)


def freeze_startup_objects() -> None:
    """Exclude all present objects from garbage collection: they live as long as the process."""
    gc.collect()
    gc.freeze()
