"""The cause in what real processes have logged: ends of the logs of dead ones, and the lines of living ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pdserve.doctor.records import RunRecords, fill_setting
from pdserve.logs.symptoms import SYMPTOMS
from pdserve.recipe.load import yaml12
from pdserve.recipe.load.loader import load_recipe
from tests.doctor.kit import RECIPE, diagnosed, died, only, run_dir
from tests.doctor.symptom_lines import LINES, VLLM, SymptomLine
from tests.tables import each_row

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"


def recorded(name: str) -> list[str]:
    return (LOGS / f"{name}.txt").read_text().splitlines()


# --- deaths, with the logs of real processes that tests/test_hints.py has


@each_row("process, code, log, cause", [
    ("lmcache-0", 3, "lmcache-l1-too-big", "not enough memory for L1"),
    ("lmcache-0", 3, "lmcache-port-request", "tcp://127.0.0.1:25556"),
    ("prefill-0", 1, "vllm-model-len", "max-model-len 99999 is more than the model's 8192"),
    ("prefill-0", 1, "vllm-kv-too-small", "there are 1.0 GiB"),
    ("prefill-1", 1, "vllm-lmcache-absent", "no LMCache server answers at tcp://127.0.0.1:25560"),
    ("prefill-1", 1, "vllm-lmcache-mode", "did not register the engine's KV within 8.0 s"),
    ("decode-0", 1, "vllm-cut-weights", "weight file is damaged or incomplete"),
    ("decode-0", 0, "vllm-worker-killed", "worker VllmWorker-0 was killed (SIGKILL)"),
    ("decode-1", 1, "vllm-bootstrap-port", "port 28998 of 0.0.0.0"),
])  # fmt: skip
def test_a_death_has_the_cause_of_its_log(tmp_path: Path, process: str, code: int, log: str, cause: str) -> None:
    run = run_dir(tmp_path, events=[died(process, code)], logs={process: recorded(log)}, phase="failed")
    diagnosis = only(run)
    assert (diagnosis.rule, diagnosis.processes) == ("process-died", (process,))
    assert cause in diagnosis.cause
    event, last = diagnosis.evidence
    assert event.source == "events.jsonl"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", event.at)
    assert last.source.startswith(f"logs/{process}@")


def test_a_kill_for_memory_is_the_kernels_whatever_the_log_has(tmp_path: Path) -> None:
    event = died("decode-0", -9, out_of_memory=True)
    run = run_dir(tmp_path, events=[event], logs={"decode-0": recorded("vllm-model-len")}, phase="failed")
    assert "the kernel killed it" in only(run).cause


# --- the lines of living processes


@each_row("sample", LINES)
def test_a_known_line_is_a_cause_with_its_place_and_time(tmp_path: Path, sample: SymptomLine) -> None:
    before, after = VLLM.format(level="INFO", at="a.py:1", text="serving"), "no known line"
    diagnosis = only(run_dir(tmp_path, logs={sample.process: [before, sample.line(), after, sample.line()]}))
    [rule] = {symptom.name for symptom in SYMPTOMS if symptom.pattern.search(sample.text)}
    assert (diagnosis.rule, diagnosis.processes, diagnosis.times) == (rule, (sample.process,), 2)
    [evidence] = diagnosis.evidence
    assert evidence.source.startswith(f"logs/{sample.process}@")
    assert evidence.at.endswith("11-24 11:57:24,342" if sample.source.startswith("lmcache") else "11-24 11:57:24")
    assert sample.text in evidence.text
    assert diagnosis.todo


def test_every_symptom_of_engines_and_caches_has_a_line() -> None:
    """Each pattern, not only each name: the patterns of one name have causes of their own."""
    for symptom in SYMPTOMS:
        if symptom.roles is None or "proxy" not in symptom.roles:
            assert any(symptom.pattern.search(sample.text) for sample in LINES), symptom.pattern.pattern


QUOTED = "x Request abc timed out after 5 seconds without being sent"


@each_row("line", [
    # RequestLogger of vllm 0.32.0, and as earlier ones write it
    f"INFO 11-22 14:54:41 [logger.py:39] Received request cmpl-1: prompt: '{QUOTED}', params: None",
    f"INFO 11-22 14:54:41 [request_logger.py:55] Received request {QUOTED.replace(' ', '_')}: params: '{QUOTED}'",
    f"DEBUG 11-22 14:54:41 [request_logger.py:45] Request cmpl-1 details: prompt: '{QUOTED}', prompt_token_ids: ",
    f'DEBUG 11-22 14:54:41 [request_logger.py:64] Request cmpl-1 JSON body: {{"prompt":"{QUOTED}"}}',
    f"INFO 11-22 14:54:41 [request_logger.py:95] Generated response cmpl-1 (streaming delta): output: '{QUOTED}', "
    "finish_reason: stop",
])  # fmt: skip
def test_what_a_client_has_written_is_no_cause(tmp_path: Path, line: str) -> None:
    logs = {"prefill-0": [f"(APIServer pid=1) {line}", line]}
    assert diagnosed(run_dir(tmp_path, logs=logs)) == []


# --- what to type


def setting_of(symptom: Any) -> str:
    return fill_setting(symptom.setting, RunRecords(run_dir="", phase="stopped", recipe=RECIPE))


@each_row("symptom", [each for each in SYMPTOMS if each.setting])
def test_a_recipe_takes_what_is_to_be_typed(symptom: Any, tmp_path: Path) -> None:
    setting = setting_of(symptom)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml12.dump(RECIPE))
    if setting:
        assert load_recipe(file, set_=[setting], environ={}).recipe != load_recipe(file, environ={}).recipe


def test_what_the_run_had_already_is_not_to_be_typed() -> None:
    records = RunRecords(run_dir="", phase="stopped", recipe=RECIPE)
    assert fill_setting("proxy.workers=1", records) == ""
    assert fill_setting("decode.instances+1", records) == "decode.instances=3"
    assert fill_setting("lmcache.l1_read_ttl_seconds*2", records) == "lmcache.l1_read_ttl_seconds=14400"
    short = {**RECIPE, "lmcache": {**RECIPE["lmcache"], "l1_read_ttl_seconds": 1}}
    too_short = RunRecords(run_dir="", phase="stopped", recipe=short)
    assert fill_setting("lmcache.l1_read_ttl_seconds*2", too_short) == "lmcache.l1_read_ttl_seconds=7200"
    assert fill_setting("lmcache.l1_size_gb*2", RunRecords(run_dir="", phase="stopped")) == ""
