# SPDX-License-Identifier: Apache-2.0
"""Being answered at once on a busy node: a pod's start waits for every one of our wake-ups.

The agent runs for a fraction of a millisecond at a time, when the kubelet calls, and it does so
while the node is busiest: pods start. Three things would make the kubelet wait for far longer than
the work takes:

* the scheduler of the kernel, which lets whoever runs finish a slice of some milliseconds before
  one that wakes up. A thread that asks for short slices is let in at once (Linux 6.12, EEVDF's
  `sched_attr.sched_runtime`). It gets no more of the processor for that, needs no right to ask, and
  older kernels take no notice;
* Python's threads, which hand the interpreter on every 5 ms while several have something to do;
* Python's collector, which looks through everything that was imported, again and again.
"""

import ctypes
import gc
import platform
import struct
import sys
from typing import Final

__all__ = ["ask_for_short_slices", "be_prompt", "set_start_aside"]

_SLICE_NS: Final = 100_000
"""The shortest that the kernel grants."""
_SWITCH_S: Final = 0.001
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")
"""`struct sched_attr`: size, policy, flags, nice, priority, runtime, deadline, period, and the
bounds of utilisation (include/uapi/linux/sched/types.h)."""
_CALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""sched_setattr and sched_getattr, by machine."""
_OTHER: Final = 0
"""SCHED_OTHER: what a thread is that nobody has made anything else."""


def be_prompt() -> None:
    """See to it, for this thread and all that it will start."""
    ask_for_short_slices()
    sys.setswitchinterval(_SWITCH_S)


def ask_for_short_slices() -> bool:
    """Have this thread, and those that it starts, let in at once; False: it cannot be asked for.

    Policy and nice value stay as they are; of a thread with a policy of its own all does.
    """
    numbers = _CALLS.get(platform.machine())
    if numbers is None or sys.platform != "linux":
        return False
    set_attributes, get_attributes = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    size = _ATTRIBUTES.size
    there = ctypes.create_string_buffer(size)
    if libc.syscall(get_attributes, 0, there, size, 0) != 0:
        return False
    _, policy, flags, nice, priority, *_ = _ATTRIBUTES.unpack(there.raw)
    if policy != _OTHER:
        return False
    wanted = _ATTRIBUTES.pack(size, policy, flags, nice, priority, _SLICE_NS, 0, 0, 0, 0)
    return bool(libc.syscall(set_attributes, 0, wanted, 0) == 0)


def set_start_aside() -> None:
    """Have the collector look at nothing that is there now: it stays for as long as we run."""
    gc.collect()
    gc.freeze()
