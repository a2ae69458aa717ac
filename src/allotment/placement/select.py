# SPDX-License-Identifier: Apache-2.0
"""Which devices a request names: by UUID or its beginning, or by model as people write it."""

import re
from collections.abc import Iterable

from allotment.model.devices import Device
from allotment.model.requests import Request

__all__ = ["is_selected", "unknown_selectors"]

_UUID_PREFIXES = ("gpu-", "mig-")
_WORD = re.compile(r"[a-z0-9]+")


def is_selected(device: Device, request: Request) -> bool:
    """Does the request admit this device? One without selectors admits every device."""
    return not request.selectors or any(_matches(device, one) for one in request.selectors)


def unknown_selectors(devices: Iterable[Device], request: Request) -> list[str]:
    """Return the selectors that name none of the devices."""
    known = list(devices)
    return [one for one in request.selectors if not any(_matches(each, one) for each in known)]


def _matches(device: Device, selector: str) -> bool:
    wanted = selector.strip().lower()
    if wanted.startswith(_UUID_PREFIXES):
        return len(wanted) > len(_UUID_PREFIXES[0]) and device.uuid.lower().startswith(wanted)
    return _matches_model(device.name, wanted)


def _matches_model(name: str, wanted: str) -> bool:
    """Are all words of `wanted` words of the name, or several of its words written together?

    So `a100-80gb` is `NVIDIA A100-SXM4-80GB`, and `rtx4090` is `NVIDIA GeForce RTX 4090`, but `a10`
    is not an A100. That is for people at a machine; a pod's rules are parts of names, as HAMi has
    them and people have written them for it (`constraints.matches_model`).
    """
    words = _WORD.findall(name.lower())
    runs = {
        "".join(words[start:end])
        for start in range(len(words))
        for end in range(start + 1, len(words) + 1)
    }
    asked = _WORD.findall(wanted)
    return bool(asked) and all(word in runs for word in asked)
