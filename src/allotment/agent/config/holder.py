# SPDX-License-Identifier: Apache-2.0
"""Chooses the configuration in force: the last good one. Pure.

An unreadable configuration must not take GPUs away from a node: it is a problem, and the previous
one stays. Before the first good one the node offers nothing, because it might hand out whole GPUs
that should be shared.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, cast

import msgspec

from allotment.agent.config.options import option_named
from allotment.agent.config.overlay import given_value, load, overlay
from allotment.agent.config.schema import Config
from allotment.model.errors import AllotError, NotFoundError, UsageError
from allotment.model.structs import replace

CONFIG_LABEL: Final = option_named("node-label").default
EMPTY: Final = ""
"""The empty configuration (NVIDIA's fallback `empty`)."""

_NAMED: Final = "default"
_MOST_SHOWN: Final = 10


class ChoiceRules(msgspec.Struct, frozen=True, kw_only=True):
    """The label that names a configuration, and the choice without it."""

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
            hint=f"{origin} names it; available: {_listed(names)}",
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
        hint=f"label the node with {CONFIG_LABEL}, or name a default; available: {_listed(names)}",
    )


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_MOST_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


class ConfigOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of one change."""

    config: Config | None = None
    """The new configuration; None: the previous one stays in force."""
    problem: AllotError | None = None
    """Why the change has no effect."""
    is_new_problem: bool = False
    """The previous outcome had another problem or none: an event is due."""


class ConfigHolder(msgspec.Struct, kw_only=True):
    """Keeps the latest sources and the configuration in force.

    Call `start` if flags and environment are the only sources, `file_changed` for a file, and for a
    ConfigMap or folder `data_changed` and `label_changed`: both are needed for a choice.
    """

    options: Mapping[str, object] = msgspec.field(default_factory=dict)
    """NVIDIA's flags, by `Option.parameter`, as they were given."""
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    rules: ChoiceRules = msgspec.field(default=ChoiceRules())
    source: str = "ConfigMap"
    """The name of the named configurations in errors: `ConfigMap allotment/configs`."""
    config: Config | None = None
    """The one in force."""
    text: str = ""
    """Its text."""
    problem: AllotError | None = None
    """The problem of the latest change; None: none."""
    _label: str | None = None
    _data: Mapping[str, str] | None = None
    _knows_label: bool = False
    _knows_data: bool = False

    def start(self) -> ConfigOutcome:
        try:
            return self._good(overlay(options=self.options, environment=self.environment))
        except AllotError as error:
            return self.failed(error)

    def file_changed(self, text: str, *, path: str) -> ConfigOutcome:
        """Take a configuration's text; `path` names it in errors."""
        try:
            config = load(text, source=path, options=self.options, environment=self.environment)
        except UsageError as error:
            return self.failed(error)
        return self._good(config, text)

    def data_changed(self, data: Mapping[str, str] | None) -> ConfigOutcome:
        """Take the ConfigMap's data; None: no such ConfigMap exists."""
        self._data, self._knows_data = data, True
        return self._chosen()

    def label_changed(self, label: str | None) -> ConfigOutcome:
        """Take the node's label; None: it has none."""
        self._label, self._knows_label = label, True
        return self._chosen()

    def check_invariants(self) -> None:
        if self.problem is None and self._knows_label and self._knows_data and self.config is None:
            raise AssertionError("both sources known, no problem, and no configuration in force")

    def _chosen(self) -> ConfigOutcome:
        if not (self._knows_label and self._knows_data):
            return ConfigOutcome()
        if self._data is None:
            return self.failed(
                NotFoundError(
                    f"{self.source} does not exist",
                    hint="create it; the present configuration stays in force until then",
                )
            )
        try:
            name = choose(self._data, label=self._label, rules=self.rules)
        except AllotError as error:
            return self.failed(type(error)(f"{self.source}: {error.message}", hint=error.hint))
        if name == EMPTY:
            return self.file_changed("", path=f"{self.source}, empty")
        return self.file_changed(self._data[name], path=f"{self.source}, {name}")

    def _good(self, config: Config, text: str = "") -> ConfigOutcome:
        self.problem = None
        before, self.config, self.text = self.config, config, text
        # The same configuration from another source is no change. Notes differ by the source only.
        if before is not None and (
            replace(before, source=config.source, notes=config.notes) == config
        ):
            return ConfigOutcome()
        return ConfigOutcome(config=config)

    def failed(self, problem: AllotError) -> ConfigOutcome:
        """Take an error in place of a configuration: the one in force stays."""
        previous = self.problem
        self.problem = problem
        is_new = previous is None or (previous.message, previous.hint) != (
            problem.message,
            problem.hint,
        )
        return ConfigOutcome(problem=problem, is_new_problem=is_new)
