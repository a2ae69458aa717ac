# SPDX-License-Identifier: Apache-2.0
"""The group of all commands: loads them late, and turns errors into words and exit codes."""

import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from allotment import __version__
from allotment.model.errors import EXIT_CODES, AllotError

__all__ = ["COMMANDS", "AllotGroup", "main_group"]

COMMANDS: Mapping[str, str] = {
    "run": "Run a command in a share of a GPU.",
    "ps": "Show the shares and their processes.",
    "top": "Watch the shares, live.",
    "devices": "Show the GPUs, and what is allotted and used of each.",
    "mig": "Cut GPUs into MIG instances, as a file says.",
    "resize": "Change a share's limits while its programs run.",
    "suspend": "Stop a share's programs, and free its GPU memory.",
    "resume": "Bring a suspended share back.",
    "rm": "Remove shares.",
    "cdi": "Make shares for containers: Docker, Podman.",
    "env": "Print what lets a shell's programs use simulated GPUs.",
    "fault": "Break a simulated GPU on purpose, or mend it.",
    "agent": "Share this node's GPUs among pods: the Kubernetes device plugin.",
    "simulate": "Replay a trace or a live cluster: what would a policy make of it?",
    "scheduler": "Choose node and GPU of pods: kube-scheduler's extender.",
    "explain": "Say why a pod is where it is, or why it waits.",
    "burn": "Use a GPU, and report what happened.",
    "demo": "Two programs share a GPU, before your eyes.",
    "doctor": "Name what this machine lacks, and the fix.",
    "completion": "Print the completion script of a shell.",
}
"""Every command and its line in `allot --help`, so that listing them imports none of them."""

_OUTPUT_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class AllotGroup(click.Group):
    """A group whose commands are modules of this package, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command's module."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"allotment.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for a name that is none, say which was probably meant."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f"did you mean `allot {close[0]}`?" if close else "see `allot --help`"
            raise AllotUsageError(f"there is no command {args[0]!r}", meant)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Close the help with the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - click's signature
        **extra: Any,  # noqa: ANN401 - click's signature
    ) -> Any:  # noqa: ANN401 - click's signature
        """Run a command line; in standalone mode end the process with the right exit code."""
        if not standalone_mode:
            return super().main(args, prog_name or "allot", complete_var, False, **extra)
        _replace_closed_streams()
        try:
            result = super().main(args, prog_name or "allot", complete_var, False, **extra)
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
            if error.errno == errno.EPIPE:
                _leave_output()
            if error.filename is not None or error.errno not in _OUTPUT_FAILURES:
                raise
            fail_to_print(error)
        sys.exit(result if isinstance(result, int) else 0)


class AllotUsageError(click.UsageError):
    """A usage error with its own hint."""

    def __init__(self, message: str, hint: str) -> None:
        """Keep the hint beside the message."""
        super().__init__(message)
        self.hint = hint


def _hint_of(error: click.ClickException, args: Sequence[str] | None) -> str | None:
    if isinstance(error, AllotUsageError):
        return error.hint
    context = getattr(error, "ctx", None)
    if context is not None:
        return f"see `{context.command_path} --help`"
    # click's parser does not say whose option lacks its value.
    words = list(sys.argv[1:] if args is None else args)
    command = f" {words[0]}" if words and words[0] in COMMANDS else ""
    return f"see `allot{command} --help`"


def fail(message: str, hint: str | None, exit_code: int) -> NoReturn:
    """Say what is wrong and what to do about it, on standard error, and end."""
    text = f"{click.style('error:', fg='red', bold=True)} {message}"
    if hint:
        text += f"\n\n{click.style('hint:', fg='cyan', bold=True)} {hint}"
    click.echo(text, err=True, color=_colour(sys.stderr))
    sys.exit(exit_code)


def _colour(stream: object) -> bool | None:
    """Return False where NO_COLOR forbids colour; else None: click decides by the terminal."""
    del stream
    return False if os.environ.get("NO_COLOR") else None


def _replace_closed_streams() -> None:
    """Put something in the place of standard streams that were closed (`>&-`).

    What is printed then fails like any other write; and no other file gets the stream's number.
    None of it is handed down: a command that `allot run` runs has its streams as they were given.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115 - for good
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - nobody listens


def fail_to_print(error: OSError) -> NoReturn:
    """End when standard output takes no more (a full disk, a closed stream), in one line."""
    _drop_output()
    fail(f"cannot write to standard output: {error.strerror}", None, 1)


def _leave_output() -> NoReturn:
    """End when the reader of our output has gone (`allot ps | head`), without a word."""
    _drop_output()
    sys.exit(1)


def _drop_output() -> None:
    """Let what is still buffered go nowhere when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command(
    cls=AllotGroup,
    name="allot",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="allot %(version)s")
def main_group() -> None:
    """Share a GPU among programs and containers: each gets its part, and all see who uses what.

    \b
    Examples:
      allot run --memory 4Gi -- python train.py
      allot run --simulated a100-80gb:2 --memory 25% -- allot burn --memory 3Gi
      allot top
    """  # noqa: D301 - click's mark
