# SPDX-License-Identifier: Apache-2.0
"""What a GPU can be cut into whose driver does not say so now.

Drivers up to R535 tell a GPU's profiles while MIG is on, and nothing before. A scheduler has to
know before, so this is what the table of models has for one of that name and memory. It is never
asked where a driver answers: that may be of a later date, and has the last word in any case, since
what is cut is cut by its profiles.
"""

from functools import lru_cache

from allotment.devices.models import MODELS
from allotment.model.devices import Device
from allotment.model.mig import MigProfile

__all__ = ["tabled_profiles"]

_MIB = 1 << 20
_LIKE = 0.02
"""How far a GPU's memory may be from its model's: firmware keeps more or less of it."""


def tabled_profiles(device: Device) -> tuple[MigProfile, ...]:
    """Return what GPUs of this name and memory can be cut into; nothing: that is not known."""
    return _of(device.name, device.memory_bytes)


@lru_cache(maxsize=64)
def _of(name: str, memory_bytes: int) -> tuple[MigProfile, ...]:
    for model in MODELS.values():
        if model.mig is None or model.name != name:
            continue
        if abs(model.memory_mib * _MIB - memory_bytes) > _LIKE * memory_bytes:
            continue
        shapes = sorted(model.mig.shapes, key=lambda each: each.place)
        return tuple(each.profile_on(model.memory_mib) for each in shapes)
    return ()
