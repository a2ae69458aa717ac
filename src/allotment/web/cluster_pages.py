# SPDX-License-Identifier: Apache-2.0
"""The pages that only a cluster has: waiting pods, why one waits, what-if, quotas."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, ClassVar, Final

from aiohttp import web

from allotment.kube.errors import ObjectMissingError
from allotment.model.errors import BusyError, NotFoundError, UsageError
from allotment.web.application import Pages
from allotment.web.archive import Archive
from allotment.web.cluster import ClusterSource
from allotment.web.guarding import VIEWER
from allotment.web.rights import LoginGuard, Logins, Rights
from allotment.web.tables import quotas_table, waiting_table
from allotment.web.watching import Watch
from allotment.web.why import AskedFor, PodAnswer, Questions

_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
"""Of a pod or a namespace: nothing else may become part of a path of the API server."""
_MOST_GPUS: Final = 64
_MOST_PERCENT: Final = 100
_MOST_PRIORITY: Final = 2_000_000_000
_MOST_TEXT: Final = 200
_PATIENCE_S: Final = 20.0
_MOST_ANSWERS: Final = 32


class ClusterPages(Pages):
    """The pages of a cluster."""

    navigation: ClassVar[tuple[tuple[str, str, str], ...]] = (
        *Pages.navigation,
        ("/waiting", "Waiting", "w"),
        ("/what-if", "What if", "i"),
        ("/quotas", "Quotas", "q"),
    )

    def __init__(
        self,
        watch: Watch,
        source: ClusterSource,
        *,
        title: str,
        archive: Archive | None = None,
        has_login: bool = False,
        is_encrypted: bool = False,
    ) -> None:
        """`has_login`: viewers log in, and see what Kubernetes lets them see."""
        super().__init__(watch, title=title, archive=archive)
        self._source = source
        self._turn = asyncio.Semaphore(1)
        """The first explanation of a reading takes up to a second of a core."""
        self._questions = Questions(source.api, source.live)
        self._answers: dict[Hashable, PodAnswer] = {}
        """By the question, of reading `_answers_number`."""
        self._answers_number = 0
        self.guard: Final = (
            LoginGuard(
                Rights(source.api, self._namespaces), self.refusal, is_encrypted=is_encrypted
            )
            if has_login
            else None
        )
        """None: the rights are those of the one viewer's kubeconfig."""

    def add_routes(self, app: web.Application) -> None:
        if self.guard is not None:
            Logins(self.guard, self.login_form).add_routes(app)
        app.router.add_get("/waiting", self.waiting)
        app.router.add_get("/quotas", self.quotas)
        app.router.add_get("/what-if", self.what_if)
        app.router.add_get("/pods/{namespace}/{name}", self.pod)

    async def waiting(self, request: web.Request) -> web.Response:
        return self.as_table(request, waiting_table(self.seen()))

    async def quotas(self, request: web.Request) -> web.Response:
        return self.as_table(request, quotas_table(self.seen()))

    async def pod(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        self._check(namespace, name)
        try:
            found = await self._answer(
                (namespace, name),
                lambda questions: questions.why(namespace, name),
            )
        except ObjectMissingError as error:
            # The hint has similar names, also of other namespaces.
            hint = error.hint if VIEWER.get().sight.namespaces is None else None
            raise NotFoundError(error.message, hint=hint) from error
        words = {"placed": "placed", "bound": "bound", "pending": "waits", "ended": "has ended"}
        return self.rendered(
            request,
            "pod.html",
            namespace=namespace,
            name=name,
            found=found,
            standing=words[found.explanation.standing],
            **self._sight(),
        )

    async def what_if(self, request: web.Request) -> web.Response:
        asked = _asked(request)
        found: PodAnswer | None = None
        if "gpus" in request.query:
            self._check(asked.namespace)
            found = await self._answer(asked, lambda questions: questions.what_if(asked))
        return self.rendered(request, "what_if.html", asked=asked, found=found, **self._sight())

    def _namespaces(self) -> frozenset[str]:
        """Return the namespaces that the pages show."""
        fleet = self._watch.fleet
        return frozenset(
            {share.namespace for _, _, share in fleet.shares()}
            | {pod.namespace for pod in fleet.waiting}
            | {event.namespace for event in fleet.events}
            | {quota.namespace for quota in fleet.quotas}
        ) - {""}

    def _check(self, namespace: str, name: str = "what-if") -> None:
        """Raise `UsageError` for no name, and `NotFoundError` for what the viewer does not see."""
        for text in (namespace, name):
            if not _NAME.fullmatch(text):
                raise UsageError(f"{text!r} is no name of Kubernetes")
        if not VIEWER.get().sight.sees(namespace):
            raise NotFoundError(f"there is no pod {namespace}/{name}", hint="or you may not see it")

    async def _answer(
        self, question: Hashable, ask: Callable[[Questions], Awaitable[PodAnswer]]
    ) -> PodAnswer:
        """Ask, one at a time, and once after each reading: all viewers share the answer."""
        if not self._watch.number:
            raise BusyError("the cluster is being read", hint="try again in a second")
        try:
            async with asyncio.timeout(_PATIENCE_S), self._turn:
                if self._answers_number != self._watch.number:
                    self._answers_number = self._watch.number
                    self._questions = Questions(self._source.api, self._source.live)
                    self._answers.clear()
                elif len(self._answers) >= _MOST_ANSWERS:
                    self._answers.clear()
                if question not in self._answers:
                    self._answers[question] = await ask(self._questions)
                return self._answers[question]
        except TimeoutError as error:
            raise BusyError(
                f"no answer within {_PATIENCE_S:.0f} s", hint="others ask too: try again"
            ) from error

    def _sight(self) -> dict[str, Any]:
        sight = VIEWER.get().sight
        return {
            "sees": sight.sees,
            "sees_nodes": sight.sees_nodes,
            "sees_all": sight.namespaces is None,
        }


def _asked(request: web.Request) -> AskedFor:
    texts = {
        name: request.query.get(name, "").strip()
        for name in ("memory", "models", "mode", "namespace")
    }
    if any(len(text) > _MOST_TEXT for text in texts.values()):
        raise UsageError(f"a field has more than {_MOST_TEXT} characters")
    texts["namespace"] = texts["namespace"] or "default"
    return AskedFor(
        gpus=_whole(request.query.get("gpus", "1"), "GPUs", 1, _MOST_GPUS),
        compute=_whole(request.query.get("compute") or "0", "time", 0, _MOST_PERCENT),
        priority=_whole(request.query.get("priority", "0"), "priority", 0, _MOST_PRIORITY),
        **texts,
    )


def _whole(text: str, name: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))) or not (
        least <= int(text) <= most
    ):
        raise UsageError(f"{name}: {text!r} is not a number from {least} to {most}")
    return int(text)
