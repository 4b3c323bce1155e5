"""All that the verdict on a measurement rests on. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.bench.records import RequestRecord
from pdserve.bench.snapshot import DeploymentSnapshot, grown
from pdserve.bench.workload import Load, Workload
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan


class CpuUse(Frozen):
    """Of a program between the first request and the last answer, in cores. None: it was not measured."""

    used: float | None = None
    wanted: float | None = None
    """Of the main thread of its busiest process: the share of the time in which it ran or waited for a CPU."""


@dataclass(frozen=True)
class Evidence:
    """Of a single measurement: a load, once."""

    plan: Plan
    workload: Workload
    load: Load
    records: Sequence[RequestRecord]
    before: DeploymentSnapshot
    after: DeploymentSnapshot
    run_id: str
    """Of the deployment that the benchmark began with."""
    plan_digest: str
    """Of `plan`."""
    events: Sequence[Mapping[str, Any]] = ()
    """The history of the run in between."""
    client: CpuUse = field(default_factory=CpuUse)
    client_problem: str = ""
    """Why the client gave no result."""
    warmup: Sequence[RequestRecord] | None = None
    """Its requests; None: none was asked for."""
    warmup_problem: str = ""
    """As `client_problem`, of the warm-up."""
    asked_input: int | None = None
    """Tokens of all prompts of the trace together; None: it does not have them."""
    theory: float = 0.0
    """The share of its prompts that a trace repeats itself, answers of earlier turns among them."""
    clock_moved: float = 0.0
    """Seconds between the least and the most by which the wall clock was ahead of the monotonic one meanwhile."""

    @property
    def done(self) -> list[RequestRecord]:
        return [record for record in self.records if record.ok]

    @property
    def slowest(self) -> float:
        """Seconds that an answer took at most."""
        return max((record.e2e for record in self.done), default=0.0)

    @property
    def longest_prompt(self) -> int:
        """In tokens: as asked for, else as the server counted."""
        return self.workload.input_tokens or max((record.prompt_tokens for record in self.done), default=0)

    def names(self, *roles: str) -> list[str]:
        """Of the workers that have such a role."""
        return [worker.name for worker in self.plan.proxy.workers if worker.role in roles]

    def engines(self, *roles: str) -> dict[str, float]:
        """What the engines of these roles counted together."""
        return self.counted_by(*self.names(*roles))

    def counted_by(self, *names: str) -> dict[str, float]:
        """What these engines counted together."""
        return grown(self.before.engines, self.after.engines, names)

    def caches(self, *names: str) -> dict[str, float]:
        """What these LMCache servers counted together; without a name, all of them."""
        return grown(self.before.caches, self.after.caches, names or self.after.caches)

    def proxy(self) -> dict[str, float]:
        """What the proxy counted."""
        return grown({"proxy": self.before.proxy}, {"proxy": self.after.proxy}, ("proxy",))
