# SPDX-License-Identifier: Apache-2.0
"""MPS on a real node: pods side by side under one daemon for each GPU, and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mps_daemons import CLIENT, HALF_OF_AN_A100, HALVES, RPC_FAILURE, Gpus
from stories import GIB, GPU, NVIDIA, NodeAgent, node_agent, part, undisturbed
from testbed.api import ApiError
from testbed.cluster import Cluster, NodeSettings
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.devices.compute_modes import ComputeMode
from allotment.modes.mps.state import DaemonState

OUT_OF_MEMORY = 2


def client(*words: str) -> list[str]:
    return ["python3", "-c", CLIENT, *words]


def half(*words: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - as the API spells them
    return container(client(*words), limits={NVIDIA: 1}, **fields)


def said(pods: Pods, name: str, lines: int = 1, *, of: str = "main") -> list[dict[str, Any]]:
    """What a client has said, once it has said so much."""

    def read() -> list[dict[str, Any]] | None:
        with contextlib.suppress(ApiError, ValueError):  # not started, or in the middle of it
            found = [json.loads(each) for each in pods.logs(name, of).splitlines()]
            return found if len(found) >= lines else None
        return None

    return wait_until(read, f"{lines} lines of {name}", explain=lambda: pods.explain(name))


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    with node_agent(cluster, HALVES) as agent:
        cluster.wait_allocatable(NVIDIA, 4)
        yield agent
        Gpus(agent).wait_stopped()


@pytest.fixture
def gpus(node: NodeAgent) -> Iterator[Gpus]:
    found = Gpus(node)
    yield found
    found.wait_free()


@pytest.mark.measured
def test_two_pods_of_half_a_gpu_compute_at_the_same_time(
    node: NodeAgent, gpus: Gpus, pods: Pods
) -> None:
    # All four begin when the last one is there, however long that takes.
    door = node.cluster.node.path("/run/door")
    door.mkdir(exist_ok=True)
    (door / "open").unlink(missing_ok=True)
    wait = 'until [ -e /door/open ]; do sleep 0.02; done; exec "$0" "$@"'
    for name in ("left", "right", "third", "fourth"):
        words = ["sh", "-c", wait, *client("spin", "20000", "300", "20")]
        volume = {"name": "door", "hostPath": {"path": "/run/door"}}
        mounts = [{"name": "door", "mountPath": "/door"}]
        main = container(words, limits={NVIDIA: 1}, volumeMounts=mounts)
        pods.create(pod(name, main, volumes=[volume]))
    for name in ("left", "right", "third", "fourth"):
        pods.wait_ready(name)
    # Both while they are there: some seconds after a program's end its share goes, and the mode.
    shares = {name: node.share(pods, name) for name in ("left", "right", "third", "fourth")}
    (door / "open").touch()
    for name in shares:
        assert said(pods, name)[0] == {"multiprocessors": HALF_OF_AN_A100, "is_client": True}
    modes = {gpus.settings(uuid).compute_mode() for uuid in gpus.uuids}
    assert modes == {ComputeMode.EXCLUSIVE_PROCESS}
    ends = {name: said(pods, name, 2)[1] for name in shares}
    together: dict[str, list[dict[str, Any]]] = {}
    for name, share in shares.items():
        (device,) = share.devices
        assert share.mode == "mps"
        assert abs(device.memory_bytes - 40 * GIB) < GIB
        together.setdefault(device.uuid, []).append(ends[name])
    assert sorted(map(len, together.values())) == [2, 2]
    for one, other in together.values():
        overlap = min(one["until"], other["until"]) - max(one["since"], other["since"])
        assert overlap > 0.2
        # 6 s of kernels each: one after the other the two would take the overlap once more.
        assert max(one["seconds"], other["seconds"]) < 6.6 + 0.5 * max(0.0, 6.0 - overlap)


def test_a_killed_daemon_is_back_and_its_pods_are_told(
    node: NodeAgent, gpus: Gpus, pods: Pods
) -> None:
    for name in ("one", "two", "three", "four"):
        pods.create(pod(name, half("hold")))
        assert said(pods, name)[0]["is_client"]
    where = {name: node.share(pods, name).devices[0].uuid for name in ("one", "two", "three")}
    victim = where["one"]
    named = [name for name in ("one", "two", "three", "four")
             if node.share(pods, name).devices[0].uuid == victim]  # fmt: skip
    (neighbour,) = set(gpus.uuids) - {victim}
    before, was = gpus.status(neighbour), gpus.status(victim)
    counted = node.figure("mps_restarts", device=victim)
    others = [each for each in ("one", "two", "three", "four") if each not in named]
    with undisturbed(pods, *others):
        gpus.kill(victim)
        for name in named:
            assert said(pods, name, 2)[1]["code"] == RPC_FAILURE
            event = pods.wait_event(name, reason="MpsDaemonLost")
            assert victim in event["message"]
        wait_restarted(gpus, victim, was.restarts + 1)
    *earlier, loss = gpus.status(victim).losses
    assert tuple(earlier) == was.losses
    assert len(loss.shares) == len(named) == 2
    wait_until(
        lambda: gpus.status(victim).losses[-1].recovered_s is not None,
        "it is ready again",
        explain=node.log_tail,
    )
    assert gpus.status(neighbour) == before
    node.wait_figure("mps_restarts", counted + 1, device=victim)


def wait_restarted(gpus: Gpus, uuid: str, times: int) -> None:
    wait_until(
        lambda: gpus.status(uuid).restarts == times,
        "it is started again",
        explain=lambda: f"{gpus.status(uuid)}\n{gpus.node.log_tail()}",
    )


def test_programs_of_any_user_are_clients(gpus: Gpus, pods: Pods) -> None:
    del gpus
    root = half("hold")
    other = half("hold", securityContext={"runAsUser": 65534, "runAsGroup": 65534})
    pods.create(pod("both", root, {**other, "name": "nobody"}))
    for name in ("main", "nobody"):
        (line,) = said(pods, "both", of=name)
        assert line == {"multiprocessors": HALF_OF_AN_A100, "is_client": True}


def test_daemons_outlive_the_agent(node: NodeAgent, gpus: Gpus, pods: Pods) -> None:
    pods.create(pod("stays", half("hold")))
    assert said(pods, "stays")[0]["is_client"]
    uuid = node.share(pods, "stays").devices[0].uuid
    before = gpus.status(uuid)
    with undisturbed(pods, "stays"):
        node.end(signal.SIGKILL)
        node.again()
        wait_until(
            lambda: gpus.status(uuid).supervisor != before.supervisor,
            "taken over",
            explain=node.log_tail,
        )
        after = gpus.status(uuid)
        assert (after.daemon, after.restarts) == (before.daemon, before.restarts)
        # And it is kept again.
        gpus.kill(uuid)
        wait_restarted(gpus, uuid, before.restarts + 1)
        assert said(pods, "stays", 2)[1]["code"] == RPC_FAILURE
        pods.wait_event("stays", reason="MpsDaemonLost")


def test_a_gpu_that_is_kept_for_somebody_else_is_told_of_until_it_is_free(
    node: NodeAgent, gpus: Gpus, pods: Pods
) -> None:
    gpus.wait_stopped()  # the end of one puts a mode back
    try:
        for uuid in gpus.uuids:
            gpus.settings(uuid).set_compute_mode(ComputeMode.PROHIBITED)
        pods.create(pod("waits", half("spin", "100", "10", "20"), restart="OnFailure"))
        event = pods.wait_event("waits", reason="ShareRefused")
        assert "compute mode PROHIBITED, set outside Allotment" in event["message"]
        modes = {gpus.settings(uuid).compute_mode() for uuid in gpus.uuids}
        assert modes == {ComputeMode.PROHIBITED}
    finally:
        for uuid in gpus.uuids:
            gpus.settings(uuid).set_compute_mode(ComputeMode.DEFAULT)
    pods.wait_phase("waits", "Succeeded", timeout_s=120)
    assert said(pods, "waits", 2)[0]["is_client"]
    del node


def test_allot_run_beside_pods_uses_their_daemon(node: NodeAgent, gpus: Gpus, pods: Pods) -> None:
    pods.create(pod("first", half("hold")))
    assert said(pods, "first")[0]["is_client"]
    uuid = node.share(pods, "first").devices[0].uuid
    before = gpus.status(uuid)
    path = node.cluster.state / "client.py"
    path.write_text(CLIENT, "utf-8")
    out = node.allot(
        "run", "--simulated", node.simulated, "--mode", "mps", "--memory", "1Gi", "--compute",
        "25", "--gpu", uuid, "--", "python3", str(path), "spin", "100", "10", "20",
    )  # fmt: skip
    assert json.loads(out.splitlines()[0]) == {"multiprocessors": 26, "is_client": True}
    assert gpus.status(uuid).daemon == before.daemon


def test_pods_use_the_daemon_of_who_was_first_and_the_agent_follows(
    node: NodeAgent, gpus: Gpus, pods: Pods
) -> None:
    uuid = gpus.uuids[0]
    path = node.cluster.state / "client.py"
    path.write_text(CLIENT, "utf-8")
    words = ["run", "--simulated", node.simulated, "--mode", "mps", "--memory", "1Gi"]
    words += ["--compute", "0:50", "--gpu", uuid, "--", "python3", str(path), "hold"]
    gpus.wait_stopped()
    node.end()  # else it may be the agent that is first
    run = node.cluster.node.popen([sys.executable, "-m", "allotment", *words])
    try:
        wait_until(
            lambda: gpus.status(uuid).state is DaemonState.READY,
            "ready daemon",
            explain=node.log_tail,
        )
        before = gpus.status(uuid)
        node.again()
        names = ("one", "two")  # one on each GPU: of this one half is left, and not all of it
        for name in names:
            pods.create(pod(name, half("hold")))
        there = {node.share(pods, name).devices[0].uuid: name for name in names}
        beside = there[uuid]
        assert said(pods, beside)[0]["is_client"]
        assert gpus.status(uuid).supervisor == before.supervisor
        assert before.supervisor is not None
        with undisturbed(pods, beside):
            node.cluster.node.run(["kill", "-KILL", str(before.supervisor)])
            wait_until(
                lambda: gpus.status(uuid).supervisor != before.supervisor,
                "taken over",
                explain=node.log_tail,
            )
        assert gpus.status(uuid).daemon == before.daemon
    finally:
        run.stop()


UNEVEN = """\
version: v1
allotment:
  devices:
    - match: {index: [0]}
      modes: [mps]
    - modes: [soft, mps]
"""


def test_uneven_shares_of_gpus_that_may_be_in_the_mode(
    cluster: Cluster, node: NodeAgent, gpus: Gpus, pods: Pods
) -> None:
    gpus.wait_stopped()
    try:
        with node.configured(UNEVEN, back_to=HALVES):
            cluster.wait_allocatable(GPU, 32)
            shares_are_uneven(cluster, node, gpus, pods)
            pods.delete()
    finally:
        cluster.wait_allocatable(NVIDIA, 4)


def shares_are_uneven(cluster: Cluster, node: NodeAgent, gpus: Gpus, pods: Pods) -> None:
    by_mps = {"allotment.dev/mode": "mps"}
    amounts = {"large": (70, "30Gi"), "small": (20, "2Gi"), "soft": (30, "4Gi")}
    for name, (compute, memory) in amounts.items():
        body = container(client("hold"), limits=part(memory, compute=compute))
        notes = by_mps if name != "soft" else {"allotment.dev/mode": "soft"}
        notes = {**notes, "allotment.dev/class": "besteffort"} if name == "small" else notes
        pods.create(pod(name, body, annotations=notes))
    assert said(pods, "large")[0] == {"multiprocessors": 74, "is_client": True}
    assert said(pods, "small")[0] == {"multiprocessors": 20, "is_client": True}
    assert said(pods, "soft")[0] == {"multiprocessors": 108, "is_client": False}
    assert node.share(pods, "soft").devices[0].uuid == gpus.uuids[1]
    edits = json.loads(
        cluster.node.path(
            f"/run/cdi/allotment.dev-share-{node.share(pods, 'small').id}.json"
        ).read_text("utf-8")
    )["devices"][0]["containerEdits"]
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2048M" in edits["env"]
    assert "CUDA_MPS_CLIENT_PRIORITY=1" in edits["env"]
    taken = container(client("take", "8192"), limits=part("1Gi", compute=5))
    pods.create(pod("greedy", taken, annotations=by_mps))
    pods.wait_phase("greedy", "Failed")
    *_, last = said(pods, "greedy", 2)
    assert last["code"] == OUT_OF_MEMORY


def test_the_labels_of_nvidias_discovery(cluster: Cluster, node: NodeAgent) -> None:
    wanted = {
        "nvidia.com/mps.capable": "true",
        "nvidia.com/gpu.sharing-strategy": "mps",
        "nvidia.com/gpu.replicas": "2",
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED",
    }
    wait_until(
        lambda: wanted.items() <= cluster.api.get(cluster.node_path)["metadata"]["labels"].items(),
        "labels",
        explain=node.log_tail,
    )


def test_without_cdi_replicas_find_their_daemon_too(
    own_cluster: Callable[..., Cluster],
) -> None:
    own = own_cluster(settings=NodeSettings(has_cdi=False))
    pods = Pods(own, own.make_namespace("mps"))
    # Mounts that the kubelet makes are as the file system below them.
    own.node.run(["mount", "-o", "remount,exec", "/run"])
    with node_agent(own, HALVES, "--cdi", "off") as node:
        own.wait_allocatable(NVIDIA, 4)
        pods.create(pod("left", half("hold")))
        assert said(pods, "left")[0] == {"multiprocessors": HALF_OF_AN_A100, "is_client": True}
        assert node.share(pods, "left").mode == "mps"
        pods.create(pod("greedy", half("take", "60000")))
        pods.wait_phase("greedy", "Failed")
        *_, last = said(pods, "greedy", 2)
        assert last["code"] == OUT_OF_MEMORY
        pods.delete()
