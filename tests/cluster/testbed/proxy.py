# SPDX-License-Identifier: Apache-2.0
"""kube-proxy, for tests in which Services have to lead somewhere: most do without.

It is the real one, with iptables in the sandbox's network. What it would change of the machine
(limits of connection tracking) is left as it is.
"""

from __future__ import annotations

import json
import shutil
import subprocess

from testbed.api import Api
from testbed.certificates import SERVICE_ADDRESS
from testbed.components import Component, answers
from testbed.control_plane import API_SERVER_PORT, Plan

_SERVICES = f"{SERVICE_ADDRESS.removesuffix('.1')}.0/24"


def why_not() -> str | None:
    """Why this machine cannot run it, with the next step; None where it can."""
    if shutil.which("iptables", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return "no iptables (Debian: apt-get install iptables)"
    # In a network of its own, as a sandbox's is: a kernel may lack what translates addresses.
    command = ["unshare", "--net", "iptables", "-t", "nat", "-A", "OUTPUT", "-p", "tcp"]
    command += ["-m", "comment", "--comment", "x", "-m", "statistic", "--mode", "random"]
    command += ["--probability", "0.5", "-j", "DNAT", "--to-destination", "192.0.2.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no NAT in this kernel: {done.stderr.strip()}"


def kube_proxy(plan: Plan, *, node: str) -> Component:
    """What leads from Services' addresses to pods."""
    sandbox = plan.sandbox
    config = sandbox.state / "kube-proxy.json"
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": str(plan.credentials.kubeconfig("admin"))},
        "healthzBindAddress": "0.0.0.0:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # Not ours to set: 0 leaves each as it is.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        # Pods and the node itself are on one bridge: answers have to come back this way.
        "iptables": {"masqueradeAll": True, "syncPeriod": "10s", "minSyncPeriod": "0s"},
    }
    config.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    # The node's own connections need a way to begin on, before their address is translated.
    sandbox.run(["ip", "route", "replace", _SERVICES, "dev", "uplink"])
    return Component(
        name="kube-proxy",
        sandbox=sandbox,
        command=(str(plan.binaries / "kube-proxy"), f"--config={config}"),
        environment={"PATH": "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"},
        is_ready=answers(f"http://{sandbox.link.inner}:10256/healthz"),
    )


def tell_of_api_server(api: Api, address: str) -> None:
    """Names the API server's own endpoint, which it does not do itself here.

    A Service without any is refused by kube-proxy, also at an address that the node has.
    """
    path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    metadata = {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}}
    api.apply(
        f"{path}/kubernetes",
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata,
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": API_SERVER_PORT, "protocol": "TCP"}],
        },
    )
