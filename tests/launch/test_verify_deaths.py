"""What `verify` prints of a process that dies while it proves."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.launch.deployment import assert_nothing_left, pdserve, recipe, up

pytestmark = pytest.mark.process


def test_a_death_during_the_proofs_is_named_beside_the_proof_that_failed(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        port = deployment.run.read_plan().process("decode-0").ports["http"]
        changed = httpx.post(f"http://127.0.0.1:{port}/fake/script", json={"die_at": "request"}, trust_env=False)
        assert changed.status_code == 200
        code, output = pdserve("verify", "--json")
        assert code == 6
        report, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
        assert report["meanwhile"][0].startswith("decode-0 died: exited with code 1 after ")
        assert f"| meanwhile: {report['meanwhile'][0]}" in output
        deployment.command.finish()
    assert_nothing_left(deployment)


@pytest.mark.full
def test_a_failure_without_a_death_has_no_such_line(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path, decode__env={"FAKE_WRONG_KV": "1"}), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        code, output = pdserve("verify", "--json")
        assert code == 6
        assert '"meanwhile": []' in output
        assert "meanwhile:" not in output
