# SPDX-License-Identifier: Apache-2.0
"""`allot completion`: prints the completion script of a shell."""

import click


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, *, shell: str) -> None:
    """Print the script that completes `allot`'s commands and options in a shell.

    \b
    Examples:
      source <(allot completion bash)          in ~/.bashrc
      source <(allot completion zsh)           in ~/.zshrc
      allot completion fish > ~/.config/fish/completions/allot.fish
    """  # noqa: D301 - click's mark
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    completion = kind(ctx.find_root().command, {}, "allot", "_ALLOT_COMPLETE")
    click.echo(completion.source())
