"""Commands of the setup: something to run, and nothing that only a shell would understand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from pdserve.recipe.load.problems import Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.setup import words_of

_OPERATORS = re.compile(r"&&|\|\|?|;|&|[0-9]*[<>]{1,2}(&[0-9])?")
_EXPANDED = re.compile(r"\$[A-Za-z_(]|~(/|$)|`")


def commands(recipe: Recipe) -> Iterator[Problem]:
    """Nothing to run, or words that cannot be split."""
    for index, command in enumerate(recipe.setup):
        path: Path = ("setup", index)
        try:
            words = words_of(command)
        except ValueError:
            yield Problem(path, "a quote is not closed", "close it, or write the words as a list: [pip, install, x]")
            continue
        if not words or not words[0].strip():
            yield Problem(path, "there is no command", "write the program first, or remove the item")
        elif any("\0" in word for word in words):
            yield Problem(path, "an argument cannot hold a NUL character")


def unexpanded(recipe: Recipe) -> Iterator[Problem]:
    """What a shell would act on is an argument like any other, because no shell reads it."""
    for index, command in enumerate(recipe.setup):
        words = words_of(command)
        if words[0].rpartition("/")[2] in ("bash", "sh", "dash", "zsh", "env") or not isinstance(command, str):
            continue
        for word in words:
            if _OPERATORS.fullmatch(word) or word.endswith(";") or _EXPANDED.match(word):
                yield Problem(
                    ("setup", index),
                    f"no shell reads this command: {word} is passed on",
                    f"write [bash, -c, {json.dumps(command, ensure_ascii=False)}]",
                )
                break
