# SPDX-License-Identifier: Apache-2.0
"""Which pods the API server asks about: all that any dialect knows, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.foreign import ForeignContainer, ForeignPod
from allotment.dialects.hami import HamiDialect
from allotment.dialects.hami_settings import HamiSettings
from allotment.dialects.nvidia_foreign import NvidiaForeign, NvidiaSettings
from allotment.dialects.systems import foreign_dialects
from allotment.scheduler.admission_keys import Keys, all_keys, keys_of, matcher
from allotment.scheduler.admission_pods import read_pod
from allotment.scheduler.admission_rules import (
    BINDING_RULE,
    CONDITION,
    PLACEMENT_RULES,
    TRANSLATED_RULE,
    VARIABLES,
    untranslated_condition,
    webhook_condition,
)

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
        stays = isinstance(dialect, NvidiaForeign) and dialect.stays(subject)
        if dialect.recognises(subject) and not stays:
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
        found = asking.resources | asking.annotations | asking.labels
        assert bool(found) == (dialect.name != "nvidia"), dialect.name


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
            stays = [isinstance(each, NvidiaForeign) and each.stays(subject) for each in DIALECTS]
            known = [
                each.name
                for each, is_left in zip(DIALECTS, stays, strict=True)
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


@pytest.fixture(scope="module")
def documents(root: Path) -> dict[tuple[str, str], Any]:
    text = (root / "deploy" / "manifests" / "scheduler.yaml").read_text("utf-8")
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}
    assert len(found) == text.count("\n---\n") + 1
    return found


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_manifest_asks_by_the_same_keys(documents: dict[tuple[str, str], Any]) -> None:
    """A difference? Write what stands on the right of the comparison into the manifest."""
    webhooks = documents["MutatingWebhookConfiguration", "allotment-scheduler"]["webhooks"]
    (condition,) = webhooks[0]["matchConditions"]
    assert condition["name"] == CONDITION
    assert one_line(condition["expression"]) == webhook_condition(ALL)
    policy = documents["ValidatingAdmissionPolicy", "allotment-translated"]["spec"]
    conditions = {each["name"]: each["expression"] for each in policy["matchConditions"]}
    assert one_line(conditions[CONDITION]) == untranslated_condition(ALL)
    (rule,) = policy["validations"]
    assert one_line(rule["expression"]) == TRANSLATED_RULE


def test_the_manifest_holds_placements_by_the_same_rules(
    documents: dict[tuple[str, str], Any],
) -> None:
    policy = documents["ValidatingAdmissionPolicy", "allotment-placements"]["spec"]
    found = [one_line(each["expression"]) for each in policy["validations"]]
    assert found == list(PLACEMENT_RULES)
    variables = {each["name"]: one_line(each["expression"]) for each in policy["variables"]}
    assert variables == VARIABLES
    bindings = documents["ValidatingAdmissionPolicy", "allotment-bindings"]["spec"]
    assert [one_line(each["expression"]) for each in bindings["validations"]] == [BINDING_RULE]


def test_texts_in_expressions_end_where_they_should() -> None:
    keys = Keys(asking_resources=frozenset({"it's", "a\\b"}))
    assert r"r in ['a\\b', 'it\'s']" in webhook_condition(keys)
    assert webhook_condition(Keys()) == "false"
