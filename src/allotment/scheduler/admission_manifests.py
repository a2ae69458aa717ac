# SPDX-License-Identifier: Apache-2.0
"""The admission objects of a cluster: the webhook's configuration, and the policies.

They say by which keys a pod is asked about, and these are the dialects': as they are configured,
and without those that are not spoken. A policy that knew other keys than the webhook would refuse
for ever what the webhook passes over. So they are written here, for whatever is configured;
`deploy/manifests/scheduler.yaml` ends with what this gives where nothing is.
"""

import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from allotment.scheduler.admission_keys import Keys
from allotment.scheduler.admission_records import (
    RECORD_RESOURCES,
    RECORD_RULES,
    record_condition,
    record_variables,
)
from allotment.scheduler.admission_rules import (
    BINDING_RULE,
    CONDITION,
    IGNORE,
    IGNORE_LABELS,
    OPTED_OUT,
    OWN_CONDITION,
    PLACEMENT_RULES,
    TRANSLATED_RULE,
    VARIABLES,
    left_alone_rule,
    untranslated_condition,
    webhook_condition,
)

__all__ = ["Explained", "Installation", "admission_objects", "as_yaml"]

Document = dict[str, Any]

_GROUP: Final = "admissionregistration.k8s.io/v1"
_LABELS: Final = {
    "app.kubernetes.io/name": "allotment",
    "app.kubernetes.io/component": "scheduler",
}
_ACCOUNT: Final = "allotment-scheduler"
_WIDTH: Final = 100
_FOLD: Final = 76
"""A line is ended with the first word that reaches beyond it."""
_LONG: Final = 72
"""Longer texts are folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Where the scheduler is installed, and what of the cluster it leaves alone."""

    namespace: str = "allotment-system"
    service: str = "allotment-webhook"
    path: str = "/webhook/pods"
    configuration: str = "allotment-scheduler"
    """The MutatingWebhookConfiguration's name."""
    ignored_namespaces: Collection[str] = ("kube-system",)
    """Besides those with a label that says so."""


@dataclass(frozen=True, slots=True)
class Explained:
    """An object, and why it is there."""

    why: str
    document: Document


def admission_objects(keys: Keys, installed: Installation | None = None) -> Iterator[Explained]:
    """Yield the webhook's configuration and the policies for the dialects with these keys."""
    its = installed or Installation()
    yield Explained(
        "Translates pods when they are created. The scheduler writes caBundle, and the condition"
        " for the dialects that it is configured for. Fails closed: while no replica runs, a pod"
        " with a key of the condition is not created, and every other pod is.",
        _configuration(keys, its),
    )
    for policy in _policies(keys, its):
        name: str = policy["metadata"]["name"]
        yield Explained(_WHY[name], policy)
        spec = {"policyName": name, "validationActions": ["Deny"]}
        yield Explained("", _object("ValidatingAdmissionPolicyBinding", name, {"spec": spec}))


def as_yaml(objects: Iterator[Explained]) -> str:
    """Write objects as a file for `kubectl apply`, each with its reason above it."""
    written = []
    for each in objects:
        reason = textwrap.wrap(each.why, _WIDTH - 2)
        body = yaml.dump(each.document, Dumper=_Dumper, width=_FOLD, sort_keys=False)
        written.append("".join(f"# {line}\n" for line in reason) + body)
    return "---\n".join(written)


class _Dumper(yaml.SafeDumper):
    """Writes as people write manifests: long texts folded, lists of words on one line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT001, FBT002 - PyYAML's
        """Indent a list below its key."""
        del indentless
        super().increase_indent(flow, indentless=False)

    def text(self, value: str) -> yaml.ScalarNode:
        """Represent a text."""
        style = ">" if len(value) > _LONG or "'" in value else None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    def items(self, value: list[object]) -> yaml.SequenceNode:
        """Represent a list."""
        is_words = all(isinstance(each, str) for each in value)
        return self.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=is_words)


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(list, _Dumper.items)


# ---- the webhook ---------------------------------------------------------------------------------


def _configuration(keys: Keys, its: Installation) -> Document:
    service = {
        "namespace": its.namespace,
        "name": its.service,
        "path": its.path,
        "port": 443,
    }
    webhook = {
        "name": "pods.allotment.dev",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"service": service},
        "rules": [_rule("CREATE")],
        "failurePolicy": "Fail",
        "matchPolicy": "Equivalent",
        "reinvocationPolicy": "IfNeeded",
        "sideEffects": "None",
        "timeoutSeconds": 5,
        "namespaceSelector": _looked_at(its),
        "matchConditions": [_condition(CONDITION, webhook_condition(keys))],
    }
    return _object("MutatingWebhookConfiguration", its.configuration, {"webhooks": [webhook]})


def _looked_at(its: Installation) -> Document:
    """Return the selector of the namespaces that are not left alone."""
    named = sorted(its.ignored_namespaces)
    expressions = [
        *((("kubernetes.io/metadata.name", named),) if named else ()),
        *((label, [IGNORE]) for label in IGNORE_LABELS),
    ]
    return {
        "matchExpressions": [
            {"key": key, "operator": "NotIn", "values": values} for key, values in expressions
        ]
    }


# ---- the policies --------------------------------------------------------------------------------

_NO_MIRROR: Final = (
    # A node tells of a static pod, which nobody but its file can change.
    "is-no-mirror",
    (
        "!('system:nodes' in request.userInfo.groups"
        " && 'kubernetes.io/config.mirror' in object.metadata.?annotations.orValue({}))"
    ),
)
_PLACEMENT_MESSAGES: Final = (
    (
        "the annotation allotment.dev/placement is written when a pod is bound, by Allotment's"
        " scheduler"
    ),
    (
        "the annotations allotment.dev/placement, allotment.dev/dialect and"
        " webhook.allotment.dev/translated of a pod cannot be changed"
    ),
    "annotations of allotment.dev/ cannot be changed once the pod has its GPUs: make the pod anew",
)
_WHY: Final = {
    "allotment-translated": (
        "What asks for a share in another system's words has been translated, or is not created:"
        " also where the webhook is not installed, was told to ignore failures, or another one"
        " wrote after it."
    ),
    "allotment-left-alone": (
        "Where the webhook is to look at nothing, nobody has a share: no quota and no other rule"
        " would hold it."
    ),
    "allotment-placements": (
        "What was decided for a pod: written by the scheduler when it binds the pod, and by nobody"
        " else at any time. Annotations can be written through a pod's status as well."
    ),
    "allotment-bindings": (
        "A Binding's annotations go to the pod that it binds: there is no other way to a placement."
    ),
    "allotment-records": (
        "What another system gave a pod, as it says on the pod: by such a record GPUs count as"
        " taken while nodes are taken over. Written by schedulers, whatever they are called:"
        " whoever may bind pods in all namespaces, or change nodes. Nobody creates a pod with one:"
        " controllers that bind do so for those who own their objects."
    ),
}
_RECORD_MESSAGES: Final = (
    (
        "an annotation in which another system says which GPUs it has given a pod is written when"
        " the pod is placed, by that system: remove it"
    ),
    (
        "an annotation in which another system says which GPUs it has given a pod cannot be changed"
        " but by a scheduler"
    ),
    ("what a pod asks of another system cannot be changed once it has its GPUs: make the pod anew"),
)


def _policies(keys: Keys, its: Installation) -> Iterator[Document]:
    scheduler = f"system:serviceaccount:{its.namespace}:{_ACCOUNT}"
    others = ("not-the-scheduler", f"request.userInfo.username != '{scheduler}'")
    yield _policy(
        "allotment-translated",
        rule=_rule("CREATE"),
        conditions=(
            _NO_MIRROR,
            ("is-not-left-to-another-system", f"!{OPTED_OUT}"),
            (CONDITION, untranslated_condition(keys)),
        ),
        namespaces=_looked_at(its),
        validations={
            TRANSLATED_RULE: "it asks for a part of a GPU in another system's words and was"
            " not translated: is the MutatingWebhookConfiguration"
            f" {its.configuration} there, and is this policy as `allot scheduler --print-manifests`"
            " prints it for the scheduler's --dialects? To go without, label the pod or its"
            f" namespace {IGNORE_LABELS[0]}={IGNORE}"
        },
    )
    yield _policy(
        "allotment-left-alone",
        rule=_rule("CREATE"),
        conditions=(_NO_MIRROR, ("asks-for-a-share", OWN_CONDITION)),
        validations={
            left_alone_rule(its.ignored_namespaces): "pods of this namespace are left alone by"
            " Allotment's webhook, so none of them can have allotment.dev/ resources: use"
            f" another namespace, or have its label {IGNORE_LABELS[0]}={IGNORE} (or"
            f" {IGNORE_LABELS[1]}={IGNORE}) removed"
        },
    )
    yield _policy(
        "allotment-placements",
        rule=_rule(
            *("CREATE", "UPDATE"),
            resources=("pods", "pods/status", "pods/ephemeralcontainers", "pods/resize"),
        ),
        conditions=(others,),
        variables=VARIABLES,
        validations=dict(zip(PLACEMENT_RULES, _PLACEMENT_MESSAGES, strict=True)),
    )
    yield _policy(
        "allotment-bindings",
        rule=_rule("CREATE", resources=("pods/binding", "bindings")),
        conditions=(others,),
        variables={"annotations": VARIABLES["annotations"]},
        validations={
            BINDING_RULE: "annotations of allotment.dev/ are written into a Binding by"
            " Allotment's scheduler alone"
        },
    )
    if keys.records:
        yield _policy(
            "allotment-records",
            rule=_rule("CREATE", "UPDATE", resources=RECORD_RESOURCES),
            conditions=(("has-a-record", record_condition(keys)),),
            variables=record_variables(keys),
            validations=dict(zip(RECORD_RULES, _RECORD_MESSAGES, strict=True)),
        )


def _policy(
    name: str,
    *,
    rule: Document,
    conditions: Collection[tuple[str, str]],
    validations: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    namespaces: Document | None = None,
) -> Document:
    spec: Document = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            **({"namespaceSelector": namespaces} if namespaces else {}),
            "resourceRules": [rule],
        },
        "matchConditions": [_condition(*each) for each in conditions],
    }
    if variables:
        spec["variables"] = [
            {"name": key, "expression": expression} for key, expression in variables.items()
        ]
    spec["validations"] = [
        {"expression": expression, "message": message, "reason": "Forbidden"}
        for expression, message in validations.items()
    ]
    return _object("ValidatingAdmissionPolicy", name, {"spec": spec})


def _rule(*operations: str, resources: Collection[str] = ("pods",)) -> Document:
    return {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": list(operations),
        "resources": list(resources),
        "scope": "Namespaced",
    }


def _condition(name: str, expression: str) -> Document:
    return {"name": name, "expression": expression}


def _object(kind: str, name: str, more: Document) -> Document:
    return {
        "apiVersion": _GROUP,
        "kind": kind,
        "metadata": {"name": name, "labels": dict(_LABELS)},
        **more,
    }
