"""A run directory of a deployment that is over, with the events and logs that a test gives it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.doctor.read_run import read_logs, read_run
from pdserve.doctor.records import Diagnosis
from pdserve.doctor.rules import diagnose
from pdserve.plan.model import Plan
from pdserve.recipe.load import yaml12
from pdserve.run.directory import RunDir
from pdserve.run.state import DeploymentState, Phase, ProcessState
from pdserve.system.procfs import ProcessId
from tests.plan import kit

RECIPE: dict[str, Any] = {
    "schema": 1,
    "name": "test",
    "platform": "cpu",
    "status": "tested",
    "model": {"path": "models/tiny", "served_name": "tiny"},
    "engine": {"args": {"block-size": 128, "max-num-seqs": 16}, "env": {"VLLM_CPU_KVCACHE_SPACE": 1}},
    "prefill": {"connector": kit.MULTI, "instances": 2},
    "decode": {"connector": kit.MOONCAKE, "instances": 2},
    "lmcache": {"l1_size_gb": 1, "transfer_mode": "auto"},
}
TOKEN = "0123456789abcdef0123456789abcdef"
GONE = ProcessId(pid=2**22, start_ticks=1)


def plan() -> Plan:
    return kit.plan(kit.recipe(RECIPE))


def run_dir(
    folder: Path,
    *,
    events: Sequence[Mapping[str, Any]] = (),
    logs: Mapping[str, Sequence[str]] | None = None,
    phase: Phase = "stopped",
    plan_of_it: Plan | None = None,
) -> RunDir:
    """As `up` and `down` leave it, of 2P2D with LMCache. `logs`: process -> lines."""
    run = RunDir.create(folder / "home", "test", "20261124-105058-230a13")
    planned = plan_of_it or plan()
    processes = {
        process.name: ProcessState(role=process.role, node=process.node, phase="stopped")
        for process in planned.processes
    }
    state = DeploymentState(
        name="test",
        run_id=run.run_id,
        phase=phase,
        host=os.uname().nodename,
        launcher=GONE,
        token=TOKEN,
        processes=processes,
        started_at=1795517477.0,
    )
    run.write(run.recipe, yaml12.dump(RECIPE))
    run.write(run.plan, planned.model_dump_json())
    run.write(run.state, state.model_dump_json())
    run.write(run.versions, json.dumps(kit.VERSIONS.model_dump()))
    for event in events:
        run.append_event(event["event"], **{key: value for key, value in event.items() if key != "event"})
    for process, lines in (logs or {}).items():
        (run.path / planned.process(process).log).write_text("".join(f"{line}\n" for line in lines))
    run.point_current()
    return run


def diagnosed(run: RunDir) -> list[Diagnosis]:
    """What the doctor makes of it."""
    records = read_run(run)
    return diagnose(records, read_logs(run, records))


def only(run: RunDir) -> Diagnosis:
    """The only cause that it names."""
    [diagnosis] = diagnosed(run)
    return diagnosis


def rules(run: RunDir) -> set[str]:
    """The names of the causes."""
    return {diagnosis.rule for diagnosis in diagnosed(run)}


def died(process: str, code: int, **fields: Any) -> dict[str, Any]:
    """The event of a death."""
    how = f"exited with code {code}" if code >= 0 else f"killed by signal {-code}"
    return {"event": "died", "name": process, "pid": 1, "code": code, "how": how, "seconds": 12.7, **fields}
