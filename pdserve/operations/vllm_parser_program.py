"""Run by an interpreter that has vLLM: command lines of engines, as JSON on stdin -> what vLLM's own parser makes of
them, as one line of JSON on stdout (InstalledParser).

Imports nothing of pdserve, because its source is given to `PYTHON -c`. Nothing of the lines is run or opened: a line
with `--config`, for which the parser would read a file, is not parsed; of configurations that are objects only those
in _CONFIGS are built (CompilationConfig imports modules that it names); variables that may name a file are not read.
Values are never part of a reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from typing import Any

_MODULES = (
    ("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
    ("vllm.utils", "FlexibleArgumentParser"),
)
_LINES = (
    # vLLM >= 0.31
    ("vllm.entrypoints.launchers.cli_args", "make_arg_parser"),
    ("vllm.entrypoints.openai.cli_args", "make_arg_parser"),
)
_UNKNOWN = "it has no such flag"
_CONFIG = "--config"
_CONFIGS = ("kv_transfer_config", "kv_events_config", "attention_config")
_FILES = ("_CONFIG", "_PATH", "_FILE", "_DIR", "_ROOT", "_MODULE", "_PLUGINS")
_PLAIN = re.compile(r"[\w.,:+-]{0,100}")
_FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:[.=].*)?", re.DOTALL)
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Whatever vLLM's code makes of a word: one line must not cost the others their answers."""
_NAME = re.compile(r"(?<![\w-])--?([A-Za-z][\w-]*)")


def _first(places: tuple[tuple[str, str], ...]) -> Any:
    for module, name in places:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"no {places[0][1]} in {', '.join(module for module, _ in places)}")


class _StoppedError(Exception):
    """Says that the parser gave up."""


def _recording_class(parser_class: Any) -> Any:
    class Recording(parser_class):  # type: ignore[misc]
        """Keeps the words of each flag, and goes on where a value is refused."""

        seen: dict[argparse.Action, list[str]]
        refused: dict[str, str]
        repeated: set[str]

        def clear(self) -> None:
            self.seen, self.refused, self.repeated = {}, {}, set()

        def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
            if action.option_strings:
                words = [word for word in arg_strings if word != "--"]
                appends = isinstance(action, argparse._AppendAction)
                extends = isinstance(action, argparse._ExtendAction)
                before = self.seen.get(action, []) if appends or extends else []
                self.seen[action] = [*before, *words]
                # What an extending one has collected is a list of words behind one flag.
                if before and not extends:
                    self.repeated.add(name_of(action))
            builds = getattr(action.type, "__name__", "") == "parse_dataclass" and action.dest not in _CONFIGS
            try:
                if builds:
                    json.loads(arg_strings[0])
                    return action.default
                return super()._get_values(action, arg_strings)
            except (argparse.ArgumentError, json.JSONDecodeError):
                if not action.option_strings:
                    raise
                choices = f"; it takes {', '.join(map(str, action.choices))}" if action.choices else ""
                self.refused[name_of(action)] = f"it does not take the value{choices}"
                # What comes after must still be read.
                return action.default

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            known, extra = super().parse_known_args(args, namespace)
            for word in extra:
                if match := _FLAG.fullmatch(word):
                    self.refused.setdefault(match.group(1), _UNKNOWN)
            return known, []

        def error(self, message: str) -> Any:
            raise _StoppedError(message)

    return Recording


def name_of(action: argparse.Action) -> str:
    """Return the whole name of a flag."""
    return next((text for text in action.option_strings if text.startswith("--")), action.option_strings[0]).lstrip("-")


def _parse_words(parser: Any, words: list[str]) -> dict[str, Any]:
    parser.clear()
    refused: dict[str, str] = {}
    values: argparse.Namespace | None = None
    if _CONFIG in words:
        refused["config"] = "its parser would read that file, so this line was not given to it"
    else:
        try:
            values = parser.parse_args(words)
        except _StoppedError as stopped:
            # `ambiguous option: --x=value could match ...`, `argument --xy/-x: expected one argument`
            name = _NAME.search(str(stopped))
            refused[name.group(1) if name else ""] = "its parser stops there"
        except SystemExit:
            refused[""] = "it prints its help, and serves nothing"
        except _ERRORS as error:
            refused[""] = f"its parser stops with {type(error).__name__}"
    # What was read before a parser stopped is no whole line.
    flags = (
        {} if values is None else {name_of(key): _flag_value(key, kept, values) for key, kept in parser.seen.items()}
    )
    repeated = sorted(parser.repeated & flags.keys())
    return {"flags": flags, "refused": {**parser.refused, **refused}, "repeated": repeated, "variables": {}}


def _flag_value(action: argparse.Action, words: list[str], values: argparse.Namespace) -> Any:
    if not words:
        value = getattr(values, action.dest, None)
        return bool(value) if isinstance(value, bool | None) else [str(value)]
    return words


def _variables(given: dict[str, str]) -> dict[str, str]:
    known = importlib.import_module("vllm.envs").environment_variables
    refused: dict[str, str] = {}
    for name, value in given.items():
        if not name.startswith("VLLM_"):
            continue
        if name not in known:
            refused[name] = "it does not read this variable"
            continue
        if name.endswith(_FILES) or not _PLAIN.fullmatch(value):
            continue
        before = os.environ.get(name)
        try:
            os.environ[name] = value
            known[name]()
        except _ERRORS:
            refused[name] = "it does not take the value"
        finally:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
    return refused


def _answer(asked: list[dict[str, Any]]) -> dict[str, Any]:
    parser = _first(_LINES)(_recording_class(_first(_MODULES))(prog="vllm serve"))
    options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    names = {name_of(action) for action in options}
    short = {
        text.lstrip("-"): name_of(action)
        for action in options
        for text in action.option_strings
        if not text.startswith("--")
    }
    if "optimization-level" in names:
        short["O"] = "optimization-level"  # the parser writes it out itself
    # Other whole names of a flag are read by prefix otherwise.
    names |= {
        text[2:]
        for action in options
        for text in action.option_strings
        if text.startswith("--") and not text.startswith("--no-")
    }
    lines = [{**_parse_words(parser, line["words"]), "variables": _variables(line["variables"])} for line in asked]
    return {
        "version": importlib.import_module("vllm").__version__,
        "names": sorted(names),
        "short": short,
        "switches": sorted(name_of(action) for action in options if action.nargs == 0),
        "lists": sorted(name_of(action) for action in options if action.nargs not in (None, "?", 0)),
        "lines": lines,
    }


def main() -> None:
    """Answer the lines on stdin. stdout has the answer alone: vLLM prints what it likes elsewhere."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    json.dump(_answer(json.load(sys.stdin)), answers)
    answers.write("\n")
    answers.close()


if __name__ == "__main__":
    main()
