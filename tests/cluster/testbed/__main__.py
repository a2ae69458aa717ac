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
import shutil
import signal
import sys
import time
from pathlib import Path

import installing
from scheduling import EVERY_NAME, scheduler_config

from allotment.devices.simulated import parse_spec
from allotment.model.errors import UsageError
from testbed.build import BuildError, build
from testbed.cluster import DESCRIPTION, POD, Cluster, default_state
from testbed.held import Held
from testbed.instructions import DEFAULT_CONFIG, instructions, quarter_pod
from testbed.node import NodeSettings
from testbed.requirements import why_not
from testbed.sandbox import Process
from testbed.terminal import foreground
from testbed.waiting import TestbedError, wait_until

_LOOK_EVERY_S = 1.0


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
        "--scheduler",
        action="store_true",
        help="`allot scheduler` with its webhook as well, and a kube-scheduler that asks it",
    )
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
    up.add_argument(
        "--scheduler-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="one more for `allot scheduler`, as in --scheduler-flag=--dialects=/DIR/FILE",
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
    config = scheduler_config(profiles=EVERY_NAME) if chosen.scheduler else None
    started = time.monotonic()
    _say("The cluster is starting; that takes some seconds.")
    with foreground():
        try:
            with Cluster(state=state, settings=settings, scheduler_config=config) as cluster:
                description = json.dumps(cluster.describe(), indent=1)
                (state / DESCRIPTION).write_text(description, encoding="utf-8")
                held = _populate(cluster, chosen)
                _say(f"The cluster is up, in {time.monotonic() - started:.1f} s.")
                _say(
                    instructions(
                        cluster,
                        simulated=chosen.simulated,
                        has_own_config=bool(chosen.config),
                        has_scheduler=chosen.scheduler,
                    )
                )
                while True:
                    time.sleep(_LOOK_EVERY_S)
                    for each in held:
                        each.look()
        except KeyboardInterrupt:
            _say(f"\nThe cluster is gone; its logs are in {state / 'logs'}")


def _check(chosen: argparse.Namespace) -> None:
    """What can be wrong with the options, before anything is started; paths become absolute."""
    try:
        parse_spec(chosen.simulated)
    except UsageError as error:
        hint = f"\n\nhint: {error.hint}" if error.hint else ""
        raise TestbedError(f"--simulated: {error.message}{hint}") from None
    if chosen.scheduler and chosen.fake_nodes:
        raise TestbedError(
            "--scheduler: the nodes of --fake-nodes have no GPUs to place pods on\n\n"
            "hint: leave out --fake-nodes"
        )
    if chosen.scheduler_flag and not chosen.scheduler:
        raise TestbedError(
            "--scheduler-flag: there is no scheduler that it could be for\n\nhint: add --scheduler"
        )
    if Path(chosen.simulated).exists():
        chosen.simulated = str(Path(chosen.simulated).absolute())
    if chosen.config:
        chosen.config = str(Path(chosen.config).absolute())
        if not Path(chosen.config).is_file():
            raise TestbedError(f"--config: there is no file {chosen.config}")


def _populate(cluster: Cluster, chosen: argparse.Namespace) -> list[Held]:
    """What is started besides Kubernetes, and is to be started again when it ends."""
    if chosen.fake_nodes:
        cluster.add_fake_nodes(chosen.fake_nodes)
        return []
    cluster.allow_agent()
    agent = [] if chosen.no_agent else [_start_agent(cluster, chosen)]
    return agent + ([_start_scheduler(cluster, chosen)] if chosen.scheduler else [])


def _start_agent(cluster: Cluster, chosen: argparse.Namespace) -> Held:
    (cluster.state / POD).write_text(quarter_pod(chosen.simulated), encoding="utf-8")
    name = cluster.apply_config()
    if chosen.config:
        flags = ["--config-file", chosen.config]
    else:
        flags = ["--config-map", name, "--default-config", DEFAULT_CONFIG]
    if chosen.no_cdi:
        # No version tells that a runtime has it switched off.
        flags.append("--cdi=off")
    flags += chosen.agent_flag

    def start() -> Process:
        return cluster.start_agent(*flags, simulated=chosen.simulated)

    agent = start()
    cluster.wait_agent(agent)
    return Held("agent", agent, again=start, log=cluster.log("agent"), say=_say)


def _start_scheduler(cluster: Cluster, chosen: argparse.Namespace) -> Held:
    """Outside of pods, which would need images, NAT in the kernel, and a minute."""
    installing.install(cluster)
    installing.apply_text(cluster, installing.SHAREPODS.read_text(encoding="utf-8"))
    made = installing.serve(cluster, *chosen.scheduler_flag)
    made.wait_ready()
    installing.wait_translates(cluster)
    log = cluster.log(made.name)
    return Held("scheduler", made.process, again=made.start, log=log, say=_say)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


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
