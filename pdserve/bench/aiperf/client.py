"""AIPerf as a client: its files, its command line, its environment."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.bench.aiperf import NAME, VERSION
from pdserve.bench.aiperf.configuration import configuration
from pdserve.bench.aiperf.hub_cache import put_into_cache
from pdserve.bench.aiperf.records import cut_records, of_aiperf
from pdserve.bench.clients.client import KEY, ClientRun, direct, pinned_revision, trusts_remote_code
from pdserve.bench.records import RequestRecord
from pdserve.bench.snapshot import Clocks
from pdserve.bench.traces.read import first_sessions
from pdserve.bench.traces.trace import RequestTrace

_EXPORT = "profile_export.jsonl"
_NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""What leads to packages of ours; and offline, AIPerf takes a tokenizer's folder for an id of the hub."""


@dataclass(frozen=True)
class AiperfClient:
    """How it is started against a deployment."""

    program: str
    """The interpreter of its own environment."""
    tokenizer: str
    """The folder of the model: its built-in tokenizer needs the network."""
    trace: RequestTrace | None = None
    name: str = NAME
    timing: tuple[str, ...] = ("aiperf worker_",)
    """They send, and take the times. Others read its records and are busy after each answer; the loop of its timing
    manager never sleeps (0.13.0), so that its use of a CPU says nothing."""

    @property
    def versions(self) -> Mapping[str, str]:
        """That of the pins."""
        return {"aiperf": VERSION}

    def prepare(self, run: ClientRun) -> list[str]:
        """Writes its configuration and the lines of the trace."""
        run.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _temporary(run).mkdir(mode=0o700)
        tokenizer: dict[str, Any] = {"name": self.tokenizer}
        if self._has_folder:
            tokenizer["name"] = put_into_cache(Path(self.tokenizer), _hub_cache(run))
        elif (revision := pinned_revision(run.plan, self.tokenizer)) is not None:
            tokenizer["revision"] = revision
        if trusts_remote_code(run.plan, self.tokenizer):
            tokenizer["trustRemoteCode"] = True
        trace, file = self._of(run), None
        if trace is not None:
            file = run.folder / ("trace.warmup.jsonl" if run.warmup else "trace.jsonl")
            if not file.exists():
                rows = (row for session in trace.sessions for row in session.rows)
                file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        config = run.folder / f"{run.name}.config.json"
        settings = configuration(run, tokenizer, _artifacts(run), trace, file)
        config.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        # -I: no package but its own.
        return [self.program, "-I", "-m", "aiperf", "profile", "--config", str(config)]

    def environment(self, run: ClientRun, environ: Mapping[str, str], key: str) -> dict[str, str]:
        """The key is where its configuration names it."""
        ours = {name: value for name, value in direct(environ).items() if name not in _NOT_THEIRS}
        insecure = {"AIPERF_HTTP_SSL_VERIFY": "false"} if run.plan.proxy.tls is not None else {}
        # It would keep every prompt in the user's cache folder, and leave its files and sockets in /tmp.
        places = {"AIPERF_DATASET_MMAP_CACHE_ENABLED": "false", "TMPDIR": str(_temporary(run))}
        hub = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(_hub_cache(run))} if self._has_folder else {}
        return {**ours, **insecure, **places, **hub, KEY: key}

    @property
    def _has_folder(self) -> bool:
        """Rather than a name at Hugging Face."""
        return Path(self.tokenizer).is_dir()

    def records(self, run: ClientRun, clocks: Clocks) -> tuple[RequestRecord, ...]:
        """Its record of each request becomes the result's own file."""
        export = _artifacts(run) / _EXPORT
        export.replace(run.result)
        asked = None if self.trace is None else self.trace.asked_output()
        records = of_aiperf(run.result.read_text(encoding="utf-8", errors="replace"), clocks, asked)
        return records + cut_records(run.log.read_text(encoding="utf-8", errors="replace"), records)

    def clean(self, run: ClientRun) -> None:
        """Its temporary files."""
        shutil.rmtree(_temporary(run), ignore_errors=True)

    def _of(self, run: ClientRun) -> RequestTrace | None:
        """Before a measurement, so many sessions that the warm-up has its requests."""
        if self.trace is None or not run.warmup:
            return self.trace
        some = next(
            (n for n in range(1, self.trace.roots) if self._first(n).requests >= run.load.requests), self.trace.roots
        )
        return self._first(some)

    def _first(self, sessions: int) -> RequestTrace:
        assert self.trace is not None
        return replace(self.trace, sessions=first_sessions(self.trace.sessions, sessions))


def _hub_cache(run: ClientRun) -> Path:
    return _temporary(run) / "hub"


def _artifacts(run: ClientRun) -> Path:
    return run.folder / f"{run.name}.aiperf"


def _temporary(run: ClientRun) -> Path:
    """Of this run alone. Its sockets are there, so that it cannot be in the folder of the result: the name of a socket
    has 107 bytes at most."""
    return (
        Path(tempfile.gettempdir()) / f"pdserve-{hashlib.sha256(f'{run.salt}{run.folder}'.encode()).hexdigest()[:16]}"
    )
