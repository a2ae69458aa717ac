# SPDX-License-Identifier: Apache-2.0
"""Who shows which certificate, on a real API server: it to the webhook, and who is told of what."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import installing
import pytest
from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.pods import container, pod
from testbed.waiting import tail, wait_until

from allotment.scheduler.tls.authority import Lives, next_client, next_set
from allotment.scheduler.tls.context import load_chain

WEBHOOK_PORT, EXTENDER_PORT, METRICS_PORT = 9443, 9447, 9448
SERVICE = "allotment-webhook.allotment-system.svc"
EXTENDER = "allotment-scheduler.allotment-system.svc"
SYSTEM = "/api/v1/namespaces/allotment-system"
PODS = "/api/v1/namespaces/default/pods"
CONFIGURATION = (
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/allotment-scheduler"
)
PROGRAM = Path(__file__).with_name("looking_often.py")


@dataclass(frozen=True, slots=True)
class Shown:
    """The API server's certificate for webhooks, and the files by which it knows of it."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def admission(self) -> Path:
        return self.folder / "admission.yaml"

    def write(self) -> None:
        """As the guide has it, in JSON, which is YAML."""
        now = datetime.now(UTC)
        signer = next_set(now, names=("none",), kept=None, lives=Lives())
        assert signer is not None
        made = next_client(now, kept=signer, found={}, lives=Lives())
        assert made is not None
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (self.folder / name).write_bytes(made[name])
        files = {
            "client-certificate": str(self.folder / "tls.crt"),
            "client-key": str(self.folder / "tls.key"),
        }
        # Of a URL it is host and port, of a Service at 443 its name alone.
        users = [{"name": f"{SERVICE}:{WEBHOOK_PORT}", "user": files}]
        kubeconfig = self.folder / "webhooks.kubeconfig"
        kubeconfig.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "users": users}))
        group = "apiserver.config.k8s.io/v1"
        configuration = {
            "apiVersion": group,
            "kind": "WebhookAdmissionConfiguration",
            "kubeConfigFile": str(kubeconfig),
        }
        plugin = {"name": "MutatingAdmissionWebhook", "configuration": configuration}
        text = {"apiVersion": group, "kind": "AdmissionConfiguration", "plugins": [plugin]}
        self.admission.write_text(json.dumps(text))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    made = Shown(tmp_path_factory.mktemp("shown"))
    made.write()
    return made


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory, shown: Shown
) -> Iterator[Cluster]:
    """A control plane whose API server shows a certificate to the webhook, and the scheduler."""
    del testbed_machine
    with Cluster(
        state=tmp_path_factory.mktemp("certificates"),
        settings=None,
        api_server_flags=(f"--admission-control-config-file={shown.admission}",),
    ) as made:
        made.allow_agent()
        installing.install(made, webhook_port=WEBHOOK_PORT)
        with made.log("scheduler").open("w", encoding="utf-8") as log:
            process = made.node.popen(
                [
                    *(sys.executable, str(PROGRAM)),
                    *("--kubeconfig", str(installing.as_account(made))),
                    *("--listen", f"0.0.0.0:{EXTENDER_PORT}"),
                    *("--metrics-listen", f"0.0.0.0:{METRICS_PORT}"),
                    *("--webhook-listen", f"0.0.0.0:{WEBHOOK_PORT}"),
                    *("--webhook-client-ca", str(shown.authority)),
                    *("--client-secret", "allotment-kube-scheduler"),
                    *("--service", "allotment-system/allotment-scheduler", "--pod-ip", "127.0.0.1"),
                ],
                stdout=log,
                stderr=log,
            )
        try:
            translated(made)
            yield made
        finally:
            process.stop()


def foreign() -> Json:
    """A pod in another system's words."""
    return pod("a", container(["true"], limits={"aliyun.com/gpu-mem": "4"}))


def translated(cluster: Cluster) -> None:
    """Wait until the API server has the webhook's answer."""
    said: list[str] = []

    def is_translated() -> bool:
        try:
            made = cluster.api.post(PODS, foreign(), dryRun="All")
        except ApiError as error:
            said[:] = [str(error)]
            return False
        return "allotment.dev/dialect" in made["metadata"].get("annotations", {})

    wait_until(
        is_translated,
        "an answer of the webhook",
        explain=lambda: f"{said}\n{tail(cluster.log('scheduler'))}",
    )


def is_let_in(
    cluster: Cluster, port: int, bundle: bytes, *, name: str, shows: Json | None = None
) -> bool:
    """Whether somebody who trusts this bundle has an answer by HTTP. Raises `SSLError`."""
    context = ssl.create_default_context(cadata=bundle.decode("ascii"))
    if shows is not None:
        load_chain(context, *(base64.b64decode(shows[key]) for key in ("tls.crt", "tls.key")))
    with (
        socket.create_connection((cluster.address, port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname=name) as connection,
        suppress(OSError),
    ):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return connection.recv(12) == b"HTTP/1.1 200"
    return False


def failed(cluster: Cluster, door: str, why: str) -> float:
    """How often a handshake has, by the scheduler's own figures."""
    url = f"http://{cluster.address}:{METRICS_PORT}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    start = f'allotment_scheduler_{door}_handshakes_failed_total{{why="{why}"}} '
    (line,) = (each for each in lines if each.startswith(start))
    return float(line.split()[-1])


def kept(cluster: Cluster, name: str) -> Json:
    """The data of a Secret, in base64."""
    found: Json = cluster.api.get(f"{SYSTEM}/secrets/{name}").get("data") or {}
    return found


def warned(cluster: Cluster, reason: str) -> list[str]:
    """Of which Secrets there is such an event."""
    return [
        each["involvedObject"]["name"]
        for each in cluster.api.items(f"{SYSTEM}/events")
        if (each["reason"], each["type"], each["involvedObject"]["kind"])
        == (reason, "Warning", "Secret")
        and each["involvedObject"].get("uid")
    ]


def test_the_api_server_is_answered_and_nobody_else(control_plane: Cluster, shown: Shown) -> None:
    bundle = base64.b64decode(kept(control_plane, "allotment-webhook")["bundle.crt"])
    own = {
        name: base64.b64encode((shown.folder / name).read_bytes()).decode()
        for name in ("tls.crt", "tls.key")
    }
    assert is_let_in(control_plane, WEBHOOK_PORT, bundle, name=SERVICE, shows=own)
    others: tuple[Json | None, ...] = (None, kept(control_plane, "allotment-kube-scheduler"))
    for shows in others:
        assert not is_let_in(control_plane, WEBHOOK_PORT, bundle, name=SERVICE, shows=shows)

    def are_counted() -> bool:
        reasons = ("no_certificate", "wrong_certificate")
        return all(failed(control_plane, "webhook", each) == 1 for each in reasons)

    wait_until(
        are_counted,
        "one of each",
        explain=lambda: tail(control_plane.log("scheduler")),
    )


def test_an_api_server_that_trusts_another_is_counted_and_set_right(
    control_plane: Cluster, shown: Shown
) -> None:
    """Its words for it are Go's, as kube-scheduler's are."""
    other = base64.b64encode(shown.authority.read_bytes()).decode()
    webhooks = [{"name": "pods.allotment.dev", "clientConfig": {"caBundle": other}}]

    def is_counted() -> bool:
        # Again where it was set right before the API server asked.
        control_plane.api.patch(CONFIGURATION, {"webhooks": webhooks}, kind="strategic")
        with suppress(ApiError):
            control_plane.api.post(PODS, foreign(), dryRun="All")
        return failed(control_plane, "webhook", "distrusted") >= 1

    wait_until(
        is_counted,
        "the figure",
        every_s=0.2,
        explain=lambda: tail(control_plane.log("scheduler")),
    )
    translated(control_plane)


def test_who_is_locked_out_by_a_new_authority_is_told_and_counted(control_plane: Cluster) -> None:
    before = kept(control_plane, "allotment-kube-scheduler")
    trusted = base64.b64decode(before["ca.crt"])
    assert is_let_in(control_plane, EXTENDER_PORT, trusted, name=EXTENDER, shows=before)
    assert warned(control_plane, "AuthorityReplaced") == []
    control_plane.api.patch(f"{SYSTEM}/secrets/allotment-webhook", {"data": None})
    wait_until(
        lambda: warned(control_plane, "AuthorityReplaced") == ["allotment-kube-scheduler"],
        "the event",
        explain=lambda: tail(control_plane.log("scheduler")),
    )

    def is_locked_out() -> bool:
        try:
            is_let_in(control_plane, EXTENDER_PORT, trusted, name=EXTENDER, shows=before)
        except ssl.SSLCertVerificationError:
            return True
        return False

    wait_until(is_locked_out, "the new certificate served")
    wait_until(lambda: failed(control_plane, "extender", "distrusted") >= 1, "the figure")
    wait_until(
        lambda: "only at start" in control_plane.log("scheduler").read_text("utf-8"),
        "what to do",
        explain=lambda: tail(control_plane.log("scheduler")),
    )
    after = kept(control_plane, "allotment-kube-scheduler")
    trusted = base64.b64decode(after["ca.crt"])
    assert is_let_in(control_plane, EXTENDER_PORT, trusted, name=EXTENDER, shows=after)
    assert not is_let_in(control_plane, EXTENDER_PORT, trusted, name=EXTENDER, shows=before)
    # Of the webhook's side nobody has to do anything.
    translated(control_plane)


def test_a_secret_that_somebody_has_spoilt_is_told_and_left(control_plane: Cluster) -> None:
    good = kept(control_plane, "allotment-webhook")
    path = f"{SYSTEM}/secrets/allotment-webhook"
    control_plane.api.patch(path, {"data": {"tls.crt": base64.b64encode(b"junk").decode()}})
    try:
        wait_until(
            lambda: warned(control_plane, "CertificatesUnreadable") == ["allotment-webhook"],
            "the event",
            explain=lambda: tail(control_plane.log("scheduler")),
        )
        assert kept(control_plane, "allotment-webhook")["ca.crt"] == good["ca.crt"]
        translated(control_plane)
    finally:
        control_plane.api.patch(path, {"data": good})
