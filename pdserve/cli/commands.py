"""The `pdserve` command: its verbs, and what becomes of a wrong command line or of a reader that has gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pdserve import __version__
from pdserve.cli import author, bench, compare, look, operate, prove, recipe, run, status, sweep
from pdserve.cli.options import OWN_CODES_OF_RUN
from pdserve.errors import RecipeError
from pdserve.installed import proxy_build

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""This is a wrong command line. Typer may have a click of its own, and exports only this subclass."""


class ReaderLeft(Exception):  # noqa: N818  (not an error of ours: `pdserve status | head`)
    """Says that the reader of our output has gone. Not an OSError, because typer makes exit code 1 of a broken pipe."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if ctx.invoked_subcommand == "run":
                error.exit_code = OWN_CODES_OF_RUN + RecipeError.exit_code  # type: ignore[attr-defined]
            raise
        except BrokenPipeError:
            raise ReaderLeft from None


app = typer.Typer(
    name="pdserve",
    cls=_Commands,
    help="One YAML recipe to a proven prefill/decode-disaggregated vLLM deployment.\n\n"
    "Exit codes: 0 ok, 2 recipe, 3 preflight, 4 failed to start, 5 died while serving or degraded, "
    "6 a proof failed, 7 a proof could not be made, 8 no such deployment or not in this state, "
    "9 figures of a benchmark do not count, 10 the doctor sees a cause, 11 not all that an imported file serves, "
    "12 points of a sweep do not count, 130 Ctrl-C. "
    "`run` ends with the code of its command, or with 200 + one of these.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        typer.echo(f"pdserve {__version__}, proxy {proxy_build()}")
        raise typer.Exit


for group in (run, status, look, recipe, author, prove, bench, sweep, compare, operate):
    app.add_typer(group.verbs)


@cache
def command() -> Callable[..., Any]:
    """Return the whole command line; call it with nothing to run `sys.argv`. To make it from `app` takes 30 ms of
    CPU."""
    return get_command(app)
