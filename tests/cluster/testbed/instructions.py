# SPDX-License-Identifier: Apache-2.0
"""What `python -m testbed up` prints for people: lines to paste, and the pod that they name."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from allotment.devices.simulated import parse_spec
from testbed.build import ROOT
from testbed.cluster import POD, Cluster
from testbed.images import TOOLS

DEFAULT_CONFIG = "soft"
"""Of the ConfigMap in the agent's manifest: parts of GPUs can be had at once."""

_EXAMPLES = ROOT / "examples" / "dialects"
_PLACEMENT = r"{.metadata.annotations.allotment\.dev/placement}"

_POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: quarter
spec:
  restartPolicy: Never
  containers:
    - name: main
      image: {image}
      imagePullPolicy: Never
      command: [allot, burn, --memory, {used}Mi, --seconds, "600"]
      resources:
        limits:
          allotment.dev/gpu: 1
          allotment.dev/gpu-memory: {memory}Mi
          allotment.dev/gpu-compute: 25
"""


def quarter_pod(simulated: str) -> str:
    """A quarter of the first GPU, in whole GiB where it has some; what CUDA takes is left over."""
    quarter = parse_spec(simulated).gpus[0].memory_bytes >> 22
    memory = quarter // 1024 * 1024 or quarter
    return _POD.format(image=TOOLS, memory=memory, used=memory * 3 // 4)


def instructions(
    cluster: Cluster, *, simulated: str, has_own_config: bool, has_scheduler: bool
) -> str:
    """The lines to paste, for what there is."""
    has_agent = (cluster.state / POD).exists()
    lines = [
        f"export KUBECONFIG={cluster.kubeconfig}",
        f"alias kubectl={cluster.kubectl}",
        "kubectl describe nodes",
    ]
    if has_agent:
        where = " where the configuration offers parts" if has_own_config else ""
        lines.append(f"kubectl apply -f {cluster.state / POD}    # a quarter of a GPU{where}")
    if has_scheduler:
        lines += _of_the_scheduler(cluster)
    if has_agent and not has_own_config:
        label = f"kubectl label node {cluster.node_name} nvidia.com/device-plugin.config=default"
        lines += [
            "",
            f"The node has the configuration {DEFAULT_CONFIG}: parts of GPUs. As NVIDIA's plugin:",
            f"  {label}",
            "The configurations, in force at once:",
            "  kubectl -n allotment-system edit configmap allotment-config",
        ]
    lines += ["", "On the node:", f"  {_on_the_node(cluster, simulated)}"]
    if has_agent:
        lines += [
            "  then: allot ps, allot top, allot devices",
            "  The agent runs there without a pod (no `kubectl exec`). Ended, it is started again:",
            f"  nsenter --target {cluster.node.pid} --mount --pid -- pkill -f 'allotment agent'",
        ]
    lines += ["", f"its logs:   {cluster.state / 'logs'}", "to end it:  Ctrl-C"]
    return "\n".join(["", *lines, ""])


def _of_the_scheduler(cluster: Cluster) -> list[str]:
    allot = shlex.quote(str(_programs() / "allot"))
    return [
        "",
        "The scheduler runs, with its webhook: pods in others' words run as they are written.",
        f"  kubectl apply -f {_EXAMPLES / 'hami.yaml'}",
        f"  {allot} explain pod gpu-pod",
        "  kubectl wait --for=jsonpath='{.status.phase}'=Succeeded pod/gpu-pod --timeout=60s",
        f"  kubectl get pod gpu-pod -o jsonpath='{_PLACEMENT}'",
        "  kubectl logs gpu-pod    # what its program saw",
        "  kubectl delete pod gpu-pod    # some of the others have the same name",
        f"The others: {_EXAMPLES}",
        "It runs without a pod as well. Ended, it is started again:",
        f"  nsenter --target {cluster.node.pid} --mount --pid -- pkill -f 'allotment scheduler'",
    ]


def _on_the_node(cluster: Cluster, simulated: str) -> str:
    return (
        f"nsenter --target {cluster.node.pid} --mount --net --pid --uts -- "
        f"env PATH={shlex.quote(str(_programs()))}:$PATH"
        f" ALLOTMENT_SIMULATED={shlex.quote(simulated)} bash"
    )


def _programs() -> Path:
    return Path(sys.executable).parent
