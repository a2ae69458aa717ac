# SPDX-License-Identifier: Apache-2.0
"""Who may write of a pod which GPUs another system has given it, on a real API server.

The records are written by hand, as these systems' sources write them: none of them runs here. Their
schedulers stand for all by what their charts let them do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import installing
import pytest
from testbed.api import Api, ApiError, Json
from testbed.cluster import Cluster
from testbed.pods import container, pod
from testbed.waiting import wait_until

RECORD = "hami.io/vgpu-devices-allocated"
TEAM = "/api/v1/namespaces/team/pods"
ASKS = "nvidia.com/container.main.gpu-memory.limit"
GIVEN = {
    "hami": {RECORD: "GPU-a,NVIDIA,81920,100:;", "hami.io/vgpu-node": "n1"},
    "volcano": {"volcano.sh/vgpu-ids-new": "GPU-a,NVIDIA,81920,100:"},
    "volcano-gpushare": {"volcano.sh/gpu-index": "0"},
    "aliyun": {"scheduler.framework.gpushare.allocation": '{"0":{"0":80}}'},
    "gpushare": {"ALIYUN_COM_GPU_MEM_IDX": "0"},
    "tencent": {"tencent.com/predicate-gpu-idx-0": "0"},
    "elastic-gpu": {"elasticgpu.io/container-main": "0"},
    "kai": {"nvidia.com/container.main.gpus.devices": "GPU-a"},
}


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A control plane with the policies of the manifest, and no webhook: nobody is asked."""
    del testbed_machine
    with Cluster(state=tmp_path_factory.mktemp("receipts"), settings=None) as made:
        made.make_namespace("team")
        made.make_namespace("other-system")
        installing.make_account(made, "tenant", namespace="team")
        # A namespace's owner may do anything in it.
        installing.bind(made, "tenant", namespace="team", role="admin")
        installing.make_account(made, "scheduler", namespace="other-system")
        # HAMi's chart and gpushare's manifest let their schedulers do this, and more.
        rules = [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "update", "patch"]},
            {"apiGroups": [""], "resources": ["pods/binding"], "verbs": ["create"]},
        ]
        installing.make_role(made, "others", rules)
        installing.bind(made, "scheduler", namespace="other-system", role="others", everywhere=True)
        installing.apply(made, only=installing.POLICIES)
        yield made


@pytest.fixture(scope="module")
def tenant(control_plane: Cluster) -> Iterator[Api]:
    api = Api(installing.as_account(control_plane, "tenant", namespace="team"))

    asks = pod("asks-kai", container(["true"]), annotations={"gpu-memory": "2000"})
    asks["spec"]["schedulerName"] = "kai-scheduler"

    def is_held(body: Json, by: str) -> bool:
        try:
            api.post(TEAM, body, dryRun="All")
        except ApiError as error:
            return by in str(error)
        return False

    forged = pod("probe", container(["true"]), annotations={RECORD: "x"})
    wait_until(lambda: is_held(forged, "allotment-records"), "the records' policy in force")
    wait_until(lambda: is_held(asks, "was not translated"), "the dialects' policy in force")
    yield api
    api.close()


@pytest.fixture(scope="module")
def scheduler(control_plane: Cluster) -> Iterator[Api]:
    api = Api(installing.as_account(control_plane, "scheduler", namespace="other-system"))
    yield api
    api.close()


def annotate(api: Api, path: str, annotations: Mapping[str, str | None]) -> None:
    api.patch(path, {"metadata": {"annotations": dict(annotations)}})


def refused(api: Api, path: str, annotations: Mapping[str, str | None]) -> str:
    with pytest.raises(ApiError) as caught:
        annotate(api, path, annotations)
    return str(caught.value)


@pytest.mark.parametrize("system", GIVEN)
def test_a_record_is_a_scheduler_s_to_write_and_nobody_s_to_change(
    control_plane: Cluster, tenant: Api, scheduler: Api, system: str
) -> None:
    del control_plane
    path, record = f"{TEAM}/{system}", GIVEN[system]
    tenant.post(TEAM, pod(system, container(["sleep"]), annotations={"note": "mine"}))
    assert "only a scheduler may change" in refused(tenant, path, record)
    annotate(scheduler, path, record)
    lowered = {key: f"{text}1" for key, text in record.items()}
    assert "only a scheduler may change" in refused(tenant, path, lowered)
    assert "only a scheduler may change" in refused(tenant, path, dict.fromkeys(record))
    # What is nobody's record stays its owner's.
    annotate(tenant, path, {"note": "still mine"})
    tenant.delete(path)


@pytest.mark.parametrize("system", GIVEN)
def test_no_pod_is_created_with_a_record(tenant: Api, system: str) -> None:
    body = pod(f"{system}-forged", container(["sleep"]), annotations=GIVEN[system])
    with pytest.raises(ApiError, match="when it places the pod"):
        tenant.post(TEAM, body)
    # One that was translated has its own placement, and is not read: it may be copied.
    body["metadata"]["annotations"] |= {"allotment.dev/dialect": "hami"}
    tenant.post(TEAM, body, dryRun="All")


def test_who_binds_writes_a_record_on_a_binding_and_on_no_new_pod(
    control_plane: Cluster, tenant: Api, scheduler: Api
) -> None:
    installing.make_role(
        control_plane,
        "creators",
        [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}],
    )
    installing.bind(
        control_plane, "scheduler", namespace="other-system", role="creators", everywhere=True
    )

    def may_create() -> bool:
        try:
            scheduler.post(TEAM, pod("probe", container(["sleep"])), dryRun="All")
        except ApiError:
            return False
        return True

    wait_until(may_create, "right to create pods")
    with pytest.raises(ApiError, match="when it places the pod"):
        scheduler.post(TEAM, pod("own", container(["sleep"]), annotations=GIVEN["hami"]))
    tenant.post(TEAM, pod("waits", container(["sleep"])))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "waits", "annotations": GIVEN["hami"]},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "no-such-node"},
    }
    scheduler.post(f"{TEAM}/waits/binding", binding)
    assert tenant.get(f"{TEAM}/waits")["metadata"]["annotations"] == GIVEN["hami"]
    tenant.delete(f"{TEAM}/waits")


def test_no_controller_writes_a_record_for_a_tenant(control_plane: Cluster, tenant: Api) -> None:
    """The DaemonSet controller may bind pods in every Kubernetes, and creates what it is told."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a-node"}}
    control_plane.api.post("/api/v1/nodes", node)
    template = pod("x", container(["sleep"]), annotations={ASKS: "80Gi", **GIVEN["kai"]})
    labels = {"app": "forged", "allotment.dev/webhook": "ignore"}
    spec = {**template["spec"], "schedulerName": "kai-scheduler", "restartPolicy": "Always"}
    annotations = template["metadata"]["annotations"]
    forged = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "forged"},
        "spec": {
            "selector": {"matchLabels": {"app": "forged"}},
            "template": {
                "metadata": {"labels": labels, "annotations": annotations},
                "spec": spec,
            },
        },
    }
    path = "/apis/apps/v1/namespaces/team/daemonsets"
    tenant.post(path, forged)

    def is_told() -> bool:
        events = control_plane.api.items("/api/v1/namespaces/team/events")
        return any(
            each["reason"] == "FailedCreate" and "allotment-records" in each["message"]
            for each in events
        )

    wait_until(is_told, "the controller is refused")
    assert not tenant.items(TEAM, labelSelector="app=forged")
    tenant.delete(f"{path}/forged")


def test_what_it_asks_for_by_annotations_stays_while_it_has_it(tenant: Api, scheduler: Api) -> None:
    path = f"{TEAM}/asks"
    body = pod("asks", container(["sleep"]))
    body["spec"]["schedulerName"] = "kai-scheduler"
    body["metadata"]["annotations"] = {ASKS: "1Gi"}
    body["metadata"]["labels"] = {"app": "a"}
    body["metadata"]["labels"]["allotment.dev/webhook"] = "ignore"
    tenant.post(TEAM, body)
    annotate(tenant, path, {ASKS: "2Gi"})
    annotate(scheduler, path, GIVEN["kai"])
    assert "cannot change once it has its GPUs" in refused(tenant, path, {ASKS: "1Gi"})
    tenant.patch(path, {"metadata": {"labels": {"app": "b"}}})
    tenant.delete(path)


def test_a_note_of_gpu_memory_is_nobody_s_business(tenant: Api) -> None:
    limits = {"nvidia.com/gpu": 1}
    for name, noted in {
        "sized": {"gpu-memory": "16Gi"},
        "none": {"gpu-memory": "none", "mps": "true"},
    }.items():
        tenant.post(TEAM, pod(name, container(["sleep"], limits=limits), annotations=noted))
        tenant.delete(f"{TEAM}/{name}")
    asks = pod("asks-kai", container(["sleep"]), annotations={"gpu-memory": "2000"})
    asks["spec"]["schedulerName"] = "kai-scheduler"
    with pytest.raises(ApiError, match="was not translated"):
        tenant.post(TEAM, asks)
