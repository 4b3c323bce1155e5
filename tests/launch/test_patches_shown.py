"""`pdserve patches` and what `status` says of patches, over a running deployment of fake engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.patches.registry import REGISTRY
from tests.launch.deployment import pdserve, recipe, up

pytestmark = pytest.mark.process


def output_of(*arguments: str) -> str:
    """What a command prints; it must succeed."""
    code, output = pdserve(*arguments)
    assert code == 0, output
    return output


def test_a_running_deployment_shows_where_each_patch_is_active(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        rows = {row["name"]: row for row in json.loads(output_of("patches", "--json"))["patches"]}
        assert list(rows) == [patch.name for patch in REGISTRY]
        assert rows["multiconnector-prom-metrics"]["active"] == {"prefill-0": ["api-server", "engine-core", "worker"]}
        text = output_of("patches")
        assert "active:  prefill-0: api-server, engine-core, worker" in text
        status = json.loads(output_of("status", "--json"))
        processes = status["processes"]["prefill-0"]["patch_processes"]
        assert [process["kind"] for process in processes] == ["api-server", "engine-core", "worker"]


def test_what_is_out_of_the_ordinary_is_shown_by_status(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        folder = deployment.run.patches / "prefill-0"
        path = next(path for path in folder.iterdir() if "engine-core" in path.read_text())
        record = json.loads(path.read_text())
        record["allowed_unknown"] = ["multiconnector-prom-metrics"]
        record["skipped"] = {"some-optional-patch": "vllm.x.y is none of the known ones"}
        record["effects"] = {"multiconnector-prom-metrics": {"observations-dropped": 3}}
        path.write_text(json.dumps(record))
        output = output_of("status")
        assert (
            "applied to unknown upstream code, as the recipe allows: multiconnector-prom-metrics in prefill-0" in output
        )
        assert "patch left out: some-optional-patch in prefill-0: vllm.x.y is none of the known ones" in output
        assert "patch effects of prefill-0: multiconnector-prom-metrics: observations-dropped 3" in output


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_without_a_deployment_the_registry_is_shown_all_the_same(json_: list[str], pdserve_home: Path) -> None:
    output = output_of("patches", *json_)
    assert all(patch.name in output for patch in REGISTRY)


def test_a_deployment_that_does_not_exist_is_an_error(pdserve_home: Path) -> None:
    code, output = pdserve("patches", "nonsense")
    assert code == 8, output
