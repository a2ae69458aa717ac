# SPDX-License-Identifier: Apache-2.0
"""Which of many named configurations is a node's: by NVIDIA's rules, and with NVIDIA's words.

Its label names one; a node without the label has the default; where there is no default either, the
fallbacks are tried in their order. An empty label is none, as in NVIDIA's config-manager.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from allotment.agent.config.options import option_named
from allotment.agent.config.overlay import given_value
from allotment.model.errors import NotFoundError, UsageError

__all__ = ["CONFIG_LABEL", "EMPTY", "ChoiceRules", "choice_rules", "choose"]

CONFIG_LABEL: Final = option_named("node-label").default
EMPTY: Final = ""
"""Stands for the configuration that says nothing (NVIDIA's fallback `empty`)."""

_NAMED: Final = "default"
_MOST_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRules:
    """What decides where the label does not, and which label that is."""

    default: str = ""
    fallbacks: tuple[str, ...] = ("named", "single")
    label: str = CONFIG_LABEL


def choice_rules(
    *, default: str | None, options: Mapping[str, object], environment: Mapping[str, str]
) -> ChoiceRules:
    """Take the rules from flags and environment. Raises `UsageError`.

    `default` is `--default-config`, if it was given; its variable is `DEFAULT_CONFIG`.
    """
    fallbacks = given_value("fallback-strategies", options=options, environment=environment)
    label = given_value("node-label", options=options, environment=environment)
    if not label:
        raise UsageError("invalid <node-label>: must not be empty string")
    return ChoiceRules(
        default=environment.get("DEFAULT_CONFIG", "") if default is None else default,
        fallbacks=cast("tuple[str, ...]", fallbacks),
        label=str(label),
    )


def choose(names: Collection[str], *, label: str | None, rules: ChoiceRules) -> str:
    """Return the name of the node's configuration, or `EMPTY`.

    Raises `NotFoundError` where there is none of that name, or none at all.
    """
    if not names:
        raise NotFoundError(
            "no configuration files available",
            hint="add one to the ConfigMap's data: a name, and the file's text",
        )
    wanted = label or rules.default
    if not wanted:
        return _fallback(names, rules.fallbacks)
    if wanted not in names:
        origin = f"the node's label {rules.label}" if label else "--default-config"
        raise NotFoundError(
            f"specified config {wanted} does not exist",
            hint=f"{origin} names it; there is {_listed(names)}",
        )
    return wanted


def _fallback(names: Collection[str], fallbacks: Sequence[str]) -> str:
    for fallback in fallbacks:
        if fallback == "named" and _NAMED in names:
            return _NAMED
        if fallback == "single" and len(names) == 1:
            return next(iter(names))
        if fallback == "empty":
            return EMPTY
    raise NotFoundError(
        "no config was set, no default was provided, and all fallbacks failed",
        hint=f"label the node with {CONFIG_LABEL}, or name a default: there is {_listed(names)}",
    )


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_MOST_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
