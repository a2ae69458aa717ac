# SPDX-License-Identifier: Apache-2.0
"""Names of resources, and patterns of models, by the rules of NVIDIA's plugin."""

import re
from typing import Final

from allotment.model.errors import UsageError

__all__ = ["GPU", "SHARED_SUFFIX", "matches_pattern", "shared_name", "whole_name"]

GPU: Final = "nvidia.com/gpu"
SHARED_SUFFIX: Final = ".shared"

_PREFIX: Final = "nvidia.com/"
_LONGEST: Final = 63
# A DNS subdomain (RFC 1123), as Kubernetes checks it.
_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)


def whole_name(name: str) -> str:
    """Return the resource's name with NVIDIA's prefix; raise `UsageError` with NVIDIA's words."""
    whole = name if name.startswith(_PREFIX) else _PREFIX + name
    if len(whole) > _LONGEST:
        raise UsageError(
            f"fully-qualified resource name must be {_LONGEST} characters or less: {whole}"
        )
    if not _SUBDOMAIN.fullmatch(whole.removeprefix(_PREFIX)):
        raise UsageError(
            f"incorrect format for resource name '{whole}'",
            hint="write small letters, digits, `-` and `.`, like nvidia.com/gpu-small",
        )
    return whole


def shared_name(name: str) -> str:
    """Return what `renameByDefault` makes of a whole name; raise `UsageError`."""
    return whole_name(name + SHARED_SUFFIX)


def matches_pattern(pattern: str, model: str) -> bool:
    """Does a pattern of `resources` match a model? `*` is any text, all else is itself."""
    literals = (re.escape(literal) for literal in pattern.split("*"))
    return re.fullmatch(".*".join(literals), model, re.DOTALL) is not None
