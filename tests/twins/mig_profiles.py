# SPDX-License-Identifier: Apache-2.0
"""Profiles of real GPUs for tests of planners: those that simulated drivers answer with.

The planner itself takes whatever a driver reports and knows no model.
"""

from allotment.devices import geometries
from allotment.devices.geometries import Geometry
from allotment.model.mig import MigHold, MigLayout, MigProfile, MigSlice

MODELS: dict[str, tuple[Geometry, int]] = {
    "A100-40GB": (geometries.A100_40GB, 40_960),
    "A100-80GB": (geometries.A100_80GB, 81_920),
    "H100-80GB": (geometries.H100_80GB, 81_559),
    "H100-94GB": (geometries.H100_94GB, 95_830),
    "H100-96GB": (geometries.H100_96GB, 97_871),
    "H200": (geometries.H200, 143_771),
    "B200": (geometries.B200, 183_359),
    "A30": (geometries.A30, 24_576),
    "RTX PRO 6000": (geometries.RTX_PRO_6000, 97_887),
}
"""With each GPU's memory in MiB."""


def profiles(model: str, *without: str) -> tuple[MigProfile, ...]:
    """Return a model's profiles but for those with these names."""
    geometry, memory_mib = MODELS[model]
    every = (shape.profile_on(memory_mib) for shape in geometry.shapes)
    return tuple(each for each in every if each.name not in without)


def piece(
    model: str,
    name: str,
    start: int,
    *,
    hold: MigHold = MigHold.USED,
    holder: str = "",
) -> MigSlice:
    """Return a slice of a model, by its profile's name."""
    profile = next(each for each in profiles(model) if each.name == name)
    return MigSlice(
        profile=profile.number, start=start, size=profile.size, hold=hold, holder=holder
    )


def layout(model: str, *slices: MigSlice, gpu: str = "GPU-0", is_enabled: bool = True) -> MigLayout:
    """Return a GPU of a model with these slices."""
    return MigLayout(gpu=gpu, profiles=profiles(model), slices=slices, is_enabled=is_enabled)
