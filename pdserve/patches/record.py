"""Proof of life: each process of an engine reports its active patches in its log and in a folder.

The record is `<folder>/<pid>.json` (PatchRecord). It is written once when the patches are in, and again about a second
after an effect was counted, by a thread that exists only once there is something to count.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.atomic_write import replace_text
from pdserve.errors import StartError
from pdserve.installed.distributions import installed
from pdserve.patches import effects

_WRITE_EVERY_SECONDS = 1.0


@dataclass
class Standing:
    """What this process did with each patch that it was given."""

    active: list[str] = field(default_factory=list)
    allowed_unknown: list[str] = field(default_factory=list)
    """Active although the code is unknown: the recipe allowed it."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Optional patches that were left out -> why."""
    not_needed: dict[str, str] = field(default_factory=dict)
    """Patches whose correction the code has itself -> why."""


_current = Standing()


def begin() -> Standing:
    """A new standing for this process, which `left_out` looks at from now on."""
    global _current
    _current = Standing()
    return _current


def is_active(patch: str) -> bool:
    """Whether the patch has been applied in this process: for a patch that depends on an earlier one."""
    return patch in _current.active


def left_out(patch: str) -> bool:
    """Whether this process was given the patch and did without it: a module of pdserve.connectors then hands vLLM
    upstream's own class."""
    return patch in _current.skipped or patch in _current.not_needed


class Publisher:
    """Writes the record of this process, and writes it again as effects are counted. Owns one daemon thread."""

    def __init__(self, standing: Standing, folder: str | None) -> None:
        self._standing = standing
        self._folder = Path(folder) if folder else None
        self._dirty = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Prints the patches on stderr, whatever vLLM's log level, and writes the first record.

        Raises StartError when the record cannot be written: there would be no proof that the patches are active.
        """
        active = ", ".join(self._standing.active) or "none"
        print(f"pdserve patches active: {active} (pid {os.getpid()}, process {process_name()})", file=sys.stderr)
        for name, why in self._standing.skipped.items():
            print(f"WARNING: pdserve patch {name} is left out: {why}", file=sys.stderr)
        sys.stderr.flush()
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._write()
            except OSError as error:
                # One line: all that a log shows of an exception is its message.
                raise StartError(
                    f"this process cannot report its patches in {self._folder}: {error}; the run directory must be "
                    "writable, and its disk not full, on every node"
                ) from error
            effects.notify(self._changed)
            os.register_at_fork(after_in_child=self._forked)

    def _changed(self) -> None:
        self._dirty.set()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pdserve-patch-record", daemon=True)
                self._thread.start()

    def _forked(self) -> None:
        # The name of a forked child is not set yet, so the thread writes its first record, not this hook.
        effects.forget()
        self._dirty, self._starting, self._thread = threading.Event(), threading.Lock(), None
        self._changed()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._dirty.wait()
            pause.wait(_WRITE_EVERY_SECONDS)
            self._dirty.clear()
            try:
                self._write()
            except OSError as error:
                # A full disk or a run directory that is gone: the engine serves on, the next change tries again.
                print(f"WARNING: pdserve patch record was not written: {error}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        assert self._folder is not None
        replace_text(self._folder / f"{os.getpid()}.json", json.dumps(self._record()) + "\n")

    def _record(self) -> dict[str, Any]:
        counted: dict[str, dict[str, float]] = {}
        for (patch, effect), value in effects.totals().items():
            counted.setdefault(patch, {})[effect] = value
        return {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "process": process_name(),
            "kind": process_kind(process_name()),
            "active": self._standing.active,
            "allowed_unknown": self._standing.allowed_unknown,
            "skipped": self._standing.skipped,
            "not_needed": self._standing.not_needed,
            "effects": counted,
            "versions": installed(),
        }


def process_name() -> str:
    """EngineCore, VllmWorker-0, ... as vLLM names its children; for a main process the module that it runs."""
    name = multiprocessing.current_process().name
    if name != "MainProcess":
        return name
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name or name


_SERVERS = ("vllm", "vllm.entrypoints.cli.main", "pdserve.patches.vllm_cpu_serve_main")


def process_kind(name: str) -> str:
    """ProcessKind of a process by its name, or `other`: vLLM inspects models in a process of their own, too."""
    if name.startswith("EngineCore"):
        return "engine-core"
    if "Worker" in name:
        return "worker"
    if "lmcache" in name:
        return "lmcache-server"
    if name.startswith("ApiServer") or "api_server" in name or name in _SERVERS:
        return "api-server"
    return "other"
