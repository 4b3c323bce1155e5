"""Which folders of a deployment are runs of this user: nothing else there is pdserve's to remove."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_NAME = re.compile(r"(?:preflight-)?([0-9]{8}-[0-9]{6}-[0-9a-f]{6})")


def is_run_name(name: str) -> bool:
    """Whether a folder of a run, or of a look before one, may be called so."""
    return _NAME.fullmatch(name) is not None


def named_runs(deployment: Path) -> dict[Path, str]:
    """Folder -> when it began, for sorting: those that have the name of a run and are ours. Raises OSError."""
    return {path: match[1] for path in deployment.iterdir() if (match := _NAME.fullmatch(path.name)) and is_ours(path)}


def is_ours(folder: Path) -> bool:
    """A folder, no link to one, of this user, which no other user can write: what stands in it we have put there."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
