# SPDX-License-Identifier: Apache-2.0
"""Every PodDisruptionBudget of the cluster, followed: which pods are better left alone.

Read as kube-scheduler reads them (pkg/scheduler/framework/plugins/defaultpreemption,
`filterPodsWithPDBViolation`, of 1.36): a budget that selects nothing in words protects nobody, and
a pod that its budget counts as disrupted already costs nothing more. What differs is of whom they
are asked. kube-scheduler counts through all pods of a lower priority on the node, the most
important first, and those beyond what is allowed go against it, whoever of the others stays. Here
the victims alone are counted: a budget that allows one is not violated by one victim.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api
from allotment.kube.objects import Metadata, ObjectList
from allotment.kube.watching import Followed, Subject

__all__ = ["Budget", "BudgetObject", "FollowedBudgets", "Protected", "against", "budget_of"]

_HAS: Final = {"In": True, "NotIn": False}
_IS_THERE: Final = {"Exists": True, "DoesNotExist": False}


class _Narrow(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of the object."""


class _Expression(_Narrow):
    key: str
    operator: str
    values: list[str] | None = None


class _Selector(_Narrow):
    match_labels: dict[str, str] | None = None
    match_expressions: list[_Expression] | None = None


class _Spec(_Narrow):
    selector: _Selector | None = None


class _Status(_Narrow):
    disruptions_allowed: int = 0
    disrupted_pods: dict[str, object] | None = None


class BudgetObject(_Narrow):
    """A PodDisruptionBudget."""

    metadata: Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A pod, as far as a budget asks."""

    namespace: str
    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many pods more of those that it selects may go at present."""

    namespace: str
    allowed: int
    disrupted: frozenset[str] = frozenset()
    """Names of pods that are counted in it already."""
    labels: tuple[tuple[str, str], ...] = ()
    expressions: tuple[tuple[str, str, frozenset[str]], ...] = ()
    """Key, operator and values, as in a label selector."""

    def counts(self, pod: Protected) -> bool:
        """Tell whether one of those that it allows is used up when this pod goes."""
        if pod.namespace != self.namespace or not pod.labels or pod.name in self.disrupted:
            return False
        if not self.labels and not self.expressions:
            return False
        return all(pod.labels.get(key) == value for key, value in self.labels) and all(
            _matches(pod.labels.get(key), operator, values)
            for key, operator, values in self.expressions
        )


def against(pods: Sequence[Protected], budgets: Collection[Budget]) -> tuple[bool, ...]:
    """Tell of each of these pods whether it goes against a budget, when they go in this order."""
    namespaces = {pod.namespace for pod in pods}
    concerned = [each for each in budgets if each.namespace in namespaces]
    left = [each.allowed for each in concerned]
    found = []
    for pod in pods:
        used = [number for number, each in enumerate(concerned) if each.counts(pod)]
        for number in used:
            left[number] -= 1
        found.append(any(left[number] < 0 for number in used))
    return tuple(found)


class FollowedBudgets(Followed[BudgetObject, Budget]):
    """The budgets of all namespaces."""

    def __init__(self, api: Api, *, backoff: Backoff | None = None) -> None:
        """Know nothing yet."""
        super().__init__(
            api,
            Subject(
                name="pod disruption budgets",
                path="/apis/policy/v1/poddisruptionbudgets",
                fields={},
                item=BudgetObject,
                items=ObjectList[BudgetObject],
                convert=budget_of,
            ),
            backoff=backoff,
        )

    def against(self, pods: Sequence[Protected]) -> tuple[bool, ...] | None:
        """Tell of each whether it goes against a budget; None: no budget is known yet."""
        if not self.is_synced:
            return None
        return against(pods, self._following.values.values())


def budget_of(item: BudgetObject) -> Budget:
    """Say what a PodDisruptionBudget protects."""
    selector = item.spec.selector or _Selector()
    return Budget(
        namespace=item.metadata.namespace,
        allowed=item.status.disruptions_allowed,
        disrupted=frozenset(item.status.disrupted_pods or ()),
        labels=tuple((selector.match_labels or {}).items()),
        expressions=tuple(
            (each.key, each.operator, frozenset(each.values or ()))
            for each in selector.match_expressions or ()
        ),
    )


def _matches(value: str | None, operator: str, values: frozenset[str]) -> bool:
    if operator in _IS_THERE:
        return (value is not None) is _IS_THERE[operator]
    # A pod without the key is in none of the values.
    return operator in _HAS and (value in values) is _HAS[operator]
