# SPDX-License-Identifier: Apache-2.0
"""`allot run --mode`: one or several, as it is typed and completed."""

from __future__ import annotations

from typing import Any, cast

import click
import pytest
from click.testing import CliRunner

from allotment.cli import main
from allotment.cli.run import command
from allotment.model.modes import PART_MODES, TRAITS, Traits


def _option() -> click.Parameter:
    return next(each for each in command.params if each.name == "modes")


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("soft", ("soft",)),
        ("mig,soft", ("mig", "soft")),
        ("mps, mig ,soft", ("mps", "mig", "soft")),
    ],
)
def test_modes_are_read_in_their_order(text: str, modes: tuple[str, ...]) -> None:
    context = click.Context(command)
    assert _option().type_cast_value(context, text) == modes


@pytest.mark.parametrize("text", ["", "hard", "soft,", "soft,soft", "exclusive"])
def test_what_is_no_list_of_modes_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        _option().type_cast_value(click.Context(command), text)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("m", [mode for mode in PART_MODES if mode.startswith("m")]),
        ("mig,s", [f"mig,{mode}" for mode in PART_MODES if mode.startswith("s")]),
        ("mig,", [f"mig,{mode}" for mode in PART_MODES if mode != "mig"]),
        ("-", []),
    ],
)
def test_the_last_mode_is_completed(typed: str, completed: list[str]) -> None:
    found = _option().shell_complete(click.Context(command), typed)
    assert [each.value for each in found] == completed


@pytest.mark.parametrize(
    ("traits", "options", "named"),
    [
        (Traits(), ("--compute", "30"), "--compute"),
        (Traits(takes_turns=True, ignores=frozenset({"weight"})), ("--weight", "3"), "--weight"),
        (Traits(ignores=frozenset({"latency"})), ("--class", "latency"), "--class"),
        (Traits(takes_turns=True, ignores=frozenset({"class"})), ("--class", "normal"), "--class"),
        (
            Traits(takes_turns=True, ignores=frozenset({"ceiling"})),
            ("--compute", "30:80"),
            "the ceiling of --compute",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_options_that_a_mode_does_not_obey_are_refused_by_its_traits(
    monkeypatch: pytest.MonkeyPatch, traits: Traits, options: tuple[str, str], named: str
) -> None:
    monkeypatch.setitem(cast("dict[str, Any]", TRAITS), "soft", traits)
    words = ("run", "--mode", "soft", "--memory", "1Gi", *options, "--", "true")
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 2
    assert f"without effect in mode soft: {named}" in shown.stderr
