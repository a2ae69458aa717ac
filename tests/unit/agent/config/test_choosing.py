# SPDX-License-Identifier: Apache-2.0
"""A node's configuration is chosen by NVIDIA's rules."""

import pytest

from allotment.agent.config.holder import EMPTY, ChoiceRules, choice_rules, choose
from allotment.model.errors import NotFoundError, UsageError


@pytest.mark.parametrize(
    ("names", "label", "default", "fallbacks", "chosen"),
    [
        ("a b", "a", "", "", "a"),
        ("a b", "a", "b", "", "a"),
        ("a b", None, "b", "", "b"),
        ("a b", "", "b", "", "b"),
        ("a default", None, "", "named single", "default"),
        ("a", None, "", "named single", "a"),
        ("a b", None, "", "named single empty", EMPTY),
        ("a", None, "", "empty single", EMPTY),
    ],
)
def test_chosen(names: str, label: str | None, default: str, fallbacks: str, chosen: str) -> None:
    rules = ChoiceRules(default=default, fallbacks=tuple(fallbacks.split()))
    assert choose(names.split(), label=label, rules=rules) == chosen


@pytest.mark.parametrize(
    ("names", "label", "default", "words", "hint"),
    [
        ("", "a", "", "no configuration files available", "ConfigMap"),
        ("b a", "c", "a", "specified config c does not exist", "available: a, b"),
        ("a b", None, "c", "specified config c does not exist", "--default-config"),
        (
            "a b",
            None,
            "",
            "no config was set, no default was provided, and all fallbacks failed",
            "available: a, b",
        ),
    ],
)
def test_refused(names: str, label: str | None, default: str, words: str, hint: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        choose(names.split(), label=label, rules=ChoiceRules(default=default))
    assert words in caught.value.message
    assert hint in (caught.value.hint or "")


def test_many_names_are_not_all_told() -> None:
    names = [f"c{number:02}" for number in range(40)]
    with pytest.raises(NotFoundError) as caught:
        choose(names, label="x", rules=ChoiceRules())
    assert (caught.value.hint or "").endswith("c09 and 30 more")


def test_rules_come_from_flags_and_environment() -> None:
    environment = {
        "DEFAULT_CONFIG": "d",
        "NODE_LABEL": "example.com/config",
        "FALLBACK_STRATEGIES": "single, empty",
    }
    assert choice_rules(default=None, options={}, environment={}) == ChoiceRules()
    assert choice_rules(default=None, options={}, environment=environment) == ChoiceRules(
        default="d", fallbacks=("single", "empty"), label="example.com/config"
    )
    assert choice_rules(default="e", options={}, environment=environment).default == "e"
    with pytest.raises(UsageError, match="unknown fallback strategy: x"):
        choice_rules(default=None, options={"fallback_strategies": ("x",)}, environment={})
    with pytest.raises(UsageError, match="must not be empty"):
        choice_rules(default=None, options={"node_label": ("",)}, environment={})
