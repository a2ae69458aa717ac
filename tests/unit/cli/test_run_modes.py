# SPDX-License-Identifier: Apache-2.0
"""`allot run --mode`: one or several, as it is typed and completed."""

from __future__ import annotations

import click
import pytest

from allotment.cli.run import command


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
    [("m", ["mps", "mig"]), ("mig,s", ["mig,soft"]), ("mig,", ["mig,soft", "mig,mps"]), ("x", [])],
)
def test_the_last_mode_is_completed(typed: str, completed: list[str]) -> None:
    found = _option().shell_complete(click.Context(command), typed)
    assert [each.value for each in found] == completed
