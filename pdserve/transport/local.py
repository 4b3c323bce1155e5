"""The agent of this machine: a child in a session of its own, so that a Ctrl-C of the terminal is not its business."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pdserve.process import spawn_piped
from pdserve.protocol import Event
from pdserve.transport.link import AgentLink


def open_local_agent(node: str, run_dir: Path, run_id: str, receive: Callable[[Event], None]) -> AgentLink:
    """Starts the agent and its guard. They end when the link is closed or this process dies."""
    argv = [
        *(sys.executable, "-m", "pdserve.agent"),
        *("--node", node, "--run-dir", str(run_dir), "--run-id", run_id),
    ]
    popen = spawn_piped(argv, env=os.environ, stderr=run_dir / "logs" / f"agent@{node}.log")
    return AgentLink(node, popen, receive)
