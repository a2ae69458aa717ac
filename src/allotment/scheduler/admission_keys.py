# SPDX-License-Identifier: Apache-2.0
"""By which keys a pod is known to be somebody's who wants a part of a GPU.

The API server asks the webhook about pods with one of these, and about no other: a webhook that is
away is nobody's trouble who wants no GPU. So the list is a contract with the API server, in CEL
(`admission_rules`), and with the dialects, which may recognise no pod that is not on it: a test
holds each of them to that.

A key that ends with `*` stands for all that begin so.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Final

from allotment.dialects.annotations import PREFIX
from allotment.dialects.foreign import ForeignPod

__all__ = ["KEYS", "OWN", "TRANSLATED", "Keys", "all_keys", "matcher"]

TRANSLATED: Final = "webhook.allotment.dev/translated"
"""What a translation was made of, as a digest: who changes that afterwards, or copies a pod and
changes the copy, would get what it was before, without a word."""

_Names = frozenset[str]
_NONE: Final[_Names] = frozenset()


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

    @property
    def resources(self) -> _Names:
        """All of its resources."""
        return self.asking_resources | self.other_resources

    @property
    def annotations(self) -> _Names:
        """All of its annotations."""
        return self.asking_annotations | self.other_annotations

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
        )


def matcher(names: Collection[str]) -> Callable[[str], bool]:
    """Return what tells whether a key is one of these."""
    exact = frozenset(each for each in names if not each.endswith("*"))
    prefixes = tuple(each[:-1] for each in names if each.endswith("*"))
    return lambda key: key in exact or key.startswith(prefixes)


def all_keys(dialects: Collection[str], *, more: Keys | None = None) -> Keys:
    """Return the keys of Allotment's own dialect, of these by their short names, and of `more`.

    `more` has what configuration renames.
    """
    found = OWN if more is None else OWN | more
    for name in sorted(dialects):
        found |= KEYS.get(name, Keys())
    return found


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
        asking_resources=_under("nvidia.com", "gpumem", "gpumem-percentage", "gpucores"),
        other_resources=_under("nvidia.com", "priority"),
        other_annotations=_under(
            "nvidia.com",
            *("use-gputype", "nouse-gputype", "use-gpuuuid", "nouse-gpuuuid"),
            *("numa-bind", "vgpu-mode"),
        )
        | _under(
            "hami.io", "node-scheduler-policy", "gpu-scheduler-policy", "device-scoring-weights"
        ),
    ),
    "volcano": Keys(
        asking_resources=_under(
            "volcano.sh",
            *("vgpu-number", "vgpu-memory", "vgpu-memory-percentage", "vgpu-cores"),
            *("gpu-memory", "gpu-number"),
        ),
        other_annotations=_under(
            "volcano.sh",
            *("vgpu-mode", "vgpu-use-gpuuuid", "vgpu-nouse-gpuuuid", "vgpu-podgroup-policy"),
        ),
    ),
    # What the kubelet gives by itself needs no translation, and is not refused where there is none.
    "nvidia": Keys(other_resources=frozenset({"nvidia.com/mig-*"})),
    "deepomatic": Keys(asking_resources=_under("deepomatic.com", "shared-gpu")),
    "aliyun": Keys(
        asking_resources=_under("aliyun.com", "gpu-mem", "gpu-core.percentage"),
        other_resources=_under("aliyun.com", "gpu-count"),
        other_labels=_under("aliyun.com", "gpu-count"),
    ),
    "tencent": Keys(
        asking_resources=_under("tencent.com", "vcuda-core", "vcuda-memory")
        | _under("tke.cloud.tencent.com", "qgpu-core", "qgpu-memory", "qgpu-core-greedy"),
        other_annotations=_under("tencent.com", "vcuda-core-limit"),
    ),
    "kubeshare": Keys(
        asking_annotations=_under("kubeshare", "gpu_request", "gpu_limit", "gpu_mem"),
        asking_labels=_under("sharedgpu", "gpu_request", "gpu_limit", "gpu_mem"),
        other_annotations=_under(
            "kubeshare", "GPUID", "sched_affinity", "sched_anti-affinity", "sched_exclusion"
        ),
        other_labels=_under(
            "sharedgpu",
            *("gpu_model", "priority", "group_name", "group_headcount", "group_threshold"),
        ),
    ),
    "kai": Keys(
        asking_annotations=frozenset({"gpu-fraction", "gpu-memory"}),
        other_annotations=frozenset(
            {
                *("gpu-fraction-num-devices", "gpu-fraction-container-name", "mps"),
                "nvidia.com/container.*",
            }
        ),
    ),
}
"""By the short names of the dialects, as those systems' own documentation names them."""
