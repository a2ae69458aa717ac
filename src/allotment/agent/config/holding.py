# SPDX-License-Identifier: Apache-2.0
"""The configuration in force: the last good one, whatever comes after it.

A configuration that cannot be read, or that nobody can choose, must not take GPUs away from a node
that has them: it is told as a problem, and what was in force stays. Until there has been a good one
there is none, and the node offers nothing: guessing that it is not shared would hand out whole GPUs
that its owner meant to share.

Pure: the caller tells what was heard, and does with the outcome what it wants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from allotment.agent.config.choosing import EMPTY, ChoiceRules, choose
from allotment.agent.config.effective import Config
from allotment.agent.config.overlay import load, overlay
from allotment.model.errors import AllotError, NotFoundError, UsageError

__all__ = ["ConfigHolder", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of something that was heard."""

    config: Config | None = None
    """One to bring into force; None: what was in force stays."""
    problem: AllotError | None = None
    """Why what was heard could not be brought into force."""
    is_new_problem: bool = False
    """It was not told by the outcome before: an event is due."""


@dataclass(slots=True, kw_only=True)
class ConfigHolder:
    """Keeps what was heard last and what is in force.

    Of a node without a file and without a ConfigMap, flags and environment are all of it: call
    `start`. With a file, call `file_changed`; with a ConfigMap (or a folder), `data_changed` and
    `label_changed`, in any order: nothing is chosen before both are known.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    """NVIDIA's flags, by `Option.parameter`, as they were given."""
    environment: Mapping[str, str] = field(default_factory=dict)
    rules: ChoiceRules = field(default=ChoiceRules())
    source: str = "ConfigMap"
    """What the named configurations are called in errors: `ConfigMap allotment/configs`."""
    config: Config | None = field(default=None, init=False)
    """The one in force."""
    text: str = field(default="", init=False)
    """What it was read from."""
    problem: AllotError | None = field(default=None, init=False)
    """What is wrong with what was heard last; None: it is in force."""
    _label: str | None = field(default=None, init=False)
    _data: Mapping[str, str] | None = field(default=None, init=False)
    _knows_label: bool = field(default=False, init=False)
    _knows_data: bool = field(default=False, init=False)

    def start(self) -> Outcome:
        """Bring flags and environment alone into force."""
        try:
            return self._good(overlay(options=self.options, environment=self.environment))
        except AllotError as error:
            return self._bad(error)

    def file_changed(self, text: str, *, path: str) -> Outcome:
        """Hear of the text of `--config-file`."""
        return self._heard(text, path)

    def failed(self, problem: AllotError) -> Outcome:
        """Hear that a file or the ConfigMap cannot be read."""
        return self._bad(problem)

    def data_changed(self, data: Mapping[str, str] | None) -> Outcome:
        """Hear of the ConfigMap's data; None: there is no such ConfigMap."""
        self._data, self._knows_data = data, True
        return self._chosen()

    def label_changed(self, label: str | None) -> Outcome:
        """Hear of the node's label; None: it has none."""
        self._label, self._knows_label = label, True
        return self._chosen()

    def check_invariants(self) -> None:
        """Raise `AssertionError` where the holder contradicts itself."""
        if self.problem is None and self._knows_label and self._knows_data and self.config is None:
            raise AssertionError("all was heard, nothing is wrong, and nothing is in force")

    def _chosen(self) -> Outcome:
        if not (self._knows_label and self._knows_data):
            return Outcome()
        if self._data is None:
            return self._bad(
                NotFoundError(
                    f"{self.source} does not exist",
                    hint="create it; what is in force stays so until then",
                )
            )
        try:
            name = choose(self._data, label=self._label, rules=self.rules)
        except AllotError as error:
            return self._bad(type(error)(f"{self.source}: {error.message}", hint=error.hint))
        if name == EMPTY:
            return self._heard("", f"{self.source}, empty")
        return self._heard(self._data[name], f"{self.source}, {name}")

    def _heard(self, text: str, source: str) -> Outcome:
        try:
            config = load(text, source=source, options=self.options, environment=self.environment)
        except UsageError as error:
            return self._bad(error)
        return self._good(config, text)

    def _good(self, config: Config, text: str = "") -> Outcome:
        self.problem = None
        before, self.config, self.text = self.config, config, text
        # The same from elsewhere changes nothing: a node may move from a file to a ConfigMap. The
        # notes name the source; what they tell is in the text, or has no effect.
        if before is not None and (
            replace(before, source=config.source, notes=config.notes) == config
        ):
            return Outcome()
        return Outcome(config=config)

    def _bad(self, problem: AllotError) -> Outcome:
        said = self.problem
        self.problem = problem
        is_new = said is None or (said.message, said.hint) != (problem.message, problem.hint)
        return Outcome(problem=problem, is_new_problem=is_new)
