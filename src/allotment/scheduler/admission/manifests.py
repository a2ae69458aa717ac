# SPDX-License-Identifier: Apache-2.0
"""The admission objects of a cluster: the webhook's configuration and the policies.

Their conditions depend on the dialects' keys, so they are generated from the dialect settings.
`deploy/manifests/scheduler.yaml` ends with the output for default settings, and `agent.yaml` with
the policies that also protect nodes without the scheduler.
"""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import yaml

from allotment.dialects.foreign.base import DIALECT
from allotment.dialects.own.allotment import GPU
from allotment.dialects.own.placement import PLACEMENT
from allotment.scheduler.admission import claims
from allotment.scheduler.admission.rules import (
    BINDING_RULE,
    CLAIMS,
    CONDITION,
    IGNORE,
    IGNORE_LABELS,
    OF_SYSTEMS,
    OPTED_OUT,
    OWN,
    OWN_CONDITION,
    PLACEMENT_RULES,
    PODS,
    TRANSLATED_RULE,
    VARIABLES,
    Keys,
    left_alone_rule,
    quoted,
    untranslated_condition,
    webhook_condition,
)

Document = dict[str, Any]

_GROUP: Final = "admissionregistration.k8s.io/v1"
_LABELS: Final = {
    "app.kubernetes.io/name": "allotment",
    "app.kubernetes.io/component": "scheduler",
}
_ACCOUNT: Final = "allotment-scheduler"
_WIDTH: Final = 100
_FOLD: Final = 76
"""A line ends with the first word beyond this column."""
_LONG: Final = 72
"""Longer strings are folded."""


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the scheduler is installed, and what it ignores."""

    namespace: str = "allotment-system"
    service: str = "allotment-webhook"
    path: str = "/webhook/pods"
    configuration: str = "allotment-scheduler"
    """The MutatingWebhookConfiguration's name."""
    ignored_namespaces: Collection[str] = ("kube-system",)
    """In addition to namespaces with the label."""


class Explained(msgspec.Struct, frozen=True):
    """An object, and its reason."""

    why: str
    document: Document


def admission_objects(keys: Keys, installed: Installation | None = None) -> Iterator[Explained]:
    installation = installed or Installation()
    yield Explained(
        "Translates pods when they are created, and checks resizes. The scheduler writes caBundle"
        " and the match conditions of its dialects. Fails closed: while no replica runs, pods with"
        " a key of the conditions are refused, and all others are created. Of claims it checks"
        " Allotment's parameters, and fails open: the agent checks them again.",
        _configuration(keys, installation),
    )
    yield from _bound(_policies(keys, installation))


def _bound(policies: Iterable[Document]) -> Iterator[Explained]:
    """Yield policies, each with the binding that puts it in force."""
    for policy in policies:
        name: str = policy["metadata"]["name"]
        yield Explained(_WHY[name], policy)
        spec = {"policyName": name, "validationActions": ["Deny"]}
        yield Explained("", _object("ValidatingAdmissionPolicyBinding", name, {"spec": spec}))


def as_yaml(objects: Iterator[Explained]) -> str:
    """Write objects as a file for `kubectl apply`, each below its reason."""
    written = []
    for explained in objects:
        reason = textwrap.wrap(explained.why, _WIDTH - 2)
        body = yaml.dump(explained.document, Dumper=_Dumper, width=_FOLD, sort_keys=False)
        written.append("".join(f"# {line}\n" for line in reason) + body)
    return "---\n".join(written)


class _Dumper(yaml.SafeDumper):
    """Writes manifests in the usual form: folded texts, lists of words on one line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT001, FBT002 - PyYAML's
        del indentless
        super().increase_indent(flow, indentless=False)

    def text(self, value: str) -> yaml.ScalarNode:
        style = ">" if len(value) > _LONG or "'" in value else None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    def items(self, value: list[object]) -> yaml.SequenceNode:
        is_words = all(isinstance(item, str) for item in value)
        return self.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=is_words)


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(list, _Dumper.items)


# ---- the webhook ---------------------------------------------------------------------------------


def _configuration(keys: Keys, its: Installation) -> Document:
    pods = {
        "rules": [_rule("CREATE", "UPDATE")],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "IfNeeded",
        "namespaceSelector": _looked_at(its),
        "matchConditions": [_condition(CONDITION, webhook_condition(keys))],
    }
    of_claims = {
        "rules": [_rule("CREATE", "UPDATE", group=claims.GROUP, resources=claims.KINDS, scope="*")],
        "failurePolicy": "Ignore",
        "matchConditions": [_condition(CONDITION, claims.CONDITION)],
    }
    both = [_webhook(PODS, its.path, pods, its), _webhook(CLAIMS, claims.PATH, of_claims, its)]
    return _object("MutatingWebhookConfiguration", its.configuration, {"webhooks": both})


def _webhook(name: str, path: str, more: Document, its: Installation) -> Document:
    service = {"namespace": its.namespace, "name": its.service, "path": path, "port": 443}
    return {
        "name": name,
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"service": service},
        "matchPolicy": "Equivalent",
        "sideEffects": "None",
        "timeoutSeconds": 5,
        **more,
    }


def _looked_at(its: Installation) -> Document:
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
    # A node's mirror of a static pod: only the pod's file can change it.
    "is-no-mirror",
    (
        "!('system:nodes' in request.userInfo.groups"
        " && 'kubernetes.io/config.mirror' in object.metadata.?annotations.orValue({}))"
    ),
)
_PLACEMENT_MESSAGES: Final = (
    (
        "only Allotment's scheduler writes the annotation allotment.dev/placement, when it binds"
        " the pod"
    ),
    (
        "the annotations allotment.dev/placement, allotment.dev/dialect and"
        " webhook.allotment.dev/translated of a pod cannot change"
    ),
    (
        "annotations of allotment.dev/ cannot change once the pod is on a node, except"
        " allotment.dev/resize: recreate the pod"
    ),
)
_WHY: Final = {
    "allotment-translated": (
        "A pod that asks for a share in another system's syntax must have been translated. This"
        " also covers a webhook that is not installed or ignores failures, and other webhooks"
        " that write after it."
    ),
    "allotment-left-alone": (
        "Pods that the webhook ignores get no share: no quota and no other rule would apply to it."
    ),
    "allotment-placements": (
        "Only the scheduler writes a pod's placement, and the request of a pod on a node cannot"
        " change: nodes without the scheduler place pods by their annotations. Annotations can be"
        " written through a pod's status as well. In agent.yaml and scheduler.yaml, the same."
    ),
    "allotment-bindings": (
        "The API server copies a Binding's annotations to the pod, so they are protected too. In"
        " agent.yaml and scheduler.yaml, the same."
    ),
    "allotment-scheduler-own-keys": (
        "The scheduler has the right to change the status of all pods, because a pod's annotations"
        " are written through it. This keeps it to its own: the placement, the nominated node, and"
        " what other systems' tools read of a bound pod. Other webhooks may add annotations to its"
        " Bindings, except those by which Allotment, Kubernetes, runtimes and networks give a pod"
        " more."
    ),
    "allotment-records": (
        "Another system's record of a pod's GPUs: they count as used while nodes are taken over."
        " Only schedulers write it: users that may bind pods in all namespaces or change nodes."
        " No new pod may have one: controllers with these rights create pods for their users."
    ),
}
_RECORD_MESSAGES: Final = (
    (
        "an annotation with another system's record of a pod's GPUs is written by that system when"
        " it places the pod: remove it"
    ),
    ("only a scheduler may change an annotation with another system's record of a pod's GPUs"),
    "a pod's request to another system cannot change once it has its GPUs: recreate the pod",
)
_EXCLUDE: Final = "; if another webhook adds them, exclude the scheduler's account there"
_SCHEDULER_MESSAGES: Final = (
    (
        "into a Binding the scheduler may not write these annotations of Allotment, Kubernetes,"
        f" runtimes or networks{_EXCLUDE}"
    ),
    f"the scheduler may not write labels{_EXCLUDE}",
    "the scheduler may change the annotation allotment.dev/placement alone",
    "the scheduler may change status.nominatedNodeName alone, and no labels or finalizers",
)


def _policies(keys: Keys, its: Installation) -> Iterator[Document]:
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
            TRANSLATED_RULE: "it asks for a part of a GPU in another system's syntax and was"
            " not translated: check that MutatingWebhookConfiguration"
            f" {its.configuration} exists, and that this policy is what `allot scheduler"
            " --print-manifests` prints for the scheduler's --dialects. To opt out, label the pod"
            f" or its namespace {IGNORE_LABELS[0]}={IGNORE}"
        },
    )
    yield _policy(
        "allotment-left-alone",
        rule=_rule("CREATE"),
        conditions=(_NO_MIRROR, ("asks-for-a-share", OWN_CONDITION)),
        validations={
            left_alone_rule(its.ignored_namespaces): "Allotment's webhook ignores"
            " this namespace, so its pods cannot have allotment.dev/ resources: use"
            f" another namespace, or remove its label {IGNORE_LABELS[0]}={IGNORE} (or"
            f" {IGNORE_LABELS[1]}={IGNORE})"
        },
    )
    yield from _placement_policies(its)
    yield _policy(
        "allotment-scheduler-own-keys",
        rule=_rule("CREATE", "UPDATE", resources=("pods/binding", "pods/status")),
        conditions=(("by-the-scheduler", f"request.userInfo.username == {_user(its)}"),),
        variables=scheduler_variables(keys),
        validations=dict(zip(SCHEDULER_RULES, _SCHEDULER_MESSAGES, strict=True)),
        named=dict(zip(SCHEDULER_RULES, ("foreign", "labels"), strict=False)),
    )
    if keys.records:
        yield _policy(
            "allotment-records",
            rule=_rule("CREATE", "UPDATE", resources=RECORD_RESOURCES),
            conditions=(("has-a-record", record_condition(keys)),),
            variables=record_variables(keys),
            validations=dict(zip(RECORD_RULES, _RECORD_MESSAGES, strict=True)),
        )


def _user(its: Installation) -> str:
    return f"'system:serviceaccount:{its.namespace}:{_ACCOUNT}'"


def _placement_policies(its: Installation) -> Iterator[Document]:
    others = ("not-the-scheduler", f"request.userInfo.username != {_user(its)}")
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
            BINDING_RULE: "only Allotment's scheduler writes annotations of allotment.dev/"
            " into a Binding"
        },
    )


def _policy(
    name: str,
    *,
    rule: Document,
    conditions: Collection[tuple[str, str]],
    validations: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    namespaces: Document | None = None,
    named: Mapping[str, str] | None = None,
) -> Document:
    """`validations`: a message for each rule; `named`: the variable with the keys that it names."""
    spec: Document = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            **({"namespaceSelector": namespaces} if namespaces else {}),
            "resourceRules": [rule],
        },
        "matchConditions": [_condition(*condition) for condition in conditions],
    }
    if variables:
        spec["variables"] = [
            {"name": key, "expression": expression} for key, expression in variables.items()
        ]
    spec["validations"] = [
        {
            "expression": expression,
            "message": message,
            **_message_with((named or {}).get(expression), message),
            "reason": "Forbidden",
        }
        for expression, message in validations.items()
    ]
    return _object("ValidatingAdmissionPolicy", name, {"spec": spec})


def _message_with(variable: str | None, message: str) -> Document:
    """Return the expression for a message that also names keys."""
    if variable is None:
        return {}
    return {"messageExpression": f"{quoted(f'{message}: ')} + variables.{variable}.join(', ')"}


def _rule(
    *operations: str,
    group: str = "",
    resources: Collection[str] = ("pods",),
    scope: str = "Namespaced",
) -> Document:
    return {
        "apiGroups": [group],
        "apiVersions": ["v1"],
        "operations": list(operations),
        "resources": list(resources),
        "scope": scope,
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


RECORD_RESOURCES: Final = (
    *("pods", "pods/status", "pods/ephemeralcontainers", "pods/resize"),
    # The API server copies a Binding's annotations to the pod.
    *("pods/binding", "bindings"),
)

_NEW: Final = "object.metadata.?annotations.orValue({})"
_OLD: Final = "oldObject.metadata.?annotations.orValue({})"
_NEW_LABELS: Final = "object.metadata.?labels.orValue({})"
_OLD_LABELS: Final = "oldObject.metadata.?labels.orValue({})"
_IS_FREE: Final = "k == 'nominatedNodeName'"
"""kube-scheduler tries that node first for a waiting pod."""
_IS_NEW: Final = "request.operation != 'UPDATE'"
_IS_UPDATE: Final = "request.operation == 'UPDATE'"
_IS_BINDING: Final = "request.kind.kind == 'Binding'"
_IS_POD: Final = "request.kind.kind != 'Binding'"
_IS_SCHEDULER: Final = (
    "authorizer.group('').resource('pods').subresource('binding').check('create').allowed()"
    " || authorizer.group('').resource('nodes').check('patch').allowed()"
)


def record_condition(keys: Keys) -> str:
    """Return the expression for a pod or Binding that has or had a record."""
    one = _is_one_of(keys.records)
    return f"{_NEW}.exists(k, {one}) || {_IS_UPDATE} && {_OLD}.exists(k, {one})"


def record_variables(keys: Keys) -> Mapping[str, str]:
    """Return the rules' `variables.`, each after those that it uses."""
    record = _is_one_of(keys.records)
    said = _is_one_of((keys.annotations | keys.marked_annotations) - OWN.annotations)
    label = _is_one_of(keys.labels)
    return {
        "annotations": _NEW,
        "oldAnnotations": _OLD,
        "labels": _NEW_LABELS,
        "oldLabels": _OLD_LABELS,
        "oldRecords": f"variables.oldAnnotations.filter(k, {record})",
        "records": f"variables.annotations.filter(k, {record})",
        "said": f"variables.annotations.filter(k, {said})",
        "oldSaid": f"variables.oldAnnotations.filter(k, {said})",
        "marks": f"variables.labels.filter(k, {label})",
        "oldMarks": f"variables.oldLabels.filter(k, {label})",
        "isScheduler": _IS_SCHEDULER,
    }


def scheduler_variables(keys: Keys) -> Mapping[str, str]:
    """Return the `variables.` of `SCHEDULER_RULES`.

    `foreign`: annotations of a Binding that the scheduler does not write, and that may change what
    the pod gets. Another webhook may add all others. `labels`: the API server itself adds those
    of the node's topology (plugin/pkg/admission/podtopologylabels).
    """
    own = _is_one_of({PLACEMENT, *keys.result_keys})
    read = (keys.annotations | keys.marked_annotations | keys.records) - keys.result_keys
    return {
        **VARIABLES,
        "status": "dyn(object.?status.orValue({}))",
        "oldStatus": "dyn(oldObject.?status.orValue({}))",
        "foreign": (
            f"variables.annotations.filter(k, !({own})"
            f" && ({_is_one_of(read)} || {OF_SYSTEMS} && !{_OF_TOPOLOGY}))"
        ),
        "labels": f"{_NEW_LABELS}.filter(k, !{_OF_TOPOLOGY})",
    }


_OF_TOPOLOGY: Final = "k.startsWith('topology.')"

SCHEDULER_RULES: Final = (
    # A Binding's annotations and labels are copied to the pod.
    f"{_IS_POD} || variables.foreign.size() == 0",
    f"{_IS_POD} || variables.labels.size() == 0",
    # A change of a pod by its status.
    (
        f"{_IS_BINDING} || variables.oldAnnotations.all(k, k in variables.annotations)"
        " && variables.annotations.all(k, k in variables.oldAnnotations"
        f" && (k == '{PLACEMENT}' || variables.annotations[k] == variables.oldAnnotations[k]))"
    ),
    (
        f"{_IS_BINDING} || variables.status.all(k, {_IS_FREE}"
        " || variables.status[?k] == variables.oldStatus[?k])"
        f" && variables.oldStatus.all(k, {_IS_FREE} || k in variables.status)"
        " && object.metadata.?labels == oldObject.metadata.?labels"
        " && object.metadata.?finalizers == oldObject.metadata.?finalizers"
    ),
)
"""One message for each."""


def _same(values: str, new: str, old: str) -> str:
    """Return the expression for unchanged values of these keys of a map."""
    before = f"variables.old{values.capitalize()}"
    return (
        f"variables.{new}.all(k, variables.{values}[?k] == {before}[?k])"
        f" && variables.{old}.all(k, k in variables.{values})"
    )


RECORD_RULES: Final = (
    # A copy of a translated pod with all its annotations is not taken over.
    (
        f"{_IS_UPDATE} || '{DIALECT}' in variables.annotations"
        f" || {_IS_BINDING} && variables.isScheduler"
    ),
    f"{_IS_NEW} || {_same('annotations', 'records', 'oldRecords')} || variables.isScheduler",
    # Its usage is its request, and some dialects request by annotations and labels.
    (
        f"{_IS_NEW} || variables.oldRecords.size() == 0"
        f" || {_same('annotations', 'said', 'oldSaid')} && {_same('labels', 'marks', 'oldMarks')}"
        " || variables.isScheduler"
    ),
)
"""One message for each."""


def _is_one_of(names: Collection[str]) -> str:
    """Return the expression for a key `k` among names; `*` at either end matches any text."""
    exact = ", ".join(f"'{name}'" for name in sorted(names) if "*" not in name)
    parts = [
        *([f"k in [{exact}]"] if exact else []),
        *(f"k.startsWith('{name[:-1]}')" for name in sorted(names) if name.endswith("*")),
        *(f"k.endsWith('{name[1:]}')" for name in sorted(names) if name.startswith("*")),
    ]
    return " || ".join(parts) or "false"


SERVER_FILES: Final = {"caFile": "/path/of/ca.crt"}
"""The trusted CA, if another program issues the extender's certificates."""
CLIENT_FILES: Final = {
    "certFile": "/etc/kubernetes/allotment/tls.crt",
    "keyFile": "/etc/kubernetes/allotment/tls.key",
    "caFile": "/etc/kubernetes/allotment/ca.crt",
}
"""Paths of the mounted Secret with kube-scheduler's certificate."""

_DEFAULT: Final = "default-scheduler"
_CONFIG = """\
# A KubeSchedulerConfiguration for the cluster's kube-scheduler (--config): it asks `allot
# scheduler` about pods with {resource}. A second kube-scheduler has only the second profile.
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
{others}  # For pods with shares, which may fit only on nodes that a sample leaves out.
  - schedulerName: {scheduler}
    percentageOfNodesToScore: 100
extenders:
  - urlPrefix: {url}
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    preemptVerb: preempt
    weight: 1
    enableHTTPS: {https}
{tls}    nodeCacheCapable: true
    ignorable: false
    httpTimeout: 30s
    managedResources:
      - name: {resource}
        ignoredByScheduler: false
"""

_PLAIN_PODS = """\
  # Pods without GPUs, to keep them off nodes whose GPUs need the CPU: one request for each.
  # Without an answer within a second kube-scheduler places them as usual.
  - urlPrefix: {url}
    prioritizeVerb: prioritize
    weight: 1
    enableHTTPS: {https}
{tls}    nodeCacheCapable: true
    ignorable: true
    httpTimeout: 1s
"""


def kube_configuration(
    *, host: str, port: int, tls: Mapping[str, str], scheduler: str, has_plain_pods: bool = False
) -> str:
    """Write a kube-scheduler's configuration, in which the profile `scheduler` is for shares.

    Its settings are the profile's: pods of other profiles cost nothing more.
    `tls`: its TLS fields; empty: HTTP. `has_plain_pods`: also score pods without GPUs.
    """
    shown = f"[{host}]" if ":" in host else host
    text = _CONFIG + _PLAIN_PODS if has_plain_pods else _CONFIG
    return text.format(
        resource=GPU,
        scheduler=scheduler,
        others="" if scheduler == _DEFAULT else f"  - schedulerName: {_DEFAULT}\n",
        url=f"{'https' if tls else 'http'}://{shown}:{port}",
        https="true" if tls else "false",
        tls="".join(
            ["    tlsConfig:\n", *(f"      {name}: {text}\n" for name, text in tls.items())]
            if tls
            else []
        ),
    )
