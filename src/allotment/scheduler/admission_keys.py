# SPDX-License-Identifier: Apache-2.0
"""By which keys a pod is known to be somebody's who wants a part of a GPU.

The API server asks the webhook about pods with one of these, and about no other: a webhook that is
away is nobody's trouble who wants no GPU. So the list is a contract with the API server, in CEL
(`admission_rules`), and with the dialects, which may recognise no pod that is not on it: a test
holds each of them to that.

A key that ends with `*` stands for all that begin so, one that begins with it for all that end so.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Final

from allotment.dialects.annotations import PREFIX
from allotment.dialects.foreign import ForeignContainer, ForeignDialect, ForeignPod, Marks

__all__ = [
    "KEYS",
    "OWN",
    "TRANSLATED",
    "Keys",
    "MarkedKeys",
    "all_keys",
    "keys_of",
    "matcher",
]

TRANSLATED: Final = "webhook.allotment.dev/translated"
"""What a translation was made of, as a digest: who changes that afterwards, or copies a pod and
changes the copy, would get what it was before, without a word."""

_Names = frozenset[str]
_NONE: Final[_Names] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedKeys:
    """Annotations with names that anybody may use: a dialect's on pods with its marks alone."""

    marks: Marks
    asking: _Names
    others: _Names = field(default=_NONE)

    def match(self, pod: ForeignPod) -> bool:
        """Whether a pod has one of them, and a mark."""
        return self.marks.are_on(pod) and any(
            map(matcher(self.asking | self.others), pod.annotations)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What of a pod is one dialect's.

    What asks for a share by itself has to be translated, or the pod would run without what it asks
    for; the rest says something more about such a share, or about whole GPUs.
    """

    asking_resources: _Names = field(default=_NONE)
    asking_annotations: _Names = field(default=_NONE)
    asking_labels: _Names = field(default=_NONE)
    other_resources: _Names = field(default=_NONE)
    other_annotations: _Names = field(default=_NONE)
    other_labels: _Names = field(default=_NONE)
    schedulers: _Names = field(default=_NONE)
    """Whoever names one of these means that system, by whatever else it asks."""
    marked: frozenset[MarkedKeys] = field(default=frozenset())
    records: _Names = field(default=_NONE)
    """Annotations in which a system says on which GPUs it has put a pod."""

    @property
    def resources(self) -> _Names:
        """All of its resources."""
        return self.asking_resources | self.other_resources

    @property
    def annotations(self) -> _Names:
        """All of its annotations."""
        return self.asking_annotations | self.other_annotations

    @property
    def marked_annotations(self) -> _Names:
        """Those that are a dialect's on some pods alone."""
        return frozenset().union(*(each.asking | each.others for each in self.marked))

    @property
    def labels(self) -> _Names:
        """All of its labels."""
        return self.asking_labels | self.other_labels

    @property
    def asking(self) -> "Keys":
        """Those alone that ask for a share by themselves."""
        return Keys(
            asking_resources=self.asking_resources,
            asking_annotations=self.asking_annotations,
            asking_labels=self.asking_labels,
            marked=frozenset(replace(each, others=_NONE) for each in self.marked),
        )

    def __or__(self, other: "Keys") -> "Keys":
        """Return the keys of both."""
        return Keys(
            **{
                each.name: getattr(self, each.name) | getattr(other, each.name)
                for each in fields(self)
            }
        )

    def match(self, pod: ForeignPod) -> bool:
        """Whether a pod has one of them: what the API server will decide by the same list."""
        resources = chain.from_iterable(each.limits for each in pod.containers)
        return (
            any(map(matcher(self.resources), resources))
            or any(map(matcher(self.annotations), pod.annotations))
            or any(map(matcher(self.labels), pod.labels))
            or pod.scheduler in self.schedulers
            or any(each.match(pod) for each in self.marked)
        )


def matcher(names: Collection[str]) -> Callable[[str], bool]:
    """Return what tells whether a key is one of these."""
    exact = frozenset(each for each in names if "*" not in each)
    prefixes = tuple(each[:-1] for each in names if each.endswith("*"))
    suffixes = tuple(each[1:] for each in names if each.startswith("*"))
    return lambda key: key in exact or key.startswith(prefixes) or key.endswith(suffixes)


def all_keys(dialects: Iterable[ForeignDialect], *, more: Keys | None = None) -> Keys:
    """Return the keys of Allotment's own dialect, of these, and `more` of theirs."""
    found = OWN if more is None else OWN | more
    for dialect in dialects:
        found |= keys_of(dialect)
    return found


def keys_of(dialect: ForeignDialect) -> Keys:
    """Return a dialect's keys: those that it knows by itself, as configured, and the table's.

    What asks for a share is found out by asking the dialect about a pod with nothing else.
    """
    found = KEYS.get(dialect.name, Keys())
    records = frozenset[str](getattr(dialect, "records", ()))
    resources = (
        each
        for each in getattr(dialect, "resources", ())
        if _asks(
            dialect,
            ForeignPod(namespace="", name="", containers=_having(_EXAMPLES.get(each, each))),
        )
    )
    annotations = frozenset[str](getattr(dialect, "annotations", ()))
    labels = frozenset[str](getattr(dialect, "labels", ()))
    marks: Marks | None = getattr(dialect, "marks", None)
    asking_annotations = frozenset(
        each for each in annotations if _asks(dialect, _pod_with(annotation=each, marks=marks))
    )
    if marks is not None:
        others = annotations - asking_annotations
        marked = MarkedKeys(marks=marks, asking=asking_annotations, others=others)
        return found | Keys(marked=frozenset({marked}), records=records)
    return found | Keys(
        asking_resources=frozenset(resources),
        asking_annotations=asking_annotations,
        asking_labels=frozenset(each for each in labels if _asks(dialect, _pod_with(label=each))),
        other_annotations=annotations,
        other_labels=labels,
        records=records,
    )


_EXAMPLES: Final[Mapping[str, str]] = {"nvidia.com/mig-*": "nvidia.com/mig-1g.5gb"}
"""One of those that a dialect's key stands for."""


def _pod_with(*, annotation: str = "", label: str = "", marks: Marks | None = None) -> ForeignPod:
    """Return a pod that has one key, and the marks by which it counts."""
    known = marks or Marks()
    return ForeignPod(
        namespace="",
        name="",
        annotations={annotation: "1"} if annotation else {},
        labels={each: "1" for each in (label, *known.labels) if each},
        containers=_having(""),
        scheduler=next(iter(sorted(known.schedulers)), ""),
    )


def _having(resource: str) -> tuple[ForeignContainer, ...]:
    limits = {resource: "1"} if resource else {}
    return (ForeignContainer(name="c", limits=limits, requests=limits),)


def _asks(dialect: ForeignDialect, pod: ForeignPod) -> bool:
    stays: Callable[[ForeignPod], bool] = getattr(dialect, "stays", lambda _: False)
    return bool(dialect.recognises(pod)) and not stays(pod)


def _under(domain: str, *names: str) -> _Names:
    return frozenset(f"{domain}/{name}" for name in names)


OWN: Final = Keys(
    asking_resources=_under(PREFIX[:-1], "gpu", "gpu-memory", "gpu-compute"),
    # All of them: one that is misspelt is to be told, and not passed over.
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
    # What the kubelet gives by itself needs no translation, and is not refused where there is none.
    "nvidia": Keys(other_resources=frozenset({"nvidia.com/mig-*"})),
    "aliyun": Keys(other_labels=_under("aliyun.com", "gpu-count")),
    "tencent": Keys(other_annotations=_under("tencent.com", "vcuda-core-limit")),
    "qgpu": Keys(other_annotations=_under("tke.cloud.tencent.com", "app-class")),
}
"""By the short names of the dialects: what says more about a share, and what no list can name."""
