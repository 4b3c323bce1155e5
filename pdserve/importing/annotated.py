"""A recipe's YAML with a comment for each value: where it came from.

The YAML is PyYAML's, and the lines of its values are those that pdserve's own parser reports; only comments are put
between them.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def annotated(draft: Draft) -> str:
    """The whole file."""
    head = [f"Imported from {draft.file} ({draft.format}). After each value: the line and the key that it came from."]
    for effect, title in _TITLES.items():
        notes = [note for note in draft.notes if note.effect == effect]
        head += ["", f"{title}:"] if notes else []
        head += [f"  {line(note)}" for note in notes]
    comments = [f"# {text}".rstrip() for text in head]
    return "\n".join([*comments, "", *_body(draft)]) + "\n"


def line(note: Note) -> str:
    """A note on one line. Values are not repeated: they may be long, or secret."""
    return f"{note.at}: {note.why}"


def _body(draft: Draft) -> Sequence[str]:
    text = yaml12.dump(draft.document, _WIDTH)
    lines = text.splitlines()
    places = yaml12.parse(text, draft.file).origins
    for path, origin in sorted(draft.origins.items(), key=lambda item: places[item[0]].line, reverse=True):
        index = places[path].line - 1
        short = f"{lines[index]}  # {origin}"
        if len(short) <= _LONGEST and not _continues(path, draft):
            lines[index] = short
        else:
            indent = lines[index][: len(lines[index]) - len(lines[index].lstrip(" -"))].replace("-", " ")
            lines.insert(index, f"{indent}# {origin}")
    return lines


def _continues(path: Path, draft: Draft) -> bool:
    """Whether the value is a text that goes on in the next line, where a comment would be a part of it."""
    value = draft.document
    for part in path:
        value = value[part]  # type: ignore[index]
    return isinstance(value, str) and "\n" in value
