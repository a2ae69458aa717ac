# SPDX-License-Identifier: Apache-2.0
"""The mutating webhook: a pod in any dialect in, the same pod in Allotment's own out.

Once, when a pod is created, everything that can be known to be wrong with it is said to the person
who creates it; nobody reads the events of a pod that never runs. What passes is written down in
words that the scheduler and the node's agent read, and they read no others.

Reads and writes nothing: bytes in, bytes out, the same answer whenever it is asked. So a dry run is
a run, an API server that asks twice is answered twice, and any replica may answer. What nobody may
write at any time, and not only at creation, is held by the API server itself (`admission_rules`).
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import msgspec

from allotment.dialects.allotment import GPU, GPU_COMPUTE, GPU_MEMORY, never_asked
from allotment.dialects.annotations import CLASS, COMPUTE, MEMORY, MIG_PROFILE, PREFIX
from allotment.dialects.foreign import DIALECT, PASSED_OVER, ForeignDialect, ForeignPod, Translation
from allotment.dialects.native import (
    Changes,
    applied,
    is_native,
    native_pod,
    wanted_of,
    whole_amount,
    written,
)
from allotment.dialects.placements import PLACEMENT
from allotment.dialects.translating import translate
from allotment.model.clusters import PodNeed
from allotment.model.errors import QuantityError, UsageError
from allotment.model.pods import PodUid
from allotment.scheduler.admission import (
    Answer,
    ReviewRequest,
    UserInfo,
    answered,
    read_review,
)
from allotment.scheduler.admission_keys import TRANSLATED, Keys, all_keys, matcher
from allotment.scheduler.admission_pods import Draft, PodChange, read_pod
from allotment.scheduler.admission_rules import IGNORE, IGNORE_LABELS
from allotment.scheduler.quota import QuotaRejection

__all__ = [
    "PATH",
    "TRANSLATED",
    "Defaults",
    "PodWebhook",
    "Quotas",
    "Reply",
    "WebhookSettings",
    "routes",
]

PATH: Final = "/webhook/pods"
"""Where the API server posts its reviews."""

_MIRROR = "kubernetes.io/config.mirror"
_NODES = "system:nodes"
_DEFAULT_SCHEDULER = "default-scheduler"
_MOST_PASSED_OVER = 1000
"""Characters: what an event can tell."""
_MOST_WORK = 256 << 10
"""Characters of annotations, times containers: it takes a tenth of a second."""
_OK, _BAD_REQUEST, _FORBIDDEN, _INVALID = 200, 400, 403, 422
_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a container has that asks for a part of a GPU and does not say how much.

    For those alone that are written in Allotment's own words: other dialects have their own.
    """

    gpus: int = 1
    """Of how many GPUs it is that memory or compute is asked; 0: it has to say."""
    memory_bytes: int | None = None
    """Of each GPU; None: all of it."""
    compute_percent: int | None = None
    """Of each GPU's time; None: nothing is guaranteed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """What a cluster's administrator may say."""

    scheduler_name: str = ""
    """Which scheduler places pods with shares; empty: pods keep what they name."""
    overwrites_scheduler: bool = False
    """Also where a pod names another one than the default."""
    replaced_schedulers: frozenset[str] = frozenset(
        {"hami-scheduler", "4pd-scheduler", "kubeshare-scheduler"}
    )
    """Those of systems whose pods are translated, and which do nothing but place on GPUs: a pod
    that names one of them means it no longer. Volcano and KAI have queues, and keep their pods."""
    may_be_privileged: bool = False
    """Privileged containers may have shares. They see every GPU of the node, and nothing holds
    them to their part."""
    ignored_namespaces: frozenset[str] = frozenset({"kube-system"})
    """Besides those with a label that says so."""
    defaults: Defaults = field(default=Defaults())


class Quotas(Protocol):
    """What the webhook asks about a namespace's quota."""

    def check_new(self, need: PodNeed, *, dialect: str = "") -> QuotaRejection | None:
        """Say whether a pod that is not there yet would be more than its namespace may have."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer."""

    status: int
    body: bytes
    content_type: str = _JSON


class PodWebhook:
    """Answers the API server's reviews of pods."""

    def __init__(
        self,
        dialects: Sequence[ForeignDialect],
        *,
        settings: WebhookSettings | None = None,
        quotas: Quotas | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Take the dialects that are understood; without `quotas`, none is looked at.

        `keys` has those by which the API server was told to ask; by default the dialects' own.
        """
        self._dialects = tuple(dialects)
        self._titles = {each.name: each.title for each in dialects}
        self._settings = settings or WebhookSettings()
        self._quotas = quotas
        known = keys or all_keys(dialects)
        self._is_resource = matcher(known.resources)
        self._is_annotation = matcher(known.annotations | known.marked_annotations)
        self._is_label = matcher(known.labels)
        self._is_record = matcher(known.records)

    def mutate(self, body: bytes) -> Reply:
        """Answer a review: an answer to every review, HTTP status 400 to what is none."""
        try:
            request = read_review(body)
        except UsageError as error:
            # To whoever calls: what the API server sends is always one.
            return Reply(_BAD_REQUEST, _said(error).encode(), _TEXT)
        return Reply(_OK, answered(request, self.review(request)))

    def review(self, request: ReviewRequest) -> Answer:
        """Say what becomes of the object of a request."""
        if request.operation != "CREATE" or not request.is_of_pods:
            return Answer()
        try:
            draft = read_pod(request.object, namespace=request.namespace)
            if self._is_left_alone(draft.pod, request.user_info):
                return Answer()
            return self._answer(draft)
        except UsageError as error:
            return Answer(refusal=_said(error), code=_INVALID, reason="Invalid")
        except _ForbiddenError as error:
            return Answer(refusal=str(error), code=_FORBIDDEN, reason="Forbidden")

    def _is_left_alone(self, pod: ForeignPod, by: UserInfo) -> bool:
        if _MIRROR in pod.annotations and _NODES in (by.groups or ()):
            return True  # a node tells of a static pod, which nobody but its file can change
        if is_native(pod):
            return False  # no other system gives it that: our rules are the only ones
        return pod.namespace in self._settings.ignored_namespaces or any(
            pod.labels.get(each) == IGNORE for each in IGNORE_LABELS
        )

    def _answer(self, draft: Draft) -> Answer:
        pod = draft.pod
        self._check_work(pod)
        change, translation = self._change(pod)
        warnings = [*self._dropped(pod, change)]
        if translation is not None:
            warnings += (f"pod {pod}: not honoured: {each}" for each in self._passed(translation))
        changed = applied(pod, change.changes)
        if (error := never_asked(native_pod(changed))) is not None:
            raise error
        wanted = wanted_of(changed)
        if wanted:
            self._check_privileged(pod, {each.name for each in wanted})
            dialect = changed.annotations.get(DIALECT, "")
            need = PodNeed(
                uid=PodUid(""), namespace=pod.namespace, name=pod.name, containers=wanted
            )
            self._check_quota(need, dialect)
            change = replace(change, scheduler=self._scheduler_of(pod))
            warnings += self._told(pod, change)
        return Answer(steps=tuple(draft.steps(change)), warnings=tuple(warnings))

    def _check_work(self, pod: ForeignPod) -> None:
        """Refuse what would take long: most annotations are read for each container."""
        texts = [text for key, text in pod.annotations.items() if self._is_annotation(key)]
        if sum(map(len, texts)) * len(pod.containers) > _MOST_WORK:
            raise UsageError(
                f"pod {pod}: its annotations about GPUs are too long for its"
                f" {len(pod.containers)} containers",
                hint=f"both multiplied may be {_MOST_WORK} characters: write fewer of either",
            )

    def _change(self, pod: ForeignPod) -> tuple[PodChange, Translation | None]:
        """Say what the pod is in Allotment's own words."""
        dropped = frozenset({PLACEMENT} & set(pod.annotations))
        if DIALECT in pod.annotations or TRANSLATED in pod.annotations:
            self._check_translated(pod)
            records = frozenset(filter(self._is_record, pod.annotations))
            return PodChange(dropped_annotations=dropped | records), None
        translation = translate(pod, self._dialects)
        if translation is None:
            changes = Changes(self._defaulted(pod))
            return PodChange(changes=changes, dropped_annotations=dropped), None
        changes = written(pod, translation)
        digest = self._digest(applied(pod, changes))
        marks = {TRANSLATED: digest}
        if translation.passed_over:
            marks[PASSED_OVER] = "; ".join(self._passed(translation))[:_MOST_PASSED_OVER]
        changes = replace(changes, annotations={**changes.annotations, **marks})
        return PodChange(changes=changes, dropped_annotations=dropped), translation

    def _passed(self, translation: Translation) -> list[str]:
        """Return what of a pod is not honoured, with whose it is."""
        title = self._titles.get(translation.dialect, translation.dialect)
        return [f"{each} ({title})" for each in translation.passed_over]

    def _check_quota(self, need: PodNeed, dialect: str) -> None:
        rejection = self._quotas.check_new(need, dialect=dialect) if self._quotas else None
        if rejection is not None:
            raise _ForbiddenError(f"pod {need}: {rejection.text}; hint: {rejection.hint}")

    def _check_translated(self, pod: ForeignPod) -> None:
        """Leave a pod alone that was translated before, if it still is what was translated."""
        found = pod.annotations.get(TRANSLATED)
        dialect = pod.annotations.get(DIALECT)
        if found is not None and dialect is not None and found == self._digest(pod):
            return
        title = self._titles.get(dialect or "", "another")
        if found is None or dialect is None:
            problem = f"it has the annotation {DIALECT if found is None else TRANSLATED}, which"
            problem += " Allotment's webhook alone writes"
        else:
            problem = f"it was translated from {title} dialect, and changed since"
        ours = sorted(key for key in pod.annotations if key.startswith(PREFIX))
        resources = sorted(
            {name for each in pod.containers for name in each.limits if name.startswith(PREFIX)}
        )
        records = sorted(filter(self._is_record, pod.annotations))
        hint = f"remove {', '.join([TRANSLATED, *ours, *records, *resources])}, so that it is"
        hint += " translated anew"
        raise UsageError(f"pod {pod}: {problem}", hint=f"{hint}; a resource that went, write again")

    def _defaulted(self, pod: ForeignPod) -> Mapping[str, Mapping[str, str | None]]:
        """Say what is added to containers that ask in Allotment's words, and not for all."""
        found: dict[str, Mapping[str, str | None]] = {}
        for container in pod.containers:
            added = self._added(pod, container.limits)
            if added:
                found[container.name] = added
        return found

    def _added(self, pod: ForeignPod, limits: Mapping[str, str]) -> dict[str, str | None]:
        defaults = self._settings.defaults
        asked = any(limits.get(each, "0") != "0" for each in _OWN)
        added: dict[str, str | None] = {}
        if not asked:
            return added
        count = limits.get(GPU)
        if count is None and defaults.gpus:
            count = added[GPU] = str(defaults.gpus)
        if count is None or not count.isdecimal() or count == "0":
            return added  # whoever reads it says what is wrong
        if (
            defaults.memory_bytes is not None
            and GPU_MEMORY not in limits
            and not ({MEMORY, MIG_PROFILE} & set(pod.annotations))
        ):
            added[GPU_MEMORY] = str(defaults.memory_bytes * int(count))
        if (
            defaults.compute_percent
            and GPU_COMPUTE not in limits
            and not ({COMPUTE, CLASS, MIG_PROFILE} & set(pod.annotations))
        ):
            added[GPU_COMPUTE] = str(defaults.compute_percent * int(count))
        return added

    def _check_privileged(self, pod: ForeignPod, asking: Collection[str]) -> None:
        if self._settings.may_be_privileged:
            return
        for container in pod.containers:
            if container.is_privileged and container.name in asking:
                raise _ForbiddenError(
                    f"pod {pod}, container {container.name!r}: it is privileged and asks for a"
                    " share of a GPU: it would see every GPU of its node, and nothing would hold it"
                    " to its share; hint: remove `privileged: true` and grant by name the"
                    " capabilities that it needs, or ask for whole GPUs of the kubelet"
                )

    def _scheduler_of(self, pod: ForeignPod) -> str:
        wanted = self._settings.scheduler_name
        if not wanted or pod.scheduler == wanted or pod.node:
            return ""
        is_free = pod.scheduler in {"", _DEFAULT_SCHEDULER, *self._settings.replaced_schedulers}
        return wanted if is_free or self._settings.overwrites_scheduler else ""

    def _told(self, pod: ForeignPod, change: PodChange) -> Iterator[str]:
        """Yield what the author may not have meant."""
        wanted = self._settings.scheduler_name
        if pod.node:
            yield (
                f"pod {pod}: spec.nodeName is set, so no scheduler is asked: the agent of node"
                f" {pod.node} chooses the GPUs, and the pod waits there if they are not free"
            )
        elif wanted and not change.scheduler and pod.scheduler != wanted:
            yield (
                f"pod {pod}: schedulerName is {pod.scheduler}, not {wanted}: unless that scheduler"
                " asks Allotment's, it counts GPUs and does not see their parts"
            )

    def _dropped(self, pod: ForeignPod, change: PodChange) -> Iterator[str]:
        for key in sorted(change.dropped_annotations):
            yield f"pod {pod}: the annotation {key} is left out: it was decided for another pod"

    def _digest(self, pod: ForeignPod) -> str:
        """Return a digest of all of a pod that says something about parts of GPUs.

        By the keys of the dialects: what others write into a pod, and what is written at binding,
        is none of it.
        """
        said = {
            "annotations": {
                key: text
                for key, text in _chosen(pod.annotations, self._is_annotation).items()
                if not self._is_record(key)
            },
            "labels": _chosen(pod.labels, self._is_label),
            "resources": [
                [each.name, each.kind.value, {key: _amount(text) for key, text in chosen.items()}]
                for each in pod.containers
                if (chosen := _chosen(each.limits, self._is_resource))
            ],
        }
        return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()[:16]


def routes(webhook: PodWebhook) -> Mapping[str, "Handler"]:
    """Return what answers POST at which path, for whoever serves."""
    return {PATH: webhook.mutate}


class Handler(Protocol):
    """Answers one POST. Never waits, never raises."""

    def __call__(self, body: bytes, /) -> Reply:
        """Return the answer to a body."""
        ...


_OWN: Final = (GPU, GPU_MEMORY, GPU_COMPUTE)
_UNSAID: Final = frozenset({PLACEMENT, TRANSLATED})


class _ForbiddenError(Exception):
    """It could be meant, and may not be."""


def _chosen(values: Mapping[str, str], is_chosen: Callable[[str], bool]) -> dict[str, str]:
    return {key: text for key, text in values.items() if is_chosen(key) and key not in _UNSAID}


def _amount(text: str) -> str:
    """Write an amount in one form: the API server writes 6291456000 as 6291456k."""
    try:
        return str(whole_amount(text))
    except QuantityError:
        return text


def _said(error: UsageError) -> str:
    """Write an error on one line: what, where, next step."""
    hint = f"; hint: {error.hint}" if error.hint else ""
    return " ".join(f"{error.message}{hint}".split())
