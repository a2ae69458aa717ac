# SPDX-License-Identifier: Apache-2.0
"""A pod that is about to be created: reads it, and writes changes of it as patch steps.

Dialects read the `ForeignPod` made here. The pod has no uid yet, and may have only a name prefix.
Unknown fields are neither decoded nor rewritten, so they stay as they are.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from allotment.dialects.foreign.translate import Changes
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.scheduler.admission.review import PatchStep, merged, pointer

MOST_CONTAINERS: Final = 200
"""More are refused. A node runs fewer whole pods, and each container takes up to half a millisecond
of the process that also binds."""
_MOST_RESOURCES: Final = 64
"""Per container."""
_MOST_ANNOTATIONS: Final = 256 << 10
"""Characters. The API server refuses more bytes itself (apimachinery pkg/api/validation,
TotalAnnotationSizeLimitB), but only after the webhooks."""


class _Narrow(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of a pod. Go omits empty lists and maps, or writes null."""


class _Meta(_Narrow):
    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Variable(_Narrow):
    name: str = ""
    value: str | None = None


class _Security(_Narrow):
    privileged: bool | None = None


class _Resources(_Narrow):
    # A quantity may be a number: `nvidia.com/gpu: 1`.
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class _Container(_Narrow):
    name: str = ""
    resources: _Resources | None = None
    env: list[_Variable] | None = None
    security_context: _Security | None = None
    restart_policy: str | None = None


class _Spec(_Narrow):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    node_name: str = ""
    scheduler_name: str = ""
    node_selector: dict[str, str] | None = None


class _Document(_Narrow):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    spec: _Spec = msgspec.field(default_factory=_Spec)


_DOCUMENT = msgspec.json.Decoder(_Document)


class _Where(msgspec.Struct, frozen=True):
    """A container's place in the document, and which maps exist."""

    path: tuple[str | int, ...]
    has_resources: bool
    has_limits: bool
    has_requests: bool


class PodPatch(msgspec.Struct, frozen=True):
    """A decoded pod, with all that is needed to write patch steps."""

    pod: ForeignPod
    has_annotations: bool
    _places: Mapping[str, _Where] = msgspec.field(default_factory=dict)

    def steps(self, change: "PodChange") -> Iterator[PatchStep]:
        yield from merged(
            ("metadata", "annotations"), change.changes.annotations, is_there=self.has_annotations
        )
        for key in sorted(change.dropped_annotations):
            if key in self.pod.annotations:
                yield PatchStep("remove", pointer("metadata", "annotations", key))
        for container in self.pod.containers:
            wanted = change.changes.limits.get(container.name)
            if wanted:
                yield from self._resources(container, wanted)
        if change.scheduler:
            yield PatchStep("add", pointer("spec", "schedulerName"), change.scheduler)

    def _resources(
        self, container: ForeignContainer, wanted: Mapping[str, str | None]
    ) -> Iterator[PatchStep]:
        """Write both limits and requests: for extended resources they must be equal."""
        where = self._places[container.name]
        path = (*where.path, "resources")
        if not where.has_resources:
            yield PatchStep("add", pointer(*path), {})
        current = {"limits": (where.has_limits, container.limits)}
        current["requests"] = (where.has_requests, container.requests)
        set_values = {name: text for name, text in wanted.items() if text is not None}
        for part, (is_there, values) in current.items():
            for name, text in wanted.items():
                if text is None and name in values:
                    yield PatchStep("remove", pointer(*path, part, name))
            yield from merged((*path, part), set_values, is_there=is_there)


class PodChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a pod."""

    changes: Changes = msgspec.field(default=Changes())
    dropped_annotations: frozenset[str] = frozenset()
    scheduler: str = ""
    """The new `schedulerName`; empty: unchanged."""


def read_pod(raw: bytes | msgspec.Raw, *, namespace: str) -> PodPatch:
    """Read a review's pod. Raises `UsageError` if it is invalid."""
    try:
        document = _DOCUMENT.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"the object in the review is not a pod: {error}",
            hint="the webhook's rules should name the resource `pods` of `v1`, and nothing else",
        ) from error
    meta, spec = document.metadata, document.spec
    _check_size(document, f"pod {namespace}/{meta.name or meta.generate_name}")
    containers = []
    places: dict[str, _Where] = {}
    for part, listed in (
        ("initContainers", spec.init_containers),
        ("containers", spec.containers),
    ):
        for place, container in enumerate(listed or ()):
            if container.name in places:
                # The API server refuses it too, but only after the webhooks.
                raise UsageError(
                    f"pod {namespace}/{meta.name or meta.generate_name}: two containers are named"
                    f" {container.name!r}",
                    hint="give each container its own name",
                )
            containers.append(_container(container, is_init=part == "initContainers"))
            places[container.name] = _where(container, ("spec", part, place))
    pod = ForeignPod(
        namespace=namespace or meta.namespace,
        name=meta.name or meta.generate_name,
        labels=meta.labels or {},
        annotations=meta.annotations or {},
        containers=tuple(containers),
        scheduler=spec.scheduler_name,
        node=spec.node_name,
        node_selector=spec.node_selector or {},
    )
    return PodPatch(pod, meta.annotations is not None, places)


def _check_size(document: _Document, pod: str) -> None:
    """Raise `UsageError` for a pod that would take long."""
    spec = document.spec
    listed = (*(spec.init_containers or ()), *(spec.containers or ()))
    if len(listed) > MOST_CONTAINERS:
        raise UsageError(
            f"{pod}: it has {len(listed)} containers, more than the {MOST_CONTAINERS} that a pod"
            " with parts of GPUs may have",
            hint="split it into several pods",
        )
    for container in listed:
        resources = container.resources or _Resources()
        if max(len(resources.limits or ()), len(resources.requests or ())) > _MOST_RESOURCES:
            raise UsageError(
                f"{pod}, container {container.name[:63]!r}: it asks for more than {_MOST_RESOURCES}"
                " resources",
                hint="list only the resources that it needs",
            )
    annotations = document.metadata.annotations or {}
    if sum(len(key) + len(text) for key, text in annotations.items()) > _MOST_ANNOTATIONS:
        raise UsageError(
            f"{pod}: its annotations have more than {_MOST_ANNOTATIONS} characters",
            hint="this is Kubernetes' limit: move long values into a ConfigMap",
        )


def _where(item: _Container, path: tuple[str | int, ...]) -> _Where:
    resources = item.resources
    return _Where(
        path,
        has_resources=resources is not None,
        has_limits=resources is not None and resources.limits is not None,
        has_requests=resources is not None and resources.requests is not None,
    )


def _container(item: _Container, *, is_init: bool) -> ForeignContainer:
    kind = ContainerKind.REGULAR
    if is_init:
        kind = ContainerKind.SIDECAR if item.restart_policy == "Always" else ContainerKind.INIT
    resources = item.resources or _Resources()
    security = item.security_context
    return ForeignContainer(
        name=item.name,
        kind=kind,
        limits=_texts(resources.limits),
        requests=_texts(resources.requests),
        environment={
            variable.name: variable.value
            for variable in item.env or ()
            if variable.value is not None
        },
        is_privileged=security is not None and bool(security.privileged),
    )


def _texts(values: Mapping[str, str | int | float] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (values or {}).items()}
