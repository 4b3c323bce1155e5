"""Reads a shell script's commands in order: values of variables, and the servers with what they are started with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pdserve.importing.launch import Sourced
from pdserve.importing.shell.assignments import Assignment, assignment, assignments, changed
from pdserve.importing.shell.blocks import Block, CommandOutcome, JoinedCommands, Kind, RunCondition
from pdserve.importing.shell.commands import ENDS_OF_ARMS, JOINS, Command, Word
from pdserve.importing.shell.lines import IN_QUOTES, LITERAL, ScriptLimitError
from pdserve.importing.shell.prefix import NEUTRAL, read_prefix
from pdserve.importing.shell.values import (
    UnknownValue,
    UnknownValueError,
    UnknownWord,
    Value,
    Variables,
    all_of,
    depends_on,
    expanded,
    holds,
    negated,
    pieces,
    referred,
)

_SERVE = ("vllm", "serve")
_LONGEST_VALUE = 1 << 16
"""Characters: what grows beyond that by doubling itself is no flag."""
_DEEPEST = 200
"""Blocks in each other."""
_LOOPS = ("for", "while", "until", "select")
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_TESTS = ("[", "[[", "test", "true", "false", ":")
_SUCCEEDS = ("echo", "printf", "set", "shopt", "unset", *_DECLARES)
_EXPECTED = ("cd", "pushd", "popd", "mkdir", "ulimit", "source", ".", "sleep", "wait")
_MENTIONS = ("echo", "printf", "pkill", "pgrep", "grep", "which", "type")
"""`echo vllm serve` starts no server."""

Item = tuple[str | UnknownWord, int]
"""A word and its line."""


@dataclass(frozen=True)
class Server:
    """One line `vllm serve`: its words with their lines, what is exported there, and what stands before it."""

    line: int
    words: tuple[Item, ...]
    env: dict[str, Sourced]
    lost: tuple[Sourced, ...]
    condition: RunCondition


@dataclass
class Reader:
    """What is known behind the commands that were read."""

    variables: Variables
    blocks: list[Block] = field(default_factory=list)
    chain: JoinedCommands = field(default_factory=JoinedCommands)
    ended: JoinedCommands = field(default_factory=JoinedCommands)
    """The commands that were joined before."""
    functions: dict[str, dict[str, int | None]] = field(default_factory=dict)
    """What each changes: name -> the line of its export."""
    servers: list[Server] = field(default_factory=list)
    sourced: list[tuple[str, int]] = field(default_factory=list)
    unknown: list[tuple[Word, frozenset[str]]] = field(default_factory=list)
    """Commands of which it is not known what they run, and the variables that decide it."""

    @property
    def runs(self) -> bool | None:
        """Whether the command that is read is run."""
        around = (self.blocks[-1].around.runs, self.blocks[-1].runs) if self.blocks else ()
        return all_of((*around, self.chain.runs))

    @property
    def condition(self) -> RunCondition:
        """On which it is run."""
        result = RunCondition()
        if self.blocks:
            block = self.blocks[-1]
            result = block.around.also(block.runs, block.names, f"{block.kind} at line {block.line}")
        return result.also(self.chain.runs, self.chain.before.names, "a command before it")

    def read(self, command: Command) -> None:
        """The next one of the script."""
        if command.after in JOINS:
            self.chain.join(command.after)
        else:
            self.ended, self.chain = self.chain, JoinedCommands()
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.awaits_pattern and command[0].text not in (")", "esac"):
            return
        start = self._keywords(command, 0)
        negates = False
        while start < len(command) and command[start].text == "!":
            negates, start = not negates, start + 1
        if negates and (behind := self._keywords(command, start)) > start and self.blocks:  # `! {`
            self.blocks[-1].negates, negates, start = True, False, behind
        words = command[start:]
        if not words:
            return
        outcome = CommandOutcome(None) if self.runs is False else self._run(words)
        self.chain.end(CommandOutcome(negated(outcome.holds), outcome.names) if negates else outcome)

    def _keywords(self, command: Command, read: int) -> int:
        """The index behind the words that open, change and close blocks from `read` on."""
        while read < len(command) and (width := self._keyword(command, read)):
            read += width
        return read

    def _keyword(self, command: Command, start: int) -> int:
        """How many words were read as a keyword, 0: there is none at `start`. What follows some is a command of its
        own."""
        word, whole = command[start], len(command) - start
        block = self.blocks[-1] if self.blocks else None
        match word.text:
            case "if":
                self._open("if", word)
            case "then" | "elif" | "else" if block is not None and block.kind == "if":
                if word.text == "then":
                    block.decide(self.ended.outcome)
                else:
                    block.turn()
            case "case":
                self._open("case", word, runs=None).awaits_pattern = True
                return whole
            case _ if word.text in _LOOPS:
                self._open("loop", word, runs=None)
                if word.text in ("for", "select") and whole > 1 and command[start + 1].text.isidentifier():
                    self._forget(command[start + 1].text)
                return 1 if word.text in ("while", "until") else whole
            case "fi" | "done" | "esac" | "}":
                self._close()
                return whole
            case ")" if block is None or block.kind != "case":
                self._close()
            case _ if block is not None and block.kind == "case" and word.text in (")", *ENDS_OF_ARMS):
                block.awaits_pattern = word.text != ")"
            case "{" | "(" if block is not None and block.awaits_body:
                block.awaits_body = False
            case "{":
                self._open("{", word)
            case "(":
                self._open("(", word)
            case _:
                return self._function(command, start) or int(word.text in ("then", "do", "else", "time"))
        return 1

    def _function(self, command: Command, start: int) -> int:
        """The words of `f ()` or `function f`."""
        texts = [word.text for word in command[start : start + 4]]
        spelled = texts[:1] == ["function"]
        name, brackets = (texts[1:2], texts[2:4]) if spelled else (texts[:1], texts[1:3])
        if not name or "=" in name[0] or (brackets != ["(", ")"] and not spelled):
            return 0
        block = self._open("function", command[start], runs=None)
        block.function, block.awaits_body = name[0], True
        return int(spelled) + 1 + 2 * (brackets == ["(", ")"])

    def _open(self, kind: Kind, word: Word, *, runs: bool | None = True) -> Block:
        if len(self.blocks) == _DEEPEST:
            raise ScriptLimitError(f"more than {_DEEPEST} blocks in each other", word.line)
        block = Block(kind, word.line, self.condition, self.chain, runs)
        if kind in ("function", "("):
            self.variables.open_scope()
        self.blocks.append(block)
        self.ended = self.chain = JoinedCommands()
        return block

    def _close(self) -> None:
        if not self.blocks:
            return
        block = self.blocks.pop()
        if block.kind in ("function", "("):
            names = self.variables.close_scope()
            if block.function is not None and block.around.runs is not False:
                self.functions[block.function] = {**self.functions.get(block.function, {}), **names}
        inner = self.ended.outcome if block.kind in ("{", "(") else CommandOutcome(None)
        self.chain = block.outer
        self.chain.end(CommandOutcome(negated(inner.holds), inner.names) if block.negates else inner)

    def _run(self, words: list[Word]) -> CommandOutcome:
        texts = [word.text for word in words]
        for text in texts:
            self._call(text)
        assigned, first = assignments(words)
        if first == len(words):
            for item in assigned:
                self._set(item)
            known = all(not isinstance(self.variables.values[item.name], UnknownValue) for item in assigned)
            return CommandOutcome(True if known else None, expected=True)
        name = texts[first]
        if name in _DECLARES:
            self._declare(words[first + 1 :], name)
            return CommandOutcome(True)
        if name == "unset":
            for each in texts[first + 1 :]:
                self._unset(each)
        elif name in ("source", ".") and len(words) > first + 1:
            self.sourced.append((texts[first + 1], words[first].line))
        for each in changed(texts[first:]):
            self._forget(each)
        self._find_server(words)
        if name in _TESTS:
            return CommandOutcome(holds(texts[first:], self.variables), depends_on(texts[first:], self.variables))
        return CommandOutcome(True if name in _SUCCEEDS else None, expected=name in _EXPECTED)

    def _call(self, name: str) -> None:
        """What a function of the script changes, wherever a command has its name."""
        if (changes := self.functions.get(name)) is None:
            return
        self.variables.count(list(changes))
        for each, line in changes.items():
            self._forget(each)
            if line is not None:
                self.variables.export(each, line)

    def _declare(self, words: list[Word], by: str) -> None:
        """export A=1 B, local C=2, declare -x D=3."""
        index = next((i for i, word in enumerate(words) if not word.text.startswith("-")), len(words))
        options = {word.text for word in words[:index]}
        exports = (by == "export" and "-n" not in options) or "-x" in options
        while index < len(words):
            word, one = words[index], assignment(words, index)
            index = one[1] if one is not None else index + 1
            name = one[0].name if one is not None else word.text
            if one is not None:
                self._set(one[0])
            if exports and name.isidentifier():
                self.variables.export(name, word.line)
            elif "-n" in options and by == "export":
                self.variables.exported.pop(name, None)

    def _unset(self, name: str) -> None:
        if self.runs is None:
            self._forget(name)
        elif name.isidentifier():
            self.variables.unset(name)

    def _forget(self, name: str) -> None:
        """Its value is known only when the script runs."""
        if self.runs is not False:
            self.variables.set(name, UnknownValue(frozenset({name})))

    def _set(self, item: Assignment) -> None:
        before = self.variables.get(item.name)
        if self.runs is None:
            condition = self.condition
            names = frozenset() if condition.others else condition.names
            value: Value = UnknownValue(names or frozenset({item.name}))
        elif item.items is not None:
            value = self._array(item, before)
        else:
            value = self._text(item, before)
        if isinstance(value, str | list) and sum(map(len, value)) > _LONGEST_VALUE:
            value = UnknownValue(frozenset({item.name}))
        self.variables.set(item.name, value)

    def _text(self, item: Assignment, before: Value | None) -> Value:
        if item.adds and (before is None or isinstance(before, UnknownValue)):
            # Of None: the caller's, with more behind it.
            return before or UnknownValue(frozenset({item.name}))
        try:
            # Without splitting: an assignment is one word, in quotes or not.
            value = " ".join(expanded([item.text.replace("$", IN_QUOTES)], self.variables))
        except UnknownValueError as error:
            return UnknownValue(error.names or frozenset({item.name}))
        if item.adds and isinstance(before, list):
            return ["".join([*before[:1], value]), *before[1:]]
        return before + value if item.adds and isinstance(before, str) else value

    def _array(self, item: Assignment, before: Value | None) -> Value:
        if item.adds and isinstance(before, UnknownValue) and not before.words:
            return before
        own = frozenset({item.name})
        words: list[str | UnknownWord] = [*_words(before)] if item.adds and before is not None else []
        # Each += copies what is there.
        self.variables.count([word.text if isinstance(word, UnknownWord) else word for word in words])
        for word in pieces(item.items or (), self.variables):
            words.append(UnknownWord(word.text, word.names or own) if isinstance(word, UnknownWord) else word)
        names = [word.names for word in words if isinstance(word, UnknownWord)]
        if len(words) + sum(len(word) for word in words if isinstance(word, str)) > _LONGEST_VALUE:
            return UnknownValue(own)
        if names:
            return UnknownValue(frozenset().union(*names), tuple(words))
        return [word for word in words if isinstance(word, str)]

    def _find_server(self, words: list[Word]) -> None:
        texts = [word.text for word in words]
        _, first = assignments(words)
        while first < len(words) and texts[first] in NEUTRAL:
            first += 1
        if first == len(words) or texts[first] in _MENTIONS:
            return
        if (start := _serves(texts)) is not None:
            self._serve(words[0].line, words[:start], self._items(words[start + 2 :]))
            return
        for index in range(first, len(words)):
            value = referred(texts[index], self.variables)
            if value is None or (isinstance(value, UnknownValue) and not value.words):
                continue
            opened = self._items([words[index]])
            if (start := _serves([text for text, _ in opened])) is not None:
                self._serve_value(words, index, opened, start)
                return
        value = referred(texts[first], self.variables)
        if isinstance(value, UnknownValue) and not value.words:
            self.unknown.append((words[first], value.names))

    def _serve_value(self, words: list[Word], index: int, opened: list[Item], start: int) -> None:
        """The server in the variable at `index`, `opened`: "${CMD[@]}"."""
        if words[0].text in self.functions:  # it may start it or print it
            self.unknown.append((words[0], frozenset()))
            return
        before = [*words[:index], *(Word(_written(text), line) for text, line in opened[:start])]
        self._serve(words[index].line, before, [*opened[start + 2 :], *self._items(words[index + 1 :])])

    def _items(self, words: Sequence[Word]) -> list[Item]:
        return [(text, word.line) for word in words for text in pieces([word.text], self.variables)]

    def _serve(self, line: int, before: list[Word], items: list[Item]) -> None:
        prefix = read_prefix(before, self.variables)
        exported = self.variables.exported.items()
        env = {name: Sourced(self.variables.get(name), f"export {name}", at) for name, at in exported}
        env = {name: at for name, at in env.items() if name not in prefix.unset} | prefix.env
        self.servers.append(Server(line, tuple(items), env, tuple(prefix.lost), self.condition))


def _serves(texts: Sequence[str | UnknownWord]) -> int | None:
    """Where `vllm serve` stands."""
    return next((index for index, pair in enumerate(pairwise(texts)) if pair == _SERVE), None)


def _words(value: Value) -> tuple[str | UnknownWord, ...]:
    if isinstance(value, UnknownValue):
        return value.words
    return tuple(value) if isinstance(value, list) else (value,)


def _written(item: str | UnknownWord) -> str:
    """A word that is expanded already, as a script would have it."""
    return item.text if isinstance(item, UnknownWord) else item.replace("$", LITERAL)
