"""What every load client has: how it is started, and its own record of each request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdserve.bench.records import RequestRecord
from pdserve.bench.snapshot import Clocks
from pdserve.bench.workload import Load, Workload
from pdserve.plan.model import Plan

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_PATCHES = "PDSERVE_PATCHES"
KEY = "OPENAI_API_KEY"
"""Where clients find the key of the deployment. It is in no argument and in no file."""


@dataclass(frozen=True)
class ClientRun:
    """A run of the client: what it sends, and where its files are."""

    plan: Plan
    workload: Workload
    load: Load
    salt: str
    """Prompts of another salt are not in any cache, so that the same prompts can be measured again."""
    seed: int
    folder: Path
    name: str
    """Of this run: its files begin with it."""
    warmup: bool = False

    @property
    def result(self) -> Path:
        """The client's own result, one file."""
        return self.folder / f"{self.name}.{'jsonl' if self.workload.client_for(self.load) == 'aiperf' else 'json'}"

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder / f"{self.name}.log"


class LoadClient(Protocol):
    """A program that sends requests and records each of them."""

    @property
    def name(self) -> str:
        """For people and provenance."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what the run of the deployment has not recorded."""

    @property
    def program(self) -> str:
        """The interpreter that runs it."""

    @property
    def tokenizer(self) -> str:
        """A folder, or a name at Hugging Face."""

    @property
    def timing(self) -> tuple[str, ...]:
        """How the titles of those of its processes begin that send and receive: the others may be busy."""

    def prepare(self, run: ClientRun) -> list[str]:
        """The command line. Writes the files that it needs, without secrets. Raises OSError."""

    def environment(self, run: ClientRun, environ: Mapping[str, str], key: str) -> dict[str, str]:
        """The key of the deployment is here and nowhere else."""

    def records(self, run: ClientRun, clocks: Clocks) -> tuple[RequestRecord, ...]:
        """Of a run that is over. `clocks`: read before it began. Raises OSError and UnreadableResultError."""

    def clean(self, run: ClientRun) -> None:
        """Removes what it has left outside of its folder."""


def direct(environ: Mapping[str, str]) -> dict[str, str]:
    """Ours, without the variables that would send its requests through the site's proxy (a client may obey them)."""
    return {name: value for name, value in environ.items() if name.lower() not in _PROXIES and name != _PATCHES}


def trusts_remote_code(plan: Plan, tokenizer: str) -> bool:
    """Whether the tokenizer's own code may run: it is that of the model, whose code the engines run already
    (trust-remote-code of the recipe)."""
    own = tokenizer in (plan.model_path, plan.model)
    return own and any("--trust-remote-code" in process.argv for process in plan.processes if process.is_engine)


def pinned_revision(plan: Plan, tokenizer: str) -> str | None:
    """Of a model of the hub whose tokenizer this is; None: the recipe names none."""
    return plan.revision if plan.model_path is None and tokenizer == plan.model else None
