# SPDX-License-Identifier: Apache-2.0
"""Objects followed as a whole: ResourceQuotas, PodDisruptionBudgets, a ConfigMap."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final

import msgspec

from allotment.kube.clients import Api, Backoff
from allotment.kube.objects import ConfigMapObject, Metadata, Narrow
from allotment.kube.watching import Followed, Subject
from allotment.model.clusters import NamespaceQuota, Protected


class _QuotaSpec(Narrow):
    # A quantity may be a number.
    hard: dict[str, str | int | float] | None = None
    scopes: list[str] | None = None
    scope_selector: dict[str, object] | None = None


class QuotaObject(Narrow):
    """A ResourceQuota without its status: usage is counted from pods."""

    metadata: Metadata
    spec: _QuotaSpec = msgspec.field(default_factory=_QuotaSpec)


class FollowedQuotas(Followed[QuotaObject, NamespaceQuota]):
    """The quotas of all namespaces."""

    def __init__(self, api: Api, *, backoff: Backoff | None = None) -> None:
        super().__init__(
            api,
            Subject("resource quotas", "/api/v1/resourcequotas", QuotaObject, quota_of),
            backoff=backoff,
        )

    def all(self) -> tuple[NamespaceQuota, ...]:
        """Return the quotas that limit extended resources."""
        return tuple(quota for quota in self._following.values.values() if quota.hard)


def quota_of(item: QuotaObject) -> NamespaceQuota:
    hard = item.spec.hard or {}
    return NamespaceQuota(
        namespace=item.metadata.namespace,
        name=item.metadata.name,
        hard={name: str(amount) for name, amount in hard.items() if "/" in name},
        is_scoped=bool(item.spec.scopes or item.spec.scope_selector),
    )


_HAS: Final = {"In": True, "NotIn": False}
_IS_THERE: Final = {"Exists": True, "DoesNotExist": False}


class _Expression(Narrow):
    key: str
    operator: str
    values: list[str] | None = None


class _Selector(Narrow):
    match_labels: dict[str, str] | None = None
    match_expressions: list[_Expression] | None = None


class _BudgetSpec(Narrow):
    selector: _Selector | None = None


class _BudgetStatus(Narrow):
    disruptions_allowed: int = 0
    disrupted_pods: dict[str, object] | None = None


class BudgetObject(Narrow):
    """A PodDisruptionBudget."""

    metadata: Metadata
    spec: _BudgetSpec = msgspec.field(default_factory=_BudgetSpec)
    status: _BudgetStatus = msgspec.field(default_factory=_BudgetStatus)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The number of further evictions that a PodDisruptionBudget allows, and its selector."""

    namespace: str
    allowed: int
    disrupted: frozenset[str] = frozenset()
    """Names of evicted pods that it has counted already."""
    labels: tuple[tuple[str, str], ...] = ()
    expressions: tuple[tuple[str, str, frozenset[str]], ...] = ()
    """Key, operator and values, as in a label selector."""

    def counts(self, pod: Protected) -> bool:
        if pod.namespace != self.namespace or not pod.labels or pod.name in self.disrupted:
            return False
        if not self.labels and not self.expressions:
            return False
        return all(pod.labels.get(key) == value for key, value in self.labels) and all(
            _matches(pod.labels.get(key), operator, values)
            for key, operator, values in self.expressions
        )


def against(pods: Sequence[Protected], budgets: Collection[Budget]) -> tuple[bool, ...]:
    """Return for each pod whether its eviction violates a budget, in this order."""
    namespaces = {pod.namespace for pod in pods}
    concerned = [budget for budget in budgets if budget.namespace in namespaces]
    left = [budget.allowed for budget in concerned]
    violates = []
    for pod in pods:
        used = [number for number, budget in enumerate(concerned) if budget.counts(pod)]
        for number in used:
            left[number] -= 1
        violates.append(any(left[number] < 0 for number in used))
    return tuple(violates)


class FollowedBudgets(Followed[BudgetObject, Budget]):
    """The budgets of all namespaces."""

    def __init__(self, api: Api, *, backoff: Backoff | None = None) -> None:
        super().__init__(
            api,
            Subject(
                "pod disruption budgets",
                "/apis/policy/v1/poddisruptionbudgets",
                BudgetObject,
                budget_of,
            ),
            backoff=backoff,
        )

    def against(self, pods: Sequence[Protected]) -> tuple[bool, ...] | None:
        if not self.is_synced:
            return None
        return against(pods, self._following.values.values())


def budget_of(item: BudgetObject) -> Budget:
    selector = item.spec.selector or _Selector()
    return Budget(
        namespace=item.metadata.namespace,
        allowed=item.status.disruptions_allowed,
        disrupted=frozenset(item.status.disrupted_pods or ()),
        labels=tuple((selector.match_labels or {}).items()),
        expressions=tuple(
            (expression.key, expression.operator, frozenset(expression.values or ()))
            for expression in selector.match_expressions or ()
        ),
    )


def _matches(value: str | None, operator: str, values: frozenset[str]) -> bool:
    if operator in _IS_THERE:
        return (value is not None) is _IS_THERE[operator]
    # A pod without the key has none of the values.
    return operator in _HAS and (value in values) is _HAS[operator]


class FollowedConfigMap(Followed[ConfigMapObject, Mapping[str, str]]):
    """A config map; `is_synced` means that its existence is known.

    The request names it, so a Role with `resourceNames` is enough.
    """

    def __init__(
        self, api: Api, *, namespace: str, name: str, backoff: Backoff | None = None
    ) -> None:
        self.name = f"{namespace}/{name}"
        super().__init__(
            api,
            Subject(
                name=f"config map {self.name}",
                path=f"/api/v1/namespaces/{namespace}/configmaps",
                fields={"metadata.name": name},
                item=ConfigMapObject,
                convert=_data,
            ),
            backoff=backoff,
        )

    @property
    def data(self) -> Mapping[str, str] | None:
        """Its data by key; None if it does not exist or is not loaded."""
        return next(iter(self._following.values.values()), None)

    async def values(self) -> AsyncIterator[Mapping[str, str] | None]:
        """Yield its data when loaded and after each change; None: deleted.

        A slow reader gets only the latest.
        """
        last: Mapping[str, str] | None = None
        is_first = True
        async for _ in self.changes():
            if self.is_synced and (is_first or self.data != last):
                is_first, last = False, self.data
                yield last


def _data(item: ConfigMapObject) -> Mapping[str, str]:
    return item.data or {}
