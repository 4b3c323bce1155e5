"""What can be wrong with a recipe, as data: where, which key, what, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.errors import RecipeError

Path = tuple[str | int, ...]
"""Keys and list indexes from the top of the document."""


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a line of a file, or (line 0) an option of the command line."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `also`: the other keys that it depends on; `meant`: the key that was probably meant and
    is therefore missing; `origin` overrides the path's line."""

    path: Path
    what: str
    todo: str | None = None
    also: tuple[Path, ...] = ()
    meant: Path | None = None
    origin: Origin | None = None

    @property
    def spoils(self) -> set[Path]:
        """Paths whose value cannot be relied on because of this problem."""
        return {path for path in (self.path, self.meant) if path}

    def concerns(self, path: Path) -> bool:
        """Whether the problem may be a mere consequence of another one at `path`."""
        return any(_related(mine, path) for mine in (self.path, *self.also))


def dotted(path: Path) -> str:
    """The path as `--set` takes it: `prefill.connector.of.0.kind`; a dot inside a key is written `\\.`."""
    return ".".join(str(part).replace(".", "\\.") for part in path)


def locate(path: Path, origins: Mapping[Path, Origin]) -> Origin | None:
    """Where `path` was written, or its nearest ancestor that was."""
    for end in range(len(path), -1, -1):
        if (origin := origins.get(path[:end])) is not None:
            return origin
    return None


def error(problems: Sequence[Problem], origins: Mapping[Path, Origin], name: str) -> RecipeError:
    """All problems as one error: one in full, several as a line each, in the order of the file."""
    unique = list(dict.fromkeys(problems))
    placed = [(p, p.origin or locate(p.path, origins) or Origin(name)) for p in unique]
    if len(placed) == 1:
        problem, origin = placed[0]
        return RecipeError(_sentence(problem, origins), where=str(origin), todo=problem.todo)
    placed.sort(key=lambda item: (item[1].line == 0, item[1].source, item[1].line))
    lines = [
        f"{origin}: {_sentence(problem, origins)}" + (f" -> {problem.todo}" if problem.todo else "")
        for problem, origin in placed
    ]
    return RecipeError(f"{len(lines)} problems", where=name, evidence=tuple(lines))


def warning(problem: Problem, origins: Mapping[Path, Origin], name: str) -> str:
    """A problem that does not stop anything, as one line."""
    origin = problem.origin or locate(problem.path, origins) or Origin(name)
    return f"{origin}: {_sentence(problem, origins)}" + (f" -> {problem.todo}" if problem.todo else "")


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is most likely a slip of, if any is close."""
    candidates = {k.lower().replace("_", "-"): k for k in known}
    close = difflib.get_close_matches(word.lower().replace("_", "-"), candidates, n=1, cutoff=0.6)
    return candidates[close[0]] if close else None


def _sentence(problem: Problem, origins: Mapping[Path, Origin]) -> str:
    others = []
    for path in problem.also:
        origin = origins.get(path)
        others.append(f"{dotted(path)} at {origin}" if origin else f"{dotted(path)}, by default")
    text = f"{dotted(problem.path)}: {problem.what}" if problem.path else problem.what
    return f"{text} ({'; '.join(others)})" if others else text


def _related(a: Path, b: Path) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]
