# SPDX-License-Identifier: Apache-2.0
"""Which devices may serve a request at all, and together with which shares.

Tags follow KubeShare 1.0: each of a share's three tags is compared with the same tag of the
device's shares. An affinity tag selects a device with that tag, or an idle one; this only orders
devices and refuses none.
"""

from collections.abc import Mapping
from functools import lru_cache

from allotment.model.devices import Device
from allotment.model.placements import DeviceState
from allotment.model.requests import Constraints, ModelRule

OF_OTHER_MODEL = "not one of the requested models"
OF_OTHER_UUID = "not one of the requested GPUs"
OF_OTHER_AFFINITY = "neither idle nor with a share of its affinity tag"
OF_SAME_ANTI_AFFINITY = "a share with its anti-affinity tag is on it"
OF_OTHER_EXCLUSION = "a share with another exclusion tag is on it"

NVLINK = 100
"""The lowest score of a pair joined by NVLink; PCIe has 10 to 60."""

Links = Mapping[tuple[str, str], int]
"""Scores of pairs of devices, by UUIDs in text order."""


def unsuited(device: Device, constraints: Constraints) -> str:
    """Why a device can never serve such a request; empty: it may."""
    if constraints.uuids and device.uuid not in constraints.uuids:
        return OF_OTHER_UUID
    if device.uuid in constraints.not_uuids:
        return OF_OTHER_UUID
    if constraints.models or constraints.not_models:
        return _of_model(device.name, constraints.models, constraints.not_models)
    return ""


@lru_cache(maxsize=1024)
def _of_model(name: str, models: tuple[ModelRule, ...], not_models: tuple[ModelRule, ...]) -> str:
    is_wanted = not models or any(matches_model(name, rule) for rule in models)
    is_refused = any(matches_model(name, rule) for rule in not_models)
    return "" if is_wanted and not is_refused else OF_OTHER_MODEL


def matches_model(name: str, rule: ModelRule) -> bool:
    """True if the rule matches this model name.

    Any substring matches, even within a word: pods bring rules written for HAMi, where `a10`
    matches an A100. `select` compares words.
    """
    wanted, there = _plain(rule.text), _plain(name)
    return wanted == there if rule.is_exact else wanted in there


def _plain(name: str) -> str:
    return name.strip().casefold().replace(" ", "-").replace("_", "-")


def keeps_company(state: DeviceState, constraints: Constraints) -> str:
    """Why the device's shares exclude such a request; empty: they do not."""
    if not state.shares:
        return ""
    if constraints.affinity and constraints.affinity not in state.affinities:
        return OF_OTHER_AFFINITY
    if constraints.anti_affinity and constraints.anti_affinity in state.anti_affinities:
        return OF_SAME_ANTI_AFFINITY
    if state.exclusions - {constraints.exclusion or ""}:
        return OF_OTHER_EXCLUSION
    return ""


def link_score(links: Links, one: str, other: str) -> int:
    """Proximity of two devices; 0: unknown."""
    return links.get((one, other) if one < other else (other, one), 0)


def may_join(constraints: Constraints, links: Links, one: Device, other: Device) -> bool:
    """True if one container may use both devices."""
    if constraints.same_numa and one.numa_node != other.numa_node:
        return False
    return not constraints.needs_nvlink or link_score(links, one.uuid, other.uuid) >= NVLINK
