# SPDX-License-Identifier: Apache-2.0
"""Runs the shim's host programs in shares: plain, and with every part sanitized.

One process a program and build runs all cases (`run_case` in native/tests/shim/host.h). What each
case checks is said in its C function; a case that passes prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shim_hosts import Share, ShimHosts, case_names

PROGRAMS = (
    "host_cancelled",
    "host_graphs",
    "host_jumps",
    "host_lookup",
    "host_memory",
    "host_nvml",
    "host_objects",
    "host_plugin",
    "host_pools",
    "host_processes",
    "host_races",
)


def cases(program: str, build: str) -> list[str]:
    """The cases of a program that this build can run."""
    # A sanitizer's runtime cannot be in two namespaces of a process, and gcc 12's AddressSanitizer
    # takes the stack of a cancelled thread for poisoned.
    barred = {"plain": (), "address,undefined": ("namespace", "cancelled")}
    words = barred.get(build, ("namespace",))
    if program == "host_races" and build != "plain":  # its threads race, in the driver as well
        return []
    return [name for name in case_names(program) if not any(word in name for word in words)]


def builds() -> list[object]:
    """Every program in every build that can run a case of it."""
    return [
        pytest.param(
            program,
            build,
            id=f"{program}-{build}",
            marks=[] if build == "plain" else [pytest.mark.thorough],
        )
        for program in PROGRAMS
        for build in ("plain", "address,undefined", "thread")
        if cases(program, build)
    ]


@pytest.mark.parametrize(("program", "build"), builds())
@pytest.mark.timeout(600)  # the first of a build compiles libraries and programs
def test_host_program(
    program: str,
    build: str,
    *,
    share_of: Callable[..., Share],
    hosts_of: Callable[[str], ShimHosts],
    tmp_path: Path,
) -> None:
    hosts = hosts_of(build)
    variables = {}
    if program == "host_plugin":
        hosts.library("plugin", "-l:libcuda.so.1", "-ldl", output="plugin.so")
        hosts.library("plugin", "-DOPENS_OTHERS", "-ldl", output="opener.so")
    if program == "host_lookup":
        # Nothing of libc is needed, so that these have no version symbols either.
        old = hosts.library(
            "old_driver", "-nostdlib", "-Wl,-soname,libcuda.so.1", output="old/libcuda.so.1"
        )
        other = hosts.library("other_library", "-nostdlib", output="other.so")
        variables = {"OLD_DRIVER": str(old), "OTHER_LIBRARY": str(other)}

    def make_share(_: str) -> Share:
        return share_of("a100-80gb:4", order=(2, 0)) if program == "host_nvml" else share_of()

    hosts.expect_each(
        program, cases(program, build), make_share, folder=tmp_path / "cases", variables=variables
    )


def test_pools_of_a_driver_that_describes_them(
    share_of: Callable[..., Share], hosts_of: Callable[[str], ShimHosts], tmp_path: Path
) -> None:
    """Since CUDA 13.2 a pool's attributes say which memory it hands out."""
    machine = tmp_path / "machine.yaml"
    machine.write_text(
        "driver: 595.45.04\ncuda: 13.2\ngpus: [{model: a100-80gb, count: 2}]\n", "utf-8"
    )
    hosts_of("plain").expect_each(
        "host_pools",
        cases("host_pools", "plain"),
        lambda _: share_of(str(machine)),
        folder=tmp_path / "cases",
    )
