# SPDX-License-Identifier: Apache-2.0
"""What a machine must have for a cluster, and what is missing on this one."""

from __future__ import annotations

import os
import shutil

from testbed.build import find_go, missing
from testbed.images import find_busybox
from testbed.node import find_cni
from testbed.waiting import TestbedError

_PROGRAMS = (
    ("runc", "runc"),
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
    ("mount", "mount"),
)


def why_not(*, needs_go: bool = True) -> str | None:
    """Why this machine cannot run a cluster, with the next step; None where it can.

    Args:
        needs_go: Whether programs that are not built yet count as well, where there is no Go to
            build them with. `testbed build` installs one.
    """
    if os.geteuid() != 0:
        return "a cluster needs root, for namespaces and mounts"
    for program, package in _PROGRAMS:
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            return f"no {program} (Debian: apt-get install {package})"
    try:
        find_cni()
        find_busybox()
    except TestbedError as error:
        return str(error)
    if needs_go and missing() and find_go() is None:
        return "no Go to build the cluster's programs with (make testbed installs one)"
    return None
