"""docs/cli.md: what `--help` of every verb says."""

from __future__ import annotations

from functools import cache

from typer.core import TyperGroup
from typer.testing import CliRunner

from pdserve.cli.commands import app, command

_WIDTH = 100
_HEAD = """\
# Command line

The text of `--help`, by `python -m tests.docs.regenerate`; a test fails when it drifts. What the verbs are for is in
the [README](../README.md#the-verbs), what they end with in [exit-codes.md](exit-codes.md), and completion in your shell
in [guides/install.md](guides/install.md#shell-completion).
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, _section(()), *(_section((verb,)) for verb in verbs())])


@cache
def root() -> TyperGroup:
    """The command that `pdserve` runs."""
    whole = command()
    assert isinstance(whole, TyperGroup)
    return whole


def verbs() -> tuple[str, ...]:
    """In the order of --help."""
    return tuple(root().commands)


def _section(path: tuple[str, ...]) -> str:
    return f"## {' '.join(('pdserve', *path))}\n\n```text\n{_help(path)}\n```\n"


def _help(path: tuple[str, ...]) -> str:
    """At a fixed width, whatever the terminal's is."""
    result = CliRunner().invoke(
        app, [*path, "--help"], prog_name="pdserve", terminal_width=_WIDTH, max_content_width=_WIDTH
    )
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())
