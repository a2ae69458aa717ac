# SPDX-License-Identifier: Apache-2.0
"""Runs the shim's host programs in shares: plain, and with every part sanitized.

What each case checks is said in its C function; a case ends with 0 and without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import build_native
from shim_hosts import Share

SOURCES = build_native.NATIVE / "tests" / "shim"
PROGRAMS = (
    "host_graphs",
    "host_lookup",
    "host_memory",
    "host_nvml",
    "host_objects",
    "host_plugin",
    "host_pools",
    "host_processes",
)
BUILDS = ("plain", "address,undefined", "thread")
#: A sanitizer's runtime cannot be in two namespaces of a process.
NO_NAMESPACES = re.compile("namespace")


def cases() -> list[object]:
    """Every case of every program, in every build that can run it."""
    found: list[object] = []
    for program in PROGRAMS:
        text = (SOURCES / f"{program}.c").read_text()
        table = text[text.index("static const test_case cases[]") :]
        for case in re.findall(r'\{"(\w+)",', table):
            for build in BUILDS:
                if build != "plain" and NO_NAMESPACES.search(case):
                    continue
                found.append(pytest.param(program, case, build, id=f"{program}-{case}-{build}"))
    return found


@pytest.mark.parametrize(("program", "case", "build"), cases())
@pytest.mark.timeout(300)  # the first of a build compiles libraries and programs
def test_host_program(
    program: str,
    case: str,
    build: str,
    *,
    share_of: Callable[..., Share],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if build == "plain":
        hosts = request.getfixturevalue("shim_hosts")
    else:
        hosts = request.getfixturevalue("sanitized_hosts")(build)
    variables = {}
    if program == "host_plugin":
        hosts.library("plugin", "-l:libcuda.so.1", "-ldl", output="plugin.so")
    if program == "host_lookup":
        # Nothing of libc is needed, so that these have no version symbols either.
        old = hosts.library(
            "old_driver", "-nostdlib", "-Wl,-soname,libcuda.so.1", output="old/libcuda.so.1"
        )
        other = hosts.library("other_library", "-nostdlib", output="other.so")
        variables = {"OLD_DRIVER": str(old), "OTHER_LIBRARY": str(other)}
    four_gpus = program == "host_nvml"
    share = share_of("a100-80gb:4", order=(2, 0)) if four_gpus else share_of()
    hosts.expect(program, case, share, cwd=tmp_path, **variables)
