"""The file of a run's engine key: outside the run directory, in a folder of its user, readable by that user only.

It is there for `verify`, and for a detached launcher, which takes it over from `up`. The launcher writes it again when
it is gone: a logout removes XDG_RUNTIME_DIR, and the next login makes it anew.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pdserve.errors import AS_ITS_USER, NOT_OURS, StateError


def usual_folder(environ: Mapping[str, str], uid: int) -> Path:
    """Where this session keeps its keys. A relative XDG_RUNTIME_DIR counts for none, as its specification has it."""
    chosen = environ.get("XDG_RUNTIME_DIR", "")
    return Path(chosen if chosen.startswith("/") else f"/tmp/pdserve-{uid}")  # noqa: S108  (mode 0700, checked)


def save(file: Path, key: str) -> None:
    """Writes a key that is not there yet. Raises StateError if it cannot, or the folder is not ours."""
    try:
        _save(file, key)
    except OSError as error:
        raise StateError(
            "the engine key cannot be saved",
            where=str(file),
            cause=str(error),
            todo="set XDG_RUNTIME_DIR to a folder that only you may write to",
        ) from None


def _save(file: Path, key: str) -> None:
    folder = file.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(folder)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(key)


def read(file: Path) -> str:
    """Raises StateError when it is gone or belongs to another user, or file or folder are not ours alone."""
    try:
        _check_folder(file.parent)
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise StateError(
                    "the engine key is in a file that is not ours alone",
                    where=str(file),
                    cause=f"it belongs to uid {status.st_uid}, with mode {status.st_mode & 0o777:04o}",
                    todo="remove it: a launcher that lives writes it anew within seconds",
                )
            return stream.read()
    except FileNotFoundError:
        raise StateError(
            "the file of the engine key is gone",
            where=str(file),
            cause="a logout has removed the folder (XDG_RUNTIME_DIR ends with the last session of its user), a cleaner "
            "of /tmp has taken it, or the deployment is down or was started on another host",
            todo="if it is ready in `pdserve status`: log in again, so that the folder is there, and its launcher "
            "writes the file anew within seconds; `loginctl enable-linger` keeps the folder for good",
        ) from None
    except OSError as error:
        raise StateError(
            "the engine key cannot be read",
            where=str(file),
            cause=f"{error.strerror}: {NOT_OURS}",
            todo=AS_ITS_USER,
        ) from None


def _check_folder(folder: Path) -> None:
    """StateError: the folder is a link, or another user's, who could read and replace the key."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StateError(
            "the folder for runtime secrets is not ours alone",
            where=str(folder),
            cause=f"it is {_kind_of(status)} of uid {status.st_uid}, with mode {status.st_mode & 0o777:04o}",
            todo="set XDG_RUNTIME_DIR to a folder that only you may write to, or have this one removed",
        )


def _kind_of(status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return "a symbolic link"
    return "a folder" if stat.S_ISDIR(status.st_mode) else "no folder, but a file"
