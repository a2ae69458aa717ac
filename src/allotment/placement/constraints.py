# SPDX-License-Identifier: Apache-2.0
"""Which devices may serve a request at all, and beside whom.

Tags are as KubeShare 1.0 has them: each of a share's three tags is compared with the same tag of
the shares that are on a device. An affinity tag wants a device that a share with it is on, else an
idle one; which of both is taken is a matter of order, so nothing is refused for it.
"""

from collections.abc import Mapping
from functools import lru_cache

from allotment.model.devices import Device
from allotment.model.placements import DeviceState
from allotment.model.requests import Constraints, ModelRule

__all__ = [
    "NVLINK",
    "OF_OTHER_AFFINITY",
    "OF_OTHER_EXCLUSION",
    "OF_OTHER_MODEL",
    "OF_OTHER_UUID",
    "OF_SAME_ANTI_AFFINITY",
    "Links",
    "are_linked",
    "exclusion_of",
    "keeps_company",
    "link_score",
    "matches_model",
    "unsuited",
]

OF_OTHER_MODEL = "not of a model that was asked for"
OF_OTHER_UUID = "not one of the GPUs that were asked for"
OF_OTHER_AFFINITY = "neither idle nor with a share of its affinity tag"
OF_SAME_ANTI_AFFINITY = "a share with its anti-affinity tag is on it"
OF_OTHER_EXCLUSION = "a share with another exclusion tag is on it"

NVLINK = 100
"""The least score of two devices that an NVLink joins; PCIe has 10 to 60."""

Links = Mapping[tuple[str, str], int]
"""Scores of pairs of devices, by UUIDs in the order of the text."""


def unsuited(device: Device, constraints: Constraints) -> str:
    """Say why a device never serves such a request, whoever is on it; empty: it may."""
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
    """Does the rule mean the model of this name?

    Any part of the name does, also of a word: pods bring rules that were written for HAMi, which
    compares so (`a10` is an A100 there). `select` compares words.
    """
    wanted, there = _plain(rule.text), _plain(name)
    return wanted == there if rule.is_exact else wanted in there


def _plain(name: str) -> str:
    return name.strip().casefold().replace(" ", "-").replace("_", "-")


def keeps_company(state: DeviceState, constraints: Constraints) -> str:
    """Say why the shares that are on a device keep such a request from it; empty: they do not."""
    if not state.shares:
        return ""
    if constraints.affinity and constraints.affinity not in state.affinities:
        return OF_OTHER_AFFINITY
    if constraints.anti_affinity and constraints.anti_affinity in state.anti_affinities:
        return OF_SAME_ANTI_AFFINITY
    if state.exclusions - {exclusion_of(constraints.exclusion)}:
        return OF_OTHER_EXCLUSION
    return ""


def exclusion_of(tag: str | None) -> str:
    """Return the tag that stands for this one: none at all and an empty one are the same."""
    return tag or ""


def link_score(links: Links, one: str, other: str) -> int:
    """Return how near two devices are; 0 where that is not known."""
    return links.get((one, other) if one < other else (other, one), 0)


def are_linked(links: Links, one: str, other: str) -> bool:
    """Are two devices joined by NVLink?"""
    return link_score(links, one, other) >= NVLINK
