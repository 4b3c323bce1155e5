"""The devices that a plan needs: there, visible, idle; firmware and variables of AMD's, by recorded output.

A foreign process is named when the tool is sure, and never invented when it is not.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.preflight.devices import (
    SWITCH,
    find_devices,
    find_firmware,
    find_gpu_processes,
    find_shared_environment,
    parse_amd,
)
from pdserve.preflight.facts import visible_devices
from pdserve.preflight.finding import Finding
from pdserve.run.state import NodeState, ProcessState
from pdserve.system import procfs
from pdserve.system.process import Output
from tests.doctor.kit import GONE, run_dir
from tests.plan import kit
from tests.plan.kit import hosts, on_gpus, recipe, with_lmcache
from tests.preflight import recorded
from tests.preflight.kit import facts, here
from tests.tables import each_row

EIGHT = tuple(range(8))
NOT_THERE = Output(None, "", "No such file or directory")


@each_row("platform, setting, left", [
    ("cuda", {}, EIGHT),
    ("cuda", {"CUDA_VISIBLE_DEVICES": "4,5"}, (4, 5)),
    ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, ()),
    ("cuda", {"CUDA_VISIBLE_DEVICES": "6,9"}, (6,)),
    ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-ad466f2f"}, EIGHT),
    ("cuda", {"CUDA_VISIBLE_DEVICES": "4", "ROCR_VISIBLE_DEVICES": "1"}, (4,)),
    ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5"}, (4, 5)),
    ("rocm", {"CUDA_VISIBLE_DEVICES": "3"}, (3,)),
    ("rocm", {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "3"}, (2,)),
    ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5", "GPU_DEVICE_ORDINAL": "4,5"}, (4, 5)),
    ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0,2"}, (4, 6)),
    ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1,2"}, (5,)),
    ("cpu", {"CUDA_VISIBLE_DEVICES": "0"}, ()),
])  # fmt: skip
def test_which_devices_a_job_may_use(platform: str, setting: dict[str, str], left: tuple[int, ...]) -> None:
    assert visible_devices(platform, EIGHT, setting) == left


SLURM = {"CUDA_VISIBLE_DEVICES": "0,1"}


@each_row("changes, status, value", [
    ({}, "ok", "devices 0,1,2,3,4,5,6,7"),
    ({"devices_visible": (0, 1), "device_variables": SLURM}, "failed",
     "the job may use 0,1 (CUDA_VISIBLE_DEVICES=0,1)"),
    ({"devices_present": (0, 1), "devices_visible": (0, 1)}, "failed", "the driver shows 0,1"),
    ({"devices_present": (), "devices_visible": ()}, "failed", "no cuda driver that shows devices"),
    ({"devices_present": (), "devices_visible": (0, 1, 2, 3), "device_variables": SLURM}, "unknown",
     "no cuda driver that shows devices, but CUDA_VISIBLE_DEVICES=0,1"),
])  # fmt: skip
def test_devices_that_are_missing_or_hidden(changes: dict[str, Any], status: str, value: str) -> None:
    wanted = kit.plan(recipe(on_gpus(2, 2)), Node(name="here", devices=(0, 1, 2, 3)))
    [finding] = find_devices(wanted, "here", wanted.processes, facts(**changes))
    assert (finding.status, finding.value) == (status, value)
    assert ("--gpus-per-node" in str(finding.fix)) == value.startswith("the job")


def asked(outputs: Mapping[str, Output | str], platform: str = "cuda", present: int = 2, **plan: Any) -> list[Finding]:
    """What is found when the tools say this. The plan needs devices 0 and 1."""
    wanted = plan.get("plan") or here(on_gpus(platform=platform))

    def run(argv: tuple[str, ...]) -> Output:
        output = next((answer for words, answer in outputs.items() if words in " ".join(argv)), NOT_THERE)
        return Output(0, output, "") if isinstance(output, str) else output

    return find_gpu_processes(wanted, "here", wanted.processes, range(present), run)


def nvidia(apps: str, present: int = 2, **plan: Any) -> Finding:
    [finding] = asked({"--query-gpu": recorded.NVIDIA_GPUS, "--query-compute-apps": apps}, present=present, **plan)
    return finding


def rocm(pids: str, present: int = 2) -> Finding:
    [finding] = asked({"rocm-smi": pids}, "rocm", present)
    return finding


def test_nvidia_names_the_process_and_its_device() -> None:
    finding = nvidia(recorded.NVIDIA_APPS)
    assert finding.status == "failed"
    assert "PID 1 /opt/engines/bin/python" in finding.value
    assert "device 0: PID 1 " in finding.evidence[0]
    assert "7.8 GiB" in finding.evidence[0]
    assert not finding.unverified_on_hardware  # it was run beside an H100
    other = nvidia(recorded.NVIDIA_APPS_OF_ANOTHER_NAMESPACE)
    assert (other.status, other.evidence) == ("failed", ("device 1: PID 40170 [Not Found]",))
    unused = here(on_gpus(), {"prefill": {"devices": [2]}, "decode": {"devices": [3]}})
    assert nvidia(recorded.NVIDIA_APPS, 8, plan=unused).status == "ok"


def test_idle_devices() -> None:
    assert asked({}, plan=here()) == [], "no device, no question"
    assert nvidia("").status == "ok"
    assert rocm(recorded.ROCM_NONE).status == "ok"
    [finding] = asked({"amd-smi": recorded.AMD_NONE}, "rocm")
    assert finding.status == "ok"


def test_rocm_names_only_who_has_memory_or_devices() -> None:
    finding = rocm(recorded.ROCM_BUSY)
    assert (finding.status, finding.value) == ("failed", "1 foreign process(es): PID 1168514 pt_main_thread")
    assert finding.evidence == ("PID 1168514 pt_main_thread, 165.2 GiB",)
    assert rocm(recorded.ROCM_BUSY, present=8).status == "warning", "it does not say on which device"
    untold = rocm(recorded.ROCM_UNTOLD)
    assert (untold.status, untold.evidence) == ("failed", ("PID 55573 gmx_mpi", "PID 55571 gmx_mpi"))


def test_amd_smi_is_asked_where_rocm_smi_is_missing() -> None:
    [finding] = asked({"amd-smi": recorded.AMD_BUSY}, "rocm")
    assert (finding.status, finding.evidence) == ("failed", ("PID 2168274 python3.12, 63 MiB",))
    assert len(parse_amd(recorded.AMD_BUSY)) == 1, "listed under every device, one process all the same"


@each_row("platform, outputs, message", [
    ("cuda", {}, "nvidia-smi cannot be run (No such file or directory)"),
    ("rocm", {}, "rocm-smi cannot be run (No such file or directory); amd-smi cannot be run"),
    ("cuda", {"nvidia-smi": Output(9, "", "NVIDIA-SMI has failed\n")}, "nvidia-smi ended with 9: NVIDIA-SMI has"),
    ("cuda", {"nvidia-smi": "what is this"}, "nvidia-smi was not understood"),
    ("rocm", {"rocm-smi": "WARNING: No JSON data to report"}, "rocm-smi was not understood: neither processes"),
    ("rocm", {"amd-smi": "{}"}, "amd-smi was not understood: no list of GPUs"),
    ("rocm", {"amd-smi": '[{"process_list": "N/A"}]'}, 'amd-smi was not understood: a process_list is "N/A"'),
    ("rocm", {"amd-smi": '[{"process_list": [{"process_info": {"pid": "N/A"}}]}]'}, "a process has the PID 'N/A'"),
])  # fmt: skip
def test_what_is_not_known_is_unknown_and_never_an_alarm(
    platform: str, outputs: Mapping[str, Output | str], message: str
) -> None:
    [finding] = asked(outputs, platform)
    assert finding.status == "unknown"
    assert message in finding.value


@pytest.mark.process
def test_what_this_run_has_is_not_foreign(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    plan = here(on_gpus()).model_copy(update={"run_dir": str(run.path)})

    def find(*pids: int) -> Finding:
        uuid = "GPU-ad466f2f-575d-d949-35e0-9a7d912d974e"
        return nvidia("".join(f"{uuid}, {number}, 5 MiB, python\n" for number in pids), plan=plan)

    with subprocess.Popen(["sleep", "600"]) as child:
        ours = ProcessState(role="prefill", node="here", phase="ready", id=procfs.identify(child.pid))
        there = NodeState(agent=GONE, guard=GONE, hostname=socket.gethostname(), place=procfs.place())
        known = {"nodes": {"here": there}, "processes": {"p": ours}}
        run.write(run.state, run.read_state().model_copy(update=known).model_dump_json())
        try:
            found = [find(child.pid), find(child.pid, os.getpid()), find(child.pid, 4_000_000_000)]
        finally:
            child.kill()
    # In a container the last one may be ours under the host's number.
    assert [finding.status for finding in found] == ["ok", "failed", "warning"]


FIRMWARE = """\
GPU[0]\t\t: ASD firmware version: \t553648226
GPU[0]\t\t: ME firmware version: \t\t0
GPU[0]\t\t: MEC firmware version: \t{mec}
GPU[0]\t\t: MEC2 firmware version: \t999
GPU[1]\t\t: MEC firmware version: \t999
"""


def on_amd(env: dict[str, Any] | None = None, *, platform: str = "rocm") -> Plan:
    return kit.plan(recipe(on_gpus(platform=platform), {"engine": {"env": env or {}}}), *hosts(2))


def firmware(wanted: Plan, output: Output, **environ: str) -> list[Finding]:
    return find_firmware(wanted, "host0", wanted.processes, environ, lambda _: output)


def shown(mec: object) -> Output:
    return Output(0, FIRMWARE.format(mec=mec), "")


@each_row("output, value", [
    (shown(176), "MEC firmware 176, and"),
    (shown("?"), "MEC firmware unknown: rocm-smi shows no MEC line with a number, and"),
    (Output(0, "GPU[0]\t\t: MEC2 firmware version: \t181\n", ""), "MEC firmware unknown: rocm-smi shows no MEC line"),
    (Output(2, "", "no driver"), "MEC firmware unknown: rocm-smi ended with 2: no driver, and"),
    (NOT_THERE, "rocm-smi cannot be run (No such file or directory), and"),
])  # fmt: skip
def test_old_or_unreadable_firmware_names_the_line_to_add(output: Output, value: str) -> None:
    [finding] = firmware(on_amd(), output)
    assert (finding.status, finding.check, finding.unverified_on_hardware) == ("warning", "firmware", True)
    assert value in finding.value
    assert f"{SWITCH} is not 1 for prefill-0, decode-0" in finding.value
    assert f"set engine.env.{SWITCH}: 1" in str(finding.fix)


@each_row("env, mec, inherited, status", [
    ({}, 177, {}, "ok"), ({SWITCH: 1}, 155, {}, "ok"), ({}, 155, {SWITCH: "1"}, "ok"),
    ({SWITCH: 0}, 155, {SWITCH: "1"}, "warning"),
])  # fmt: skip
def test_where_the_recipe_or_the_image_sets_the_switch_old_firmware_is_right(
    env: dict[str, Any], mec: int, inherited: dict[str, str], status: str
) -> None:
    assert [finding.status for finding in firmware(on_amd(env), shown(mec), **inherited)] == [status]


def test_other_platforms_and_nodes_without_engines_are_not_asked_for_firmware() -> None:
    assert firmware(on_amd(platform="cuda"), shown(1)) == []
    rocm_plan = on_amd()
    assert find_firmware(rocm_plan, "host0", [rocm_plan.process("proxy")], {}, lambda _: shown(1)) == []


MODE = "HSA_ENABLE_IPC_MODE_LEGACY"


def attached(platform: str = "rocm", engine: dict[str, Any] | None = None, **section: Any) -> Plan:
    lmcache = with_lmcache(transfer_mode="lmcache_driven", **section)
    return kit.plan(recipe(on_gpus(platform=platform), lmcache, {"engine": {"env": engine or {}}}), *hosts(2))


def compared(wanted: Plan, **environ: str) -> list[Finding]:
    return find_shared_environment(wanted, "host0", wanted.processes, environ)


@each_row("engine, server, environ", [
    ({}, {}, {}), ({}, {}, {MODE: "1"}), ({MODE: 0}, {MODE: 0}, {MODE: "1"}),
])  # fmt: skip
def test_what_engine_and_lmcache_inherit_or_both_set_is_the_same(
    engine: dict[str, Any], server: dict[str, Any], environ: dict[str, str]
) -> None:
    [finding] = compared(attached(engine=engine, env=server), **environ)
    assert finding.status == "ok"


@each_row("engine, server, environ, status, value, fix, where", [
    ({MODE: 0}, {}, {MODE: "1"}, "failed", f"{MODE} is '0' for prefill-0 and '1' for lmcache-0",
     f"set lmcache.env.{MODE}: 0", "engine"),
    # The side that does not set it has the runtime's default, which may be the same.
    ({}, {MODE: 1}, {}, "warning", f"{MODE} is not set for prefill-0 and '1' for lmcache-0",
     f"remove lmcache.env.{MODE}", "lmcache"),
    ({MODE: 0}, {}, {}, "warning", f"{MODE} is '0' for prefill-0 and not set for lmcache-0",
     f"set lmcache.env.{MODE}: 0", "engine"),
])  # fmt: skip
def test_a_value_of_one_side_alone_names_both_and_the_line(
    engine: dict[str, Any],
    server: dict[str, Any],
    environ: dict[str, str],
    status: str,
    value: str,
    fix: str,
    where: str,
) -> None:
    [finding] = compared(attached(engine=engine, env=server), **environ)
    assert (finding.status, finding.value, finding.node) == (status, value, "host0")
    assert fix in str(finding.fix)
    assert finding.where == f"{where}.env.{MODE}"


def test_other_platforms_engines_without_lmcache_and_other_nodes_have_nothing_to_share() -> None:
    assert compared(attached("cuda", engine={MODE: 0}), **{MODE: "1"}) == []
    assert compared(on_amd()) == []
    wanted = attached(engine={MODE: 0})
    decode = [wanted.process("decode-0")]
    assert find_shared_environment(wanted, "host0", decode, {MODE: "1"}) == [], "nothing of the pair is started"
    assert find_shared_environment(wanted, "host1", wanted.processes, {MODE: "1"}) == []
