"""Other processes on the devices that the plan needs, by the vendors' tools.

NVIDIA's was run beside an H100. Of AMD recorded output only was at hand: its findings are marked as unverified on
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
from pdserve.preflight.finding import Finding
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
Run = Callable[[tuple[str, ...]], Output]


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


def _run(argv: tuple[str, ...]) -> Output:
    return output_of(argv, timeout=_TOOL_SECONDS)


def find_gpu_processes(
    plan: Plan, node: str, starting: Collection[Process], present: Collection[int], run: Run = _run
) -> list[Finding]:
    """Nothing where no device is needed. `present`: all devices of the node."""
    needed = {device for process in starting for device in process.devices}
    if not needed:
        return []
    listed = _ask_nvidia(run) if plan.platform == "cuda" else _ask_amd(run)
    return [_judge(plan, node, needed, set(present), listed)]


def _judge(plan: Plan, node: str, needed: set[int], present: set[int], listed: list[GpuProcess] | str) -> Finding:
    ids = ",".join(str(device) for device in sorted(needed))
    need = f"devices {ids} idle"
    unverified = plan.platform == "rocm"
    if isinstance(listed, str):
        return Finding(
            node=node,
            check="gpu-processes",
            status="unknown",
            value=listed,
            need=need,
            unverified_on_hardware=unverified,
        )
    ours = _pids_of(plan)
    there = [
        process
        for process in listed
        if process.pid not in ours and (process.device is None or process.device in needed)
    ]
    if not there:
        return Finding(
            node=node,
            check="gpu-processes",
            status="ok",
            value="no foreign process",
            need=need,
            unverified_on_hardware=unverified,
        )
    # A tool that names no device may mean one that we leave alone, and in a container the PIDs are the host's, so
    # that our own, of a deployment that runs, look like a stranger's.
    certain = [
        process
        for process in there
        if (process.device is not None or needed >= present) and (not ours or procfs.identify(process.pid) is not None)
    ]
    return Finding(
        node=node,
        check="gpu-processes",
        status="failed" if certain else "warning",
        value=f"{len(there)} foreign process(es): "
        + ", ".join(f"PID {process.pid} {process.name}" for process in there[:3]),
        need=need,
        fix="stop them, wait for their job to end, or choose other devices (<role>.devices) or nodes (exclude_nodes)",
        evidence=tuple(str(process) for process in there),
        unverified_on_hardware=unverified,
    )


def _pids_of(plan: Plan) -> set[int]:
    """Of this very run: when it is changed while it serves, what is replaced still has the devices."""
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
    try:
        return parse_nvidia(apps.out, nvidia_indices(gpus.out))
    except ValueError as error:
        return f"nvidia-smi was not understood: {error}"


def _ask_amd(run: Run) -> list[GpuProcess] | str:
    rocm = run(_ROCM)
    if rocm.code == 0:
        try:
            return parse_rocm(rocm.out)
        except ValueError as error:
            return f"rocm-smi was not understood: {error}"
    amd = run(_AMD)
    if amd.code == 0:
        try:
            return parse_amd(amd.out)
        except ValueError as error:
            return f"amd-smi was not understood: {error}"
    return f"{_unusable('rocm-smi', rocm)}; {_unusable('amd-smi', amd)}"


def _unusable(tool: str, output: Output) -> str:
    if output.code is None:
        return f"{tool} cannot be run ({output.err})"
    why = (output.err.strip() or output.out.strip() or "no output").splitlines()[0]
    return f"{tool} ended with {output.code}: {why}"


def nvidia_indices(text: str) -> dict[str, int]:
    """`--query-gpu=index,uuid`: UUID -> index."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return {uuid: int(index) for index, uuid in rows}


def parse_nvidia(text: str, indices: Mapping[str, int]) -> list[GpuProcess]:
    """`--query-compute-apps=gpu_uuid,pid,used_memory,process_name`. The name is last: it may hold commas. Memory is
    `[N/A]` under MIG, the name `[Not Found]` for a process of another PID namespace."""
    listed = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split(",", 3)]
        if len(cells) != 4:
            raise ValueError(f"{line!r} has {len(cells)} columns")
        uuid, pid, memory, name = cells
        listed.append(GpuProcess(int(pid), name, indices.get(uuid), _size(*memory.partition(" ")[::2])))
    return listed


_ROCM_ROW = re.compile(r"^(\d+)\s+(.*?)\s+(\d+|unknown)\s+(\d+|unknown)\s+(\d+|unknown)\s+(\d+|unknown)\s*$", re.I)


def parse_rocm(text: str) -> list[GpuProcess]:
    """`rocm-smi --showpids`, as text because with --json some versions report no data for it (as seen in the field).

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
    """`amd-smi process --json`: a list of GPUs, each with all processes of the driver, so that the ids mean nothing;
    `process_info` is a sentence where there are none."""
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
            pid = info.get("pid")
            if not str(pid).isdecimal():
                raise ValueError(f"a process has the PID {pid!r}")
            listed[int(str(pid))] = GpuProcess(
                int(str(pid)), Path(str(info.get("name", "?"))).name, None, _amd_memory(info)
            )
    return list(listed.values())


def _amd_entries(listed: object) -> list[dict[str, Any]]:
    """Raises ValueError: "N/A" and null do not say that there are none."""
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
