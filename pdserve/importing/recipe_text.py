"""A recipe's YAML with a comment for each value: where it came from.

The YAML is PyYAML's, and the lines of its values are those that pdserve's own parser reports; only comments are put
between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.importing.launch import Draft, Note
from pdserve.recipe.load import yaml12
from pdserve.recipe.load.problems import Path

_WIDTH = 1 << 20
"""No scalar is folded: a comment cannot stand inside one."""
_LONGEST = 120
_TITLES = {
    "served": "NOT CARRIED OVER, and it changes what is served",
    "confirm": "PLEASE CONFIRM: the file leaves it to its site",
    "replaced": "decided by pdserve, or named otherwise",
    "unused": "no part of what is served",
}


def annotated_text(draft: Draft) -> str:
    """Return the whole file: the recipe with its notes and origins."""
    head = [f"Imported from {draft.file} ({draft.format}). After each value: the line and the key that it came from."]
    for effect, title in _TITLES.items():
        notes = [note for note in draft.notes if note.effect == effect]
        head += ["", f"{title}:"] if notes else []
        head += [f"  {line(note)}" for note in notes]
    return commented_yaml(draft.document, draft.origins, head, draft.file)


def commented_yaml(document: Mapping[str, Any], comments: Mapping[Path, str], head: Sequence[str], file: str) -> str:
    """Return YAML that begins with `head` and has `comments` at the values of those paths; `file`: for errors."""
    top = [f"# {text}".rstrip() for text in head]
    return "\n".join([*top, "", *_body(document, comments, file)]) + "\n"


def line(note: Note) -> str:
    """Return a note on one line. Values are not repeated: they may be long, or secret."""
    return f"{note.at}: {note.why}"


def _body(document: Mapping[str, Any], comments: Mapping[Path, str], file: str) -> Sequence[str]:
    text = yaml12.dump(document, _WIDTH)
    lines = text.splitlines()
    places = yaml12.parse(text, file).origins
    for path, comment in sorted(comments.items(), key=lambda item: places[item[0]].line, reverse=True):
        index = places[path].line - 1
        short = f"{lines[index]}  # {comment}"
        if len(short) <= _LONGEST and not _continues(path, document):
            lines[index] = short
        else:
            indent = lines[index][: len(lines[index]) - len(lines[index].lstrip(" -"))].replace("-", " ")
            lines.insert(index, f"{indent}# {comment}")
    return lines


def _continues(path: Path, document: Mapping[str, Any]) -> bool:
    """Return whether the value is a text of several lines, in which a comment would be a part of it."""
    value: Any = document
    for part in path:
        value = value[part]
    return isinstance(value, str) and "\n" in value
