"""What becomes of the patches is said before anything starts, as the engines would say it after minutes."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from pdserve.plan.model import Plan
from pdserve.preflight.engine_packages import find_patches
from pdserve.preflight.finding import Finding, failures
from tests.launch.deployment import REPOSITORY, pdserve, recipe
from tests.plan import kit
from tests.preflight.kit import here, only

pytestmark = pytest.mark.process

CHANGED = {
    "v1/core/sched/scheduler.py": ("def _free_request(", "def _let_go("),
    "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py": (
        "def receive_kv_from_single_worker(",
        "def take_kv(",
    ),
}


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with the installed vLLM, two of whose functions have another name."""
    root = tmp_path_factory.mktemp("newer")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    real = Path(next(iter(spec.submodule_search_locations)))
    subprocess.run(["cp", "--recursive", "--symbolic-link", real, root / "vllm"], check=True)
    for file, (old, new) in CHANGED.items():
        text = (real / file).read_text()
        assert old in text
        (root / "vllm" / file).unlink()
        (root / "vllm" / file).write_text(text.replace(old, new))
    return f"{root}:{REPOSITORY}"


def patch_findings(plan: Plan) -> list[Finding]:
    return find_patches("here", plan.processes)


def test_the_installed_engines_get_all_their_patches() -> None:
    finding = only(patch_findings(here(kit.with_lmcache())), "patches")
    assert finding.status == "ok", finding.line()
    assert "would be applied" in finding.value
    assert "prefill-0" in finding.need


def test_code_that_no_test_has_seen(newer: str) -> None:
    changed = {"engine": {"env": {"PYTHONPATH": newer}}}
    by_status = {finding.status: finding for finding in patch_findings(here(kit.with_lmcache(), changed))}
    refused, left_out = by_status["failed"], by_status["warning"]
    assert "stale-completions would refuse to start: vllm" in refused.value
    assert "_free_request does not exist in vllm 0.32.0" in refused.value
    assert refused.need == "code that stale-completions knows, for prefill-0, decode-0"
    assert str(refused.fix).startswith("install vllm 0.32.0")
    assert str(refused.fix).endswith("allow_unknown_upstream: [stale-completions]")
    assert left_out.value.startswith("mooncake-pulls would be left out, and a decode request whose client")
    allowed = {"allow_unknown_upstream": ["stale-completions"]}
    assert not failures(patch_findings(here(kit.with_lmcache(), changed, allowed)))


def test_up_refuses_within_seconds_what_its_engines_would_refuse(
    tmp_path: Path, pdserve_home: Path, newer: str
) -> None:
    file = recipe(tmp_path, engine__command=None, engine__env={"VLLM_CPU_KVCACHE_SPACE": 1, "PYTHONPATH": newer})
    code, output = pdserve("up", file)
    assert code == 3, output
    assert "stale-completions would refuse to start" in output
    assert "allow_unknown_upstream: [stale-completions]" in output
    assert "warning: patches on" in output
    assert "prefill-0" not in {path.stem for path in pdserve_home.rglob("*.log")}


def test_an_interpreter_that_cannot_judge_stops_nothing() -> None:
    [finding] = patch_findings(here(python="/bin/true"))
    assert (finding.status, finding.check) == ("unknown", "patches")
    assert "/bin/true" in finding.value
