# SPDX-License-Identifier: Apache-2.0
"""What the API server itself holds pods to: about which it asks, and what nobody may write.

In CEL, so that it costs no call, and holds while no scheduler runs:

* `webhook_condition`: the webhook is asked about pods with a dialect's key, and about no other. It
  fails closed: while it is away, these wait to be created, and all others go on. A pod's label
  leaves it to another system; whoever asks in Allotment's own words is asked about in any case.
* `untranslated_condition`: what asks for a share in another system's words and has not been
  translated is refused. So it is also where the webhook's configuration is gone, was told to ignore
  failures, or another webhook wrote such a request after ours had looked.
* `left_alone_rule`: where an administrator has the webhook look at nothing, nobody has a share:
  neither quota nor any other rule would be asked about it.
* `PLACEMENT_RULES`: what was decided for a pod is written when it is bound, by the scheduler's own
  service account, and by nobody at another time.

`admission_manifests` makes the objects of these expressions, for the dialects that are spoken.
"""

from collections.abc import Collection, Iterator
from typing import Final

from allotment.dialects.annotations import PREFIX
from allotment.dialects.foreign import DIALECT
from allotment.dialects.placements import PLACEMENT
from allotment.scheduler.admission_keys import OWN, TRANSLATED, Keys

__all__ = [
    "BINDING_RULE",
    "CONDITION",
    "IGNORE",
    "IGNORE_LABELS",
    "OPTED_OUT",
    "OWN_CONDITION",
    "PLACEMENT_RULES",
    "TRANSLATED_RULE",
    "VARIABLES",
    "left_alone_rule",
    "untranslated_condition",
    "webhook_condition",
]

IGNORE_LABELS: Final = ("allotment.dev/webhook", "hami.io/webhook")
"""With the value `ignore` on a pod it is another system's, with all that it asks for in other words
than Allotment's own; on a namespace, all pods in it are left as they are."""
IGNORE: Final = "ignore"

CONDITION: Final = "asks-for-gpus"
"""The name of the webhook's match condition."""

_CONTAINERS: Final = "(object.spec.containers + object.spec.?initContainers.orValue([]))"
_ANNOTATIONS: Final = "object.metadata.?annotations.orValue({})"
_OLD_ANNOTATIONS: Final = "oldObject.metadata.?annotations.orValue({})"
_LABELS: Final = "object.metadata.?labels.orValue({})"
_SCHEDULER: Final = "object.spec.?schedulerName.orValue('')"
_LIMITS: Final = "c.?resources.?limits.orValue({})"


def webhook_condition(keys: Keys) -> str:
    """Return the expression that is true of the pods about which the API server asks.

    It is `Keys.match`, in CEL, but for pods that another system is to have.
    """
    others = _any(
        _in_limits(keys.resources - OWN.asking_resources),
        _among(_ANNOTATIONS, keys.annotations),
        _among(_LABELS, keys.labels),
        _one_of(_SCHEDULER, keys.schedulers),
        *_marked(keys, is_asked=False),
    )
    return f"{OWN_CONDITION} || !{OPTED_OUT} && ({others})"


def untranslated_condition(keys: Keys) -> str:
    """Return the expression that is true of a pod that asks for a share in others' words."""
    return _any(
        _in_limits(keys.asking_resources - OWN.asking_resources, is_asked=True),
        _among(_ANNOTATIONS, keys.asking_annotations - OWN.asking_annotations, is_asked=True),
        _among(_LABELS, keys.asking_labels - OWN.asking_labels, is_asked=True),
        *_marked(keys.asking, is_asked=True),
    )


def left_alone_rule(namespaces: Collection[str]) -> str:
    """Return the expression that is true where the webhook looks: not in these namespaces.

    For a validation alone: a match condition knows of no namespace's labels.
    """
    named = _one_of("request.namespace", namespaces)
    labelled = _labelled("namespaceObject.metadata.?labels.orValue({})")
    return f"!({_any(named, labelled)})"


TRANSLATED_RULE: Final = f"'{DIALECT}' in {_ANNOTATIONS}"
"""Of such a pod: it has been translated."""

VARIABLES: Final = {"annotations": _ANNOTATIONS, "oldAnnotations": _OLD_ANNOTATIONS}
"""What the rules below call `variables.`."""

_NEW, _OLD = (f"variables.{each}" for each in VARIABLES)
_FIXED: Final = ", ".join(f"'{each}'" for each in (PLACEMENT, DIALECT, TRANSLATED))
_OURS: Final = f"k.startsWith('{PREFIX}')"

PLACEMENT_RULES: Final = (
    # When a pod is created, no placement can be its own: nobody knows its uid.
    f"request.operation != 'CREATE' || !('{PLACEMENT}' in {_NEW})",
    # What the webhook and the binding have written stays.
    f"request.operation != 'UPDATE' || [{_FIXED}].all(k, {_NEW}[?k] == {_OLD}[?k])",
    # What a pod was placed by is not changed under who placed it.
    (
        f"request.operation != 'UPDATE' || !('{PLACEMENT}' in {_OLD})"
        f" || ({_NEW}.all(k, !{_OURS} || {_NEW}[?k] == {_OLD}[?k])"
        f" && {_OLD}.all(k, !{_OURS} || k in {_NEW}))"
    ),
)
"""Of a pod, unless the scheduler writes."""

BINDING_RULE: Final = f"{_NEW}.all(k, !{_OURS})"
"""Of a Binding, whose annotations go to the pod, unless the scheduler writes."""


def _marked(keys: Keys, *, is_asked: bool) -> Iterator[str]:
    """Yield, of each dialect whose words may be anybody's, the expression of a pod of its own."""
    for each in sorted(keys.marked, key=str):
        marks = _any(_one_of(_SCHEDULER, each.marks.schedulers), _among(_LABELS, each.marks.labels))
        words = _among(_ANNOTATIONS, each.asking | each.others, is_asked=is_asked)
        yield f"({marks}) && {words}"


def _labelled(labels: str) -> str:
    """Return the expression that is true of labels that ask to be left alone."""
    listed = ", ".join(map(_quoted, IGNORE_LABELS))
    return f"[{listed}].exists(k, {labels}[?k].orValue('') == '{IGNORE}')"


def _in_limits(names: Collection[str], *, is_asked: bool = False) -> str:
    if not names:
        return ""
    amount = f" && string({_LIMITS}[r]) != '0'" if is_asked else ""
    one = _one_of("r", names)
    one = f"({one}){amount}" if amount else one
    return f"{_CONTAINERS}.exists(c, {_LIMITS}.exists(r, {one}))"


def _among(there: str, names: Collection[str], *, is_asked: bool = False) -> str:
    if not names:
        return ""
    # Nothing but zeros asks for nothing, as in KubeShare.
    amount = f" && !{there}[k].matches('^[0.]*$')" if is_asked else ""
    one = _one_of("k", names)
    return f"{there}.exists(k, ({one}){amount})" if amount else f"{there}.exists(k, {one})"


def _one_of(variable: str, names: Collection[str]) -> str:
    exact = sorted(each for each in names if not each.endswith("*"))
    prefixes = sorted(each[:-1] for each in names if each.endswith("*"))
    listed = ", ".join(map(_quoted, exact))
    if not names:
        return ""
    return _any(
        f"{variable} in [{listed}]" if exact else "",
        *(f"{variable}.startsWith({_quoted(each)})" for each in prefixes),
    )


def _any(*parts: str) -> str:
    return " || ".join(part for part in parts if part) or "false"


def _quoted(text: str) -> str:
    """Write a string of CEL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


OWN_CONDITION: Final = _in_limits(OWN.asking_resources)
"""True of a pod that asks for a share in Allotment's own words."""

OPTED_OUT: Final = _labelled(_LABELS)
"""True of a pod that its author leaves to another system."""
