# SPDX-License-Identifier: Apache-2.0
"""Rules that the API server enforces itself, in CEL: without a call, also while no scheduler runs.

`webhook_condition`: which pods the webhook sees. `untranslated_condition`: refuse untranslated GPU
requests. `left_alone_rule`: no shares in ignored namespaces. `PLACEMENT_RULES`: only the scheduler
writes placements. `manifests` makes the objects.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

import msgspec

from allotment.dialects.foreign.base import DIALECT, ForeignDialect, Marks
from allotment.dialects.own.annotations import PREFIX
from allotment.dialects.own.placement import PLACEMENT, RESIZE
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.model.structs import replace

TRANSLATED: Final = "webhook.allotment.dev/translated"
"""A digest of the translated pod: a later change, or a changed copy, would otherwise silently get
the old translation."""

_Names = frozenset[str]
_NONE: Final[_Names] = frozenset()


class MarkedKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Annotations with common names: a dialect's only on pods with its marks."""

    marks: Marks
    asking: _Names
    others: _Names = msgspec.field(default=_NONE)

    def match(self, pod: ForeignPod) -> bool:
        return self.marks.are_on(pod) and any(
            map(matcher(self.asking | self.others), pod.annotations)
        )


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that mark a pod as a dialect's.

    Asking keys request a share, so the pod must be translated; other keys only refine a request.
    """

    asking_resources: _Names = msgspec.field(default=_NONE)
    asking_annotations: _Names = msgspec.field(default=_NONE)
    asking_labels: _Names = msgspec.field(default=_NONE)
    other_resources: _Names = msgspec.field(default=_NONE)
    other_annotations: _Names = msgspec.field(default=_NONE)
    other_labels: _Names = msgspec.field(default=_NONE)
    schedulers: _Names = msgspec.field(default=_NONE)
    """A pod that names one of these schedulers means that system."""
    marked: frozenset[MarkedKeys] = msgspec.field(default=frozenset())
    records: _Names = msgspec.field(default=_NONE)
    """Annotations with a system's record of a pod's GPUs."""
    result_keys: _Names = msgspec.field(default=_NONE)
    """Annotations of other systems that the scheduler writes when it binds a pod."""

    @property
    def resources(self) -> _Names:
        return self.asking_resources | self.other_resources

    @property
    def annotations(self) -> _Names:
        return self.asking_annotations | self.other_annotations

    @property
    def marked_annotations(self) -> _Names:
        """Annotations that belong to a dialect only on some pods."""
        return frozenset().union(*(keys.asking | keys.others for keys in self.marked))

    @property
    def labels(self) -> _Names:
        return self.asking_labels | self.other_labels

    @property
    def asking(self) -> "Keys":
        return Keys(
            asking_resources=self.asking_resources,
            asking_annotations=self.asking_annotations,
            asking_labels=self.asking_labels,
            marked=frozenset(replace(keys, others=_NONE) for keys in self.marked),
        )

    def __or__(self, other: "Keys") -> "Keys":
        return Keys(
            **{name: getattr(self, name) | getattr(other, name) for name in self.__struct_fields__}
        )

    def match(self, pod: ForeignPod) -> bool:
        """Return whether a pod has one of the keys, as the API server decides by the same list."""
        resources = chain.from_iterable(container.limits for container in pod.containers)
        return (
            any(map(matcher(self.resources), resources))
            or any(map(matcher(self.annotations), pod.annotations))
            or any(map(matcher(self.labels), pod.labels))
            or pod.scheduler in self.schedulers
            or any(keys.match(pod) for keys in self.marked)
        )


def matcher(names: Collection[str]) -> Callable[[str], bool]:
    """Return a predicate for keys with these names."""
    exact = frozenset(name for name in names if "*" not in name)
    prefixes = tuple(name[:-1] for name in names if name.endswith("*"))
    suffixes = tuple(name[1:] for name in names if name.startswith("*"))
    return lambda key: key in exact or key.startswith(prefixes) or key.endswith(suffixes)


def all_keys(dialects: Iterable[ForeignDialect], *, more: Keys | None = None) -> Keys:
    """Return the keys of Allotment's own dialect, of these dialects, and `more`."""
    keys = OWN if more is None else OWN | more
    for dialect in dialects:
        keys |= keys_of(dialect)
    return keys


def keys_of(dialect: ForeignDialect) -> Keys:
    """Return a dialect's keys: its own, as configured, and those of the table.

    A key asks if the dialect recognises a pod with only this key.
    """
    listed = KEYS.get(dialect.name, Keys())
    written = Keys(records=frozenset(dialect.records), result_keys=frozenset(dialect.result_keys))
    resources = (
        each
        for each in dialect.resources
        if _asks(
            dialect,
            ForeignPod(namespace="", name="", containers=_having(_EXAMPLES.get(each, each))),
        )
    )
    annotations, labels = frozenset(dialect.annotations), frozenset(dialect.labels)
    marks = dialect.marks
    asking_annotations = frozenset(
        key for key in annotations if _asks(dialect, _pod_with(annotation=key, marks=marks))
    )
    if marks is not None:
        others = annotations - asking_annotations
        marked = MarkedKeys(marks=marks, asking=asking_annotations, others=others)
        return listed | written | Keys(marked=frozenset({marked}))
    return (
        listed
        | written
        | Keys(
            asking_resources=frozenset(resources),
            asking_annotations=asking_annotations,
            asking_labels=frozenset(
                label for label in labels if _asks(dialect, _pod_with(label=label))
            ),
            other_annotations=annotations,
            other_labels=labels,
        )
    )


_EXAMPLES: Final[Mapping[str, str]] = {"nvidia.com/mig-*": "nvidia.com/mig-1g.5gb"}
"""A name for a key with a wildcard."""


def _pod_with(*, annotation: str = "", label: str = "", marks: Marks | None = None) -> ForeignPod:
    wanted_marks = marks or Marks()
    return ForeignPod(
        namespace="",
        name="",
        annotations={annotation: "1"} if annotation else {},
        labels={each: "1" for each in (label, *wanted_marks.labels) if each},
        containers=_having(""),
        scheduler=next(iter(sorted(wanted_marks.schedulers)), ""),
    )


def _having(resource: str) -> tuple[ForeignContainer, ...]:
    limits = {resource: "1"} if resource else {}
    return (ForeignContainer(name="c", limits=limits, requests=limits),)


def _asks(dialect: ForeignDialect, pod: ForeignPod) -> bool:
    return bool(dialect.recognises(pod)) and not dialect.keeps_resources(pod)


def _under(domain: str, *names: str) -> _Names:
    return frozenset(f"{domain}/{name}" for name in names)


OWN: Final = Keys(
    asking_resources=_under(PREFIX[:-1], "gpu", "gpu-memory", "gpu-compute"),
    # All of them: a misspelt one must cause an error.
    other_annotations=frozenset({f"{PREFIX}*", TRANSLATED}),
)
"""Allotment's own dialect."""

KEYS: Final[Mapping[str, Keys]] = {
    "hami": Keys(
        other_annotations=_under(
            "nvidia.com",
            *("use-gputype", "nouse-gputype", "use-gpuuuid", "nouse-gpuuuid"),
            *("numa-bind", "vgpu-mode"),
        )
        | _under(
            "hami.io", "node-scheduler-policy", "gpu-scheduler-policy", "device-scoring-weights"
        ),
        schedulers=frozenset({"hami-scheduler"}),
    ),
    "volcano": Keys(
        other_annotations=_under(
            "volcano.sh",
            *("vgpu-mode", "vgpu-use-gpuuuid", "vgpu-nouse-gpuuuid", "vgpu-podgroup-policy"),
        ),
    ),
    # The kubelet allocates these itself: no translation, and no refusal without one.
    "nvidia": Keys(other_resources=frozenset({"nvidia.com/mig-*"})),
    "aliyun": Keys(other_labels=_under("aliyun.com", "gpu-count")),
    "tencent": Keys(other_annotations=_under("tencent.com", "vcuda-core-limit")),
    "qgpu": Keys(other_annotations=_under("tke.cloud.tencent.com", "app-class")),
}
"""By dialect: keys that refine a request, and keys that the dialect does not list."""


IGNORE_LABELS: Final = ("allotment.dev/webhook", "hami.io/webhook")
"""With the value `ignore` on a pod, it belongs to another system, except for Allotment's own keys;
on a namespace, the webhook ignores all its pods."""
IGNORE: Final = "ignore"

PODS: Final = "pods.allotment.dev"
CLAIMS: Final = "claims.allotment.dev"
"""The names of the webhooks."""
CONDITION: Final = "asks-for-gpus"
"""The name of each webhook's match condition."""

_CONTAINERS: Final = "(object.spec.containers + object.spec.?initContainers.orValue([]))"
_ANNOTATIONS: Final = "object.metadata.?annotations.orValue({})"
_OLD_ANNOTATIONS: Final = "oldObject.metadata.?annotations.orValue({})"
_IS_RESIZED: Final = f"{_ANNOTATIONS}[?'{RESIZE}'] != {_OLD_ANNOTATIONS}[?'{RESIZE}']"
_LABELS: Final = "object.metadata.?labels.orValue({})"
_SCHEDULER: Final = "object.spec.?schedulerName.orValue('')"
_LIMITS: Final = "c.?resources.?limits.orValue({})"


def webhook_condition(keys: Keys) -> str:
    """Return the expression for pods that the webhook must see.

    For a new pod it is `Keys.match` in CEL, without pods that opted out. Of other pods the webhook
    sees a changed or removed `allotment.dev/resize`.
    """
    others = _any(
        _in_limits(keys.resources - OWN.asking_resources),
        _among(_ANNOTATIONS, keys.annotations),
        _among(_LABELS, keys.labels),
        _one_of(_SCHEDULER, keys.schedulers),
        *_marked(keys, is_asked=False),
    )
    created = f"{OWN_CONDITION} || !{OPTED_OUT} && ({others})"
    return f"request.operation == 'CREATE' ? ({created}) : {_IS_RESIZED}"


def untranslated_condition(keys: Keys) -> str:
    return _any(
        _in_limits(keys.asking_resources - OWN.asking_resources, is_asked=True),
        _among(_ANNOTATIONS, keys.asking_annotations - OWN.asking_annotations, is_asked=True),
        _among(_LABELS, keys.asking_labels - OWN.asking_labels, is_asked=True),
        *_marked(keys.asking, is_asked=True),
    )


def left_alone_rule(namespaces: Collection[str]) -> str:
    """Return the expression that is false in ignored namespaces.

    Only for validations: match conditions cannot read a namespace's labels.
    """
    named = _one_of("request.namespace", namespaces)
    labelled = _labelled("namespaceObject.metadata.?labels.orValue({})")
    return f"!({_any(named, labelled)})"


TRANSLATED_RULE: Final = f"'{DIALECT}' in {_ANNOTATIONS}"
"""For such a pod: it has been translated."""

VARIABLES: Final = {"annotations": _ANNOTATIONS, "oldAnnotations": _OLD_ANNOTATIONS}
"""The `variables.` of the rules below."""

_NEW, _OLD = (f"variables.{name}" for name in VARIABLES)
_FIXED: Final = ", ".join(f"'{key}'" for key in (PLACEMENT, DIALECT, TRANSLATED))
_OURS: Final = f"k.startsWith('{PREFIX}')"
_KEPT: Final = f"k.startsWith('{PREFIX}') && k != '{RESIZE}'"

PLACEMENT_RULES: Final = (
    # A new pod cannot have a placement of its own: its uid is unknown.
    f"request.operation != 'CREATE' || !('{PLACEMENT}' in {_NEW})",
    # The webhook's and the scheduler's annotations cannot change.
    f"request.operation != 'UPDATE' || [{_FIXED}].all(k, {_NEW}[?k] == {_OLD}[?k])",
    # The request of a pod on a node cannot change, except by a resize, which the scheduler, or the
    # node's agent without one, must accept.
    (
        "request.operation != 'UPDATE' || oldObject.spec.?nodeName.orValue('') == ''"
        f" || ({_NEW}.all(k, !({_KEPT}) || {_NEW}[?k] == {_OLD}[?k])"
        f" && {_OLD}.all(k, !({_KEPT}) || k in {_NEW}))"
    ),
)
"""For pods, unless the scheduler writes."""

_DOMAINS: Final = (
    *("allotment.dev", "kubernetes.io", "k8s.io", "openshift.io"),
    # Runtimes and their plugins: devices, mounts, limits, other seccomp profiles.
    *("crio.io", "cri-o.io", "containerd.io", "nri.io", "noderesource.dev"),
    # Networks and meshes, which read pods after they are bound.
    *("cni.cncf.io", "multus-cni.io", "k8s.ovn.org", "projectcalico.org", "cilium.io", "antrea.io"),
    *("istio.io", "linkerd.io", "spidernet.io"),
    # Clouds and identities: the role of kube2iam and kiam, network interfaces, a SPIFFE id.
    *("amazonaws.com", "gke.io", "azure.com", "aliyun.com", "alibabacloud.com", "spiffe.io"),
    # Backups, which run an annotation's command in the pod.
    *("velero.io", "k8up.io"),
)
_PREFIXES: Final = (
    # CRI-O, Kata and others (`io.`), gVisor, crun and its libkrun, runc: systemd's properties of
    # the container's unit, and CRIU's configuration.
    *("io", "dev.gvisor", "run.oci", "krun", "org.systemd", "org.criu"),
)
"""Of keys without a domain."""


def _either(names: Collection[str]) -> str:
    return "|".join(names).replace(".", "[.]")


OF_SYSTEMS: Final = (
    f"k.matches('^(({_either(_PREFIXES)})[.]|([^/]+[.])?({_either(_DOMAINS)})(/|$))')"
)
"""True for an annotation `k` by which a known system may give a pod more, such as `cdi.k8s.io/...`
a device. deploy/README.md has an example of each; no list of them can be complete."""

BINDING_RULE: Final = f"{_NEW}.all(k, !{_OURS})"
"""For Bindings, whose annotations are copied to the pod, unless the scheduler writes."""


def _marked(keys: Keys, *, is_asked: bool) -> Iterator[str]:
    """Yield the expression for each dialect that only counts on pods with its marks."""
    for marked in sorted(keys.marked, key=str):
        marks = _any(
            _one_of(_SCHEDULER, marked.marks.schedulers), _among(_LABELS, marked.marks.labels)
        )
        words = _among(_ANNOTATIONS, marked.asking | marked.others, is_asked=is_asked)
        yield f"({marks}) && {words}"


def _labelled(labels: str) -> str:
    listed = ", ".join(map(quoted, IGNORE_LABELS))
    return f"[{listed}].exists(k, {labels}[?k].orValue('') == '{IGNORE}')"


def _in_limits(names: Collection[str], *, is_asked: bool = False) -> str:
    if not names:
        return ""
    amount = f" && string({_LIMITS}[r]) != '0'" if is_asked else ""
    one = _one_of("r", names)
    one = f"({one}){amount}" if amount else one
    return f"{_CONTAINERS}.exists(c, {_LIMITS}.exists(r, {one}))"


def _among(mapping: str, names: Collection[str], *, is_asked: bool = False) -> str:
    if not names:
        return ""
    # Only zeros request nothing, as in KubeShare.
    amount = f" && !{mapping}[k].matches('^[0.]*$')" if is_asked else ""
    one = _one_of("k", names)
    return f"{mapping}.exists(k, ({one}){amount})" if amount else f"{mapping}.exists(k, {one})"


def _one_of(variable: str, names: Collection[str]) -> str:
    exact = sorted(name for name in names if not name.endswith("*"))
    prefixes = sorted(name[:-1] for name in names if name.endswith("*"))
    listed = ", ".join(map(quoted, exact))
    if not names:
        return ""
    return _any(
        f"{variable} in [{listed}]" if exact else "",
        *(f"{variable}.startsWith({quoted(prefix)})" for prefix in prefixes),
    )


def _any(*parts: str) -> str:
    return " || ".join(part for part in parts if part) or "false"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


OWN_CONDITION: Final = _in_limits(OWN.asking_resources)
"""True for a pod that requests a share with Allotment's own keys."""

OPTED_OUT: Final = _labelled(_LABELS)
"""True for a pod that its author leaves to another system."""
