# SPDX-License-Identifier: Apache-2.0
"""One config map, followed: its content, or that it is not there."""

from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api
from allotment.kube.errors import KubeError
from allotment.kube.objects import ConfigMapObject, ObjectList
from allotment.kube.watching import Following, Subject

__all__ = ["FollowedConfigMap"]


class FollowedConfigMap:
    """A config map. `run` has to be running.

    The request names it, so that a Role with `resourceNames` is enough.
    """

    def __init__(
        self, api: Api, *, namespace: str, name: str, backoff: Backoff | None = None
    ) -> None:
        """Know nothing yet."""
        self.name = f"{namespace}/{name}"
        self._following: Following[ConfigMapObject, Mapping[str, str]] = Following(
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

    async def run(self) -> NoReturn:
        """Follow for ever."""
        await self._following.run()

    @property
    def is_synced(self) -> bool:
        """Whether it is there is known."""
        return self._following.is_synced

    @property
    def problem(self) -> KubeError | None:
        """Why nothing is heard of it at present."""
        return self._following.problem

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
        async for _ in self._following.signal.changes():
            if self.is_synced and (is_first or self.data != last):
                is_first, last = False, self.data
                yield last


def _data(item: ConfigMapObject) -> Mapping[str, str]:
    return item.data or {}
