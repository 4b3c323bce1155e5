"""An archive of a run for an issue: its records, and the ends of its logs on request, without secrets.

Only files that pdserve or its processes write there are taken, by name. Links, pipes and other users' files are not.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.doctor.redaction import REMOVED, redact, redact_json
from pdserve.errors import StateError
from pdserve.logs.lines import read_from
from pdserve.run.directory import RunDir

_PATTERNS = (
    "recipe.yaml",
    "plan.json",
    "versions.json",
    "state.json",
    "failure.md",
    "events.jsonl",
    "events.jsonl.1",
    "proxy.json",
    "agent@*.json",
    "shm@*.json",
    "mooncake-store-*.json",
    "diagnostics/*.txt",
    "patches/*/*.json",
)
"""Not: key-folder and inbox/, which are between processes of the run, and whatever else lies there."""
_LOGS = ("logs/*.log", "logs/*.log.[0-9]*")
_CONTENTS = "CONTENTS.txt"
BEGINNING_BYTES, END_BYTES = 256 << 10, 2 << 20
"""Of a file that is longer. All of them are in memory at once, because the list comes first."""


@dataclass(frozen=True)
class Member:
    """One file of the archive."""

    name: str
    data: bytes
    removed: int
    """Secrets that were taken out of it."""
    cut: bool = False
    """Its middle is left out."""

    def line(self) -> str:
        notes = [f"{self.removed} secrets removed"] if self.removed else []
        notes += ["its middle left out"] if self.cut else []
        return f"{len(self.data):>10} {self.name}" + (f" ({', '.join(notes)})" if notes else "")


def members(run: RunDir, known: Iterable[str], *, logs: bool) -> list[Member]:
    """Return all that the archive will hold, in its order. `known`: secrets of the run by their value."""
    secrets = tuple(known)
    return [_member(run, file, secrets) for file in _files(run, (*_PATTERNS, *(_LOGS if logs else ())))]


def make_member(name: str, text: str, known: Iterable[str]) -> Member:
    """Make a member of the archive that is no file of the run directory."""
    return _redact_member(name, text, tuple(known), cut=False)


def contents(files: Iterable[Member]) -> str:
    """Return the list of an archive, for people: it comes first."""
    return "\n".join(file.line() for file in files)


def write(target: Path, folder: str, files: list[Member]) -> None:
    """Write the archive, readable by its user alone. Raises StateError when it is there already, or cannot be
    written."""
    listed = Member(_CONTENTS, (contents(files) + "\n").encode(), 0)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise StateError(
            "this file is there already, and is not replaced",
            where=str(target),
            todo=f"remove it, or choose another name: --bundle {target.with_name(f'new-{target.name}')}",
        ) from None
    except OSError as error:
        raise _unwritable(target, error) from None
    try:
        with os.fdopen(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for file in (listed, *files):
                entry = tarfile.TarInfo(f"{folder}/{file.name}")
                entry.size, entry.mode = len(file.data), 0o600
                archive.addfile(entry, io.BytesIO(file.data))
    except OSError as error:
        target.unlink(missing_ok=True)
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> StateError:
    return StateError(
        "the bundle cannot be written",
        where=str(target),
        cause=error.strerror or str(error),
        todo="choose a folder that you may write to and that has room",
    )


def _files(run: RunDir, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from (file for file in sorted(run.path.glob(pattern)) if _is_ours(file, run.path))


def _is_ours(file: Path, top: Path) -> bool:
    """Tell whether it is a file, not a link, below folders that are no links, and of this user."""
    try:
        status = file.lstat()
        linked = any(folder.is_symlink() for folder in file.parents if folder != top and top in folder.parents)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not linked


def _member(run: RunDir, file: Path, known: tuple[str, ...]) -> Member:
    size = file.stat().st_size
    whole = size <= BEGINNING_BYTES + END_BYTES
    data = (read_from(file, 0) or b"") if whole else _ends(file, size)
    return _redact_member(str(file.relative_to(run.path)), data.decode(errors="replace"), known, cut=not whole)


def _redact_member(name: str, text: str, known: tuple[str, ...], *, cut: bool) -> Member:
    """Redact a file, and keep JSON that is JSON: a document, or each line of events.jsonl and of the part before it."""
    if ".jsonl" in name:
        clean = "\n".join(_redacted_json(line, known) for line in text.split("\n"))
    else:
        clean = _redacted_json(text, known) if name.endswith(".json") else redact(text, known)
    return Member(name, clean.encode(), max(clean.count(REMOVED) - text.count(REMOVED), 0), cut)


def _redacted_json(text: str, known: tuple[str, ...]) -> str:
    try:
        return redact_json(text, known)
    except ValueError:
        return redact(text, known)  # torn, or the line that says how much is left out


def _ends(file: Path, size: int) -> bytes:
    """Return the beginning and the end, without half lines at the cut: nothing shows what half a secret is."""
    beginning = read_from(file, 0, BEGINNING_BYTES) or b""
    end = read_from(file, size - END_BYTES, END_BYTES) or b""
    beginning, end = beginning[: beginning.rfind(b"\n") + 1], end[end.find(b"\n") + 1 or len(end) :]
    return beginning + b"... %d bytes are left out ...\n" % (size - len(beginning) - len(end)) + end
