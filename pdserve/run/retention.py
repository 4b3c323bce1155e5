"""Old runs of a deployment: which of them are kept, and how the others are removed.

Never removed: the newest run and the current one; a run of which anything lives, or may live where it cannot be seen;
what another user owns, or holds anything of; what has not the name of a run; and whatever a link leads to. The run
directory is one for all nodes (preflight proves that they share it), so that no other folder has anything to keep.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import NotOursError, StateError
from pdserve.node import agent_record
from pdserve.recipe.model import Retention
from pdserve.run.directory import RunDir, has_living_launcher
from pdserve.run.orphans import members
from pdserve.system import procfs
from pdserve.system.host import is_here
from pdserve.system.process import MARKER

_NAME = re.compile(r"(?:preflight-)?([0-9]{8}-[0-9]{6}-[0-9a-f]{6})")


def is_run_name(name: str) -> bool:
    """Return whether a folder of a run, or of a look before one, may be called so."""
    return _NAME.fullmatch(name) is not None


def named_runs(deployment: Path) -> dict[Path, str]:
    """Return when each run began, by its folder, for sorting: those that have the name of a run and are ours. Raises
    OSError."""
    return {path: match[1] for path in deployment.iterdir() if (match := _NAME.fullmatch(path.name)) and is_ours(path)}


def is_ours(folder: Path) -> bool:
    """Tell whether it is a folder, no link to one, of this user, which no other user can write: what stands in it we
    have put there."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def is_failed_look(run: RunDir) -> bool:
    """Tell whether nothing of a run was ever started, and nothing will be."""
    return run.failure.is_file() and not any(file.exists() for file in (run.recipe, run.plan, run.state))


def keep_failed_look(run: RunDir, report: str) -> None:
    """Write the report of a failed look, so that its run is not discarded. Without room for the report the run goes:
    the error has the end of each log too."""
    with contextlib.suppress(OSError):
        run.write(run.failure, report)


def discard(run: RunDir) -> None:
    """Removes the folder of a run in which nothing was started, unless it is kept; and that of its deployment, if it
    is the only one. What cannot be removed stays: the error of the start is the one to show."""
    if is_failed_look(run):
        return
    shutil.rmtree(run.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        run.path.parent.rmdir()


def discard_earlier(deployment: Path) -> None:
    """Remove the failed looks of a deployment, before the next one."""
    with contextlib.suppress(OSError):
        for path in named_runs(deployment):
            if is_failed_look(RunDir(path)):
                shutil.rmtree(path, ignore_errors=True)


_DAY_SECONDS = 86400.0
_UNSEEN_SECONDS = _DAY_SECONDS
"""A run that may live where it cannot be seen (another node, a start that has not begun, the record of another
version) is left alone until nothing was written for so long: a launcher writes every two seconds."""
_GOING = ".removed-"
"""Before the name of a run while it is removed: if that is interrupted, the next removal ends it."""
_EVERYTHING_STAYS = Retention(runs=0, days=0)


@dataclass(frozen=True)
class RemovedRun:
    """Describes a run that is removed, or would be."""

    path: Path
    size: int
    """Bytes of its files."""
    problem: str | None = None
    """Why it is still there; None: it is gone, or would be."""


def rule_of(deployment: Path) -> Retention:
    """Return the rule of a deployment, by the recipe of its current run. Raises StateError and NotOursError: what its
    recipe keeps is not known."""
    return RunDir(deployment / "current").read_plan().retention


def prune_all(root: Path, *, dry_run: bool = False) -> list[RemovedRun]:
    """Prune every deployment of this home, each by its own rule. Raises StateError."""
    try:
        folders = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise StateError("the record of deployments cannot be read", where=str(root), cause=str(error)) from None
    return [removed for folder in folders if is_ours(folder) for removed in _prune_by_its_rule(folder, dry_run)]


def _prune_by_its_rule(deployment: Path, dry_run: bool) -> list[RemovedRun]:
    """Prune a deployment by its own rule. Without one that can be read every run stays: its recipe may keep all of
    them."""
    try:
        return prune(deployment, rule_of(deployment), dry_run=dry_run)
    except (StateError, NotOursError) as error:
        others = prune(deployment, _EVERYTHING_STAYS, dry_run=dry_run)
        return [*others, RemovedRun(deployment, 0, _not_known(error))] if _has_old(deployment) else others


def _has_old(deployment: Path) -> bool:
    """Return whether a rule has anything to say there: the newest run stays by each."""
    try:
        return sum(not is_failed_look(RunDir(path)) for path in named_runs(deployment)) > 1
    except OSError:
        return False


def _not_known(error: StateError | NotOursError) -> str:
    cause = f" ({error.cause})" if error.cause else ""
    return (
        f"its old runs stay, because what its recipe keeps (`retention`) cannot be read: {error.where}: {error.what}"
        f"{cause}; {error.todo}. The next `pdserve up` of its recipe removes them by its rule"
    )


def prune(deployment: Path, rule: Retention, *, dry_run: bool = False) -> list[RemovedRun]:
    """Removes the old runs of one deployment, the oldest first. What cannot be removed is among the results.
    `dry_run`: only looks."""
    if not is_ours(deployment):
        return []
    if not dry_run:
        remove_empty_cgroups(deployment)
    try:
        interrupted = [path for path in sorted(deployment.iterdir()) if _is_being_removed(path.name) and is_ours(path)]
        old = _old_runs(deployment, rule)
    except OSError as error:
        return [RemovedRun(deployment, 0, str(error))]
    return [_remove(path, dry_run=dry_run) for path in (*interrupted, *old)]


def remove_empty_cgroups(deployment: Path) -> None:
    """Remove the cgroups of all runs whose agents and guards are gone: a killed one has not removed its own, and no
    process is in them."""
    with contextlib.suppress(OSError):
        for path in named_runs(deployment):
            agent_record.remove_empty_cgroups(path, path.name)


def _old_runs(deployment: Path, rule: Retention) -> list[Path]:
    """Return the old runs, with all failed looks, which are no runs and count for none. Raises OSError."""
    named = named_runs(deployment)
    looks = sorted(path for path in named if is_failed_look(RunDir(path)))
    runs = {path: began for path, began in named.items() if path not in looks}
    written = {path: _last_written(path) for path in sorted(runs, key=runs.__getitem__, reverse=True)[1:]}
    since = time.time() - rule.days * _DAY_SECONDS
    current = _current(deployment)
    beyond = [
        path
        for place, (path, at) in enumerate(written.items(), start=1)
        if ((rule.runs and place >= rule.runs) or (rule.days and at < since)) and not _is(path, current)
    ]
    if not beyond:
        return looks
    values = procfs.environment_values(MARKER).values()
    marked = {value.partition(b"/")[0].decode(errors="replace") for value in values}
    unmarked = (path for path in reversed(beyond) if path.name not in marked)
    return [*looks, *(path for path in unmarked if not _may_live(RunDir(path), written[path]))]


def _may_live(run: RunDir, written: float) -> bool:
    """Tell whether anything of a run lives, as far as this machine can know."""
    unseen = time.time() - written < _UNSEEN_SECONDS
    try:
        state = run.read_state()
    except NotOursError:
        return True
    except StateError:
        return unseen and (run.state.exists() or not run.failure.exists())
    if has_living_launcher(run, state) or members(state, run):
        return True
    over = state.phase in ("stopped", "failed")
    other_nodes = [node for node in state.nodes.values() if not is_here(node.hostname, node.place)]
    return unseen and (
        any(node.lost for node in other_nodes) if over else bool(other_nodes) or not is_here(state.host, state.place)
    )


def _remove(path: Path, *, dry_run: bool) -> RemovedRun:
    size = 0
    try:
        for file, status in _walk(path):
            if status.st_uid != os.geteuid():
                return RemovedRun(path, 0, f"{file} belongs to uid {status.st_uid}")
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
        if not dry_run:
            RunDir(path).forget_key()
            going = path if _is_being_removed(path.name) else path.with_name(f"{_GOING}{path.name}")
            path.rename(going)
            shutil.rmtree(going)
    except FileNotFoundError:
        pass  # removed by another process meanwhile
    except OSError as error:
        return RemovedRun(path, size, str(error))
    return RemovedRun(path, size)


def _is_being_removed(name: str) -> bool:
    return name.startswith(_GOING) and is_run_name(name.removeprefix(_GOING))


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all that is in a folder, at any depth. Links are not followed. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            yield Path(entry.path), status
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(Path(entry.path))


def _current(deployment: Path) -> os.stat_result | None:
    try:
        return (deployment / "current").stat()
    except OSError:
        return None


def _is(path: Path, status: os.stat_result | None) -> bool:
    return status is not None and os.path.samestat(path.stat(), status)


def _last_written(path: Path) -> float:
    """Return when a run's launcher, or what prepared the run, wrote last. The folder's own time does not count: also a
    look may change it."""
    run = RunDir(path)
    times = [
        file.stat().st_mtime
        for file in (run.beat, run.state, run.events, run.failure, run.plan, run.recipe)
        if file.exists()
    ]
    return max(times, default=path.stat().st_mtime)
