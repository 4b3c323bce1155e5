"""The devices of a node that a plan needs: there, visible and idle; and what AMD's ask for beside that.

NVIDIA's tool was run beside an H100. Of AMD recorded output only was at hand: its findings are marked as unverified on
hardware. Where a tool is missing or prints something unexpected the answer is "unknown".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.errors import NotOursError, StateError
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import Finding, NodeNeed, processes_on
from pdserve.printable import size_text
from pdserve.run.directory import RunDir
from pdserve.run.orphans import members
from pdserve.system import procfs
from pdserve.system.process import Output, output_of

_TOOL_SECONDS = 20.0
_NVIDIA_APPS = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader")
_NVIDIA_GPUS = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
_ROCM = ("rocm-smi", "--showpids")
_AMD = ("amd-smi", "process", "--json")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "MIB": 1 << 20, "GB": 1 << 30, "GIB": 1 << 30}
_ROCM_ROW = re.compile(r"^(\d+)\s+(.*?)\s+(\d+|unknown)\s+(\d+|unknown)\s+(\d+|unknown)\s+(\d+|unknown)\s*$", re.I)

SWITCH = "HSA_NO_SCRATCH_RECLAIM"
FIRST_GOOD = 177
"""With older firmware the scratch memory of RCCL cannot be reclaimed, and vLLM crashes unless the switch is 1: vLLM's
recipe for Kimi-K2.5 on MI355X, and the published launches, which also set it where the version cannot be read."""
_FIRMWARE = ("rocm-smi", "--showfw")
_MEC = re.compile(r"\bMEC\b.*?(\S+)\s*$", re.MULTILINE)

MUST_AGREE = {
    "HSA_ENABLE_IPC_MODE_LEGACY": "ROCm's runtime makes one kind of handle to device memory with 1 and another with 0, "
    "and neither can be opened as the other",
}
"""Variable of an engine and of the LMCache server that opens its memory -> why (ROCR: flag.h; IPCCreate and IPCAttach
in runtime.cpp). Where it is not set the runtime's own default holds, which is not the same in every release. Others may
differ: scratch memory, for example, is a matter of each process."""

Run = Callable[[tuple[str, ...]], Output]


def _run(argv: tuple[str, ...]) -> Output:
    return output_of(argv, timeout=_TOOL_SECONDS)


def _needed(starting: Collection[Process]) -> set[int]:
    return {device for process in starting for device in process.devices}


def _ids(devices: Collection[int]) -> str:
    return ",".join(str(device) for device in sorted(devices)) or "none"


def find_devices(plan: Plan, node: str, starting: Collection[Process], facts: NodeFacts) -> list[Finding]:
    """Judge whether the devices are there and may be used; nothing where no device is needed."""
    needed = _needed(starting)
    if not needed:
        return []
    need = NodeNeed(node, "devices", f"devices {_ids(needed)}", unverified=plan.platform == "rocm")
    setting = " ".join(f"{name}={value}" for name, value in facts.device_variables.items())
    missing, hidden = needed - set(facts.devices_present), needed - set(facts.devices_visible)
    if not missing and not hidden:
        return [need.found("ok", f"devices {_ids(facts.devices_visible)}")]
    if not missing:
        fix = "ask for these devices in the allocation (--gpus-per-node), or name others (<role>.devices)"
        return [need.found("failed", f"the job may use {_ids(facts.devices_visible)} ({setting})", fix)]
    fix = "run it where they are (exclude_nodes), load the driver, or name others (<role>.devices)"
    if facts.devices_present:
        return [need.found("failed", f"the driver shows {_ids(facts.devices_present)}", fix)]
    driver = "no device" if plan.platform == "cpu" else f"no {plan.platform} driver that shows devices"
    if hidden:
        return [need.found("failed", driver, fix)]
    # The variables were set outside; only the engine can check them.
    return [need.found("unknown", f"{driver}, but {setting}", fix)]


class GpuProcess(NamedTuple):
    """A process that a tool has named."""

    pid: int
    name: str
    device: int | None
    """None: the tool has no ids that the plan knows."""
    memory: int | None
    """Bytes; None: not known."""

    def __str__(self) -> str:
        where = "" if self.device is None else f"device {self.device}: "
        size = "" if self.memory is None else f", {size_text(self.memory)}"
        shown = procfs.command(self.pid)[:120]
        return f"{where}PID {self.pid} {self.name}{size}" + (f" ({shown})" if shown else "")


def find_gpu_processes(
    plan: Plan, node: str, starting: Collection[Process], present: Collection[int], run: Run = _run
) -> list[Finding]:
    """Look for other processes on the devices; nothing where no device is needed. `present`: all of the node."""
    needed = _needed(starting)
    if not needed:
        return []
    need = NodeNeed(node, "gpu-processes", f"devices {_ids(needed)} idle", unverified=plan.platform == "rocm")
    listed = _ask_nvidia(run) if plan.platform == "cuda" else _ask_amd(run)
    if isinstance(listed, str):
        return [need.found("unknown", listed)]
    ours = _pids_of(plan)
    there = [
        process
        for process in listed
        if process.pid not in ours and (process.device is None or process.device in needed)
    ]
    if not there:
        return [need.found("ok", "no foreign process")]
    # A tool that names no device may mean one that we leave alone, and in a container the PIDs are the host's, so
    # that our own, of a deployment that runs, look like a stranger's.
    certain = any(
        (process.device is not None or needed >= set(present))
        and (not ours or procfs.identify(process.pid) is not None)
        for process in there
    )
    names = ", ".join(f"PID {process.pid} {process.name}" for process in there[:3])
    fix = "stop them, wait for their job to end, or choose other devices (<role>.devices) or nodes (exclude_nodes)"
    value = f"{len(there)} foreign process(es): {names}"
    return [need.found("failed" if certain else "warning", value, fix, [str(process) for process in there])]


def _pids_of(plan: Plan) -> set[int]:
    """Return the PIDs of this very run: when it is changed while it serves, what is replaced still has the devices."""
    run = RunDir(Path(plan.run_dir))
    try:
        return members(run.read_state(), run)
    except (StateError, NotOursError):
        return set()  # none of it was started, or not by us


def _ask_nvidia(run: Run) -> list[GpuProcess] | str:
    gpus, apps = run(_NVIDIA_GPUS), run(_NVIDIA_APPS)
    for output in (gpus, apps):
        if output.code != 0:
            return _unusable("nvidia-smi", output)
    return _parsed("nvidia-smi", lambda: parse_nvidia(apps.out, gpus.out))


def _ask_amd(run: Run) -> list[GpuProcess] | str:
    rocm = run(_ROCM)
    if rocm.code == 0:
        return _parsed("rocm-smi", lambda: parse_rocm(rocm.out))
    amd = run(_AMD)
    if amd.code == 0:
        return _parsed("amd-smi", lambda: parse_amd(amd.out))
    return f"{_unusable('rocm-smi', rocm)}; {_unusable('amd-smi', amd)}"


def _parsed(tool: str, parse: Callable[[], list[GpuProcess]]) -> list[GpuProcess] | str:
    try:
        return parse()
    except ValueError as error:
        return f"{tool} was not understood: {error}"


def _unusable(tool: str, output: Output) -> str:
    if output.code is None:
        return f"{tool} cannot be run ({output.err})"
    why = (output.err.strip() or output.out.strip() or "no output").splitlines()[0]
    return f"{tool} ended with {output.code}: {why}"


def parse_nvidia(text: str, gpus: str) -> list[GpuProcess]:
    """Read `--query-compute-apps=gpu_uuid,pid,used_memory,process_name`, with `--query-gpu=index,uuid` for the ids.

    The name is last: it may hold commas. Memory is `[N/A]` under MIG, the name `[Not Found]` for a process of another
    PID namespace."""
    rows = [[cell.strip() for cell in line.split(",")] for line in gpus.splitlines() if line.strip()]
    indices = {uuid: int(index) for index, uuid in rows}
    listed = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split(",", 3)]
        if len(cells) != 4:
            raise ValueError(f"{line!r} has {len(cells)} columns")
        uuid, pid, memory, name = cells
        listed.append(GpuProcess(int(pid), name, indices.get(uuid), _size(*memory.partition(" ")[::2])))
    return listed


def parse_rocm(text: str) -> list[GpuProcess]:
    """Read `rocm-smi --showpids`, as text because with --json some versions report no data (as seen in the field).

    Its GPU column is a number of devices, not an id (rocm_smi_lib#166), and ids would be its own, which need not be
    HIP's (rocm-systems#4406). Processes that only opened the driver are listed with zeros (legacy-rocm-build#4411):
    they are left out.
    """
    rows = [match for line in text.splitlines() if (match := _ROCM_ROW.match(line.strip()))]
    if not rows and "No KFD PIDs currently running" not in text:
        raise ValueError("neither processes nor the sentence that there are none")
    listed = []
    for row in rows:
        pid, name, devices, memory = row.group(1, 2, 3, 4)
        if devices != "0" or memory != "0":
            listed.append(GpuProcess(int(pid), name, None, int(memory) if memory.isdigit() else None))
    return listed


def parse_amd(text: str) -> list[GpuProcess]:
    """Read `amd-smi process --json`: a list of GPUs, each with all processes of the driver, so that the ids mean
    nothing; `process_info` is a sentence where there are none."""
    try:
        gpus = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg})") from None
    if not isinstance(gpus, list) or not all(isinstance(gpu, dict) and "process_list" in gpu for gpu in gpus):
        raise ValueError("no list of GPUs with a process_list")
    listed: dict[int, GpuProcess] = {}
    for entry in (entry for gpu in gpus for entry in _amd_entries(gpu["process_list"])):
        info = entry.get("process_info")
        if isinstance(info, dict):
            pid = str(info.get("pid"))
            if not pid.isdecimal():
                raise ValueError(f"a process has the PID {info.get('pid')!r}")
            listed[int(pid)] = GpuProcess(int(pid), Path(str(info.get("name", "?"))).name, None, _amd_memory(info))
    return list(listed.values())


def _amd_entries(listed: object) -> list[dict[str, Any]]:
    """Return a process_list as entries. Raises ValueError for "N/A" and null: they do not say that there are none."""
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError(f"a process_list is {json.dumps(listed)[:60]}")
    return listed


def _amd_memory(info: Mapping[str, Any]) -> int | None:
    usage = info.get("memory_usage")
    used = usage.get("vram_mem") if isinstance(usage, dict) else info.get("mem_usage")
    return _size(str(used.get("value")), str(used.get("unit"))) if isinstance(used, dict) else None


def _size(number: str, unit: str = "MIB") -> int | None:
    factor = _UNITS.get(unit.upper())
    return int(number) * factor if number.isdecimal() and factor is not None else None


def _value(process: Process, variable: str, environ: Mapping[str, str]) -> str | None:
    """Return what a process will have of a variable; None: not set. `environ`: what the node's agent passes on."""
    inherited = environ.get(variable) if process.env.inherits(variable) else None
    return process.env.set.get(variable, inherited)


def find_firmware(
    plan: Plan, node: str, starting: Collection[Process], environ: Mapping[str, str], run: Run = _run
) -> list[Finding]:
    """Judge the firmware of AMD's compute engines (MEC), old versions of which need a variable; nothing where no engine
    uses AMD's devices."""
    engines = [process for process in starting if process.is_engine and process.devices]
    if plan.platform != "rocm" or not engines:
        return []
    text = (
        f"MEC firmware {FIRST_GOOD} or newer, or {SWITCH}=1: older ones cannot reclaim RCCL's scratch memory, and vLLM "
        "crashes"
    )
    need = NodeNeed(node, "firmware", text, unverified=True)
    lacking = [engine.name for engine in engines if _value(engine, SWITCH, environ) != "1"]
    asked = run(_FIRMWARE)
    version = mec_version(asked.out) if asked.code == 0 else None
    if version is not None:
        value = f"MEC firmware {version}"
    elif asked.code == 0:
        value = "MEC firmware unknown: rocm-smi shows no MEC line with a number"
    else:
        value = f"MEC firmware unknown: {_unusable('rocm-smi', asked)}"
    if version is not None and version >= FIRST_GOOD:
        return [need.found("ok", value)]
    if not lacking:
        return [need.found("ok", f"{value}, and {SWITCH}=1")]
    value += f", and {SWITCH} is not 1 for {', '.join(lacking)}"
    return [need.found("warning", value, f"set engine.env.{SWITCH}: 1, or update the firmware")]


def mec_version(text: str) -> int | None:
    """Read the last word of the first MEC line of `rocm-smi --showfw`; None: there is none, or it is no number."""
    match = _MEC.search(text)
    return int(match[1]) if match is not None and match[1].isdecimal() else None


def find_shared_environment(
    plan: Plan, node: str, starting: Collection[Process], environ: Mapping[str, str]
) -> list[Finding]:
    """Compare the variables that an engine and the LMCache server that opens its device memory must have in common:
    one finding for each that differs, and one where all agree; nothing where no engine of the node attaches."""
    if plan.platform != "rocm":
        return []
    there = {process.name: process for process in processes_on(plan, node)}
    names = {process.name for process in starting}
    pairs = [
        (engine, there[engine.lmcache])
        for engine in there.values()
        if engine.lmcache is not None and {engine.name, engine.lmcache} & names
    ]
    differences = [
        finding
        for engine, server in pairs
        for variable in MUST_AGREE
        if (finding := _difference(node, variable, engine, server, environ)) is not None
    ]
    if pairs and not differences:
        need = NodeNeed(node, "environment", "the same on both sides")
        return [need.found("ok", f"{', '.join(MUST_AGREE)} the same for engines and LMCache")]
    return differences


def _difference(
    node: str, variable: str, engine: Process, server: Process, environ: Mapping[str, str]
) -> Finding | None:
    ours, theirs = (_value(process, variable, environ) for process in (engine, server))
    if ours == theirs:
        return None
    shown = ["not set" if value is None else repr(value) for value in (ours, theirs)]
    fix = f"set lmcache.env.{variable}: {ours}, as the engines have it"
    if ours is None:
        fix = f"remove lmcache.env.{variable}, or set engine.env.{variable} to the same"
    need = NodeNeed(node, "environment", f"the same on both sides: {MUST_AGREE[variable]}", unverified=True)
    return need.found(
        # What is not set on one side may have the same value there by the runtime's default.
        "warning" if None in (ours, theirs) else "failed",
        f"{variable} is {shown[0]} for {engine.name} and {shown[1]} for {server.name}",
        fix,
        where=f"lmcache.env.{variable}" if variable in server.env.set else f"engine.env.{variable}",
    )
