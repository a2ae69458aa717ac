# SPDX-License-Identifier: Apache-2.0
"""The webhook: reviews in, changed pods or refusals out, as the API server would apply them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pod_reviews import (
    ALIYUN,
    COMPUTE,
    GPU,
    MEMORY,
    NAMES,
    Json,
    admitted,
    container,
    limits,
    pod,
    refused,
    response,
    review,
)

from allotment.dialects.foreign.aliyun import AliyunDialect
from allotment.dialects.foreign.base import DIALECT, PASSED_OVER, ForeignDialect
from allotment.dialects.foreign.settings import foreign_dialects
from allotment.dialects.foreign.tencent import TencentDialect
from allotment.dialects.own.placement import PLACEMENT
from allotment.model.clusters import NamespaceQuota
from allotment.scheduler.admission import webhook as webhook_module
from allotment.scheduler.admission.review import MAX_REVIEW_BYTES
from allotment.scheduler.admission.rules import TRANSLATED
from allotment.scheduler.admission.webhook import (
    Defaults,
    PodWebhook,
    WebhookSettings,
    routes,
)
from allotment.scheduler.core.quota import QuotaBook

GI = 1 << 30
DIALECTS: tuple[ForeignDialect, ...] = (AliyunDialect(), TencentDialect())


def webhook(**settings: Any) -> PodWebhook:  # noqa: ANN401 - any setting
    return PodWebhook(DIALECTS, settings=WebhookSettings(**settings))


# ---- translation ---------------------------------------------------------------------------------


def test_a_foreign_pod_is_written_in_our_own_words() -> None:
    before = pod(container(aliyun=4, cpu=1), labels={"app": "train"})
    after = admitted(webhook(scheduler_name="allotment-scheduler"), before)
    # Aliyun's resource goes: the kubelet would ask Aliyun's plugin for it.
    wanted = {"cpu": 1, GPU: "1", MEMORY: str(4 * GI)}
    assert limits(after) == wanted
    assert limits(after, part="requests") == wanted
    assert after["metadata"]["annotations"][DIALECT] == "aliyun"
    assert after["spec"]["schedulerName"] == "allotment-scheduler"
    assert after["metadata"]["labels"] == {"app": "train"}


@pytest.mark.parametrize(
    "resources",
    [
        {"limits": {ALIYUN: 4}},
        {"limits": {ALIYUN: 4}, "requests": None},
        {"limits": {ALIYUN: 4}, "requests": {}},
        {"limits": {ALIYUN: "4"}, "requests": {ALIYUN: "4"}, "claims": [{"name": "x"}]},
    ],
    ids=["limits", "null", "empty", "claims"],
)
@pytest.mark.parametrize("annotations", [None, {}, {"a~b/c": "d"}], ids=["none", "empty", "some"])
def test_a_change_fits_whatever_is_there_already(resources: Json, annotations: Json | None) -> None:
    document = pod(container(resources=resources), annotations=annotations)
    after = admitted(webhook(), document)
    assert limits(after)[MEMORY] == limits(after, part="requests")[MEMORY] == str(4 * GI)
    assert after["metadata"]["annotations"].items() >= (annotations or {}).items()
    assert after["spec"]["containers"][0]["resources"].get("claims") == resources.get("claims")


def test_null_annotations_are_none() -> None:
    document = pod(container(aliyun=1))
    document["metadata"]["annotations"] = None
    assert admitted(webhook(), document)["metadata"]["annotations"][DIALECT] == "aliyun"


def test_each_container_is_changed_where_it_stands() -> None:
    document = pod(container("a", cpu=1), container("b", aliyun=2))
    document["spec"]["initContainers"] = [
        container("first", aliyun=1),
        container("side") | {"restartPolicy": "Always"},
    ]
    after = admitted(webhook(), document)
    assert after["spec"]["initContainers"][0]["resources"]["limits"][MEMORY] == str(GI)
    assert GPU not in limits(after, 0)
    assert limits(after, 1)[MEMORY] == str(2 * GI)


def test_what_is_not_honoured_is_written_on_the_pod() -> None:
    """A warning is read by whoever creates the pod, and of most pods that is a controller."""
    labels = {"kai.scheduler/queue": "team"}
    hook = PodWebhook(foreign_dialects(), settings=WebhookSettings())
    document = pod(container(), annotations={"gpu-fraction": "0.5"}, labels=labels)
    after = admitted(hook, document)
    warning, _ = response(hook, document)["warnings"]
    text = after["metadata"]["annotations"][PASSED_OVER]
    assert warning == f"pod team/train: not honoured: {text}"
    assert "Allotment has no queues" in text
    assert "patch" not in response(hook, after)
    assert (
        PASSED_OVER not in admitted(webhook(), pod(container(aliyun=4)))["metadata"]["annotations"]
    )


def test_asked_again_it_changes_nothing() -> None:
    hook = webhook(scheduler_name="allotment-scheduler")
    once = admitted(hook, pod(container(aliyun=4)))
    assert "patch" not in response(hook, once)
    # Another webhook may have added what concerns nobody here.
    once["metadata"]["annotations"]["mesh.example/injected"] = "yes"
    once["spec"]["containers"].append(container("proxy", cpu=1))
    assert "patch" not in response(hook, once)


def test_the_api_server_writes_amounts_in_another_form() -> None:
    hook = webhook()
    once = admitted(hook, pod(container(aliyun=4)))
    for part in ("limits", "requests"):
        once["spec"]["containers"][0]["resources"][part][MEMORY] = "4Gi"
    assert "patch" not in response(hook, once)


def test_a_translated_pod_that_was_changed_since_is_refused() -> None:
    hook = webhook()
    once = admitted(hook, pod(container(aliyun=4)))
    for part in ("limits", "requests"):
        once["spec"]["containers"][0]["resources"][part][MEMORY] = "8Gi"
    message, code = refused(hook, once)
    assert "pod team/train: it was translated from" in message
    assert "and has changed since; hint: remove" in message
    assert MEMORY in message
    assert code == 422


@pytest.mark.parametrize(
    "written", [{DIALECT: "aliyun"}, {TRANSLATED: "0" * 16}], ids=["dialect", "digest"]
)
def test_a_forged_mark_is_refused(written: Json) -> None:
    message, _ = refused(webhook(), pod(container(aliyun=4), annotations=written))
    assert "which only Allotment's webhook writes" in message


def test_a_pod_that_only_says_that_it_was_translated_is_refused() -> None:
    """Anyone can compute the digest."""
    said = {
        "annotations": {DIALECT: "aliyun"},
        "labels": {},
        "resources": [["main", "regular", {ALIYUN: "4"}]],
    }
    text = json.dumps(said, separators=(",", ":"), sort_keys=True)
    forged = {DIALECT: "aliyun", TRANSLATED: hashlib.sha256(text.encode()).hexdigest()[:16]}
    message, code = refused(webhook(), pod(container(aliyun=4), annotations=forged))
    assert f"was not translated: it asks for {ALIYUN}" in message
    assert code == 422


def test_a_placement_of_another_pod_is_left_out_and_said() -> None:
    placed = pod(container(gpu=1, memory="4Gi"), annotations={PLACEMENT: "{}", "x/y": "z"})
    found = response(webhook(), placed)
    assert "belongs to another pod" in found["warnings"][0]
    assert admitted(webhook(), placed)["metadata"]["annotations"] == {"x/y": "z"}


def test_a_copy_of_a_bound_pod_is_a_pod_of_its_own() -> None:
    hook = webhook()
    bound = admitted(hook, pod(container(aliyun=4)))
    bound["metadata"]["annotations"] |= {PLACEMENT: "{}", "ALIYUN_COM_GPU_MEM_IDX": "0"}
    copied = admitted(hook, bound)
    assert PLACEMENT not in copied["metadata"]["annotations"]
    assert limits(copied) == limits(bound)


def test_a_dry_run_is_a_run() -> None:
    document = pod(container(aliyun=4))
    assert admitted(webhook(), document, dryRun=True) == admitted(webhook(), document)


def test_a_pod_without_a_name_is_known_by_its_beginning() -> None:
    document = pod(container(gpu=1, memory="1"))
    del document["metadata"]["name"]
    document["metadata"]["generateName"] = "train-"
    message, _ = refused(webhook(), document)
    assert message.startswith("pod team/train-, container 'main': allotment.dev/gpu-memory is 1")


# ---- whose scheduler -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "overwrites", "then"),
    [
        ("default-scheduler", False, "ours"),
        ("", False, "ours"),
        ("ours", False, "ours"),
        ("volcano", False, "volcano"),
        ("volcano", True, "ours"),
    ],
)
def test_the_scheduler_is_set_where_it_is_wanted(named: str, overwrites: bool, then: str) -> None:  # noqa: FBT001
    hook = webhook(scheduler_name="ours", overwrites_scheduler=overwrites)
    document = pod(
        container(gpu=1, memory="4Gi", compute=50), schedulerName=named, runtimeClassName="nvidia"
    )
    found = response(hook, document)
    after = admitted(hook, document)
    assert after["spec"]["schedulerName"] == then
    assert after["spec"]["runtimeClassName"] == "nvidia"
    assert ("warnings" in found) == (then == "volcano")


def test_a_pod_that_may_starve_is_warned_of() -> None:
    alone = container(gpu=1, memory="4Gi")
    (warning,) = response(webhook(), pod(alone))["warnings"]
    assert warning == (
        "pod team/train: no compute is asked for (container 'main'): it gets the time that other"
        " pods leave; allotment.dev/gpu-compute guarantees a part"
    )
    several = pod(alone, container("side", gpu=1, memory="1Gi", compute=5), alone | {"name": "x"})
    (warning,) = response(webhook(), several)["warnings"]
    assert "(container 'main' and 1 more)" in warning


@pytest.mark.parametrize(
    ("limits", "annotations"),
    [
        ({"memory": "4Gi", "compute": 5}, {}),
        ({"memory": "4Gi"}, {"allotment.dev/compute": "0:100"}),
        ({"memory": "4Gi"}, {"allotment.dev/mode": "mps"}),
        ({}, {}),
    ],
    ids=["guarantee", "asks-for-what-is-left", "mps", "all-memory"],
)
def test_other_pods_are_not_warned_of(limits: Json, annotations: Json) -> None:
    found = response(webhook(), pod(container(gpu=1, **limits), annotations=annotations))
    assert "warnings" not in found


def test_without_a_share_nobody_is_sent_anywhere() -> None:
    hook = webhook(scheduler_name="ours")
    for document in (pod(container(cpu=1)), pod(container(nvidia=1))):
        assert "patch" not in response(hook, document)


def test_a_pod_with_a_node_is_placed_by_its_agent_and_that_is_said() -> None:
    hook = webhook(scheduler_name="ours")
    found = response(hook, pod(container(aliyun=4), nodeName="n1"))
    assert found["allowed"]
    assert "the agent of node n1 chooses the GPUs" in found["warnings"][0]
    after = admitted(hook, pod(container(aliyun=4), nodeName="n1"))
    assert after["spec"]["schedulerName"] == "default-scheduler"


# ---- defaults ------------------------------------------------------------------------------------


def test_defaults_say_what_was_left_open() -> None:
    defaults = Defaults(memory_bytes=2 * GI, compute_percent=10)
    hook = webhook(defaults=defaults)
    after = admitted(hook, pod(container(gpu=2)))
    assert limits(after) == {GPU: 2, MEMORY: str(4 * GI), COMPUTE: "20"}
    for count in ("2.0", "2e0", "+2", "2000m", "0.002k"):  # 2, once the webhooks have answered
        assert limits(admitted(hook, pod(container(gpu=count))))[MEMORY] == str(4 * GI)
    after = admitted(hook, pod(container(memory="8Gi", compute=50)))
    assert limits(after) == {GPU: "1", MEMORY: "8Gi", COMPUTE: 50}
    said = {"allotment.dev/memory": "50%", "allotment.dev/class": "besteffort"}
    after = admitted(hook, pod(container(gpu=1), annotations=said))
    assert limits(after) == {GPU: 1}
    assert GPU in refused(hook, pod(container(gpu="9" * 5000)))[0]
    slices = {"allotment.dev/mig-profile": "1g.10gb"}  # which says how much of everything
    after = admitted(hook, pod(container(gpu=1), annotations=slices))
    assert limits(after) == {GPU: 1}


def test_without_a_default_a_quantity_alone_is_refused() -> None:
    message, code = refused(webhook(defaults=Defaults(gpus=0)), pod(container(memory="8Gi")))
    assert "without allotment.dev/gpu" in message
    assert "hint: add `allotment.dev/gpu: 1`" in message
    assert code == 422


# ---- refusals ------------------------------------------------------------------------------------


def test_what_cannot_be_meant_is_refused_with_what_where_and_the_next_step() -> None:
    document = pod(container(gpu=1, memory="4Gi"), annotations={"allotment.dev/clas": "batch"})
    message, code = refused(webhook(), document)
    assert message.startswith("pod team/train: the annotation 'allotment.dev/clas' is unknown")
    assert "(did you mean 'allotment.dev/class'?); hint: " in message
    assert "\n" not in message
    assert code == 422


@pytest.mark.parametrize(
    ("ask", "words", "said"),
    [
        ({"gpu": 1}, {"mode": "mig"}, "in mode mig its memory is 100% of a GPU"),
        ({"gpu": 2, "memory": "4Gi"}, {"mode": "mps"}, "in mode mps a share has one GPU"),
        ({"gpu": 1}, {"mig-profile": "10gb"}, "'10gb' is not a MIG profile"),
        ({"aliyun": 4}, {"mode": "soft,mgi"}, "did you mean 'mig'?"),
        ({"aliyun": 4}, {"mode": "mig", "weight": "7"}, "the weight 7 has no effect in mode mig"),
    ],
)
def test_modes_that_cannot_be_meant_are_refused(ask: Json, words: Json, said: str) -> None:
    annotations = {f"allotment.dev/{key}": text for key, text in words.items()}
    message, code = refused(webhook(), pod(container(**ask), annotations=annotations))
    assert said in message
    assert "; hint: " in message
    assert code == 422


def test_a_mode_may_be_said_of_a_foreign_pod() -> None:
    words = {"allotment.dev/mode": "mig,soft"}
    after = admitted(webhook(), pod(container(aliyun=4), annotations=words))
    assert after["metadata"]["annotations"]["allotment.dev/mode"] == "mig,soft"


def test_two_dialects_in_one_pod_are_refused() -> None:
    message, _ = refused(webhook(), pod(container(gpu=1, memory="4Gi", aliyun=4)))
    assert "Allotment's" in message
    assert ALIYUN in message


@pytest.mark.parametrize("ask", [{"gpu": 1}, {"aliyun": 4}], ids=["own", "foreign"])
def test_a_privileged_container_gets_no_share(ask: Json) -> None:
    privileged = container(**ask) | {"securityContext": {"privileged": True}}
    message, code = refused(webhook(), pod(privileged))
    assert "container 'main': a privileged container" in message
    assert "hint: remove `privileged: true`" in message
    assert code == 403
    assert response(webhook(may_be_privileged=True), pod(privileged))["allowed"]
    beside = container("side") | {"securityContext": {"privileged": True}}
    assert response(webhook(), pod(container(**ask), beside))["allowed"]
    assert response(webhook(), pod(container(nvidia=1) | {"securityContext": {}}))["allowed"]


def test_two_containers_of_one_name_are_refused() -> None:
    message, _ = refused(webhook(), pod(container(aliyun=1), container(aliyun=2)))
    assert "two containers are named 'main'" in message


def test_a_namespace_without_quota_left_is_refused() -> None:
    book = QuotaBook()
    hard = {"limits.aliyun.com/gpu-mem": "8"}
    book.set_quotas([NamespaceQuota(namespace="team", name="gpus", hard=hard)])
    hook = PodWebhook(DIALECTS, quotas=book)
    assert response(hook, pod(container(aliyun=8)))["allowed"]
    message, code = refused(hook, pod(container(aliyun=9)))
    assert "need 9Gi of GPU memory, have 8Gi" in message
    assert "ResourceQuota team/gpus" in message
    assert code == 403
    # In any syntax.
    assert refused(hook, pod(container(gpu=2, memory="9Gi")))[1] == 403
    assert response(hook, pod(container(aliyun=9)), namespace="another")["allowed"]


@pytest.mark.parametrize("key", ["requests.allotment.dev/gpu-memory", "limits.nvidia.com/gpumem"])
def test_no_pod_goes_around_a_quota_by_naming_its_node(key: str) -> None:
    """Its whole GPU is of unknown size, and no scheduler learns it when it binds the pod."""
    book = QuotaBook()
    book.set_quotas([NamespaceQuota(namespace="team", name="gpus", hard={key: "8Gi"})])
    hook = PodWebhook(DIALECTS, quotas=book)
    document = pod(container(gpu=1), nodeName="n1")
    message, code = refused(hook, document)
    assert ("spec.nodeName is set" in message, code) == (True, 403)
    assert "kubernetes.io/hostname: n1" in message
    assert response(hook, pod(container(gpu=1)))["allowed"]
    assert response(hook, document, namespace="another")["allowed"]


def test_no_pod_goes_around_a_quota_by_naming_another_scheduler() -> None:
    """What it gets is known when ours binds it."""
    book = QuotaBook()
    key = "requests.allotment.dev/gpu-memory"
    book.set_quotas([NamespaceQuota(namespace="team", name="gpus", hard={key: "8Gi"})])
    ours = WebhookSettings(scheduler_name="allotment-scheduler")
    hook = PodWebhook(DIALECTS, quotas=book, settings=ours)
    part = container(gpu=1, memory="1Gi")
    for document in (
        pod(container(gpu=1)),
        pod(container(gpu=1), annotations={"allotment.dev/memory": "50%"}),
        pod(part, annotations={"allotment.dev/mode": "mig"}),  # a slice is larger
        pod(part, annotations={"allotment.dev/mode": "soft,exclusive"}),
    ):
        document["spec"]["schedulerName"] = "volcano"
        message, code = refused(hook, document)
        assert ("schedulerName is volcano" in message, code) == (True, 403)
        assert response(hook, document, namespace="another")["allowed"]
        document["spec"]["schedulerName"] = "default-scheduler"
        assert response(hook, document)["allowed"]
    assert response(hook, pod(part, schedulerName="volcano"))["allowed"]


# ---- not ours ------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["allotment.dev/webhook", "hami.io/webhook"])
def test_a_pod_that_opts_out_stays_as_it_is(label: str) -> None:
    document = pod(container(aliyun="x"), labels={label: "ignore"})
    assert "patch" not in response(webhook(), document)
    assert refused(webhook(), pod(container(aliyun="x"), labels={label: "no"}))


def test_ignored_namespaces_stay_as_they_are() -> None:
    assert "patch" not in response(webhook(), pod(container(aliyun=4)), namespace="kube-system")


@pytest.mark.parametrize("label", ["allotment.dev/webhook", "hami.io/webhook"])
@pytest.mark.parametrize("place", ["team", "kube-system"])
def test_whoever_asks_in_our_own_words_does_not_opt_out_of_the_rules(
    label: str, place: str
) -> None:
    """The label leaves a pod to another system; a share of ours is ours, and no other's."""
    labels = {label: "ignore"}
    privileged = container(gpu=1, memory="8Gi") | {"securityContext": {"privileged": True}}
    message, code = refused(webhook(), pod(privileged, labels=labels), namespace=place)
    assert ("a privileged container cannot" in message, code) == (True, 403)
    first = pod(container("other", cpu=1), labels=labels, initContainers=[privileged])
    assert "a privileged container cannot" in refused(webhook(), first, namespace=place)[0]
    book = QuotaBook()
    hard = {"limits.allotment.dev/gpu-memory": "8Gi"}
    book.set_quotas([NamespaceQuota(namespace=place, name="gpus", hard=hard)])
    settings = WebhookSettings(scheduler_name="ours")
    hook = PodWebhook(DIALECTS, settings=settings, quotas=book)
    large = pod(container(gpu=1, memory="9Gi"), labels=labels)
    assert "need 9Gi of GPU memory" in refused(hook, large, namespace=place)[0]
    small = pod(container(memory="8Gi"), labels=labels)
    after = admitted(hook, small, namespace=place)
    assert limits(after)[GPU] == "1"
    assert after["spec"]["schedulerName"] == "ours"


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": "UPDATE"},
        {"operation": "DELETE", "object": None},
        {"resource": {"group": "", "version": "v1", "resource": "configmaps"}},
        {"resource": {"group": "x", "version": "v1", "resource": "pods"}},
        {"subResource": "ephemeralcontainers"},
    ],
    ids=["update", "delete", "configmaps", "group", "part"],
)
def test_what_is_no_new_pod_passes_untouched(fields: Mapping[str, object]) -> None:
    found = response(webhook(), pod(container(aliyun="x")), **fields)
    assert found == {"uid": "review-1", "allowed": True}


# ---- what may come -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not an AdmissionReview"),
        (b"\xff\xfe", "not an AdmissionReview"),
        (b"[" * 200_000, "not an AdmissionReview"),
        (b"[]", "Expected `object`"),
        (b"{}", "not AdmissionReview of admission.k8s.io/v1"),
        (json.dumps(review({}) | {"apiVersion": "admission.k8s.io/v1beta1"}).encode(), "v1beta1"),
        (b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}', "no request"),
        (b" " * (MAX_REVIEW_BYTES + 1), "more than the limit of 4194304"),
    ],
    ids=["empty", "bytes", "deep", "list", "object", "beta", "request", "huge"],
)
def test_what_is_no_review_is_a_bad_request_with_the_reason(body: bytes, says: str) -> None:
    reply = webhook().mutate(body)
    assert reply.status == 400
    assert reply.content_type.startswith("text/plain")
    assert says in reply.body.decode()
    assert "; hint: " in reply.body.decode()


@pytest.mark.parametrize(
    "document",
    [None, [], {"spec": []}, {"spec": {"containers": [{"name": 1}]}}, {"metadata": {"labels": []}}],
    ids=["null", "list", "spec", "name", "labels"],
)
def test_what_is_no_pod_is_refused_in_the_review(document: object) -> None:
    found = response(webhook(), document)
    assert not found["allowed"]
    assert "is not a pod" in found["status"]["message"]


def many(number: int) -> list[Json]:
    limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10}
    return [container(f"c{each}", resources={"limits": limits}) for each in range(number)]


LONG = ",".join(f"A{each}" for each in range(30_000))


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (pod(*many(8000)), "it has 8000 containers, more than the 200"),
        (
            {"spec": {"initContainers": many(150), "containers": many(51)}},
            "it has 201 containers, more than the 200",
        ),
        (
            pod(container(resources={"limits": {f"nvidia.com/x{each}": 1 for each in range(65)}})),
            "container 'main': it asks for more than 64 resources",
        ),
        (pod(container(), annotations={"x": "a" * 262_144}), "more than 262144 characters"),
        (
            pod(*many(200), annotations={"nvidia.com/use-gputype": LONG}),
            "too long for its 200 containers",
        ),
    ],
    ids=["containers", "init", "resources", "annotations", "product"],
)
def test_what_would_take_long_is_refused_before_it_is_translated(
    document: Json, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = PodWebhook(foreign_dialects())
    monkeypatch.setattr(webhook_module, "translate", pytest.fail)
    found = response(hook, document)
    assert says in found["status"]["message"]
    assert "; hint: " in found["status"]["message"]


TEXTS = st.text(max_size=12)
AMOUNTS = st.one_of(
    TEXTS,
    st.integers(-5, 1 << 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["1", "4Gi", "1e3", "100", "0"]),
)
RESOURCES = st.sampled_from([*NAMES.values(), "tencent.com/vcuda-core", "tencent.com/vcuda-memory"])
KEYS = st.sampled_from(
    [DIALECT, TRANSLATED, PLACEMENT, "allotment.dev/compute", "allotment.dev/memory", "a/b~c"]
)


@given(
    named=st.dictionaries(RESOURCES, AMOUNTS, max_size=4),
    annotations=st.one_of(st.none(), st.dictionaries(KEYS, TEXTS, max_size=3)),
    name=TEXTS,
    privileged=st.booleans(),
)
@example(named={ALIYUN: 4}, annotations={}, name="\ud7ff~/", privileged=False)
def test_any_pod_is_admitted_or_refused_and_what_is_admitted_is_admitted_again(
    named: Json, annotations: Json | None, name: str, *, privileged: bool
) -> None:
    document = pod(
        container(name, resources={"limits": named, "requests": dict(named)})
        | {"securityContext": {"privileged": privileged}},
        annotations=annotations,
    )
    hook = webhook(scheduler_name="ours")
    found = response(hook, document)
    if found["allowed"]:
        once = admitted(hook, document)
        assert "patch" not in response(hook, once)
    else:
        assert found["status"]["message"].strip()


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_body_gets_an_answer(body: bytes) -> None:
    assert webhook().mutate(body).status == 400


@pytest.mark.parametrize("path", ["/webhook/pods", "/webhook/claims"])
def test_each_path_answers_anything(path: str) -> None:
    served = routes(webhook())
    assert len(served) == 2
    assert served[path](b"").status == 400


def test_a_static_pod_is_as_its_node_says_and_nobody_else_may_say_so() -> None:
    document = pod(container(aliyun=4), annotations={"kubernetes.io/config.mirror": "x"})
    node = {"username": "system:node:n1", "groups": ["system:nodes"]}
    assert "patch" not in response(webhook(), document, userInfo=node)
    assert "patch" in response(webhook(), document)
