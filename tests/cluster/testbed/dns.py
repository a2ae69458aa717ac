# SPDX-License-Identifier: Apache-2.0
"""The names of Services: dnsmasq in the place of CoreDNS, which takes minutes to build.

It does not watch the API server: `name_services` tells it of the Services that are there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from testbed.api import Api
from testbed.components import Component
from testbed.control_plane import Plan

ADDRESS = "10.96.0.10"
"""Of the kubelet's `clusterDNS`, which pods ask."""

_DOMAIN = "cluster.local"


def why_not() -> str | None:
    """Why this machine cannot run it, with the next step; None where it can."""
    if shutil.which("dnsmasq", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return "no dnsmasq (Debian: apt-get install dnsmasq-base)"
    return None


def dnsmasq(plan: Plan) -> Component:
    """The server at `ADDRESS`. It knows the files of its folder, also those that come later."""
    sandbox = plan.sandbox
    names = folder(sandbox.state)
    names.mkdir(exist_ok=True)
    sandbox.run(["ip", "address", "replace", f"{ADDRESS}/32", "dev", "lo"])
    return Component(
        name="dnsmasq",
        sandbox=sandbox,
        command=(
            *("/usr/sbin/dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--user=root"),
            *("--pid-file=", "--log-facility=-", "--no-resolv", "--no-hosts"),
            *(f"--listen-address={ADDRESS}", "--bind-interfaces"),
            # An unknown name is refused at once: no other server is asked.
            *(f"--local=/{_DOMAIN}/", "--local=/svc/", f"--hostsdir={names}"),
        ),
        is_ready=lambda: sandbox.run(["ss", "-Hlun", f"src {ADDRESS}"]).stdout != "",
    )


def name_services(api: Api, state: Path) -> None:
    """Lets pods find the Services that are there now."""
    lines = []
    for service in api.items("/api/v1/services"):
        address = service["spec"].get("clusterIP", "None")
        if address != "None":
            metadata = service["metadata"]
            name = f"{metadata['name']}.{metadata['namespace']}.svc"
            lines.append(f"{address} {name}.{_DOMAIN}\n")
    (folder(state) / "services").write_text("".join(lines), encoding="ascii")


def folder(state: Path) -> Path:
    """Its folder of names."""
    return state / "dns"
