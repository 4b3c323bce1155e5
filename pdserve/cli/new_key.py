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


def run(
    name: str,
    file: Path | None,
    *,
    max_requests: int | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    priority: int,
) -> None:
    """Print a new key, and its line or, with `file`, add the line to it.

    The key is printed first: its hash is of no use to who has not seen it. Where it cannot be printed nothing is saved.
    """
    key, line = keys.new(
        name,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        priority=priority or None,
    )
    if file is None:
        typer.echo(key)
        typer.echo(line, err=True)
        return
    with _opened(file, name) as (end, before):
        typer.echo(key)
        _append(file, end, before, line)


@contextmanager
def _opened(file: Path, name: str) -> Iterator[tuple[FileIO, bytes]]:
    """The file for another line, and what is in it. It is made with mode 0600 if it does not exist, and is gone again
    if nothing came into it. Raises RecipeError where it cannot be written, or has the name already."""
    known = keys.read(file) if file.exists() and file.stat().st_size else []
    if name in {key.name for key in known}:
        raise RecipeError(f"there is a key of the name {name} already", where=str(file), todo="choose another name")
    made = not file.exists()
    try:
        file.touch(mode=0o600)
        before, end = file.read_bytes(), file.open("ab", buffering=0)
    except OSError as error:
        raise _not_saved(file, error) from error
    with end:
        try:
            yield end, before
        finally:
            if made and os.fstat(end.fileno()).st_size == 0:
                file.unlink(missing_ok=True)


def _append(file: Path, end: FileIO, before: bytes, line: str) -> None:
    """One more line. RecipeError: not even a part of it is there."""
    whole = (b"" if before.endswith(b"\n") or not before else b"\n") + line.encode() + b"\n"
    try:
        if end.write(whole) != len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        end.truncate(len(before))  # half a line would make the whole file unreadable for the proxy
        raise _not_saved(file, error, "; the key that was printed is not valid, make another one") from error


def _not_saved(file: Path, error: OSError, also: str = "") -> RecipeError:
    return RecipeError(
        f"the key cannot be saved: {error.strerror}",
        where=str(file),
        todo=f"name a file in a folder that exists, that you can write and that has room{also}",
    )
