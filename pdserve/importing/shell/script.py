"""A shell script with lines `vllm serve` -> a launch. The script is read, never run.

What is understood: assignments, arrays, `export`, `unset`, `if`, `&&` and `||` with simple tests, `${X:-default}`,
arithmetic of whole numbers. What is not: loops, functions, `case`, commands in `$(...)`. A value that depends on those
is asked for by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from pdserve.errors import RecipeError
from pdserve.importing import environment
from pdserve.importing.choice import ImportChoice
from pdserve.importing.command_line.flags import ImportedFlag, collected, from_argv
from pdserve.importing.command_line.installed_parser import LineReader
from pdserve.importing.command_line.parsed import as_parsed, variables_of
from pdserve.importing.launch import CommandLine, EngineLaunch, Launch, Sourced
from pdserve.importing.shell.lines import ScriptLimitError, check_marks, commands
from pdserve.importing.shell.reader import Item, Reader, Server
from pdserve.importing.shell.values import UnknownValue, Variables
from pdserve.recipe.flags import env_instead, where_instead
from pdserve.roles import EngineRole

FORMAT = "shell script"
OPTIONS = ("--var", "--hardware")
"""What chooses among the deployments of a file."""
_ROLES: Mapping[str, EngineRole] = {"kv_producer": "prefill", "kv_consumer": "decode"}
_UNKNOWN = "\ue002"
"""Begins a word whose value is not known; its number follows."""
_NUMBER = re.compile(f"{_UNKNOWN}([0-9]+)")


def matches(text: str) -> bool:
    """Whether the text looks like a script with a server of vLLM."""
    return re.search(r"\bvllm\s+serve\b", text) is not None


def launch(text: str, file: str, choice: ImportChoice, lines: LineReader) -> Launch:
    """The launch. Raises RecipeError for what is known only when the script runs."""
    reader = Reader(Variables(choice.variables))
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
    servers = _once(reader.servers)
    if not servers:
        unknown = [(word, names) for word, names in reader.unknown if names]
        _check_known({name: word.line for word, names in unknown for name in sorted(names)}, file)
        raise RecipeError(
            "no line `vllm serve` is run",
            where=file,
            cause="it is in a branch that is not taken, or in a program that the script calls",
            todo="give the variables that lead to it: --var NAME=VALUE",
        )
    name = file.rpartition("/")[2].rpartition(".")[0] or "script"
    at = Sourced(name, "the file's name", 0)
    result = Launch(file, FORMAT, at, at.of(_platform(choice.hardware, file, servers)))
    if choice.hardware is None:
        why = "a script names no hardware: taken from its name and variables; --hardware names it"
        result.note(result.platform, why, "confirm")
    for server in servers:
        _add(result, server, lines)
    for name, line in reader.sourced:
        result.note(Sourced(name, f"source {name.rpartition('/')[2]}", line), "it is not read", "confirm")
    for word, _ in reader.unknown:
        at = Sourced(None, "a command", word.line)
        result.note(at, "what it runs is not known: it may start a server too", "confirm")
    return result


def _once(servers: Iterable[Server]) -> list[Server]:
    """Without commands of which the same stands by itself elsewhere: what has one as its arguments prints or records
    it."""
    given = list(servers)
    by_itself = [_texts(server) for server in given if not server.lost]
    return [server for server in given if not server.lost or _texts(server) not in by_itself]


def _texts(server: Server) -> list[object]:
    return [text for text, _ in server.words]


def _platform(hardware: str | None, file: str, servers: Iterable[Server]) -> str:
    text = (hardware or file.rpartition("/")[2]).lower()
    by_variables = hardware is None and any("ROCM" in name for item in servers for name in item.env)
    return "rocm" if by_variables or re.search(r"(^|[^a-z])mi\d{3}", text) else "cuda"


def _numbered(items: Iterable[Item]) -> tuple[list[tuple[str, int]], list[frozenset[str]]]:
    """The words of a server with their lines, and what those that are not known depend on, in the order of their
    numbers."""
    words: list[tuple[str, int]] = []
    unknown: list[frozenset[str]] = []
    for item, line in items:
        if isinstance(item, str):
            words.append((item, line))
            continue
        # Whole words that may be several, or none, are no value of the flag before them.
        several = "[@]" in item.text or (item.text.startswith("$") and not _takes_value(words))
        name, equals, _ = item.text.partition("=")
        before = f"{name}=" if equals and name.startswith("--") else "--unknown" if several else ""
        words.append((f"{before}{_UNKNOWN}{len(unknown)}", line))
        unknown.append(item.names)
    return words, unknown


def _takes_value(words: list[tuple[str, int]]) -> bool:
    """Whether the last word is a flag that has no value yet."""
    return bool(words) and words[-1][0].startswith("--") and "=" not in words[-1][0] and _UNKNOWN not in words[-1][0]


def _add(result: Launch, server: Server, lines: LineReader) -> None:
    at = Sourced(None, "vllm serve", server.line)
    flags: list[tuple[ImportedFlag, Sourced]] = []
    model: Sourced | None = None
    missing: dict[str, int] = {}
    numbered, unknown = _numbered(server.words)
    words = [text for text, _ in numbered]
    read = list(from_argv(words, lines.names))
    left_out: set[int] = set()
    for (index, item), (following, _) in pairwise([*read, (len(words), "")]):
        here = Sourced(None, f"--{item.name}" if isinstance(item, ImportedFlag) else "vllm serve", numbered[index][1])
        names = _unknown(item, unknown)
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
    for name in sorted(server.condition.names):
        result.note(at, f"run only under a condition on {name}", "confirm")
    for other in sorted(server.condition.others):
        result.note(at, f"whether it is run depends on what is not read: {other}", "confirm")
    for program in server.lost:
        result.note(program, f"stands before `vllm serve`, and is not carried over: {program.value}", "served")


def _unknown(item: ImportedFlag | str, unknown: list[frozenset[str]]) -> frozenset[str] | None:
    """The variables that a word depends on; None where it is known."""
    texts = (
        [item]
        if isinstance(item, str)
        else [item.name, *(item.value if isinstance(item.value, list) else [item.value])]
    )
    numbers = [int(number) for text in texts for number in _NUMBER.findall(str(text))]
    return frozenset().union(*(unknown[number] for number in numbers)) if numbers else None


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
