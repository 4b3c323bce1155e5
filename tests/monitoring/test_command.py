"""`pdserve monitoring`: three files, from a recipe or from a deployment; nothing of a user's is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.errors import PdserveError, StateError
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir
from tests.plan.golden import ROOT
from tests.plan.kit import hosts, on_gpus, plan, recipe, with_lmcache

TINY = str(ROOT / "recipes" / "tiny-cpu.yaml")


def monitoring(*arguments: str | Path) -> str:
    """What it prints. Raises what it raises."""
    ended = CliRunner().invoke(app, ["monitoring", *map(str, arguments)], catch_exceptions=True)
    if isinstance(ended.exception, PdserveError):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.output


def deployed(home: Path, planned: Plan) -> None:
    """A recorded run of this plan."""
    run = RunDir.create(home, planned.name, "r1")
    run.write(run.plan, planned.model_dump_json())
    run.point_current()


def test_a_recipe_of_one_node_needs_no_deployment(tmp_path: Path) -> None:
    printed = monitoring(TINY, "--out", tmp_path / "new" / "folder")
    assert "4 targets for a Prometheus on localhost" in printed
    files = {file.name: file.read_text() for file in (tmp_path / "new" / "folder").iterdir()}
    assert set(files) == {"prometheus.yml", "alerts.yml", "dashboard.json"}
    assert "127.0.0.1:8100" in files["prometheus.yml"]
    assert {rule["alert"] for rule in yaml.safe_load(files["alerts.yml"])["groups"][0]["rules"]} >= {
        "LmcacheNeverHits",
        "MooncakePullsFail",
    }


def test_overrides_count(tmp_path: Path) -> None:
    monitoring(TINY, "--set", "ports.decode=8300", "--out", tmp_path)
    assert "127.0.0.1:8300" in (tmp_path / "prometheus.yml").read_text()


def test_a_part_that_the_recipe_does_not_have_has_no_panel_and_no_alert(tmp_path: Path) -> None:
    monitoring(ROOT / "recipes" / "tiny-cpu-nixl.yaml", "--out", tmp_path)
    rows = [panel["title"] for panel in json.loads((tmp_path / "dashboard.json").read_text())["panels"]]
    assert "KV transfer: NIXL" in rows
    assert "KV transfer: Mooncake" not in rows
    alerts = (tmp_path / "alerts.yml").read_text()
    assert "NixlTransfersFail" in alerts
    assert "MooncakePullsFail" not in alerts


def test_panels_do_not_overlap(tmp_path: Path) -> None:
    monitoring(TINY, "--out", tmp_path)
    taken: set[tuple[int, int]] = set()
    ids = set()
    for panel in json.loads((tmp_path / "dashboard.json").read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + column, place["y"] + line) for column in range(place["w"]) for line in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(column for column, _ in cells) < 24
        taken |= cells
        ids.add(panel["id"])
        assert panel["type"] == "row" or panel["targets"]
    assert len(ids) == len(json.loads((tmp_path / "dashboard.json").read_text())["panels"])


def test_what_is_not_reached_is_warned_of_with_the_command_to_type(pdserve_home: Path, tmp_path: Path) -> None:
    deployed(pdserve_home, plan(recipe(on_gpus(8, 8), with_lmcache()), *hosts(8, 8)))
    printed = monitoring("--deployment", "test", "--node", "host1", "--out", tmp_path)
    assert "warning: lmcache-0 on host0 listens on the loopback of its node" in printed
    assert "pdserve monitoring --deployment test --node host0 --out DIR" in printed


def test_a_recipe_of_several_nodes_is_refused_until_it_runs(tmp_path: Path) -> None:
    with pytest.raises(StateError) as refused:
        monitoring(ROOT / "recipes" / "kimi-mi355x-2node.yaml", "--out", tmp_path)
    assert "2 nodes" in refused.value.render()
    assert "pdserve monitoring --deployment kimi" in refused.value.render()
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_edited_is_kept_and_no_other_is_written(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text("mine")
    with pytest.raises(StateError, match=r"alerts\.yml there has other contents"):
        monitoring(TINY, "--out", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["alerts.yml"]
    assert (tmp_path / "alerts.yml").read_text() == "mine"
    monitoring(TINY, "--out", tmp_path, "--force")
    assert (tmp_path / "alerts.yml").read_text().startswith("groups:")
    monitoring(TINY, "--out", tmp_path)  # the same contents again are no reason to refuse


def test_the_nodes_of_a_deployment_are_asked_where_they_are(pdserve_home: Path, tmp_path: Path) -> None:
    deployed(pdserve_home, plan(recipe(on_gpus(8, 8), with_lmcache()), *hosts(8, 8)))
    printed = monitoring("--out", tmp_path)
    assert "on host0" in printed
    assert "192.0.2.2:8200" in (tmp_path / "prometheus.yml").read_text()
