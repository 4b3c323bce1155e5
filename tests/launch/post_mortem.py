"""What a deployment can say of a test that failed on it: its last events, why it failed, the ends of its logs.

A failure that is seen once, on another machine, must explain itself from the report alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from pdserve.errors import PdserveError
from tests.launch.deployment import Deployment

_EVENTS, _LINES, _WIDTH = 12, 25, 240


def post_mortem(deployment: Deployment) -> str:
    """The report's section; empty if nothing was recorded."""
    try:
        return "\n".join(_lines(deployment))
    except (OSError, PdserveError):
        return ""


def _lines(deployment: Deployment) -> Iterator[str]:
    run = deployment.run
    for event in deployment.events()[-_EVENTS:]:
        yield _cut(json.dumps(event))
    logs = sorted((run.path / process.log) for process in run.read_plan().processes)
    for file in (run.failure, *logs):
        if file.exists():
            yield f"-- {file.name}"
            yield from map(_cut, file.read_text(errors="replace").splitlines()[-_LINES:])


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}..."
