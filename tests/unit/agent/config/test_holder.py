# SPDX-License-Identifier: Apache-2.0
"""The last good configuration stays in force, whatever is heard after it."""

from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from allotment.agent.config.holder import ChoiceRules, ConfigHolder, ConfigOutcome
from allotment.agent.config.overlay import load
from allotment.agent.config.schema import Config
from allotment.model.errors import AllotError, StateError

SHARED = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: %d}]}}"
GOOD = SHARED % 4
BAD = SHARED % 1


def holder(*, default: str = "") -> ConfigHolder:
    return ConfigHolder(source="ConfigMap a/b", rules=ChoiceRules(default=default))


def told(held: ConfigHolder) -> AllotError | None:
    return held.problem


def replicas(config: Config | None) -> int:
    assert config is not None
    return config.time_slicing.resources[0].replicas if config.time_slicing else 1


def test_flags_and_environment_alone() -> None:
    alone = ConfigHolder(environment={"MIG_STRATEGY": "single"})
    config = alone.start().config
    assert config is not None
    assert config is alone.config
    assert config.mig_strategy == "single"
    assert ConfigHolder(options={"mig_strategy": ("x",)}).start().problem is not None


def test_a_file_that_is_broken_leaves_what_was_in_force() -> None:
    held = holder()
    assert replicas(held.file_changed(GOOD, path="/c").config) == 4
    outcome = held.file_changed(BAD, path="/c")
    assert outcome.config is None
    assert outcome.problem is not None
    assert outcome.problem.message.startswith("/c: $.sharing.timeSlicing.resources[0].replicas: ")
    assert replicas(held.config) == 4
    assert told(held) is outcome.problem
    assert held.file_changed(GOOD, path="/c") == ConfigOutcome()
    assert told(held) is None
    assert replicas(held.file_changed(SHARED % 5, path="/c").config) == 5


def test_a_file_that_cannot_be_read_leaves_it_too() -> None:
    held = holder()
    held.file_changed(GOOD, path="/c")
    assert held.failed(StateError("gone")).problem is not None
    assert replicas(held.config) == 4


def test_nothing_is_chosen_before_label_and_data_are_known() -> None:
    held = holder()
    assert held.data_changed({"a": GOOD}) == ConfigOutcome()
    assert held.config is None
    assert replicas(held.label_changed(None).config) == 4
    held = holder()
    assert held.label_changed("a") == ConfigOutcome()
    assert replicas(held.data_changed({"a": GOOD, "b": BAD}).config) == 4


def test_the_label_chooses_and_is_followed() -> None:
    held = holder(default="two")
    held.data_changed({"two": SHARED % 2, "three": SHARED % 3})
    assert replicas(held.label_changed(None).config) == 2
    outcome = held.label_changed("three")
    assert replicas(outcome.config) == 3
    assert outcome.config is not None
    assert outcome.config.source == "ConfigMap a/b, three"
    outcome = held.label_changed("four")
    assert outcome.problem is not None
    assert outcome.problem.message == "ConfigMap a/b: specified config four does not exist"
    assert replicas(held.config) == 3
    assert replicas(held.label_changed("").config) == 2


def test_another_s_configuration_may_be_broken() -> None:
    held = holder(default="mine")
    held.label_changed(None)
    held.data_changed({"mine": GOOD, "other": "version: v1"})
    assert held.data_changed({"mine": GOOD, "other": BAD}) == ConfigOutcome()


def test_a_config_map_that_goes_leaves_what_was_in_force() -> None:
    held = holder()
    held.label_changed(None)
    held.data_changed({"a": GOOD})
    outcome = held.data_changed(None)
    assert outcome.problem is not None
    assert outcome.problem.message == "ConfigMap a/b does not exist"
    assert replicas(held.config) == 4


def test_the_same_from_elsewhere_is_no_change() -> None:
    held = holder()
    text = "flags: {mpsRoot: /x}\n" + GOOD
    held.file_changed(text, path="/kept")
    assert held.text == text
    held.label_changed(None)
    assert held.data_changed({"a": text + "\n"}) == ConfigOutcome()
    assert held.config is not None
    assert held.config.source == "ConfigMap a/b, a"
    assert held.text == text + "\n"


def test_a_problem_is_new_once() -> None:
    held = holder()
    assert held.file_changed(BAD, path="/c").is_new_problem
    assert not held.file_changed(BAD, path="/c").is_new_problem
    assert held.file_changed("x: 1", path="/c").is_new_problem
    held.file_changed(GOOD, path="/c")
    assert held.file_changed(BAD, path="/c").is_new_problem


def test_the_empty_fallback_is_the_defaults() -> None:
    held = ConfigHolder(rules=ChoiceRules(fallbacks=("empty",)))
    held.label_changed(None)
    outcome = held.data_changed({"a": GOOD, "b": GOOD})
    assert outcome.config == Config(source="ConfigMap, empty")


TEXTS = st.sampled_from([GOOD, SHARED % 2, SHARED % 3, BAD, "x: 1", "", "[", "a: 1\na: 2"])
NAMES = st.sampled_from(["a", "b", "default"])


class Holding(RuleBasedStateMachine):
    """Against a model that decides from the last label and data alone."""

    @initialize(default=st.sampled_from(["", "a", "z"]))
    def begin(self, default: str) -> None:
        self.held = holder(default=default)
        self.default = default
        self.label: str | None = None
        self.data: Mapping[str, str] | None = None
        self.heard: set[str] = set()
        self.last_good: Config | None = None

    @rule(label=st.none() | NAMES | st.just(""))
    def hear_of_label(self, label: str | None) -> None:
        self.label = label
        self.heard.add("label")
        self.judge(self.held.label_changed(label))

    @rule(data=st.none() | st.dictionaries(NAMES, TEXTS))
    def hear_of_data(self, data: Mapping[str, str] | None) -> None:
        self.data = data
        self.heard.add("data")
        self.judge(self.held.data_changed(data))

    def judge(self, outcome: ConfigOutcome) -> None:
        if len(self.heard) < 2:
            assert outcome == ConfigOutcome()
            return
        good = self.good()
        assert (outcome.problem is not None) == (good is None)
        if good is not None:
            changed = self.last_good is None or good.time_slicing != self.last_good.time_slicing
            assert (outcome.config is not None) == changed
            self.last_good = good
        else:
            assert outcome.config is None

    def good(self) -> Config | None:
        names = self.data or {}
        fallback = "default" if "default" in names else next(iter(names), "")
        only = fallback if fallback == "default" or len(names) == 1 else ""
        name = self.label or self.default or only
        if name not in names:
            return None
        try:
            return load(names[name], source="model")
        except AllotError:
            return None

    @invariant()
    def what_is_in_force_was_good(self) -> None:
        if not hasattr(self, "held"):
            return
        self.held.check_invariants()
        if self.last_good is None:
            assert self.held.config is None
        else:
            assert self.held.config is not None
            assert self.held.config.time_slicing == self.last_good.time_slicing


TestHolding = Holding.TestCase
TestHolding.settings = settings(stateful_step_count=20)  # each step reads YAML
