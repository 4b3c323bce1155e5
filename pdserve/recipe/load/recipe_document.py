"""A document with its lines: one recipe file and what it builds on (`extends:`), merged.

Mappings merge key by key, the extending file wins; lists and scalars replace. A connector or routing policy of another
`kind` replaces as well: the settings of one mean nothing to another. Elsewhere `kind` is a key like others: a proxy or
container of another kind keeps what it inherited, API keys and mounts among it. A key set to null loses what it
inherited and has its default again (inside `args` null is data: it drops the flag).
"""

from __future__ import annotations

import copy
import errno
import os.path
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pdserve.errors import RecipeError
from pdserve.recipe.load import show, yaml12
from pdserve.recipe.load.problems import Origin, Path, Problem
from pdserve.recipe.load.shape import RECIPE

MAX_BYTES = 1 << 20
NEWLINE = b"\n"
PATHS = (
    ("model", "path"),
    ("proxy", "auth", "keys_file"),
    ("proxy", "tls", "certificate"),
    ("proxy", "tls", "key"),
    ("proxy", "upstream_tls", "ca"),
    ("proxy", "upstream_tls", "certificate"),
    ("proxy", "upstream_tls", "key"),
    ("proxy", "admin", "token_file"),
)
"""Values that are paths, relative to the file that names them."""
Interpolate = Callable[[str], str]
_RELINK = "name the file itself, or make the link anew: ln -sfn FILE LINK; readlink shows where each link leads"


@dataclass
class Document:
    """A recipe on its way: plain data, where each path was written, and what was wrong so far."""

    data: dict[str, Any]
    origins: dict[Path, Origin] = field(default_factory=dict)
    quoted: set[Path] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    spellings: dict[Path, str] = field(default_factory=dict)
    folders: dict[Path, str] = field(default_factory=dict)
    """The folder, seen from the recipe's, of the file that names each inherited path with variables in it."""

    def forget(self, path: Path) -> None:
        """Drop the origins of `path` and of everything below it."""
        for known in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[known]
        self.quoted = {p for p in self.quoted if p[: len(path)] != path}
        self.spellings = {p: text for p, text in self.spellings.items() if p[: len(path)] != path}
        self.folders = {p: folder for p, folder in self.folders.items() if p[: len(path)] != path}


def read_document(path: FilePath, interpolate: Interpolate) -> Document:
    """The file at `path` merged over everything that it extends. `interpolate` is applied to the names in `extends`."""
    return _read_chain(path, interpolate, chain=())


def read_file(path: FilePath, kind: str = "recipe", chain: tuple[FilePath, ...] = ()) -> Document:
    """The file at `path` as it stands. The `kind` that it should be is named in errors, and `chain`: who extends it."""
    parsed = yaml12.parse(text_of(path, chain), str(path))
    if parsed.data is None:
        raise RecipeError("the file is empty", where=str(path), todo="start with `schema: 1`")
    if not isinstance(parsed.data, dict):
        raise RecipeError(
            f"a {kind} is a mapping of keys, this is {'a list' if isinstance(parsed.data, list) else 'one value'}",
            where=f"{path}:1",
            todo="begin with the line `schema: 1`, one `key: value` on each line; recipes/, clusters/ and sweeps/ have "
            "examples",
        )
    return Document(
        parsed.data, dict(parsed.origins), set(parsed.quoted), list(parsed.problems), dict(parsed.spellings)
    )


def _read_chain(path: FilePath, interpolate: Interpolate, chain: tuple[FilePath, ...]) -> Document:
    own = read_file(path, chain=chain)
    bases = _bases(own, path, interpolate)
    if not bases:
        return own
    merged = Document({})
    for base, origin in bases:
        target = FilePath(os.path.normpath(path.parent / base))
        seen = (*chain, path)
        if any(_is_same_file(target, other) for other in seen):
            loop = " -> ".join(str(p) for p in (*seen, target))
            raise RecipeError(f"extends runs in a circle: {loop}", where=str(origin), todo="remove this `extends`")
        try:
            inherited = _read_chain(target, interpolate, seen)
        except _MissingFileError as missing:
            raise RecipeError(f"extends: {missing.what}", where=str(origin), todo=missing.todo) from None
        for place in PATHS:
            _rebase(inherited, place, target.parent, path.parent)
        merge(merged, inherited)
    merge(merged, own)
    return merged


def merge(base: Document, over: Document) -> None:
    """Lay `over` on `base`, in place."""
    _merge(base, over, (), base.data, over.data)
    if () in over.origins:
        base.origins[()] = over.origins[()]
    base.problems.extend(over.problems)


def _merge(base: Document, over: Document, path: Path, into: dict[str, Any], data: dict[str, Any]) -> None:
    for key, value in data.items():
        here = (*path, key)
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _of_another_kind(here, old, value):
            base.origins[here] = over.origins.get(here, base.origins[here])
            _merge(base, over, here, old, value)
            continue
        base.forget(here)
        into[key] = value
        base.origins.update({p: o for p, o in over.origins.items() if p[: len(here)] == here})
        base.quoted.update(p for p in over.quoted if p[: len(here)] == here)
        base.spellings.update({p: text for p, text in over.spellings.items() if p[: len(here)] == here})
        base.folders.update({p: folder for p, folder in over.folders.items() if p[: len(here)] == here})


def _of_another_kind(path: Path, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether each kind has keys of its own at `path`, and the new mapping is of another one."""
    return old.get("kind") != new.get("kind", old.get("kind")) and bool(RECIPE.kinds(path))


def _bases(own: Document, path: FilePath, interpolate: Interpolate) -> list[tuple[str, Origin]]:
    value = own.data.pop("extends", None)
    here = own.origins.get(("extends",), Origin(str(path)))
    items = value if isinstance(value, list) else [] if value is None else [value]
    bases = []
    for i, item in enumerate(items):
        origin = own.origins.get(("extends", i), here)
        if not isinstance(item, str) or not item:
            what = f"extends: expected the path of a recipe, or a list of them, got {show.value(item)}"
            raise RecipeError(what, where=str(origin), todo="write for example `extends: base.yaml`")
        try:
            bases.append((interpolate(item), origin))
        except ValueError as error:
            what, todo = getattr(error, "what", str(error)), getattr(error, "todo", None)  # see UnresolvedError
            raise RecipeError(f"extends: {what}", where=str(origin), todo=todo) from None
    own.forget(("extends",))
    return bases


class _MissingFileError(RecipeError):
    """A file that cannot be read: reported at the `extends` that names it, where there is one."""


def text_of(path: FilePath, chain: tuple[FilePath, ...] = ()) -> str:
    """Return the text of a file; `chain`: the recipes that extend it. Raises RecipeError where it cannot be read."""
    what, todo = f"{path} does not exist", "correct the path"
    try:
        if path.is_file():
            if path.stat().st_size > MAX_BYTES:
                raise RecipeError(f"larger than {MAX_BYTES >> 20} MiB", where=str(path))
            return path.read_bytes().decode("utf-8-sig")
        if path.is_dir():
            what = f"{path} is a folder, not a file"
        elif path.exists():
            what = f"{path} is not a file"
        elif _in_a_circle(path):
            what, todo = f"{path} cannot be found: its links lead in a circle", _RELINK
        elif path.is_symlink():
            what = f"{path} is a link to {path.readlink()}, which does not exist"
    except UnicodeDecodeError as error:
        utf16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        raise RecipeError(
            "the file is UTF-16, not UTF-8" if utf16 else f"not UTF-8 text: byte {error.start} cannot be read",
            where=str(path) if utf16 else f"{path}:{error.object.count(NEWLINE, 0, error.start) + 1}",
            todo=f"save the file as UTF-8: iconv -f {'UTF-16' if utf16 else 'ISO-8859-1'} -t UTF-8 {path}",
        ) from None
    except (OSError, ValueError) as error:
        what = f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
    if chain:
        what += f" (extended by {' <- '.join(str(p) for p in reversed(chain))})"
    raise _MissingFileError(what, where=None, todo=todo)


def _in_a_circle(path: FilePath) -> bool:
    """Return whether the file, or a folder on the way to it, is a link that leads back to itself."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _is_same_file(a: FilePath, b: FilePath) -> bool:
    try:
        return a.resolve() == b.resolve()
    except (OSError, RuntimeError):
        return a == b


def with_absolute_files(data: dict[str, Any], folder: FilePath) -> dict[str, Any]:
    """A copy in which the files of the proxy are named so that they can be found from anywhere; relative ones are
    relative to `folder`."""
    copied = copy.deepcopy(data)
    for *sections, key in PATHS[1:]:
        section: Any = copied
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = os.path.normpath(folder.absolute() / section[key])
    return copied


def _rebase(document: Document, place: tuple[str, ...], written_in: FilePath, read_in: FilePath) -> None:
    """A relative path is relative to the file that names it, so it is rewritten for the folder of its reader. One with
    variables may become absolute: only its folder is noted, for `locate_resolved`."""
    section, path = _text_at(document, place)
    if section is None or not path or path.startswith("/") or _is_same_file(written_in, read_in):
        return
    folder = FilePath(os.path.relpath(written_in, read_in))
    if "${" in path:
        document.folders[place] = os.path.normpath(folder / document.folders.get(place, ""))
    else:
        section[place[-1]] = os.path.normpath(folder / path)


def locate_resolved(document: Document, failed: Collection[Path]) -> None:
    """Rewrites the inherited paths whose variables have values now. `failed`: those that have none."""
    for place, folder in document.folders.items():
        section, path = _text_at(document, place)
        if section is not None and path and not path.startswith("/") and place not in failed:
            section[str(place[-1])] = os.path.normpath(FilePath(folder) / path)


def _text_at(document: Document, place: Path) -> tuple[dict[str, Any] | None, str]:
    """The mapping that has the text at `place`, and the text; None where there is none."""
    section: Any = document.data
    for key in place[:-1]:
        section = section.get(key) if isinstance(section, dict) else None
    text = section.get(place[-1]) if isinstance(section, dict) else None
    return (section, text) if isinstance(text, str) else (None, "")
