# SPDX-License-Identifier: Apache-2.0
"""One real node: containerd and the kubelet, in the sandbox.

There is one kubelet to a mount namespace, because its device plugin folder is compiled in. What the
flags and settings below are there for is said beside each that is not a matter of course.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from testbed.components import Component, answers
from testbed.control_plane import Plan
from testbed.images import PAUSE
from testbed.sandbox import Sandbox, make_control_group, remove_control_group
from testbed.waiting import TestbedError

RUNTIME_SOCKET = "/run/containerd/containerd.sock"

# Debian's folder, and the one that containernetworking's own releases name.
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")

_POD_SUBNET = "10.244.0.0/24"


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How the node is made."""

    name: str = "node-1"
    has_cdi: bool = True
    max_pods: int = 110
    kubelet_config: Mapping[str, object] | None = None
    """Fields of KubeletConfiguration, over ours."""


def containerd(plan: Plan, settings: NodeSettings) -> Component:
    """The container runtime, at its usual socket."""
    sandbox = plan.sandbox
    folder = sandbox.state / "containerd"
    folder.mkdir(exist_ok=True)
    network = folder / "net.d"
    network.mkdir(exist_ok=True)
    (network / "10-testbed.conflist").write_text(json.dumps(_network()), encoding="utf-8")
    config = folder / "config.toml"
    config.write_text(_runtime_config(folder, settings), encoding="utf-8")
    probe = [str(plan.binaries / "ctr"), "--address", RUNTIME_SOCKET, "version"]

    def is_ready() -> bool:
        """As systemd sees it, which starts the kubelet then.

        It answers some time before it serves the kubelet, which ends if it comes in between.
        """
        if sandbox.run(probe, check=False).returncode != 0:
            return False
        text = made.log.read_text("utf-8")
        return text.rfind("containerd successfully booted") > text.rfind("starting containerd")

    made = Component(
        name="containerd",
        sandbox=sandbox,
        command=(str(plan.binaries / "containerd"), f"--config={config}"),
        # It starts containerd-shim-runc-v2, which starts runc.
        environment=_path_with(plan.binaries),
        is_ready=is_ready,
    )
    return made


def kubelet(plan: Plan, settings: NodeSettings) -> Component:
    """The kubelet, registered under the node's name and the sandbox's address."""
    sandbox = plan.sandbox
    make_control_group(sandbox.control_group)
    config = sandbox.state / "kubelet.json"
    chosen = {**_kubelet_config(settings, sandbox), **(settings.kubelet_config or {})}
    config.write_text(json.dumps(chosen, indent=1), encoding="utf-8")
    return Component(
        name="kubelet",
        sandbox=sandbox,
        command=(
            str(plan.binaries / "kubelet"),
            f"--config={config}",
            f"--kubeconfig={plan.credentials.kubeconfig('kubelet')}",
            f"--cert-dir={plan.credentials.folder / 'kubelet'}",
            f"--hostname-override={settings.name}",
            f"--node-ip={sandbox.link.inner}",
            *([f"--feature-gates={plan.feature_gates}"] if plan.feature_gates else []),
            "--v=2",
        ),
        environment=_path_with(plan.binaries),
        is_ready=answers(f"http://{sandbox.link.inner}:10248/healthz"),
    )


def prepare_network(sandbox: Sandbox, service_address: str) -> None:
    """Gives the node the API server's service address: there is no kube-proxy to translate it."""
    sandbox.run(["ip", "address", "add", f"{service_address}/32", "dev", "lo"])


def import_images(plan: Plan, images: Iterable[Path]) -> None:
    """Makes images known to the node's containerd.

    Raises:
        TestbedError: one could not be imported; with containerd's words.
    """
    for image in images:
        _ctr(plan, "images", "import", str(image), timeout_s=180)


def _ctr(plan: Plan, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [str(plan.binaries / "ctr"), "--address", RUNTIME_SOCKET, "--namespace", "k8s.io"]
    return plan.sandbox.run([*command, *arguments], timeout_s=timeout_s)


# What a boot empties, and what the kubelet and containerd mount on the disk.
_OF_ONE_BOOT = ("allotment", "cdi", "cni-ipam", "containerd", "netns")
_MOUNTED = ("/run/containerd/", "/run/netns/", "/var/lib/kubelet/")


def forget_boot(sandbox: Sandbox) -> None:
    """Empties what a reboot would: /run, mounts, control groups. All of the node has to be over."""
    lines = Path(f"/proc/{sandbox.pid}/mounts").read_text(encoding="utf-8").splitlines()
    points = [line.split()[1] for line in lines]
    for point in reversed([point for point in points if point.startswith(_MOUNTED)]):
        sandbox.run(["umount", "--lazy", point], check=False)
    for name in _OF_ONE_BOOT:
        sandbox.run(["rm", "-rf", f"/run/{name}"])
    # The kubelet would ask the container runtime about each container of before, 3 s each.
    remove_control_group(sandbox.control_group)
    make_control_group(sandbox.control_group)
    sandbox.run(["mkdir", "-p", "/run/cdi", "/run/netns"])


def find_cni() -> str:
    """The folder of the CNI programs.

    Raises:
        TestbedError: there is none.
    """
    for folder in CNI_FOLDERS:
        if all((Path(folder) / name).exists() for name in ("bridge", "host-local", "loopback")):
            return folder
    raise TestbedError(
        f"no CNI programs (bridge, host-local, loopback) in {' or '.join(CNI_FOLDERS)}"
        " (Debian: apt-get install containernetworking-plugins)"
    )


def _path_with(binaries: Path) -> dict[str, str]:
    # runc is in sbin, which a user's PATH may lack.
    return {"PATH": f"{binaries}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"}


def _network() -> dict[str, object]:
    # A gateway so that pods reach the API server's service address; nothing leads further.
    return {
        "cniVersion": "1.0.0",
        "name": "testbed",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isDefaultGateway": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": _POD_SUBNET}]],
                    "dataDir": "/run/cni-ipam",
                },
            }
        ],
    }


def _runtime_config(folder: Path, settings: NodeSettings) -> str:
    cri = "io.containerd.cri.v1"
    enable_cdi = "true" if settings.has_cdi else "false"
    return f"""\
version = 3
root = "{folder}/root"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.differ.v1.erofs",
  "io.containerd.nri.v1.nri",
]

[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"

[grpc]
  address = "{RUNTIME_SOCKET}"

[plugins."{cri}.images".pinned_images]
  sandbox = "{PAUSE}"

[plugins."{cri}.runtime"]
  enable_cdi = {enable_cdi}
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  # Without CAP_SYS_RESOURCE, as in many virtual machines, a score below one's own kills runc.
  restrict_oom_score_adj = true

[plugins."{cri}.runtime".cni]
  bin_dirs = ["{find_cni()}"]
  conf_dir = "{folder}/net.d"

[plugins."{cri}.runtime".containerd]
  default_runtime_name = "runc"

[plugins."{cri}.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."{cri}.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""


def _kubelet_config(settings: NodeSettings, sandbox: Sandbox) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",  # noqa: S104 - of the sandbox
        "healthzBindAddress": "0.0.0.0",  # noqa: S104 - of the sandbox
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{RUNTIME_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": sandbox.control_group,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "enableControllerAttachDetach": False,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "maxPods": settings.max_pods,
        "staticPodPath": "/etc/kubernetes/manifests",
        "fileCheckFrequency": "1s",
        # A disk that is nearly full is none of the tests' business.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "resolvConf": "",
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
    }
