# SPDX-License-Identifier: Apache-2.0
"""The `allot` command group: imports commands on use; turns errors into messages and exit codes."""

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import click

from allotment import __version__
from allotment.model.errors import EXIT_CODES, AllotError

COMMANDS: Mapping[str, str] = {
    "run": "Run a command in a share of a GPU.",
    "ps": "Show the shares and their processes.",
    "top": "Watch the shares, live.",
    "web": "Show GPUs and shares in the browser.",
    "events": "Show what happened to the shares.",
    "devices": "Show the GPUs, and how much of each is allotted and used.",
    "mig": "Cut GPUs into MIG instances from a configuration file.",
    "resize": "Change a share's limits while its programs run.",
    "suspend": "Stop a share's programs, and free its GPU memory.",
    "resume": "Resume a suspended share.",
    "rm": "Remove shares.",
    "cdi": "Create shares for containers: Docker, Podman.",
    "env": "Print the variables that let a shell's programs use simulated GPUs.",
    "fault": "Inject a fault into a simulated GPU, or clear it.",
    "agent": "Share this node's GPUs among pods: the Kubernetes device plugin.",
    "front": "Keep this node's GPUs offered while the agent is away.",
    "cost": "Show what GPUs cost, and how much of it is not used.",
    "advise": "Advise what each workload should ask for, by its own peaks.",
    "simulate": "Replay a trace or a live cluster with scheduling policies.",
    "scheduler": "Choose nodes and GPUs for pods: the kube-scheduler extender.",
    "inspect": "Show who has what on the GPUs of a cluster.",
    "why": "Say why a pod waits, what would help, or where its start went.",
    "explain": "Explain why a pod or a claim has its GPUs, or why it waits.",
    "status": "Show whether Allotment works in a cluster.",
    "migrate": "Move nodes from another GPU system to Allotment, and back.",
    "bundle": "Collect what a bug report of a cluster needs, without secrets.",
    "burn": "Run a GPU workload and report the result.",
    "demo": "Watch two programs share a GPU.",
    "doctor": "Check the prerequisites of this machine, and print fixes.",
    "uninstall": "Remove what agents left in a cluster, or on this node.",
    "completion": "Print the completion script of a shell.",
}
"""Every command and its line in `allot --help`; listing them imports no command."""

_OUTPUT_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
_INTERRUPTED = 130  # 128 + SIGINT, as in shells
CLOSED_PIPE = 141  # 128 + SIGPIPE, by which other tools end


class AllotGroup(click.Group):
    """A group whose commands are modules of this package, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"allotment.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name, suggest the closest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            suggestion = f"did you mean `allot {close[0]}`?" if close else "see `allot --help`"
            raise AllotUsageError(f"unknown command {args[0]!r}", suggestion)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])

    # Both print: a help text, and what a command shows. click itself would exit with 1.

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - click's signature
    ) -> click.Context:
        with _leaving_closed_pipe():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        with _leaving_closed_pipe():
            return super().invoke(ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - click's signature
        **extra: Any,  # noqa: ANN401 - click's signature
    ) -> Any:  # noqa: ANN401 - click's signature
        """Run a command line; in standalone mode, exit with its code."""
        if not standalone_mode:
            return super().main(args, prog_name or "allot", complete_var, False, **extra)
        _replace_closed_streams()
        try:
            result = super().main(args, prog_name or "allot", complete_var, False, **extra)
            with _leaving_closed_pipe():
                sys.stdout.flush()
        except click.exceptions.Abort:
            sys.exit(_INTERRUPTED)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            fail(error.format_message(), _hint_of(error, args), error.exit_code)
        except AllotError as error:
            fail(error.message, error.hint, error.exit_code)
        except OSError as error:
            if error.filename is not None or error.errno not in _OUTPUT_FAILURES:
                raise
            fail_to_print(error)
        sys.exit(result if isinstance(result, int) else 0)


class AllotUsageError(click.UsageError):
    """A usage error with its own hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def _hint_of(error: click.ClickException, args: Sequence[str] | None) -> str | None:
    if isinstance(error, AllotUsageError):
        return error.hint
    context = getattr(error, "ctx", None)
    if context is not None:
        return f"see `{context.command_path} --help`"
    # click's parser does not report which command's option lacks a value.
    words = list(sys.argv[1:] if args is None else args)
    command = f" {words[0]}" if words and words[0] in COMMANDS else ""
    return f"see `allot{command} --help`"


def fail(message: str, hint: str | None, exit_code: int) -> NoReturn:
    """Print an error and exit. Its texts may name programs, and shares of other users."""
    from allotment.model.formats import printable_lines

    text = f"{click.style('error:', fg='red', bold=True)} {printable_lines(message)}"
    if hint:
        text += f"\n\n{click.style('hint:', fg='cyan', bold=True)} {printable_lines(hint)}"
    with contextlib.suppress(BrokenPipeError):
        click.echo(text, err=True, color=wants_colour())
    sys.exit(exit_code)


def wants_colour() -> bool | None:
    """Return False if NO_COLOR is set; else None: click decides by the terminal."""
    return False if os.environ.get("NO_COLOR") else None


def _replace_closed_streams() -> None:
    """Replace standard streams that were closed (`>&-`).

    Printing then fails like any other write, and no other file gets the number of a stream.
    The replacements are not inherited: a command of `allot run` gets the streams as they were.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115 - for good
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - the caller closed it


def fail_to_print(error: OSError) -> NoReturn:
    """Exit with a one-line error when standard output fails (full disk, closed stream)."""
    _drop_output()
    fail(f"cannot write to standard output: {error.strerror}", None, 1)


@contextlib.contextmanager
def _leaving_closed_pipe() -> Iterator[None]:
    """Exit silently when the reader of our output has ended (`allot ps | head`)."""
    try:
        yield
    except BrokenPipeError:
        _drop_output()
        sys.exit(CLOSED_PIPE)


def _drop_output() -> None:
    """Discard buffered output when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command(
    cls=AllotGroup,
    name="allot",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, message="allot %(version)s")
def main_group() -> None:
    """Share GPUs among programs and containers, with limits and visible use.

    \b
    Examples:
      allot run --memory 4Gi -- python train.py
      allot run --simulated a100-80gb:2 --memory 25% -- allot burn --memory 3Gi
      allot top
    """  # noqa: D301 - click's mark
