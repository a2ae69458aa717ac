# SPDX-License-Identifier: Apache-2.0
"""One config map, followed: its content, or that it is not there."""

from collections.abc import AsyncIterator, Mapping

from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api
from allotment.kube.objects import ConfigMapObject, ObjectList
from allotment.kube.watching import Followed, Subject

__all__ = ["FollowedConfigMap"]


class FollowedConfigMap(Followed[ConfigMapObject, Mapping[str, str]]):
    """A config map; synced: whether it is there is known.

    The request names it, so that a Role with `resourceNames` is enough.
    """

    def __init__(
        self, api: Api, *, namespace: str, name: str, backoff: Backoff | None = None
    ) -> None:
        """Know nothing yet."""
        self.name = f"{namespace}/{name}"
        super().__init__(
            api,
            Subject(
                name=f"config map {self.name}",
                path=f"/api/v1/namespaces/{namespace}/configmaps",
                fields={"metadata.name": name},
                item=ConfigMapObject,
                items=ObjectList[ConfigMapObject],
                convert=_data,
            ),
            backoff=backoff,
        )

    @property
    def data(self) -> Mapping[str, str] | None:
        """By key; None: there is no such config map, or it has not been heard of."""
        return next(iter(self._following.values.values()), None)

    async def values(self) -> AsyncIterator[Mapping[str, str] | None]:
        """Yield its data as soon as it is known, and then whenever it is another; None: gone.

        Whoever is slow gets the latest alone.
        """
        last: Mapping[str, str] | None = None
        is_first = True
        async for _ in self.changes():
            if self.is_synced and (is_first or self.data != last):
                is_first, last = False, self.data
                yield last


def _data(item: ConfigMapObject) -> Mapping[str, str]:
    return item.data or {}
