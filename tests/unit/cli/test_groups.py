# SPDX-License-Identifier: Apache-2.0
"""The group of commands: listed without being loaded, helped with examples, errors in words."""

import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from allotment import __version__
from allotment.cli import main
from allotment.cli.groups import COMMANDS, fail
from allotment.model.errors import EXIT_CODES

HEAVY = {"pynvml", "rich", "yaml", "sqlite3", "asyncio"}
NOT_OF_SOFT_SHARES = {
    "allotment.model.clusters",
    "allotment.modes.mps.supervisor",
    "allotment.placement.explain",
    "allotment.placement.mig.arrange",
    "allotment.shares.cdi",
    "allotment.shares.mig",
    "allotment.shares.mps_daemons",
}


def pages(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    yield path, group
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from pages(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def test_an_error_changes_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """It may name a program, which chooses its arguments."""
    with pytest.raises(SystemExit):
        fail("process 7 (\x1b]0;title\x07) is not done\nat all", "end\x9b7 it", 1)
    shown = capsys.readouterr().err
    assert shown == "error: process 7 ( ]0;title ) is not done\nat all\n\nhint: end 7 it\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.get_short_help_str(200) == COMMANDS[name]


@pytest.mark.parametrize(("path", "command"), list(pages(main, "allot")))
def test_every_command_has_help_with_an_example(path: str, command: click.Command) -> None:
    shown = CliRunner().invoke(main, [*path.split()[1:], "--help"], terminal_width=80)
    assert shown.exit_code == 0
    assert "Example" in shown.output
    assert re.search(rf"^ .*{path}", shown.output, re.MULTILINE)
    assert [line for line in shown.output.splitlines() if len(line) > 80] == []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{path}: {parameter.name} explains nothing"
            if isinstance(parameter.type, click.Choice):
                explained = re.findall(r"\. (\w+): ", parameter.help)
                assert {*explained} <= {*parameter.type.choices}, path


@pytest.mark.parametrize(
    ("command", "has_defaults"), [("run", True), ("cdi create", True), ("resize", False)]
)
def test_what_is_changed_has_no_defaults(command: str, *, has_defaults: bool) -> None:
    shown = CliRunner().invoke(main, [*command.split(), "--help"])
    words = " ".join(shown.output.split())
    assert ("[default: normal]" in words) is has_defaults
    assert ("[default: 100]" in words) is has_defaults
    assert ":80: the same, up to 80" in words


def test_the_help_has_commands_and_exit_codes() -> None:
    shown = CliRunner().invoke(main, ["--help"])
    for word in (*COMMANDS, *map(str, EXIT_CODES)):
        assert f"\n  {word} " in shown.output


@pytest.mark.parametrize(
    ("arguments", "not_loaded"),
    [
        (["--help"], HEAVY),
        (["ps"], HEAVY),
        (["run", "--help"], HEAVY),
        (["run", "--memory", "1Gi", "--", "no-such"], HEAVY | NOT_OF_SOFT_SHARES),
        (
            ["run", "--simulated", "t4", "--memory", "1Gi", "--", "no-such"],
            HEAVY | NOT_OF_SOFT_SHARES,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_has_to_start_fast_loads_little(
    arguments: list[str], not_loaded: set[str], tmp_path: object
) -> None:
    script = f"""
import sys
from allotment.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
print(sorted({not_loaded!r} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"ALLOTMENT_STATE": f"{tmp_path}/none", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"allot {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (["rnu"], "unknown command 'rnu'", "did you mean `allot run`?"),
        (["run", "--memry", "1Gi"], "--memry", "see `allot"),
        (["run", "--memory", "1Gi"], "missing command", "after `--`"),
        (["run", "--memory", "x", "--", "true"], "'x' is not an amount", "4Gi"),
        (["run", "--memory", "1Gi", "--weight", "x", "--", "true"], "from 1 to 10000", "200"),
        (["completion", "tcsh"], "tcsh", "see `allot completion --help`"),
        (["mig", "aply"], "Did you mean 'apply'?", "see `allot mig --help`"),
        (["run", "--mode", "sfot", "--memory", "1Gi", "--", "true"], "did you mean 'soft'?", "run"),
        (["devices", "set-mode", "GPU-0", "soft,migg"], "did you mean 'mig'?", "the modes are"),
    ],
)
def test_errors_are_words_on_standard_error(arguments: list[str], says: str, hint: str) -> None:
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    first, _, last = shown.stderr.partition("\n\n")
    assert first.startswith("error: ")
    assert says in first
    assert last.startswith("hint: ")
    assert hint in last


def test_a_program_of_ours_gets_exceptions_not_exits() -> None:
    with pytest.raises(click.UsageError):
        main.main(["run", "--memry"], standalone_mode=False)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    shown = CliRunner().invoke(main, ["completion", shell])
    assert shown.exit_code == 0
    assert "_ALLOT_COMPLETE" in shown.output


@pytest.mark.parametrize(
    ("words", "offered"),
    [("allot re", "resize"), ("allot run --mem", "--memory"), ("allot cdi cr", "create")],
)
def test_completion_completes(words: str, offered: str) -> None:
    shown = CliRunner().invoke(
        main,
        [],
        env={
            "_ALLOT_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        prog_name="allot",
    )
    assert offered in shown.output
