# SPDX-License-Identifier: Apache-2.0
"""The webhook on a real API server: what pods become, and what happens where it is not asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import installing
import pytest
import yaml
from click.testing import CliRunner
from installing import CONFIGURATION
from reviewing import (
    COMPUTE,
    GI,
    GPU,
    MEMORY,
    WRITTEN,
    Running,
    control_plane_of,
    foreign,
    plain,
    refused,
    tried,
    webhook,
)
from testbed.api import Api, ApiError
from testbed.cluster import Cluster
from testbed.pods import container, pod
from testbed.waiting import TestbedError, wait_until

from allotment.cli.scheduler import command
from allotment.model.quantities import parse_whole
from allotment.scheduler.settings import read_file_settings

DEFAULT = "/api/v1/namespaces/default/pods"
_NUMBERS = count(1)


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    del testbed_machine
    with control_plane_of(tmp_path_factory.mktemp("webhook")) as made:
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


# ---- translation ---------------------------------------------------------------------------------


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
    """As their documentation writes them; NVIDIA's GPU and Deepomatic's slot stay the kubelet's."""
    del answering
    kubelets = {"deepomatic", "nvidia"}
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
            assert asks == (path.stem not in kubelets), path.name
    assert {name for name, dialect in dialects.items() if not dialect} == {"allotment", *kubelets}
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
    assert "a privileged container cannot" in refused(control_plane.api, place, body)
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
    )
    wait_until(
        lambda: "need 4Gi" in tried(control_plane.api, place, foreign("large")),
        "the webhook's count",
        explain=lambda: tried(control_plane.api, place, foreign("large")),
    )
    said = refused(control_plane.api, place, foreign("large"))
    assert "need 4Gi of GPU memory, have 3Gi of 3Gi" in said
    assert f"limits.nvidia.com/gpumem of ResourceQuota {namespace}/gpus" in said
    small = pod("small", container(["true"], limits={GPU: "1", MEMORY: "2Gi"}))
    wait_until(
        lambda: not tried(control_plane.api, place, small),
        "Kubernetes' own count",
        explain=lambda: tried(control_plane.api, place, small),
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
    close(control_plane)
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
    close(control_plane)
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
    wait_until(lambda: was_created(control_plane.api, place), "the namespace's label")


def test_a_label_leaves_no_share_of_ours_to_itself(
    control_plane: Cluster, answering: Running, place: str
) -> None:
    """On a pod it has no say in our own words; on a namespace nobody asks in them."""
    del answering
    label = {"allotment.dev/webhook": "ignore"}
    privileged = pod("privileged", container(["true"], limits={GPU: "1"}), labels=label)
    privileged["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    assert "a privileged container cannot" in refused(control_plane.api, place, privileged)
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
            lambda: "webhook ignores" in tried(control_plane.api, place, privileged),
            "the namespace's label",
        )
        control_plane.api.post(place, foreign(f"by-{key.partition('.')[0]}"))
        control_plane.api.patch(namespace, {"metadata": {"labels": {key: None}}})
        wait_until(
            lambda: "a privileged container cannot" in tried(control_plane.api, place, privileged),
            "the webhook again",
        )
    system = "/api/v1/namespaces/kube-system/pods"
    own = plain("own", **{GPU: "1"})
    assert "webhook ignores" in refused(control_plane.api, system, own)
    control_plane.api.post(system, plain("cpu", cpu="1"), dryRun="All")


def was_created(api: Api, place: str) -> bool:
    try:
        api.post(place, foreign("opted-namespace"))
    except ApiError:
        return False
    return True


def close(cluster: Cluster) -> None:
    """Leads the API server to where nobody listens, until the next webhook is served."""
    installing.lead(cluster, f"https://{cluster.node.link.outer}:9/webhook/pods")
    wait_until(
        lambda: "failed calling webhook" in tried(cluster.api, DEFAULT, foreign("x")),
        "a webhook that is away",
    )


def test_without_the_webhook_what_is_not_translated_is_not_created(
    control_plane: Cluster, place: str
) -> None:
    before = control_plane.api.get(CONFIGURATION)
    control_plane.api.delete(CONFIGURATION)
    try:
        wait_until(
            lambda: "was not translated" in tried(control_plane.api, place, foreign("x")),
            "the policy",
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
    away = 'calling webhook "pods.allotment.dev"'
    wait_until(lambda: away in tried(api, place, foreign("spoken")), "the condition")
    api.delete(CONFIGURATION)  # it led to where other tests serve
    try:
        installing.apply_text(control_plane, printed.output)
        # Nobody serves it: who is asked about is refused.
        wait_until(lambda: "calling webhook" in tried(api, place, renamed), "the condition")
        wait_until(lambda: not tried(api, place, foreign("left")), "the policy's condition")
        assert api.post(place, foreign("left"))["spec"]["schedulerName"] == "default-scheduler"
        own = plain("own", **{GPU: "1"})
        control_plane.make_namespace("webhook-legacy")
        legacy = "/api/v1/namespaces/webhook-legacy/pods"
        wait_until(lambda: "webhook ignores" in tried(api, legacy, own), "the rule")
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
        wait_until(lambda: "was not translated" in tried(api, place, renamed), "the policy")
        api.post(place, foreign("left-again"))
    finally:
        with suppress(ApiError):
            api.delete(CONFIGURATION)
        installing.apply(control_plane, without=())
