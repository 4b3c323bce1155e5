"""A change of the numbers of a deployment that runs: what is shown before, and what stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.deployment import Deployment, pdserve, recipe, up

pytestmark = pytest.mark.process


def shown(verb: str, file: Path, *words: str) -> dict[str, Any]:
    """What a verb says that `up` with these words would do, without the run."""
    code, output = pdserve(verb, file, *words, "--json", *(["--dry-run"] if verb == "up" else []))
    assert code == 0, output
    change: dict[str, Any] = json.loads(output[output.index("{\n") :])["change"]
    return {what: names for what, names in change.items() if what != "run"}


def pids(deployment: Deployment) -> dict[str, int]:
    """Of all that runs but the proxy, which is told of its workers by a new file."""
    processes = deployment.run.read_state().processes
    return {name: each.id.pid for name, each in processes.items() if name != "proxy" and each.id is not None}


def test_engines_and_cache_stay_when_another_comes_and_goes_and_that_is_shown_before(
    tmp_path: Path, pdserve_home: Path
) -> None:
    file = recipe(tmp_path)
    with up(file, pdserve_home) as deployment:
        deployment.wait_for("phase", phase="ready")
        first = pids(deployment)
        more = ("--set", "prefill.instances=2")
        said = shown("up", file, *more)
        assert said["start"] == ["prefill-1"]
        assert said["stop"] == []
        assert {"lmcache-0", "prefill-0", "decode-0"} <= {*said["stay"]}
        assert shown("render", file, *more) == said
        assert pdserve("up", file, *more)[0] == 0
        second = pids(deployment)
        assert {name: second[name] for name in first} == first
        assert second.keys() - first.keys() == {"prefill-1"}
        assert shown("up", file)["stop"] == ["prefill-1"]
        assert "\n#   stop prefill-1\n" in pdserve("up", file, "--dry-run")[1]
        assert pdserve("up", file)[0] == 0
        assert pids(deployment) == first
        assert "pdserve up would change nothing" in pdserve("render", file)[1]
    assert "change" not in json.loads(pdserve("up", file, "--dry-run", "--json")[1])


def test_what_needs_replace_is_shown_with_it(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    with up(file, pdserve_home) as deployment:
        deployment.wait_for("phase", phase="ready")
        other = ("--set", "decode.args.max-num-seqs=3")
        assert shown("up", file, *other)["restart"] == ["decode-0"]
        assert "#   restart decode-0: only with --replace" in pdserve("up", file, *other, "--dry-run")[1]
        assert "#   restart decode-0\n" in pdserve("up", file, *other, "--dry-run", "--replace")[1]
