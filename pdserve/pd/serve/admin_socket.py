"""The admin's unix socket: a file that others may have made, or may have put in the place of ours.

Only a socket of this user at which no process answers is replaced: what a killed proxy left. At the end only the
file that we made is removed. The folder is locked meanwhile, so that two proxies that start at once do not take each
other's file for such a rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_BACKLOG = 64


class AdminSocket:
    """Listens from the start, and answers nothing before it is served: so other proxies see that it is in use."""

    def __init__(self, path: Path) -> None:
        """OSError: the path cannot be had, and why."""
        self._path = path
        with _locked(path.parent):
            if _is_a_rest(path):
                path.unlink()
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                self.listener.bind(str(path))
                self.listener.listen(_BACKLOG)
            except OSError:
                self.listener.close()
                raise
            finally:
                os.umask(before)
            self._made = _identity(path)

    def remove(self) -> None:
        """The file, if it is still ours. To be called before the listener is closed: until then its number
        is not another file's."""
        with contextlib.suppress(OSError), _locked(self._path.parent):
            if _identity(self._path) == self._made:
                self._path.unlink()


def _is_a_rest(path: Path) -> bool:
    """Return whether there is a socket that may be replaced. OSError: it may not."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(info.st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file, and it is no socket")
    if info.st_uid != os.geteuid():
        raise FileExistsError(errno.EEXIST, f"there is a socket of another user (uid {info.st_uid})")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError as error:
            raise FileExistsError(
                errno.EEXIST, f"there is a socket that may be in use ({(error.strerror or str(error)).lower()})"
            ) from error
    raise FileExistsError(errno.EEXIST, "another process answers there, perhaps another proxy of this deployment")


def _identity(path: Path) -> tuple[int, int]:
    info = path.lstat()
    return info.st_dev, info.st_ino


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other proxies. The lock is the folder's own: no file is left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
