"""A shell script with lines `vllm serve` -> a launch. The script is read, never run.

What is read: assignments, `export`, `unset`, and the commands that start vLLM, LMCache's server or Mooncake's master. A
value that is more than texts and variables is not known, and is asked for where it counts. From the first condition,
loop, function or group on nothing is read: a server behind it is refused with its line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.errors import RecipeError
from pdserve.importing import cache_servers, environment
from pdserve.importing.command_line import LISTED, ImportedFlag, from_argv, merge_flags
from pdserve.importing.launch import EngineLaunch, ImportChoice, Launch, SourcedValue
from pdserve.importing.shell_words import COPY, ShellCommand, ShellWord, WordPart, commands
from pdserve.recipe.flags import env_instead, where_instead
from pdserve.roles import EngineRole

FORMAT = "shell script"
OPTIONS = ("--var", "--hardware")
"""What chooses among the deployments of a file."""
_ROLES: Mapping[str, EngineRole] = {"kv_producer": "prefill", "kv_consumer": "decode"}
_VLLM, _LMCACHE, _MASTER = "vllm serve", "lmcache server", "mooncake_master"
_PROGRAMS = {
    ("vllm", "serve"): _VLLM,
    ("-m", "vllm.entrypoints.openai.api_server"): _VLLM,
    ("lmcache", "server"): _LMCACHE,
    ("mooncake_master",): _MASTER,
}
_SERVER = re.compile(r"\bvllm[\s\\]+serve\b|\bvllm\.entrypoints\.openai\.api_server\b")
_STARTED = re.compile(rf"{_SERVER.pattern}|\blmcache\s+server\b|\bmooncake_master\b")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<adds>\+?)=")
_REBINDS = re.compile(r"IFS\+?=|\w+\[[^]]*\]\+?=")
"""What splits words, and an element of an array."""
_SET_BY_SHELL = ("HOME", "HOSTNAME", "OLDPWD", "PATH", "PWD", "RANDOM", "SECONDS", "UID", "USER")
"""They have a value that is not in the script, so a default does not hold."""
_DEFAULTED = re.compile(r"\$\{([A-Za-z_]\w*):?=")
_FILES = re.compile(r"^~|[*?]|\{.*(?:,|\.\.).*\}")
"""What a shell replaces by names of files, or by several words."""
_STOPS: tuple[str, ...] = (
    "if",
    "for",
    "while",
    "until",
    "case",
    "select",
    "function",
    "{",
    "(",
    ")",
    "((",
    "!",
    "eval",
    "alias",
)
_STOPS += ("read", "mapfile", "readarray", "getopts", "let", "declare", "typeset", "local", "readonly")
"""What may change any value, or whether a command is run at all."""
_NEUTRAL = ("exec", "nohup", "env", "command", "builtin", "time", "setsid", "unbuffer")
"""They change nothing that is served."""
_SUCCEEDING = ("", "cd", "echo", "export", "mkdir", "pushd", "set", "sleep", "source", "ulimit", "unset")
"""They fail only where the launch as a whole does; empty: an assignment."""
_MENTIONING = ("cat", "echo", "grep", "kill", "pgrep", "pkill", "printf", "tee", "trap", "type", "which")
"""`echo vllm serve` starts no server."""
_HARMLESS = (*_SUCCEEDING, *_MENTIONING, ":", "true", "false", "[", "[[", "test", "exit", "popd", "shopt", "wait")
_ANY_RANK = ("data-parallel-rank", "data-parallel-start-rank")
"""pdserve sets them. That they are there says who balances, whatever they are."""
_MOST_CHARACTERS = 1 << 20
"""Of all values together. A real script makes some thousands."""


class _UnknownValueError(Exception):
    """A value is known only when the script runs, or to its caller: the variables to give."""

    def __init__(self, *names: str) -> None:
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True)
class _UnknownWord:
    """A word as it is written, and the variables that would make it known."""

    written: str
    names: tuple[str, ...]


_Item = tuple[str | _UnknownWord, int]
"""A word and its line."""


@dataclass(frozen=True)
class _Process:
    """A command that is carried over, with the words behind the name of its program."""

    program: str
    line: int
    words: list[_Item]
    env: dict[str, SourcedValue]


def matches(text: str) -> bool:
    """Return whether the text looks like a script with a server of vLLM."""
    return _SERVER.search(text) is not None


def launch(text: str, file: str, choice: ImportChoice) -> Launch:
    """Read the launch that a script makes. Raises RecipeError for what is known only when the script runs."""
    name = file.rpartition("/")[2].rpartition(".")[0] or "script"
    at = SourcedValue(name, "the file's name", 0)
    result = Launch(file, FORMAT, at, at)
    script = _Script(text, choice.variables, result)
    for command in commands(text, file):
        script.read(command)
        if script.has_ended:
            break
    missing: dict[str, int] = {}
    started = [(process, _known_words(process, result, missing)) for process in script.processes]
    if all(process.program != _VLLM for process in script.processes):
        for word, line in script.unknown:
            missing.update(dict.fromkeys(word.names, line))
    _check_known(missing, file)
    for word, line in script.unknown:
        result.note(
            SourcedValue(None, word.written, line), "what it runs is not known: it may start a server too", "served"
        )
    for process, words in started:
        read = list(from_argv([word for word, _ in words]))
        flags = [(SourcedValue(None, process.program, words[index][1]), item) for index, item in read]
        if process.program == _VLLM:
            _add_engines(result, process, flags)
        elif process.program == _LMCACHE:
            cache_servers.read_lmcache(flags, result)
        else:
            cache_servers.read_master(flags, result)
    if not result.roles:
        raise RecipeError(
            "no line `vllm serve` is run",
            where=file,
            cause="it is in a program that the script calls, or behind its end",
            todo=COPY,
        )
    result.platform = at.of(_platform(choice.hardware, file, script.exported))
    if choice.hardware is None:
        why = "a script names no hardware: taken from its name and variables; --hardware names it"
        result.note(result.platform, why, "confirm")
    return result


class _Script:
    """The script up to the command that is read: its values, and the processes that it started."""

    def __init__(self, text: str, given: Mapping[str, str], result: Launch) -> None:
        self.text, self.given, self.result = text, given, result
        self.values: dict[str, str | None] = {}
        """None: it is known only when the script runs."""
        self.exported: dict[str, int] = {}
        self.is_certain = True
        """Whether the command is run wherever the script is."""
        self.last = ""
        """The program of the command before."""
        self.has_ended = False
        self.made = 0
        self.processes: list[_Process] = []
        self.unknown: list[tuple[_UnknownWord, int]] = []
        """Commands of which it is not known what they run."""
        self.others: set[str] = set()

    def read(self, command: ShellCommand) -> None:
        """Read the next command."""
        words = command.words
        if self.has_ended:
            return
        self.is_certain = command.before not in ("||", "|", "|&") and (
            command.before != "&&" or (self.is_certain and self.last in _SUCCEEDING)
        )
        first = next((i for i, word in enumerate(words) if not _ASSIGNED.match(word.bare)), len(words))
        if first + 1 < len(words) and words[first].bare in ("command", "builtin"):
            first += 1
        name = words[first].bare if first < len(words) else ""
        exports_all = name == "set" and any(re.fullmatch(r"-\w*a\w*|allexport", word.bare) for word in words)
        sets = name == "printf" and any(word.bare == "-v" for word in words)
        stops = name in _STOPS or exports_all or sets or _REBINDS.match(words[0].bare) is not None
        if stops or any(word.bare in ("(", ")") for word in words):
            self._stop(command, f"`{name}`" if stops and name not in "()" else "a group or a function")
            return
        lasts = self.is_certain and command.after not in ("&", "|", "|&")
        if first == len(words) or name in ("export", "unset"):
            self._set(words, name, lasts=lasts)
        else:
            self._run(command, first, lasts=lasts)
        for word in words:
            self.values.update(dict.fromkeys(_DEFAULTED.findall(word.written)))
        self.last = name

    def _stop(self, command: ShellCommand, what: str) -> None:
        """Read nothing from here on. Raises RecipeError where a server follows."""
        line = command.words[0].line
        if _STARTED.search(self.text, command.start) is not None:
            raise self._refusal(f"{what} stands before a line that starts a server, and is not read", line)
        why = "from here on the script is not read: nothing that is known to start a server follows"
        self.result.note(SourcedValue(None, what, line), why, "confirm")
        self.has_ended = True

    def _set(self, words: Sequence[ShellWord], by: str, *, lasts: bool) -> None:
        """Set variables by `A=1` or `export A=1 B`, or take them back by `unset A`."""
        takes_back = by == "unset" or any(word.bare == "-n" for word in words)
        for word in words:
            match = _ASSIGNED.match(word.bare)
            name = match["name"] if match is not None else word.bare
            if match is None and (name in (by, "command", "builtin") or name.startswith("-")):
                continue
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise self._refusal(f"`{by}` has names that are known only when it runs", word.line)
            if match is not None:
                self.values[name] = self._value(word, match, lasts=lasts)
            elif by == "unset" or not lasts:
                self.values[name] = None
            if by and lasts and takes_back:
                self.exported.pop(name, None)
            elif by and not takes_back:
                self.exported[name] = word.line

    def _value(self, word: ShellWord, match: re.Match[str], *, lasts: bool) -> str | None:
        name, behind = match["name"], word.bare[match.end() :]
        if name not in self.given:
            self._check_hidden(word)
        try:
            if not lasts or behind.startswith("~"):
                return None
            before = self._referred(WordPart("", True, True, name)) if match["adds"] else []
            parts = (WordPart(word.parts[0].text[match.end() :], is_quoted=False), *word.parts[1:])
            return "".join([*before, *self._fields(parts, splits=False)])
        except _UnknownValueError:
            return None

    def _run(self, command: ShellCommand, first: int, *, lasts: bool) -> None:
        words, line = command.words[first:], command.words[first].line
        items: list[_Item] = [(item, word.line) for word in words for item in self._items(word)]
        texts = [item if isinstance(item, str) else "" for item, _ in items] or [""]
        name = texts[0].rpartition("/")[2]
        if name in _MENTIONING:
            return
        for word in words:
            self._check_hidden(word)
        if lasts and (name in ("exit", "return") or (name == "exec" and len(texts) > 1)):
            self.has_ended = True
        if (found := _program(texts)) is not None:
            self._start(*found, items, command.words[:first])
        elif any(_SERVER.search(text) for text in (*texts, *command.documents)):
            raise self._refusal("a server in the text of a command is not read", line)
        elif items and isinstance(items[0][0], _UnknownWord):
            self.unknown.append((items[0][0], line))
        elif name in ("source", "."):
            if not texts[-1].endswith("/bin/activate"):
                why = "it is not read: write what it sets into the script, or give it with --var"
                self.result.note(SourcedValue(None, f"{name} {words[-1].text.rpartition('/')[2]}", line), why, "served")
        elif name not in _HARMLESS and name not in self.others:
            self.others.add(name)
            why = "it is not run: what it installs or changes, the image must have, or setup of the recipe"
            self.result.note(SourcedValue(None, f"`{name}`", line), why, "confirm")

    def _start(self, program: str, start: int, end: int, items: list[_Item], assigned: Sequence[ShellWord]) -> None:
        line = items[start][1]
        if not self.is_certain:
            raise self._refusal(f"`{program}` is run only if a command before it succeeds, or fails", line)
        process = _Process(program, line, items[end:], {})
        for name, at in self.exported.items():
            process.env[name] = SourcedValue(self.given.get(name, self.values.get(name)), f"export {name}", at)
        program_before = ""
        for item, at in [*self._assigned(assigned), *items[:start]]:
            text = item if isinstance(item, str) else item.written
            if (match := _ASSIGNED.match(text)) is not None:
                process.env[match["name"]] = SourcedValue(
                    text[match.end() :] if text is item else None, match["name"], at
                )
            elif text in _NEUTRAL:
                program_before = text
            else:
                why = f"it stands before `{program}`, and is not carried over with its options"
                self.result.note(SourcedValue(None, f"{program_before} {text}".strip(), at), why, "served")
                break
        self.processes.append(process)

    def _assigned(self, words: Sequence[ShellWord]) -> Iterator[_Item]:
        """Yield the variables before a command. One that refers to another of them is not known here."""
        names = {match["name"] for word in words if (match := _ASSIGNED.match(word.bare)) is not None}
        for word in words:
            if any(part.name in names for part in word.parts):
                yield _UnknownWord(word.written, ()), word.line
            else:
                yield from ((item, word.line) for item in self._items(word, splits=False))

    def _check_hidden(self, word: ShellWord) -> None:
        """Refuse a server that is started in `$(...)` or from an array. Raises RecipeError."""
        if any(not part.is_read and _SERVER.search(part.text) for part in word.parts):
            raise self._refusal("a server in an array, or in a command of its own, is not read", word.line)

    def _items(self, word: ShellWord, *, splits: bool = True) -> list[str | _UnknownWord]:
        """Return the words that a word of the script becomes."""
        try:
            if _FILES.search(word.bare) if splits else "=~" in word.bare:
                raise _UnknownValueError
            has_quotes = any(part.is_quoted for part in word.parts)
            return [text for text in self._fields(word.parts, splits=splits) if text or has_quotes]
        except _UnknownValueError as error:
            return [_UnknownWord(word.written, error.names)]

    def _fields(self, parts: Sequence[WordPart], *, splits: bool) -> list[str]:
        """Return the texts that these parts become; values outside of quotes are split at blanks."""
        fields = [""]
        for part in parts:
            if not part.is_read:
                raise _UnknownValueError
            values = self._referred(part) if part.name else [part.text]
            if part.name and splits and not part.is_quoted:
                values = [piece for value in values for piece in re.split(r"[ \t\n]+", value)]
            self.made += sum(map(len, values))
            if self.made > _MOST_CHARACTERS:
                raise self._refusal(f"its variables grow beyond {_MOST_CHARACTERS >> 20} MiB", 1)
            fields[-1] += values[0] if values else ""
            fields += values[1:]
        return fields

    def _referred(self, part: WordPart) -> list[str]:
        name = part.name
        value = self.given.get(name, self.values.get(name))
        is_unset = value is None and name not in self.values and name not in _SET_BY_SHELL
        if part.operator.endswith("-") and (is_unset or (value == "" and part.operator == ":-")):
            return ["".join(self._fields(part.operand, splits=False))]
        if value is None:
            raise _UnknownValueError(name)
        # A caller gives the words of an array as one text.
        return _shell_words(value) if part.is_array and name in self.given else [value]

    def _refusal(self, what: str, line: int) -> RecipeError:
        return RecipeError(
            what,
            where=f"{self.result.file}:{line}",
            cause="of a script only assignments, `export` and lines that start a server are read",
            todo=COPY,
        )


def _program(texts: Sequence[str]) -> tuple[str, int, int] | None:
    """Return the program that a command starts, with the indices of its name and of the word behind it."""
    for start, text in enumerate(texts):
        for words, program in _PROGRAMS.items():
            end = start + len(words)
            if (text.rpartition("/")[2], *texts[start + 1 : end]) == words:
                by_python = words[0] == "-m" and start and texts[start - 1].rpartition("/")[2].startswith("python")
                return program, start - 1 if by_python else start, end
    return None


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _known_words(process: _Process, result: Launch, missing: dict[str, int]) -> list[tuple[str, int]]:
    """Return the words of a process, without flags that pdserve sets and whose values are not known. What others depend
    on is added to `missing`."""
    words: list[tuple[str, int]] = []
    for item, line in process.words:
        if isinstance(item, str):
            words.append((item, line))
            continue
        flag, equals, _ = item.written.partition("=")
        if not equals and words and words[-1][0].startswith("-") and "=" not in words[-1][0]:
            flag, _ = words.pop()
        name = LISTED.named(flag) if flag.startswith("-") else ""
        if process.program != _VLLM or not name or _is_needed(name) or not where_instead(name, "engine"):
            missing.update(dict.fromkeys(item.names or [f"the value at line {line}"], line))
            continue
        result.note(SourcedValue(None, f"--{name}", line), "its value is not known, and pdserve sets it", "replaced")
        if name in _ANY_RANK:
            words.append((f"--{name}=0", line))
    return words


def _is_needed(name: str) -> bool:
    """Return whether a recipe has the flag's value under another key."""
    needed = ("model", "served-model-name", "revision", "kv-transfer-config", "enable-expert-parallel", "nnodes")
    return name.endswith(("parallel-size", "parallel-size-local")) or name in needed


def _check_known(missing: Mapping[str, int], file: str) -> None:
    if not missing:
        return
    variables = [name for name in missing if name.isidentifier()]
    given = " ".join(f"--var {name}=..." for name in variables)
    raise RecipeError(
        f"the script gives no value of {', '.join(missing)}",
        where=f"{file}:{min(missing.values())}",
        cause="its caller gives it, or an array or a command that is not read here",
        todo=f"give: {given}" if variables else COPY,
    )


def _add_engines(
    result: Launch,
    process: _Process,
    read: Sequence[tuple[SourcedValue, ImportedFlag | str]],
) -> None:
    at = SourcedValue(None, _VLLM, process.line)
    free = [here.of(item) for here, item in read if isinstance(item, str)]
    flags = [
        (item, SourcedValue(None, f"--{item.name}", here.line)) for here, item in read if isinstance(item, ImportedFlag)
    ]
    engines = EngineLaunch(at, at.of(1), args=merge_flags(flags))
    given = engines.args.pop("model", None)
    engines.kv_transfer = engines.args.pop("kv-transfer-config", None)
    role = _role(result, engines)
    known = {name: value for name, value in process.env.items() if value.value is not None}
    for name, value in process.env.items():
        if name not in known:
            instead = env_instead(name, role)
            why = "its value is not known" if instead is None else f"pdserve sets this variable: {instead}"
            result.note(value, why, "served" if instead is None else "replaced")
    engines.env = environment.carry_over(known, result, role)
    for stray in free[1:]:  # vLLM takes the first free word as its model, wherever it stands
        result.note(stray, "a word that belongs to no flag", "served")
    if free and given is not None:
        result.note(given, f"the line names a model without a flag too (line {free[0].line}), which is taken", "served")
    model = free[0] if free else given
    if model is None:
        raise RecipeError(
            "the line names no model",
            where=f"{result.file}:{process.line}",
            todo="write it behind `vllm serve`, and import again",
        )
    result.served_name = model  # as vLLM does without --served-model-name
    if str(model.value).startswith("/"):
        result.model_path = model
    else:
        result.model_id = model
    result.roles[role] = engines


def _role(result: Launch, engines: EngineLaunch) -> EngineRole:
    """Return the role by the side that the connector names; a server without one does both."""
    config = engines.kv_transfer.value if engines.kv_transfer is not None else None
    side = str(config.get("kv_role")) if isinstance(config, dict) else ""
    role = _ROLES.get(side, "aggregated")
    if role in result.roles:
        raise RecipeError(
            f"a second server of the role {role}",
            where=f"{result.file}:{engines.at.line}",
            cause="kv_role names prefill (kv_producer) and decode (kv_consumer); one script describes one of each",
            todo="import a copy without the other",
        )
    return role


def _platform(hardware: str | None, file: str, exported: Mapping[str, int]) -> str:
    text = (hardware or file.rpartition("/")[2]).lower()
    by_variables = hardware is None and any("ROCM" in name for name in exported)
    return "rocm" if by_variables or re.search(r"(^|[^a-z])mi\d{3}", text) else "cuda"
