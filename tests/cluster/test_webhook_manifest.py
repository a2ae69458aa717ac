# SPDX-License-Identifier: Apache-2.0
"""What the manifest installs beside the webhook, on a real API server.

Policies and rights: who may write what. The Service that leads to the command. And certificates,
which change while pods come.
"""

from __future__ import annotations

import base64
import socket
import ssl
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from threading import Event

import installing
import pytest
from installing import CONFIGURATION, SYSTEM
from reviewing import (
    GPU,
    MEMORY,
    WRITTEN,
    Document,
    Running,
    control_plane_of,
    foreign,
    tried,
    webhook,
)
from testbed.api import Api, ApiError
from testbed.cluster import Cluster
from testbed.pods import container, pod
from testbed.waiting import wait_until

from allotment.scheduler.tls.authority import Lives

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_NUMBERS = count(1)


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    del testbed_machine
    with control_plane_of(tmp_path_factory.mktemp("manifest")) as made:
        yield made


@pytest.fixture
def answering(control_plane: Cluster) -> Iterator[Running]:
    with webhook(control_plane) as running:
        yield running


@pytest.fixture
def place(control_plane: Cluster) -> Iterator[str]:
    """The path of the pods of a namespace for the test alone."""
    name = control_plane.make_namespace(f"webhook-{next(_NUMBERS)}")
    yield f"/api/v1/namespaces/{name}/pods"
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


# ---- who may write what --------------------------------------------------------------------------


def test_the_policies_are_understood(control_plane: Cluster) -> None:
    for document in installing.documents():
        if document["kind"] != "ValidatingAdmissionPolicy":
            continue
        name = document["metadata"]["name"]
        path = f"{ADMISSION}/validatingadmissionpolicies/{name}"
        status = wait_until(partial(type_check, control_plane.api, path), f"type check of {name}")
        assert not status["typeChecking"].get("expressionWarnings"), status


def type_check(api: Api, path: str) -> Document | None:
    status: Document = api.get(path).get("status", {})
    return status if status.get("observedGeneration") else None


@contextmanager
def as_scheduler(cluster: Cluster) -> Iterator[Api]:
    """The API as the scheduler's service account."""
    api = Api(installing.as_account(cluster))
    try:
        yield api
    finally:
        api.close()


def binding(name: str, **annotations: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": name,
            "annotations": {f"allotment.dev/{key}": text for key, text in annotations.items()},
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": "nowhere"},
    }


def test_a_placement_is_written_by_the_scheduler_when_it_binds_and_never_else(
    control_plane: Cluster, answering: Running, place: str
) -> None:
    del answering
    admin = control_plane.api
    placement = {"allotment.dev/placement": '{"forged": true}'}
    # At creation the webhook leaves it out; where it does not look, the policy refuses.
    copied = pod("copied", container(["true"], limits={GPU: "1"}), annotations=placement)
    assert "annotations" not in admin.post(place, copied)["metadata"]
    unseen = pod(
        "unseen",
        container(["true"]),
        annotations=placement,
        labels={"allotment.dev/webhook": "ignore"},
    )
    wait_until(
        lambda: "only Allotment's scheduler writes the annotation" in tried(admin, place, unseen),
        "the policy",
    )
    admin.post(place, pod("a", container(["true"], limits={GPU: "1", MEMORY: "2Gi"})))
    own = f"{place}/a"
    # The API server takes up each policy by itself.
    wait_until(
        lambda: (
            "only Allotment's scheduler writes"
            in tried(admin, f"{own}/binding", binding("a", placement="{}"))
        ),
        "the policy of bindings",
    )
    for path in (own, f"{own}/status"):
        with pytest.raises(ApiError) as caught:
            admin.patch(path, {"metadata": {"annotations": placement}})
        assert "cannot change" in str(caught.value)
        assert caught.value.status == 403
    for target in (f"{own}/binding", f"{place.removesuffix('/pods')}/bindings"):
        with pytest.raises(ApiError) as caught:
            admin.post(target, binding("a", placement="{}"))
        assert "only Allotment's scheduler writes" in str(caught.value)
    # What is not its own business, others may still do: annotate, and bind without a placement.
    admin.patch(own, {"metadata": {"annotations": {"example.com/note": "x"}}})
    admin.patch(own, {"metadata": {"annotations": {"allotment.dev/class": "besteffort"}}})
    with as_scheduler(control_plane) as scheduler:
        scheduler.post(f"{own}/binding", binding("a", placement='{"true": true}'))
    bound = admin.get(own)
    assert bound["spec"]["nodeName"] == "nowhere"
    assert bound["metadata"]["annotations"]["allotment.dev/placement"] == '{"true": true}'
    for change in (
        placement,
        {"allotment.dev/placement": None},
        {"allotment.dev/class": None},
        {"allotment.dev/class": "normal"},
        {"allotment.dev/uuids": "GPU-1"},
    ):
        with pytest.raises(ApiError) as caught:
            admin.patch(own, {"metadata": {"annotations": change}})
        assert caught.value.status == 403
    admin.patch(own, {"metadata": {"annotations": {"example.com/note": None}}})
    admin.patch(f"{own}/status", {"status": {"message": "a kubelet's business"}})


def test_the_scheduler_s_token_changes_its_own_keys_alone(
    control_plane: Cluster, place: str
) -> None:
    """Who has it can still bind pods, and move the placements of those that have one."""
    admin, own = control_plane.api, f"{place}/a"
    admin.post(place, pod("a", container(["true"]), annotations={"example.com/note": "x"}))
    record = {"hami.io/vgpu-node": "nowhere"}
    by_others = {"example.com/zone": "a"}  # as another webhook adds to Bindings
    forged, labelled = binding("a", placement="{}"), binding("a", placement="{}")
    forged["metadata"]["annotations"] |= by_others | {"cdi.k8s.io/gpu": "y"}
    labelled["metadata"]["labels"] = {"app": "y"}
    with as_scheduler(control_plane) as scheduler:
        wait_until(
            lambda: "account there: cdi.k8s.io/gpu" in tried(scheduler, f"{own}/binding", forged),
            "the policy",
        )
        for key in ("allotment.dev/class", "io.kubernetes.cri-o.Devices", "gpu-memory"):
            named = binding("a", placement="{}")
            named["metadata"]["annotations"] |= by_others | {key: "y"}
            assert tried(scheduler, f"{own}/binding", named).count(f"account there: {key}") == 1
        assert "account there: app" in tried(scheduler, f"{own}/binding", labelled)
        forbidden: list[tuple[Document, str]] = [
            ({"status": {"phase": "Failed"}}, "nominatedNodeName alone"),
            ({"status": {"message": "y"}}, "nominatedNodeName alone"),
            ({"status": {"nominatedNodeName": "n", "message": "y"}}, "nominatedNodeName alone"),
            ({"status": {"phase": None}}, "nominatedNodeName alone"),
            ({"metadata": {"labels": {"app": "y"}}}, "nominatedNodeName alone"),
            ({"metadata": {"finalizers": ["example.com/x"]}}, "nominatedNodeName alone"),
            ({"metadata": {"annotations": {"example.com/note": "y"}}}, "placement alone"),
            ({"metadata": {"annotations": {"example.com/note": None}}}, "placement alone"),
            ({"metadata": {"annotations": {"allotment.dev/class": "latency"}}}, "placement alone"),
            # Before its bind a pod has none.
            ({"metadata": {"annotations": {"allotment.dev/placement": "{}"}}}, "placement alone"),
        ]
        for change, why in forbidden:
            with pytest.raises(ApiError, match=why) as caught:
                scheduler.patch(f"{own}/status", change)
            assert caught.value.status == 403
        for node in ("n", None):
            scheduler.patch(f"{own}/status", {"status": {"nominatedNodeName": node}})
            assert admin.get(own)["status"].get("nominatedNodeName") == node
        bound = binding("a", placement="{}")
        bound["metadata"]["annotations"] |= record | by_others
        scheduler.post(f"{own}/binding", bound)
        again = {"metadata": {"annotations": {"allotment.dev/placement": '{"again": true}'}}}
        scheduler.patch(f"{own}/status", again)
        gone = {"metadata": {"annotations": {"allotment.dev/placement": None}}}
        with pytest.raises(ApiError, match="placement alone"):
            scheduler.patch(f"{own}/status", gone)
    annotations = admin.get(own)["metadata"]["annotations"]
    assert annotations == {
        "allotment.dev/placement": '{"again": true}',
        "example.com/note": "x",
        **record,
        **by_others,
    }


def test_the_manifest_and_the_command_fit_together(control_plane: Cluster, place: str) -> None:
    """`allot scheduler` with the account's own rights, reached by the manifest's own Service.

    There is no kube-proxy: the Service's address is given to the interface that it listens on, and
    its port is another one than 443, at which the API server listens there.
    """
    control_plane.api.delete(CONFIGURATION)  # it led to where other tests serve
    installing.apply(control_plane, without=())
    service = f"{SYSTEM}/services/allotment-webhook"
    address = control_plane.api.get(service)["spec"]["clusterIP"]
    move = [{"op": "replace", "path": "/spec/ports/0/port", "value": 9443}]
    control_plane.api.patch(service, move, kind="json")
    move[0]["path"] = "/webhooks/0/clientConfig/service/port"
    control_plane.api.patch(CONFIGURATION, move, kind="json")
    control_plane.node.run(["ip", "address", "add", f"{address}/32", "dev", "lo"])
    path = control_plane.log("scheduler-webhook")
    with path.open("w", encoding="utf-8") as log:
        process = control_plane.node.popen(
            [
                *(sys.executable, "-m", "allotment", "scheduler"),
                *("--kubeconfig", str(installing.as_account(control_plane))),
                *("--listen", "127.0.0.1:9447", "--webhook-listen", f"{address}:9443"),
                *("--scheduler-name", "allotment-scheduler"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(
            lambda: control_plane.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"].get(
                "caBundle"
            ),
            "the bundle",
            explain=lambda: path.read_text("utf-8")[-2000:],
        )
        said: list[str] = []

        def is_created() -> bool:
            said[:] = [tried(control_plane.api, place, foreign("probe"))]
            return said == [""]

        wait_until(
            is_created,
            "an answer of the webhook",
            explain=lambda: f"{said}\n{path.read_text('utf-8')[-2000:]}",
        )
        made = control_plane.api.post(place, foreign("a"))
        assert made["metadata"]["annotations"]["allotment.dev/dialect"] == "aliyun"
        assert made["spec"]["schedulerName"] == "allotment-scheduler"
        # Told to whoever looks at the pod, and not to its creator alone.
        control_plane.api.post(place, WRITTEN["kai"][0])
        events = place.replace("/pods", "/events")

        def told() -> list[str]:
            return [
                each["message"]
                for each in control_plane.api.items(events)
                if each["reason"] == "NotHonoured" and each["involvedObject"]["name"] == "kai"
            ]

        wait_until(told, "event of what is not honoured")
        assert "the label kai.scheduler/queue" in told()[0]
        assert "forbidden" not in path.read_text("utf-8").lower()
    finally:
        process.stop()
        control_plane.node.run(["ip", "address", "delete", f"{address}/32", "dev", "lo"])


# ---- certificates --------------------------------------------------------------------------------


def test_certificates_are_renewed_under_load_and_nobody_is_refused(
    control_plane: Cluster, place: str
) -> None:
    """Authorities live 24 s here, certificates 15 s: both change while pods come."""
    lives = Lives(
        authority=timedelta(seconds=24),
        server=timedelta(seconds=15),
        # Each step has these seconds to be known to everybody, on whatever machine.
        overlap=timedelta(seconds=4),
        skew=timedelta(seconds=2),
    )
    secret = f"{SYSTEM}/secrets/allotment-webhook"
    control_plane.api.patch(secret, {"data": None})
    shown: set[bytes] = set()
    authorities: set[str] = set()
    problems: list[str] = []
    is_over = Event()

    def create() -> int:
        count = 0
        while not is_over.wait(0.02):
            try:
                control_plane.api.post(place, foreign(f"pod-{count}"), dryRun="All")
            except ApiError as error:
                problems.append(f"{datetime.now(UTC)}: {error}")
            count += 1
        return count

    def have_changed() -> bool:
        # The API server keeps its connections; here is somebody who makes a new one each time.
        for each in (first, second):
            client = control_plane.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]
            assert each.service.port is not None
            address = control_plane.node.link.outer
            shown.add(handshake(address, each.service.port, client["caBundle"]))
        authorities.add(control_plane.api.get(secret)["data"]["ca.crt"])
        return len(shown) >= 4 and len(authorities) >= 2

    def is_alone() -> bool:
        client = control_plane.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]
        return base64.b64decode(client["caBundle"]).count(b"BEGIN CERTIFICATE") == 1

    with (
        webhook(control_plane, lives=lives) as first,
        webhook(control_plane, lives=lives) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        creating = pool.submit(create)
        try:
            wait_until(have_changed, "change of the authority", timeout_s=120, every_s=0.05)
            wait_until(is_alone, "end of the one before")
            have_changed()
        finally:
            is_over.set()
        made = creating.result()
    control_plane.api.close()  # also that thread's connection
    assert not problems, problems[:3]
    assert made > 50
    control_plane.api.patch(secret, {"data": None})


def handshake(address: str, port: int, bundle: str) -> bytes:
    """Connect as somebody who trusts this bundle; the certificate that was shown."""
    context = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
    with (
        socket.create_connection((address, port), timeout=20) as plain_socket,
        context.wrap_socket(plain_socket, server_hostname=address) as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True) or b""


def test_an_administrator_s_change_of_the_condition_is_put_right(
    control_plane: Cluster, answering: Running
) -> None:
    del answering
    there = control_plane.api.get(CONFIGURATION)
    wanted = there["webhooks"][0]["matchConditions"]
    there["webhooks"][0]["matchConditions"] = [{"name": "asks-for-gpus", "expression": "false"}]
    control_plane.api.put(CONFIGURATION, there)
    wait_until(
        lambda: control_plane.api.get(CONFIGURATION)["webhooks"][0]["matchConditions"] == wanted,
        "the condition",
    )


def test_the_manifest_grants_no_more_than_the_webhook_needs(control_plane: Cluster) -> None:
    with as_scheduler(control_plane) as scheduler:
        for path in (
            f"{SYSTEM}/secrets",
            "/api/v1/namespaces/kube-system/secrets",
            f"{ADMISSION}/mutatingwebhookconfigurations",
            "/api/v1/namespaces/default/configmaps",
        ):
            with pytest.raises(ApiError) as caught:
                scheduler.get(path)
            assert caught.value.status == 403
        assert scheduler.get(f"{SYSTEM}/secrets/allotment-webhook")
        assert scheduler.get(CONFIGURATION)
