# SPDX-License-Identifier: Apache-2.0
"""Hatchling's build hook: puts the native libraries into the wheel.

One wheel carries both architectures. What is injected into a container must suit the node, and
the node runs the same wheel, so a wheel for each would do as well; one file is one hash to
publish, mirror and pin, and costs a few hundred kilobytes. Its tag names the platforms that
are inside, so that pip refuses it elsewhere (musl, macOS).
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TAG = "py3-none-" + ".".join(
    f"{policy}_{arch}"
    for arch in ("x86_64", "aarch64")
    for policy in ("manylinux_2_17", "manylinux2014")
)


class NativeLibraries(BuildHookInterface):  # type: ignore[type-arg]
    """Builds for both architectures; for an editable install, for this machine alone."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling; `version` is `standard` or `editable`."""
        sys.path.insert(0, str(Path(self.root) / "tools"))
        import build_native

        if version == "editable" and os.environ.get("ALLOTMENT_NATIVE") == "later":
            return  # `make` sets up first: a mistake in C must not keep Python from its tools
        if version == "editable":
            # Not packed: the source tree is on the path, and the libraries are found in it.
            build_native.build(platform.machine(), build_native.INSTALLED)
            return
        into = Path(self.root) / "build" / "native"
        for arch in build_native.ARCHITECTURES:
            for path in build_native.build(arch, into, force=True):
                inside = Path("allotment") / "_native" / path.relative_to(into)
                build_data["force_include"][str(path)] = str(inside)
        # `allot doctor` compares a cluster's policies with them.
        manifests = Path(self.root) / "deploy" / "manifests"
        build_data["force_include"][str(manifests)] = "allotment/_manifests"
        build_data["pure_python"] = False
        build_data["tag"] = TAG
