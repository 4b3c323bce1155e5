"""All checks of one node, carried out there."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from pdserve.errors import PdserveError
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.process import Process
from pdserve.preflight import files, ports
from pdserve.preflight.accelerators.firmware import find_firmware
from pdserve.preflight.accelerators.mooncake_wheel import find_mooncake_wheel
from pdserve.preflight.accelerators.shared_environment import find_shared_environment
from pdserve.preflight.connector_memory import find_connector_memory
from pdserve.preflight.devices import find_devices
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import Check, Finding, of_error
from pdserve.preflight.gpu_processes import find_gpu_processes
from pdserve.preflight.limits import find_memlock, find_open_files
from pdserve.preflight.memory import find_memory
from pdserve.preflight.of_plan import on_node
from pdserve.preflight.patches import find_patches
from pdserve.preflight.rdma import find_peer_memory, find_rdma
from pdserve.preflight.run_dir import find_run_dir


def check_node(
    plan: Plan,
    node: str,
    *,
    facts: NodeFacts,
    starting: Collection[str] | None = None,
    gives_back: Collection[LmcacheServer] = (),
    held_by_us: Collection[int] = (),
    mark: str | None = None,
) -> list[Finding]:
    """Everything that `node` must have for the processes that are `starting` on it (names; None: all of them).

    To be called on that node, with facts gathered there just before. `held_by_us`: ports of the running deployment,
    whose owners are stopped before they are needed again; `gives_back`: its LMCache servers here that are, so that the
    memory of those that replace them is not asked for on top of theirs. `mark`: of `run_dir.write_mark`; None: the run
    directory is not looked at.
    """
    wanted = [process for process in on_node(plan, node) if starting is None or process.name in starting]
    findings: list[Finding] = []
    if mark is not None:
        findings.append(find_run_dir(node, Path(plan.run_dir), mark))
    if wanted:
        findings.extend(_files(plan, node, wanted, held_by_us))
        findings.extend(find_patches(node, wanted))
        findings.extend(find_memory(plan, node, wanted, facts.memory, gives_back))
        findings.extend(find_connector_memory(plan, node, wanted, facts.memory, held_by_us, gives_back))
        findings.extend(find_open_files(node, wanted, facts))
        findings.extend(find_memlock(node, wanted, facts))
        findings.extend(find_devices(plan, node, wanted, facts))
        findings.extend(find_gpu_processes(plan, node, wanted, facts.devices_present))
        findings.extend(find_mooncake_wheel(plan, node, wanted))
        findings.extend(find_shared_environment(plan, node, wanted, os.environ))
        findings.extend(find_firmware(plan, node, wanted, os.environ))
        findings.extend(find_rdma(node, wanted))
        findings.extend(find_peer_memory(node, plan.platform, wanted))
    return findings


def _files(plan: Plan, node: str, wanted: Collection[Process], held_by_us: Collection[int]) -> list[Finding]:
    programs = ", ".join(dict.fromkeys(process.argv[0] for process in wanted))
    findings = [_tried(node, "program", programs, programs, lambda: files.check_programs(wanted))]
    if plan.model_path is not None and any(process.is_engine for process in wanted):
        need = f"{plan.model_path}/config.json"
        findings.append(_tried(node, "model", plan.model_path, need, lambda: files.check_model(plan)))
    if any(process.is_proxy for process in wanted):
        need = "the files that the proxy section names"
        findings.append(_tried(node, "proxy-files", "readable", need, lambda: files.check_proxy_files(plan.proxy)))
    wants = [port for process in wanted for port in process.ports.values()]
    if wants:
        need = f"{len(wants)} free ports ({min(wants)}-{max(wants)})"
        findings.append(_tried(node, "ports", "free", need, lambda: ports.check_ports(wanted, held_by_us)))
    return findings


def _tried(node: str, check: Check, value: str, need: str, look: Callable[[], None]) -> Finding:
    try:
        look()
    except PdserveError as error:
        return of_error(node, check, need, error)
    return Finding(node=node, check=check, status="ok", value=value, need=need)
