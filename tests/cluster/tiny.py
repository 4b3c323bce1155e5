"""`recipes/tiny-cpu.yaml` over nodes: real engines, which take longer to start than fake ones, and what `verify` proves
of them."""

from __future__ import annotations

import json

from tests.cluster.deployments import Deployment
from tests.cluster.waiting import wait_until
from tests.launch.deployment import REPOSITORY

RECIPE = REPOSITORY / "recipes/tiny-cpu.yaml"
START_SECONDS = 900
PATIENT = {"heartbeat_seconds": 30, "agent_lease_seconds": 60, "engine_seconds": START_SECONDS}
"""Timeouts of recipes whose engines are real and whose tests are of other things than a node that is lost: engines that
load or compute beside other tests can keep an agent from its core, or from its pages, for five seconds."""
PROOFS = ("endpoints", "requests", "transfer", "stored", "output", "reload", "clean")


def until_ready(up: Deployment, name: str) -> None:
    up.name = name

    def over() -> bool:
        printed = f"\n{up.printed()}"
        return any(end in printed for end in ("serving tiny at", "\nerror: ", "deployment is draining"))

    wait_until("ready", over, START_SECONDS, why=up.printed)
    assert "serving tiny at" in up.printed(), up.printed()


def assert_all_proven(up: Deployment) -> None:
    """`pdserve verify`, called where its key is, proves all that it can prove of this recipe."""
    done = up.lab.pdserve(up.state().host, "verify", up.name, "--json")
    assert done.returncode == 0, done.stdout + done.stderr + up.printed()
    report = json.loads(done.stdout)
    assert {proof["name"]: proof["status"] for proof in report["proofs"]} == dict.fromkeys(PROOFS, "proven"), (
        done.stdout
    )
