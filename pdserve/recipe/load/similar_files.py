"""A file that cannot be read: the one that was probably meant, or what is there."""

from __future__ import annotations

import difflib
from pathlib import Path

_SUFFIXES = (".yaml", ".yml")
_CLOSE = 0.8
"""Of two names, by difflib: `tiny-cpu.yml` and `tiny-cpu.yaml` are close, `kimi.yaml` and `tiny.yaml` are not."""
_SHIPPED = Path("recipes")
_LISTED = 6


def advice(path: Path) -> str | None:
    """What to do about a file that is not there, or is a folder."""
    if _is_folder(path):
        there = _names(path)
        return f"name one of the files in it: {_list(there)}" if there else "name a file"
    for folder in (path.parent, _SHIPPED):
        names = [name for name in _names(folder) if folder / name != path]
        if (close := _close(path.name, names)) is not None:
            return f"did you mean {folder / close}?"
    if not _is_folder(path.parent):
        return f"the folder {path.parent} does not exist either: correct the path"
    there = _names(path.parent)
    here = "this folder" if path.parent == Path() else str(path.parent)
    return f"correct the path; {here} has {_list(there) if there else 'no YAML file'}"


def _close(name: str, names: list[str]) -> str | None:
    """By the whole name, or by the name without its suffix: `tiny-cpu`."""
    stems = {Path(known).stem: known for known in names}
    wanted = Path(name).stem if Path(name).suffix in _SUFFIXES else name
    close = difflib.get_close_matches(wanted, stems, n=1, cutoff=_CLOSE)
    return stems[close[0]] if close else None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir() if p.suffix in _SUFFIXES and p.is_file())
    except (OSError, ValueError):
        return []


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def _list(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
