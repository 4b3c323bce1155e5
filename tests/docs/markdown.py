"""What the tests read out of Markdown files: fenced blocks, links, tables, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "slurm/*.md", "recipes/*.md", ".github/**/*.md")
    for path in REPOSITORY.glob(pattern)
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(REPOSITORY))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def prose(self) -> str:
        """The text without its fenced blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self) -> Iterator[Block]:
        for language, text in _FENCE.findall(self.text):
            yield Block(language, text)

    def inline(self) -> Iterator[str]:
        """Every `word in backticks` outside of fenced blocks."""
        yield from _INLINE.findall(self.prose)

    def links(self) -> Iterator[str]:
        yield from _LINK.findall(self.prose)

    def anchors(self) -> set[str]:
        """The anchors that GitHub gives its headings."""
        return {anchor(title) for title in _HEADING.findall(self.prose)}

    def commands(self, program: str) -> Iterator[tuple[str, ...]]:
        """Every command line of `program` that a reader could type: in blocks (after a `$`, or at the start of a line
        of a shell block) and in backticks. Without the program itself."""
        for block in self.blocks():
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.startswith("$ ") or block.language in ("bash", "sh"):
                    yield from _invocations(line.removeprefix("$ "), program)
        for text in self.inline():
            if Path(text.split()[0]).name == program:
                yield from _invocations(text, program)

    def table(self, first_heading: str) -> list[tuple[str, ...]]:
        """The rows of the table whose first column has this heading."""
        lines = iter(self.prose.splitlines())
        for line in lines:
            if _cells(line)[:1] == (first_heading,):
                next(lines)
                rows = []
                for row in lines:
                    if not row.startswith("|"):
                        break
                    rows.append(_cells(row))
                return rows
        raise AssertionError(f"{self.name} has no table with the first column {first_heading!r}")


README = Page(REPOSITORY / "README.md")
INDEX = Page(REPOSITORY / "docs" / "README.md")
RECIPES = Page(REPOSITORY / "recipes" / "README.md")
EXIT_CODES = Page(REPOSITORY / "docs" / "exit-codes.md")
PROOFS = Page(REPOSITORY / "docs" / "proofs.md")
TROUBLESHOOTING = Page(REPOSITORY / "docs" / "guides" / "troubleshooting.md")


def anchor(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = "".join(character for character in title.lower() if character.isalnum() or character in " -_")
    return kept.replace(" ", "-")


def _cells(line: str) -> tuple[str, ...]:
    if not line.startswith("|"):
        return ()
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))


def _invocations(line: str, program: str) -> Iterator[tuple[str, ...]]:
    """The commands of one line of shell; comments, assignments and redirections are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("|;&<>"):
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and Path(words[0]).name == program:
                yield tuple(words[1:])
            words = []
        else:
            words.append(word)
