"""What stands before `vllm serve` in its command: variables, and programs that start it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.importing.launch import Sourced
from pdserve.importing.shell.assignments import ASSIGNMENT
from pdserve.importing.shell.commands import Word
from pdserve.importing.shell.lines import IN_QUOTES, plain
from pdserve.importing.shell.values import UnknownValue, UnknownValueError, Value, Variables, expanded
from pdserve.recipe.load import show

NEUTRAL = frozenset({"exec", "nohup", "env", "command", "builtin", "time", "setsid", "stdbuf", "unbuffer", "eval"})
"""They change nothing that is served."""
_VARIABLE = ("-e", "--env")
_UNSET = ("-u", "--unset")
_LONGEST_SHOWN = 200


@dataclass
class Prefix:
    """env: variables of this command. unset: those that it does not get. lost: programs and their options, each
    program with its words as they may be shown."""

    env: dict[str, Sourced] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    lost: list[Sourced] = field(default_factory=list)


def read_prefix(words: Sequence[Word], variables: Variables) -> Prefix:
    """Of the words before `vllm serve`."""
    result = Prefix()
    program: str | None = None
    wrapper: list[Word] = []
    for index, word in enumerate(words):
        before = words[index - 1].text if index else ""
        following = words[index + 1].text if index + 1 < len(words) else ""
        if word.text in NEUTRAL and (not wrapper or word.text == "env"):
            program = word.text
            wrapper = _ended(wrapper, result)
        elif (given := _given(word, before, in_wrapper=bool(wrapper))) is not None:
            name, text = given
            result.env[name] = Sourced(_value(text, variables), name, word.line)
        elif not wrapper and program == "env" and before in _UNSET:
            result.unset.add(word.text)
        elif not wrapper and _changes_nothing(program, word.text):
            continue
        elif not (wrapper and word.text in _VARIABLE and ASSIGNMENT.fullmatch(following)):
            wrapper.append(word)
    _ended(wrapper, result)
    return result


def _changes_nothing(program: str | None, option: str) -> bool:
    return (program == "env" and option in _UNSET) or (program == "stdbuf" and option.startswith("-"))


def _given(word: Word, before: str, *, in_wrapper: bool) -> tuple[str, str] | None:
    """Name and value of a variable: `A=1`; behind a program that has options for it `-e A=1`, `-eA=1`, `--env=A=1`."""
    text = word.text
    if in_wrapper and before not in _VARIABLE:
        option = next((option for option in ("--env=", "-e") if text.startswith(option)), None)
        if option is None:
            return None
        text = text.removeprefix(option)
    match = ASSIGNMENT.fullmatch(text)
    return None if match is None else (match[1], match[3])


def _value(text: str, variables: Variables) -> Value:
    try:
        return " ".join(expanded([text.replace("$", IN_QUOTES)], variables))
    except UnknownValueError as error:
        return UnknownValue(error.names)


def _ended(wrapper: list[Word], result: Prefix) -> list[Word]:
    """The program with its options goes to what is lost."""
    if wrapper:
        shown = [_shown(word, before) for word, before in zip(wrapper, [None, *wrapper], strict=False)]
        result.lost.append(Sourced(" ".join(shown)[:_LONGEST_SHOWN], shown[0], wrapper[0].line))
    return []


def _shown(word: Word, before: Word | None) -> str:
    """As it is written; not what may be a secret."""
    text = plain(word.text).replace(IN_QUOTES, "$")
    option, equals, _ = text.partition("=")
    if equals and show.looks_secret(text):
        return f"{option}=..."
    return "..." if show.looks_secret(text) or (before is not None and show.looks_secret(before.text)) else text
