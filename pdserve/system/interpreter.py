"""Run a small program by another Python interpreter and read the JSON that it prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pdserve.system.process import output_of


class NoAnswerError(Exception):
    """The interpreter gave no answer; its text is why: the last line of what it said, or how it ended."""


def source_command(python: str, program: ModuleType) -> list[str]:
    """Return the command that runs a module by its source: pdserve need not be installed there."""
    assert program.__file__ is not None
    return [python, "-c", Path(program.__file__).read_text(encoding="utf-8")]


def ask_interpreter(
    python: str,
    program: ModuleType | str,
    *arguments: str,
    timeout: float,
    stdin: str = "",
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Return the JSON on the last line that a program prints.

    `program`: a module, run by its source, or the name of a module that is installed there. `timeout`: seconds.
    `environ` None: our own. Raises NoAnswerError. What an interpreter does after its answer (it may crash in a library
    as it ends) changes nothing."""
    command = [python, "-m", program] if isinstance(program, str) else source_command(python, program)
    # -c and -m put the current folder on the path.
    asked = output_of([*command, *arguments], timeout=timeout, cwd=Path("/"), stdin=stdin, environ=environ)
    try:
        return json.loads((asked.out.strip().splitlines() or [""])[-1])
    except json.JSONDecodeError:
        said = asked.err.strip().splitlines()
        if asked.code == 0:
            said = ["it printed something else than was asked for"]
        raise NoAnswerError((said or [f"exit code {asked.code}"])[-1]) from None
