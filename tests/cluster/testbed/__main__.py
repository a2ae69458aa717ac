# SPDX-License-Identifier: Apache-2.0
"""A cluster to try things in: `python -m testbed up`, and `make cluster`.

It stays until Ctrl-C, and leaves nothing but its logs. `down` ends one from elsewhere, also one
whose holder was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

from testbed.build import BuildError, build
from testbed.cluster import Cluster, default_state
from testbed.images import TOOLS
from testbed.node import NodeSettings
from testbed.requirements import why_not
from testbed.sandbox import Process
from testbed.waiting import TestbedError, tail, wait_until

_DESCRIPTION = "cluster.json"

_CONFIG = """\
version: v1
allotment:
  devices:
    - mode: soft
"""

# A quarter of a GPU: of its memory, and of its time.
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
      command: [allot, burn, --memory, 19Gi, --seconds, "600"]
      resources:
        limits:
          allotment.dev/gpu: 1
          allotment.dev/gpu-memory: 20Gi
          allotment.dev/gpu-compute: 25
"""


def main() -> None:
    """Carries out one of up, down, build."""
    chosen = _parser().parse_args()
    state = Path(chosen.state).absolute() if chosen.state else default_state()
    reason = why_not(needs_go=False)
    try:
        if chosen.verb == "build" and chosen.if_usable and reason:
            _say(f"cluster: not built, its tests will be skipped: {reason}")
        elif chosen.verb == "build":
            _say(str(build()))
        elif chosen.verb == "down":
            _take_down(state)
        else:
            _hold(state, chosen)
    except (TestbedError, BuildError) as error:
        sys.exit(f"error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m testbed",
        description="A real Kubernetes on this machine, with simulated GPUs, in own namespaces.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="up|down|build")
    up = verbs.add_parser("up", help="start one, say how to use it, keep it until Ctrl-C")
    up.add_argument("--simulated", default="a100-80gb:2", metavar="GPUS", help="the node's GPUs")
    up.add_argument(
        "--fake-nodes", type=int, metavar="N", help="N nodes without kubelet, no real one"
    )
    up.add_argument("--no-agent", action="store_true", help="start no `allot agent` on the node")
    up.add_argument("--config", metavar="FILE", help="the agent's (default: each GPU in parts)")
    up.add_argument("--no-cdi", action="store_true", help="a container runtime without CDI")
    up.add_argument(
        "--agent-flag", action="append", default=[], metavar="FLAG", help="for the agent"
    )
    down = verbs.add_parser("down", help="end one that another process holds, or held")
    making = verbs.add_parser("build", help="build its programs, print their folder")
    making.add_argument(
        "--if-usable", action="store_true", help="not where this machine cannot run a cluster"
    )
    for verb in (up, down):
        verb.add_argument(
            "--state", metavar="DIR", help="its folder (default: build/cluster/state)"
        )
    parser.set_defaults(state=None)
    return parser


# ---- up ------------------------------------------------------------------------------------------


def _hold(state: Path, chosen: argparse.Namespace) -> None:
    if reason := why_not(needs_go=False):
        raise TestbedError(reason)
    if _holder(state) is not None:
        raise TestbedError(f"{state} has a cluster already\n\nhint: --state, or `testbed down`")
    # Ended as by Ctrl-C: `with` takes the cluster down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = None if chosen.fake_nodes else NodeSettings(has_cdi=not chosen.no_cdi)
    started = time.monotonic()
    try:
        with Cluster(state=state, settings=settings) as cluster:
            description = state / _DESCRIPTION
            description.write_text(json.dumps(cluster.describe(), indent=1), encoding="utf-8")
            try:
                agent = _populate(cluster, chosen)
                _say(f"The cluster is up, in {time.monotonic() - started:.1f} s.")
                _say(_instructions(cluster))
                _wait_for_end(cluster, agent)
            finally:
                description.unlink(missing_ok=True)
    except KeyboardInterrupt:
        _say(f"\nThe cluster is gone; its logs are in {state / 'logs'}")


def _populate(cluster: Cluster, chosen: argparse.Namespace) -> Process | None:
    if chosen.fake_nodes:
        cluster.add_fake_nodes(chosen.fake_nodes)
        return None
    if chosen.no_agent:
        return None
    config = Path(chosen.config).absolute() if chosen.config else cluster.state / "config.yaml"
    if not chosen.config:
        config.write_text(_CONFIG, encoding="utf-8")
    (cluster.state / "pod.yaml").write_text(_POD.format(image=TOOLS), encoding="utf-8")
    cluster.allow_agent()
    flags = [f"--config-file={config}", *chosen.agent_flag]
    if chosen.no_cdi:
        # No version tells that a runtime has it switched off.
        flags.append("--cdi=off")
    agent = cluster.start_agent(*flags, simulated=chosen.simulated)
    cluster.wait_agent(agent)
    return agent


def _wait_for_end(cluster: Cluster, agent: Process | None) -> None:
    while True:
        time.sleep(1)
        if agent is not None and not agent.is_running:
            _say(f"the agent ended with {agent.wait(1)}\n{tail(cluster.log('agent'))}")
            agent = None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _instructions(cluster: Cluster) -> str:
    example = cluster.state / "pod.yaml"
    first = f"kubectl apply -f {example}" if example.exists() else "kubectl get pods -A"
    return textwrap.dedent(
        f"""
        export KUBECONFIG={cluster.kubeconfig}
        alias kubectl={cluster.kubectl}
        kubectl describe nodes
        {first}

        on the node:  nsenter --target {cluster.node.pid} --mount --net --pid --uts -- bash
        its logs:     {cluster.state / "logs"}
        to end it:    Ctrl-C
        """
    )


# ---- down ----------------------------------------------------------------------------------------


def _holder(state: Path) -> int | None:
    """The process that holds this folder's cluster; None where there is none."""
    try:
        pid = int(json.loads((state / _DESCRIPTION).read_text(encoding="utf-8"))["pid"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError, KeyError):
        return None
    return pid if b"testbed" in command else None


def _take_down(state: Path) -> None:
    holder = _holder(state)
    if holder is not None:
        os.kill(holder, signal.SIGTERM)
        wait_until(lambda: _holder(state) is None, "end of the cluster", timeout_s=60)
    Cluster.clean_up(state)


if __name__ == "__main__":
    main()
