"""Describe what is wrong with a recipe, as data: where, which key, what, and what to write instead."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.errors import RecipeError
from pdserve.recipe.load import show

Path = tuple[str | int, ...]
"""Keys and list indexes from the top of the document."""


@dataclass(frozen=True)
class Origin:
    """The place where a value was written: a line of a file, or (line 0) an option of the command line."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class Line:
    """A line that can be written as it stands: `yaml`, the value of `path` on one line. `example`: one value of
    many."""

    path: Path
    yaml: str
    example: bool = False

    def typed(self, origin: Origin, origins: Mapping[Path, Origin]) -> str:
        """Return the line as it is typed where `origin` is: a line of the file, with the sections that are not there
        yet (`origins` has those that are), an item of a list, or an option."""
        if origin.line == 0 and origin.source.startswith("--"):
            return f"--set {shlex.quote(f'{dotted(self.path)}={self.yaml}')}"
        text = self.yaml if isinstance(self.path[-1], int) else f"{self.path[-1]}: {self.yaml}"
        for end in range(len(self.path) - 1, 0, -1):
            if self.path[:end] in origins:
                break
            text = f"{self.path[end - 1]}: {{{text}}}"
        return text


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `also`: the other keys that it depends on; `meant`: the key that was probably meant and
    is therefore missing; `origin` overrides the path's line; `write`: the line that corrects it."""

    path: Path
    what: str
    todo: str | None = None
    also: tuple[Path, ...] = ()
    meant: Path | None = None
    origin: Origin | None = None
    write: Line | None = None

    @property
    def spoils(self) -> set[Path]:
        """Paths whose value cannot be relied on because of this problem."""
        return {path for path in (self.path, self.meant) if path}

    def concerns(self, path: Path) -> bool:
        """Return whether the problem may be a mere consequence of another one at `path`."""
        return any(_is_beneath(mine, path) for mine in (self.path, *self.also))

    def advice(self, origin: Origin, origins: Mapping[Path, Origin]) -> str | None:
        """Return what to do, with the line to write as it is typed at `origin`."""
        if self.write is None:
            return self.todo
        line = f"write {'for example ' if self.write.example else ''}`{self.write.typed(origin, origins)}`"
        return line if self.todo is None else f"{self.todo}: {line}"


def dotted(path: Path) -> str:
    """The path as `--set` takes it: `prefill.connector.of.0.kind`; a dot inside a key is written `\\.`."""
    return ".".join(str(part).replace(".", "\\.") for part in path)


def locate(path: Path, origins: Mapping[Path, Origin]) -> Origin | None:
    """Return where `path`, or its nearest ancestor, was written."""
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
        return RecipeError(_sentence(problem, origins), where=str(origin), todo=problem.advice(origin, origins))
    placed.sort(key=lambda item: (item[1].line == 0, item[1].source, item[1].line))
    lines = [_as_line(problem, origin, origins) for problem, origin in placed]
    return RecipeError(f"{len(lines)} problems", where=name, evidence=tuple(lines))


def warning(problem: Problem, origins: Mapping[Path, Origin], name: str) -> str:
    """A problem that does not stop anything, as one line."""
    origin = problem.origin or locate(problem.path, origins) or Origin(name)
    return _as_line(problem, origin, origins)


def did_you_mean(word: str, known: Iterable[str], *, least: float = 0.6) -> str | None:
    """The known word that `word` is most likely a slip of, if any is that close (difflib's ratio)."""
    candidates = {k.lower().replace("_", "-"): k for k in known}
    close = difflib.get_close_matches(word.lower().replace("_", "-"), candidates, n=1, cutoff=least)
    return candidates[close[0]] if close else None


def _as_line(problem: Problem, origin: Origin, origins: Mapping[Path, Origin]) -> str:
    advice = problem.advice(origin, origins)
    return f"{origin}: {_sentence(problem, origins)}" + (f" -> {advice}" if advice else "")


def _sentence(problem: Problem, origins: Mapping[Path, Origin]) -> str:
    others = []
    for path in problem.also:
        origin = origins.get(path)
        others.append(f"{dotted(path)} at {origin}" if origin else f"{dotted(path)}, by default")
    text = f"{show.escape_invisible(dotted(problem.path))}: {problem.what}" if problem.path else problem.what
    return f"{text} ({'; '.join(others)})" if others else text


def _is_beneath(a: Path, b: Path) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]
