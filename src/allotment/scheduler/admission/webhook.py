# SPDX-License-Identifier: Apache-2.0
"""The mutating webhook: translates a pod of any dialect into Allotment's own.

Reports all detectable errors to the pod's author at creation. The scheduler and the node's agent
read only the result. Bytes in, bytes out, no state: dry runs, repeats and several replicas are
safe. Rules beyond creation are enforced by the API server (`rules`).
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from allotment.dialects import asks_of
from allotment.dialects.foreign.base import DIALECT, PASSED_OVER, ForeignDialect, Translation
from allotment.dialects.foreign.parsing import is_asked
from allotment.dialects.foreign.translate import (
    Changes,
    applied,
    is_native,
    native_pod,
    translate,
    wanted_of,
    whole_amount,
    written,
)
from allotment.dialects.own.allotment import GPU, GPU_COMPUTE, GPU_MEMORY, never_asked
from allotment.dialects.own.annotations import CLASS, COMPUTE, MEMORY, MIG_PROFILE, PREFIX
from allotment.dialects.own.placement import PLACEMENT, RESIZE
from allotment.dialects.own.protocol import MAX_DEVICES, shown
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.objects import PodObject, to_pod
from allotment.model.clusters import ClusterPod, PodNeed, WantedContainer
from allotment.model.errors import QuantityError, UsageError
from allotment.model.modes import MPS, SOFT, traits_of
from allotment.model.pods import ForeignPod, Pod, PodUid
from allotment.model.structs import replace
from allotment.placement.explain import Reason, Refusal
from allotment.scheduler.admission import claims
from allotment.scheduler.admission.pod_patch import PodChange, PodPatch, read_pod
from allotment.scheduler.admission.review import (
    AdmissionHandler,
    Reply,
    ReviewAnswer,
    ReviewRequest,
    UserInfo,
    replied,
)
from allotment.scheduler.admission.rules import (
    IGNORE,
    IGNORE_LABELS,
    TRANSLATED,
    Keys,
    all_keys,
    matcher,
)
from allotment.scheduler.core.quota import QuotaBook, is_known

PATH: Final = "/webhook/pods"
"""The API server posts reviews to this path."""

REVIEWED: Final = "webhook.allotment.dev/reviewed"
"""When this webhook reviewed the pod, for its trace: an annotation in the same answer, and only
with traces. Begin and end in microseconds after the epoch."""

_MIRROR = "kubernetes.io/config.mirror"
_NODES = "system:nodes"
_DEFAULT_SCHEDULER = "default-scheduler"
_MOST_PASSED_OVER = 1000
"""Characters: the limit of an event."""
_MOST_WORK = 256 << 10
"""Characters of annotations, times containers: this takes a tenth of a second."""
_FORBIDDEN, _INVALID = 403, 422
_US = 1000
_LONGEST_TIME = 16


class Defaults(msgspec.Struct, frozen=True):
    """Defaults of containers that ask for a part of a GPU without an amount.

    Only for Allotment's own syntax: other dialects have their own.
    """

    gpus: int = 1
    """The number of GPUs for requests of memory or compute; 0: it must be given."""
    memory_bytes: int | None = None
    """Per GPU; None: all of it."""
    compute_percent: int | None = None
    """Per GPU; None: no guarantee."""


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The administrator's settings."""

    scheduler_name: str = ""
    """The scheduler of pods with shares; empty: pods keep their own."""
    overwrites_scheduler: bool = False
    """Also replace schedulers other than the default."""
    replaced_schedulers: frozenset[str] = frozenset(
        {"hami-scheduler", "4pd-scheduler", "kubeshare-scheduler"}
    )
    """Schedulers of translated systems that only place GPU pods: they are replaced.
    Volcano and KAI have queues, so their pods keep them."""
    may_be_privileged: bool = False
    """Privileged containers may have shares. They see every GPU of the node, and no limit applies
    to them."""
    ignored_namespaces: frozenset[str] = frozenset({"kube-system"})
    """In addition to namespaces with the label."""
    defaults: Defaults = msgspec.field(default=Defaults())
    notes_times: bool = False
    """Pods get the annotation `REVIEWED`."""


class PodWebhook:
    """Answers the API server's reviews of pods."""

    def __init__(
        self,
        dialects: Sequence[ForeignDialect],
        *,
        settings: WebhookSettings | None = None,
        quotas: QuotaBook | None = None,
        keys: Keys | None = None,
        resizes: Callable[[ClusterPod], object] = lambda _: None,
    ) -> None:
        """Without `quotas`, no quota is checked.

        `keys`: the keys in the API server's match condition; None: the dialects' own. `resizes`
        returns a `Refusal` of what a pod's `allotment.dev/resize` asks for.
        """
        self._dialects = tuple(dialects)
        self._titles = {dialect.name: dialect.title for dialect in dialects}
        self._settings = settings or WebhookSettings()
        self._quotas = quotas
        all_known = keys or all_keys(dialects)
        self._is_resource = matcher(all_known.resources)
        self._is_annotation = matcher(all_known.annotations | all_known.marked_annotations)
        self._is_label = matcher(all_known.labels)
        self._is_record = matcher(all_known.records)
        self._resizes = resizes

    def mutate(self, body: bytes) -> Reply:
        """Answer any review; HTTP status 400 for anything else."""
        return replied(body, self.review)

    def review(self, request: ReviewRequest) -> ReviewAnswer:
        if request.operation == "UPDATE" and request.is_of_pods:
            return self._resized(request)
        if request.operation != "CREATE" or not request.is_of_pods:
            return ReviewAnswer()
        began_ns = time.time_ns()
        try:
            draft = read_pod(request.object, namespace=request.namespace)
            if self._is_left_alone(draft.pod, request.user_info):
                return ReviewAnswer()
            return self._answer(draft, began_ns)
        except UsageError as error:
            return ReviewAnswer(refusal=error.one_line(), code=_INVALID, reason="Invalid")
        except _ForbiddenError as error:
            return ReviewAnswer(refusal=str(error), code=_FORBIDDEN, reason="Forbidden")

    def _resized(self, request: ReviewRequest) -> ReviewAnswer:
        """Refuse a resize that can never be, or is beyond a quota; warn if there is no room."""
        try:
            item = _POD.decode(request.object)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return ReviewAnswer(refusal=f"it is not a pod: {error}", code=_INVALID)
        pod = to_cluster_pod(item)
        wish = (item.metadata.annotations or {}).get(RESIZE)
        if wish is not None and not (pod.booking and pod.booking.containers):
            try:
                _check_resize(to_pod(item))
            except UsageError as error:
                return ReviewAnswer(refusal=error.one_line(), code=_INVALID, reason="Invalid")
        refusal = self._resizes(pod)
        if not isinstance(refusal, Refusal):
            return ReviewAnswer()
        text = f"pod {pod}: {refusal.text}" + (f"; hint: {refusal.hint}" if refusal.hint else "")
        if refusal.reason == Reason.RESIZE and wish is not None:
            return ReviewAnswer(refusal=text, code=_INVALID, reason="Invalid")
        if refusal.reason == Reason.QUOTA:
            return ReviewAnswer(refusal=text, code=_FORBIDDEN, reason="Forbidden")
        return ReviewAnswer(warnings=(f"not resized yet: {text}",))

    def _is_left_alone(self, pod: ForeignPod, by: UserInfo) -> bool:
        if _MIRROR in pod.annotations and _NODES in (by.groups or ()):
            return True  # a node's mirror of a static pod: only its file can change it
        if is_native(pod):
            return False  # Allotment's own keys: no other system handles them
        return pod.namespace in self._settings.ignored_namespaces or any(
            pod.labels.get(label) == IGNORE for label in IGNORE_LABELS
        )

    def _answer(self, draft: PodPatch, began_ns: int) -> ReviewAnswer:
        pod = draft.pod
        self._check_work(pod)
        change, translation = self._change(pod)
        warnings = [*self._dropped(pod, change)]
        if translation is not None:
            warnings += (f"pod {pod}: not honoured: {text}" for text in self._passed(translation))
        changed = applied(pod, change.changes)
        if (error := never_asked(native_pod(changed))) is not None:
            raise error
        wanted = wanted_of(changed)
        if wanted:
            if RESIZE in changed.annotations:
                _check_resize(native_pod(changed))
            self._check_privileged(pod, {container.name for container in wanted})
            need = PodNeed(
                uid=PodUid(""), namespace=pod.namespace, name=pod.name, containers=wanted
            )
            self._check_quota(changed, need)
            change = replace(change, scheduler=self._scheduler_of(pod))
            warnings += self._told(pod)
            warnings += _without_compute(pod, wanted)
            if self._settings.notes_times:
                times = {REVIEWED: f"{began_ns // _US}-{time.time_ns() // _US}"}
                changes = change.changes
                changes = replace(changes, annotations={**changes.annotations, **times})
                change = replace(change, changes=changes)
        return ReviewAnswer(steps=tuple(draft.steps(change)), warnings=tuple(warnings))

    def _check_work(self, pod: ForeignPod) -> None:
        """Refuse slow reviews: most annotations are read for each container."""
        texts = [text for key, text in pod.annotations.items() if self._is_annotation(key)]
        if sum(map(len, texts)) * len(pod.containers) > _MOST_WORK:
            raise UsageError(
                f"pod {pod}: its GPU annotations are too long for its"
                f" {len(pod.containers)} containers",
                hint=f"the limit for characters x containers is {_MOST_WORK}: use fewer of either",
            )

    def _change(self, pod: ForeignPod) -> tuple[PodChange, Translation | None]:
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
        title = self._titles.get(translation.dialect, translation.dialect)
        return [f"{request} ({title})" for request in translation.passed_over]

    def _check_quota(self, pod: ForeignPod, need: PodNeed) -> None:
        """`pod`: as it will be created."""
        if self._quotas is None:
            return
        is_limited = self._quotas.is_limited(pod.namespace)
        if pod.node and is_limited:
            raise _ForbiddenError(
                f"pod {pod}: spec.nodeName is set, so no scheduler checks the namespace's quota of"
                " GPUs when the pod gets them; hint: select the node instead:"
                f" `nodeSelector: {{kubernetes.io/hostname: {pod.node}}}`"
            )
        others = self._other_scheduler_of(pod)
        if others and is_limited and not is_known(need):
            raise _ForbiddenError(
                f"pod {pod}: schedulerName is {others}, not {self._settings.scheduler_name}, which"
                " checks the namespace's quota of GPUs when the pod gets some: their amount is"
                f" unknown until then; hint: leave schedulerName out, or ask for {GPU_MEMORY} in"
                f" mode {SOFT} or {MPS}"
            )
        dialect = pod.annotations.get(DIALECT, "")
        rejection = self._quotas.check_new(need, dialect=dialect)
        if rejection is not None:
            raise _ForbiddenError(f"pod {need}: {rejection.text}; hint: {rejection.hint}")

    def _check_translated(self, pod: ForeignPod) -> None:
        """Accept a translated pod only if it has not changed since.

        Its author can compute the digest, too. So nothing may be left to translate.
        """
        digest = pod.annotations.get(TRANSLATED)
        dialect = pod.annotations.get(DIALECT)
        left = self._untranslated(pod)
        is_same = digest is not None and dialect is not None and digest == self._digest(pod)
        if is_same and not left:
            return
        title = self._titles.get(dialect or "", "another")
        if is_same:
            problem = f"it has {DIALECT}, and was not translated: it asks for {', '.join(left)}"
        elif digest is None or dialect is None:
            problem = f"it has the annotation {DIALECT if digest is None else TRANSLATED}, which"
            problem += " only Allotment's webhook writes"
        else:
            problem = f"it was translated from {title} dialect and has changed since"
        ours = sorted(key for key in pod.annotations if key.startswith(PREFIX))
        resources = sorted(
            {
                name
                for container in pod.containers
                for name in container.limits
                if name.startswith(PREFIX)
            }
        )
        records = sorted(filter(self._is_record, pod.annotations))
        hint = f"remove {', '.join([TRANSLATED, *ours, *records, *resources])}, and it is"
        hint += " translated again"
        raise UsageError(f"pod {pod}: {problem}", hint=f"{hint}; restore removed resources")

    def _untranslated(self, pod: ForeignPod) -> list[str]:
        """Return the resources that a translation would have removed."""
        bare = replace(pod, annotations={}, labels={}, scheduler="")
        moving = (dialect for dialect in self._dialects if not dialect.keeps_resources(bare))
        keys = {key for dialect in moving for key in dialect.recognises(bare)}
        return sorted(key for key in keys if is_asked(bare, key))

    def _defaulted(self, pod: ForeignPod) -> Mapping[str, Mapping[str, str | None]]:
        added_limits: dict[str, Mapping[str, str | None]] = {}
        for container in pod.containers:
            added = self._added(pod, container.limits)
            if added:
                added_limits[container.name] = added
        return added_limits

    def _added(self, pod: ForeignPod, limits: Mapping[str, str]) -> dict[str, str | None]:
        defaults = self._settings.defaults
        asked = any(limits.get(name, "0") != "0" for name in _OWN)
        added: dict[str, str | None] = {}
        if not asked:
            return added
        count = limits.get(GPU)
        if count is None and defaults.gpus:
            count = added[GPU] = str(defaults.gpus)
        number = _whole(count)
        if not 0 < number <= MAX_DEVICES:
            return added  # the parser reports the error
        if (
            defaults.memory_bytes is not None
            and GPU_MEMORY not in limits
            and not ({MEMORY, MIG_PROFILE} & set(pod.annotations))
        ):
            added[GPU_MEMORY] = str(defaults.memory_bytes * number)
        if (
            defaults.compute_percent
            and GPU_COMPUTE not in limits
            and not ({COMPUTE, CLASS, MIG_PROFILE} & set(pod.annotations))
        ):
            added[GPU_COMPUTE] = str(defaults.compute_percent * number)
        return added

    def _check_privileged(self, pod: ForeignPod, asking: Collection[str]) -> None:
        if self._settings.may_be_privileged:
            return
        for container in pod.containers:
            if container.is_privileged and container.name in asking:
                raise _ForbiddenError(
                    f"pod {pod}, container {container.name!r}: a privileged container cannot"
                    " have a share: it would see every GPU of its node, and no limit would apply;"
                    " hint: remove `privileged: true` and add the capabilities that it needs, or"
                    " request whole GPUs from the kubelet"
                )

    def _scheduler_of(self, pod: ForeignPod) -> str:
        wanted = self._settings.scheduler_name
        if not wanted or pod.scheduler == wanted or pod.node:
            return ""
        is_free = pod.scheduler in {"", _DEFAULT_SCHEDULER, *self._settings.replaced_schedulers}
        return wanted if is_free or self._settings.overwrites_scheduler else ""

    def _other_scheduler_of(self, pod: ForeignPod) -> str:
        """Return the scheduler that a pod keeps; empty: it gets the configured one."""
        wanted = self._settings.scheduler_name
        is_kept = wanted and not self._scheduler_of(pod) and pod.scheduler != wanted
        return pod.scheduler if is_kept and not pod.node else ""

    def _told(self, pod: ForeignPod) -> Iterator[str]:
        """Yield warnings about likely mistakes."""
        if pod.node:
            yield (
                f"pod {pod}: spec.nodeName is set, so no scheduler is asked: the agent of node"
                f" {pod.node} chooses the GPUs, and the pod waits there if they are not free"
            )
        elif others := self._other_scheduler_of(pod):
            yield (
                f"pod {pod}: schedulerName is {others}, not {self._settings.scheduler_name}: unless"
                " that scheduler uses Allotment's extender, it counts GPUs and does not see their"
                " parts"
            )

    def _dropped(self, pod: ForeignPod, change: PodChange) -> Iterator[str]:
        for key in sorted(change.dropped_annotations):
            yield f"pod {pod}: dropped the annotation {key}: it belongs to another pod"

    def _digest(self, pod: ForeignPod) -> str:
        """Return a digest of the pod's GPU request.

        It has only the dialects' keys, without annotations that are written at bind.
        """
        content = {
            "annotations": {
                key: text
                for key, text in _chosen(pod.annotations, self._is_annotation).items()
                if not self._is_record(key)
            },
            "labels": _chosen(pod.labels, self._is_label),
            "resources": [
                [
                    container.name,
                    container.kind.value,
                    {key: _amount(text) for key, text in chosen.items()},
                ]
                for container in pod.containers
                if (chosen := _chosen(container.limits, self._is_resource))
            ],
        }
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]


def review_times(written: str) -> tuple[int, int] | None:
    """Return begin and end of a review in nanoseconds, by the annotation `REVIEWED`."""
    texts = written.split("-")
    if len(texts) != 2 or not all(  # noqa: PLR2004 - begin and end
        text.isascii() and text.isdecimal() and len(text) <= _LONGEST_TIME for text in texts
    ):
        return None
    return int(texts[0]) * _US, int(texts[1]) * _US


def _check_resize(pod: Pod) -> None:
    """Raise `UsageError` for a resize that is invalid, or more than a pod without a scheduler has.

    A pod for the scheduler may ask for more: the scheduler checks that when it has placed the pod.
    """
    if (error := never_asked(pod)) is not None:
        raise error
    own = {key: text for key, text in pod.annotations.items() if key != PLACEMENT}
    asks_of(replace(pod, annotations=own), nvidia=())


def _without_compute(pod: ForeignPod, wanted: Iterable[WantedContainer]) -> Iterator[str]:
    """Warn of a pod that shares its GPU without a guarantee of compute."""
    names = [
        container.name
        for container in wanted
        if traits_of((request := container.request).mode).takes_turns
        and not request.asks_compute
        and request.memory.part != 1
    ]
    if names:
        yield (
            f"pod {pod}: no compute is asked for (container {shown(names[0])}"
            + (f" and {len(names) - 1} more" if names[1:] else "")
            + f"): it gets the time that other pods leave; {GPU_COMPUTE} guarantees a part"
        )


def routes(webhook: PodWebhook) -> Mapping[str, AdmissionHandler]:
    return {PATH: webhook.mutate, claims.PATH: claims.review}


_POD: Final = msgspec.json.Decoder(PodObject)
_OWN: Final = (GPU, GPU_MEMORY, GPU_COMPUTE)
_UNSAID: Final = frozenset({PLACEMENT, TRANSLATED})


class _ForbiddenError(Exception):
    """The request is valid but not allowed."""


def _chosen(values: Mapping[str, str], is_chosen: Callable[[str], bool]) -> dict[str, str]:
    return {key: text for key, text in values.items() if is_chosen(key) and key not in _UNSAID}


def _whole(text: str | None) -> int:
    """Return an amount in any notation (`1`, `1.0`, `1e0`); 0: none, or an invalid one."""
    with suppress(QuantityError):
        return whole_amount(text or "0")
    return 0


def _amount(text: str) -> str:
    """Normalise an amount: the API server writes 6291456000 as 6291456k."""
    try:
        return str(whole_amount(text))
    except QuantityError:
        return text
