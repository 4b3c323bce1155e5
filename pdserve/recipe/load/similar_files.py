"""A file that cannot be read: the one that was probably meant, or what is there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

_SUFFIXES = (".yaml", ".yml")
_CLOSE = 0.8
"""Of two names, by difflib: `tiny-cpu.yml` and `tiny-cpu.yaml` are close, `kimi.yaml` and `tiny.yaml` are not."""
_SHIPPED = Path("recipes")
_LISTED = 6
_READ_BYTES = 1 << 16
_KINDS: Mapping[str, tuple[re.Pattern[bytes], re.Pattern[bytes] | None]] = {
    "recipe": (re.compile(rb"^(schema|extends)\s*:", re.M), re.compile(rb"^(hosts|recipe)\s*:", re.M)),
    "cluster file": (re.compile(rb"^hosts\s*:", re.M), None),
    "sweep file": (re.compile(rb"^recipe\s*:", re.M), None),
}
"""A key that a file of the kind has at its top level, and one that only another kind has."""


def advice(path: Path, kind: str | None = None) -> str | None:
    """What to do about a file that is not there, or is a folder. `kind`: the only one that is worth naming, a key of
    `_KINDS`; None: every YAML file is. Hidden files are none of a person's."""
    if _is_folder(path):
        there = _names(path, kind)
        return f"name one of the files in it: {_list(there)}" if there else "name a file"
    for folder in (path.parent, _SHIPPED):
        names = [name for name in _names(folder, kind) if folder / name != path]
        if (close := _close(path.name, names)) is not None:
            return f"did you mean {folder / close}?"
    if not _is_folder(path.parent):
        return f"the folder {path.parent} does not exist either: correct the path"
    here = "this folder" if path.parent == Path() else str(path.parent)
    if there := _names(path.parent, kind):
        return f"correct the path; {here} has {_list(there)}"
    shipped = _names(_SHIPPED, kind)
    elsewhere = f", {_SHIPPED} has {_list(shipped)}" if shipped else ""
    return f"correct the path; {here} has no {kind or 'YAML file'}{elsewhere}"


def _close(name: str, names: list[str]) -> str | None:
    """By the whole name, or by the name without its suffix: `tiny-cpu`."""
    stems = {Path(known).stem: known for known in names}
    wanted = Path(name).stem if Path(name).suffix in _SUFFIXES else name
    close = difflib.get_close_matches(wanted, stems, n=1, cutoff=_CLOSE)
    return stems[close[0]] if close else None


def _names(folder: Path, kind: str | None) -> list[str]:
    try:
        return sorted(
            p.name
            for p in folder.iterdir()
            if p.suffix in _SUFFIXES and not p.name.startswith(".") and p.is_file() and _is(p, kind)
        )
    except (OSError, ValueError):
        return []


def _is(path: Path, kind: str | None) -> bool:
    if kind is None:
        return True
    has, has_not = _KINDS[kind]
    try:
        with path.open("rb") as file:
            text = file.read(_READ_BYTES)
    except OSError:
        return False
    return has.search(text) is not None and (has_not is None or has_not.search(text) is None)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def _list(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
