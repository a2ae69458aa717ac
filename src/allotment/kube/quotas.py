# SPDX-License-Identifier: Apache-2.0
"""Every ResourceQuota of the cluster, followed: what of GPUs each namespace may have."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api
from allotment.kube.objects import Metadata, ObjectList
from allotment.kube.watching import Followed, Subject

__all__ = ["FollowedQuotas", "NamespaceQuota", "quota_of"]


class _Narrow(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of the object."""


class _Spec(_Narrow):
    # A quantity may be written as a number.
    hard: dict[str, str | int | float] | None = None
    scopes: list[str] | None = None
    scope_selector: dict[str, object] | None = None


class QuotaObject(_Narrow):
    """A ResourceQuota, without its status: what is used is counted from pods."""

    metadata: Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceQuota:
    """What one ResourceQuota allows its namespace."""

    namespace: str
    name: str
    hard: Mapping[str, str] = field(default_factory=dict)
    """Those of extended resources, by name: `limits.nvidia.com/gpumem: 40960`."""
    is_scoped: bool = False
    """It is for some pods only: by priority class, or by how long they may run."""

    def __str__(self) -> str:
        """Name it as people do."""
        return f"ResourceQuota {self.namespace}/{self.name}"


class FollowedQuotas(Followed[QuotaObject, NamespaceQuota]):
    """The quotas of all namespaces."""

    def __init__(self, api: Api, *, backoff: Backoff | None = None) -> None:
        """Know nothing yet."""
        super().__init__(
            api,
            Subject(
                name="resource quotas",
                path="/api/v1/resourcequotas",
                fields={},
                item=QuotaObject,
                items=ObjectList[QuotaObject],
                convert=quota_of,
            ),
            backoff=backoff,
        )

    def all(self) -> tuple[NamespaceQuota, ...]:
        """Return every quota that says something about extended resources."""
        return tuple(each for each in self._following.values.values() if each.hard)


def quota_of(item: QuotaObject) -> NamespaceQuota:
    """Say what a ResourceQuota allows."""
    hard = item.spec.hard or {}
    return NamespaceQuota(
        namespace=item.metadata.namespace,
        name=item.metadata.name,
        hard={name: str(amount) for name, amount in hard.items() if "/" in name},
        is_scoped=bool(item.spec.scopes or item.spec.scope_selector),
    )
