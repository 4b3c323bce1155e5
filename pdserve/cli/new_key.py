"""`pdserve new-key`"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import typer

from pdserve.errors import RecipeError
from pdserve.pd.limits import keys

_COMMENT = b"#"


def run(
    name: str,
    file: Path | None,
    *,
    max_requests: int | None,
    requests_per_minute: int | None,
    priority: int,
) -> None:
    """Print a new key, and its line or, with `file`, add the line to it.

    The line comes into the file as a comment, which needs its room, then the key is printed, and then the line counts,
    which needs no more room: a key is never printed in vain, and its hash is never saved where nobody has seen it.
    """
    key, line = keys.new(
        name,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
        priority=priority or None,
    )
    if file is None:
        typer.echo(key)
        typer.echo(line, err=True)
        return
    with _opened(file, name) as end:
        before = end.read()
        newline = b"" if before.endswith(b"\n") or not before else b"\n"
        counts = False
        try:
            _write(file, end, newline + _COMMENT + line.encode() + b"\n")
            typer.echo(key)
            os.pwrite(end.fileno(), b" ", len(before) + len(newline))
            counts = True
        finally:
            if not counts:  # half a line would make the whole file unreadable for the proxy
                end.truncate(len(before))


@contextmanager
def _opened(file: Path, name: str) -> Iterator[FileIO]:
    """The file, to read and write. It is made with mode 0600 if it does not exist, and is gone again
    if nothing came into it. Raises RecipeError where it cannot be written, or has the name already."""
    known = keys.read(file) if file.exists() and file.stat().st_size else []
    if name in {key.name for key in known}:
        raise RecipeError(f"there is a key of the name {name} already", where=str(file), todo="choose another name")
    made = not file.exists()
    try:
        file.touch(mode=0o600)
        end = file.open("r+b", buffering=0)
    except OSError as error:
        raise _not_saved(file, error) from error
    with end:
        try:
            yield end
        finally:
            if made and os.fstat(end.fileno()).st_size == 0:
                file.unlink(missing_ok=True)


def _write(file: Path, end: FileIO, text: bytes) -> None:
    """At the place where the file was read to. Raises RecipeError; a part of it may be there then."""
    try:
        if end.write(text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise _not_saved(file, error) from error


def _not_saved(file: Path, error: OSError) -> RecipeError:
    return RecipeError(
        f"the key cannot be saved: {error.strerror}",
        where=str(file),
        todo="name a file in a folder that exists, that you can write and that has room",
    )
