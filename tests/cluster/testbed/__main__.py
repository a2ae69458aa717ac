# SPDX-License-Identifier: Apache-2.0
"""A cluster to try things in: `python -m testbed up`, and `make cluster`.

It stays until Ctrl-C, and leaves nothing but its logs. `down` ends one from elsewhere, and removes
what is left of one whose holder was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

from allotment.devices.simulated import parse_spec
from allotment.model.errors import UsageError
from testbed.build import BuildError, build
from testbed.cluster import DESCRIPTION, POD, Cluster, default_state
from testbed.held import HeldAgent
from testbed.images import TOOLS
from testbed.node import NodeSettings
from testbed.requirements import why_not
from testbed.terminal import foreground
from testbed.waiting import TestbedError, wait_until

# Of the ConfigMap in the agent's manifest: parts of GPUs can be had at once.
_DEFAULT_CONFIG = "soft"

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


def main() -> None:
    """Carries out one of up, down, build."""
    chosen = _parser().parse_args()
    state = Path(chosen.state).absolute() if chosen.state else default_state()
    reason = why_not(needs_go=False)
    try:
        if chosen.verb == "build" and chosen.if_usable and reason:
            sys.stderr.write(f"cluster: not built, its tests will be skipped: {reason}\n")
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
    up.add_argument(
        "--simulated",
        default="a100-80gb:2",
        metavar="GPUS",
        help="the node's GPUs, as for allot; default: a100-80gb:2",
    )
    up.add_argument(
        "--fake-nodes", type=int, metavar="N", help="N nodes without kubelet, no real one"
    )
    up.add_argument("--no-agent", action="store_true", help="start no `allot agent` on the node")
    up.add_argument(
        "--config",
        metavar="FILE",
        help="the agent's; default: the ConfigMap of deploy/manifests/agent.yaml, there `soft`",
    )
    up.add_argument("--no-cdi", action="store_true", help="a container runtime without CDI")
    up.add_argument(
        "--agent-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="one more for the agent, as in --agent-flag=--verbose; any number of times",
    )
    down = verbs.add_parser(
        "down", help="end one that another process holds; remove what a killed one left"
    )
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
    _check(chosen)
    if _holder(state) is not None:
        words = "" if state == default_state() else f" CLUSTER_ARGS='--state {state}'"
        raise TestbedError(
            f"{state} has a cluster already\n\n"
            f"hint: `make cluster-down{words}` ends it; --state DIR makes another one beside it"
        )
    # Ended as by Ctrl-C: `with` takes the cluster down.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    # Of this run alone: what an error shows, or a reader looks for, is not an earlier run's.
    for name in ("logs", "pod-logs"):
        shutil.rmtree(state / name, ignore_errors=True)
    _wait_for_last_end(state)
    settings = None if chosen.fake_nodes else NodeSettings(has_cdi=not chosen.no_cdi)
    started = time.monotonic()
    _say("The cluster is starting; that takes some seconds.")
    with foreground():
        try:
            with Cluster(state=state, settings=settings) as cluster:
                description = json.dumps(cluster.describe(), indent=1)
                (state / DESCRIPTION).write_text(description, encoding="utf-8")
                agent = _populate(cluster, chosen)
                _say(f"The cluster is up, in {time.monotonic() - started:.1f} s.")
                _say(_instructions(cluster, chosen))
                while True:
                    time.sleep(1)
                    if agent is not None:
                        agent.look()
        except KeyboardInterrupt:
            _say(f"\nThe cluster is gone; its logs are in {state / 'logs'}")


def _check(chosen: argparse.Namespace) -> None:
    """What can be wrong with the options, before anything is started; paths become absolute."""
    try:
        parse_spec(chosen.simulated)
    except UsageError as error:
        hint = f"\n\nhint: {error.hint}" if error.hint else ""
        raise TestbedError(f"--simulated: {error.message}{hint}") from None
    if Path(chosen.simulated).exists():
        chosen.simulated = str(Path(chosen.simulated).absolute())
    if chosen.config:
        chosen.config = str(Path(chosen.config).absolute())
        if not Path(chosen.config).is_file():
            raise TestbedError(f"--config: there is no file {chosen.config}")


def _populate(cluster: Cluster, chosen: argparse.Namespace) -> HeldAgent | None:
    if chosen.fake_nodes:
        cluster.add_fake_nodes(chosen.fake_nodes)
        return None
    if chosen.no_agent:
        return None
    (cluster.state / POD).write_text(_pod(chosen.simulated), encoding="utf-8")
    cluster.allow_agent()
    name = cluster.apply_config()
    if chosen.config:
        flags = ["--config-file", chosen.config]
    else:
        flags = ["--config-map", name, "--default-config", _DEFAULT_CONFIG]
    if chosen.no_cdi:
        # No version tells that a runtime has it switched off.
        flags.append("--cdi=off")
    agent = HeldAgent(cluster, [*flags, *chosen.agent_flag], simulated=chosen.simulated, say=_say)
    cluster.wait_agent(agent.start())
    return agent


def _pod(simulated: str) -> str:
    """A quarter of the first GPU, in whole GiB where it has some; what CUDA takes is left over."""
    quarter = parse_spec(simulated).gpus[0].memory_bytes >> 22
    memory = quarter // 1024 * 1024 or quarter
    return _POD.format(image=TOOLS, memory=memory, used=memory * 3 // 4)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _instructions(cluster: Cluster, chosen: argparse.Namespace) -> str:
    has_agent = (cluster.state / POD).exists()
    lines = [
        f"export KUBECONFIG={cluster.kubeconfig}",
        f"alias kubectl={cluster.kubectl}",
        "kubectl describe nodes",
    ]
    if has_agent:
        where = " where the configuration offers parts" if chosen.config else ""
        lines.append(f"kubectl apply -f {cluster.state / POD}    # a quarter of a GPU{where}")
    if has_agent and not chosen.config:
        label = f"kubectl label node {cluster.node_name} nvidia.com/device-plugin.config=default"
        lines += [
            "",
            f"The node has the configuration {_DEFAULT_CONFIG}: parts of GPUs. As NVIDIA's plugin:",
            f"  {label}",
            "The configurations, in force at once:",
            "  kubectl -n allotment-system edit configmap allotment-config",
        ]
    lines += ["", "On the node:", f"  {_on_the_node(cluster, chosen.simulated)}"]
    if has_agent:
        lines += [
            "  then: allot ps, allot top, allot devices",
            "  The agent runs there without a pod (no `kubectl exec`). Ended, it is started again:",
            f"  nsenter --target {cluster.node.pid} --mount --pid -- pkill -f 'allotment agent'",
        ]
    lines += ["", f"its logs:   {cluster.state / 'logs'}", "to end it:  Ctrl-C"]
    return "\n".join(["", *lines, ""])


def _on_the_node(cluster: Cluster, simulated: str) -> str:
    programs = Path(sys.executable).parent
    return (
        f"nsenter --target {cluster.node.pid} --mount --net --pid --uts -- "
        f"env PATH={shlex.quote(str(programs))}:$PATH"
        f" ALLOTMENT_SIMULATED={shlex.quote(simulated)} bash"
    )


# ---- down ----------------------------------------------------------------------------------------


def _description(state: Path) -> dict[str, object]:
    try:
        return dict(json.loads((state / DESCRIPTION).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _holder(state: Path) -> int | None:
    """The process that holds this folder's cluster; None where there is none."""
    pid = _description(state).get("pid")
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    return pid if isinstance(pid, int) and b"testbed" in command else None


def _take_down(state: Path) -> None:
    holder = _holder(state)
    is_known = bool(_description(state))
    if holder is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, signal.SIGTERM)
        wait_until(lambda: _holder(state) is None, "end of the cluster", timeout_s=60)
    _wait_for_last_end(state)
    Cluster.clean_up(state)
    _say("The cluster is gone." if is_known else f"There was no cluster in {state}.")


def _wait_for_last_end(state: Path) -> None:
    """Where the holder was killed just now, the kernel is still taking its interface away."""
    interface = _description(state).get("interface")
    if interface is not None:
        with contextlib.suppress(TestbedError):  # by now it may be another cluster's
            wait_until(
                lambda: not Path("/sys/class/net", str(interface)).exists(),
                "end of the interface",
                timeout_s=10,
            )


if __name__ == "__main__":
    main()
