"""Makes a key of the proxy: `pdserve new-key`."""

from __future__ import annotations

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
    priority: int,
) -> None:
    """Print a new key, and its line or, with `file`, add the line to it."""
    key, line = keys.new_key(
        name,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
        priority=priority or None,
    )
    if file is None:
        typer.echo(key)
        typer.echo(line, err=True)
        return
    before = file.read_bytes() if file.exists() else b""
    if before and name in {known.name for known in keys.read(file)}:
        raise RecipeError(f"there is a key of the name {name} already", where=str(file), todo="choose another name")
    _append(file, (b"" if before.endswith(b"\n") or not before else b"\n") + line.encode() + b"\n")
    typer.echo(key)


def _append(file: Path, text: bytes) -> None:
    """Append to the file, which is made with mode 0600. Raises RecipeError; a part of the text may be there then."""
    try:
        file.touch(mode=0o600)
        with file.open("ab") as end:
            end.write(text)
    except OSError as error:
        raise RecipeError(
            f"the key cannot be saved: {error.strerror}",
            where=str(file),
            todo="name a file in a folder that exists, that you can write and that has room",
        ) from error
