"""The words of a shell script as simple commands, each with what joins it to the one before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

OPERATORS = "();<>|&"
ENDS_OF_ARMS = frozenset({";;", ";&", ";;&"})
"""Of `case`."""
JOINS = frozenset({"&&", "||", "|", "|&"})
"""What follows belongs to the command before, also on the next line."""
_ENDS = frozenset({";", "&", *JOINS})
_BEFORE_A_COMMAND = frozenset({"if", "elif", "while", "until", "then", "else", "do", "{", "(", "!"})


@dataclass(frozen=True)
class Word:
    """A word or an operator, and its line."""

    text: str
    line: int

    @property
    def is_operator(self) -> bool:
        return bool(self.text) and set(self.text) <= set(OPERATORS)


class Command(list[Word]):
    """The words between two separators; redirections are gone. `after`: the separator before it. What closes a bracket
    or ends an arm of `case` is a command of its own."""

    def __init__(self, after: str, words: Iterable[Word] = ()) -> None:
        super().__init__(words)
        self.after = after


def nested(before: str, text: str, depth: int) -> int:
    """How many brackets of arrays, sums and `$(...)` are open behind the word `text`, with `depth` of them open before
    it. Brackets around commands are no such ones."""
    match text:
        case "((":
            return depth + 2
        case "(":
            return depth + (depth > 0 or before in ("<", ">") or before.endswith(("=", "$")))
        case ")":
            return max(depth - 1, 0)
    return depth


def separated(words: list[Word]) -> Iterator[Command]:
    """The commands of whole lines."""
    command = Command(";")
    index = depth = 0
    in_test = False
    while index < len(words):
        word = words[index]
        was, depth = depth, nested(words[index - 1].text if index else "", word.text, depth)
        index += 1
        if word.text == "[[" and all(each.text in _BEFORE_A_COMMAND for each in command):
            in_test = True
        elif word.text == "]]":
            in_test = False
        if was or depth or in_test or not word.is_operator:
            command.append(word)
        elif word.text in _ENDS:
            if command:
                yield command
            command = Command(word.text)
        elif word.text in ENDS_OF_ARMS or word.text == ")":
            yield from filter(None, (command, Command(";", [word])))
            command = Command(";")
        elif word.text != "(":
            index = _behind_target(words, index)
        elif command and index < len(words) and words[index].text == ")":  # a function: `f ()`
            command += [word, words[index]]
            index += 1
        else:
            command.append(word)
    if command:
        yield command


def _behind_target(words: list[Word], index: int) -> int:
    """The index behind the file of a redirection, `>(...)` too. `index`: that behind its operator."""
    if [word.text for word in words[index : index + 2]] in (["<", "("], [">", "("]):
        index += 1
    if index == len(words) or words[index].text != "(":
        return index + 1
    return behind_bracket(words, index)


def behind_bracket(words: list[Word], index: int) -> int:
    """The index behind the bracket that closes the one at `index`."""
    depth = 0
    while index < len(words):
        if words[index].is_operator:
            depth += words[index].text.count("(") - words[index].text.count(")")
        index += 1
        if depth <= 0:
            break
    return index


def without_substitutions(words: list[Word]) -> list[Word]:
    """`$(...)` outside of quotes as one word that cannot be read: a backquote."""
    result: list[Word] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.text.endswith("$") or index == len(words) or words[index].text not in ("(", "(("):
            result.append(word)
            continue
        result.append(Word(f"{word.text[:-1]}`", word.line))
        index = behind_bracket(words, index)
    return result
