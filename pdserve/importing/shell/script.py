"""A shell script with lines `vllm serve` -> a launch. The script is read, never run.

What is understood: assignments, arrays, `export`, `if` with simple tests, `${X:-default}`, arithmetic of whole numbers.
What is not: loops, functions, `case`, commands in `$(...)`. A value that depends on those is asked for by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from pdserve.errors import RecipeError
from pdserve.importing import environment
from pdserve.importing.choice import ImportChoice
from pdserve.importing.command_line.flags import ImportedFlag, collected, from_argv
from pdserve.importing.command_line.installed_parser import LineReader
from pdserve.importing.command_line.parsed import as_parsed, variables_of
from pdserve.importing.launch import CommandLine, EngineLaunch, Launch, Sourced
from pdserve.importing.shell.lines import IN_QUOTES, Command, ScriptLimitError, check_marks, commands
from pdserve.importing.shell.values import (
    UnknownValue,
    UnknownValueError,
    Value,
    Variables,
    depends_on,
    expanded,
    holds,
)
from pdserve.recipe.flags import env_instead, where_instead
from pdserve.roles import EngineRole

FORMAT = "shell script"
OPTIONS = ("--var",)
"""What chooses among the deployments of a file."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SERVE = ("vllm", "serve")
_LONGEST_VALUE = 1 << 16
"""Characters: what grows beyond that by doubling itself is no flag."""
_OPENED = ("for", "while", "until", "case", "select")
_ROLES: Mapping[str, EngineRole] = {"kv_producer": "prefill", "kv_consumer": "decode"}


@dataclass(frozen=True)
class Server:
    """One line `vllm serve`: its words with their lines, and what is exported there."""

    line: int
    words: tuple[tuple[str, int], ...]
    unknown: tuple[frozenset[str], ...]
    """What the words that are not known depend on, in the order of their numbers."""
    env: dict[str, Sourced]
    conditions: frozenset[str]
    """Variables that decide whether it is run, and are not known."""


@dataclass
class _Block:
    """An open `if`, loop or function. runs: None where that is not known."""

    kind: str
    runs: bool | None
    taken: bool | None
    """Whether a branch before this one was run."""
    names: frozenset[str] = frozenset()


@dataclass
class _Reader:
    file: str
    variables: Variables
    exported: dict[str, int] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    sourced: list[tuple[str, int]] = field(default_factory=list)

    @property
    def runs(self) -> bool | None:
        states = [block.runs for block in self.blocks]
        return False if False in states else None if None in states else True

    def read(self, command: Command) -> None:
        read = 0
        while read < len(command) and (width := self._keyword(command, read)):
            read += width
        command = command[read:]
        words = [word.text for word in command]
        if not words or self.runs is False:
            return
        if words[0] in ("export", "local", "declare", "readonly", "typeset"):
            exports = words[0] == "export"
            self._assign([word for word in command[1:] if not word.text.startswith("-")], exports=exports)
            return
        if words[0] in ("source", ".") and len(words) > 1:
            self.sourced.append((words[1], command[0].line))
        start = next((i for i in range(len(words) - 1) if tuple(words[i : i + 2]) == _SERVE), None)
        if start is not None:
            self._serve(command, start)
        elif _ASSIGNMENT.fullmatch(words[0]):
            self._assign(command, exports=False)

    def _keyword(self, command: Command, start: int) -> int:
        """Opens, changes or closes a block; how many words were read with it, 0: there is no keyword at `start`. What
        follows `then`, `else` and `do` is a command of its own."""
        first, whole = command[start].text, len(command) - start
        if first in ("if", "elif"):
            test = [word.text for word in command[start + 1 :] if word.text != "then"]
            result = holds(test, self.variables)
            names = depends_on(test, self.variables)
            if first == "if":
                self.blocks.append(_Block("if", result, result, names))
            elif self.blocks:
                block = self.blocks[-1]
                block.runs = None if block.taken is None else False if block.taken else result
                block.taken = result if block.taken is False else block.taken
                block.names |= names
            return whole
        if first == "else" and self.blocks:
            block = self.blocks[-1]
            block.runs = None if block.taken is None else not block.taken
        elif first in ("fi", "done", "esac", "}") and self.blocks:
            self.blocks.pop()
        elif first in _OPENED:
            self.blocks.append(_Block(first, None, None))
        elif first == "function" or (
            [word.text for word in command[start + 1 : start + 3]] == ["(", ")"]
            and first.replace("-", "_").isidentifier()
        ):
            self.blocks.append(_Block("function", None, None))
        elif first not in ("then", "do", "{"):
            return 0
        return 1 if first in ("then", "else", "do") else whole

    def _assign(self, command: Command, *, exports: bool) -> None:
        index = 0
        while index < len(command):
            word = command[index]
            index += 1
            match = _ASSIGNMENT.fullmatch(word.text)
            if match is None:
                if exports and word.text.isidentifier():
                    self.exported[word.text] = word.line
                continue
            name, adds, text = match.groups()
            items: list[str] | None = None
            if index < len(command) and command[index].text.startswith("("):
                items, index = _until_closed(command, index)
            self._set(name, text, items, adds=bool(adds), line=word.line)
            if exports:
                self.exported[name] = word.line

    def _set(self, name: str, text: str, items: list[str] | None, *, adds: bool, line: int) -> None:
        before = self.variables.get(name)
        value: Value
        try:
            if items is not None:
                value = list(expanded(items, self.variables))
                value = [*before, *value] if adds and isinstance(before, list) else value
            else:
                # Without splitting: an assignment is one word, in quotes or not.
                value = " ".join(expanded([text.replace("$", IN_QUOTES)], self.variables))
                value = before + value if adds and isinstance(before, str) else value
        except UnknownValueError as error:
            value = UnknownValue(error.names or frozenset({name}))
        if adds and isinstance(before, UnknownValue):
            value = before
        elif adds and before is None and items is None:
            value = UnknownValue(frozenset({name}))  # the caller's, with more behind it
        if not isinstance(value, UnknownValue) and sum(map(len, value)) > _LONGEST_VALUE:
            value = UnknownValue(frozenset({name}))
        if self.runs is None:
            value = UnknownValue(frozenset().union(*(block.names for block in self.blocks)) or frozenset({name}))
        self.variables.set(name, value, line)

    def _serve(self, command: Command, start: int) -> None:
        words: list[tuple[str, int]] = []
        unknown: list[frozenset[str]] = []
        for word in command[start + 2 :]:
            try:
                words += [(text, word.line) for text in expanded([word.text], self.variables)]
            except UnknownValueError as error:
                # Whole words that may be several, or none, are no value of the flag before them.
                several = "[@]" in word.text or (word.text.startswith("$") and not _takes_value(words))
                name, equals, _ = word.text.partition("=")
                before = f"{name}=" if equals and name.startswith("--") else "--unknown" if several else ""
                words.append((f"{before}{_UNKNOWN}{len(unknown)}", word.line))
                unknown.append(error.names)
        env = self._environment(command[:start])
        names = frozenset().union(*(block.names for block in self.blocks if block.runs is None))
        self.servers.append(Server(command[0].line, tuple(words), tuple(unknown), env, names))

    def _environment(self, prefix: Command) -> dict[str, Sourced]:
        env: dict[str, Sourced] = {}
        for name, line in self.exported.items():
            env[name] = Sourced(self.variables.get(name), f"export {name}", line)
        for word in prefix:
            match = _ASSIGNMENT.fullmatch(word.text)
            if match is not None:
                try:
                    value: Value = " ".join(expanded([match.group(3)], self.variables))
                except UnknownValueError as error:
                    value = UnknownValue(error.names)
                env[match.group(1)] = Sourced(value, match.group(1), word.line)
        return env


_UNKNOWN = "\ue002"
"""Begins a word whose value is not known; its number follows."""
_NUMBER = re.compile(f"{_UNKNOWN}([0-9]+)")


def matches(text: str) -> bool:
    """Whether the text looks like a script with a server of vLLM."""
    return re.search(r"\bvllm\s+serve\b", text) is not None


def launch(text: str, file: str, choice: ImportChoice, lines: LineReader) -> Launch:
    """The launch. Raises RecipeError for what is known only when the script runs."""
    reader = _Reader(file, Variables(choice.variables))
    line = 1
    try:
        for given in (*choice.variables.values(), text):
            check_marks(given)
        for command in commands(text):
            line = command[0].line
            reader.read(command)
    except ScriptLimitError as error:
        raise RecipeError(
            f"the script cannot be read: {error}",
            where=f"{file}:{error.line or line}",
            cause="a damaged or generated file; no launch of an engine needs this",
            todo="import a copy that has the line `vllm serve` and the variables it uses, and nothing else",
        ) from None
    servers = reader.servers
    if not servers:
        raise RecipeError(
            "no line `vllm serve` is run",
            where=file,
            cause="it is in a branch that is not taken, or in a program that the script calls",
            todo="give the variables that lead to it: --var NAME=VALUE",
        )
    hardware = f"{choice.hardware or ''} {file.rpartition('/')[2]}".lower()
    rocm = bool(re.search(r"(^|[^a-z])mi\d{3}", hardware)) or any(
        "ROCM" in name for item in servers for name in item.env
    )
    name = file.rpartition("/")[2].rpartition(".")[0] or "script"
    at = Sourced(name, "the file's name", 0)
    result = Launch(file, FORMAT, at, at.of("rocm" if rocm else "cuda"))
    why = "a script names no hardware: taken from its name and variables; --hardware names it"
    result.note(result.platform, why, "confirm")
    for server in servers:
        _add(result, server, lines)
    for name, line in reader.sourced:
        result.note(Sourced(name, f"source {name.rpartition('/')[2]}", line), "it is not read", "confirm")
    return result


def _takes_value(words: list[tuple[str, int]]) -> bool:
    """Whether the last word is a flag that has no value yet."""
    return bool(words) and words[-1][0].startswith("--") and "=" not in words[-1][0] and _UNKNOWN not in words[-1][0]


def _add(result: Launch, server: Server, lines: LineReader) -> None:
    at = Sourced(None, "vllm serve", server.line)
    flags: list[tuple[ImportedFlag, Sourced]] = []
    model: Sourced | None = None
    missing: dict[str, int] = {}
    words = [text for text, _ in server.words]
    read = list(from_argv(words, lines.names))
    left_out: set[int] = set()
    for (index, item), (following, _) in pairwise([*read, (len(words), "")]):
        here = Sourced(
            None, f"--{item.name}" if isinstance(item, ImportedFlag) else "vllm serve", server.words[index][1]
        )
        names = _unknown(item, server)
        if (
            names is not None
            and isinstance(item, ImportedFlag)
            and where_instead(item.name, "engine")
            and not _needed(item.name)
        ):
            result.note(here, "its value is not known, and pdserve sets it", "replaced")
            left_out.update(range(index, following))
        elif names is not None:
            missing.update(dict.fromkeys(sorted(names) or [f"the value at line {here.line}"], here.line))
        elif isinstance(item, ImportedFlag):
            flags.append((item, here))
        elif model is None:
            model = here.of(item)  # vLLM takes the first free word, wherever it stands
        else:
            result.note(here, "a word that belongs to no flag", "served")
    _check_known(missing, result.file)
    engines = EngineLaunch(at, at.of(1), args=collected(flags))
    known = tuple(word for number, word in enumerate(words) if number not in left_out)
    engines.line = CommandLine(known, variables_of(server.env))
    engines.args = as_parsed(engines.args, engines.line, lines, result, at)
    given = engines.args.pop("model", None)
    engines.kv_transfer = engines.args.pop("kv-transfer-config", None)
    role = _role(result, server, engines)
    env = {name: value for name, value in server.env.items() if not isinstance(value.value, UnknownValue | None)}
    for name in (name for name in server.env if name not in env):
        instead = env_instead(name, role)
        why = "its value is not known" if instead is None else f"pdserve sets this variable: {instead}"
        result.note(server.env[name], why, "served" if instead is None else "replaced")
    engines.env = environment.carried(env, result, role)
    if model is not None and given is not None:
        result.note(given, f"the line names a model without a flag too (line {model.line}), which is taken", "served")
    _model(result, model or given, server)
    result.roles[role] = engines
    for name in sorted(server.conditions):
        result.note(at, f"run only under a condition on {name}", "confirm")


def _unknown(item: ImportedFlag | str, server: Server) -> frozenset[str] | None:
    """The variables that a word depends on; None where it is known."""
    texts = (
        [item]
        if isinstance(item, str)
        else [item.name, *(item.value if isinstance(item.value, list) else [item.value])]
    )
    numbers = [int(number) for text in texts for number in _NUMBER.findall(str(text))]
    return frozenset().union(*(server.unknown[number] for number in numbers)) if numbers else None


def _needed(name: str) -> bool:
    """Whether a recipe has the flag's value under another key."""
    needed = ("model", "served-model-name", "revision", "kv-transfer-config", "enable-expert-parallel")
    return name.endswith("parallel-size") or name in needed


def _check_known(missing: Mapping[str, int], file: str) -> None:
    if not missing:
        return
    variables = [name for name in missing if name.isidentifier()]
    given = " ".join(f"--var {name}=..." for name in variables)
    raise RecipeError(
        f"the script gives no value of {', '.join(missing)}",
        where=f"{file}:{min(missing.values())}",
        cause="its caller gives it, or a command or a loop that is not run here",
        todo=f"give: {given}" if variables else "write the value into a copy of the script, and import that",
    )


def _role(result: Launch, server: Server, item: EngineLaunch) -> EngineRole:
    """By the side that its connector names; a server without one does both."""
    config = item.kv_transfer.value if item.kv_transfer is not None else None
    side = str(config.get("kv_role")) if isinstance(config, dict) else ""
    role = _ROLES.get(side, "aggregated")
    if role in result.roles:
        raise RecipeError(
            f"a second server of the role {role}",
            where=f"{result.file}:{server.line}",
            cause="kv_role names prefill (kv_producer) and decode (kv_consumer); one script describes one of each",
            todo="give the variables that choose one of them (--var NAME=VALUE), or import a copy without the other",
        )
    return role


def _model(result: Launch, model: Sourced | None, server: Server) -> None:
    if model is None:
        raise RecipeError(
            "the line names no model",
            where=f"{result.file}:{server.line}",
            todo="write it behind `vllm serve`, and import again",
        )
    result.served_name = model  # as vLLM does without --served-model-name
    if str(model.value).startswith("/"):
        result.model_path = model
    else:
        result.model_id = model


def _until_closed(command: Command, index: int) -> tuple[list[str], int]:
    """The words in the brackets that open at `index`, and the index behind them."""
    depth, items = 0, []
    while index < len(command):
        word = command[index]
        index += 1
        if word.is_operator:
            depth += word.text.count("(") - word.text.count(")")
            if depth <= 0:
                break
        else:
            items.append(word.text)
    return items, index
