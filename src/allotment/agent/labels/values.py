# SPDX-License-Identifier: Apache-2.0
"""What may stand in a label: NVIDIA's way to write a name, and Kubernetes' rules.

NVIDIA's gpu-feature-discovery cleans names but not what comes of them, and a label that Kubernetes
refuses takes all the others with it. So labels pass through `fitting` last: it changes nothing that
Kubernetes takes, and tells of what it changed.
"""

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["MAX_LABEL", "fitting", "sanitised"]

MAX_LABEL: Final = 63
"""Characters of a value, and of a key after its `/` (apimachinery pkg/util/validation)."""

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9\-_. ]")
_NOT_IN_VALUES: Final = re.compile(r"[^A-Za-z0-9\-_.]+")
_EDGES: Final = "-_."
_PREFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_PREFIX: Final = 253
_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def sanitised(text: str) -> str:
    """Write a model's or machine's name as NVIDIA does: `Tesla T4` becomes `Tesla-T4`.

    Characters that labels cannot have are left out, spaces become one dash (k8s-device-plugin
    internal/lm/resource.go, v0.20).
    """
    return "-".join(_NOT_IN_NAMES.sub("", text).split())


def fitting(labels: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the labels as Kubernetes takes them, in order of their keys, and what had to change.

    A value is cut and cleaned; a label whose key cannot be one is left out.
    """
    found: dict[str, str] = {}
    notes: list[str] = []
    for key, value in sorted(labels.items()):
        if not _is_key(key):
            notes.append(f"{key!r} cannot be a label's key: the label is left out")
            continue
        found[key] = _value(value)
        if found[key] != value:
            notes.append(f"{key}: {value!r} cannot be a label's value: {found[key]!r} is used")
    return found, tuple(notes)


def _value(value: str) -> str:
    return _NOT_IN_VALUES.sub("-", value).strip(_EDGES)[:MAX_LABEL].rstrip(_EDGES)


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix)):
        return False
    return len(name) <= MAX_LABEL and _NAME.fullmatch(name) is not None
