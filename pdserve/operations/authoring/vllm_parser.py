"""Command lines of other tools, read by the parser of the vLLM that is installed beside pdserve.

The list of flags that pdserve has is of one version, and knows names only. vLLM's own parser knows its version's names,
and refuses what it does not take. It runs in a process of its own: importing vLLM takes seconds and a GB.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pydantic import ValidationError

from pdserve.importing.command_line.installed_parser import BY_LIST, InstalledParser, LineReader
from pdserve.importing.launch import CommandLine
from pdserve.installed import distributions
from pdserve.operations.authoring import vllm_parser_program
from pdserve.recipe.vllm_names import VERSION
from pdserve.system.interpreter import NoAnswerError, ask_interpreter

Ask = Callable[[Sequence[CommandLine]], InstalledParser | str]
"""Command lines -> what a vLLM makes of them, or why there is no answer."""
Read = TypeVar("Read")
_SECONDS = 300.0
"""The import alone takes ten seconds, and much more from a network disk that is cold."""
_TIMES = 3
NOT_ASKED = "its parser was not asked (--flags-from list)"


def ask_installed(lines: Sequence[CommandLine]) -> InstalledParser | str:
    """The vLLM of this interpreter."""
    if distributions.installed()["vllm"] is None:
        return "no vLLM is installed here"
    asked = json.dumps([{"words": line.words, "variables": dict(line.variables)} for line in lines])
    try:
        answer = ask_interpreter(sys.executable, vllm_parser_program, timeout=_SECONDS, stdin=asked)
        return InstalledParser.model_validate_json(json.dumps(answer))
    except NoAnswerError as why:
        return f"the installed vLLM gives no parser: {why}"
    except ValidationError:
        return "the installed vLLM gives no parser: its answer cannot be read"


def ask_none(lines: Sequence[CommandLine]) -> str:
    """Where the list is wanted."""
    del lines
    return NOT_ASKED


def read_with(
    ask: Ask, read: Callable[[LineReader], Read], lines_of: Callable[[Read], Iterable[CommandLine]]
) -> tuple[Read, str]:
    """What `read` gives with the answers to its own command lines, and who read the flags, for people.

    Its first reading is by the list. Where other names make other lines of it, these are asked about too."""
    result = read(BY_LIST)
    asked: list[CommandLine] = []
    version = ""
    for _ in range(_TIMES):
        lines = list(dict.fromkeys(lines_of(result)))
        if lines == asked or not lines:
            break
        answer = ask(lines)
        if isinstance(answer, str):
            return read(BY_LIST), _by_list(answer)
        asked, result = lines, read(LineReader.of(answer, lines))
        version = answer.version
    return result, f"Flags were read by the parser of vLLM {version}." if asked else _by_list("no engine has any")


def _by_list(why: str) -> str:
    return f"Flags were read by a list of those of vLLM {VERSION}: {why}."
