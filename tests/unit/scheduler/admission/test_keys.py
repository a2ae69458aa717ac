# SPDX-License-Identifier: Apache-2.0
"""Which pods the API server asks about: all that any dialect knows, and no others."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from foreign_pods import GI, NODE, booking, load_settings
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.foreign.hami import HamiDialect, HamiSettings
from allotment.dialects.foreign.nvidia import NvidiaForeign, NvidiaSettings
from allotment.dialects.foreign.settings import SYSTEMS, DialectSettings, foreign_dialects
from allotment.dialects.foreign.translate import translate
from allotment.model.clusters import PlacedDevice
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.scheduler.admission import claims
from allotment.scheduler.admission.manifests import (
    RECORD_RULES,
    SCHEDULER_RULES,
    Explained,
    Installation,
    admission_objects,
    as_yaml,
    record_condition,
    scheduler_variables,
)
from allotment.scheduler.admission.pod_patch import read_pod
from allotment.scheduler.admission.rules import (
    BINDING_RULE,
    CONDITION,
    OF_SYSTEMS,
    PLACEMENT_RULES,
    TRANSLATED_RULE,
    VARIABLES,
    Keys,
    all_keys,
    keys_of,
    left_alone_rule,
    matcher,
    untranslated_condition,
    webhook_condition,
)

POLICY = "ValidatingAdmissionPolicy"
DIALECTS = foreign_dialects()
ALL = all_keys(DIALECTS)


def pod(**fields: Any) -> ForeignPod:  # noqa: ANN401 - any field
    limits = fields.pop("limits", {})
    container = ForeignContainer(name="c", limits=limits, requests=limits)
    return ForeignPod(namespace="team", name="p", containers=(container,), **fields)


def plain(names: frozenset[str]) -> list[str]:
    return sorted(f"{each[:-1]}x" if each.endswith("*") else each for each in names)


TEXTS = st.sampled_from(["1", "0", "0.5", "true", "4Gi", "x"])
PODS = st.builds(
    lambda limits, annotations, labels, scheduler: pod(
        limits=limits, annotations=annotations, labels=labels, scheduler=scheduler
    ),
    st.dictionaries(
        st.sampled_from([*plain(ALL.resources), "nvidia.com/gpu", "cpu"]), TEXTS, max_size=3
    ),
    st.dictionaries(st.sampled_from([*plain(ALL.annotations), "a/b"]), TEXTS, max_size=3),
    st.dictionaries(st.sampled_from([*plain(ALL.labels), "app"]), TEXTS, max_size=3),
    st.sampled_from(["", "default-scheduler", "hami-scheduler", "volcano"]),
)


@given(PODS)
def test_what_a_dialect_has_to_translate_is_asked_about(subject: ForeignPod) -> None:
    for dialect in DIALECTS:
        kept = isinstance(dialect, NvidiaForeign) and dialect.keeps_resources(subject)
        if dialect.recognises(subject) and not kept:
            assert ALL.match(subject), dialect.name
            assert keys_of(dialect).match(subject), dialect.name


@pytest.mark.parametrize(
    "subject",
    [
        pod(),
        pod(limits={"cpu": "1", "amd.com/gpu": "1", "nvidia.com/gpu": "1"}),
        pod(limits={"nvidia.com/gpu.shared": "1"}),
        pod(annotations={"example.com/gpu-fraction": "1", "kai.scheduler/queue": "a"}),
        pod(labels={"app": "allotment", "allotment.dev/app": "x"}),
        pod(scheduler="volcano"),
    ],
    ids=["empty", "whole", "shared", "annotations", "labels", "scheduler"],
)
def test_who_wants_no_part_of_a_gpu_is_nobody_s_business(subject: ForeignPod) -> None:
    assert not ALL.match(subject)


def test_every_dialect_but_nvidia_s_has_something_that_has_to_be_translated() -> None:
    for dialect in DIALECTS:
        asking = keys_of(dialect).asking
        found = asking.resources | asking.annotations | asking.labels | asking.marked
        assert bool(found) == (dialect.name not in {"deepomatic", "nvidia"}), dialect.name


def test_what_configuration_renames_or_takes_on_is_asked_about() -> None:
    renamed = HamiDialect(HamiSettings(resource_memory_name="example.com/vmem"))
    assert "example.com/vmem" in keys_of(renamed).asking_resources
    assert "nvidia.com/gpu" not in keys_of(renamed).asking_resources
    whole = HamiDialect(HamiSettings(owns_plain_count=True))
    assert "nvidia.com/gpu" in keys_of(whole).asking_resources
    exclusive = NvidiaForeign(NvidiaSettings(whole="share"))
    assert "nvidia.com/gpu" in keys_of(exclusive).asking_resources


def test_the_examples_of_all_systems_are_asked_about(root: Path) -> None:
    """As far as there are examples: each of them that any dialect knows."""
    for path in sorted((root / "examples" / "dialects").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            if document["kind"] != "Pod":
                continue
            subject = read_pod(json.dumps(document).encode(), namespace="team").pod
            kept = [each.keeps_resources(subject) for each in DIALECTS]
            known = [
                each.name
                for each, is_left in zip(DIALECTS, kept, strict=True)
                if each.recognises(subject) and not is_left
            ]
            assert ALL.match(subject) or not known, (path.name, known)


def test_a_star_stands_for_all_that_begin_so() -> None:
    matches = matcher({"a/b*", "c"})
    assert [each for each in ("a/b", "a/bc", "c", "cc", "a/") if matches(each)] == [
        "a/b",
        "a/bc",
        "c",
    ]
    assert not matcher(())("")


def test_keys_add_up() -> None:
    one = Keys(asking_resources=frozenset({"a"}), other_labels=frozenset({"b"}))
    two = Keys(asking_resources=frozenset({"c"}), schedulers=frozenset({"d"}))
    both = one | two
    assert both.resources == {"a", "c"}
    assert both.labels == {"b"}
    assert both.asking == Keys(asking_resources=frozenset({"a", "c"}))


# ---- the manifest --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "generated"),
    [
        ("scheduler.yaml", admission_objects(ALL)),
        (
            "agent.yaml",
            (
                each
                for each in admission_objects(ALL)
                if each.document["metadata"]["name"]
                in {"allotment-placements", "allotment-bindings"}
            ),
        ),
    ],
)
def test_the_manifests_end_with_what_is_generated(
    root: Path, file: str, generated: Iterator[Explained]
) -> None:
    """A difference? Write at their ends what `allot scheduler --print-manifests` prints.

    Into agent.yaml only the policies that it has.
    """
    manifest = (root / "deploy" / "manifests" / file).read_text("utf-8")
    printed = as_yaml(generated)
    begin = printed.splitlines()[0]
    assert manifest.count(begin) == 1
    assert manifest[manifest.index(begin) :] == printed


def objects(keys: Keys, **its: Any) -> dict[tuple[str, str], Any]:  # noqa: ANN401 - any field
    text = as_yaml(admission_objects(keys, Installation(**its)))
    return {
        (each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each
    }


def conditions(policy: Any) -> dict[str, str]:  # noqa: ANN401 - an object
    return {each["name"]: each["expression"] for each in policy["matchConditions"]}


def test_expressions_come_out_of_the_file_as_they_went_in() -> None:
    found = objects(ALL)
    webhook, of_claims = found["MutatingWebhookConfiguration", "allotment-scheduler"]["webhooks"]
    assert conditions(webhook) == {CONDITION: webhook_condition(ALL)}
    assert conditions(of_claims) == {CONDITION: claims.CONDITION}
    policies = {name: each["spec"] for (kind, name), each in found.items() if kind == POLICY}
    translated = policies["allotment-translated"]
    assert conditions(translated)[CONDITION] == untranslated_condition(ALL)
    rules = {
        name: [each["expression"] for each in spec["validations"]]
        for name, spec in policies.items()
    }
    assert rules == {
        "allotment-translated": [TRANSLATED_RULE],
        "allotment-left-alone": [left_alone_rule(["kube-system"])],
        "allotment-placements": list(PLACEMENT_RULES),
        "allotment-bindings": [BINDING_RULE],
        "allotment-scheduler-own-keys": list(SCHEDULER_RULES),
        "allotment-records": list(RECORD_RULES),
    }
    variables = {
        each["name"]: each["expression"] for each in policies["allotment-placements"]["variables"]
    }
    assert variables == VARIABLES
    bound = {each["spec"]["policyName"] for (kind, _), each in found.items() if "Binding" in kind}
    assert bound == set(policies)


def test_no_object_knows_a_dialect_that_is_not_spoken() -> None:
    spoken = foreign_dialects(DialectSettings(disabled=frozenset({"kai", "hami"})))
    text = as_yaml(admission_objects(all_keys(spoken)))
    for key in ("gpu-fraction", "nvidia.com/gpumem", "nvidia.com/container.", "hami-scheduler"):
        assert f"'{key}" not in text, key
        assert f"'{key}" in as_yaml(admission_objects(ALL)), key
    assert "aliyun.com/gpu-mem" in text


def test_all_objects_go_by_the_names_that_are_configured() -> None:
    renamed = foreign_dialects(
        load_settings("hami: {resourceMemoryName: example.com/vmem}\nkai: {prefix: example.com/c.}")
    )
    found = objects(
        all_keys(renamed),
        namespace="gpus",
        service="hook",
        configuration="gpus",
        ignored_namespaces=("kube-system", "legacy"),
    )
    webhook, of_claims = found["MutatingWebhookConfiguration", "gpus"]["webhooks"]
    translated = found[POLICY, "allotment-translated"]["spec"]
    for each in (webhook, translated):
        assert "'example.com/vmem'" in conditions(each)[CONDITION]
        assert "startsWith('example.com/c.')" in conditions(each)[CONDITION]
        assert "nvidia.com/gpumem'" not in conditions(each)[CONDITION]
    for each in (webhook, of_claims):
        service = each["clientConfig"]["service"]
        assert (service["namespace"], service["name"]) == ("gpus", "hook")
    for selector in (
        webhook["namespaceSelector"],
        translated["matchConstraints"]["namespaceSelector"],
    ):
        named = selector["matchExpressions"][0]
        assert named["values"] == ["kube-system", "legacy"]
    (rule,) = found[POLICY, "allotment-left-alone"]["spec"]["validations"]
    assert "request.namespace in ['kube-system', 'legacy']" in rule["expression"]
    for name in (
        "allotment-placements",
        "allotment-bindings",
        "allotment-scheduler-own-keys",
    ):
        (other,) = found[POLICY, name]["spec"]["matchConditions"]
        assert "'system:serviceaccount:gpus:allotment-scheduler'" in other["expression"]


def test_what_is_read_of_running_pods_is_what_is_held() -> None:
    is_record = matcher(ALL.records)
    assert is_record("nvidia.com/container.train.gpus.devices")
    assert is_record("tencent.com/predicate-gpu-idx-0")
    assert not is_record("hami.io/vgpu-time")
    assert "k.endsWith('.gpus.devices')" in record_condition(ALL)
    for dialect in DIALECTS:
        assert bool(keys_of(dialect).records) == (dialect.name in SYSTEMS), dialect.name


def test_the_scheduler_may_write_what_each_system_s_tools_read(root: Path) -> None:
    """The API server refuses a Binding with any other annotation: its pod would wait for ever."""
    written = set()
    for path in sorted((root / "examples" / "dialects").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            subject = read_pod(json.dumps(document).encode(), namespace="team").pod
            if document["kind"] != "Pod":
                continue
            parts = {each.name: [PlacedDevice("GPU-a", GI, 3000)] for each in subject.containers}
            for dialect in DIALECTS:
                if not dialect.recognises(subject) or dialect.keeps_resources(subject):
                    continue
                result = dialect.result_annotations(subject, booking(**parts), NODE, now=1.5)
                unknown = [key for key in result if not matcher(dialect.result_keys)(key)]
                assert not unknown, (dialect.name, unknown)
                written |= {dialect.name} if result else set()
    assert written == {dialect.name for dialect in DIALECTS if dialect.result_keys}
    for key in ALL.result_keys:
        assert f"'{key.strip('*')}'" in scheduler_variables(ALL)["foreign"], key


@pytest.mark.parametrize(
    ("key", "is_kept"),
    [
        ("allotment.dev/class", True),
        ("webhook.allotment.dev/translated", True),
        ("kubernetes.io/config.mirror", True),
        ("container.apparmor.security.beta.kubernetes.io/train", True),
        ("cdi.k8s.io/gpu", True),
        ("k8s.v1.cni.cncf.io/networks", True),
        ("v1.multus-cni.io/default-network", True),
        ("seccomp-profile.kubernetes.cri-o.io/POD", True),
        ("cpu-quota.crio.io", True),
        ("cpu-quota.crio.io/train", True),
        ("io.kubernetes.cri-o.Devices", True),
        ("io.katacontainers.config.hypervisor.kernel_params", True),
        ("dev.gvisor.flag.network", True),
        ("run.oci.keep_original_groups", True),
        ("krun.cpus", True),
        ("org.systemd.property.DeviceAllow", True),
        ("org.criu.config", True),
        ("devices.noderesource.dev/container.train", True),
        ("ulimits.nri.containerd.io/container.train", True),
        ("target.workload.openshift.io/management", True),
        ("iam.amazonaws.com/role", True),
        ("vpc.amazonaws.com/pod-eni", True),
        ("networking.gke.io/interfaces", True),
        ("kubernetes.azure.com/security-group", True),
        ("k8s.aliyun.com/eci-ram-role-name", True),
        ("network.alibabacloud.com/pod-networks", True),
        ("spiffe.io/spiffe-id", True),
        ("traffic.sidecar.istio.io/excludeOutboundPorts", True),
        ("config.linkerd.io/skip-outbound-ports", True),
        ("egress.antrea.io/ips", True),
        ("ipam.spidernet.io/ippool", True),
        ("pre.hook.backup.velero.io/command", True),
        ("k8up.io/backupcommand", True),
        ("developers.example.com/gvisor", False),
        ("ratio.zone", False),
        ("example.com/zone", False),
        ("zone", False),
        ("policies.kyverno.io/last-applied-patches", False),
        ("notkubernetes.io/a", False),
        ("example.com/a.k8s.io/b", False),
    ],
)
def test_other_webhooks_may_annotate_a_binding_unless_the_key_gives_a_pod_more(
    key: str, *, is_kept: bool
) -> None:
    (pattern,) = re.findall(r"k\.matches\('(.*)'\)", OF_SYSTEMS)
    assert bool(re.search(pattern, key)) == is_kept


def test_a_refusal_of_keys_names_them() -> None:
    spec = objects(ALL)[POLICY, "allotment-scheduler-own-keys"]["spec"]
    for variable, validation in zip(("foreign", "labels"), spec["validations"], strict=False):
        text, _, keys = validation["messageExpression"].rpartition(" + ")
        assert ast.literal_eval(text) == f"{validation['message']}: "
        assert keys == f"variables.{variable}.join(', ')"


@pytest.mark.parametrize(
    ("kind", "operation", "annotations", "is_let"),
    [
        # A DaemonSet's author writes what its controller creates, and that one binds, too.
        ("Pod", "CREATE", {}, False),
        ("Pod", "CREATE", {"allotment.dev/dialect": "kai"}, True),
        ("Binding", "CREATE", {}, True),
        ("Pod", "UPDATE", {}, True),
    ],
)
def test_who_binds_may_write_a_record_when_it_binds_and_not_when_it_creates(
    kind: str, operation: str, annotations: dict[str, str], *, is_let: bool
) -> None:
    assert is_said_of(RECORD_RULES[0], kind, operation, annotations, is_scheduler=True) == is_let


@pytest.mark.parametrize(
    ("kind", "operation"), [("Pod", "CREATE"), ("Binding", "CREATE")], ids=["pod", "binding"]
)
def test_nobody_else_writes_a_record(kind: str, operation: str) -> None:
    assert not is_said_of(RECORD_RULES[0], kind, operation, {}, is_scheduler=False)


def is_said_of(
    rule: str, kind: str, operation: str, annotations: dict[str, str], *, is_scheduler: bool
) -> bool:
    """Look at a rule of nothing but comparisons: those are Python's, too."""
    its = {
        "request": SimpleNamespace(operation=operation, kind=SimpleNamespace(kind=kind)),
        "variables": SimpleNamespace(annotations=annotations, isScheduler=is_scheduler),
    }
    return bool(eval(rule.replace("||", "or").replace("&&", "and"), its))  # noqa: S307 - our own


@pytest.mark.parametrize(
    ("subject", "is_asked"),
    [
        (pod(annotations={"gpu-memory": "16Gi"}), False),
        (pod(annotations={"gpu-memory": "16Gi"}, limits={"nvidia.com/gpu": "1"}), False),
        (pod(annotations={"mps": "true", "nvidia.com/container.c.note": "x"}), False),
        (pod(labels={"kai.scheduler/queue": "team"}), False),
        (pod(scheduler="kai-scheduler"), False),
        (pod(scheduler="kai-scheduler", annotations={"gpu-memory": "2000"}), True),
        (pod(labels={"kai.scheduler/queue": "t"}, annotations={"gpu-fraction": "0.5"}), True),
    ],
)
def test_words_that_anybody_may_use_are_kai_s_on_its_pods(
    subject: ForeignPod, *, is_asked: bool
) -> None:
    assert ALL.match(subject) == is_asked
    assert (translate(subject, DIALECTS) is not None) == is_asked


def test_whose_pods_are_kai_s_can_be_set() -> None:
    settings = load_settings("kai: {schedulerNames: [batch], queueLabels: [example.com/queue]}")
    keys = all_keys(foreign_dialects(settings))
    words = {"gpu-fraction": "0.5"}
    assert keys.match(pod(scheduler="batch", annotations=words))
    assert keys.match(pod(labels={"example.com/queue": "a"}, annotations=words))
    assert not keys.match(pod(scheduler="kai-scheduler", annotations=words))
    for text in (webhook_condition(keys), untranslated_condition(keys)):
        assert "in ['batch']" in text
        assert "k in ['example.com/queue']" in text


def test_texts_in_expressions_end_where_they_should() -> None:
    keys = Keys(asking_resources=frozenset({"it's", "a\\b"}))
    assert r"r in ['a\\b', 'it\'s']" in webhook_condition(keys)
    assert untranslated_condition(Keys()) == "false"
    created, _, changed = webhook_condition(Keys()).rpartition(") : ")
    assert created.endswith("&& (false)")
    new, _, old = changed.partition(" != ")
    assert new == "object.metadata.?annotations.orValue({})[?'allotment.dev/resize']"
    assert old == new.replace("object", "oldObject")  # a removal counts too


def test_mig_resources_ask_by_themselves_where_they_are_translated() -> None:
    left = keys_of(NvidiaForeign())
    assert left.other_resources == {"nvidia.com/mig-*"}
    assert not left.asking_resources
    cut = keys_of(NvidiaForeign(NvidiaSettings(mig="slices")))
    assert cut.asking_resources == {"nvidia.com/mig-*"}
