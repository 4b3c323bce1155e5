"""Hold what was read of a run, as data, and what is made of it: the rules see this and nothing else."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pdserve.installed.versions import Versions
from pdserve.observe.metrics import EngineSnapshot, LmcacheSnapshot, ProxySnapshot, StoreSnapshot
from pdserve.plan.model import Plan
from pdserve.recipe.sections import Lmcache
from pdserve.roles import EngineRole
from pdserve.run.state import DeploymentState
from pdserve.system.pressure import Pressure


@dataclass(frozen=True)
class ProcessLog:
    """The lines of one process, without colours. A long log is its beginning and its end."""

    process: str
    role: str
    file: str
    """Relative to the run directory."""
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """The failure in failure.md, which is all that there is of a run that failed before it started a process."""

    what: str
    cause: str = ""
    todo: str = ""


@dataclass(frozen=True)
class LiveFigures:
    """The figures that the processes report now, by name; empty for a run that is over."""

    engines: Mapping[str, EngineSnapshot] = field(default_factory=dict)
    caches: Mapping[str, LmcacheSnapshot] = field(default_factory=dict)
    stores: Mapping[str, StoreSnapshot] = field(default_factory=dict)
    proxy: ProxySnapshot | None = None
    pressure: Mapping[str, Pressure] = field(default_factory=dict)
    """The pressure of the processes on this machine."""


@dataclass(frozen=True)
class RunRecords:
    """Holds everything of a run but the logs, which are read one by one because they may be long."""

    run_dir: str
    phase: str
    """As `pdserve status` shows it; empty: nothing was started."""
    alive: bool = False
    """Its launcher lives."""
    state: DeploymentState | None = None
    plan: Plan | None = None
    versions: Versions = field(default_factory=Versions)
    """As preflight has recorded them."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe, as a document."""
    failure: Failure | None = None
    events: tuple[Mapping[str, Any], ...] = ()
    live: LiveFigures = field(default_factory=LiveFigures)
    unread: tuple[str, ...] = ()
    """What could not be read, each with why."""

    def role(self, process: str) -> str:
        """Return a process's role by the plan, else by the name: prefill-0 is a prefill."""
        for planned in self.plan.processes if self.plan is not None else ():
            if planned.name == process:
                return planned.role
        return process.rpartition("-")[0] or process


_SHOWN = 3
"""Lines of evidence that are kept of one cause."""


@dataclass(frozen=True)
class EvidenceLine:
    """One line of a file of the run, or one figure of a live process."""

    source: str
    """The file, relative to the run directory, or where the figure was read: /metrics of prefill-0."""
    at: str
    """When, as the line has it; empty where it has no time."""
    text: str

    def line(self) -> str:
        return f"{self.source}{f' at {self.at}' if self.at else ''}: {self.text}"


@dataclass(frozen=True)
class Diagnosis:
    """Describes a cause that was found."""

    rule: str
    """Its name in docs/doctor.md."""
    processes: tuple[str, ...]
    """Where it was seen; empty: the deployment as a whole."""
    cause: str
    todo: str
    evidence: tuple[EvidenceLine, ...]
    setting: str = ""
    """KEY=VALUE of the recipe, for --set; empty where no key of the recipe removes the cause."""
    times: int = 1
    """How often it was seen."""

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain data. Its keys are stable."""
        return asdict(self)


def merge_diagnoses(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Merge the same cause of several processes, or of one several times, into one entry, in the order of the first."""
    kept: dict[tuple[str, str, str, str], Diagnosis] = {}
    for each in diagnoses:
        key = (each.rule, each.cause, each.todo, each.setting)
        before = kept.get(key)
        kept[key] = (
            replace(each, evidence=each.evidence[:_SHOWN])
            if before is None
            else replace(
                before,
                processes=tuple(dict.fromkeys((*before.processes, *each.processes))),
                evidence=(*before.evidence, *each.evidence)[:_SHOWN],
                times=before.times + each.times,
            )
        )
    return list(kept.values())


Event = Mapping[str, Any]
HISTORY = "events.jsonl"
_BEYOND = 1e15
"""No field of ours is that large."""
_NO_FIELDS = ("at", "event")
_ANSWERS = {"died": ("cause", "todo"), "late": ("cause", "todo")}
"""What is said beside the evidence."""


def events_of(records: RunRecords, kind: str) -> list[Event]:
    """Return the events of one kind, the oldest first."""
    return [event for event in records.events if event.get("event") == kind]


def evidence_of(event: Event) -> EvidenceLine:
    """Return an event as a line of evidence: its kind and its fields."""
    left_out = (*_NO_FIELDS, *_ANSWERS.get(text(event, "event"), ()))
    fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in left_out)
    return EvidenceLine(HISTORY, clock(event), f"{event.get('event')} {fields}".strip())


def clock(event: Event) -> str:
    """Return an event's time in this machine's, as logs have theirs."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(number(event, "at")))
    except (OverflowError, ValueError, OSError):
        return ""


def text(event: Event, key: str) -> str:
    """Return a field as a word."""
    value = event.get(key)
    return "" if value is None else str(value)


def number(event: Event, key: str) -> float:
    """Return a field as a number."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if abs(value) < _BEYOND else 0.0  # nor of NaN


_CHANGE = re.compile(r"([=*+])")
_SINGLE = ("instances", "workers")
"""Keys whose default is 1: of roles, and of the proxy."""
_CPU_KV = "VLLM_CPU_KVCACHE_SPACE"
_SEATS = 256
"""vLLM's max-num-seqs where no recipe sets it."""


def value_at(recipe: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None: the recipe does not set it."""
    here: Any = recipe
    for part in key.split("."):
        if not isinstance(here, Mapping):
            return None
        here = here.get(part)
    return here


def fill_setting(setting: str, records: RunRecords) -> str:
    """Return `KEY=VALUE` for `KEY=VALUE`, `KEY*2` (twice of what the run had, and not less than the default) or
    `KEY+1`; empty where what the run had is not known, and where it had that value already."""
    key, change, value = _CHANGE.split(setting, maxsplit=1) if setting else ("", "=", "")
    now = _value_now(records, key)
    if change == "=":
        return "" if str(now) == value else setting
    if not isinstance(now, int | float) or isinstance(now, bool):
        return ""
    return f"{key}={max(2 * now, _default(key)) if change == '*' else now + 1:g}"


def fewer_sequences(records: RunRecords, role: EngineRole) -> str:
    """Name the flag that halves the requests at once in each engine of a role, where the recipe has it now."""
    for section in (role, "engine"):
        seats = value_at(records.recipe, f"{section}.args.max-num-seqs")
        if isinstance(seats, int) and not isinstance(seats, bool) and seats > 1:
            return f"{section}.args.max-num-seqs={seats // 2}"
    return f"{role}.args.max-num-seqs={_SEATS // 2}"


def less_memory(records: RunRecords, role: str, lacking: int) -> str:
    """Return the largest piece of host memory that the recipe asks for, less what the process lacked (bytes): the L1 of
    an LMCache server, the KV of an engine on a CPU. Empty where it asks for none, or all of it lacked."""
    if role == "lmcache":
        l1 = _value_now(records, "lmcache.l1_size_gb")
        return _reduce_gib("lmcache.l1_size_gb", l1, lacking, 0.1)
    for section in (role, "engine"):
        key = f"{section}.env.{_CPU_KV}"
        if (space := value_at(records.recipe, key)) is not None:
            return _reduce_gib(key, space, lacking, 1)
    return ""


def _reduce_gib(key: str, now: object, lacking: int, step: float) -> str:
    """Return GiB, down to a multiple of `step`: VLLM_CPU_KVCACHE_SPACE is a whole number."""
    if isinstance(now, str) and now.isdecimal():
        now = int(now)
    if not isinstance(now, int | float) or isinstance(now, bool):
        return ""
    left = math.floor((now - lacking / 2**30) / step + 1e-9) * step
    return f"{key}={left:g}" if left >= step else ""


def _default(key: str) -> float:
    """Return the default of a number in the lmcache section; 0: it has none."""
    section, _, leaf = key.partition(".")
    default = Lmcache.model_fields[leaf].default if section == "lmcache" and leaf in Lmcache.model_fields else None
    return default if isinstance(default, int | float) and not isinstance(default, bool) else 0


def _value_now(records: RunRecords, key: str) -> Any:
    """Return the value that a key had in the run: of the recipe, or its default; None: not known."""
    section, _, leaf = key.partition(".")
    value = value_at(records.recipe, key)
    if value is not None or not records.recipe:
        return value
    if section == "lmcache" and leaf in Lmcache.model_fields:
        return Lmcache.model_fields[leaf].default
    return 1 if leaf in _SINGLE else None
