"""Every file name of a run, and how the files are written: atomically, or one line at a time.

    <home>/<deployment>/current -> <run id>
    <home>/<deployment>/<run id>/
        recipe.yaml  plan.json  versions.json      written before anything starts
        state.json                                 the launcher's view, replaced atomically
        failure.md                                 of a deployment that failed: cause first, then the evidence
        beat                                       the last sign of life of the launcher
        agent@<node>-<guard>.json                  who guards a node of this run, and in which cgroup (agent_record.py)
        key-folder                                 in which folder of its user the engine key is
        cleared@<node>                             `down`, typed on a node that was lost, has left nothing there
        events.jsonl                               the history: what started, became ready, died, was restarted;
                                                   events.jsonl.1 was before it
        logs/<process>@<node>.log                  one a process, from the first byte; .log.1, ... was cut off of it
        diagnostics/  patches/  weights/  inbox/   snapshots of hung processes; patch records; which commit a node
        evals/                                     has fetched; requests to the launcher; results of `pdserve eval`

Secrets are never written here. The engine key is in `key_file`, outside, readable by its owner only: for `verify`, and
for a detached launcher, which takes it over from `up`. The launcher writes it again when it is gone: a logout removes
XDG_RUNTIME_DIR, and the next login makes it anew. The lock of a deployment is held by its launcher: only its user can
open it, and errors name the holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.atomic_write import replace_text
from pdserve.errors import AS_ITS_USER, MAKE_ROOM, NOT_OURS, NotOursError, StateError
from pdserve.logs.rotation import NO_ROOM
from pdserve.plan.model import Plan, Versions
from pdserve.run import history
from pdserve.run.state import DeploymentState
from pdserve.run.stored_model import ModelT, read_model
from pdserve.system import procfs
from pdserve.system.host import is_here, is_named_here
from pdserve.system.procfs import is_stopped


def usual_folder(environ: Mapping[str, str], uid: int) -> Path:
    """Return the folder in which this session keeps its keys. A relative XDG_RUNTIME_DIR counts for none, as its
    specification has it."""
    chosen = environ.get("XDG_RUNTIME_DIR", "")
    return Path(chosen if chosen.startswith("/") else f"/tmp/pdserve-{uid}")  # noqa: S108  (mode 0700, checked)


def save_key(file: Path, key: str) -> None:
    """Writes a key that is not there yet. Raises StateError if it cannot, or the folder is not ours."""
    try:
        _write_key(file, key)
    except OSError as error:
        raise StateError(
            "the engine key cannot be saved",
            where=str(file),
            cause=str(error),
            todo="set XDG_RUNTIME_DIR to a folder that only you may write to",
        ) from None


def _write_key(file: Path, key: str) -> None:
    folder = file.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_key_folder(folder)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(key)


def read_key(file: Path) -> str:
    """Read an engine key. Raises StateError when the file is gone or belongs to another user, or file or folder are not
    ours alone."""
    try:
        _check_key_folder(file.parent)
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


def _check_key_folder(folder: Path) -> None:
    """Check that nobody else could read or replace a key in this folder. Raises StateError when it is a link, or not
    this user's alone."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StateError(
            "the folder for runtime secrets is not ours alone",
            where=str(folder),
            cause=f"it is {_kind_of_file(status)} of uid {status.st_uid}, with mode {status.st_mode & 0o777:04o}",
            todo="set XDG_RUNTIME_DIR to a folder that only you may write to, or have this one removed",
        )


def _kind_of_file(status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return "a symbolic link"
    return "a folder" if stat.S_ISDIR(status.st_mode) else "no folder, but a file"


_COMMAND_CHARACTERS = 100
_NO_FOLDER = (FileNotFoundError, NotADirectoryError)
"""Making the folder has the better error."""


class TakenError(StateError):
    """Says that another process holds the lock."""


class LauncherLock:
    """The lock in the hands of the launcher. A lock whose file is removed or replaced protects nothing: it is taken
    anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock. Raises TakenError when another process holds it, StateError when it cannot be opened, and
        OSError."""
        while not self._holds_lock():
            descriptor = _open_lock(self._file, os.O_CREAT)
            try:
                _take_lock(descriptor, self._file)
            except (StateError, OSError):
                os.close(descriptor)
                raise
            self.close()
            self._descriptor = descriptor

    def _holds_lock(self) -> bool:
        """Return whether what we hold is the file that the next one opens."""
        try:
            return self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), self._file.lstat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def hold_lock(file: Path) -> Iterator[LauncherLock]:
    """Hold a lock for the block; the kernel lets go of it when this process dies, however it dies.

    Raises TakenError when another process holds it, and StateError when it cannot be opened.
    """
    lock = LauncherLock(file)
    try:
        lock.take()
        yield lock
    finally:
        lock.close()


def check_lock_free(file: Path) -> None:
    """Check that no process holds a lock. Raises StateError when one does. Where nothing was ever started there is no
    lock."""
    with contextlib.suppress(*_NO_FOLDER):
        descriptor = _open_lock(file, 0)
        try:
            _take_lock(descriptor, file)
        finally:
            os.close(descriptor)


def is_lock_free(file: Path) -> bool:
    """Tell whether no process holds a lock, in whatever PID namespace. False where there is no lock, or it cannot be
    opened."""
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


def _open_lock(file: Path, flags: int) -> int:
    """Open a lock that is this user's alone: one that another user can open he can hold, also if he can only read
    it."""
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


def _take_lock(descriptor: int, file: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken_error(file, procfs.lock_holder(os.fstat(descriptor))) from None


def _taken_error(file: Path, pid: int | None) -> TakenError:
    name = file.parent.name
    uid = None if pid is None else procfs.owner(pid)
    who = "its holder cannot be seen from here: another machine that shares this folder, or another PID namespace"
    if pid is not None:
        who = (
            f"PID {pid} ({procfs.command(pid)[:_COMMAND_CHARACTERS] or 'unknown'}) of {_user_text(uid)} holds the lock"
        )
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
        todo=f"have {_user_text(uid)} or root end PID {pid}; no other user can open the file from now on (mode 0600)",
    )


def _user_text(uid: int | None) -> str:
    if uid is None:
        return "an unknown user"
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


BEAT_SECONDS = 2.0
"""Between two signs of life of a launcher."""
LIVES_SECONDS = 30.0
"""A sign of life that old still counts: clocks of two machines differ, and a network file system shows a file late."""
_LATE_SECONDS = 3 * BEAT_SECONDS


def home(environ: Mapping[str, str]) -> Path:
    """Return where deployments are recorded: PDSERVE_HOME, or the user's state directory. Raises StateError."""
    try:
        if chosen := environ.get("PDSERVE_HOME"):
            return Path(chosen).absolute()
        state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(state).absolute() / "pdserve"
    except FileNotFoundError:
        raise StateError(
            "the folder of deployments cannot be named",
            cause="PDSERVE_HOME (or XDG_STATE_HOME) is relative, and the current folder was removed",
            todo="cd to a folder that exists, or set PDSERVE_HOME to an absolute path",
        ) from None
    except RuntimeError:
        raise StateError(
            "there is no folder for deployments",
            cause=f"HOME is not set, and uid {os.getuid()} has no entry in the password file",
            todo="set PDSERVE_HOME to a folder of your own",
        ) from None


def new_run_id() -> str:
    """Sorts by time, unique without coordination."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


class RunDir:
    """One run of one deployment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.plan = path / "plan.json"
        self.versions = path / "versions.json"
        self.state = path / "state.json"
        self.events = path / "events.jsonl"
        self.beat = path / "beat"
        self.key_folder = path / "key-folder"
        self.failure = path / "failure.md"
        self.logs = path / "logs"
        self.diagnostics = path / "diagnostics"
        self.patches = path / "patches"
        self.inbox = path / "inbox"
        self._holds_lock: LauncherLock | None = None

    @property
    def run_id(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, root: Path, name: str, run_id: str) -> RunDir:
        """Make a new run with its folders. `point_current` makes it the deployment's current one. Raises as `make`."""
        run = cls(root / name / run_id)
        run.make()
        return run

    def make(self) -> None:
        """Makes the folders of a run, if they are not there. Raises StateError when they cannot be made."""
        try:
            _make_ours(self.path.parent)
            for folder in (self.path, self.logs, self.diagnostics, self.patches, self.inbox):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StateError(
                "the folder of this run cannot be made",
                where=str(self.path),
                cause=str(error),
                todo=MAKE_ROOM if error.errno in NO_ROOM else "set PDSERVE_HOME to a folder that you may write to",
            ) from None
        _check_folders(self.path.parent, self)

    @contextmanager
    def only_launcher(self) -> Iterator[None]:
        """Hold the deployment's lock, as its launcher does for as long as it lives; the kernel lets go of the lock when
        it dies, however it dies.

        Raises StateError when another launcher of this deployment holds it: two `up` at the same moment.
        """
        with hold_lock(_lock(self.path.parent)) as self._holds_lock:
            yield

    def keep_current(self) -> None:
        """Make sure for the launcher that it holds the lock, which a cleaner may have removed, and that `current` leads
        here. A newer launcher that holds the lock keeps `current`, until it ends. Raises OSError."""
        link = self.path.parent / "current"
        here = link.is_symlink() and str(link.readlink()) == self.run_id
        try:
            if self._holds_lock is not None:
                self._holds_lock.take()
        except TakenError:
            return
        except StateError:
            pass  # no file, or another user's: no launcher can open it
        if not here:
            self.point_current()

    def point_current(self) -> None:
        """Makes this run the one that `status`, `logs` and `down` mean."""
        link, temporary = self.path.parent / "current", self.path.parent / f".current-{self.run_id}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.run_id)
        temporary.rename(link)

    def write(self, file: Path, text: str) -> None:
        """Replace a file in one step, and make its folder."""
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)

    def write_beat(self) -> None:
        """Write the launcher's sign of life: when its file was written last. One that fails is tried again the next
        time."""
        try:
            self.write(self.beat, f"{time.time():.3f}\n")  # for people
        except OSError:
            with contextlib.suppress(OSError):
                os.utime(self.beat)  # needs no room on a full disk; the file server's clock sets it

    def cleared(self, node: str) -> Path:
        """Return the file whose presence means that nothing is left on a node that was lost."""
        return self.path / f"cleared@{node}"

    def remove_beat(self) -> None:
        """Remove the launcher's last sign of life, which must not outlive it: the launcher leaves."""
        with contextlib.suppress(OSError):
            self.beat.unlink(missing_ok=True)

    def append_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Adds a line to the history and returns it. `at` is wall-clock seconds. Raises OSError."""
        return history.append(self.events, kind, fields)

    def read_events(self, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the events from a byte of the history on, as far as they are kept, and the offset to go on from."""
        return history.read(self.events, offset)

    def read_state(self) -> DeploymentState:
        """Read the state of the run. Raises StateError when the run has none (it was never started), and NotOursError
        when it is not obeyed."""
        return _read_record(self.state, DeploymentState)

    def read_plan(self) -> Plan:
        """Return the plan as it was saved before the start. Raises StateError and NotOursError."""
        plan = _read_record(self.plan, Plan)
        if lacking := plan.lacking():
            raise StateError(
                "this plan.json is not whole",
                where=str(self.plan),
                cause=f"it was edited by hand: {', '.join(lacking)} is named in it and missing",
                todo=_anew(self.plan),
            )
        return plan

    def read_versions(self) -> Versions:
        """Read the versions of the packages that the plan was made for, as far as they are recorded."""
        try:
            document = json.loads(_contents(self.versions))
            return Versions.model_validate({name: document[name] for name in Versions.model_fields if name in document})
        except (OSError, NotOursError, ValueError, TypeError):
            return Versions()

    @property
    def key_file(self) -> Path:
        """Return the deployment's engine key, outside the run directory: where it was put, by whatever session that
        was."""
        folder = self.read_key_folder() or usual_folder(os.environ, os.getuid())
        return folder / f"pdserve-{self.run_id}.key"

    def read_key_folder(self) -> Path | None:
        """Return where the launcher's session keeps its keys; None where that is not recorded, or torn."""
        try:
            text = _contents(self.key_folder).decode()
        except (OSError, NotOursError, ValueError):
            return None
        return Path(text) if text.startswith("/") and "\0" not in text else None

    def save_key(self, key: str) -> None:
        """Writes the engine key for `verify` of the same user. Raises StateError if it cannot, or the folder is not
        ours."""
        folder = usual_folder(os.environ, os.getuid())
        save_key(folder / self.key_file.name, key)
        self.note_key_folder()

    def note_key_folder(self) -> None:
        """Says where this session keeps its keys, for others of the same user. Raises OSError."""
        self.write(self.key_folder, str(usual_folder(os.environ, os.getuid())))

    def forget_key(self) -> None:
        """Delete the key of a run that is over. It belongs to no other run: each has its own."""
        with contextlib.suppress(OSError):
            self.key_file.unlink(missing_ok=True)

    def delete_previous_key(self) -> None:
        """Delete the key of the last run, if that was another one. Nothing of it lives beside this launcher."""
        if (last := _current(self.path.parent.parent, self.path.parent.name)) is not None and last.path != self.path:
            last.forget_key()

    def read_key(self) -> str:
        """Read the engine key of the run. Raises StateError when it is gone or belongs to another user, or its file or
        folder is not ours alone."""
        return read_key(self.key_file)


def check_no_launcher(root: Path, name: str) -> None:
    """Check that no launcher holds the lock of this deployment. Raises StateError, which says who holds it."""
    check_lock_free(_lock(root / name))


def _lock(deployment: Path) -> Path:
    return deployment / "lock"


def _make_ours(folder: Path) -> None:
    """Make a deployment's folder for us alone: with a umask of 002 the group could write there, and with none
    everybody. Raises OSError."""
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o755, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o022:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~0o022)


def _check_folders(deployment: Path, run: RunDir) -> None:
    """Check that the folders of a run are ours. `deployment`: that of the deployment, whose `current` may lead
    anywhere. Raises NotOursError: what is recorded there may be another user's word, and it decides which processes are
    killed."""
    for folder in (deployment, run.path.parent, run.path):
        try:
            status = folder.stat()
            _check_ours(folder, status.st_uid, status.st_mode, folder)
        except FileNotFoundError:
            return  # nothing is recorded: reading it is the error
        except OSError as error:
            raise _no_record(folder, error) from None


def _check_ours(path: Path, uid: int, mode: int, folder: Path) -> None:
    """Refuse what is not ours, as ssh asks it of its files: they belong to who reads them, or to root, and no other
    user can write them."""
    if uid not in (0, os.geteuid()) and uid != _owner_in(folder):
        raise NotOursError(
            "this record belongs to another user, and is not obeyed",
            where=str(path),
            cause=f"it belongs to uid {uid}, and pdserve was started by uid {os.geteuid()}",
            todo=f"run pdserve as its owner (sudo -u '#{uid}' pdserve ...), or set PDSERVE_HOME to a folder "
            "of your own",
        )
    if mode & 0o022:
        raise NotOursError(
            "this record can be written by others, and is not obeyed",
            where=str(path),
            cause=f"it has mode {mode & 0o777:04o}",
            todo=f"look whether it is what you have started, then chmod go-w {path}; where a file system has no modes, "
            "set PDSERVE_HOME to a folder on another one",
        )


def _owner_in(folder: Path) -> int | None:
    """Return the owner of what we make there: a network file system may map root to another user."""
    try:
        with tempfile.TemporaryFile(dir=folder) as new:
            return os.fstat(new.fileno()).st_uid
    except OSError:
        return None


def _contents(file: Path) -> bytes:
    """Read a file that is ours. Raises NotOursError, and OSError: also of a pipe, which would block."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(file))
        # Where no other user comes, a umask of 002 does no harm to a file.
        mode = status.st_mode if file.parent.stat().st_mode & 0o011 else 0
        _check_ours(file, status.st_uid, mode, file.parent)
        return stream.read()


def _read_record(file: Path, model: type[ModelT]) -> ModelT:
    try:
        return read_model(model, _contents(file), file, other_version="take it down with that one", damaged=_anew(file))
    except FileNotFoundError:
        raise StateError(f"this run has no {file.name}", where=str(file.parent), todo="start it: pdserve up") from None
    except OSError as error:
        is_link = error.errno == errno.ELOOP and file.is_symlink()
        raise StateError(
            f"the {file.name} of this run cannot be read",
            where=str(file),
            cause="it is a symbolic link, which is not followed" if is_link else error.strerror or str(error),
            todo=_anew(file),
        ) from None


def _anew(file: Path) -> str:
    return (
        f"take {file.name} away: a launcher that lives writes it anew within seconds; if nothing of the run lives, "
        f"remove {file.parent}"
    )


def deployments(root: Path) -> list[RunDir]:
    """Return the current run of every deployment that was ever started, by name."""
    return list(_by_name(root).values())


def _by_name(root: Path) -> dict[str, RunDir]:
    try:
        folders = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise _no_record(root, error) from None
    runs = {folder.name: _current(root, folder.name) for folder in folders}
    return {name: run for name, run in runs.items() if run is not None}


def _current(root: Path, name: str) -> RunDir | None:
    current = root / name / "current"
    try:
        return RunDir(current.resolve()) if current.is_symlink() else None
    except RuntimeError:  # a link that leads to itself: reading there is the error
        return RunDir(current)
    except OSError as error:
        raise _no_record(current, error) from None


def _no_record(where: Path, error: OSError) -> StateError:
    return StateError("the record of deployments cannot be read", where=str(where), cause=str(error))


def has_living_launcher(run: RunDir, state: DeploymentState) -> bool:
    """Return whether the launcher of a run lives: on its machine by its PID; on others, over the shared folder, by its
    last sign of life, up to half a minute late. In another container of its machine, or before that was booted again,
    the lock shows at once that it is dead: it is not held.

    How old that is, is by the clock of the shared file system: those of two machines may differ by more.
    """
    if is_here(state.host, state.place):
        return state.launcher.alive()
    if is_named_here(state.host) and is_lock_free(_lock(run.path.parent)):
        return False
    since = beaten_since(run)
    return since is not None and since < LIVES_SECONDS


def seconds_unheard(run: RunDir) -> float | None:
    """Return the seconds since a launcher's last sign of life, once the next one is late: one that counts as living was
    killed since, on another machine, or is stopped, or cannot write. None: it is heard, or there was none at all."""
    since = beaten_since(run)
    return since if since is not None and since > _LATE_SECONDS else None


def beaten_since(run: RunDir) -> float | None:
    """Return the seconds since a launcher's last sign of life; None: there is none."""
    try:
        beat = os.open(run.beat, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            last = os.fstat(beat).st_mtime
        finally:
            os.close(beat)
    except OSError:
        return None
    return _time_at(run.path) - last


def _time_at(folder: Path) -> float:
    """Return the time of the file system; this machine's for one who may not write there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as new:
            return os.fstat(new.fileno()).st_mtime
    except OSError:
        return time.time()


def serves_without_record(run: RunDir) -> bool:
    """Return whether a run lives whose record may not be there: that one is asked for by its name."""
    try:
        return has_living_launcher(run, run.read_state())
    except (StateError, NotOursError):
        return False


def find(root: Path, name: str | None) -> RunDir:
    """Return the current run of a deployment; without a name the only one there is (one that runs, if only one does).

    Raises StateError and NotOursError.
    """
    if name is not None:
        if (named := _current(root, name)) is None:
            known = ", ".join(_by_name(root))
            raise StateError(
                f"no deployment called {name!r} was ever started",
                where=str(root),
                todo=f"known deployments: {known}" if known else "start one: pdserve up RECIPE",
            )
        _check_folders(root / name, named)
        return named
    everything = _by_name(root)
    running = {each: run for each, run in everything.items() if serves_without_record(run)}
    for some in (running, everything):
        if len(some) == 1:
            [(only, run)] = some.items()
            _check_folders(root / only, run)
            return run
    if not everything:
        raise StateError("nothing was started yet", where=str(root), todo="pdserve up RECIPE")
    names = ", ".join(running or everything)
    raise StateError("there is more than one deployment", todo=f"name one of: {names}")


LOST = "lost"
"""Phase of a deployment whose launcher was killed: its agents stop what it left."""
UNRESPONSIVE = "unresponsive"
"""Phase of a deployment whose launcher lives and is silent: no death is seen, no request is done."""


@dataclass(frozen=True)
class Silence:
    """The silence of a launcher that counts as living."""

    seconds: float | None
    """Since its last sign of life; None: there was none."""
    stopped: bool
    """Its process is seen to stand still (SIGSTOP, a debugger)."""


def measure_silence(run: RunDir, state: DeploymentState) -> Silence | None:
    """Return the silence of a launcher; None: it is heard. A process that stands still is seen at once, other silence
    once a sign of life is late."""
    if is_here(state.host, state.place) and is_stopped(state.launcher):
        return Silence(beaten_since(run), stopped=True)
    late = seconds_unheard(run)
    return None if late is None else Silence(late, stopped=False)


def phase_now(run: RunDir, state: DeploymentState) -> str:
    """Return the recorded phase, LOST or UNRESPONSIVE."""
    if has_living_launcher(run, state):
        return state.phase if measure_silence(run, state) is None else UNRESPONSIVE
    return state.phase if state.phase in ("stopped", "failed") else LOST


@contextmanager
def record_errors(run: RunDir) -> Iterator[None]:
    """Turn an OSError into a StateError: the block writes the record of this run."""
    try:
        yield
    except OSError as error:
        raise StateError(
            "the record of this run cannot be written",
            where=str(run.path),
            cause=error.strerror or str(error),
            todo=MAKE_ROOM,
        ) from error
