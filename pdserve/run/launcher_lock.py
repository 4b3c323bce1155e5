"""The lock of a deployment, which its launcher holds: only its user can open it, and errors name the holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.errors import AS_ITS_USER, MAKE_ROOM, NOT_OURS, StateError
from pdserve.logs.rotation import NO_ROOM
from pdserve.system import procfs

_COMMAND_CHARACTERS = 100
_NO_FOLDER = (FileNotFoundError, NotADirectoryError)
"""Making the folder has the better error."""


class TakenError(StateError):
    """Another process holds it."""


class Lock:
    """In the hands of the launcher. A lock whose file is removed or replaced protects nothing: it is taken anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor: int | None = None

    def take(self) -> None:
        """Raises TakenError when another process holds it, StateError when it cannot be opened, and OSError."""
        while not self._held():
            descriptor = _open(self._file, os.O_CREAT)
            try:
                _take(descriptor, self._file)
            except (StateError, OSError):
                os.close(descriptor)
                raise
            self.close()
            self._descriptor = descriptor

    def _held(self) -> bool:
        """Whether what we hold is the file that the next one opens."""
        try:
            return self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), self._file.lstat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Lets go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def held(file: Path) -> Iterator[Lock]:
    """Holds it for the block; the kernel lets go of it when this process dies, however it dies.

    Raises TakenError when another process holds it, and StateError when it cannot be opened.
    """
    lock = Lock(file)
    try:
        lock.take()
        yield lock
    finally:
        lock.close()


def check_free(file: Path) -> None:
    """StateError: a process holds it. Where nothing was ever started there is none."""
    with contextlib.suppress(*_NO_FOLDER):
        descriptor = _open(file, 0)
        try:
            _take(descriptor, file)
        finally:
            os.close(descriptor)


def is_free(file: Path) -> bool:
    """Whether no process holds it, in whatever PID namespace. False where there is none, or it cannot be opened."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _open(file: Path, flags: int) -> int:
    """A lock that another user can open he can hold, also if he can only read it."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    except _NO_FOLDER:
        raise
    except OSError as error:
        full = error.errno in NO_ROOM
        raise StateError(
            "the lock of this deployment cannot be opened",
            where=str(file),
            cause=error.strerror if full else f"{error.strerror}: {NOT_OURS}",
            todo=MAKE_ROOM if full else f"{AS_ITS_USER}, or remove the file if nothing of it runs",
        ) from None
    if os.fstat(descriptor).st_mode & 0o077:  # of a version that left it open
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o600)
    return descriptor


def _take(descriptor: int, file: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(file, procfs.lock_holder(os.fstat(descriptor))) from None


def _taken(file: Path, pid: int | None) -> TakenError:
    name = file.parent.name
    uid = None if pid is None else procfs.owner(pid)
    who = "its holder cannot be seen from here: another machine that shares this folder, or another PID namespace"
    if pid is not None:
        who = f"PID {pid} ({procfs.command(pid)[:_COMMAND_CHARACTERS] or 'unknown'}) of {_user(uid)} holds the lock"
    if uid in (None, os.geteuid()):
        return TakenError(
            f"{name} is being started or served by another pdserve up",
            where=str(file),
            cause=who,
            todo="pdserve status; pdserve up again once it is ready starts what is missing",
        )
    return TakenError(
        f"{name} cannot be started: its lock is held by another user",
        where=str(file),
        cause=who,
        todo=f"have {_user(uid)} or root end PID {pid}; no other user can open the file from now on (mode 0600)",
    )


def _user(uid: int | None) -> str:
    if uid is None:
        return "an unknown user"
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
