# SPDX-License-Identifier: Apache-2.0
"""The webhook and the admission policies on a real API server, as the manifest installs them."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import installing
import pytest
import yaml
from click.testing import CliRunner
from installing import CONFIGURATION, SYSTEM
from testbed import roles
from testbed.api import Api as Admin
from testbed.api import ApiError
from testbed.cluster import Cluster
from testbed.pods import container, pod
from testbed.waiting import TestbedError, wait_until

from allotment.cli.scheduler import command
from allotment.dialects.systems import foreign_dialects
from allotment.kube.clients import connect
from allotment.kube.quotas import FollowedQuotas
from allotment.model.quantities import parse_whole
from allotment.scheduler.certificates import Lives
from allotment.scheduler.quota import QuotaBook
from allotment.scheduler.quota_following import QuotaFeed
from allotment.scheduler.settings_file import FileSettings, read_file_settings
from allotment.scheduler.webhook import WebhookSettings
from allotment.scheduler.webhook_serving import ListenSettings, WebhookService

Document = dict[str, Any]

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
GPU, MEMORY, COMPUTE = (f"allotment.dev/{each}" for each in ("gpu", "gpu-memory", "gpu-compute"))
GI = 1 << 30


# ---- a cluster with the manifest -----------------------------------------------------------------


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A control plane without nodes: pods are created here, and run nowhere.

    Its kube-scheduler has the manifest's configuration: it would not start if that were wrong.
    """
    del testbed_machine
    with Cluster(
        state=tmp_path_factory.mktemp("webhook"),
        settings=None,
        scheduler_config=scheduler_configuration(),
    ) as made:
        made.allow_agent()
        roles.bind_agent(made.api, installing.MANIFEST)
        installing.apply(made, without=())
        yield made


def scheduler_configuration() -> str:
    """The manifest's, for a kube-scheduler that runs alone and outside of a pod."""
    (text,) = (
        each["data"]["config.yaml"]
        for each in installing.documents()
        if each["kind"] == "ConfigMap"
    )
    alone: Document = {
        "clientConnection": {"kubeconfig": "{kubeconfig}"},
        "leaderElection": {"leaderElect": False},
    }
    found = yaml.safe_load(text) | alone
    # Its files are mounted into its pod; here nobody is asked.
    for each in found["extenders"]:
        del each["tlsConfig"]
    return json.dumps(found)


@dataclass
class Running:
    """A webhook that is served by a thread of this process, with the manifest's rights."""

    service: WebhookService
    quotas: FollowedQuotas
    loop: asyncio.AbstractEventLoop

    @property
    def certificate(self) -> bytes:
        return self.service.keeper.bundle


@contextmanager
def webhook(
    cluster: Cluster,
    *,
    file: FileSettings | None = None,
    probe: Document | None = None,
    **changes: Any,  # noqa: ANN401 - any setting
) -> Iterator[Running]:
    """Serve one until the end of the `with`, at a port that the API server is told of.

    `probe` is a pod that it translates, by which it is known to be asked.
    """
    link = cluster.node.link
    said = file or FileSettings()
    settings = said.listening(
        ListenSettings(
            listen=f"{link.outer}:0",
            look_s=0.2,
            webhook=WebhookSettings(scheduler_name="allotment-scheduler"),
        )
    )
    settings = replace(settings, names=(link.outer,), **changes)
    dialects = foreign_dialects(said.dialects)
    found: list[Running] = []
    started, ended = threading.Event(), asyncio.Event()
    failures: list[BaseException] = []

    async def main() -> None:
        async with connect(cluster.credentials.kubeconfig("agent")) as api:
            book, quotas = QuotaBook(), FollowedQuotas(api)
            service = WebhookService(api, settings, dialects=dialects, quotas=book)
            running = Running(service, quotas, asyncio.get_running_loop())
            tasks = [
                asyncio.create_task(each)
                for each in (service.run(), quotas.run(), QuotaFeed(quotas, book).run())
            ]
            async with asyncio.timeout(30):
                while not (service.port and service.keeper.is_ready and quotas.is_synced):
                    for task in tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.01)
            found.append(running)
            started.set()
            await ended.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.close()
        # Of TLS, a connection's end is an exchange: both sides have to say so.
        await asyncio.sleep(0.3)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    if failures:
        raise failures[0]
    running = found[0]
    try:
        point_at(cluster, running, probe or foreign("probe", "default"))
        yield running
    finally:
        running.loop.call_soon_threadsafe(ended.set)
        thread.join(30)


def point_at(cluster: Cluster, running: Running, probe: Document) -> None:
    """Tell the API server the address: there is no kube-proxy that would lead to the Service."""
    url = f"https://{cluster.node.link.outer}:{running.service.port}/webhook/pods"
    installing.lead(cluster, url)
    said: list[str] = []

    def is_asked() -> bool:
        try:
            made = cluster.api.post("/api/v1/namespaces/default/pods", probe, dryRun="All")
        except ApiError as error:
            said[:] = [str(error)]
            return False
        said[:] = [str(made["metadata"])]
        return "allotment.dev/dialect" in made["metadata"].get("annotations", {})

    wait_until(is_asked, "answer of the webhook", timeout_s=30, explain=lambda: str(said))


@pytest.fixture
def answering(control_plane: Cluster) -> Iterator[Running]:
    with webhook(control_plane) as running:
        yield running


@pytest.fixture
def place(control_plane: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The path of the pods of a namespace for the test alone."""
    name = f"webhook-{abs(hash(request.node.nodeid)) % 10**8}"
    control_plane.make_namespace(name)
    yield f"/api/v1/namespaces/{name}/pods"
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


def foreign(name: str, namespace: str | None = None) -> Document:
    made = pod(name, container(["sleep", "1"], limits={"aliyun.com/gpu-mem": "4"}))
    if namespace:
        made["metadata"]["namespace"] = namespace
    return made


def plain(name: str, **limits: str) -> Document:
    return pod(name, container(["sleep", "1"], limits=limits))


def refused(api: Admin, path: str, body: Document) -> str:
    with pytest.raises(ApiError) as caught:
        api.post(path, body)
    return str(caught.value)


# ---- translation ---------------------------------------------------------------------------------

WRITTEN: dict[str, tuple[Document, dict[str, str]]] = {
    "hami": (
        pod(
            "hami",
            container(
                ["true"],
                limits={"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30},
            ),
        ),
        {GPU: "2", MEMORY: str(2 * 3000 << 20), COMPUTE: "60"},
    ),
    "volcano": (
        pod(
            "volcano",
            container(
                ["true"], limits={"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 1024}
            ),
        ),
        {GPU: "1", MEMORY: str(GI)},
    ),
    "aliyun": (foreign("aliyun"), {GPU: "1", MEMORY: str(4 * GI)}),
    "tencent": (
        pod(
            "tencent",
            container(
                ["true"], limits={"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 8}
            ),
        ),
        {GPU: "1", MEMORY: str(2 * GI), COMPUTE: "50"},
    ),
    "qgpu": (
        pod(
            "qgpu",
            container(
                ["true"],
                limits={
                    "tke.cloud.tencent.com/qgpu-core": 30,
                    "tke.cloud.tencent.com/qgpu-memory": 5,
                },
            ),
        ),
        {GPU: "1", MEMORY: str(5 * GI), COMPUTE: "30"},
    ),
    "kubeshare": (
        pod(
            "kubeshare",
            container(["true"]),
            annotations={
                "kubeshare/gpu_request": "0.5",
                "kubeshare/gpu_limit": "1.0",
                "kubeshare/gpu_mem": str(2 * GI),
            },
        ),
        {GPU: "1", MEMORY: str(2 * GI), COMPUTE: "50"},
    ),
    "kubeshare-2": (
        pod(
            "kubeshare-2",
            container(["true"]),
            labels={
                "sharedgpu/gpu_request": "0.5",
                "sharedgpu/gpu_limit": "1.0",
                "sharedgpu/gpu_mem": str(2 * GI),
            },
        ),
        {GPU: "1", MEMORY: str(2 * GI), COMPUTE: "50"},
    ),
    "kai": (
        pod(
            "kai",
            container(["true"]),
            annotations={"gpu-memory": "2000"},
            labels={"kai.scheduler/queue": "team"},
        ),
        {GPU: "1", MEMORY: str(2000 << 20)},
    ),
}


@pytest.mark.parametrize("dialect", WRITTEN)
def test_a_pod_of_each_dialect_is_stored_in_our_own_words(
    control_plane: Cluster, answering: Running, place: str, dialect: str
) -> None:
    del answering
    body, wanted = WRITTEN[dialect]
    made = control_plane.api.post(place, body)
    assert made["metadata"]["annotations"]["allotment.dev/dialect"] == dialect
    assert made["spec"]["schedulerName"] == "allotment-scheduler"
    resources = made["spec"]["containers"][0]["resources"]
    found = {key: value for key, value in resources["limits"].items() if key in {GPU, COMPUTE}}
    assert found == {key: value for key, value in wanted.items() if key != MEMORY}
    # The API server writes an amount in its own form.
    assert parse_whole(resources["limits"].get(MEMORY, "0")) == int(wanted.get(MEMORY, "0"))
    assert resources["requests"] == resources["limits"]
    again = {
        **made,
        "metadata": {
            "name": f"{dialect}-copy",
            "labels": made["metadata"].get("labels", {}),
            "annotations": made["metadata"]["annotations"],
        },
    }
    again["spec"] = body["spec"] | {"containers": made["spec"]["containers"]}
    again["spec"]["containers"][0].pop("volumeMounts", None)
    copied = control_plane.api.post(place, again)
    assert copied["spec"]["containers"][0]["resources"] == resources


def test_the_examples_of_all_systems_are_taken_as_they_are(
    control_plane: Cluster, answering: Running, place: str
) -> None:
    """As each system's own documentation writes them; NVIDIA's whole GPU stays the kubelet's."""
    del answering
    dialects: dict[str, str] = {}
    for path in sorted((installing.ROOT / "examples" / "dialects").glob("*.yaml")):
        for body in yaml.safe_load_all(path.read_text("utf-8")):
            if body["kind"] != "Pod":
                continue
            body["metadata"].pop("namespace", None)
            made = control_plane.api.post(place, body, dryRun="All")
            written = made["metadata"].get("annotations", {})
            dialects[path.stem] = written.get("allotment.dev/dialect", "")
            asks = any(
                GPU in each["resources"].get("limits", {}) for each in made["spec"]["containers"]
            )
            assert asks == (path.stem != "nvidia"), path.name
    assert {name for name, dialect in dialects.items() if not dialect} == {"allotment", "nvidia"}
    print(dialects)  # noqa: T201 - for whoever looks


def test_kubectl_shows_why_a_pod_is_refused(
    control_plane: Cluster, answering: Running, place: str, tmp_path: Path
) -> None:
    del answering
    body = foreign("wrong")
    body["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"] = "0"
    body["spec"]["containers"][0]["resources"]["limits"][MEMORY] = "4"
    path = tmp_path / "pod.json"
    path.write_text(json.dumps(body), "utf-8")
    namespace = place.split("/")[-2]
    with pytest.raises(TestbedError) as caught:
        control_plane.kubectl_run("--namespace", namespace, "apply", "-f", str(path))
    said = str(caught.value)
    print(said)  # noqa: T201 - for the guide
    assert 'admission webhook "pods.allotment.dev" denied the request' in said
    assert f"pod {namespace}/wrong, container 'main': {MEMORY} is 4 bytes, less than 1Mi" in said
    assert "hint: ask for at least 1Mi of each GPU" in said


def test_a_privileged_share_and_two_dialects_are_refused(
    control_plane: Cluster, answering: Running, place: str
) -> None:
    del answering
    body = foreign("privileged")
    body["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    assert "it is privileged" in refused(control_plane.api, place, body)
    mixed = foreign("mixed")
    mixed["spec"]["containers"][0]["resources"]["limits"] |= {"tencent.com/vcuda-core": "50"}
    assert "in two ways" in refused(control_plane.api, place, mixed)


def test_quota_is_held_in_any_syntax(
    control_plane: Cluster, answering: Running, place: str
) -> None:
    namespace = place.split("/")[-2]
    hard = {"limits.nvidia.com/gpumem": "3072", "requests.allotment.dev/gpu": "1"}
    quota = {"metadata": {"name": "gpus"}, "spec": {"hard": hard}}
    control_plane.api.post(place.replace("/pods", "/resourcequotas"), quota)
    wait_until(
        lambda: any(each.namespace == namespace for each in answering.quotas.all()),
        "quota",
        timeout_s=30,
    )
    said = refused(control_plane.api, place, foreign("large"))
    assert "need 4Gi of GPU memory, have 3Gi of 3Gi" in said
    assert f"limits.nvidia.com/gpumem of ResourceQuota {namespace}/gpus" in said
    small = pod("small", container(["true"], limits={GPU: "1", MEMORY: "2Gi"}))
    wait_until(
        lambda: (
            control_plane.api.items(place.replace("/pods", "/resourcequotas"))[0]
            .get("status", {})
            .get("used")
        ),
        "Kubernetes' own count",
        timeout_s=30,
    )
    control_plane.api.post(place, small)
    # Kubernetes counts what was translated, too.
    foreign_small = foreign("second")
    foreign_small["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"] = "1"
    said = refused(control_plane.api, place, foreign_small)
    assert "exceeded quota: gpus" in said
    assert "requests.allotment.dev/gpu=1" in said


# ---- in nobody's way, and closed -----------------------------------------------------------------


def test_pods_without_parts_of_gpus_are_not_asked_about(control_plane: Cluster, place: str) -> None:
    """There is no webhook at all here: whoever had to ask it would be refused."""
    with closed(control_plane):
        for body in (
            plain("cpu", cpu="1"),
            plain("whole", **{"nvidia.com/gpu": "1"}),
            pod("note", container(["true"]), annotations={"example.com/gpu-fraction": "1"}),
        ):
            made = control_plane.api.post(place, body)
            assert made["spec"]["schedulerName"] == "default-scheduler"


def test_while_the_webhook_is_away_pods_with_shares_wait_to_be_created(
    control_plane: Cluster, place: str
) -> None:
    with closed(control_plane):
        for dialect, (body, _) in WRITTEN.items():
            said = refused(control_plane.api, place, body)
            assert 'failed calling webhook "pods.allotment.dev"' in said, dialect
        native = pod("native", container(["true"], limits={GPU: "1", MEMORY: "2Gi"}))
        assert "failed calling webhook" in refused(control_plane.api, place, native)
        opted = foreign("opted")
        opted["metadata"]["labels"] = {"allotment.dev/webhook": "ignore"}
        made = control_plane.api.post(place, opted)
        assert "annotations" not in made["metadata"]
        # A namespace that opts out.
        namespace = place.removesuffix("/pods")
        control_plane.api.patch(namespace, {"metadata": {"labels": {"hami.io/webhook": "ignore"}}})
        wait_until(
            lambda: was_created(control_plane.api, place), "the namespace's label", timeout_s=30
        )


def test_a_label_leaves_no_share_of_ours_to_itself(
    control_plane: Cluster, answering: Running, place: str
) -> None:
    """On a pod it has no say in our own words; on a namespace nobody asks in them."""
    del answering
    label = {"allotment.dev/webhook": "ignore"}
    privileged = pod("privileged", container(["true"], limits={GPU: "1"}), labels=label)
    privileged["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    assert "it is privileged" in refused(control_plane.api, place, privileged)
    body = pod("small", container(["true"], limits={MEMORY: "2Gi"}), labels=label)
    made = control_plane.api.post(place, body)
    assert made["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    opted = foreign("opted")
    opted["metadata"]["labels"] = label
    assert "annotations" not in control_plane.api.post(place, opted)["metadata"]
    namespace = place.removesuffix("/pods")
    for key in ("allotment.dev/webhook", "hami.io/webhook"):
        control_plane.api.patch(namespace, {"metadata": {"labels": {key: "ignore"}}})
        wait_until(
            lambda: "are left alone by" in tried(control_plane.api, place, privileged),
            "the namespace's label",
            timeout_s=30,
        )
        control_plane.api.post(place, foreign(f"by-{key.partition('.')[0]}"))
        control_plane.api.patch(namespace, {"metadata": {"labels": {key: None}}})
        wait_until(
            lambda: "it is privileged" in tried(control_plane.api, place, privileged),
            "the webhook again",
            timeout_s=30,
        )
    system = "/api/v1/namespaces/kube-system/pods"
    own = plain("own", **{GPU: "1"})
    assert "are left alone by" in refused(control_plane.api, system, own)
    control_plane.api.post(system, plain("cpu", cpu="1"), dryRun="All")


def was_created(api: Admin, place: str) -> bool:
    try:
        api.post(place, foreign("opted-namespace"))
    except ApiError:
        return False
    return True


@contextmanager
def closed(cluster: Cluster) -> Iterator[None]:
    """Lead the API server to where nobody listens."""
    before = cluster.api.get(CONFIGURATION)
    installing.lead(cluster, f"https://{cluster.node.link.outer}:9/webhook/pods")

    def fails() -> bool:
        try:
            cluster.api.post("/api/v1/namespaces/default/pods", foreign("x"), dryRun="All")
        except ApiError as error:
            return "failed calling webhook" in str(error)
        return False

    wait_until(fails, "a webhook that is away", timeout_s=30)
    try:
        yield
    finally:
        there = cluster.api.get(CONFIGURATION)
        # What the certificates' keeper may have written meanwhile stays.
        client = there["webhooks"][0]["clientConfig"]
        for key in ("service", "url"):
            client.pop(key, None)
        client |= {
            key: value
            for key, value in before["webhooks"][0]["clientConfig"].items()
            if key != "caBundle"
        }
        cluster.api.put(CONFIGURATION, there)


def test_without_the_webhook_what_is_not_translated_is_not_created(
    control_plane: Cluster, place: str
) -> None:
    before = control_plane.api.get(CONFIGURATION)
    control_plane.api.delete(CONFIGURATION)
    try:
        wait_until(
            lambda: "was not translated" in tried(control_plane.api, place, foreign("x")),
            "the policy",
            timeout_s=30,
        )
        for dialect, (body, _) in WRITTEN.items():
            said = refused(control_plane.api, place, body)
            assert "was not translated" in said, dialect
            assert "label the pod or its namespace allotment.dev/webhook=ignore" in said
        none = plain("zero", **{"nvidia.com/gpu": "1", "nvidia.com/gpumem": "0"})
        control_plane.api.post(place, none)
        control_plane.api.post(place, plain("whole", **{"nvidia.com/gpu": "1"}))
    finally:
        for key in ("resourceVersion", "uid", "creationTimestamp", "generation", "managedFields"):
            before["metadata"].pop(key, None)
        control_plane.api.post(CONFIGURATION.rpartition("/")[0], before)


def test_what_the_command_prints_holds_the_dialects_as_they_are_configured(
    control_plane: Cluster, place: str, tmp_path: Path
) -> None:
    """One that is not spoken is nobody's business; one with other names is held by these."""
    path = tmp_path / "settings.yaml"
    path.write_text(
        "disabled: [aliyun]\n"
        "hami: {resourceMemoryName: example.com/vmem}\n"
        "webhook: {defaults: {memory: 2Gi}, ignoredNamespaces: [kube-system, webhook-legacy]}\n"
    )
    printed = CliRunner().invoke(command, ["--dialects", str(path), "--print-manifests"])
    assert printed.exit_code == 0, printed.output
    api = control_plane.api
    renamed = plain("renamed", **{"nvidia.com/gpu": "1", "example.com/vmem": "1024"})
    assert 'calling webhook "pods.allotment.dev"' in refused(api, place, foreign("spoken"))
    api.delete(CONFIGURATION)  # it led to where other tests serve
    try:
        installing.apply_text(control_plane, printed.output)
        # Nobody serves it: who is asked about is refused.
        wait_until(
            lambda: "calling webhook" in tried(api, place, renamed), "the condition", timeout_s=30
        )
        wait_until(
            lambda: not tried(api, place, foreign("left")), "the policy's condition", timeout_s=30
        )
        assert api.post(place, foreign("left"))["spec"]["schedulerName"] == "default-scheduler"
        own = plain("own", **{GPU: "1"})
        control_plane.make_namespace("webhook-legacy")
        legacy = "/api/v1/namespaces/webhook-legacy/pods"
        wait_until(lambda: "are left alone by" in tried(api, legacy, own), "the rule", timeout_s=30)
        probe = WRITTEN["kubeshare"][0]
        file = read_file_settings(path)
        with webhook(control_plane, file=file, probe=probe):
            made = api.post(place, renamed)
            assert made["metadata"]["annotations"]["allotment.dev/dialect"] == "hami"
            limits = made["spec"]["containers"][0]["resources"]["limits"]
            assert parse_whole(limits[MEMORY]) == GI
            made = api.post(place, own)
            limits = made["spec"]["containers"][0]["resources"]["limits"]
            assert parse_whole(limits[MEMORY]) == 2 * GI
        api.delete(CONFIGURATION)
        wait_until(
            lambda: "was not translated" in tried(api, place, renamed), "the policy", timeout_s=30
        )
        api.post(place, foreign("left-again"))
    finally:
        with suppress(ApiError):
            api.delete(CONFIGURATION)
        installing.apply(control_plane, without=())


def tried(api: Admin, path: str, body: Document) -> str:
    try:
        api.post(path, body, dryRun="All")
    except ApiError as error:
        return str(error)
    return ""


# ---- who may write what --------------------------------------------------------------------------


def test_the_policies_are_understood(control_plane: Cluster) -> None:
    for document in installing.documents():
        if document["kind"] != "ValidatingAdmissionPolicy":
            continue
        name = document["metadata"]["name"]
        path = f"{ADMISSION}/validatingadmissionpolicies/{name}"
        status = wait_until(
            partial(type_check, control_plane.api, path), f"type check of {name}", timeout_s=30
        )
        assert not status["typeChecking"].get("expressionWarnings"), status


def type_check(api: Admin, path: str) -> Document | None:
    status: Document = api.get(path).get("status", {})
    return status if status.get("observedGeneration") else None


@contextmanager
def as_scheduler(cluster: Cluster) -> Iterator[Admin]:
    """The API as the scheduler's service account."""
    api = Admin(installing.as_account(cluster))
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
        lambda: "is written when a pod is bound" in tried(admin, place, unseen),
        "the policy",
        timeout_s=30,
    )
    admin.post(place, pod("a", container(["true"], limits={GPU: "1", MEMORY: "2Gi"})))
    own = f"{place}/a"
    for path in (own, f"{own}/status"):
        with pytest.raises(ApiError) as caught:
            admin.patch(path, {"metadata": {"annotations": placement}})
        assert "cannot be changed" in str(caught.value)
        assert caught.value.status == 403
    for target in (f"{own}/binding", f"{place.removesuffix('/pods')}/bindings"):
        with pytest.raises(ApiError) as caught:
            admin.post(target, binding("a", placement="{}"))
        assert "by Allotment's scheduler alone" in str(caught.value)
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
            timeout_s=60,
            explain=lambda: path.read_text("utf-8")[-2000:],
        )
        said: list[str] = []

        def is_created() -> bool:
            said[:] = [tried(control_plane.api, place, foreign("probe"))]
            return said == [""]

        wait_until(
            is_created,
            "an answer of the webhook",
            timeout_s=60,
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

        wait_until(told, "event of what is not honoured", timeout_s=30)
        assert "the label kai.scheduler/queue" in told()[0]
        assert "forbidden" not in path.read_text("utf-8").lower()
    finally:
        process.stop()
        control_plane.node.run(["ip", "address", "delete", f"{address}/32", "dev", "lo"])


# ---- certificates --------------------------------------------------------------------------------


def test_certificates_are_renewed_under_load_and_nobody_is_refused(
    control_plane: Cluster, place: str
) -> None:
    """Authorities live 15 s here, certificates 6 s: both change several times while pods come."""
    lives = Lives(
        authority=timedelta(seconds=15),
        server=timedelta(seconds=6),
        overlap=timedelta(seconds=3),
        skew=timedelta(seconds=2),
    )
    secret = f"{SYSTEM}/secrets/allotment-webhook"
    control_plane.api.patch(secret, {"data": None})
    shown: set[bytes] = set()
    authorities: set[str] = set()
    problems: list[str] = []
    until = time.monotonic() + 25

    def create() -> int:
        count = 0
        while time.monotonic() < until:
            try:
                control_plane.api.post(place, foreign(f"pod-{count}"), dryRun="All")
            except ApiError as error:
                problems.append(f"{datetime.now(UTC)}: {error}")
            count += 1
            time.sleep(0.02)
        return count

    with (
        webhook(control_plane, lives=lives) as first,
        webhook(control_plane, lives=lives) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        creating = pool.submit(create)
        while time.monotonic() < until:
            # The API server keeps its connections; here is somebody who makes a new one each time.
            for each in (first, second):
                client = control_plane.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]
                assert each.service.port is not None
                address = control_plane.node.link.outer
                shown.add(handshake(address, each.service.port, client["caBundle"]))
            authorities.add(control_plane.api.get(secret)["data"]["ca.crt"])
            time.sleep(0.05)
        made = creating.result()
    control_plane.api.close()  # also that thread's connection
    assert not problems, problems[:3]
    assert made > 50
    assert len(shown) >= 4
    assert len(authorities) >= 2
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
        timeout_s=20,
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
