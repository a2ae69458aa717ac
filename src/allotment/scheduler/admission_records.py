# SPDX-License-Identifier: Apache-2.0
"""Who may say of a pod which GPUs another system has given it: schedulers, and nobody else.

While nodes are taken over with their pods, GPUs count as taken where these records say so. They are
annotations, which a pod's owner may write as any other: so the API server holds them, as it holds a
placement. Whose schedulers those are, and what their service accounts are called, is each cluster's
own; what they have in common is that they bind pods in every namespace, or change nodes, as the
device plugins of these systems do. No owner of a namespace may do either.

But controllers may that work for him: what a DaemonSet's author writes, its controller creates, and
that one may bind. So no pod is created with a record, whoever asks for it: the systems whose
records count write them afterwards, or with the Binding.
"""

from collections.abc import Collection, Mapping
from typing import Final

from allotment.dialects.foreign import DIALECT
from allotment.scheduler.admission_keys import OWN, Keys

__all__ = ["RECORD_RESOURCES", "RECORD_RULES", "record_condition", "record_variables"]

RECORD_RESOURCES: Final = (
    *("pods", "pods/status", "pods/ephemeralcontainers", "pods/resize"),
    # A Binding's annotations go to the pod.
    *("pods/binding", "bindings"),
)

_NEW: Final = "object.metadata.?annotations.orValue({})"
_OLD: Final = "oldObject.metadata.?annotations.orValue({})"
_NEW_LABELS: Final = "object.metadata.?labels.orValue({})"
_OLD_LABELS: Final = "oldObject.metadata.?labels.orValue({})"
_IS_NEW: Final = "request.operation != 'UPDATE'"
_IS_UPDATE: Final = "request.operation == 'UPDATE'"
_IS_BINDING: Final = "request.kind.kind == 'Binding'"
_IS_SCHEDULER: Final = (
    "authorizer.group('').resource('pods').subresource('binding').check('create').allowed()"
    " || authorizer.group('').resource('nodes').check('patch').allowed()"
)


def record_condition(keys: Keys) -> str:
    """Return the expression that is true of a pod or a Binding with a record, or that had one."""
    one = _is_one_of(keys.records)
    return f"{_NEW}.exists(k, {one}) || {_IS_UPDATE} && {_OLD}.exists(k, {one})"


def record_variables(keys: Keys) -> Mapping[str, str]:
    """Return what the rules call `variables.`, in an order in which each knows those before it."""
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


def _same(values: str, new: str, old: str) -> str:
    """Return the expression that is true where these keys of a map are as they were."""
    before = f"variables.old{values.capitalize()}"
    return (
        f"variables.{new}.all(k, variables.{values}[?k] == {before}[?k])"
        f" && variables.{old}.all(k, k in variables.{values})"
    )


RECORD_RULES: Final = (
    # A pod that was translated, and is copied with all that is on it, is not taken over.
    (
        f"{_IS_UPDATE} || '{DIALECT}' in variables.annotations"
        f" || {_IS_BINDING} && variables.isScheduler"
    ),
    f"{_IS_NEW} || {_same('annotations', 'records', 'oldRecords')} || variables.isScheduler",
    # So much it has as it asks for, and some ask by annotations and labels.
    (
        f"{_IS_NEW} || variables.oldRecords.size() == 0"
        f" || {_same('annotations', 'said', 'oldSaid')} && {_same('labels', 'marks', 'oldMarks')}"
        " || variables.isScheduler"
    ),
)
"""Of these; of each there is a message."""


def _is_one_of(names: Collection[str]) -> str:
    """Return the expression that is true of a key `k`; `*` at an end of a name is any text."""
    exact = ", ".join(f"'{each}'" for each in sorted(names) if "*" not in each)
    parts = [
        *([f"k in [{exact}]"] if exact else []),
        *(f"k.startsWith('{each[:-1]}')" for each in sorted(names) if each.endswith("*")),
        *(f"k.endsWith('{each[1:]}')" for each in sorted(names) if each.startswith("*")),
    ]
    return " || ".join(parts) or "false"
