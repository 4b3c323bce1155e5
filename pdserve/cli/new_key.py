"""`pdserve new-key`"""

from __future__ import annotations

import errno
import os
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
    """Print a new key, and its line or, with `file`, add the line to it."""
    key, line = keys.new(
        name,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        priority=priority or None,
    )
    if file is None:
        typer.echo(line, err=True)
    else:
        _append(file, name, line)
    typer.echo(key)


def _append(file: Path, name: str, line: str) -> None:
    """One more line in the file, which is made with mode 0600 if it does not exist."""
    known = keys.read(file) if file.exists() and file.stat().st_size else []
    if name in {key.name for key in known}:
        raise RecipeError(f"there is a key of the name {name} already", where=str(file), todo="choose another name")
    try:
        file.touch(mode=0o600)
        before = file.read_bytes()
        begin = b"" if before.endswith(b"\n") or not before else b"\n"
        whole = begin + line.encode() + b"\n"
        with file.open("ab", buffering=0) as end:
            try:
                if end.write(whole) != len(whole):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                end.truncate(len(before))  # half a line would make the whole file unreadable for the proxy
                raise
    except OSError as error:
        raise RecipeError(
            f"the key cannot be saved: {error.strerror}",
            where=str(file),
            todo="name a file in a folder that exists, that you can write and that has room",
        ) from error
