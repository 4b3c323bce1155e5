"""Where the ledger of a node's shared memory is."""

from __future__ import annotations

from pathlib import Path


def ledger_file(run_dir: Path, node: str) -> Path:
    """In the run directory, so that it is there when its agent is not."""
    return run_dir / f"shm@{node}.json"
