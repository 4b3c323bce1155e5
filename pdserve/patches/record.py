"""Proof of life: each process of an engine says which patches are active in it, to its log and to a folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pdserve.distributions import installed


def report(patches: Sequence[str], folder: str | None) -> None:
    """One line on stderr, whatever vLLM's log level, and `<folder>/<pid>.json` when a folder is given."""
    process = process_name()
    print(
        f"pdserve patches active: {', '.join(patches)} (pid {os.getpid()}, process {process})",
        file=sys.stderr,
        flush=True,
    )
    if not folder:
        return
    record = {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "process": process,
        "patches": list(patches),
        "versions": installed(),
    }
    # Renamed into place: a reader sees a whole record or none.
    target = Path(folder) / f"{os.getpid()}.json"
    partial = target.with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(record) + "\n")
    partial.replace(target)


def process_name() -> str:
    """EngineCore, VllmWorker-0, ... as vLLM names its children; for a main process the module that it runs."""
    name = multiprocessing.current_process().name
    if name != "MainProcess":
        return name
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name or name
