# SPDX-License-Identifier: Apache-2.0
"""Two replicas, the real kube-scheduler and the real API server: one may go at any time.

There is no kube-proxy here: two relays stand in for what it makes of the two Services. One leads to
where the leader's EndpointSlice says, the other in turn to each replica whose `/readyz` is well.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import signal
import socket
import ssl
import sys
import threading
import time
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path

import installing
import pytest
from scheduling import add_gpu_nodes, inventory, placements, scheduler_config
from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.sandbox import Process
from testbed.waiting import tail, wait_until

SLICE = "/apis/discovery.k8s.io/v1/namespaces/allotment-system/endpointslices"
SECRET = f"{installing.SYSTEM}/secrets/allotment-kube-scheduler"
Address = tuple[str, int]


class Relay:
    """Leads each connection to where `leads` says at that moment."""

    def __init__(self, address: str, leads: Callable[[], Address | None]) -> None:
        self._leads = leads
        self._socket = socket.create_server((address, 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                came, _ = self._socket.accept()
                threading.Thread(target=self._relay, args=(came,), daemon=True).start()

    def _relay(self, came: socket.socket) -> None:
        to = self._leads()
        try:
            gone = socket.create_connection(to, timeout=5) if to is not None else None
        except OSError:
            gone = None
        if gone is None:
            came.close()
            return
        gone.settimeout(None)
        back = threading.Thread(target=_pump, args=(gone, came), daemon=True)
        back.start()
        _pump(came, gone)
        back.join()
        came.close()
        gone.close()


def _pump(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := one.recv(1 << 16):
            other.sendall(part)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)


class Replica:
    """`allot scheduler` as the manifest starts it, with the manifest's rights."""

    def __init__(self, cluster: Cluster, number: int, settings: Path) -> None:
        self.cluster = cluster
        self.name = f"replica-{number}"
        self.extender, self.webhook, self.metrics = (9600 + 10 * number + each for each in range(3))
        self._settings = settings
        self._kubeconfig = installing.as_account(cluster)
        self.process = self.start()

    def start(self) -> Process:
        (deployment,) = (
            each
            for each in installing.documents()
            if each["kind"] == "Deployment" and each["metadata"]["name"] == "allotment-scheduler"
        )
        (shipped,) = deployment["spec"]["template"]["spec"]["containers"]
        command = [
            *(sys.executable, "-m", "allotment", *shipped["args"]),
            *(f"--listen=:{self.extender}", f"--webhook-listen=:{self.webhook}"),
            *(f"--metrics-listen=:{self.metrics}", f"--dialects={self._settings}"),
            *(f"--kubeconfig={self._kubeconfig}",),
            *(f"--identity={self.name}", f"--pod-ip={self.cluster.address}"),
        ]
        with self.cluster.log(self.name).open("a", encoding="utf-8") as file:
            self.process = self.cluster.node.popen(command, stdout=file, stderr=file)
        return self.process

    @property
    def is_ready(self) -> bool:
        url = f"http://{self.cluster.address}:{self.metrics}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return int(answer.status) == 200
        except (OSError, http.client.HTTPException):
            return False


class Installation:
    """The cluster with both replicas, and what leads to them."""

    def __init__(self, cluster: Cluster, replicas: list[Replica]) -> None:
        self.cluster = cluster
        self.replicas = replicas
        self._ready: list[Replica] = []
        self._is_over = threading.Event()
        turns = itertools.count()

        def ready() -> Address | None:
            found = self._ready
            return (cluster.address, found[next(turns) % len(found)].webhook) if found else None

        self.extender = Relay(cluster.node.link.outer, self.endpoint)
        self.webhook = Relay(cluster.node.link.outer, ready)
        threading.Thread(target=self._probe, daemon=True).start()

    def close(self) -> None:
        self._is_over.set()
        self.extender.close()
        self.webhook.close()
        for each in self.replicas:
            each.process.stop(number=signal.SIGKILL)

    def _probe(self) -> None:
        """As a kubelet does, and kube-proxy that hears of it later."""
        while not self._is_over.wait(0.5):
            found = [each for each in self.replicas if each.is_ready]
            if not self._is_over.wait(0.5):
                self._ready = found

    def endpoint(self) -> Address | None:
        """Where the leader's Service leads."""
        found = self.cluster.api.get(f"{SLICE}/allotment-scheduler-ipv4")
        if not found.get("endpoints"):
            return None
        return found["endpoints"][0]["addresses"][0], found["ports"][0]["port"]

    def leader(self) -> Replica | None:
        port = (self.endpoint() or ("", 0))[1]
        return next((each for each in self.replicas if each.extender == port), None)

    def wait_ready(self) -> None:
        wait_until(
            lambda: self.leader() and all(each.is_ready for each in self.replicas),
            "two ready replicas",
            explain=lambda: "\n".join(tail(self.cluster.log(each.name)) for each in self.replicas),
        )

    def wait_other_than(self, before: Replica) -> None:
        wait_until(lambda: self.leader() not in {None, before}, "another leader")


def hami_pod(name: str) -> Json:
    """It is not created without the webhook's answer."""
    limits: dict[str, str | int] = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 100}
    return pod(name, container(["sleep"], limits=limits))


@pytest.fixture(scope="module")
def installation(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    del testbed_machine
    with Cluster(state=tmp_path_factory.mktemp("replicas"), settings=None) as cluster:
        cluster.allow_agent()
        installing.apply(cluster, without=("Deployment",))
        add_gpu_nodes(cluster, [inventory(f"n{number}", devices=4) for number in range(3)])
        settings = cluster.state / "settings.json"
        names = {"webhook": {"certificate": {"names": [cluster.node.link.outer]}}}
        settings.write_text(json.dumps(names), "utf-8")
        made = Installation(cluster, [Replica(cluster, number, settings) for number in range(2)])
        try:
            made.wait_ready()
            ask_by_certificate(made)
            review_by_relay(made)
            yield made
        finally:
            made.close()


def ask_by_certificate(made: Installation) -> None:
    """Start kube-scheduler anew with what the Secret has, as its pod would find it."""
    cluster = made.cluster
    folder = cluster.state / "certificate"
    folder.mkdir()
    for name, text in cluster.api.get(SECRET)["data"].items():
        (folder / name).write_bytes(b64decode(text))
    user = str(cluster.credentials.kubeconfig("scheduler"))
    config = scheduler_config().replace("{kubeconfig}", user)
    config = config.replace(
        "http://127.0.0.1:9447", f"https://{cluster.node.link.outer}:{made.extender.port}"
    ).replace(
        "    weight: 1\n",
        "    weight: 1\n    enableHTTPS: true\n    tlsConfig:\n"
        "      serverName: allotment-scheduler.allotment-system.svc\n"
        f"      certFile: {folder}/tls.crt\n"
        f"      keyFile: {folder}/tls.key\n"
        f"      caFile: {folder}/ca.crt\n",
    )
    name = "profiles: [{schedulerName: allotment-scheduler}]\n"
    (cluster.credentials.folder / "scheduler.yaml").write_text(config + name, "utf-8")
    cluster.restart("kube-scheduler")


def review_by_relay(made: Installation) -> None:
    """Tell the API server where the webhook's Service would lead."""
    url = f"https://{made.cluster.node.link.outer}:{made.webhook.port}/webhook/pods"
    installing.lead(made.cluster, url)
    installing.wait_translates(made.cluster)


def wait_bound(pods: Pods, names: list[str]) -> None:
    path = f"/api/v1/namespaces/{pods.namespace}/pods"

    def missing() -> set[str]:
        return set(names) - placements(pods.cluster.api.items(path)).keys()

    wait_until(
        lambda: not missing(),
        f"{len(names)} bound pods",
        explain=lambda: f"{missing()}\n{tail(pods.cluster.log('kube-scheduler'))}",
    )


def test_kube_scheduler_alone_is_answered(installation: Installation) -> None:
    pods = Pods(installation.cluster, "default")
    names = [f"first-{number}" for number in range(4)]
    for name in names:
        pods.create(hami_pod(name))
    wait_bound(pods, names)
    folder = installation.cluster.state / "certificate"
    endpoint = installation.endpoint()
    assert endpoint is not None
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.check_hostname = False
    assert answered(endpoint, context) is None
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    assert answered(endpoint, context) == 400


def answered(endpoint: Address, context: ssl.SSLContext) -> int | None:
    """The status of the answer to what is no question; None: not let in."""
    connection = http.client.HTTPSConnection(*endpoint, timeout=10, context=context)
    try:
        connection.request("POST", "/filter", body=b"{")
        with connection.getresponse() as answer:
            answer.read()
            return answer.status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def test_another_one_leads_when_the_leader_is_killed(installation: Installation) -> None:
    installation.wait_ready()
    leader = installation.leader()
    assert leader is not None
    leader.process.stop(number=signal.SIGKILL)
    pods = Pods(installation.cluster, "default")
    names = [f"killed-{number}" for number in range(4)]
    for name in names:
        create_at_last(pods, name)
    installation.wait_other_than(leader)
    wait_bound(pods, names)
    leader.start()
    installation.wait_ready()
    assert installation.leader() is not leader


def create_at_last(pods: Pods, name: str) -> None:
    """As a controller does: until it is known that a replica is dead, it may be asked."""

    def is_created() -> bool:
        with contextlib.suppress(ApiError):
            pods.create(hami_pod(name))
            return True
        return False

    wait_until(is_created, f"pod {name}")


def test_nobody_is_refused_while_the_leader_is_told_to_end(installation: Installation) -> None:
    installation.wait_ready()
    leader = installation.leader()
    assert leader is not None
    pods = Pods(installation.cluster, "default")
    names: list[str] = []

    def create(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            names.append(f"ended-{len(names)}")
            pods.create(hami_pod(names[-1]))
            time.sleep(0.2)

    create(1)
    leader.process.send_signal(signal.SIGTERM)
    create(8)
    assert leader.process.wait(60) == 0
    installation.wait_other_than(leader)
    wait_bound(pods, names)
    leader.start()
