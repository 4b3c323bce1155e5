"""Foreign processes on the devices that a plan needs: named when the tool is sure, never invented when it is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pdserve.plan.model import Plan
from pdserve.preflight.devices import find_gpu_processes, parse_amd, parse_nvidia, parse_rocm
from pdserve.preflight.finding import Finding
from pdserve.run.directory import RunDir
from pdserve.run.state import DeploymentState, NodeState, ProcessState
from pdserve.system import procfs
from pdserve.system.process import Output, new_token
from pdserve.system.procfs import ProcessId
from tests.plan import kit
from tests.preflight import recorded
from tests.preflight.kit import here

NOT_THERE = Output(None, "", "No such file or directory")


def asked(outputs: Mapping[str, Output | str], platform: str = "cuda", present: int = 2) -> list[Finding]:
    """What is found when the tools say this. The plan needs devices 0 and 1."""
    plan = here(kit.on_gpus(platform=platform))

    def run(argv: tuple[str, ...]) -> Output:
        output = next((answer for words, answer in outputs.items() if words in " ".join(argv)), NOT_THERE)
        return Output(0, output, "") if isinstance(output, str) else output

    return find_gpu_processes(plan, "here", plan.processes, range(present), run)


def nvidia(apps: str, present: int = 2) -> Finding:
    [finding] = asked({"--query-gpu": recorded.NVIDIA_GPUS, "--query-compute-apps": apps}, present=present)
    return finding


def rocm(pids: str, present: int = 2) -> Finding:
    [finding] = asked({"rocm-smi": pids}, "rocm", present)
    return finding


def test_no_device_no_question() -> None:
    plan = here()
    assert find_gpu_processes(plan, "here", plan.processes, (), lambda _: pytest.fail("a tool was run")) == []


def test_nvidia_names_the_process_and_its_device() -> None:
    finding = nvidia(recorded.NVIDIA_APPS)
    assert finding.status == "failed"
    assert "PID 1 /home/auser/D1/miniconda3/envs/vLLM_test_env/bin/python" in finding.value
    assert "device 0: PID 1 " in finding.evidence[0]
    assert "7.8 GiB" in finding.evidence[0]
    assert not finding.unverified_on_hardware  # it was run beside an H100


def test_nvidia_process_that_cannot_be_looked_into() -> None:
    finding = nvidia(recorded.NVIDIA_APPS_OF_ANOTHER_NAMESPACE)
    assert finding.status == "failed"
    assert finding.evidence == ("device 1: PID 40170 [Not Found]",)


def test_a_process_on_an_unused_device_does_not_matter() -> None:
    plan = here(kit.on_gpus(), {"prefill": {"devices": [2]}, "decode": {"devices": [3]}})
    outputs = {_GPUS: recorded.NVIDIA_GPUS, _APPS: recorded.NVIDIA_APPS}
    [finding] = find_gpu_processes(plan, "here", plan.processes, range(8), lambda argv: Output(0, outputs[argv[1]], ""))
    assert finding.status == "ok"


_GPUS, _APPS = "--query-gpu=index,uuid", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"


def test_idle_devices() -> None:
    assert nvidia("").status == "ok"
    assert rocm(recorded.ROCM_NONE).status == "ok"
    assert rocm(recorded.ROCM_OPENED).status == "ok", "it has the driver open and no device"
    [finding] = asked({"amd-smi": recorded.AMD_NONE}, "rocm")
    assert finding.status == "ok"


def test_rocm_names_only_who_has_memory_or_devices() -> None:
    finding = rocm(recorded.ROCM_BUSY)
    assert (finding.status, finding.value) == ("failed", "1 foreign process(es): PID 1168514 pt_main_thread")
    assert finding.evidence == ("PID 1168514 pt_main_thread, 165.2 GiB",)


def test_rocm_does_not_report_the_device_so_that_a_part_of_the_machine_is_only_warned_about() -> None:
    assert rocm(recorded.ROCM_BUSY, present=8).status == "warning"


def test_rocm_without_figures_still_counts() -> None:
    finding = rocm(recorded.ROCM_UNTOLD)
    assert finding.status == "failed"
    assert finding.evidence == ("PID 55573 gmx_mpi", "PID 55571 gmx_mpi")


def test_amd_smi_is_asked_where_rocm_smi_is_missing() -> None:
    [finding] = asked({"amd-smi": recorded.AMD_BUSY}, "rocm")
    assert finding.status == "failed"
    assert finding.evidence == ("PID 2168274 python3.12, 63 MiB",)


@pytest.mark.parametrize(
    ("platform", "outputs", "message"),
    [
        ("cuda", {}, "nvidia-smi cannot be run (No such file or directory)"),
        ("rocm", {}, "rocm-smi cannot be run (No such file or directory); amd-smi cannot be run"),
        ("cuda", {"nvidia-smi": Output(9, "", "NVIDIA-SMI has failed\n")}, "nvidia-smi ended with 9: NVIDIA-SMI has"),
        ("cuda", {"nvidia-smi": "what is this"}, "nvidia-smi was not understood"),
        ("rocm", {"rocm-smi": "WARNING: No JSON data to report"}, "rocm-smi was not understood: neither processes"),
        ("rocm", {"amd-smi": "{}"}, "amd-smi was not understood: no list of GPUs"),
        ("rocm", {"amd-smi": "ERROR"}, "amd-smi was not understood: no JSON"),
        ("rocm", {"amd-smi": '[{"process_list": "N/A"}]'}, 'amd-smi was not understood: a process_list is "N/A"'),
        ("rocm", {"amd-smi": '[{"process_list": null}]'}, "amd-smi was not understood: a process_list is null"),
        ("rocm", {"amd-smi": '[{"process_list": ["x"]}]'}, "amd-smi was not understood: a process_list is"),
        ("rocm", {"amd-smi": '[{"process_list": [{"process_info": {"name": "x"}}]}]'}, "a process has the PID None"),
        ("rocm", {"amd-smi": '[{"process_list": [{"process_info": {"pid": "N/A"}}]}]'}, "a process has the PID 'N/A'"),
    ],
)
def test_what_is_not_known_is_unknown_and_never_an_alarm(
    platform: str, outputs: Mapping[str, Output | str], message: str
) -> None:
    [finding] = asked(outputs, platform)
    assert finding.status == "unknown"
    assert message in finding.value


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[tuple[Plan, int]]:
    """A plan whose run is alive: its prefill-0 is a process of this machine."""
    plan = here(kit.on_gpus()).model_copy(update={"run_dir": str(tmp_path / "run-7")})
    argv = [sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        recorded_as(tmp_path, child.pid)
        yield plan, child.pid
        child.communicate("\n", timeout=60)


def recorded_as(folder: Path, pid: int) -> None:
    """The record of the run, of which this is the prefill."""
    run = RunDir.create(folder, ".", "run-7")
    living, gone = procfs.identify(pid), ProcessId(pid=4_194_000, start_ticks=1)
    node = NodeState(agent=gone, guard=gone, hostname=socket.gethostname(), place=procfs.place())
    prefill = ProcessState(role="prefill", node="here", phase="ready", id=living)
    state = DeploymentState(
        token=new_token(),
        name="x",
        run_id="run-7",
        host="",
        launcher=gone,
        nodes={"here": node},
        processes={"p": prefill},
        started_at=0,
    )
    run.write(run.state, state.model_dump_json())


def on_first_gpu(*pids: int) -> str:
    return "".join(f"GPU-ad466f2f-575d-d949-35e0-9a7d912d974e, {pid}, 5 MiB, python\n" for pid in pids)


@pytest.mark.process
def test_what_this_run_has_is_not_foreign(ours: tuple[Plan, int]) -> None:
    plan, pid = ours

    def find(*pids: int) -> Finding:
        outputs = {_GPUS: recorded.NVIDIA_GPUS, _APPS: on_first_gpu(*pids)}
        [finding] = find_gpu_processes(
            plan, "here", plan.processes, range(2), lambda argv: Output(0, outputs[argv[1]], "")
        )
        return finding

    assert find(pid).status == "ok"
    assert find(pid, os.getpid()).status == "failed"
    assert find(pid, 4_000_000_000).status == "warning", "in a container it may be ours under the host's number"


@pytest.mark.parametrize("memory", ["[GPU requires reset]", "", "[N/A]", "7986 MiB or so"])
def test_nvidia_names_a_process_whose_memory_is_no_number(memory: str) -> None:
    [gpu_process] = parse_nvidia(f"GPU-1, 123, {memory}, python", "0, GPU-1")
    assert (gpu_process.pid, gpu_process.device, gpu_process.memory) == (123, 0, None)


def test_parsers_alone() -> None:
    [gpu_process] = parse_nvidia(recorded.NVIDIA_APPS.replace("python", "a, b"), recorded.NVIDIA_GPUS)
    assert gpu_process.name.endswith("a, b")
    with pytest.raises(ValueError, match="columns"):
        parse_nvidia("1, 2", recorded.NVIDIA_GPUS)
    assert len(parse_rocm(recorded.ROCM_BUSY)) == 1
    assert len(parse_amd(recorded.AMD_BUSY)) == 1, "listed under every device, one process all the same"
